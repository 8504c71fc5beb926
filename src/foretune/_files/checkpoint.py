"""Checkpoints of a run, on Orbax: save as it proceeds, continue from the last complete one.

A checkpoint holds everything that decides how the run continues, its last record, a description of
what it belongs to, and digests of all of it. One that cannot be read, or whose digests are wrong, is
set aside with a warning for the one before it; one that belongs to another run is refused. A disk that
fails is neither: its error passes on, and everything stays where it is.

The folder `foretune_12` is the checkpoint of step 12, the file `foretune.records` has the records
before. What has another name is not foretune's: it is neither read nor removed.
"""

import contextlib
import hashlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from .._outer.callbacks import Callback, _writable_folder, as_path
from .._outer.run import DIGEST, digest_of, numbers
from .._problem.checks import check_count, describe, named_leaves
from .files import FolderLock, RunError, set_aside
from .records import Records

PREFIX = "foretune"  # of the names of checkpoints: the mark by which they are known


class Checkpoint(Callback):
    """Saves the run every few steps, and resumes it when the directory holds one.

    Args:
        directory: where the checkpoints are; made if need be.
        every: the steps between two of them. The first step and the last are saved, too.
        keep: how many are kept.

    Each is a folder `foretune_<step>`, and `foretune.records` has the history; other files and folders
    in the directory are left alone. A checkpoint that is damaged is renamed, not removed, and the run
    resumes from the one before it.

    A resumed run repeats the evaluation it was in, and continues as if it had never stopped: its
    results are the same to the bit on the same machine. The directory of a run with other shapes,
    another start, other data, other constraints, other constants of the tuner or another kind of
    optimizer is refused with a `ValueError`. What cannot be compared is yours to keep as it was: the
    functions (loss, objective, `evaluate`), the data of a stream or of `batches(step)`, the engine and
    the outer optimizer's constants (a run that diverged may continue with smaller steps).
    Arrays are saved whole, so a run may continue with another number of devices or processes (then to
    rounding, not to the bit).

    >>> import foretune as ft
    >>> checkpoint = ft.Checkpoint("runs/clean", every=10)
    """

    resumes = True

    def __init__(self, directory: str | Path, every: int = 1, keep: int = 2):
        check_count(every, f"Checkpoint(every={every})")
        check_count(keep, f"Checkpoint(keep={keep})")
        self.directory, self.every, self.keep = (
            as_path(directory, "Checkpoint").absolute(),
            every,
            keep,
        )
        self._lock = FolderLock(self.directory)
        self._records = Records(self.directory / f"{PREFIX}.records")
        self._manager: Any = None
        self._saved: int | None = None
        self._belongs_to: dict[str, str] = {}

    def start(self, run: Any) -> None:
        """Resume the run, if the directory holds one."""
        import orbax.checkpoint as ocp

        _writable_folder(self.directory)
        self._belongs_to = _description(run)
        options = ocp.CheckpointManagerOptions(
            step_prefix=PREFIX, max_to_keep=self.keep, enable_async_checkpointing=False
        )
        with contextlib.ExitStack() as stack:
            if jax.process_index() == 0:  # the processes of one run share the folder
                stack.enter_context(self._lock)
            manager = ocp.CheckpointManager(self.directory, options=options)
            stack.callback(manager.close)
            self._saved = self._resume(manager, run)
            stack.pop_all()  # it stays open until `end`
        self._manager = manager

    def _resume(self, manager: Any, run: Any) -> int | None:
        """Resume from the newest checkpoint that is sound, and return its step.

        Better from one before records that are damaged, which then are made again, where there is one.
        """
        steps, sound = sorted(manager.all_steps(), reverse=True), None
        for step in steps:
            try:
                arrays, history = self._read(manager, step, run)
            except (_AnotherRun, MemoryError):
                raise
            except Exception as error:
                if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                    raise
                _read_through(self._folder(step))  # raises where the disk is to blame
                warnings.warn(
                    f"the checkpoint of step {step} in {self.directory} cannot be used "
                    f"({type(error).__name__}: {error!s:.200}) and is passed over.",
                    stacklevel=2,
                )
                continue
            if None not in history:
                sound = step, arrays, history
                break
            warnings.warn(
                f"the checkpoint of step {step} in {self.directory} lacks records: "
                f"{history.count(None)} of {len(history)} in {self._records.path.name} cannot be read.",
                stacklevel=2,
            )
            sound = sound or (step, arrays, history)
        if steps and sound is None:
            raise RunError(
                f"none of the checkpoints in {self.directory} can be read; they are left as they "
                "are. Give another directory, or remove this one to start anew."
            )
        begun = not steps and self._records.path.exists()  # and killed before its first save
        step, arrays, history = sound or (-1, [], [])
        kept = [record for record in history if record is not None]
        with _one_process_at_work() as at_work:
            if at_work:
                for newer in (newer for newer in steps if newer > step and sound):
                    set_aside(self._folder(newer))
                if None in history:
                    self._give_up([i for i, record in enumerate(history) if record is None])
                self._records.begin(kept[: len(kept) - 1])
        if sound is None:
            run.begun = begun
            return None
        manager.reload()
        if run.steps is not None and step > run.steps:
            warnings.warn(
                f"the run in {self.directory} has done {step} steps already, more than the {run.steps} "
                "that are asked for: it is shown as it is.",
                stacklevel=4,
            )
        run.resume(step, _with_arrays(run.carry, arrays), kept)
        return step

    def _give_up(self, lost: list[int]) -> None:
        """Continue without some records, since no checkpoint is from before them."""
        path = self._records.path
        where = f"the file is kept as {set_aside(path).name}" if path.exists() else "it is gone"
        shown = ", ".join(map(str, lost[:5])) + ", ..." * (len(lost) > 5)
        warnings.warn(
            f"records {shown} (counted from 0) of {path} are missing in the history from here on; "
            f"{where}. Everything else is as it was.",
            stacklevel=4,
        )

    def _folder(self, step: int) -> Path:
        return self.directory / f"{PREFIX}_{step}"

    def step(self, run: Any) -> None:
        """Save the first step, and every few."""
        if run.step % self.every == 0 or self._saved is None:
            self._save(run)

    def end(self, run: Any) -> None:
        """Save the last state."""
        with contextlib.ExitStack() as stack, contextlib.closing(self._manager):
            stack.callback(self._lock.release)
            self._save(run)
        self._manager = None

    def _save(self, run: Any) -> None:
        import orbax.checkpoint as ocp

        # A step that could not be evaluated is not saved: the run can continue before it, otherwise.
        if run.step == self._saved or not run.whole:
            return
        self._saved = run.step  # a save that is interrupted is not tried again
        arrays = numbers(run.carry)
        # The last record comes with the checkpoint: callbacks after this one may add to it.
        before = max(run.finished - 1, 0)
        if jax.process_index() == 0:
            self._records.append(run.history[self._records.count : before])
        meta = {
            "step": run.step,
            "records": before,
            "last": run.history[before : run.finished],
            "belongs_to": self._belongs_to,
            "arrays": digest_of(arrays),
        }
        parts = ocp.args.Composite(
            carry=ocp.args.StandardSave({str(i): a for i, a in enumerate(arrays)}),
            meta=ocp.args.JsonSave({"digest": _digest_of_text(meta), **meta}),
        )
        try:
            self._manager.save(run.step, args=parts, force=True)
        except (OSError, ValueError) as error:  # TensorStore's are ValueErrors, and name no folder
            raise OSError(
                f"the checkpoint of step {run.step} could not be saved in {self.directory} "
                f"({error!s:.200}). Those before it are whole: make room, and run again."
            ) from error

    def _read(self, manager: Any, step: int, run: Any) -> tuple[list[Any], list[Any]]:
        """Return the arrays and the history, or raise where they are not what was saved.

        A record that is not what was saved is None.
        """
        import orbax.checkpoint as ocp

        only_meta = ocp.args.Composite(meta=ocp.args.JsonRestore())
        meta = dict(manager.restore(step, args=only_meta)["meta"])
        if meta.pop("digest") != _digest_of_text(meta) or meta["step"] != step:
            raise ValueError("its metadata are not those that were saved")
        if meta["belongs_to"] != self._belongs_to:
            raise _AnotherRun(self.directory, meta["belongs_to"], self._belongs_to)
        like = {str(i): a for i, a in enumerate(numbers(run.carry))}
        both = ocp.args.Composite(carry=ocp.args.StandardRestore(like))
        restored = manager.restore(step, args=both)["carry"]
        arrays = [np.asarray(restored[str(i)]) for i in range(len(like))]
        if digest_of(arrays) != meta["arrays"]:
            raise ValueError("its arrays are not those that were saved")
        return arrays, [*self._records.read(meta["records"]), *meta["last"]]


class _AnotherRun(ValueError):
    """The folder belongs to another run."""

    def __init__(self, directory: Path, theirs: dict[str, str], ours: dict[str, str]):
        # The settings of the run first, then the leaves of its carry, whose paths begin with a dot.
        names = sorted({*theirs, *ours}, key=lambda name: (name.startswith("."), name))
        lines = [
            f"  the {name}: other numbers"
            if ours.get(name, "").startswith(DIGEST)
            else f"  {name}: {theirs.get(name, 'absent')} there, {ours.get(name, 'absent')} here"
            for name in names
            if theirs.get(name) != ours.get(name)
        ]
        rest = [f"  ... and {len(lines) - 8} more"] if len(lines) > 8 else []
        super().__init__(
            f"{directory} holds another run, with another problem or optimizer. What differs:\n"
            + "\n".join(lines[:8] + rest)
            + "\nGive another directory, or remove this one."
        )


def _with_arrays(carry: Any, arrays: list[Any]) -> Any:
    """Return the carry with other arrays in the places of its own, on the same devices."""
    remaining = iter(arrays)

    def replaced(leaf):
        if not eqx.is_array(leaf):
            return leaf
        array = jnp.asarray(next(remaining))
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
        spread = isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1
        return jax.device_put(array, leaf.sharding) if spread else array

    return jax.tree.map(replaced, carry)


def _digest_of_text(content: dict[str, Any]) -> str:
    """Return a digest of what JSON makes of a dict, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def _one_process_at_work() -> Iterator[bool]:
    """Let the first process change the folder when all have read it, and the others wait."""
    several = jax.process_count() > 1
    if several:
        multihost_utils.sync_global_devices("foretune: checkpoints are read")
    yield jax.process_index() == 0
    if several:
        multihost_utils.sync_global_devices("foretune: damaged checkpoints are set aside")


def _read_through(folder: Path) -> None:
    """Read every file, so that an error of the disk shows as the OSError it is."""
    for path in folder.rglob("*"):
        if not path.is_dir():
            with path.open("rb") as file:
                while file.read(1 << 20):
                    pass


def _description(run: Any) -> dict[str, str]:
    leaves = {path: describe(leaf) for path, leaf in named_leaves(run.carry, "").items()}
    return leaves | run.fingerprint()

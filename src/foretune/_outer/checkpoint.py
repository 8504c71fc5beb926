"""The callback that saves a run, and resumes it, on Orbax.

The folder `foretune_12` is the checkpoint of step 12: the arrays that decide how the run continues, the
number of its records, what it belongs to, and digests of all of it. The file `foretune.records` has the
records. The errors of a disk that fails pass on, and everything stays where it is.
"""

import contextlib
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from .._files.digests import as_numbers, digest, digest_of_json, is_digest, with_numbers
from .._files.files import RunError, as_path, locked, make_folder, remove_unfinished, set_aside
from .._files.records import Record, Records
from .._problem.checks import check_count, describe, named_leaves
from .._problem.warn import warn
from .callbacks import Callback
from .run import Run

PREFIX = "foretune"  # of the names of checkpoints: the mark by which they are known


class Checkpoint(Callback):
    """Saves the run every few steps, and resumes it when the directory holds one.

    Args:
        directory: where the checkpoints are; made if need be.
        every: the steps between two of them. The first step and the last are saved, too.
        keep: how many are kept.

    A damaged checkpoint is renamed, and the run resumes from the one before. Other files stay.

    A resumed run continues as if it had never stopped, the same to the bit on the same machine (to
    rounding with another number of devices or processes). A run that is over returns the same result
    again; with more `steps`, or without the `stop` rule that ended it, it continues. Another run's
    directory (other shapes, start, data, constraints, constants of the tuner or kind of optimizer) is
    refused with a `ValueError`. What cannot be compared is yours to keep as it was: the functions, the
    data of a stream, the engine and the outer optimizer's constants.

    >>> import foretune as ft
    >>> checkpoint = ft.Checkpoint("runs/clean", every=10)
    """

    resumes = coarse = True

    def __init__(self, directory: str | Path, every: int = 1, keep: int = 2):
        check_count(every, f"Checkpoint(every={every!r})")
        check_count(keep, f"Checkpoint(keep={keep!r})")
        self.directory = as_path(directory, "Checkpoint").absolute()
        self.every, self.keep = every, keep
        self._records = Records(self.directory / f"{PREFIX}.records")
        self._open = contextlib.ExitStack()
        self._saved: int | None = None  # the last step that was

    def start(self, run: Run) -> None:
        import orbax.checkpoint as ocp

        leaves = {path: describe(leaf) for path, leaf in named_leaves(run.carry, "").items()}
        self._belongs_to, self._saved = leaves | run.fingerprint(), None
        make_folder(self.directory)
        options = ocp.CheckpointManagerOptions(
            step_prefix=PREFIX, max_to_keep=self.keep, enable_async_checkpointing=False
        )
        with contextlib.ExitStack() as stack:
            if jax.process_index() == 0:  # the processes of one run share the folder
                stack.enter_context(locked(self.directory))
                remove_unfinished(self.directory, lambda name: name == self._records.path.name)
            self._manager = ocp.CheckpointManager(self.directory, options=options)
            stack.callback(self._manager.close)
            self._resume(run)
            self._open = stack.pop_all()

    def step(self, run: Run) -> None:
        due = self._saved is None or run.step // self.every > self._saved // self.every
        if due or run.stopped is not None:
            self._save(run)

    def end(self, run: Run) -> None:
        try:
            self._save(run)
        finally:
            self._open.close()

    def _resume(self, run: Run) -> None:
        """Move the run to the newest checkpoint that is sound, without records that are lost."""
        place = run.carry, run.best
        like, steps = as_numbers(place), sorted(self._manager.all_steps(), reverse=True)
        found = next(filter(None, (self._read_or_warn(step, like) for step in steps)), None)
        if steps and found is None:
            what = f"none of the checkpoints in {self.directory} can be read"
            raise RunError(f"{what}; they are left as they are. Give another directory.")
        meta, arrays = found or ({"step": 0, "records": 0}, [])
        run.begun = not steps and self._records.path.exists()
        history = self._records.read(meta["records"])
        kept = [record for record in history if record is not None]
        _wait_for_all("checkpoints are read")
        if jax.process_index() == 0:
            for newer in (step for step in steps if step > meta["step"]):
                set_aside(self._folder(newer))
            if lost := [i for i, record in enumerate(history) if record is None]:
                self._warn_of_lost(lost)
            self._records.begin(kept)
        _wait_for_all("damaged checkpoints are set aside")
        self._manager.reload()
        if found is None:
            return
        step = self._saved = meta["step"]
        if run.steps is not None and step > run.steps:
            warn(f"the run in {self.directory} has done {step} steps already, not {run.steps}.")
        carry, best = with_numbers(place, arrays)
        run.resume(step, carry, best, kept)
        if run.rules and meta["steps"] == run.steps:
            run.ended = meta["stopped"]

    def _read_or_warn(self, step: int, like: list[np.ndarray]) -> tuple[Record, list] | None:
        """Return what `_read` does, or None, with a warning, where the checkpoint is damaged."""
        try:
            return self._read(step, like)
        except (RunError, MemoryError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise
            _read_through(self._folder(step))  # raises where the disk is to blame
            what = f"the checkpoint of step {step} in {self.directory}"
            warn(f"{what} cannot be used ({type(error).__name__}: {error!s:.200}) and is skipped.")
            return None

    def _read(self, step: int, like: list[np.ndarray]) -> tuple[Record, list[np.ndarray]]:
        """Return what was saved with a checkpoint, and its arrays, or raise."""
        import orbax.checkpoint as ocp

        only_meta = ocp.args.Composite(meta=ocp.args.JsonRestore())
        meta = dict(self._manager.restore(step, args=only_meta)["meta"])
        if meta.pop("digest") != digest_of_json(meta) or meta["step"] != step:
            raise ValueError("its metadata are not those that were saved")
        if meta["belongs_to"] != self._belongs_to:
            raise _another_run(self.directory, meta["belongs_to"], self._belongs_to)
        named = {str(i): array for i, array in enumerate(like)}
        only_arrays = ocp.args.Composite(carry=ocp.args.StandardRestore(named))
        restored = self._manager.restore(step, args=only_arrays)["carry"]
        arrays = [np.asarray(restored[name]) for name in named]
        if digest(arrays) != meta["arrays"]:
            raise ValueError("its arrays are not those that were saved")
        return meta, arrays

    def _warn_of_lost(self, lost: list[int]) -> None:
        """Warn of records that cannot be read, and keep the file that had them."""
        path = self._records.path
        where = f"the file is kept as {set_aside(path).name}" if path.exists() else "it is gone"
        listed = ", ".join(map(str, lost[:5])) + ", ..." * (len(lost) > 5)
        warn(f"records {listed} (counted from 0) of {path} are missing in the history; {where}.")

    def _folder(self, step: int) -> Path:
        return self.directory / f"{PREFIX}_{step}"

    def _save(self, run: Run) -> None:
        """Save the run; of the records, those that are new are written."""
        import orbax.checkpoint as ocp

        if run.step == self._saved or not run.whole:
            return
        self._saved = run.step  # a save that is interrupted is not tried again
        records, arrays = run.records, as_numbers((run.carry, run.best))
        if jax.process_index() == 0:
            self._records.append(records[self._records.count :])
        meta = {
            "step": run.step,
            "records": len(records),
            "steps": run.steps,
            "stopped": run.ended,
            "belongs_to": self._belongs_to,
            "arrays": digest(arrays),
        }
        named = {str(i): array for i, array in enumerate(arrays)}
        as_json = ocp.args.JsonSave({"digest": digest_of_json(meta), **meta})
        parts = ocp.args.Composite(carry=ocp.args.StandardSave(named), meta=as_json)
        try:
            self._manager.save(run.step, args=parts, force=True)
        except (OSError, ValueError) as error:  # TensorStore's are ValueErrors, and name no folder
            what = f"the checkpoint of step {run.step} could not be saved in {self.directory}"
            rest = "Those before it are whole: make room, and run again."
            raise OSError(f"{what} ({error!s:.200}). {rest}") from error


def _another_run(folder: Path, theirs: dict[str, str], ours: dict[str, str]) -> RunError:
    # The settings of the run first, then the leaves of its carry, whose paths begin with a dot.
    names = sorted({*theirs, *ours}, key=lambda name: (name.startswith("."), name))
    lines = [
        f"  the {name}: other numbers"
        if is_digest(ours.get(name, ""))
        else f"  {name}: {theirs.get(name, 'absent')} there, {ours.get(name, 'absent')} here"
        for name in names
        if theirs.get(name) != ours.get(name)
    ]
    what = f"{folder} holds another run, with another problem or optimizer. What differs:"
    rest = [f"  ... and {len(lines) - 8} more"] if len(lines) > 8 else []
    return RunError("\n".join([what, *lines[:8], *rest, "Give another directory, or remove it."]))


def _wait_for_all(until: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"foretune: {until}")


def _read_through(folder: Path) -> None:
    """Read every file, so that an error of the disk shows as the OSError it is."""
    for path in (path for path in folder.rglob("*") if not path.is_dir()):
        with path.open("rb") as file:
            while file.read(1 << 20):
                pass

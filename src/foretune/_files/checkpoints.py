"""The checkpoints of a run in a folder, on Orbax.

The folder `foretune_12` is the checkpoint of step 12: the arrays that decide how the run continues, the
number of its records, what it belongs to, and digests of all of it. The file `foretune.records` has the
records. Other names are left alone.

A checkpoint that is damaged is set aside with a warning for the one before it; one that belongs to
another run is refused. The errors of a disk that fails pass on, and everything stays where it is.
"""

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from .._problem.warn import warn
from .digests import digest, is_digest
from .files import RunError, locked, make_folder, remove_unfinished, set_aside
from .records import Record, Records

if TYPE_CHECKING:
    from orbax.checkpoint import CheckpointManager

PREFIX = "foretune"  # of the names of checkpoints: the mark by which they are known


class SavedRun(NamedTuple):
    """What a checkpoint holds."""

    step: int
    arrays: list[np.ndarray]
    history: list[Record]
    steps: int | None  # that were asked for
    stopped: str | None  # the rule's reason, where one has ended the run


class Checkpoints:
    """The checkpoints of one run, which has the folder for itself while it is open."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep
        self.begun = False  # whether a run was killed here before it saved anything
        self._records = Records(folder / f"{PREFIX}.records")
        self._open = contextlib.ExitStack()

    def open(self, belongs_to: dict[str, str], like: list[np.ndarray]) -> SavedRun | None:
        """Take the folder, and return the newest checkpoint that is sound.

        `belongs_to` tells this run from others; `like` has arrays of the shapes that are saved.
        """
        import orbax.checkpoint as ocp

        make_folder(self.folder)
        self._belongs_to = belongs_to
        options = ocp.CheckpointManagerOptions(
            step_prefix=PREFIX, max_to_keep=self.keep, enable_async_checkpointing=False
        )
        with contextlib.ExitStack() as stack:
            if jax.process_index() == 0:  # the processes of one run share the folder
                stack.enter_context(locked(self.folder))
                remove_unfinished(self.folder, lambda name: name == self._records.path.name)
            manager = ocp.CheckpointManager(self.folder, options=options)
            stack.callback(manager.close)
            found = self._newest(manager, like)
            self._manager, self._open = manager, stack.pop_all()
        return found

    def close(self) -> None:
        """Let others have the folder."""
        self._open.close()

    def _newest(self, manager: "CheckpointManager", like: list[np.ndarray]) -> SavedRun | None:
        """Return the newest that is sound, without records that are lost."""
        steps = sorted(manager.all_steps(), reverse=True)
        found = (self._read_or_warn(manager, step, like) for step in steps)
        run, count = next((saved for saved in found if saved is not None), (None, 0))
        if steps and run is None:
            raise RunError(
                f"none of the checkpoints in {self.folder} can be read; they are left as they are. "
                "Give another directory."
            )
        self.begun = not steps and self._records.path.exists()
        history = self._records.read(count)
        kept = [record for record in history if record is not None]
        lost = [i for i, record in enumerate(history) if record is None]
        _wait_for_all("checkpoints are read")
        if jax.process_index() == 0:  # the others wait
            for newer in (step for step in steps if run and step > run.step):
                set_aside(self._folder(newer))
            if lost:
                self._warn_of_lost(lost)
            self._records.begin(kept)
        _wait_for_all("damaged checkpoints are set aside")
        manager.reload()
        return run and run._replace(history=kept)

    def _read_or_warn(
        self, manager: "CheckpointManager", step: int, like: list[np.ndarray]
    ) -> tuple[SavedRun, int] | None:
        """Return what `_read` does, or None, with a warning, where the checkpoint is damaged."""
        try:
            return self._read(manager, step, like)
        except (RunError, MemoryError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise
            _read_through(self._folder(step))  # raises where the disk is to blame
            warn(
                f"the checkpoint of step {step} in {self.folder} cannot be used "
                f"({type(error).__name__}: {error!s:.200}) and is skipped."
            )
            return None

    def _read(
        self, manager: "CheckpointManager", step: int, like: list[np.ndarray]
    ) -> tuple[SavedRun, int]:
        """Return a checkpoint without its records, and how many these are, or raise."""
        import orbax.checkpoint as ocp

        only_meta = ocp.args.Composite(meta=ocp.args.JsonRestore())
        meta = dict(manager.restore(step, args=only_meta)["meta"])
        if meta.pop("digest") != _digest_of(meta) or meta["step"] != step:
            raise ValueError("its metadata are not those that were saved")
        if meta["belongs_to"] != self._belongs_to:
            raise _another_run(self.folder, meta["belongs_to"], self._belongs_to)
        named = {str(i): array for i, array in enumerate(like)}
        only_arrays = ocp.args.Composite(carry=ocp.args.StandardRestore(named))
        restored = manager.restore(step, args=only_arrays)["carry"]
        arrays = [np.asarray(restored[name]) for name in named]
        if digest(arrays) != meta["arrays"]:
            raise ValueError("its arrays are not those that were saved")
        return SavedRun(step, arrays, [], meta["steps"], meta["stopped"]), meta["records"]

    def _warn_of_lost(self, lost: list[int]) -> None:
        """Warn of records that cannot be read, and keep the file that had them."""
        path = self._records.path
        where = f"the file is kept as {set_aside(path).name}" if path.exists() else "it is gone"
        shown = ", ".join(map(str, lost[:5])) + ", ..." * (len(lost) > 5)
        warn(f"records {shown} (counted from 0) of {path} are missing in the history; {where}.")

    def _folder(self, step: int) -> Path:
        return self.folder / f"{PREFIX}_{step}"

    def save(self, run: SavedRun) -> None:
        """Save the run; of the records, those that are new are written."""
        import orbax.checkpoint as ocp

        if jax.process_index() == 0:
            self._records.append(run.history[self._records.count :])
        meta = {
            "step": run.step,
            "records": len(run.history),
            "steps": run.steps,
            "stopped": run.stopped,
            "belongs_to": self._belongs_to,
            "arrays": digest(run.arrays),
        }
        named = {str(i): array for i, array in enumerate(run.arrays)}
        as_json = ocp.args.JsonSave({"digest": _digest_of(meta), **meta})
        parts = ocp.args.Composite(carry=ocp.args.StandardSave(named), meta=as_json)
        try:
            self._manager.save(run.step, args=parts, force=True)
        except (OSError, ValueError) as error:  # TensorStore's are ValueErrors, and name no folder
            raise OSError(
                f"the checkpoint of step {run.step} could not be saved in {self.folder} "
                f"({error!s:.200}). Those before it are whole: make room, and run again."
            ) from error


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
    rest = [f"  ... and {len(lines) - 8} more"] if len(lines) > 8 else []
    return RunError(
        f"{folder} holds another run, with another problem or optimizer. What differs:\n"
        + "\n".join(lines[:8] + rest)
        + "\nGive another directory, or remove this one."
    )


def _digest_of(meta: dict[str, object]) -> str:
    return digest(json.dumps(meta, sort_keys=True))


def _wait_for_all(until: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"foretune: {until}")


def _read_through(folder: Path) -> None:
    """Read every file, so that an error of the disk shows as the OSError it is."""
    for path in (path for path in folder.rglob("*") if not path.is_dir()):
        with path.open("rb") as file:
            while file.read(1 << 20):
                pass

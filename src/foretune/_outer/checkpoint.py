"""The callback that saves a run, and resumes it."""

from pathlib import Path

from .._files.checkpoints import Checkpoints, SavedRun
from .._files.digests import as_numbers, with_numbers
from .._files.files import as_path
from .._problem.checks import check_count, describe, named_leaves
from .._problem.warn import warn
from .callbacks import Callback
from .run import Run


class Checkpoint(Callback):
    """Saves the run every few steps, and resumes it when the directory holds one.

    Args:
        directory: where the checkpoints are; made if need be.
        every: the steps between two of them. The first step and the last are saved, too.
        keep: how many are kept.

    Each is a folder `foretune_<step>`, and `foretune.records` has the history; other files are left
    alone. A checkpoint that is damaged is renamed, and the run resumes from the one before it.

    A resumed run continues as if it had never stopped, the same to the bit on the same machine (to
    rounding with another number of devices or processes). A run that is over returns the same result
    again; with more `steps`, or without the `stop` rule that ended it, it continues. The directory of a
    run with other shapes, another start, other data, constraints, constants of the tuner or kind of
    optimizer is refused with a `ValueError`. What cannot be compared is yours to keep as it was: the
    functions, the data of a stream, the engine and the outer optimizer's constants.

    >>> import foretune as ft
    >>> checkpoint = ft.Checkpoint("runs/clean", every=10)
    """

    resumes = coarse = True

    def __init__(self, directory: str | Path, every: int = 1, keep: int = 2):
        check_count(every, f"Checkpoint(every={every!r})")
        check_count(keep, f"Checkpoint(keep={keep!r})")
        self.directory, self.every = as_path(directory, "Checkpoint").absolute(), every
        self._files = Checkpoints(self.directory, keep)
        self._saved: int | None = None

    def start(self, run: Run) -> None:
        place = run.carry, run.best
        leaves = {path: describe(leaf) for path, leaf in named_leaves(run.carry, "").items()}
        saved = self._files.open(leaves | run.fingerprint(), as_numbers(place))
        run.begun, self._saved = self._files.begun, None
        if saved is None:
            return
        self._saved = saved.step
        if run.steps is not None and saved.step > run.steps:
            warn(
                f"the run in {self.directory} has done {saved.step} steps already, not {run.steps}."
            )
        carry, best = with_numbers(place, saved.arrays)
        run.resume(saved.step, carry, best, saved.history)
        if run.rules and saved.steps == run.steps:
            run.ended = saved.stopped

    def step(self, run: Run) -> None:
        due = self._saved is None or run.step // self.every > self._saved // self.every
        if due or run.stopped is not None:
            self._save(run)

    def end(self, run: Run) -> None:
        try:
            self._save(run)
        finally:
            self._files.close()

    def _save(self, run: Run) -> None:
        if run.step == self._saved or not run.whole:
            return
        self._saved = run.step  # a save that is interrupted is not tried again
        arrays = as_numbers((run.carry, run.best))
        self._files.save(SavedRun(run.step, arrays, run.records, run.steps, run.ended))

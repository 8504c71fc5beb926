"""Hyperparameters that go to 0: learning rates, which end a run, and regularisers, which warn."""

import warnings

import jax
import numpy as np
from jaxtyping import PyTree

from .._files.records import Record
from .._outer.run import Run
from .._problem.checks import check_count
from .constants import REGULARISERS

GONE = 1e-3  # a regulariser below this share of its start has gone


class Vanished:
    """Stop real-time tuning when a hyperparameter has stayed at 0, or close to it.

    A learning rate that has gone to 0 leaves the model and Z as they are, while the other
    hyperparameters continue to drift: the training is over.

    Args:
        name: the top-level name of the hyperparameter, a learning rate in general.
        below: what counts as 0, relative to the largest value it has had in the run.
        patience: for how many windows in a row.

    >>> import foretune as ft
    >>> rule = ft.Vanished("lr")
    """

    def __init__(self, name: str, below: float | int = 1e-4, patience: int = 10):
        check_count(patience, f"Vanished(patience={patience!r})")
        if not below >= 0:
            raise ValueError(f"Vanished(below={below!r}): it must be a number, 0 or more.")
        self.name, self.below, self.patience = name, below, patience
        self._history: list[Record] = []  # whose values these are; each run has its own
        self._values: list[float] = []
        self._peak = 0.0

    def __call__(self, run: Run) -> str | None:
        """Return the reason, or None."""
        if self.name not in run.record.get("hparams", {}):
            raise ValueError(
                f"Vanished({self.name!r}) names no hyperparameter of the run's records, which have "
                f"{sorted(run.record.get('hparams', {}))}."
            )
        if run.history is not self._history:
            self._history, self._values, self._peak = run.history, [], 0.0
        for record in run.history[len(self._values) :]:
            self._values.append(_largest(record["hparams"][self.name]))
            self._peak = max(self._peak, self._values[-1])
        recent = self._values[-self.patience :]
        gone = len(recent) == self.patience and max(recent) <= self.below * self._peak
        return f"{self.name} has gone to 0" if gone and self._peak > 0 else None


def warn_of_vanished(first: PyTree, ran: PyTree, hparams: PyTree, *, stacklevel: int = 1) -> None:
    """Warn where a regulariser has gone to 0 in a window.

    Args:
        first: the hyperparameters that the run began with, by name.
        ran: those that the window ran with.
        hparams: those after it.
        stacklevel: of the warning.
    """
    if not all(isinstance(part, dict) for part in (first, ran, hparams)):
        return
    for name in REGULARISERS & set(hparams):
        began, was, now = (_largest(part[name]) for part in (first, ran, hparams))
        if now < GONE * began <= was:
            warnings.warn(
                f"hparams[{name!r}] has gone from {began:.3g} to {now:.3g}. Real-time tuning sees the "
                "validation error of the next few windows, in which a regulariser costs and does not "
                "pay yet: leave it at a sensible value, outside of the hyperparameters, or tune it "
                "over whole trainings, with `minimize`.",
                RuntimeWarning,
                stacklevel=stacklevel + 1,
            )


def _largest(tree: PyTree) -> float:
    """Return the largest magnitude."""
    return max(float(np.max(np.abs(leaf))) for leaf in jax.tree.leaves(tree))

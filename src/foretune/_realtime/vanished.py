"""The rule that ends a run whose learning rate has gone to 0."""

import jax
import numpy as np

from .._files.records import Record
from .._outer.run import Run
from .._problem.checks import check_count


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
        names = sorted(run.record.get("hparams", {}))
        if self.name not in names:
            raise ValueError(f"Vanished({self.name!r}) names no hyperparameter of {names}.")
        if run.history is not self._history:
            self._history, self._values, self._peak = run.history, [], 0.0
        for record in run.history[len(self._values) :]:
            leaves = jax.tree.leaves(record["hparams"][self.name])
            self._values.append(max(float(np.max(np.abs(leaf))) for leaf in leaves))
            self._peak = max(self._peak, self._values[-1])
        recent = self._values[-self.patience :]
        gone = len(recent) == self.patience and max(recent) <= self.below * self._peak
        return f"{self.name} has gone to 0" if gone and self._peak > 0 else None

"""Stopping rules: functions of a run that return a reason to stop, or None."""

import numpy as np
from jaxtyping import PyTree

from .._files.records import Record
from .._problem.checks import check_count
from .run import Run


class NoImprovement:
    """Stop when the best score is `patience` steps old.

    >>> import foretune as ft
    >>> rule = ft.NoImprovement(patience=20)
    """

    def __init__(self, patience: int):
        check_count(patience, f"NoImprovement(patience={patience!r})")
        self.patience = patience

    def __call__(self, run: Run) -> str | None:
        """Return the reason, or None."""
        age = run.step - int(run.best.step)
        return f"no improvement over {age} steps" if age >= self.patience else None


class SmallGradient:
    """Stop when the norm of the hypergradient is below `norm`.

    It is the gradient in the hyperparameters themselves, before any projection: at an optimum on
    the border of a constraint it need not be small.

    >>> import foretune as ft
    >>> rule = ft.SmallGradient(1e-4)
    """

    def __init__(self, norm: float | int):
        self.norm = _checked(norm, f"SmallGradient(norm={norm!r})")

    def __call__(self, run: Run) -> str | None:
        """Return the reason, or None."""
        norm = run.record["gradient_norm"]
        return f"hypergradient norm {norm:.2g} < {self.norm:g}" if norm < self.norm else None


class TimeLimit:
    """Stop after this many seconds of wall-clock time, counted from this call (or its resumption).

    >>> import foretune as ft
    >>> rule = ft.TimeLimit(600.0)
    """

    pauses = True  # a run that it ended continues when it is called again

    def __init__(self, seconds: float | int):
        self.seconds = _checked(seconds, f"TimeLimit(seconds={seconds!r})")

    def __call__(self, run: Run) -> str | None:
        """Return the reason, or None."""
        return f"{self.seconds:g} seconds are over" if run.seconds >= self.seconds else None


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
        if not isinstance(name, str):
            raise ValueError(f"Vanished(name={name!r}): the name of a hyperparameter, a string.")
        self.name, self.patience = name, patience
        self.below = _checked(below, f"Vanished(below={below!r})")
        self._history: list[Record] | None = None  # whose sizes these are; each run has its own
        self._sizes: list[float] = []
        self._peak = 0.0

    def __call__(self, run: Run) -> str | None:
        """Return the reason, or None."""
        if self.name not in run.record.get("hparams", {}):
            raise ValueError(
                f"Vanished({self.name!r}) names no hyperparameter of the run's records, which have "
                f"{sorted(run.record.get('hparams', {}))}."
            )
        if run.history is not self._history:
            self._history, self._sizes, self._peak = run.history, [], 0.0
        for record in run.history[len(self._sizes) :]:
            size = max(np.max(np.abs(leaf)) for leaf in _leaves(record["hparams"][self.name]))
            self._sizes.append(float(size))
            self._peak = max(self._peak, float(size))
        recent = self._sizes[-self.patience :]
        gone = len(recent) == self.patience and max(recent) <= self.below * self._peak
        return f"{self.name} has gone to 0" if gone and self._peak > 0 else None


def _checked(number: float | int, given: str) -> float | int:
    """Return the number, or raise unless it is one that a rule can compare with."""
    real = isinstance(number, int | float | np.integer | np.floating)
    if isinstance(number, bool) or not real or not number >= 0:
        raise ValueError(f"{given}: it must be a number, 0 or more.")
    return number


def _leaves(tree: PyTree) -> list[np.ndarray]:
    if isinstance(tree, dict):
        return [leaf for part in tree.values() for leaf in _leaves(part)]
    return [np.asarray(tree)]

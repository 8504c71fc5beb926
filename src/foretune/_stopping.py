"""Stopping rules: functions of a run that return a reason to stop, or None."""

from typing import Any

import numpy as np


class NoImprovement:
    """Stop when the best score is `patience` steps old.

    >>> import foretune as ft
    >>> rule = ft.NoImprovement(patience=20)
    """

    def __init__(self, patience: int):
        if patience < 1:
            raise ValueError(f"NoImprovement(patience={patience}): one step or more.")
        self.patience = patience

    def __call__(self, run: Any) -> str | None:
        """Return the reason, or None."""
        age = run.step - int(np.max(run.best.step))
        return f"no improvement over {age} steps" if age >= self.patience else None


class SmallGradient:
    """Stop when the norm of the hypergradient is below `norm`.

    It is the gradient in the hyperparameters themselves, before any projection: at an optimum on
    the border of a constraint it need not be small.

    >>> import foretune as ft
    >>> rule = ft.SmallGradient(1e-4)
    """

    def __init__(self, norm: float):
        self.norm = norm

    def __call__(self, run: Any) -> str | None:
        """Return the reason, or None."""
        norm = float(np.max(run.record["gradient_norm"]))
        return f"hypergradient norm {norm:.2g} < {self.norm:g}" if norm < self.norm else None


class TimeLimit:
    """Stop after so many seconds of wall-clock time, counted from this call (or its resumption).

    >>> import foretune as ft
    >>> rule = ft.TimeLimit(600.0)
    """

    def __init__(self, seconds: float | int):
        self.seconds = seconds

    def __call__(self, run: Any) -> str | None:
        """Return the reason, or None."""
        return f"{self.seconds:g} seconds are over" if run.seconds >= self.seconds else None

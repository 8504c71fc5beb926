"""Stopping rules: functions of a run that return a reason to stop, or None."""

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
        age = run.step - int(run.best.step)
        return f"no improvement over {age} steps" if age >= self.patience else None


class SmallGradient:
    """Stop when the norm of the hypergradient is below `norm`.

    It is that before any projection: at an optimum on the border of a constraint it may be large.

    >>> import foretune as ft
    >>> rule = ft.SmallGradient(1e-4)
    """

    def __init__(self, norm: float | int):
        self.norm = _checked(norm, f"SmallGradient(norm={norm!r})")

    def __call__(self, run: Run) -> str | None:
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
        return f"{self.seconds:g} seconds are over" if run.seconds >= self.seconds else None


def _checked(number: float | int, given: str) -> float | int:
    if not number >= 0:
        raise ValueError(f"{given}: it must be 0 or more.")
    return number

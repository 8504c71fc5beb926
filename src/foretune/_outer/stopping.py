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


class TimeLimit:
    """Stop after this many seconds of wall-clock time, counted from this call (or its resumption).

    >>> import foretune as ft
    >>> rule = ft.TimeLimit(600.0)
    """

    pauses = True  # a run that it ended continues when it is called again

    def __init__(self, seconds: float | int):
        if not seconds >= 0:
            raise ValueError(f"TimeLimit(seconds={seconds!r}): it must be 0 or more.")
        self.seconds = seconds

    def __call__(self, run: Run) -> str | None:
        return f"{self.seconds:g} seconds are over" if run.seconds >= self.seconds else None

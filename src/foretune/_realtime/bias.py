"""The bias of real-time tuning, measured as it runs."""

import contextlib

from jaxtyping import PyTree

from .._diagnostics.bias import BiasReport, hypergradient_bias
from .._engines.base import AbstractEngine, check_engine
from .._engines.nonfinite import NonFiniteError
from .._outer.callbacks import Callback
from .._outer.run import Run
from .._problem.arguments import copied
from .._problem.checks import check_count
from .run import RealTimeRun
from .window import RealTimeState


class Bias(Callback):
    """Measures the bias of real-time tuning as it goes: `bias_cosine` in the run's records.

    Args:
        every: the windows between two measurements.
        windows: over how many of the last windows the exact hypergradient is taken.
        engine: how; `Forward()` by default.

    It costs an exact hypergradient over these windows and a copy of the state before them. Windows that
    are rolled back, or have skipped minibatches, are left out. Put it before `History` in the list.
    The reports are in the attribute `reports`, by step.

    >>> import foretune as ft
    >>> bias = ft.Bias(every=50, windows=5)
    """

    def __init__(self, every: int = 50, windows: int = 5, engine: AbstractEngine | None = None):
        check_count(every, f"Bias(every={every})")
        check_count(windows, f"Bias(windows={windows})")
        if windows > every:
            raise ValueError(f"Bias(every={every}, windows={windows}): no more windows than that.")
        check_engine(engine)
        self.every, self.windows, self.engine = every, windows, engine
        self.reports: dict[int, BiasReport] = {}
        self._before: RealTimeState | None = None
        self._kept: list[PyTree] = []

    def start(self, run: Run) -> None:
        """Begin from a state that is kept, where the first measurement needs it."""
        if not isinstance(run, RealTimeRun):
            raise TypeError("Bias measures real-time tuning: give it to `RealTime.run`.")
        self._keep(run)

    def step(self, run: Run) -> None:
        """Keep the window; measure when it is time."""
        assert isinstance(run, RealTimeRun)
        if run.record["rolled_back"] or run.record["skipped"]:
            self._before = None
        if self._before is not None:
            self._kept.append(run.window)
        if run.step % self.every == 0 and self._before is not None:
            seen = self._before, self._kept, run.validation, run.log
            with contextlib.suppress(NonFiniteError):  # then there is nothing to compare with
                report = hypergradient_bias(run.tuner, *seen, self.engine)
                self.reports[run.step] = report
                run.record["bias_cosine"] = report.cosine
            self._before = None
        self._keep(run)

    def _keep(self, run: RealTimeRun) -> None:
        if (run.step + self.windows) % self.every == 0:
            self._before, self._kept = copied(run.carry), []

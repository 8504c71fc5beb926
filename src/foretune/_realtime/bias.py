"""How far the hypergradient of real-time tuning can be trusted.

The real-time hypergradient is that of a constant lambda, carried over windows in which lambda changed
(and, with a discount, forgotten on the way). Over the last k windows the exact one can be had: train
again from the state before them, at the current lambda throughout, and differentiate. Their cosine is
1 where real-time updates go the exact way, and below 0 where they go against it.
"""

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._engines.base import check_engine
from .._engines.forward import Forward
from .._engines.nonfinite import NonFiniteError
from .._outer.callbacks import Callback
from .._problem.arguments import copied
from .._problem.batches import FullBatch, Minibatches
from .._problem.checks import check_count, describe
from .tuner import RealTime
from .window import RealTimeState


class BiasReport(NamedTuple):
    """The real-time and the exact hypergradient, and how they agree."""

    cosine: float
    """Of the two, all hyperparameters together."""
    by_leaf: PyTree
    """Of each leaf alone: for a scalar, whether the signs agree."""
    realtime: PyTree
    """The real-time hypergradient."""
    exact: PyTree
    """The exact one, over the last windows at the current hyperparameters."""


def hypergradient_bias(
    tuner: Any, before: Any, windows: list[Any], validation: PyTree, log: dict, engine: Any = None
) -> BiasReport:
    """Compare a real-time hypergradient with the exact one over the last windows.

    Args:
        tuner: the `RealTime`.
        before: the tuner's state before these windows (a copy of it, with `RealTime(donate=True)`).
        windows: the windows since then, in order.
        validation: the validation batch of the last update.
        log: the log of the last update.
        engine: `Forward()` by default; `Reverse()` where hyperparameters are many.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> tuner = ft.RealTime(
    ...     ft.Training(lambda w, h, x: jnp.mean((w - x) ** 2), lambda h: optax.sgd(h["lr"])),
    ...     objective=lambda state, h, x: jnp.mean((state.params - x) ** 2))
    >>> before = tuner.init(jnp.array(0.0), {"lr": jnp.array(0.01)})
    >>> window = jnp.ones((5, 2))
    >>> after, log = tuner.update(before, window, jnp.ones(2))
    >>> ft.hypergradient_bias(tuner, before, [window], jnp.ones(2), log).cosine
    1.0
    """
    _check_arguments(tuner, before, windows, log)
    check_engine(engine)
    problem = tuner.problem(before, _joined(windows), validation)
    _, exact, _ = (engine or Forward())(problem, log["hparams"])
    realtime = jax.tree.map(jnp.asarray, log["hypergradient"])
    leaves = jax.tree.map(lambda a, b: _cosine([a], [b]), realtime, exact)
    whole = _cosine(jax.tree.leaves(realtime), jax.tree.leaves(exact))
    return BiasReport(whole, leaves, realtime, exact)


class Bias(Callback):
    """Measures the bias of real-time tuning as it goes: `bias_cosine` in the run's records.

    Args:
        every: the windows between two measurements.
        windows: over how many of the last windows the exact hypergradient is taken.
        engine: how; `Forward()` by default.

    A measurement costs an exact hypergradient over these windows, and a copy of the state before
    them. Windows that are rolled back, or have skipped minibatches, are left out. Put it before
    `History` in the list, so that the cosine is written too. The reports are in the attribute
    `reports`, by step.

    >>> import foretune as ft
    >>> bias = ft.Bias(every=50, windows=5)
    """

    def __init__(self, every: int = 50, windows: int = 5, engine: Any = None):
        check_count(every, f"Bias(every={every})")
        check_count(windows, f"Bias(windows={windows})")
        if windows > every:
            raise ValueError(f"Bias(every={every}, windows={windows}): no more windows than that.")
        check_engine(engine)
        self.every, self.windows, self.engine = every, windows, engine
        self.reports: dict[int, BiasReport] = {}
        self._before: Any = None
        self._kept: list[Any] = []

    def start(self, run: Any) -> None:
        """Begin from a state that is kept, where the first measurement needs it."""
        if not hasattr(run.carry, "state"):
            raise TypeError("Bias measures real-time tuning: give it to `RealTime.run`.")
        self._keep(run)

    def step(self, run: Any) -> None:
        """Keep the window; measure when it is time."""
        record = run.record
        if record["rolled_back"] or record["skipped"]:
            self._before = None  # what is compared would not be the training that counts
        if self._before is not None:
            self._kept.append(run.window)
        if run.step % self.every == 0 and self._before is not None:
            with contextlib.suppress(NonFiniteError):  # then there is nothing to compare with
                report = hypergradient_bias(
                    run.tuner, self._before, self._kept, run.validation, run.log, self.engine
                )
                self.reports[run.step] = report
                run.record["bias_cosine"] = report.cosine
            self._before = None
        self._keep(run)

    def _keep(self, run: Any) -> None:
        if (run.step + self.windows) % self.every == 0:
            self._before, self._kept = copied(run.carry.state), []


def _check_arguments(tuner: Any, before: Any, windows: Any, log: Any) -> None:
    if not isinstance(tuner, RealTime):
        raise TypeError(
            f"hypergradient_bias takes a `foretune.RealTime` as its tuner, got {describe(tuner)}."
        )
    if not isinstance(before, RealTimeState):
        raise TypeError(
            "hypergradient_bias takes as `before` the `RealTimeState` that `init` or `update` "
            f"returned, got {describe(before)}."
        )
    if not isinstance(windows, list | tuple) or not windows:
        raise TypeError(
            "hypergradient_bias takes a list of windows, one or more of them; got "
            f"{describe(windows) if not isinstance(windows, list | tuple) else 'none'}."
        )
    if not isinstance(log, dict) or not {"hparams", "hypergradient"} <= set(log):
        raise TypeError(
            "hypergradient_bias takes the log that the last `update` returned, with its 'hparams' and "
            f"'hypergradient'; got {describe(log)}."
        )


def _joined(windows: list[Any]) -> Any:
    first = windows[0]
    if isinstance(first, FullBatch):
        return FullBatch(first.data, sum(window.steps for window in windows))
    if isinstance(first, Minibatches):
        return first.at(jnp.concatenate([window.indices for window in windows]))
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *windows)


def _cosine(*vectors: list[Any]) -> float:
    a, b = (np.concatenate([np.ravel(x).astype(np.float64) for x in v]) for v in vectors)
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    return round(float(np.dot(a, b)) / float(norms), 12) if norms > 0 else float("nan")

"""How far the hypergradient of real-time tuning can be trusted.

It is that of a constant lambda, carried over windows in which lambda changed. Over the last k windows
the exact one can be had: train again from the state before them, at the current lambda throughout.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .._engines.base import AbstractEngine, check_engine
from .._engines.forward import Forward
from .._problem.batches import FullBatch, Minibatches
from .._problem.checks import describe
from .._problem.problem import Problem


@runtime_checkable
class Tuner(Protocol):
    """What is needed of a `RealTime`."""

    def problem(self, state: PyTree, window: PyTree, validation: PyTree) -> Problem:
        """Return the training over a window as a problem of its own, from this state on."""
        ...


class BiasReport(NamedTuple):
    """The real-time and the exact hypergradient, and their cosines: of all leaves, and by leaf."""

    cosine: float
    by_leaf: PyTree
    realtime: PyTree
    exact: PyTree


def hypergradient_bias(
    tuner: Tuner,
    before: PyTree,
    windows: Sequence[PyTree],
    validation: PyTree,
    log: dict[str, PyTree],
    engine: AbstractEngine | None = None,
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
    if not isinstance(windows, list | tuple) or not windows:
        got = describe(windows) if not isinstance(windows, list | tuple) else "none"
        raise TypeError(f"hypergradient_bias takes a list of windows; got {got}.")
    if not isinstance(log, dict) or not {"hparams", "hypergradient"} <= set(log):
        wanted = "the log of the last `update`, with its 'hparams' and 'hypergradient'"
        raise TypeError(f"hypergradient_bias takes {wanted}; got {describe(log)}.")
    check_engine(engine)
    problem = tuner.problem(before, _joined(windows), validation)
    _, exact, _ = (engine or Forward())(problem, log["hparams"])
    realtime = jax.tree.map(jnp.asarray, log["hypergradient"])
    leaves = jax.tree.map(lambda a, b: _cosine([a], [b]), realtime, exact)
    whole = _cosine(jax.tree.leaves(realtime), jax.tree.leaves(exact))
    return BiasReport(whole, leaves, realtime, exact)


def _joined(windows: Sequence[PyTree]) -> PyTree:
    first = windows[0]
    if isinstance(first, FullBatch):
        return FullBatch(first.data, sum(window.steps for window in windows))
    if isinstance(first, Minibatches):
        return first.at(jnp.concatenate([window.indices for window in windows]))
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *windows)


def _cosine(*vectors: list[Array]) -> float:
    a, b = (np.concatenate([np.ravel(x).astype(np.float64) for x in v]) for v in vectors)
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    return round(float(np.dot(a, b)) / float(norms), 12) if norms > 0 else float("nan")

"""Errors where the start, the data or the training of a real-time run is not finite."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._engines.nonfinite import NonFiniteError, first_nonfinite, origin_of
from .._files.digests import on_host
from .._problem.checks import describe
from .._problem.training import TrainState
from .state import RealTimeState, TunerSettings

GROWN = "With Z = 0 the window is finite: Z had grown before. Give `RealTime` a smaller `discount`."
KEPT = "The state before the window is kept, in the attribute `state` of this error."


def without_infinities(train: PyTree) -> PyTree:
    """Return the training state with 0 for an optimizer's infinite accumulators: they are no fault."""

    def tolerated(leaf):
        return jnp.where(jnp.isinf(leaf), 0, leaf) if eqx.is_inexact_array(leaf) else leaf

    begun = jax.tree.map(tolerated, train)
    return begun._replace(params=train.params) if isinstance(train, TrainState) else begun


def check_start(train: PyTree, hparams: PyTree) -> None:
    """Raise where the initial parameters or hyperparameters are not finite."""
    name = "" if isinstance(train, TrainState) else "params"  # their paths: `params['w']` in both
    if found := _fault_of_start(train, hparams, name):
        raise NonFiniteError(
            f"not finite: {found.removeprefix('.')} Every window from there would be rolled back."
        )


def fault(
    settings: TunerSettings, state: RealTimeState, window: PyTree, validation: PyTree
) -> NonFiniteError:
    """Return the error for a window that failed, from the state before it."""
    where = f"window {int(state.window)} (counted from 0)"
    if found := _fault_of_start(state.train, state.hparams, "state.train"):
        error = NonFiniteError(f"not finite: what {where} begins with. {found}")
    else:
        problem = settings.problem(state.train, window, validation)
        ones = jax.tree.map(jnp.ones_like, state.hparams)
        origin = origin_of(problem, state.hparams, ones, otherwise=GROWN)
        error = NonFiniteError(f"not finite: {where}. {origin} {KEPT}")
    error.state = state
    return error


def _fault_of_start(train: PyTree, hparams: PyTree, name: str) -> str | None:
    return _entries(hparams, "hparams") or _entries(without_infinities(train), name)


def _entries(tree: PyTree, name: str) -> str | None:
    """Return which leaf of a tree is not finite, and in how many entries, or None."""
    found = first_nonfinite(on_host(tree), name)
    if found is None:
        return None
    path, leaf, where = found
    return f"{path} ({describe(leaf)}) is not finite in {where.sum()} of {where.size} entries."

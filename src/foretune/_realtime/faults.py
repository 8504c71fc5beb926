"""What is said where the start, the data or the training of a real-time run is not finite."""

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Int, PyTree

from .._engines.nonfinite import NonFiniteError, first_nonfinite, origin_of
from .._files.digests import on_host
from .._problem.checks import describe, named_leaves
from .._problem.training import TrainState
from .._problem.warn import warn
from .state import RealTimeState, TunerSettings

GROWN = "With Z = 0 the window is finite: Z had grown before. Give `RealTime` a smaller `discount`."
KEPT = "The state before the window is kept, in the attribute `state` of this error."


def without_infinities(train: PyTree) -> PyTree:
    """Return the training state with 0 for an optimizer's infinite accumulators: they are no fault."""
    floats, rest = eqx.partition(train, eqx.is_inexact_array)
    begun = eqx.combine(jax.tree.map(lambda x: jnp.where(jnp.isinf(x), 0, x), floats), rest)
    return begun._replace(params=train.params) if isinstance(train, TrainState) else begun


def check_start(train: PyTree, hparams: PyTree) -> None:
    """Raise where the initial parameters or hyperparameters are not finite."""
    name = "" if isinstance(train, TrainState) else "params"  # their paths: `params['w']` in both
    if found := _fault_of_start(train, hparams, name):
        raise NonFiniteError(f"not finite: {found.removeprefix('.')} Each window would roll back.")


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
    """Return which leaf is not finite, and in how many entries, or None."""
    for tree, root in ((hparams, "hparams"), (without_infinities(train), name)):
        if found := first_nonfinite(on_host(tree), root):
            path, leaf, where = found
            entries = f"{where.sum()} of {where.size} entries"
            return f"{path} ({describe(leaf)}) is not finite in {entries}."
    return None


class Dropped(NamedTuple):
    """What there is to say of a window in which something is not finite."""

    news: Bool[Array, ""]  # whether there is anything: one number to read
    window: Int[Array, ""]
    nonfinite: Int[Array, " leaves"]  # as in the log
    failed: Bool[Array, ""] | bool = False  # whether more than a derivative is not finite


def warn_of_dropped(state: RealTimeState, log: dict[str, PyTree]) -> None:
    """Warn, the first time, where a derivative was dropped in the window that ended at `state`."""
    if isinstance(log["dropped"], Tracer) or log["dropped"]:
        first = log["dropped"] & (state.dropped == 1)
        tell(names_of(state.train), Dropped(first, state.window - 1, log["nonfinite"]))


def names_of(train: PyTree) -> list[str]:
    """Return the paths of the leaves that have a derivative."""
    return list(named_leaves(eqx.filter(train, eqx.is_inexact_array), "state.train"))


def tell(names: list[str], dropped: Dropped, where: str = "") -> None:
    """Warn; in a program that is being traced, the warning comes when it runs."""
    say = functools.partial(_warn, names, where)
    if isinstance(dropped.news, Tracer):
        lax.cond(dropped.news, lambda: jax.debug.callback(say, *dropped), lambda: None)
    else:
        say(*dropped)


def _warn(
    names: list[str], where: str, news: Array, window: Array, nonfinite: Array, failed: Array | bool
) -> None:
    if not news:
        return
    what = "the hypergradient is not finite, by the error's own derivative or an overflow"
    if steps := {name: int(i) for name, i in zip(names, nonfinite, strict=True) if i >= 0}:
        leaf = min(steps, key=lambda name: steps[name])
        more = f" (and of {len(steps) - 1} more leaves)" if len(steps) > 1 else ""
        what = (
            f"the derivative of {leaf}{more} in the hyperparameters is not finite, first after "
            f"minibatch {steps[leaf]} of the window (counted from 0)"
        )
    what += (
        ", and counts as 0. Adam's derivative is infinite where a gradient is exactly 0: give it "
        "`eps_root=1e-8`. This is said once; `state.dropped` counts such windows."
    )
    if failed:
        what = f"the data, the error or the weights are not finite{where}: it is left out."
    warn(f"window {int(window)} (counted from 0): {what}", RuntimeWarning)

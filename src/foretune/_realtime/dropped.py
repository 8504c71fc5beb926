"""The warning of a derivative that is not finite, and was dropped."""

import functools
import warnings
from typing import NamedTuple

import equinox as eqx
import jax
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Int, PyTree

from .._problem.checks import named_leaves
from .state import RealTimeState


class Dropped(NamedTuple):
    """What a warning of a dropped derivative says."""

    first: Bool[Array, ""]  # whether it is the first
    window: Int[Array, ""]
    nonfinite: Int[Array, " leaves"]  # as in the log


def warn_of_dropped(state: RealTimeState, log: dict[str, PyTree], *, stacklevel: int) -> None:
    """Warn, the first time, where a derivative was dropped in the window that ended at `state`."""
    if isinstance(log["dropped"], Tracer) or log["dropped"]:
        first = log["dropped"] & (state.dropped == 1)
        dropped = Dropped(first, state.window - 1, log["nonfinite"])
        tell(state.train, dropped, stacklevel=stacklevel + 1)


def tell(train: PyTree, dropped: Dropped, *, stacklevel: int = 1) -> None:
    """Warn; in a program that is being traced, the warning comes when it runs."""
    names = list(named_leaves(eqx.filter(train, eqx.is_inexact_array), "state.train"))
    if not isinstance(dropped.first, Tracer):
        _warn(names, *dropped, stacklevel=stacklevel + 1)
        return
    say = lambda: jax.debug.callback(functools.partial(_warn, names), *dropped)  # noqa: E731
    lax.cond(dropped.first, say, lambda: None)


def _warn(
    names: list[str], first: Array, window: Array, nonfinite: Array, stacklevel: int = 1
) -> None:
    if not first:
        return
    steps = {name: int(i) for name, i in zip(names, nonfinite, strict=True) if i >= 0}
    what, where = "the hypergradient", "by the error's own derivative or an overflow"
    if steps:
        leaf = min(steps, key=lambda name: steps[name])
        more = f" (and of {len(steps) - 1} more leaves)" if len(steps) > 1 else ""
        what = f"the derivative of {leaf}{more} in the hyperparameters"
        where = f"first after minibatch {steps[leaf]} of the window (counted from 0)"
    warnings.warn(
        f"window {int(window)} (counted from 0): {what} is not finite, {where}, and counts as 0. "
        "Adam's derivative is infinite where a gradient is exactly 0: give it `eps_root=1e-8`. This is "
        "said once; `state.dropped` counts such windows.",
        RuntimeWarning,
        stacklevel=stacklevel + 1,
    )

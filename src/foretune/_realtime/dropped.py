"""Warnings of windows in which something is not finite."""

import functools
from typing import NamedTuple

import equinox as eqx
import jax
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Int, PyTree

from .._problem.checks import named_leaves
from .._problem.warn import warn
from .state import RealTimeState


class Dropped(NamedTuple):
    """What there is to say of a window."""

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
    if not isinstance(dropped.news, Tracer):
        _warn(names, where, *dropped)
        return
    say = lambda: jax.debug.callback(functools.partial(_warn, names, where), *dropped)  # noqa: E731
    lax.cond(dropped.news, say, lambda: None)


def _warn(
    names: list[str], where: str, news: Array, window: Array, nonfinite: Array, failed: Array | bool
) -> None:
    if not news:
        return
    steps = {name: int(i) for name, i in zip(names, nonfinite, strict=True) if i >= 0}
    what = "the hypergradient is not finite, by the error's own derivative or an overflow"
    if steps:
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

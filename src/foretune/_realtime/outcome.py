"""The end of a window: how it went, and what follows for the training and the hyperparameters.

    lambda <- P(lambda - step(grad E(s) Z + dE/dlambda))   where all went well,

and elsewhere what `Outcome` says. Pure functions, to be traced.
"""

import enum
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._engines.nonfinite import is_finite
from .._engines.products import error_gradients, inner_products, stack_columns
from .._outer.update import Outer, select
from .faults import without_infinities
from .state import RealTimeState, column_norms, directions_of
from .steps import Steps, WindowState

BACK_OFF = 0.5  # the relative step of the hyperparameters away from a window that is rolled back
SMALL = 0.02  # an error below this share of the first is not worth a rollback


class Outcome(enum.IntEnum):
    """How a window ended, as numbers that a program can compute."""

    STEPPED = 0  # the hyperparameters move down the hypergradient
    DROPPED = 1  # only the hypergradient is not finite: hyperparameters stay, Z begins at 0
    WORSE = 2  # the validation error rose too far: rolled back, away by the hypergradient
    DIVERGED = 3  # the training diverged: rolled back, away by the slope of the loss
    FAULT = 4  # something else is not finite, the data say: an error


class Evidence(NamedTuple):
    """What a window is judged by."""

    errors: tuple[Float[Array, ""], ...]  # at its end
    grad: PyTree  # the hypergradient
    norms: Float[Array, " m"]  # of the columns of Z
    sound: Bool[Array, ""]  # whether data and start are finite
    before: Float[Array, ""]  # the sum of the errors before it, where windows are rolled back
    first: Float[Array, ""]  # that before the first window


def finish(
    steps: Steps, end: WindowState, last: int | Int[Array, ""]
) -> tuple[RealTimeState, dict[str, PyTree], Bool[Array, ""]]:
    """Return the state after a window with this last minibatch, its log, and if it is a fault."""
    state, system = steps.state, steps.system
    end = end._replace(Z=stack_columns(end.Z))
    seen = gather(steps, end, last)
    outcome = judge(steps.settings.rollback, end, seen)
    stepped, fault = outcome == Outcome.STEPPED, outcome == Outcome.FAULT
    rolled_back = (outcome == Outcome.WORSE) | (outcome == Outcome.DIVERGED)
    dropped = (outcome == Outcome.DROPPED) | (stepped & jnp.any(end.nonfinite >= 0))
    value = system.value(seen.errors)
    outer = steps.settings.outer(state.hparams)
    before = state.hparams, state.opt_state
    hparams, opt_state = select(stepped, outer.update(*before, value, seen.grad), before)
    # Away from a divergence, down the loss's last slope; where there is none, towards 0.
    away = jax.tree.map(lambda slope, h: jnp.where(slope == 0, h, slope), end.slope, state.hparams)
    away = select(outcome == Outcome.DIVERGED, away, seen.grad)
    retreat = _back_off(outer, state.hparams, away)
    none = jax.tree.map(jnp.zeros_like, end.Z)
    new = RealTimeState(
        train=system.restore(select(rolled_back, system.initial(state.hparams), end.s)),
        hparams=select(rolled_back, retreat, hparams),
        Z=select(stepped, end.Z, none),
        opt_state=opt_state,
        window=state.window + 1,
        first=seen.first,
        highest=end.highest,
        skipped_last=end.skipped_last,
        dropped=state.dropped + dropped.astype(jnp.int32),
    )
    flat, unravel = ravel_pytree(state.hparams)
    log = {
        "value": value,
        "hypergradient": seen.grad,
        "hparams": state.hparams,
        "z_norm": jax.tree.map(optax.tree.norm, unravel(seen.norms.astype(flat.dtype))),
        "loss": _mean_loss(end),
        "rolled_back": rolled_back,
        "skipped": end.skipped,
        "nonfinite": jnp.where(dropped, end.nonfinite, -1),
        "dropped": dropped,
    }
    return select(fault, state._replace(Z=none), new), log, fault


def _mean_loss(end: WindowState) -> Float[Array, ""] | None:
    """Return the mean loss of the minibatches that count; where none does, the last one's."""
    if end.total is None or end.loss is None:
        return None
    counted = (end.done - end.skipped).astype(end.total.dtype)
    return jnp.where(counted > 0, end.total / jnp.maximum(counted, 1), end.loss)


def gather(steps: Steps, end: WindowState, last: int | Int[Array, ""]) -> Evidence:
    """Return what a window is judged by, grad f = grad E(s) Z + dE/dlambda above all."""
    system, state = steps.system, steps.state
    hparams, before = state.hparams, system.initial(state.hparams)
    directions, unravel = directions_of(hparams)
    errors, alpha, explicit = error_gradients(system, end.s, hparams)
    rows = inner_products((alpha, explicit), (end.Z, directions))
    rows = rows.astype(ravel_pytree(hparams)[0].dtype)
    batch = steps.problem.batches.batch(steps.entry(last))
    sound = is_finite((batch, without_infinities(state.train), hparams))
    if end.loss is not None:  # where no loss has ever been finite, it is not the hyperparameters
        sound &= jnp.isfinite(end.highest)
    was = first = state.first
    if steps.settings.rollback is not None:
        was = jax.tree.reduce(operator.add, system.errors(before, hparams))
        first = jnp.where(state.window == 0, jnp.abs(was), first).astype(first.dtype)
    grad, norms = system.gradient(jax.vmap(unravel)(rows)), column_norms(end.Z)
    return Evidence(errors, grad, norms, sound, was, first)


def judge(rollback: float | None, end: WindowState, seen: Evidence) -> Int[Array, ""]:
    """Return the window's `Outcome`."""
    trained = is_finite((seen.errors, end.s, end.total)) & ~end.spiked
    derived = is_finite((seen.grad, seen.norms))
    well = jnp.where(derived, Outcome.STEPPED, Outcome.DROPPED)
    otherwise = jnp.where(trained, well, Outcome.FAULT)
    if rollback is None:
        return otherwise
    now = jax.tree.reduce(operator.add, seen.errors)
    first = seen.first.astype(now.dtype)
    rise = (rollback - 1) * jnp.maximum(jnp.abs(seen.before), SMALL * first)
    worse = trained & (now > seen.before + rise)
    broken = jnp.isfinite(seen.before) & ~is_finite((seen.errors, end.s))
    diverged = ((broken | end.spiked) & seen.sound) | (worse & ~derived)
    after = jnp.where(diverged, Outcome.DIVERGED, otherwise)
    return jnp.where(worse & derived, Outcome.WORSE, after)


def _back_off(outer: Outer, hparams: PyTree, direction: PyTree) -> PyTree:
    """Return the hyperparameters after a relative step of BACK_OFF against the direction's signs."""

    def update(direction, state, u, *, scale, **_):
        scales = scale(u, jax.tree.map(jnp.zeros_like, u))
        return jax.tree.map(lambda r, d: -BACK_OFF * r * jnp.sign(d), scales, direction), state

    retreat = optax.GradientTransformationExtraArgs(lambda _: (), update)  # pyright: ignore
    finite = jax.tree.map(lambda d: jnp.where(jnp.isfinite(d), d, 0), direction)
    moved = Outer(retreat, outer.constraints).update(hparams, (), 0.0, finite)[0]

    def kept(new, old):  # a step to below the smallest normal number is not taken
        return jnp.where((jnp.abs(new) < jnp.finfo(new.dtype).tiny) & (old != 0), old, new)

    return jax.tree.map(kept, moved, hparams)

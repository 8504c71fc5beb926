"""The end of a window: how it went, and what follows for the training and the hyperparameters.

    lambda <- P(lambda - step(grad E(s) Z + dE/dlambda))   where all went well,

and elsewhere what `Outcome` says. Pure functions, to be traced.
"""

import enum
import operator

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


def finish(
    steps: Steps, end: WindowState, last: int | Int[Array, ""]
) -> tuple[RealTimeState, dict[str, PyTree], Bool[Array, ""]]:
    """Return the state after a window with this last minibatch, its log, and if it is a fault."""
    state, system = steps.state, steps.system
    hparams, began = state.hparams, system.initial(state.hparams)
    flat, unravel = ravel_pytree(hparams)
    end = end._replace(Z=stack_columns(end.Z))
    errors, alpha, explicit = error_gradients(system, end.s, hparams)
    rows = inner_products((alpha, explicit), (end.Z, directions_of(hparams)[0]))
    # grad f = grad E(s) Z + dE/dlambda, and what its window is judged by besides
    grad = system.gradient(jax.vmap(unravel)(rows.astype(flat.dtype)))
    norms, value = column_norms(end.Z), system.value(errors)
    sound = is_finite((steps.batch(last), without_infinities(state.train), hparams))
    if end.loss is not None:  # where no loss has ever been finite, it is not the hyperparameters
        sound &= jnp.isfinite(end.highest)
    derived, first, was = is_finite((grad, norms)), state.first, state.first
    if steps.settings.rollback is not None:
        was = jax.tree.reduce(operator.add, system.errors(began, hparams))
        first = jnp.where(state.window == 0, jnp.abs(was), first).astype(first.dtype)
    outcome = judge(steps.settings.rollback, end, errors, (was, first), sound, derived)
    stepped, fault = outcome == Outcome.STEPPED, outcome == Outcome.FAULT
    rolled_back = (outcome == Outcome.WORSE) | (outcome == Outcome.DIVERGED)
    dropped = (outcome == Outcome.DROPPED) | (stepped & jnp.any(end.nonfinite >= 0))
    outer, before = steps.settings.outer(hparams), (hparams, state.opt_state)
    after, opt_state = select(stepped, outer.update(*before, value, grad), before)
    # Away from a divergence, down the loss's last slope; where there is none, towards 0.
    away = jax.tree.map(lambda slope, h: jnp.where(slope == 0, h, slope), end.slope, hparams)
    away = select(outcome == Outcome.DIVERGED, away, grad)
    none = jax.tree.map(jnp.zeros_like, end.Z)
    new = RealTimeState(
        train=system.restore(select(rolled_back, began, end.s)),
        hparams=select(rolled_back, _back_off(outer, hparams, away), after),
        Z=select(stepped, end.Z, none),
        opt_state=opt_state,
        window=state.window + 1,
        first=first,
        highest=end.highest,
        skipped_last=end.skipped_last,
        dropped=state.dropped + dropped.astype(jnp.int32),
    )
    log = {
        "value": value,
        "hypergradient": grad,
        "hparams": hparams,
        "z_norm": jax.tree.map(optax.tree.norm, unravel(norms.astype(flat.dtype))),
        "loss": _mean_loss(end),
        "rolled_back": rolled_back,
        "skipped": end.skipped,
        "nonfinite": jnp.where(dropped, end.nonfinite, -1),
        "dropped": dropped,
    }
    return select(fault, state._replace(Z=none), new), log, fault


def judge(
    rollback: float | None,
    end: WindowState,
    errors: tuple[Float[Array, ""], ...],
    before: tuple[Float[Array, ""], Float[Array, ""]],
    sound: Bool[Array, ""],
    derived: Bool[Array, ""],
) -> Int[Array, ""]:
    """Return the window's `Outcome`.

    `before` are the errors before this window and before the first; `sound` is whether data and start
    are finite, `derived` whether the hypergradient is.
    """
    trained = is_finite((errors, end.s, end.total)) & ~end.spiked
    well = jnp.where(derived, Outcome.STEPPED, Outcome.DROPPED)
    otherwise = jnp.where(trained, well, Outcome.FAULT)
    if rollback is None:
        return otherwise
    now, (was, first) = jax.tree.reduce(operator.add, errors), before
    rise = (rollback - 1) * jnp.maximum(jnp.abs(was), SMALL * first.astype(now.dtype))
    worse = trained & (now > was + rise)
    broken = jnp.isfinite(was) & ~is_finite((errors, end.s))
    diverged = ((broken | end.spiked) & sound) | (worse & ~derived)
    after = jnp.where(diverged, Outcome.DIVERGED, otherwise)
    return jnp.where(worse & derived, Outcome.WORSE, after)


def _mean_loss(end: WindowState) -> Float[Array, ""] | None:
    """Return the mean loss of the minibatches that count; where none does, the last one's."""
    if end.total is None or end.loss is None:
        return None
    counted = (end.done - end.skipped).astype(end.total.dtype)
    return jnp.where(counted > 0, end.total / jnp.maximum(counted, 1), end.loss)


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

"""A window of real-time tuning: minibatches with Z carried along, then one step of lambda.

    for each minibatch:  s <- Phi(s, lambda),  Z <- A Z + B        (`make_step`)
    then:                lambda <- P(lambda - step(grad E(s) Z + dE/dlambda))   (`finish`)

All here are pure functions, to be traced; `RealTime` runs them over a window in one program, `tuned`
spreads them over calls. `_realtime.py` says what they compute and why.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._engines.nonfinite import is_finite
from .._engines.products import (
    Unstacked,
    error_gradients,
    inner_products,
    pushforward,
    stack_columns,
    unstack,
)
from .._outer.constraints import check_constraints
from .._outer.run import Outer
from .._problem.dynamics import Continued
from .._problem.problem import Problem
from .._problem.system import System, make_system

BACK_OFF = 0.5  # the relative step of the hyperparameters away from a window that diverged
SPIKE = 1.25  # a loss so many times what it was has spiked
SMALL = 0.02  # an error below this share of the first is not worth undoing a window for


class RealTimeState(NamedTuple):
    """Where a real-time run is: all that decides how it goes on."""

    train: PyTree
    """The state of the dynamics, a `TrainState` for `Training`."""
    hparams: PyTree[Float[Array, "..."]]
    """The current hyperparameters."""
    Z: PyTree
    """The derivative of the training state, its floating-point leaves with a leading axis of m."""
    opt_state: PyTree
    """The outer optimizer's state."""
    window: Int[Array, ""]
    """The number of windows done, undone ones included."""
    first: Float[Array, ""]
    """The error before the first window."""
    highest: Float[Array, ""]
    """The highest loss at the beginning of a window so far."""


class Settings(eqx.Module):
    """What a `RealTime` is made of, as its program sees it."""

    dynamics: Any
    objective: Any
    optimizer: optax.GradientTransformation
    constraints: Any
    discount: float = eqx.field(static=True)
    rollback: float | None = eqx.field(static=True)
    reset: int | None = eqx.field(static=True)
    z_cap: float | None = eqx.field(static=True)
    chunk: int | None = eqx.field(static=True)
    tangents: Any = eqx.field(static=True)
    mesh: Any = eqx.field(static=True)

    def problem(
        self, train: PyTree, window: PyTree, validation: PyTree, carried: tuple[str, ...] = ()
    ) -> Problem:
        """Return the training over a window as a problem of its own."""
        dynamics = Continued(self.dynamics, carried)
        return Problem(dynamics, self.objective, train, window, validation)


class Progressing(NamedTuple):
    """A window under way."""

    steps: Int[Array, ""]
    s: PyTree  # the training state, arrays only
    Z: PyTree  # its columns stacked, or `Unstacked`
    loss: Any  # of the last step, or None where the dynamics reports none
    slope: PyTree  # its derivative in lambda, the last that is finite
    total: Any  # the sum of the losses
    highest: Float[Array, ""]
    calm: Bool[Array, ""]  # whether the loss is finite and has not spiked


def run_window(
    tuner: Settings, state: RealTimeState, problem: Problem, count: Int[Array, ""]
) -> tuple[RealTimeState, dict[str, Any], Array]:
    """One window, then one step of the hyperparameters: a pure function, to be traced."""
    system = make_system(problem, state.hparams, whole=True)
    step = make_step(tuner, problem, system, state.hparams)
    start = begin(tuner, state)
    if tuner.chunk is None and tuner.mesh is None:
        start = start._replace(Z=unstack(start.Z))
    end = lax.while_loop(
        lambda window: (window.steps < count) & window.calm,
        lambda window: step(window, window.steps),
        start,
    )
    end = end._replace(Z=stack_columns(end.Z))
    return finish(tuner, state, problem, system, end, end.steps - 1)


def begin(tuner: Settings, state: RealTimeState) -> Progressing:
    """Return the window before its first minibatch."""
    s = eqx.filter(state.train, eqx.is_array)
    # What earlier windows did counts for less: they ran with other hyperparameters.
    Z = jax.tree.map(lambda z: tuner.discount * z, state.Z) if tuner.discount < 1 else state.Z
    if tuner.reset is not None:
        again = (state.window % tuner.reset == 0) & (state.window > 0)
        Z = _select(again, jax.tree.map(jnp.zeros_like, Z), Z)
    zero = jnp.zeros((), state.highest.dtype) if tuner.dynamics.reports_loss else None
    flat = jax.tree.map(jnp.zeros_like, state.hparams)
    count = jnp.zeros((), jnp.int32)
    return Progressing(count, s, Z, zero, flat, zero, state.highest, jnp.array(True))


def make_step(
    tuner: Settings, problem: Problem, system: System, hparams: PyTree
) -> Callable[[Progressing, Any], Progressing]:
    """Return the function that takes a window over its minibatch i."""
    directions, unravel = directions_of(hparams)
    rough = system
    if tuner.tangents is not None:
        low = Continued(tuner.dynamics.in_precision(tuner.tangents))
        rough = make_system(problem.replace(dynamics=low), hparams, whole=True)

    def advance(s, Z, x):  # s_t = Phi(s_{t-1}, lambda) and Z_t = A_t Z_{t-1} + B_t
        phi = lambda s, h: rough.step_and_loss(s, h, x)  # noqa: E731
        along = unstack(directions) if isinstance(Z, Unstacked) else directions
        after, tangents = pushforward(phi, (s, hparams), (Z, along), tuner.chunk)
        if isinstance(tangents, Unstacked):
            Z, d_losses = map(Unstacked, zip(*tangents.columns, strict=True))
            tangents = Z, stack_columns(d_losses)
        return after if rough is system else system.step_and_loss(s, hparams, x), tangents

    before = system.initial(hparams)

    def at_start(suspect, x):
        """The loss of a suspect minibatch before the window: is it the weights, or the batch?"""
        there = lambda: system.step_and_loss(before, hparams, x)[1]  # noqa: E731
        nothing = jax.eval_shape(there)
        return lax.cond(suspect, there, lambda: jnp.zeros(nothing.shape, nothing.dtype))

    def step(window: Progressing, i: Any) -> Progressing:
        x = _entry(system, i)
        (s, loss), (Z, d_loss) = advance(window.s, window.Z, x)
        after = window._replace(steps=window.steps + 1, s=s, Z=Z)
        if loss is None:
            return after
        loss = loss.astype(window.highest.dtype)
        first = (window.steps == 0) & (loss > window.highest) & jnp.isfinite(loss)
        highest = jnp.where(first, loss, window.highest)
        calm = jnp.isfinite(loss)
        if tuner.rollback is not None:
            suspect = ~(loss <= _raised(highest))
            calm &= ~suspect | (loss <= _raised(at_start(suspect, x)))
        flat, _ = ravel_pytree(hparams)
        slope = _select(is_finite(d_loss), unravel(d_loss.astype(flat.dtype)), window.slope)
        total = window.total + loss
        return after._replace(loss=loss, slope=slope, total=total, highest=highest, calm=calm)

    return step


def finish(
    tuner: Settings,
    state: RealTimeState,
    problem: Problem,
    system: System,
    end: Progressing,
    last: Any,
) -> tuple[RealTimeState, dict[str, Any], Array]:
    """Return the state after a window that began at `state`, the log, and whether it failed."""
    hparams, before = state.hparams, system.initial(state.hparams)
    directions, unravel = directions_of(hparams)
    errors, alpha, explicit = error_gradients(system, end.s, hparams)
    rows = inner_products((alpha, explicit), (end.Z, directions))  # grad E(s) Z + dE/dlambda
    flat, _ = ravel_pytree(hparams)
    grad = system.gradient(jax.vmap(unravel)(rows.astype(flat.dtype)))
    value = system.value(errors)
    norms = column_norms(end.Z)

    finite = is_finite((value, grad, norms, end.s, end.loss))
    sound = is_finite(problem.batches.batch(_entry(system, last)))  # else the data is at fault
    spiked = ~end.calm & sound
    first, diverged = state.first, jnp.array(False)
    if tuner.rollback is not None:
        was, now = (sum(E) for E in (system.errors(before, hparams), errors))
        first = jnp.where(state.window == 0, jnp.abs(was), first).astype(first.dtype)
        rise = (tuner.rollback - 1) * jnp.maximum(jnp.abs(was), SMALL * first)
        broken = jnp.isfinite(was) & sound & ~is_finite((errors, end.s))
        diverged = spiked | broken | (finite & (now > was + rise))
    fault = ~diverged & ~finite
    # Away from a divergence, down the loss's last slope; where there is none, towards 0.
    away = jax.tree.map(lambda slope, h: jnp.where(slope == 0, h, slope), end.slope, hparams)
    direction = _select(diverged & ~(finite & ~spiked), away, grad)

    outer = Outer(tuner.optimizer, check_constraints(tuner.constraints, hparams))
    stepped = outer.update(hparams, state.opt_state, value, direction)
    retreat = _back_off(outer, hparams, direction), state.opt_state
    moved = _select(diverged, retreat, stepped)
    new_hparams, opt_state = _select(fault, (hparams, state.opt_state), moved)

    Z, lost = end.Z, diverged | fault
    if tuner.z_cap is not None:
        Z = _scaled(Z, jnp.minimum(1.0, tuner.z_cap / jnp.maximum(norms, tuner.z_cap)))
    new = RealTimeState(
        system.restore(_select(lost, before, end.s)),
        new_hparams,
        _select(lost, jax.tree.map(jnp.zeros_like, Z), Z),
        opt_state,
        state.window + jnp.where(fault, 0, 1),
        first,
        jnp.where(fault, state.highest, end.highest),
    )
    log = {
        "value": value,
        "hypergradient": direction,
        "hparams": hparams,
        "z_norm": jax.tree.map(optax.tree.norm, unravel(norms.astype(flat.dtype))),
        "loss": None if end.total is None else end.total / end.steps,
        "undone": diverged,
    }
    return new, log, fault


def column_norms(Z: PyTree) -> Float[Array, " m"]:
    """Return the norms of the columns of Z, in single precision at least."""

    def norm(column):
        wide = jax.tree.map(lambda z: z.astype(jnp.promote_types(z.dtype, jnp.float32)), column)
        return optax.tree.norm(wide)

    return jax.vmap(norm)(Z)


def _raised(loss: Array) -> Array:
    return loss + (SPIKE - 1) * jnp.abs(loss)


def _entry(system: System, i: Any) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[i], system.xs)


def directions_of(hparams: PyTree) -> tuple[PyTree, Callable[[Array], PyTree]]:
    """Return the unit directions in lambda, and the function from a vector to hyperparameters."""
    flat, unravel = ravel_pytree(hparams)
    return jax.vmap(unravel)(jnp.eye(flat.size, dtype=flat.dtype)), unravel


def _select(condition: Array, yes: PyTree, no: PyTree) -> PyTree:
    def leaf(a, b):
        return jnp.where(condition, a, b) if eqx.is_array(b) else b

    return jax.tree.map(leaf, yes, no)


def _scaled(Z: PyTree, factors: Float[Array, " m"]) -> PyTree:
    return jax.tree.map(lambda z: z * factors.reshape(-1, *[1] * (z.ndim - 1)).astype(z.dtype), Z)


def _back_off(outer: Outer, hparams: PyTree, direction: PyTree) -> PyTree:
    """Return the hyperparameters after a relative step of BACK_OFF against the direction's signs."""

    def update(direction, state, u, *, reach, **_):
        size = reach(u, jax.tree.map(jnp.zeros_like, u))
        return jax.tree.map(lambda r, d: -BACK_OFF * r * jnp.sign(d), size, direction), state

    retreat = optax.GradientTransformationExtraArgs(lambda _: (), update)  # pyright: ignore
    finite = jax.tree.map(lambda d: jnp.where(jnp.isfinite(d), d, 0), direction)
    return Outer(retreat, outer.constraints).update(hparams, (), 0.0, finite)[0]

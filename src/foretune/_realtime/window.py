"""A window of real-time tuning: minibatches with Z carried along, then one step of lambda.

    for each minibatch:  s <- Phi(s, lambda),  Z <- A Z + B        (`make_step`)
    then:                lambda <- P(lambda - step(grad E(s) Z + dE/dlambda))   (`finish`)

All here are pure functions, to be traced; `RealTime` runs them over a window in one program, `tuned`
spreads them over calls. `tuner.py` says what they compute and why.
"""

import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._constraints.base import check_constraints
from .._engines.nonfinite import is_finite
from .._engines.products import (
    Unstacked,
    error_gradients,
    inner_products,
    pushforward,
    stack_columns,
    unstack,
)
from .._outer.update import Outer
from .._problem.checks import describe, named_leaves
from .._problem.dynamics import Continued
from .._problem.problem import Problem
from .._problem.system import System, make_system
from .._problem.training import TrainState
from .horizon import Course, decayed, is_tuning, moved_on, rates_of
from .tangents import part_of

BACK_OFF = 0.5  # the relative step of the hyperparameters away from a window that diverged
SPIKE = 1.25  # a loss this many times what it was has spiked
OUTLIER = 10.0  # a minibatch with this many times the highest loss is an outlier
DEAD = 0.1  # where the error depends on less than this share of the weights that it did, they have died
DYING = 0.6  # the same while the error has not fallen to half of the first
SMALL = 0.02  # an error below this share of the first is not worth undoing a window for


class RealTimeState(NamedTuple):
    """Where a real-time run is: all that decides how it continues."""

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
    passed: Bool[Array, ""]
    """Whether the last minibatch was an outlier, and passed over."""
    dropped: Int[Array, ""]
    """The number of windows in which a derivative was not finite, and was dropped."""
    alive: Int[Array, ""]
    """How many numbers of the training state the error depended on before the first window."""
    course: Course | None
    """How far a run with a horizon has come."""


class TunerSettings(eqx.Module):
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
    share: float = eqx.field(static=True)
    mesh: Any = eqx.field(static=True)
    horizon: int | None = eqx.field(static=True)
    rates: tuple[str, ...] | None = eqx.field(static=True)

    def problem(
        self, train: PyTree, window: PyTree, validation: PyTree, carried: tuple[str, ...] = ()
    ) -> Problem:
        """Return the training over a window as a problem of its own."""
        dynamics = Continued(self.dynamics, carried)
        return Problem(dynamics, self.objective, train, window, validation)


def number(name: str, value: Any, fits: Callable[[Any], bool], expected: str) -> float:
    """Return an option of `RealTime` that is a finite real number and fits, or raise."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"RealTime({name}=...) is {describe(value)}: {expected}.")
    if not (math.isfinite(value) and fits(value)):
        raise ValueError(f"RealTime({name}={value}): {expected}.")
    return float(value)


class Progressing(NamedTuple):
    """A window under way."""

    steps: Int[Array, ""]
    s: PyTree  # the training state, arrays only
    Z: PyTree  # its columns stacked, or `Unstacked`
    loss: Any  # of the last step, or None where the dynamics reports none
    slope: PyTree  # its derivative in lambda, the last that is finite
    total: Any  # the sum of the losses, without those of outliers
    highest: Float[Array, ""]
    calm: Bool[Array, ""]  # whether the loss is finite and has not spiked
    passed: Bool[Array, ""]  # whether the last minibatch was passed over
    # For each leaf of Z the first minibatch after which it was not finite, or -1.
    nonfinite: Int[Array, " leaves"]
    outliers: Int[Array, ""]  # how many have been


def run_window(
    tuner: TunerSettings, state: RealTimeState, problem: Problem, count: Int[Array, ""]
) -> tuple[RealTimeState, dict[str, Any], Array]:
    """One window, then one step of the hyperparameters: a pure function, to be traced."""
    system = make_system(problem, state.hparams, whole=True)

    def run(derive: bool) -> Progressing:
        step, start = make_step(tuner, problem, system, state, derive), begin(tuner, state)
        if derive and tuner.chunk is None and tuner.mesh is None:
            start = start._replace(Z=unstack(start.Z))
        end = lax.while_loop(
            lambda window: (window.steps < count) & window.calm,
            lambda window: step(window, window.steps),
            start,
        )
        return end._replace(Z=stack_columns(end.Z))

    end = if_tuning(tuner, state, lambda: run(True), lambda: run(False))
    return finish(tuner, state, problem, system, end, end.steps - 1, count)


def if_tuning(
    tuner: TunerSettings, state: RealTimeState, yes: Callable[[], Any], no: Callable[[], Any]
) -> Any:
    """Return the one, or, where the part of a horizon is over in which one tunes, the other."""
    if tuner.horizon is None or state.course is None:
        return yes()
    return lax.cond(is_tuning(state.course, tuner.horizon), yes, no)


def begin(tuner: TunerSettings, state: RealTimeState) -> Progressing:
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
    calm = jnp.array(True)
    sound = jnp.full(len(jax.tree.leaves(Z)), -1, jnp.int32)
    return Progressing(
        count, s, Z, zero, flat, zero, state.highest, calm, state.passed, sound, count
    )


def make_step(
    tuner: TunerSettings,
    problem: Problem,
    system: System,
    state: RealTimeState,
    derive: bool = True,
) -> Callable[[Progressing, Any], Progressing]:
    """Return the function that takes a window, which began at `state`, over its minibatch i.

    Without `derive`, Z stays as it is, and rates decay towards the horizon.
    """
    hparams = state.hparams
    directions, unravel = directions_of(hparams)
    flat, _ = ravel_pytree(hparams)
    rough = tuner.dynamics
    if tuner.tangents is not None:
        rough = tuner.dynamics.in_precision(tuner.tangents)
    exact = rough is tuner.dynamics and tuner.share == 1

    def roughly(s, hparams, x, t):
        batch = part_of(problem.batches.batch(x), tuner.share, t)
        state, loss = rough.advance(system.restore(s), hparams, batch)
        return eqx.filter(state, eqx.is_array), loss

    def advance(window, x):  # s_t = Phi(s_{t-1}, lambda) and Z_t = A_t Z_{t-1} + B_t
        s, Z = window.s, window.Z
        if not derive:
            assert tuner.horizon is not None
            t = state.course.steps + window.steps  # pyright: ignore[reportOptionalMemberAccess]
            decay = decayed(hparams, rates_of(hparams, tuner.rates), t, tuner.horizon)
            return system.step_and_loss(s, decay, x), (Z, jnp.zeros_like(flat))
        if exact:
            phi = lambda s, h: system.step_and_loss(s, h, x)  # noqa: E731
        else:
            phi = lambda s, h: roughly(s, h, x, state.window + window.steps)  # noqa: E731
        along = unstack(directions) if isinstance(Z, Unstacked) else directions
        after, tangents = pushforward(phi, (s, hparams), (Z, along), tuner.chunk)
        if isinstance(tangents, Unstacked):
            Z, d_losses = map(Unstacked, zip(*tangents.columns, strict=True))
            tangents = Z, stack_columns(d_losses)
        return after if exact else system.step_and_loss(s, hparams, x), tangents

    before = system.initial(hparams)

    def examine(window: Progressing, after: Progressing, x: Any) -> Progressing:
        """Say of a loss that is suspect whether it is the weights or the minibatch."""
        loss = after.loss
        usual = system.step_and_loss(before, hparams, x)[1].astype(loss.dtype)  # before the window
        # The first loss of all is the highest so far, unless the second minibatch says otherwise.
        alone = _is_second(state, window) & (window.highest > _raised(usual, OUTLIER))
        highest = jnp.where(alone, usual, after.highest)
        # One minibatch far above all, also with the weights before the window, is an outlier. Two in a
        # row are what the data has become: the second counts, as the highest loss.
        known = jnp.where(alone, usual, window.highest)
        bound = _raised(known, OUTLIER)
        far = jnp.isfinite(known) & ~(loss <= bound) & ~(usual <= bound)
        outlier = far & ~window.passed & is_finite(problem.batches.batch(x))
        highest = jnp.where(far & jnp.isfinite(loss), loss, highest)
        calm = (loss <= _raised(highest)) | (loss <= _raised(usual))
        after = after._replace(highest=highest, calm=after.calm & calm)
        passed = window._replace(
            steps=after.steps, loss=loss, passed=outlier, outliers=window.outliers + 1
        )
        return _select(outlier, passed, after)

    def step(window: Progressing, i: Any) -> Progressing:
        x = _entry(system, i)
        (s, loss), (Z, d_loss) = advance(window, x)
        after = window._replace(steps=window.steps + 1, s=s)
        if derive:
            Z, broken = _mended(Z)
            first = jnp.where(broken & (window.nonfinite < 0), window.steps, window.nonfinite)
            after = after._replace(Z=Z, nonfinite=first)
        if loss is None:
            return after
        loss = loss.astype(window.highest.dtype)
        finite = jnp.isfinite(loss)
        higher = (window.steps == 0) & (loss > window.highest) & finite
        flat, _ = ravel_pytree(hparams)
        after = after._replace(
            loss=loss,
            slope=_select(is_finite(d_loss), unravel(d_loss.astype(flat.dtype)), window.slope),
            total=window.total + loss,
            highest=jnp.where(higher, loss, window.highest),
            calm=finite,
            passed=jnp.array(False),
        )
        if tuner.rollback is None:
            return after
        suspect = ~(loss <= _raised(window.highest)) | _is_second(state, window)
        return lax.cond(suspect, lambda: examine(window, after, x), lambda: after)

    return step


def finish(
    tuner: TunerSettings,
    state: RealTimeState,
    problem: Problem,
    system: System,
    end: Progressing,
    last: Any,
    count: Any,
) -> tuple[RealTimeState, dict[str, Any], Array]:
    """Return the state after a window that began at `state`, the log, and whether it failed.

    `last` is the place of its last minibatch in the problem, `count` the number that it should have.
    """
    hparams, before = state.hparams, system.initial(state.hparams)
    directions, unravel = directions_of(hparams)
    flat, _ = ravel_pytree(hparams)

    def derivative():  # grad E(s) Z + dE/dlambda
        errors, alpha, explicit = error_gradients(system, end.s, hparams)
        rows = inner_products((alpha, explicit), (end.Z, directions)).astype(flat.dtype)
        return errors, rows, column_norms(end.Z), _alive(alpha)

    def values():  # in the second part of a horizon that is all
        shapes = jax.eval_shape(derivative)
        errors, *rest = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        now = system.errors(end.s, hparams)
        return jax.tree.map(lambda e, like: jnp.asarray(e, like.dtype), now, errors), *rest

    errors, rows, norms, still_alive = if_tuning(tuner, state, derivative, values)
    tuned = if_tuning(tuner, state, lambda: jnp.array(True), lambda: jnp.array(False))
    grad = system.gradient(jax.vmap(unravel)(rows))
    value = system.value(errors)

    trained = is_finite((value, end.s, end.total)) & end.calm
    derived = is_finite((grad, norms))
    sound = is_finite(problem.batches.batch(_entry(system, last)))  # else the data is at fault
    broken_start = [jnp.any(mask) for mask in not_finite(state.train, hparams).values()]
    sound &= ~jnp.any(jnp.array(broken_start))
    if end.loss is not None:  # where no loss has ever been finite, it is not the hyperparameters
        sound &= jnp.isfinite(end.highest)
    spiked = ~end.calm & sound
    first, diverged, dead = state.first, jnp.array(False), jnp.array(False)
    alive = state.alive
    if tuner.rollback is not None:
        now: Any = sum(errors)
        was = if_tuning(tuner, state, lambda: sum(system.errors(before, hparams)), lambda: now)
        first = jnp.where(state.window == 0, jnp.abs(was), first).astype(first.dtype)
        rise = (tuner.rollback - 1) * jnp.maximum(jnp.abs(was), SMALL * first)
        broken = jnp.isfinite(was) & sound & ~is_finite((errors, end.s))
        start = lambda: _alive(error_gradients(system, before, hparams)[1])  # noqa: E731
        alive = lax.cond(state.window == 0, start, lambda: state.alive)
        share = still_alive.astype(now.dtype) / jnp.maximum(alive, 1).astype(now.dtype)
        dead = (share < DEAD) | ((share < DYING) & (now > 0.5 * first.astype(now.dtype)))
        dead &= tuned & trained & (now > SMALL * first.astype(now.dtype))
        diverged = spiked | broken | dead | (trained & (now > was + rise))
    fault = ~diverged & ~trained
    # Away from a divergence, down the loss's last slope; where there is none, towards 0.
    away = jax.tree.map(lambda slope, h: jnp.where(slope == 0, h, slope), end.slope, hparams)
    away = _select(dead, hparams, away)
    direction = _select(diverged & ~(trained & derived & ~spiked & ~dead), away, grad)

    outer = Outer(tuner.optimizer, check_constraints(tuner.constraints, hparams))
    stepped = outer.update(hparams, state.opt_state, value, direction)
    retreat = _back_off(outer, hparams, direction), state.opt_state
    moved = _select(diverged, retreat, stepped)
    moves = diverged | (derived & tuned & ~fault)
    new_hparams, opt_state = _select(moves, moved, (hparams, state.opt_state))

    Z, lost = end.Z, diverged | fault  # where only the derivative is not finite, training continues
    dropped = tuned & ~lost & (~derived | jnp.any(end.nonfinite >= 0))
    if tuner.z_cap is not None:
        Z = _scaled(Z, jnp.minimum(1.0, tuner.z_cap / jnp.maximum(norms, tuner.z_cap)))
    s, course, again = _select(lost, before, end.s), state.course, jnp.array(False)
    if tuner.horizon is not None and course is not None:
        reached = jnp.where(fault, 0, count)
        course, s, again = moved_on(
            course, tuner.horizon, tuner.rates, hparams, new_hparams, s, reached, sum(errors), ~lost
        )
        opt_state = _select(again, outer.init(new_hparams), opt_state)
    new = RealTimeState(
        system.restore(s),
        new_hparams,
        _select(lost | again | ~derived, jax.tree.map(jnp.zeros_like, Z), Z),
        opt_state,
        state.window + jnp.where(fault, 0, 1),
        first,
        jnp.where(fault, state.highest, end.highest),
        end.passed,
        state.dropped + dropped.astype(jnp.int32),
        alive,
        course,
    )
    loss = end.total  # the mean of the steps that count
    if loss is not None:
        loss = loss / (end.steps - end.outliers).astype(loss.dtype)
    log = {
        "value": value,
        "hypergradient": _select(tuned, direction, jax.tree.map(jnp.zeros_like, direction)),
        "hparams": hparams,
        "z_norm": jax.tree.map(optax.tree.norm, unravel(norms.astype(flat.dtype))),
        "loss": loss,
        "undone": diverged,
        "outliers": end.outliers,
        "nonfinite": jnp.where(dropped, end.nonfinite, -1),
        "dropped": dropped,
        "tuned": tuned,
        "restarted": again,
    }
    return new, log, fault


def _mended(Z: PyTree) -> tuple[PyTree, Bool[Array, " leaves"]]:
    """Return Z with 0 for what is not finite, and the leaves that have such entries.

    Left as they are they would spread to all others within a step or two. They are seen at once where a
    derivative is infinite by construction, and what has it hardly moves: Adam's where a gradient is
    exactly 0, say.
    """
    columns = Z.columns if isinstance(Z, Unstacked) else (Z,)
    wrong = [[jnp.any(~jnp.isfinite(z)) for z in jax.tree.leaves(column)] for column in columns]
    Z = jax.tree.map(lambda z: jnp.where(jnp.isfinite(z), z, 0), Z)
    return Z, jnp.any(jnp.array(wrong, bool), 0)


def _alive(alpha: PyTree) -> Int[Array, ""]:
    """Return the number of entries of the state that the error has a derivative in."""
    counts = [jnp.count_nonzero(row) for row in jax.tree.leaves(alpha)]
    return sum(counts, jnp.zeros((), int)).astype(jnp.int32)


def column_norms(Z: PyTree) -> Float[Array, " m"]:
    """Return the norms of the columns of Z, in single precision at least."""

    def norm(column):
        wide = jax.tree.map(lambda z: z.astype(np.promote_types(z.dtype, np.float32)), column)
        return optax.tree.norm(wide)

    return jax.vmap(norm)(Z)


def not_finite(train: PyTree, hparams: PyTree, name: str = "state.train") -> dict[str, Array]:
    """Return, by path, where a start holds what no training can begin with.

    An optimizer may begin with an infinite accumulator, but parameters may not.
    """
    params = train.params if isinstance(train, TrainState) else ()
    numbers = named_leaves(hparams, "hparams") | named_leaves(params, f"{name}.params")
    rest = {path: leaf for path, leaf in named_leaves(train, name).items() if path not in numbers}
    masks = {path: ~jnp.isfinite(x) for path, x in numbers.items() if eqx.is_inexact_array(x)}
    return masks | {path: jnp.isnan(x) for path, x in rest.items() if eqx.is_inexact_array(x)}


def _is_second(state: RealTimeState, window: Progressing) -> Bool[Array, ""]:
    """Return whether the next minibatch is the second of all."""
    return (state.window == 0) & (window.steps == 1) & jnp.isfinite(window.highest)


def _raised(loss: Array, times: float = SPIKE) -> Array:
    return loss + (times - 1) * jnp.abs(loss)


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
    """Return the hyperparameters after a relative step of BACK_OFF against the direction's signs.

    Steps that would end below the smallest normal number, at 0 before long, are not taken.
    """

    def update(direction, state, u, *, scale, **_):
        size = scale(u, jax.tree.map(jnp.zeros_like, u))
        return jax.tree.map(lambda r, d: -BACK_OFF * r * jnp.sign(d), size, direction), state

    retreat = optax.GradientTransformationExtraArgs(lambda _: (), update)  # pyright: ignore
    finite = jax.tree.map(lambda d: jnp.where(jnp.isfinite(d), d, 0), direction)
    moved = Outer(retreat, outer.constraints).update(hparams, (), 0.0, finite)[0]
    lost = lambda new, old: (jnp.abs(new) < jnp.finfo(new.dtype).tiny) & (old != 0)  # noqa: E731
    return jax.tree.map(lambda new, old: jnp.where(lost(new, old), old, new), moved, hparams)

"""A window of real-time tuning: its minibatches, with Z carried along.

    for each minibatch:  s <- Phi(s, lambda),  Z <- A Z + B

Pure functions: `RealTime` runs them over a window in one program, `tuned` spreads them over calls.
`outcome.py` has what follows at the end of a window.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._engines.nonfinite import is_finite
from .._engines.products import Unstacked, pushforward, stack_columns, unstack
from .._outer.update import select
from .._problem.dynamics import Continued, Dynamics
from .._problem.problem import Problem
from .._problem.system import System

SPIKE = 1.25  # a loss this many times what it was has spiked
OUTLIER = 10.0  # a minibatch with this many times the highest loss is skipped

Objective = Callable[..., Array] | dict[str, Callable[..., Array]]


class RealTimeState(NamedTuple):
    """Where a real-time run is: all that decides how it continues.

    Attributes:
        train: the state of the dynamics, a `TrainState` for `Training`.
        hparams: the current hyperparameters.
        Z: the derivative of the training state, its floating-point leaves with a leading axis of m.
        opt_state: the outer optimizer's state.
        window: the number of windows done, those that were rolled back included.
        first: the error before the first window.
        highest: the highest loss at the beginning of a window so far.
        skipped_last: whether the last minibatch was skipped.
        dropped: the number of windows in which a derivative was dropped.
        alive: how many numbers of the training state the error depended on before the first window.
    """

    train: PyTree
    hparams: PyTree[Float[Array, "..."]]
    Z: PyTree
    opt_state: PyTree
    window: Int[Array, ""]
    first: Float[Array, ""]
    highest: Float[Array, ""]
    skipped_last: Bool[Array, ""]
    dropped: Int[Array, ""]
    alive: Int[Array, ""]


class TunerSettings(eqx.Module):
    """What a `RealTime` is made of, as its program sees it."""

    dynamics: Dynamics
    objective: Objective
    optimizer: optax.GradientTransformation
    constraints: PyTree
    discount: float = eqx.field(static=True)
    rollback: float | None = eqx.field(static=True)
    chunk: int | None = eqx.field(static=True)
    mesh: Mesh | None = eqx.field(static=True)

    def problem(
        self, train: PyTree, window: PyTree, validation: PyTree, carried: tuple[str, ...] = ()
    ) -> Problem:
        """Return the training over a window as a problem of its own."""
        dynamics = Continued(self.dynamics, carried)
        return Problem(dynamics, self.objective, train, window, validation)


class WindowState(NamedTuple):
    """A window under way."""

    steps: Int[Array, ""]
    s: PyTree  # the training state, arrays only
    Z: PyTree  # its columns stacked, or `Unstacked`
    loss: Float[Array, ""] | None  # of the last step; None where the dynamics has none
    slope: PyTree  # its derivative in lambda, the last that is finite
    total: Float[Array, ""] | None  # the sum of the losses, without those of skipped minibatches
    highest: Float[Array, ""]
    spiked: Bool[Array, ""]  # whether the loss is not finite, or has spiked
    skipped_last: Bool[Array, ""]
    nonfinite: Int[Array, " leaves"]  # of Z: the first minibatch after which each was not, or -1
    skipped: Int[Array, ""]  # how many minibatches have been


def begin(tuner: TunerSettings, state: RealTimeState) -> WindowState:
    """Return the window before its first minibatch."""
    # What earlier windows did counts for less: they ran with other hyperparameters.
    Z = jax.tree.map(lambda z: tuner.discount * z, state.Z) if tuner.discount < 1 else state.Z
    zero = None if loss_of(state.train) is None else jnp.zeros((), state.highest.dtype)
    return WindowState(
        steps=jnp.zeros((), jnp.int32),
        s=eqx.filter(state.train, eqx.is_array),
        Z=unstack(Z) if tuner.chunk is None and tuner.mesh is None else Z,
        loss=zero,
        slope=jax.tree.map(jnp.zeros_like, state.hparams),
        total=zero,
        highest=state.highest,
        spiked=jnp.array(False),
        skipped_last=state.skipped_last,
        nonfinite=jnp.full(len(jax.tree.leaves(Z)), -1, jnp.int32),
        skipped=jnp.zeros((), jnp.int32),
    )


@dataclasses.dataclass(frozen=True)
class Window:
    """The steps of a window that began at `state`; the system is the problem's."""

    tuner: TunerSettings
    problem: Problem
    system: System
    state: RealTimeState

    def run(self, window: WindowState, count: Int[Array, ""]) -> WindowState:
        """Return the window after `count` minibatches, or after that at which its loss spiked."""
        return lax.while_loop(
            lambda window: (window.steps < count) & ~window.spiked,
            lambda window: self.step(window, window.steps),
            window,
        )

    def step(self, window: WindowState, i: int | Int[Array, ""]) -> WindowState:
        """Return the window after minibatch i of the problem."""
        hparams, x = self.state.hparams, self.entry(i)
        directions, unravel = directions_of(hparams)
        if isinstance(window.Z, Unstacked):
            directions = unstack(directions)
        phi = lambda s, h: self.system.step(s, h, x)  # noqa: E731
        primals, tangents = (window.s, hparams), (window.Z, directions)
        s, Z = pushforward(phi, primals, tangents, self.tuner.chunk)
        loss, d_loss = loss_of(s), loss_of(stack_columns(Z))
        Z, broken = _mended(Z)
        first = jnp.where(broken & (window.nonfinite < 0), window.steps, window.nonfinite)
        after = window._replace(steps=window.steps + 1, s=s, Z=Z, nonfinite=first)
        if loss is None or d_loss is None or window.total is None:
            return after
        loss = loss.astype(window.highest.dtype)
        d_loss = d_loss.astype(ravel_pytree(hparams)[0].dtype)
        finite = jnp.isfinite(loss)
        higher = (window.steps == 0) & (loss > window.highest) & finite
        after = after._replace(
            loss=loss,
            slope=select(is_finite(d_loss), unravel(d_loss), window.slope),
            total=window.total + loss,
            highest=jnp.where(higher, loss, window.highest),
            spiked=~finite,
            skipped_last=jnp.array(False),
        )
        if self.tuner.rollback is None:
            return after
        suspect = ~(loss <= _raised(window.highest)) | self._is_second(window)
        return lax.cond(suspect, lambda: self._examined(window, after, loss, x), lambda: after)

    def _examined(
        self, window: WindowState, after: WindowState, loss: Float[Array, ""], x: PyTree
    ) -> WindowState:
        """Return what follows from a loss that is suspect: it is the weights, or the minibatch."""
        hparams = self.state.hparams
        usual = loss_of(self.system.step(self.system.initial(hparams), hparams, x))
        assert usual is not None
        usual = usual.astype(loss.dtype)
        # The first loss of all is the highest so far, unless the second minibatch says otherwise.
        alone = self._is_second(window) & (window.highest > _raised(usual, OUTLIER))
        highest = jnp.where(alone, usual, after.highest)
        # One minibatch far above all, also with the weights before the window, is an outlier; of two
        # in a row the second counts, as the highest loss.
        known = jnp.where(alone, usual, window.highest)
        bound = _raised(known, OUTLIER)
        far = jnp.isfinite(known) & ~(loss <= bound) & ~(usual <= bound)
        outlier = far & ~window.skipped_last & is_finite(self.problem.batches.batch(x))
        highest = jnp.where(far & jnp.isfinite(loss), loss, highest)
        spiked = ~((loss <= _raised(highest)) | (loss <= _raised(usual)))
        counted = after._replace(highest=highest, spiked=after.spiked | spiked)
        skipped = window._replace(
            steps=after.steps, loss=loss, skipped_last=outlier, skipped=window.skipped + 1
        )
        return select(outlier, skipped, counted)

    def _is_second(self, window: WindowState) -> Bool[Array, ""]:
        """Return whether the next minibatch is the second of all."""
        return (self.state.window == 0) & (window.steps == 1) & jnp.isfinite(window.highest)

    def entry(self, i: int | Int[Array, ""]) -> PyTree:
        """Return entry i of what the system goes over."""
        return jax.tree.map(lambda leaf: leaf[i], self.system.xs)


def loss_of(state: PyTree) -> Float[Array, "..."] | None:
    """Return the field `loss` of a training state, or of the columns of Z; None where it has none."""
    loss = getattr(state, "loss", None)
    return loss if eqx.is_inexact_array(loss) else None


def _raised(loss: Array, times: float = SPIKE) -> Array:
    return loss + (times - 1) * jnp.abs(loss)


def _mended(Z: PyTree) -> tuple[PyTree, Bool[Array, " leaves"]]:
    """Return Z with 0 for what is not finite, which would spread, and the leaves that have it."""
    columns = Z.columns if isinstance(Z, Unstacked) else (Z,)
    wrong = [[jnp.any(~jnp.isfinite(z)) for z in jax.tree.leaves(column)] for column in columns]
    Z = jax.tree.map(lambda z: jnp.where(jnp.isfinite(z), z, 0), Z)
    return Z, jnp.any(jnp.array(wrong, bool), 0)


def directions_of(hparams: PyTree) -> tuple[PyTree, Callable[[Array], PyTree]]:
    """Return the unit directions in lambda, and the function from a vector to hyperparameters."""
    flat, unravel = ravel_pytree(hparams)
    return jax.vmap(unravel)(jnp.eye(flat.size, dtype=flat.dtype)), unravel


def column_norms(Z: PyTree) -> Float[Array, " m"]:
    """Return the norms of the columns of Z without the loss, in single precision at least."""
    if loss_of(Z) is not None:
        Z = eqx.tree_at(lambda columns: columns.loss, Z, None)
    wide = jax.tree.map(lambda z: z.astype(np.promote_types(z.dtype, np.float32)), Z)
    return jax.vmap(optax.tree.norm)(wide)

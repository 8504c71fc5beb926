"""A window of real-time tuning: its minibatches, with Z carried along.

    for each minibatch:  s <- Phi(s, lambda),  Z <- A Z + B

All here are pure functions, to be traced; `RealTime` runs them over a window in one program, `tuned`
spreads them over calls. `outcome.py` has what follows at the end of a window, `tuner.py` what they
compute and why.
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
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._engines.nonfinite import is_finite
from .._engines.products import Unstacked, pushforward, stack_columns, unstack
from .._problem.dynamics import Continued, Dynamics
from .._problem.problem import Problem
from .._problem.sharding import TANGENTS
from .._problem.system import System

SPIKE = 1.25  # a loss this many times what it was has spiked
OUTLIER = 10.0  # a minibatch with this many times the highest loss is skipped

Objective = Callable[..., Array] | dict[str, Callable[..., Array]]


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
    """The number of windows done, those that were rolled back included."""
    first: Float[Array, ""]
    """The error before the first window."""
    highest: Float[Array, ""]
    """The highest loss at the beginning of a window so far."""
    skipped_last: Bool[Array, ""]
    """Whether the last minibatch was skipped."""
    dropped: Int[Array, ""]
    """The number of windows in which a derivative was not finite, and was dropped."""
    alive: Int[Array, ""]
    """How many numbers of the training state the error depended on before the first window."""


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


def place_state(state: RealTimeState, mesh: Mesh) -> RealTimeState:
    """Return the state on a mesh, with the columns of Z split over `tangents`, if it has that axis."""
    m, size = sum(leaf.size for leaf in jax.tree.leaves(state.hparams)), mesh.shape.get(TANGENTS, 1)
    if m % size:
        raise ValueError(
            f"RealTime(mesh=...): the {m} columns of Z, one for each hyperparameter, cannot be split "
            f"evenly over the {size} devices of the mesh's axis 'tangents'. Give it a size that "
            f"divides {m}."
        )

    def put(leaf):
        placed = getattr(leaf, "sharding", None)
        on_mesh = isinstance(placed, NamedSharding) and placed.mesh == mesh  # as its user placed it
        if on_mesh or not eqx.is_array(leaf):
            return leaf
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))

    others = jax.tree.map(put, state._replace(Z=None))
    columns = PartitionSpec(TANGENTS) if TANGENTS in mesh.shape else PartitionSpec()
    return others._replace(Z=jax.device_put(state.Z, NamedSharding(mesh, columns)))


class WindowState(NamedTuple):
    """A window under way."""

    steps: Int[Array, ""]
    s: PyTree  # the training state, arrays only
    Z: PyTree  # its columns stacked, or `Unstacked`
    loss: Float[Array, ""] | None  # of the last step; None where the dynamics reports none
    slope: PyTree  # its derivative in lambda, the last that is finite
    total: Float[Array, ""] | None  # the sum of the losses, without those of skipped minibatches
    highest: Float[Array, ""]
    spiked: Bool[Array, ""]  # whether the loss is not finite, or has spiked
    skipped_last: Bool[Array, ""]
    # For each leaf of Z the first minibatch after which it was not finite, or -1.
    nonfinite: Int[Array, " leaves"]
    skipped: Int[Array, ""]  # how many minibatches have been


def begin(tuner: TunerSettings, state: RealTimeState) -> WindowState:
    """Return the window before its first minibatch."""
    # What earlier windows did counts for less: they ran with other hyperparameters.
    Z = jax.tree.map(lambda z: tuner.discount * z, state.Z) if tuner.discount < 1 else state.Z
    zero = jnp.zeros((), state.highest.dtype) if loss_of(state.train) is not None else None
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
class Step:
    """Takes a window that began at `state` over one of its minibatches."""

    tuner: TunerSettings
    problem: Problem
    system: System
    state: RealTimeState

    def over(self, window: WindowState, count: Int[Array, ""]) -> WindowState:
        """Return the window after `count` minibatches, or after that at which its loss spiked."""
        return lax.while_loop(
            lambda window: (window.steps < count) & ~window.spiked,
            lambda window: self(window, window.steps),
            window,
        )

    def __call__(self, window: WindowState, i: int | Int[Array, ""]) -> WindowState:
        """Return the window after minibatch i of the problem."""
        hparams, x = self.state.hparams, entry(self.system, i)
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
        finite = jnp.isfinite(loss)
        higher = (window.steps == 0) & (loss > window.highest) & finite
        d_loss = d_loss.astype(ravel_pytree(hparams)[0].dtype)
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
        return lax.cond(suspect, lambda: self._examined(window, after, x), lambda: after)

    def _examined(self, window: WindowState, after: WindowState, x: PyTree) -> WindowState:
        """Return what follows from a loss that is suspect: it is the weights, or the minibatch."""
        hparams, loss = self.state.hparams, after.loss
        usual = loss_of(self.system.step(self.system.initial(hparams), hparams, x))
        assert loss is not None
        assert usual is not None
        usual = usual.astype(loss.dtype)
        # The first loss of all is the highest so far, unless the second minibatch says otherwise.
        alone = self._is_second(window) & (window.highest > _raised(usual, OUTLIER))
        highest = jnp.where(alone, usual, after.highest)
        # One minibatch far above all, also with the weights before the window, is an outlier. Two in a
        # row are what the data has become: the second counts, as the highest loss.
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


def loss_of(state: PyTree) -> Float[Array, "..."] | None:
    """Return the field `loss` of a training state, or of the columns of Z; None where it has none."""
    loss = getattr(state, "loss", None)
    return loss if eqx.is_inexact_array(loss) else None


def without_loss(state: PyTree) -> PyTree:
    """Return the state without that field."""
    return state if loss_of(state) is None else eqx.tree_at(lambda s: s.loss, state, None)


def _raised(loss: Array, times: float = SPIKE) -> Array:
    return loss + (times - 1) * jnp.abs(loss)


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


def entry(system: System, i: int | Int[Array, ""]) -> PyTree:
    """Return entry i of what the system goes over."""
    return jax.tree.map(lambda leaf: leaf[i], system.xs)


def directions_of(hparams: PyTree) -> tuple[PyTree, Callable[[Array], PyTree]]:
    """Return the unit directions in lambda, and the function from a vector to hyperparameters."""
    flat, unravel = ravel_pytree(hparams)
    return jax.vmap(unravel)(jnp.eye(flat.size, dtype=flat.dtype)), unravel


def column_norms(Z: PyTree) -> Float[Array, " m"]:
    """Return the norms of the columns of Z, in single precision at least."""

    def norm(column):
        wide = jax.tree.map(lambda z: z.astype(np.promote_types(z.dtype, np.float32)), column)
        return optax.tree.norm(wide)

    return jax.vmap(norm)(Z)


def select(condition: Bool[Array, ""], yes: PyTree, no: PyTree) -> PyTree:
    """Return one of two trees, arrays by the condition; all else they have in common."""

    def leaf(a, b):
        return jnp.where(condition, a, b) if eqx.is_array(b) else b

    return jax.tree.map(leaf, yes, no)

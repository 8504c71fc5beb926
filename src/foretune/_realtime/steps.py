"""The steps of a window of real-time tuning: its minibatches, with Z carried along.

    for each minibatch:  s <- Phi(s, lambda),  Z <- A Z + B

Pure functions: `RealTime` makes the steps in one program, `tuned` spreads them over calls.
"""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._engines.nonfinite import is_finite
from .._engines.products import Unstacked, pushforward, stack_columns, unstack
from .._outer.update import select
from .._problem.problem import Problem
from .._problem.system import System
from .state import RealTimeState, TunerSettings, directions_of, loss_of

SPIKE = 1.25  # a loss this many times what it was has spiked
OUTLIER = 10.0  # a minibatch with this many times the highest loss is skipped


class WindowState(NamedTuple):
    """A window under way."""

    done: Int[Array, ""]  # minibatches
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


def begin(settings: TunerSettings, state: RealTimeState) -> WindowState:
    """Return the window before its first minibatch."""
    # What earlier windows did counts for less: they ran with other hyperparameters.
    Z = jax.tree.map(lambda z: settings.discount * z, state.Z) if settings.discount < 1 else state.Z
    zero = None if loss_of(state.train) is None else jnp.zeros((), state.highest.dtype)
    return WindowState(
        done=jnp.zeros((), jnp.int32),
        s=eqx.filter(state.train, eqx.is_array),
        Z=unstack(Z) if settings.chunk is None and settings.mesh is None else Z,
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
class Steps:
    """The steps of a window that began at `state`; the system is the problem's."""

    settings: TunerSettings
    problem: Problem
    system: System
    state: RealTimeState

    def run(self, now: WindowState, count: Int[Array, ""]) -> WindowState:
        """Return the window after `count` minibatches, or after that at which its loss spiked."""
        more = lambda now: (now.done < count) & ~now.spiked  # noqa: E731
        return lax.while_loop(more, lambda now: self.step(now, now.done), now)

    def step(self, now: WindowState, i: int | Int[Array, ""]) -> WindowState:
        """Return the window after minibatch i of the problem."""
        hparams, x = self.state.hparams, self._entry(i)
        directions, unravel = directions_of(hparams)
        if isinstance(now.Z, Unstacked):
            directions = unstack(directions)
        phi = lambda s, h: self.system.step(s, h, x)  # noqa: E731
        primals, tangents = (now.s, hparams), (now.Z, directions)
        s, Z = pushforward(phi, primals, tangents, self.settings.chunk)
        loss, d_loss = loss_of(s), loss_of(stack_columns(Z))
        Z, broken = _mended(Z)
        first = jnp.where(broken & (now.nonfinite < 0), now.done, now.nonfinite)
        after = now._replace(done=now.done + 1, s=s, Z=Z, nonfinite=first)
        if loss is None or d_loss is None or now.total is None:
            return after
        loss = loss.astype(now.highest.dtype)
        d_loss = d_loss.astype(ravel_pytree(hparams)[0].dtype)
        finite = jnp.isfinite(loss)
        higher = (now.done == 0) & (loss > now.highest) & finite
        after = after._replace(
            loss=loss,
            slope=select(is_finite(d_loss), unravel(d_loss), now.slope),
            total=now.total + loss,
            highest=jnp.where(higher, loss, now.highest),
            spiked=~finite,
            skipped_last=jnp.array(False),
        )
        if self.settings.rollback is None:
            return after
        suspect = ~(loss <= _raised(now.highest)) | self._is_second(now)
        return lax.cond(suspect, lambda: self._examined(now, after, loss, x), lambda: after)

    def _examined(
        self, now: WindowState, after: WindowState, loss: Float[Array, ""], x: PyTree
    ) -> WindowState:
        """Return what follows from a loss that is suspect: it is the weights, or the minibatch."""
        hparams = self.state.hparams
        usual = loss_of(self.system.step(self.system.initial(hparams), hparams, x))
        assert usual is not None
        usual = usual.astype(loss.dtype)
        # The first loss of all is the highest so far, unless the second minibatch says otherwise.
        alone = self._is_second(now) & (now.highest > _raised(usual, OUTLIER))
        highest = jnp.where(alone, usual, after.highest)
        # One minibatch far above all, also with the weights before the window, is an outlier; of two
        # in a row the second counts, as the highest loss.
        known = jnp.where(alone, usual, now.highest)
        bound = _raised(known, OUTLIER)
        far = jnp.isfinite(known) & ~(loss <= bound) & ~(usual <= bound)
        outlier = far & ~now.skipped_last & is_finite(self.problem.batches.batch(x))
        highest = jnp.where(far & jnp.isfinite(loss), loss, highest)
        spiked = ~((loss <= _raised(highest)) | (loss <= _raised(usual)))
        counted = after._replace(highest=highest, spiked=after.spiked | spiked)
        skipped = now._replace(
            done=after.done, loss=loss, skipped_last=outlier, skipped=now.skipped + 1
        )
        return select(outlier, skipped, counted)

    def _is_second(self, now: WindowState) -> Bool[Array, ""]:
        """Return whether the next minibatch is the second of all."""
        return (self.state.window == 0) & (now.done == 1) & jnp.isfinite(now.highest)

    def batch(self, i: int | Int[Array, ""]) -> PyTree:
        """Return minibatch i of the problem."""
        return self.problem.batches.batch(self._entry(i))

    def _entry(self, i: int | Int[Array, ""]) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[i], self.system.xs)


def _raised(loss: Array, times: float = SPIKE) -> Array:
    return loss + (times - 1) * jnp.abs(loss)


def _mended(Z: PyTree) -> tuple[PyTree, Bool[Array, " leaves"]]:
    """Return Z with 0 for what is not finite, which would spread, and the leaves that have it."""
    columns = Z.columns if isinstance(Z, Unstacked) else (Z,)
    wrong = [[jnp.any(~jnp.isfinite(z)) for z in jax.tree.leaves(column)] for column in columns]
    Z = jax.tree.map(lambda z: jnp.where(jnp.isfinite(z), z, 0), Z)
    return Z, jnp.any(jnp.array(wrong, bool), 0)

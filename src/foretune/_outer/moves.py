"""How a rehearsed descent moves: the unconstrained variable in units, and steps by the secant rule.

    v = u / c,    v_{k+1} = v_k - clip(g_k / h_k, -size, size)

with c the scales at a point, g the derivatives in v, and h their slope between the last two points,
(g_k - g_{k-1}) / (v_k - v_{k-1}), where that is above 0. Until an entry's h is known, the entry with
the largest derivative moves by `size`, the others in proportion. Scales move by factors, in log(x).
"""

import itertools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Int, PyTree

from .._constraints.base import (
    AbstractConstraint,
    from_unconstrained,
    map_parts,
    project,
    scales,
    to_unconstrained,
)
from .._constraints.sets import Box, NonNegative
from .._constraints.variables import Change, Log
from .search import is_scale

UNIT = 0.4  # of its scale, for what does not move by factors
WIDE = 0.2  # of the width of a bounded Box
CARRIED_ON = 0.5  # of the fall between two points
FARTHEST = 1.2  # that this is, in logarithms
LEAST = 1e-3  # a change, in units, over which a difference of derivatives is trusted


class Moves(eqx.Module):
    """The unconstrained variable in units, v, about a point."""

    constraints: PyTree
    units: PyTree
    ahead: PyTree  # the direction of v in which the leading scale grows: 1 for it, 0 for all else

    @classmethod
    def about(
        cls, constraints: PyTree, origin: PyTree, leading: Int[Array, ""], wide: bool = False
    ) -> "Moves":
        """Return the moves about a point. A scale that is 0 there cannot move by factors."""
        changed = map_parts(_by_factors, constraints, origin)
        sizes = scales(changed, to_unconstrained(changed, origin))
        number = itertools.count()

        def unit(constraint, sizes):
            share = 1.0 if isinstance(constraint, Change) else UNIT
            own = jax.tree.map(lambda size: share * size, sizes)
            if not wide or not isinstance(constraint, Box):
                return own
            width = WIDE * (jnp.asarray(constraint.upper) - jnp.asarray(constraint.lower))
            return jax.tree.map(
                lambda own: jnp.where(jnp.isfinite(width), width, own).astype(own.dtype), own
            )

        def direction(constraint, changed, sizes):
            leads = is_scale(constraint) and leading == next(number)
            moved = leads and isinstance(changed, Log)
            return jax.tree.map(lambda size: jnp.full_like(size, moved), sizes)

        ahead = map_parts(direction, constraints, changed, sizes)
        return cls(changed, map_parts(unit, changed, sizes), ahead)

    def to(self, hparams: PyTree) -> PyTree:
        u = to_unconstrained(self.constraints, hparams)
        return jax.tree.map(jnp.divide, u, self.units)

    def back(self, v: PyTree) -> PyTree:
        return project(self.constraints, self._unconfined(v))

    def gradient(self, v: PyTree, grad: PyTree) -> PyTree:
        """Return the gradient in v, from that in the hyperparameters."""
        _, pull = jax.vjp(self._unconfined, v)
        return pull(grad)[0]

    def scaled(self, by: ArrayLike, hparams: PyTree) -> PyTree:
        """Return the hyperparameters with the leading scale times exp(by)."""
        return self.back(jax.tree.map(lambda v, e: v + by * e, self.to(hparams), self.ahead))

    def carried_on(self, before: PyTree, v: PyTree) -> PyTree:
        """Return the hyperparameters at v, the leading scale lower still if it has fallen."""

        def further(v, before, e):
            return v + jnp.clip(CARRIED_ON * (v - before), -FARTHEST, 0) * e

        return self.back(jax.tree.map(further, v, before, self.ahead))

    def _unconfined(self, v: PyTree) -> PyTree:
        return from_unconstrained(self.constraints, jax.tree.map(jnp.multiply, v, self.units))


def _by_factors(constraint: AbstractConstraint, part: PyTree) -> AbstractConstraint:
    positive = all(bool(jnp.all(leaf > 0)) for leaf in jax.tree.leaves(part))
    return Log() if isinstance(constraint, NonNegative) and positive else constraint


class Secant(NamedTuple):
    """The last point and its derivatives, and what is known of their slopes."""

    v: PyTree
    g: PyTree
    slopes: PyTree  # h; 0 before it is known
    known: Bool[Array, ""]  # whether v and g are of the same function as those that come


def first_secant(v: PyTree) -> Secant:
    """Return the state before the first step."""
    zeros = jax.tree.map(jnp.zeros_like, v)
    return Secant(zeros, zeros, zeros, jnp.array(False))


def secant_step(secant: Secant, v: PyTree, g: PyTree, size: float) -> tuple[PyTree, Secant]:
    """Return the step from v, in units, and the state for the next one."""

    def slope(old, v, g, v_before, g_before):
        change = v - v_before
        trusted = secant.known & (jnp.abs(change) > LEAST)
        new = (g - g_before) / jnp.where(trusted, change, 1)
        return jnp.where(trusted & (new > 0), new, old)

    slopes = jax.tree.map(slope, secant.slopes, v, g, secant.v, secant.g)
    largest = jnp.max(jnp.array([jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(g)]))

    def step(g, slope):
        ahead = g * size / jnp.where(largest > 0, largest, 1).astype(g.dtype)
        newton = g / jnp.where(slope > 0, slope, 1)
        return -jnp.clip(jnp.where(slope > 0, newton, ahead), -size, size)

    return jax.tree.map(step, g, slopes), Secant(v, g, slopes, jnp.array(True))

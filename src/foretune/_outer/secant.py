"""Steps to where each derivative would be 0, from few gradients.

    v_{k+1} = v_k - clip(g_k / h_k, -size, size),    h = (g_k - g_{k-1}) / (v_k - v_{k-1})  where h > 0

for each entry v of the unconstrained variable in its units. Until an entry's h is known, the entry with
the largest derivative moves by `size`, the others in proportion.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

LEAST = 1e-3  # a change, in units, over which a difference of derivatives is trusted


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

"""Candidates for a search: hyperparameters spread over their constraints, the start first."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._constraints.base import AbstractConstraint, is_constraint, project
from .._constraints.sets import NonNegative
from .._constraints.variables import Log


def is_scale(constraint: AbstractConstraint) -> bool:
    """Return whether what it constrains is searched over decades, and moved by factors."""
    return isinstance(constraint, Log | NonNegative)


def candidates(
    constraints: PyTree, start: PyTree, count: int, decades: float, key: Array
) -> PyTree:
    """Return `count` hyperparameters, stacked, the scales over so many decades.

    In every second one all parts are spread, in the others one scale alone, each in its turn. A part's
    places are one in each of `count` equal shares of its range, in an order of its own.
    """
    structure = jax.tree.structure(constraints, is_leaf=is_constraint)
    parts = list(
        zip(structure.flatten_up_to(constraints), structure.flatten_up_to(start), strict=True)
    )
    number = jnp.arange(count)
    of_scales = [i for i, (constraint, _) in enumerate(parts) if is_scale(constraint)]
    turn = jnp.array(of_scales or [-1])[(number // 2) % max(len(of_scales), 1)]
    stacked = []
    for i, (constraint, part) in enumerate(parts):
        order, within = jax.random.split(jax.random.fold_in(key, i))
        q = jax.random.permutation(order, jnp.arange(count, dtype=float))
        q = (q + jax.random.uniform(within, (count,), float)) / count
        moved = (number > 0) & ((number % 2 == 0) | (turn == i))
        spread = jax.vmap(constraint.spread, (None, 0, None))(part, q, decades)
        stacked.append(jax.tree.map(lambda s, x, m=moved: _where(m, s, x), spread, part))
    return jax.vmap(lambda h: project(constraints, h))(structure.unflatten(stacked))


def _where(moved: Array, spread: Array, x: Array) -> Array:
    return jnp.where(moved.reshape(-1, *[1] * jnp.ndim(x)), spread, x)

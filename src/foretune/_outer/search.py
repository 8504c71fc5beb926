"""Searches by values alone: over decades of each scale, and along a line."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from .._constraints.base import AbstractConstraint, is_constraint, project
from .._constraints.sets import NonNegative
from .._constraints.variables import Log

FROM_0 = 1e-2  # the middle of the decades about 0


def is_scale(constraint: AbstractConstraint) -> bool:
    """Return whether what it constrains is searched over decades, and moved by factors."""
    return isinstance(constraint, Log | NonNegative)


def count_scales(constraints: PyTree) -> int:
    return sum(map(is_scale, jax.tree.leaves(constraints, is_leaf=is_constraint)))


def candidates(
    constraints: PyTree, start: PyTree, each: int, decades: float, without: int | None = None
) -> PyTree:
    """Return the start, and `each` more for every scale (but one), which alone is moved; stacked.

    A scale is multiplied by factors evenly spread, in logarithms, over `decades` decades about 1.
    """
    sets, structure = jax.tree.flatten(constraints, is_leaf=is_constraint)
    found = [start]
    of_scales = [i for i, constraint in enumerate(sets) if is_scale(constraint)]
    for i in (i for number, i in enumerate(of_scales) if number != without):
        for place in range(each):
            parts = structure.flatten_up_to(start)
            factor = 10.0 ** (decades * ((place + 0.5) / each - 0.5))
            parts[i] = jax.tree.map(lambda x, by=factor: _times(x, by), parts[i])
            found.append(project(constraints, structure.unflatten(parts)))
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)


def _times(x: Array, factor: float) -> Array:
    return jnp.where(x == 0, FROM_0, x) * jnp.asarray(factor, x.dtype)


def leading_scale(errors: Float[Array, " n"], each: int) -> Int[Array, ""]:
    """Return the number of the scale that the error depends on most, given those of `candidates`.

    It is the one whose lowest error is farthest below the median of its own: a learning rate does harm
    on both sides, a decay on one. What is not finite counts as the highest that is.
    """
    finite = jnp.isfinite(errors)
    errors = jnp.where(finite, errors, jnp.max(jnp.where(finite, errors, -jnp.inf)))
    of_scales = errors.reshape(-1, each)
    gains = jnp.median(of_scales, 1) - jnp.min(of_scales, 1)
    return jnp.argmax(jnp.nan_to_num(gains, nan=0.0)).astype(jnp.int32)


def lowest_on_line(error: Callable[[int], float], most: int) -> tuple[float, float, int]:
    """Return the lowest place of a line, its error, and how often the error was computed.

    Places are numbers, from 0 and -1 on in the direction in which the error falls, until it rises.
    Between them the lowest is that of the parabola through the three about it.
    """
    errors: dict[int, float] = {}

    def compute(place: int) -> float:
        value = error(place)
        errors[place] = value if math.isfinite(value) else 1e30
        return errors[place]

    down = compute(0) >= compute(-1)
    place = -2 if down else 1
    while len(errors) < most and compute(place) <= min(errors.values()):
        place += -1 if down else 1
    best = min(errors, key=lambda place: (errors[place], place))
    before, here, after = (errors.get(best + by, math.nan) for by in (-1, 0, 1))
    bend = before - 2 * here + after
    offset = 0.5 * (before - after) / bend if bend > 0 else 0.0  # NaN at an end
    return best + offset, here if here < 1e30 else math.inf, len(errors)

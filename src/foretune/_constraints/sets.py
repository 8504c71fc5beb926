"""Sets with exact Euclidean projections: `project(x)` is the nearest point of the set.

Projections that shift all entries by a common amount find it by Newton's method, in a few passes over
the vector, where Optax's sort it and have no value at radius 0.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, ArrayLike, Float, PyTree

from .._problem.checks import describe, named_leaves
from .base import AbstractConstraint, Number, as_type, numbers_in

NEWTON_STEPS = 100
PARTS = 3  # of a common shift


class Box(AbstractConstraint):
    """{lower <= x <= upper}; the bounds are numbers or arrays, and may be infinite.

    >>> import foretune as ft, jax.numpy as jnp
    >>> ft.Box(0.0, 1.0).project(jnp.array([-1.0, 0.5, 2.0]))
    Array([0. , 0.5, 1. ], dtype=float32)
    """

    lower: Number
    upper: Number

    def __check_init__(self):
        given = f"Box({self.lower}, {self.upper})"
        lower, upper = (numbers_in(given, bound) for bound in (self.lower, self.upper))
        if lower is None or upper is None:
            return  # traced
        try:
            np.broadcast_shapes(lower.shape, upper.shape)
        except ValueError:
            shapes = f"{lower.shape} and {upper.shape}"
            raise ValueError(f"{given}: the bounds have the shapes {shapes}.") from None
        if not np.all((lower <= upper) & (lower < np.inf) & (upper > -np.inf)):
            raise ValueError(f"an empty set: {given} has no number between its bounds.")

    def project(self, x: PyTree) -> PyTree:
        """Return x with each entry clipped to the bounds."""
        return jax.tree.map(lambda leaf: jnp.clip(leaf, *self._bounds(leaf)), x)

    def scale(self, u: PyTree, unit: PyTree) -> PyTree:
        """Return the natural scale of a change: at most the distance to the upper bound."""

        def scale(u, unit):
            own = jnp.abs(u) + unit
            _, upper = self._bounds(u)
            return jnp.minimum(own, jnp.maximum(upper - u, 1e-3 * own))  # it can leave the bound

        return jax.tree.map(scale, u, unit)

    def _bounds(self, leaf: ArrayLike) -> list[Array]:
        """Return the bounds in the type of a leaf, and with all its axes."""
        bounds = as_type(jnp.asarray(leaf).dtype, self.lower, self.upper)
        axes = jnp.ndim(leaf)
        return [bound.reshape((1,) * (axes - bound.ndim) + bound.shape) for bound in bounds]


class NonNegative(AbstractConstraint):
    """{x >= 0}.

    >>> import foretune as ft, jax.numpy as jnp
    >>> ft.NonNegative().project(jnp.array([-1.0, 0.5]))
    Array([0. , 0.5], dtype=float32)
    """

    def project(self, x: PyTree) -> PyTree:
        return optax.projections.projection_non_negative(x)


class Simplex(AbstractConstraint):
    """{x >= 0, sum x = total}.

    >>> import foretune as ft, jax.numpy as jnp
    >>> ft.Simplex(1.0).project(jnp.array([0.5, 0.75, -2.0]))
    Array([0.375, 0.625, 0.   ], dtype=float32)
    """

    total: Number = 1.0

    def __check_init__(self):
        _check_size("Simplex", "total", self.total)

    def project(self, x: PyTree) -> PyTree:
        """Return the nearest point: entries move by a common amount, down to 0."""
        return _on_vector(lambda v: _shift(v, self.total, jnp.inf, at_most=False), x)


class CappedSimplex(AbstractConstraint):
    """{0 <= x <= upper, sum x <= total}: the paper's set for example weights.

    >>> import foretune as ft, jax.numpy as jnp
    >>> ft.CappedSimplex(1.5).project(jnp.array([3.0, 0.5, 0.25, -1.0]))
    Array([1.   , 0.375, 0.125, 0.   ], dtype=float32)
    """

    total: Number
    upper: Number = 1.0

    def __check_init__(self):
        _check_size("CappedSimplex", "total", self.total)
        _check_size("CappedSimplex", "upper", self.upper, infinite=True)

    def project(self, x: PyTree) -> PyTree:
        """Return the nearest point: entries move down by a common amount, between the bounds."""
        return _on_vector(lambda v: _shift(v, self.total, self.upper, at_most=True), x)


class SymmetricNonNegative(AbstractConstraint):
    """{C = C', C >= 0, sum C <= total}: the paper's set for task interactions.

    >>> import foretune as ft, jax.numpy as jnp
    >>> ft.SymmetricNonNegative(total=1.0).project(jnp.array([[0.0, 3.0], [1.0, -2.0]]))
    Array([[0. , 0.5],
           [0.5, 0. ]], dtype=float32)
    """

    total: Number | None = None

    def __check_init__(self):
        if self.total is not None:
            _check_size("SymmetricNonNegative", "total", self.total)

    def project(self, x: PyTree) -> PyTree:
        """Return the nearest point of {C >= 0, sum C <= total} to (C + C') / 2."""
        for path, leaf in named_leaves(x, "x").items():
            if jnp.ndim(leaf) < 2 or jnp.shape(leaf)[-1] != jnp.shape(leaf)[-2]:
                raise ValueError(f"{self} needs square matrices, but {path} is {describe(leaf)}.")
        symmetric = jax.tree.map(lambda C: (C + jnp.swapaxes(C, -1, -2)) / 2, x)
        inner = NonNegative() if self.total is None else CappedSimplex(self.total, np.inf)
        return inner.project(symmetric)


def _shift(
    v: Float[Array, " n"], total: Number, upper: Number, *, at_most: bool
) -> Float[Array, " n"]:
    """Return clip(v - tau, 0, upper) with sum = total, or (`at_most`) tau = 0 if that is enough.

    The sum is piecewise linear and decreasing in tau. Newton's method on it, kept inside a bracket,
    ends in finitely many steps; the last one carries the derivative. One number for tau would err by
    n eps |tau| in the sum: it is found in parts, each the root for the entries less those before.
    """
    given, n = v.dtype, v.size
    v = v.astype(np.promote_types(given, np.float32))  # sums overflow in half precision
    total, upper = as_type(v.dtype, total, upper)

    def pieces(w):
        return (w > 0) & (w < upper), w >= upper

    def some(inside):
        return jnp.maximum(jnp.sum(inside), 1).astype(v.dtype)

    def root(w):
        def newton(carry):
            count, low, high, tau, _ = carry
            value = jnp.sum(jnp.clip(w - tau, 0, upper)) - total
            inside, _ = pieces(w - tau)
            low, high = jnp.where(value >= 0, tau, low), jnp.where(value <= 0, tau, high)
            step = tau + value / some(inside)
            good = jnp.any(inside) & (step > low) & (step < high)
            return count + 1, low, high, jnp.where(good, step, (low + high) / 2), tau

        def unfinished(carry):
            count, low, high, tau, before = carry
            return (count < NEWTON_STEPS) & (tau != before) & (low < high)

        # sum = 0 <= total at tau = max w, and sum >= total at min w - total / n, if it ever is.
        low, high = jnp.min(w) - total / n, jnp.max(w)
        start = (0, low, high, jnp.clip(0, low, high), jnp.full((), jnp.nan, v.dtype))
        return lax.while_loop(unfinished, newton, start)[3]

    free = lax.stop_gradient(v)
    centred = lax.fori_loop(0, PARTS, lambda _, w: w - root(w), free)
    inside, capped = pieces(centred)
    centred = centred + (v - free)  # the same, as a function of v
    held = jnp.sum(jnp.where(inside, centred, 0)) + jnp.sum(jnp.where(capped, upper, 0)) - total
    rest = jnp.where(jnp.any(inside), held / some(inside), 0)
    shifted = jnp.clip(centred - rest, 0, upper)
    if at_most:
        clipped = jnp.clip(v, 0, upper)
        shifted = jnp.where(jnp.sum(clipped) <= total, clipped, shifted)
    return shifted.astype(given)


def _on_vector(f: Callable[[Array], Array], x: PyTree) -> PyTree:
    vector, restore = ravel_pytree(x)
    return restore(f(vector))


def _check_size(name: str, field: str, value: Number, *, infinite: bool = False) -> None:
    """Raise unless the value is a number from 0 on."""
    size = numbers_in(f"{name}({field}={value!r:.60})", value, one=True)
    if size is None:
        return  # traced
    if size < 0:
        raise ValueError(f"an empty set: {name}({field}={value}); the {field} must be 0 or more.")
    if np.isinf(size) and not infinite:
        raise ValueError(f"{name}({field}={value}): the {field} must be finite.")

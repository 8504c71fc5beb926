"""Changes of variable: constraints under which the outer optimizer moves log(x) or its logit.

A learning rate then changes by factors rather than by differences, and never leaves its range.
"""

import abc

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, PyTree

from .._problem.checks import named_leaves
from .base import AbstractConstraint, Number, all_true, as_type, numbers_in

HAIR = 1e-7  # of an interval; nearer a bound, Adam's epsilon of 1e-8 would outweigh the slope


class Change(AbstractConstraint):
    """What `Log` and `Logit` share: x strictly between bounds, moved as another variable."""

    @abc.abstractmethod
    def _bounds(self, dtype: DTypeLike) -> tuple[Array, ...]:
        """Return the bounds, which x does not reach."""

    @abc.abstractmethod
    def _ends(self, dtype: DTypeLike) -> tuple[Array, ...]:
        """Return the ends of what a hyperparameter may be, from where it can still come back."""

    def project(self, x: PyTree) -> PyTree:
        """Return x, moved inside the bounds by a hair where it is not."""
        return jax.tree.map(lambda leaf: jnp.clip(leaf, *self._ends(leaf.dtype)), x)

    def contains(self, x: PyTree, tolerance: float = 0.0) -> Bool[Array, ""]:
        """Return whether all of x lies strictly between the bounds."""
        return all_true(jax.tree.map(self._inside, x))

    def _inside(self, leaf: Array) -> Bool[Array, "..."]:
        lower, upper = self._bounds(leaf.dtype)
        return (leaf > lower) & (leaf < upper)

    def check_start(self, x: PyTree, path: str = "x") -> None:
        for name, leaf in named_leaves(x, path).items():
            outside = np.asarray(leaf)[~np.asarray(self._inside(leaf))]
            if outside.size:
                many = f" in {outside.size:,} of {leaf.size:,} entries" if leaf.ndim else ""
                where = f"at {outside[0]!s}{many}, outside {self} or on its border"
                raise ValueError(f"{name}: it starts {where}, where it cannot move. Start inside.")

    def scale(self, u: PyTree, unit: PyTree) -> PyTree:
        """Return 1: a change of the variable is relative already."""
        return jax.tree.map(jnp.ones_like, u)


class Log(Change):
    """x > 0, moved as log(x): steps are factors. For learning rates and other scales.

    It cannot start at 0, which no factor changes.

    >>> import foretune as ft, jax.numpy as jnp
    >>> float(ft.Log().from_unconstrained(ft.Log().to_unconstrained(jnp.array(0.5))))
    0.5
    """

    def _bounds(self, dtype: DTypeLike) -> tuple[Array, ...]:
        return as_type(dtype, 0.0, jnp.inf)

    def _ends(self, dtype: DTypeLike) -> tuple[Array, ...]:
        # A factor of 4 from the ends: log(x) is rounded, and exp of it must stay a normal number.
        return as_type(dtype, 4 * jnp.finfo(dtype).tiny, jnp.finfo(dtype).max / 4)

    def to_unconstrained(self, x: PyTree) -> PyTree:
        return jax.tree.map(jnp.log, x)

    def from_unconstrained(self, u: PyTree) -> PyTree:
        return jax.tree.map(jnp.exp, u)


class Logit(Change):
    """lower < x < upper, moved as log((x - lower) / (upper - x)). For momenta and shares.

    >>> import foretune as ft, jax.numpy as jnp
    >>> float(ft.Logit(0.0, 1.0).to_unconstrained(jnp.array(0.5)))
    0.0
    """

    lower: Number = 0.0
    upper: Number = 1.0

    def __check_init__(self):
        given = f"Logit({self.lower}, {self.upper})"
        lower, upper = (numbers_in(given, bound, one=True) for bound in (self.lower, self.upper))
        if lower is None or upper is None:
            return  # traced
        if not np.isfinite([lower, upper]).all():
            raise ValueError(f"{given}: the bounds must be finite; for x > 0 there is `Log()`.")
        if not lower < upper:
            raise ValueError(f"an empty set: {given} has no number between its bounds.")

    def _bounds(self, dtype: DTypeLike) -> tuple[Array, ...]:
        return as_type(dtype, self.lower, self.upper)

    def _ends(self, dtype: DTypeLike) -> tuple[Array, ...]:
        # An optimizer must be able to see the logit's slope there; and the hair must hold several
        # of the numbers around a bound b, which lie eps |b| apart, or x + dx would be rounded to x.
        lower, upper = self._bounds(dtype)
        span, eps = upper - lower, float(jnp.finfo(dtype).eps)

        def hair(bound):
            least = jnp.maximum(max(eps, HAIR) * span, jnp.finfo(dtype).tiny)
            return jnp.minimum(jnp.maximum(least, eps**0.75 * jnp.abs(bound)), span / 4)

        low = jnp.maximum(lower + hair(lower), jnp.nextafter(lower, upper))
        return low, jnp.minimum(upper - hair(upper), jnp.nextafter(upper, lower))

    def check_start(self, x: PyTree, path: str = "x") -> None:
        for name, leaf in named_leaves(x, path).items():
            (lower, upper), (low, high) = self._bounds(leaf.dtype), self._ends(leaf.dtype)
            if not (lower < low <= high < upper and jnp.isfinite(upper - lower)):
                raise ValueError(
                    f"{name}: {leaf.dtype} has no numbers between the bounds of {self}, which it "
                    f"rounds to {lower} and {upper}. Take others, or hyperparameters of a wider type."
                )
        super().check_start(x, path)

    def to_unconstrained(self, x: PyTree) -> PyTree:
        def logit(leaf):
            lower, upper = self._bounds(leaf.dtype)
            return jnp.log(leaf - lower) - jnp.log(upper - leaf)

        return jax.tree.map(logit, x)

    def from_unconstrained(self, u: PyTree) -> PyTree:
        def between(u):
            lower, upper = self._bounds(u.dtype)
            span = upper - lower
            # From the nearer bound, where it is not rounded to the bound's own precision.
            from_lower, from_upper = span * jax.nn.sigmoid(u), span * jax.nn.sigmoid(-u)
            return jnp.where(u < 0, lower + from_lower, upper - from_upper)

        return jax.tree.map(between, u)

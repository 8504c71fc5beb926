"""Constraints: the set Lambda, with exact Euclidean projections.

A set has `project(x)`, the nearest point of the set, and `contains(x)`. Sets are given as a prefix of
the hyperparameters: `{"weight": CappedSimplex(1000.0), "lr": NonNegative()}`. Where they are a
NamedTuple, an `equinox.Module` or another container with fields, the prefix is a dict by field name, or
the same container with sets in its fields; for a list or tuple it is one as long. A set that stands
over a whole subtree holds for all its numbers together, as one vector; `None`, or a name left out,
means no constraint.

`Log` and `Logit` stand in the same places, but constrain by a change of variable: the outer
optimizer then moves log(x), so that a learning rate changes by factors rather than by differences.

Projections can be jitted and mapped, and have a derivative wherever the projection itself has one.
Those that shift all entries by a common amount find it by Newton's method, in a few passes over
the vector, where Optax's sort it and have no value at radius 0.
"""

import abc
import functools
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, PyTree

from .._problem.checks import describe, named_leaves

NEWTON_STEPS = 100
PARTS = 3  # of a common shift
DYKSTRA_STEPS = 1000
HAIR = 1e-7  # of an interval; nearer a bound, Adam's epsilon of 1e-8 would outweigh the slope

Number = Any  # a real number of any type; `_numbers` says what was given instead


class AbstractConstraint(eqx.Module):
    """Where a hyperparameter may be, and the variable in which it is searched for."""

    @abc.abstractmethod
    def project(self, x: PyTree) -> PyTree:
        """Return the nearest point of the set."""

    def contains(self, x: PyTree, tolerance: float = 1e-5) -> Bool[Array, ""]:
        """Return whether x lies in the set, up to `tolerance` times its size."""
        distance, size = _norm(jax.tree.map(jnp.subtract, x, self.project(x))), _norm(x)
        return distance <= tolerance * jnp.maximum(size, 1.0)

    def check_start(self, x: PyTree) -> PyTree:
        """Return x, or raise where a run cannot start from it (nor from its projection)."""
        return x

    def to_search(self, x: PyTree) -> PyTree:
        """Return the variable that the outer optimizer moves: x itself, for a set."""
        return x

    def from_search(self, u: PyTree) -> PyTree:
        """Return x from the variable that the outer optimizer moves."""
        return u

    def reach(self, u: PyTree, unit: PyTree) -> PyTree:
        """Return the natural size of a change: u's own, and `unit` where u is near 0."""
        return jax.tree.map(lambda u, unit: jnp.abs(u) + unit, u, unit)


class Box(AbstractConstraint):
    """{lower <= x <= upper}; the bounds are numbers or arrays, and may be infinite.

    >>> import foretune as ft, jax.numpy as jnp
    >>> ft.Box(0.0, 1.0).project(jnp.array([-1.0, 0.5, 2.0]))
    Array([0. , 0.5, 1. ], dtype=float32)
    """

    lower: Any
    upper: Any

    def __check_init__(self):
        given = f"Box({self.lower}, {self.upper})"
        lower, upper = (_numbers(given, bound) for bound in (self.lower, self.upper))
        if lower is None or upper is None:
            return  # traced
        try:
            np.broadcast_shapes(lower.shape, upper.shape)
        except ValueError:
            raise ValueError(
                f"{given}: the bounds have the shapes {lower.shape} and {upper.shape}, which do not "
                "fit each other."
            ) from None
        if not np.all((lower <= upper) & (lower < np.inf) & (upper > -np.inf)):
            raise ValueError(f"an empty set: {given} has no number between its bounds.")

    def project(self, x: PyTree) -> PyTree:
        """Return x with each entry clipped to the bounds."""
        return jax.tree.map(lambda leaf: jnp.clip(leaf, *_like(leaf, self.lower, self.upper)), x)

    def reach(self, u: PyTree, unit: PyTree) -> PyTree:
        """Return the natural size of a change: no more than the way to the upper bound is long."""

        def size(u, unit):
            own = jnp.abs(u) + unit
            (upper,) = _like(u, self.upper)
            return jnp.minimum(own, jnp.maximum(upper - u, 1e-3 * own))  # it can leave the bound

        return jax.tree.map(size, u, unit)


class NonNegative(AbstractConstraint):
    """{x >= 0}.

    >>> import foretune as ft, jax.numpy as jnp
    >>> ft.NonNegative().project(jnp.array([-1.0, 0.5]))
    Array([0. , 0.5], dtype=float32)
    """

    def project(self, x: PyTree) -> PyTree:
        """Return x with negative entries set to 0."""
        return optax.projections.projection_non_negative(x)


class L1Ball(AbstractConstraint):
    """{sum |x| <= radius}.

    >>> import foretune as ft, jax.numpy as jnp
    >>> ft.L1Ball(1.0).project(jnp.array([2.0, -1.5]))
    Array([ 0.75, -0.25], dtype=float32)
    """

    radius: Number

    def __check_init__(self):
        _check_size("L1Ball", "radius", self.radius)

    def project(self, x: PyTree) -> PyTree:
        """Return the nearest point of the ball: entries shrink by a common amount."""
        # |x| onto {0 <= y, sum y <= radius}, with the signs put back.
        magnitude = CappedSimplex(self.radius, np.inf).project(jax.tree.map(jnp.abs, x))
        return jax.tree.map(lambda leaf, m: jnp.where(leaf < 0, -m, m), x, magnitude)


class L2Ball(AbstractConstraint):
    """{sqrt(sum x^2) <= radius}.

    >>> import foretune as ft, jax.numpy as jnp
    >>> ft.L2Ball(1.0).project(jnp.array([3.0, 4.0]))
    Array([0.6, 0.8], dtype=float32)
    """

    radius: Number

    def __check_init__(self):
        _check_size("L2Ball", "radius", self.radius)

    def project(self, x: PyTree) -> PyTree:
        """Return x, scaled down if it is too long."""
        unit, square = _scaled_square(x)
        outside = unit * jnp.sqrt(square) > self.radius
        # A root of 1 inside the ball: at 0 Optax's has no value (radius 0).
        length = unit * jnp.sqrt(jnp.where(outside, square, 1.0))
        scale = jnp.where(outside, self.radius / length, 1.0)
        return jax.tree.map(lambda leaf: (leaf * scale).astype(leaf.dtype), x)


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


class Symmetric(AbstractConstraint):
    """{C = C', C in inner}, for an inner set that holds C' whenever it holds C.

    >>> import foretune as ft, jax.numpy as jnp
    >>> ft.Symmetric(ft.Box(0.0, 1.0)).project(jnp.array([[0.5, 3.0], [-1.0, 0.0]]))
    Array([[0.5, 1. ],
           [1. , 0. ]], dtype=float32)
    """

    inner: Any

    def __check_init__(self):
        _check_set("Symmetric", self.inner)
        if isinstance(self.inner, Box):
            for bound in (self.inner.lower, self.inner.upper):
                array = _numbers("a bound of Symmetric(Box(...))", bound)
                if array is not None and array.ndim:
                    matrix = np.atleast_2d(array)
                    if not np.array_equal(matrix, np.swapaxes(matrix, -1, -2)):
                        raise ValueError(
                            f"Symmetric(Box(...)): the bound {describe(array)} is not symmetric."
                        )

    def project(self, x: PyTree) -> PyTree:
        """Return the inner projection of (C + C') / 2, symmetric to the bit."""
        for path, leaf in named_leaves(x, "x").items():
            if jnp.ndim(leaf) < 2 or jnp.shape(leaf)[-1] != jnp.shape(leaf)[-2]:
                raise ValueError(
                    f"Symmetric needs square matrices, but {path} is {describe(leaf)}."
                )
        symmetric = jax.tree.map(lambda C: (C + jnp.swapaxes(C, -1, -2)) / 2, x)
        return self.inner.project(symmetric)


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
        """Return the nearest point of the set."""
        inner = NonNegative() if self.total is None else CappedSimplex(self.total, np.inf)
        return Symmetric(inner).project(x)


class Intersection(AbstractConstraint):
    """The points that lie in all of several sets, by Dykstra's alternating projections.

    It stops when a round moves the point by less than `tolerance` times its size, so the result lies
    in the sets to about that tolerance; the named sets are exact and cheaper where they fit.

    >>> import foretune as ft, jax.numpy as jnp
    >>> both = ft.Intersection(ft.Box(0.0, 1.0), ft.L2Ball(1.0))
    >>> both.project(jnp.array([3.0, 4.0]))
    Array([0.6, 0.8], dtype=float32)
    """

    sets: tuple[Any, ...]
    tolerance: Number

    def __init__(self, *sets: Any, tolerance: Number = 1e-6):
        self.sets, self.tolerance = sets, tolerance
        if len(sets) < 2:
            raise ValueError(f"Intersection needs two sets or more, got {len(sets)}.")
        for constraint in sets:
            _check_set("Intersection", constraint)
        size = _numbers(f"Intersection(tolerance={tolerance!r})", tolerance, one=True)
        if size is not None and not 0 < size < np.inf:
            raise ValueError(
                f"Intersection(tolerance={tolerance}): it must be positive and finite."
            )

    def contains(self, x: PyTree, tolerance: float = 1e-5) -> Bool[Array, ""]:
        """Return whether x lies in all the sets, up to `tolerance` times its size."""
        return _all([constraint.contains(x, tolerance) for constraint in self.sets])

    def check_start(self, x: PyTree) -> PyTree:
        """Return x, or raise where the sets have no point in common."""
        if not self.contains(self.project(x), 1e-3):
            raise ValueError(
                f"the sets of {self} have no point in common (none was found in {DYKSTRA_STEPS} "
                "rounds of projections)."
            )
        return x

    def project(self, x: PyTree) -> PyTree:
        """Return the nearest point of the intersection."""

        def one_round(carry):
            count, _, y, corrections = carry
            before, updated = y, []
            for constraint, correction in zip(self.sets, corrections, strict=True):
                moved = jax.tree.map(jnp.add, y, correction)
                y = constraint.project(moved)
                updated.append(jax.tree.map(jnp.subtract, moved, y))
            # A round may leave y where it was while the corrections still build up.
            moves = [(y, before), *zip(updated, corrections, strict=True)]
            change = jnp.stack([_norm(jax.tree.map(jnp.subtract, a, b)) for a, b in moves]).max()
            return count + 1, change, y, tuple(updated)

        def unfinished(carry):
            count, change, y, _ = carry
            return (count < DYKSTRA_STEPS) & (change > self.tolerance * jnp.maximum(_norm(y), 1.0))

        zeros = tuple(jax.tree.map(jnp.zeros_like, x) for _ in self.sets)
        start = one_round((0, jnp.inf, x, zeros))
        return lax.while_loop(unfinished, one_round, start)[2]


class Log(AbstractConstraint):
    """x > 0, moved as log(x): steps are factors. For learning rates and other scales.

    It cannot start at 0, which no factor changes.

    >>> import foretune as ft, jax.numpy as jnp
    >>> float(ft.Log().from_search(ft.Log().to_search(jnp.array(0.5))))
    0.5
    """

    def project(self, x: PyTree) -> PyTree:
        """Return x, with what is not positive (or infinite) moved to the ends of what exp can reach."""

        def inside(leaf):
            # A factor of 4 from the ends: log(x) is rounded, and exp of it must stay a normal number.
            least, most = 4 * jnp.finfo(leaf.dtype).tiny, jnp.finfo(leaf.dtype).max / 4
            return jnp.clip(leaf, *_like(leaf, least, most))

        return jax.tree.map(inside, x)

    def contains(self, x: PyTree, tolerance: float = 0.0) -> Bool[Array, ""]:
        """Return whether all of x is positive and finite."""
        return _all(jax.tree.map(lambda leaf: (leaf > 0) & jnp.isfinite(leaf), x))

    def check_start(self, x: PyTree) -> PyTree:
        """Return x if it is positive, or raise."""
        return _inside(self, x)

    def to_search(self, x: PyTree) -> PyTree:
        """Return log(x)."""
        return jax.tree.map(jnp.log, x)

    def from_search(self, u: PyTree) -> PyTree:
        """Return exp(u)."""
        return jax.tree.map(jnp.exp, u)

    def reach(self, u: PyTree, unit: PyTree) -> PyTree:
        """Return 1: a change of log(x) is relative already."""
        return jax.tree.map(jnp.ones_like, u)


class Logit(AbstractConstraint):
    """lower < x < upper, moved as log((x - lower) / (upper - x)). For momenta and shares.

    >>> import foretune as ft, jax.numpy as jnp
    >>> float(ft.Logit(0.0, 1.0).to_search(jnp.array(0.5)))
    0.0
    """

    lower: Number = 0.0
    upper: Number = 1.0

    def __check_init__(self):
        given = f"Logit({self.lower}, {self.upper})"
        lower, upper = (_numbers(given, bound, one=True) for bound in (self.lower, self.upper))
        if lower is None or upper is None:
            return  # traced
        if not np.isfinite([lower, upper]).all():
            raise ValueError(f"{given}: the bounds must be finite; for x > 0 there is `Log()`.")
        if not lower < upper:
            raise ValueError(f"an empty set: {given} has no number between its bounds.")

    def project(self, x: PyTree) -> PyTree:
        """Return x, moved inside the open interval by a hair where it is not."""
        return jax.tree.map(lambda leaf: jnp.clip(leaf, *self._ends(leaf.dtype)), x)

    def _ends(self, dtype: Any) -> tuple[Array, Array]:
        """Return the ends of what a hyperparameter may be, from where it can still come back.

        The logit's slope there is that of the hair's share of the interval, which an optimizer must
        be able to see; and around a bound b numbers lie eps |b| apart, of which the hair must hold
        several, or x + dx would be rounded to x.
        """
        lower, upper = _like(jnp.zeros((), dtype), self.lower, self.upper)
        span, eps = upper - lower, float(jnp.finfo(dtype).eps)

        def hair(bound):
            least = jnp.maximum(max(eps, HAIR) * span, jnp.finfo(dtype).tiny)
            return jnp.minimum(jnp.maximum(least, eps**0.75 * jnp.abs(bound)), span / 4)

        low = jnp.maximum(lower + hair(lower), jnp.nextafter(lower, upper))
        return low, jnp.minimum(upper - hair(upper), jnp.nextafter(upper, lower))

    def contains(self, x: PyTree, tolerance: float = 0.0) -> Bool[Array, ""]:
        """Return whether all of x lies strictly between the bounds."""
        return _all(jax.tree.map(lambda leaf: (leaf > self.lower) & (leaf < self.upper), x))

    def check_start(self, x: PyTree) -> PyTree:
        """Return x if it lies strictly between the bounds, or raise."""
        for leaf in jax.tree.leaves(x):
            lower, upper = _like(leaf, self.lower, self.upper)
            low, high = self._ends(leaf.dtype)
            if not (lower < low <= high < upper and jnp.isfinite(upper - lower)):
                raise ValueError(
                    f"{leaf.dtype} has no numbers between the bounds of {self}, which it rounds to "
                    f"{lower} and {upper}. Take others, or hyperparameters of a wider type."
                )
        return _inside(self, x)

    def to_search(self, x: PyTree) -> PyTree:
        """Return the logit of x between the bounds."""
        return jax.tree.map(lambda x: jnp.log(x - self.lower) - jnp.log(self.upper - x), x)

    def from_search(self, u: PyTree) -> PyTree:
        """Return x from its logit."""

        def between(u):
            lower, upper = _like(u, self.lower, self.upper)
            span = upper - lower
            # From the nearer bound, where it is not rounded to the bound's own precision.
            from_lower, from_upper = span * jax.nn.sigmoid(u), span * jax.nn.sigmoid(-u)
            return jnp.where(u < 0, lower + from_lower, upper - from_upper)

        return jax.tree.map(between, u)

    def reach(self, u: PyTree, unit: PyTree) -> PyTree:
        """Return 1: a change of the logit is relative already."""
        return jax.tree.map(jnp.ones_like, u)


class Free(AbstractConstraint):
    """No constraint."""

    def project(self, x: PyTree) -> PyTree:
        """Return x."""
        return x


def check_constraints(constraints: Any, hparams: PyTree, path: str = "hparams") -> PyTree:
    """Return the constraints as a full prefix of the hyperparameters, or raise where none fits."""
    if constraints is None:
        return Free()
    if isinstance(constraints, AbstractConstraint):
        try:
            shapes = jax.eval_shape(constraints.project, hparams)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{constraints} does not fit {path}: {error}") from error
        for (name, leaf), after in zip(
            named_leaves(hparams, path).items(), jax.tree.leaves(shapes), strict=True
        ):
            if after.shape != leaf.shape:
                raise ValueError(
                    f"the bounds of {constraints} do not fit {name}, which is {describe(leaf)}."
                )
        return constraints
    parts, structure = _parts(hparams)
    names = {_name(key): key for key in parts}
    same = type(constraints) is type(hparams) and structure != jax.tree.structure(0)  # no leaf
    if isinstance(constraints, Mapping) and names and None not in names:
        unknown = sorted(set(constraints) - set(names), key=str)
        if unknown:
            raise ValueError(
                f"constraints[{unknown[0]!r}] names no hyperparameter; {path} has "
                f"{sorted(names, key=str)}."
            )
        given = {key: constraints.get(name) for name, key in names.items()}
    elif same and _parts(constraints)[0].keys() == parts.keys():
        given = _parts(constraints)[0]
    else:
        raise TypeError(_misfit(constraints, hparams, path))
    return structure.unflatten(
        check_constraints(given[key], part, path + jax.tree_util.keystr((key,)))
        for key, part in parts.items()
    )


def _misfit(constraints: Any, hparams: PyTree, path: str) -> str:
    if isinstance(constraints, type):
        return f"the constraint of {path} is a class; write `{constraints.__name__}(...)`."
    if type(constraints) is type(hparams) and isinstance(constraints, list | tuple):
        return (
            f"the constraints of {path} are {len(constraints)}, but it has {len(hparams)} parts: give "
            "one for each (None for no constraint)."
        )
    return (
        f"the constraint of {path} is {describe(constraints)}, which does not fit: give a set "
        "(`foretune.NonNegative()` and the like), None, the same container as in hparams, or a dict "
        "by the names of its keys or fields."
    )


def _parts(tree: PyTree) -> tuple[dict[Any, PyTree], Any]:
    """Return the parts of a container by JAX's keys (none for a leaf), and its structure."""
    flat, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda n: n is not tree)
    return {path[0]: part for path, part in flat if path}, structure


def _name(key: Any) -> Any:
    """Return the name that a dict gives to a part: its key or field, or None for a position."""
    if isinstance(key, jax.tree_util.DictKey):
        return key.key
    return key.name if isinstance(key, jax.tree_util.GetAttrKey) else None


def apply_constraints(constraints: PyTree, how: str, x: PyTree, *more: PyTree) -> PyTree:
    """Return `project`, `to_search`, `reach`, ... of each constraint on its part of x."""
    return jax.tree.map(
        lambda constraint, *parts: getattr(constraint, how)(*parts),
        constraints,
        x,
        *more,
        is_leaf=_is_constraint,
    )


def check_starts(constraints: PyTree, x: PyTree) -> None:
    """Raise where a part of x starts where its constraint cannot move it."""

    def check(path, constraint, part):
        try:
            constraint.check_start(part)
        except ValueError as error:
            raise ValueError(f"hparams{jax.tree_util.keystr(path)}: {error}") from None

    jax.tree_util.tree_map_with_path(check, constraints, x, is_leaf=_is_constraint)


def _is_constraint(node: Any) -> bool:
    return isinstance(node, AbstractConstraint)


def _shift(v: Float[Array, " n"], total: Any, upper: Any, *, at_most: bool) -> Float[Array, " n"]:
    """Return clip(v - tau, 0, upper) with sum = total, or (`at_most`) tau = 0 if that is enough.

    The sum is piecewise linear and decreasing in tau. Newton's method on it, kept inside a
    bracket, ends in finitely many steps; the last step, on the final pieces, carries the derivative.

    Where the entries are large, or many for a small total, tau rounded to one number would leave an
    error of n eps |tau| in the sum. So it is found in parts, tau = tau_1 + tau_2 + ..., each the
    root for the entries less the parts before it: v - tau_1 is exact for the entries near tau_1.
    """
    given, v, n = v.dtype, _wide(v), v.size
    total, upper = _like(v, total, upper)

    def pieces(w):
        return (w > 0) & (w < upper), w >= upper

    def root(w):
        def newton(carry):
            count, low, high, tau, _ = carry
            value = jnp.sum(jnp.clip(w - tau, 0, upper)) - total
            inside, _ = pieces(w - tau)
            low, high = jnp.where(value >= 0, tau, low), jnp.where(value <= 0, tau, high)
            step = tau + value / jnp.maximum(jnp.sum(inside), 1)
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
    rest = jnp.where(jnp.any(inside), held / jnp.maximum(jnp.sum(inside), 1), 0)
    shifted = jnp.clip(centred - rest, 0, upper)
    if at_most:
        clipped = jnp.clip(v, 0, upper)
        shifted = jnp.where(jnp.sum(clipped) <= total, clipped, shifted)
    return shifted.astype(given)


def _all(tree: PyTree) -> Bool[Array, ""]:
    return jnp.all(jnp.array([jnp.all(leaf) for leaf in jax.tree.leaves(tree)]))


def _inside(constraint: AbstractConstraint, x: PyTree) -> PyTree:
    if not constraint.contains(x):
        raise ValueError(
            f"a hyperparameter under {constraint} starts at {jax.tree.leaves(x)!r:.100}, outside it or "
            "on its border, from where it cannot move. Start inside."
        )
    return x


def _on_vector(f: Callable[[Array], Array], x: PyTree) -> PyTree:
    vector, restore = ravel_pytree(x)
    return restore(f(vector))


def _like(leaf: Any, *bounds: Any) -> tuple[Array, ...]:
    with np.errstate(over="ignore"):  # beyond the type's range: infinite, as it should be
        return tuple(jnp.asarray(bound, jnp.asarray(leaf).dtype) for bound in bounds)


def _wide(x: Array) -> Array:
    """Return x in single precision at least: sums of many numbers overflow in half precision."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _scaled_square(x: PyTree) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the largest entry's size c and sum (x / c)^2, which cannot overflow."""
    leaves = [_wide(jnp.asarray(leaf)) for leaf in jax.tree.leaves(x)]
    largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(leaf), initial=0) for leaf in leaves])
    unit = lax.stop_gradient(jnp.where(largest > 0, largest, 1.0))
    return unit, functools.reduce(jnp.add, [jnp.sum((leaf / unit) ** 2) for leaf in leaves])


def _norm(x: PyTree) -> Float[Array, ""]:
    unit, square = _scaled_square(x)
    return unit * jnp.sqrt(square)


def _check_size(name: str, field: str, value: Any, *, infinite: bool = False) -> None:
    """Raise unless the value is a number from 0 on."""
    size = _numbers(f"{name}({field}={value!r:.60})", value, one=True)
    if size is None:
        return  # traced
    if size < 0:
        raise ValueError(f"an empty set: {name}({field}={value}); the {field} must be 0 or more.")
    if np.isinf(size) and not infinite:
        raise ValueError(f"{name}({field}={value}): the {field} must be finite.")


def _numbers(given: str, value: Any, *, one: bool = False) -> np.ndarray | None:
    """Return real numbers (`one`: a single one) on the host, None for traced ones, or raise."""
    if isinstance(value, Tracer):
        return None
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        array = np.array(None)
    real = any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.integer))
    if not real or (one and array.ndim):
        needed = "a real number" if one else "real numbers, or arrays of them,"
        raise TypeError(f"{given}: {needed} expected, got {describe(value)}.")
    if np.isnan(array).any():
        raise ValueError(f"{given}: NaN is no bound.")
    return array.astype(np.float64)


def _check_set(name: str, inner: Any) -> None:
    """Raise unless `inner` is a set, which Log and Logit are not."""
    if isinstance(inner, type):
        raise TypeError(f"{name} takes sets; got a class: write `{inner.__name__}(...)`.")
    if not isinstance(inner, AbstractConstraint):
        raise TypeError(
            f"{name} takes sets, `foretune.Box(0.0, 1.0)` and the like; got {describe(inner)}."
        )
    if isinstance(inner, Log | Logit):
        raise ValueError(f"{name} takes sets; Log and Logit are changes of variable.")

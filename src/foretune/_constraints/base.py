"""Constraints: where hyperparameters may be, and in which variable they are searched for.

They are given as a prefix of the hyperparameters: `{"weight": CappedSimplex(1000.0), "lr":
NonNegative()}`. Where these are a NamedTuple, an `equinox.Module` or another container with fields, the
prefix is a dict by field name, or the same container with constraints in its fields; for a list or
tuple it is one as long. A constraint that stands over a whole subtree holds for all its numbers
together, as one vector; `None`, or a name left out, means none.

`sets.py` has the sets, with their projections; `variables.py` has `Log` and `Logit`.
"""

import abc
import functools
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, PyTree

from .._problem.checks import describe, named_leaves

Number = Any  # a real number of any type; `numbers_in` says what was given instead


class AbstractConstraint(eqx.Module):
    """Where a hyperparameter may be, and the variable in which it is searched for."""

    @abc.abstractmethod
    def project(self, x: PyTree) -> PyTree:
        """Return the nearest point of the set."""

    def contains(self, x: PyTree, tolerance: float = 1e-5) -> Bool[Array, ""]:
        """Return whether x lies in the set, up to `tolerance` times its size."""
        distance, size = norm(jax.tree.map(jnp.subtract, x, self.project(x))), norm(x)
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


def sizes(constraints: PyTree, u: PyTree) -> PyTree:
    """Return the natural size of each entry of a search variable.

    That is its own magnitude; 1 under `Log` and `Logit`; the way to the upper bound of a `Box` where
    that is shorter, but a tenth of the rest at least, since at the bound there is no way left. An entry
    that is 0 counts as the mean of its leaf, and as 1 where the whole leaf is 0.
    """

    def unit(leaf):
        typical = jnp.mean(jnp.abs(leaf))
        return jnp.where(leaf == 0, jnp.where(typical == 0, 1.0, typical), 0.0).astype(leaf.dtype)

    units = jax.tree.map(unit, u)
    reach = apply_constraints(constraints, "reach", u, units)
    return jax.tree.map(
        lambda u, unit, r: jnp.maximum(r, 0.1 * jnp.minimum(jnp.abs(u) + unit, 1.0)),
        u,
        units,
        reach,
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


def all_true(tree: PyTree) -> Bool[Array, ""]:
    return jnp.all(jnp.array([jnp.all(leaf) for leaf in jax.tree.leaves(tree)]))


def like(leaf: Any, *bounds: Any) -> tuple[Array, ...]:
    with np.errstate(over="ignore"):  # beyond the type's range: infinite, as it should be
        return tuple(jnp.asarray(bound, jnp.asarray(leaf).dtype) for bound in bounds)


def wide(x: Array) -> Array:
    """Return x in single precision at least: sums of many numbers overflow in half precision."""
    return x.astype(np.promote_types(x.dtype, np.float32))


def scaled_square(x: PyTree) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the largest entry's size c and sum (x / c)^2, which cannot overflow."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(x)]
    dtype = functools.reduce(np.promote_types, [leaf.dtype for leaf in leaves], np.float32)
    leaves = [leaf.astype(dtype) for leaf in leaves]
    largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(leaf), initial=0) for leaf in leaves])
    unit = lax.stop_gradient(jnp.where(largest > 0, largest, 1.0))
    return unit, functools.reduce(jnp.add, [jnp.sum((leaf / unit) ** 2) for leaf in leaves])


def norm(x: PyTree) -> Float[Array, ""]:
    unit, square = scaled_square(x)
    return unit * jnp.sqrt(square)


def numbers_in(given: str, value: Any, *, one: bool = False) -> np.ndarray | None:
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

"""Constraints: where hyperparameters may be, and the unconstrained variable that is moved instead.

They are given as a prefix of the hyperparameters: `{"lr": NonNegative()}`. For a container with fields,
the prefix is a dict by field name, or the same container; for a list or tuple it is one as long. A
constraint over a subtree is for all its numbers together; `None`, or a name left out, means none.
"""

import abc
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Bool, DTypeLike, PyTree

from .._problem.arguments import filtered
from .._problem.checks import describe, named_leaves
from .._problem.warn import warn

Number: TypeAlias = object  # a real number of any type; `numbers_in` reports what is none


class AbstractConstraint(eqx.Module):
    """Where a hyperparameter may be, and the unconstrained variable that the optimizer moves."""

    @abc.abstractmethod
    def project(self, x: PyTree) -> PyTree:
        """Return the nearest point of the set."""

    def contains(self, x: PyTree, tolerance: float = 1e-5) -> Bool[Array, ""]:
        """Return whether x lies in the set, up to `tolerance` times its largest entry (or 1)."""
        sizes = [jnp.max(jnp.abs(leaf), initial=1).astype(float) for leaf in jax.tree.leaves(x)]
        off = jax.tree.map(lambda a, b: jnp.abs(a - b).astype(float), x, self.project(x))
        return all_true(jax.tree.map(lambda d: d <= tolerance * jnp.max(jnp.stack(sizes)), off))

    def check_start(self, x: PyTree, path: str = "x") -> None:
        """Raise where a run can start neither from x, which is at `path`, nor from its projection."""

    def to_unconstrained(self, x: PyTree) -> PyTree:
        """Return the variable that the outer optimizer moves: x itself, for a set."""
        return x

    def from_unconstrained(self, u: PyTree) -> PyTree:
        """Return x from the variable that the outer optimizer moves."""
        return u

    def scale(self, u: PyTree, unit: PyTree) -> PyTree:
        """Return the natural scale of a change: |u|, and `unit` where u is near 0."""
        return jax.tree.map(lambda u, unit: jnp.abs(u) + unit, u, unit)


class Free(AbstractConstraint):
    """No constraint."""

    def project(self, x: PyTree) -> PyTree:
        return x


def check_constraints(constraints: object, hparams: PyTree, path: str = "hparams") -> PyTree:
    """Return the constraints as a full prefix of the hyperparameters, or raise where none fits."""
    if constraints is None:
        return Free()
    if isinstance(constraints, AbstractConstraint):
        try:
            shapes = jax.eval_shape(constraints.project, hparams)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{constraints} does not fit {path}: {error}") from error
        leaves = named_leaves(hparams, path).items()
        for (name, leaf), after in zip(leaves, jax.tree.leaves(shapes), strict=True):
            if after.shape != leaf.shape:
                found = f"{name}, which is {describe(leaf)}"
                raise ValueError(f"the bounds of {constraints} do not fit {found}.")
        return constraints
    parts = _parts(hparams)
    names = {_name(key): key for key in parts}
    same = type(constraints) is type(hparams) and not jax.tree_util.all_leaves([hparams])
    if isinstance(constraints, Mapping) and names and None not in names:
        if unknown := sorted(set(constraints) - set(names), key=str):
            there = f"{path} has {sorted(names, key=str)}"
            raise ValueError(f"constraints[{unknown[0]!r}] names no hyperparameter; {there}.")
        given = {key: constraints.get(name) for name, key in names.items()}
    elif same and _parts(constraints).keys() == parts.keys():
        given = _parts(constraints)
    else:
        raise TypeError(_misfit(constraints, hparams, path))
    structure = jax.tree.structure(hparams, is_leaf=lambda node: node is not hparams)
    return structure.unflatten(
        check_constraints(given[key], part, path + jax.tree_util.keystr((key,)))
        for key, part in parts.items()
    )


def _misfit(constraints: object, hparams: PyTree, path: str) -> str:
    if isinstance(constraints, type):
        return f"the constraint of {path} is a class; write `{constraints.__name__}(...)`."
    if type(constraints) is type(hparams) and isinstance(constraints, list | tuple):
        needed = f"it has {len(hparams)} parts: give one for each (None for no constraint)"
        return f"the constraints of {path} are {len(constraints)}, but {needed}."
    return (
        f"the constraint of {path} is {describe(constraints)}, which does not fit: give a set "
        "(`NonNegative()` and the like), None, the same container, or a dict of its names."
    )


def _parts(tree: PyTree) -> dict[Hashable, PyTree]:
    """Return the parts of a container by JAX's keys; none for a leaf."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    return {path[0]: part for path, part in flat if path}


def _name(key: Any) -> Hashable:
    """Return the name that a dict gives to a part: its key or field, or None for a position."""
    if isinstance(key, jax.tree_util.DictKey):
        return key.key
    return key.name if isinstance(key, jax.tree_util.GetAttrKey) else None


def to_unconstrained(constraints: PyTree, x: PyTree) -> PyTree:
    return map_parts(lambda constraint, x: constraint.to_unconstrained(x), constraints, x)


def from_unconstrained(constraints: PyTree, u: PyTree) -> PyTree:
    return map_parts(lambda constraint, u: constraint.from_unconstrained(u), constraints, u)


def project(constraints: PyTree, x: PyTree) -> PyTree:
    return map_parts(lambda constraint, x: constraint.project(x), constraints, x)


def scales_with(constraints: PyTree, u: PyTree, units: PyTree) -> PyTree:
    """Return the scale of each entry of u, where `units` are added to its magnitude."""
    return map_parts(lambda constraint, u, unit: constraint.scale(u, unit), constraints, u, units)


def scales(constraints: PyTree, u: PyTree) -> PyTree:
    """Return the natural scale of each entry of an unconstrained variable.

    That is its own magnitude; 1 under `Log` and `Logit`; the way to the upper bound of a `Box` where
    that is shorter. A 0 counts as the mean of its leaf, and as 1 where the whole leaf is 0.
    """

    def unit(leaf):
        typical = jnp.mean(jnp.abs(leaf))
        return jnp.where(leaf == 0, jnp.where(typical == 0, 1.0, typical), 0.0).astype(leaf.dtype)

    def at_least(scale, u, unit):
        return jnp.maximum(scale, 0.1 * jnp.minimum(jnp.abs(u) + unit, 1.0))

    units = jax.tree.map(unit, u)
    return jax.tree.map(at_least, scales_with(constraints, u, units), u, units)


def moved(constraints: PyTree, hparams: PyTree, change: PyTree) -> PyTree:
    """Return the hyperparameters after a change in units of their scales, inside constraints."""
    u = to_unconstrained(constraints, hparams)
    c = scales(constraints, u)
    there = jax.tree.map(lambda u, c, change: u + (c * change).astype(u.dtype), u, c, change)
    return project(constraints, from_unconstrained(constraints, there))


def feasible(constraints: PyTree, hparams: PyTree) -> PyTree:
    """Return the projection of a start onto its constraints, with a warning where it moves."""
    check_starts(constraints, hparams)
    inside = _project(constraints, hparams)
    leaves = named_leaves(hparams, "hparams").items()
    for (path, given), after in zip(leaves, jax.tree.leaves(inside), strict=True):
        distance = float(jnp.linalg.norm(jnp.ravel(given - after)))
        if distance > 1e-5 * max(1.0, float(jnp.linalg.norm(jnp.ravel(given)))):
            where = f"outside its constraint, at a distance of {distance:.3g}"
            warn(f"{path} starts {where}; it is projected onto it.")
    return inside


_project = filtered(project)


def check_starts(constraints: PyTree, x: PyTree) -> None:
    """Raise where a part of x starts where its constraint cannot move it."""

    def check(path, constraint, part):
        constraint.check_start(part, f"hparams{jax.tree_util.keystr(path)}")

    jax.tree_util.tree_map_with_path(check, constraints, x, is_leaf=is_constraint)


def map_parts(f: Callable[..., PyTree], constraints: PyTree, *trees: PyTree) -> PyTree:
    """Return f of each constraint and of its part of the trees."""
    return jax.tree.map(f, constraints, *trees, is_leaf=is_constraint)


def is_constraint(node: object) -> bool:
    return isinstance(node, AbstractConstraint)


def all_true(tree: PyTree) -> Bool[Array, ""]:
    return jnp.all(jnp.array([jnp.all(leaf) for leaf in jax.tree.leaves(tree)]))


def as_type(dtype: DTypeLike, *bounds: Number) -> tuple[Array, ...]:
    """Return the bounds in the type of what they bound."""
    with np.errstate(over="ignore"):  # beyond the type's range: infinite, as it should be
        return tuple(jnp.asarray(cast(ArrayLike, bound), dtype) for bound in bounds)


def numbers_in(given: str, value: Number, *, one: bool = False) -> np.ndarray | None:
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
    if np.isnan(array).any() or np.ma.is_masked(value):
        raise ValueError(f"{given}: NaN is no bound, and no masked entry is.")
    return array.astype(np.float64)

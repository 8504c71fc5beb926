"""A pytree as the argument of a compiled program: its arrays, and all the rest.

`equinox.filter_jit` makes the same split; here it is made once per call, for checks and program.
JAX keeps every program that it has compiled, some megabytes each; `Compiled` and `filtered` keep those
that were used last, a number for the whole library.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

PROGRAMS = 64  # kept in all; an attribution makes five


class Structure(NamedTuple):
    """What is not an array in a pytree; hashable, so that a program can be compiled for it."""

    treedef: Any
    static: tuple[object, ...]  # the leaves, with `Structure` standing where an array goes


def flatten(tree: PyTree) -> tuple[list, Structure]:  # of arrays, NumPy's too
    """Return the arrays of a pytree, and its structure."""
    leaves, treedef = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array | np.ndarray)]
    static = (Structure if isinstance(x, jax.Array | np.ndarray) else x for x in leaves)
    return arrays, Structure(treedef, tuple(static))


def unflatten(structure: Structure, arrays: Iterable[PyTree]) -> PyTree:
    remaining = iter(arrays)
    leaves = [next(remaining) if leaf is Structure else leaf for leaf in structure.static]
    return jax.tree.unflatten(structure.treedef, leaves)


def copied(tree: PyTree) -> PyTree:
    """Return the pytree with arrays of its own, which may be donated."""
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if eqx.is_array(leaf) else leaf, tree)


class Output(eqx.Module):
    """A pytree that leaves a compiled program, whatever leaves it has."""

    arrays: list[Array]
    structure: Structure = eqx.field(static=True)

    def __init__(self, tree: PyTree):
        self.arrays, self.structure = flatten(tree)

    def tree(self) -> PyTree:
        return unflatten(self.structure, self.arrays)


@jax.tree_util.register_static
class Rest:
    """What a pytree holds besides arrays, an activation function say: no leaf, but structure."""

    def __init__(self, tree: PyTree):
        self.tree = eqx.filter(tree, eqx.is_array, inverse=True)  # with None for each array
        self._structure = flatten(self.tree)[1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rest) and self._structure == other._structure

    def __hash__(self) -> int:
        return hash(self._structure)

    def __reduce__(self):  # JAX's structure of an Equinox module is not the same after pickling
        return Rest, (self.tree,)


class Recent(dict):
    """A dict of the entries that were added last."""

    def __init__(self, most: int = PROGRAMS):
        super().__init__()
        self.most = most

    def __setitem__(self, key: object, value: object) -> None:
        super().__setitem__(key, value)
        if len(self) > self.most:
            del self[next(iter(self))]


class Compiled:
    """As `jax.jit(function, static_argnums=range(static), **options)`, with few programs kept."""

    def __init__(self, function: Callable[..., PyTree], static: int, **options: Any):
        self._function, self._static, self._options = function, static, tuple(options.items())

    def __call__(self, *arguments: PyTree) -> Any:
        return self._program(*arguments[: self._static])(*arguments[self._static :])

    def lower(self, *arguments: PyTree) -> jax.stages.Lowered:
        return self._program(*arguments[: self._static]).lower(*arguments[self._static :])

    def _program(self, *constants: object) -> Any:
        return _program(self._function, self._options, *constants)


@functools.lru_cache(maxsize=PROGRAMS)
def _program(
    function: Callable[..., PyTree], options: tuple[tuple[str, Any], ...], *constants: object
) -> Any:
    return jax.jit(functools.partial(function, *constants), **dict(options))


def filtered(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `equinox.filter_jit(function)`, with few programs kept."""
    program = Compiled(lambda structure, arrays: Output(function(*unflatten(structure, arrays))), 1)

    @functools.wraps(function)
    def call(*arguments: PyTree) -> PyTree:
        arrays, structure = flatten(arguments)
        return program(structure, arrays).tree()

    def lower(*arguments: PyTree) -> jax.stages.Lowered:
        return program.lower(*flatten(arguments)[::-1])

    call.lower = lower  # pyright: ignore[reportAttributeAccessIssue]
    return call

"""A pytree as the argument of a compiled program: its arrays, and all the rest.

`equinox.filter_jit` makes the same split. Here it is made once per call and shared by the checks
and the program, because overhead counts: a small hypergradient takes milliseconds on a GPU.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree


class Structure(NamedTuple):
    """What is not an array in a pytree; hashable, so that a program can be compiled for it."""

    treedef: Any
    static: tuple[Any, ...]  # the leaves, with `Structure` standing where an array goes


def flatten(tree: PyTree) -> tuple[list[Any], Structure]:
    """Return the arrays of a pytree, and its structure."""
    leaves, treedef = jax.tree.flatten(tree)
    is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
    static = tuple(Structure if a else leaf for leaf, a in zip(leaves, is_array, strict=True))
    arrays = [leaf for leaf, a in zip(leaves, is_array, strict=True) if a]
    return arrays, Structure(treedef, static)


def unflatten(structure: Structure, arrays: Any) -> PyTree:
    """Return the pytree."""
    remaining = iter(arrays)
    leaves = [next(remaining) if leaf is Structure else leaf for leaf in structure.static]
    return jax.tree.unflatten(structure.treedef, leaves)


def copied(tree: PyTree) -> PyTree:
    """Return the pytree with arrays of its own, which may be donated."""
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if eqx.is_array(leaf) else leaf, tree)


class Output(eqx.Module):
    """A pytree that leaves a compiled program, whatever leaves it has."""

    arrays: list[Any]
    structure: Structure = eqx.field(static=True)

    def __init__(self, tree: PyTree):
        self.arrays, self.structure = flatten(tree)

    def tree(self) -> PyTree:
        """Return the pytree."""
        return unflatten(self.structure, self.arrays)

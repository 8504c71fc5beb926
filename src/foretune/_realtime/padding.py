"""Windows padded to one length, so that a shorter one runs in the same program.

A program is compiled for the shape of its window; its loop runs to the true length.
"""

import functools
from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from .._problem.arguments import Structure, flatten
from .._problem.batches import FullBatch, Minibatches
from .._problem.checks import check_leading_axis, check_some_number, describe_tree

MOST = 256  # entries of a memory, before it is begun again
_CAPACITY: dict[Hashable, int] = {}  # the longest window seen, by the program it is for


def padded(program: Structure, window: PyTree) -> tuple[PyTree, Int[np.ndarray, ""]]:
    """Return the window padded to the longest like it so far, and its true length."""
    if isinstance(window, FullBatch):
        return FullBatch(window.data, 1), np.asarray(window.steps, np.int32)
    xs = window.indices if isinstance(window, Minibatches) else window
    steps = check_leading_axis(xs, "window", "the minibatches") if jax.tree.leaves(xs) else 0
    if steps == 0:
        raise ValueError(
            "the window is empty: no minibatch is on its leading axis,\n"
            + describe_tree(xs, "window")
            + "\nLeave it out. Where steps need no data, give `FullBatch(None, steps=...)`."
        )
    leaves, structure = flatten(xs)
    key = program, structure, tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves)
    if key not in _CAPACITY:
        check_some_number(xs, "window")
    capacity = max(_CAPACITY.get(key, 0), steps)
    remember(_CAPACITY, key, capacity)
    if capacity > steps:
        xs = jax.tree.map(functools.partial(_pad, capacity), xs)
        window = window.at(xs) if isinstance(window, Minibatches) else xs
    return window, np.asarray(steps, np.int32)


def _pad(capacity: int, x: Array | np.ndarray) -> Array | np.ndarray:
    more = (capacity - len(x), *x.shape[1:])
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.concatenate([x, jnp.broadcast_to(x[:1], more)])
    if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1:  # it stays where it is
        return jax.device_put(jnp.concatenate([x, jnp.zeros(more, x.dtype)]), x.sharding)
    x = np.asarray(x)  # by NumPy, which compiles nothing
    return np.concatenate([x, np.zeros(more, x.dtype)])


def remember(memory: dict, key: Hashable, value: int | None) -> None:
    """Put an entry into a memory that does not grow without end."""
    if len(memory) >= MOST:
        memory.clear()
    memory[key] = value

"""One way to tell whether numbers or text are what they were."""

import hashlib
import json
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, PyTree


def digest(content: str | bytes | PyTree) -> str:
    """Return a digest of text, of bytes, or of the arrays in a pytree: numbers, types and shapes."""
    if isinstance(content, str | bytes):
        content = content.encode() if isinstance(content, str) else content
        return hashlib.sha256(content).hexdigest()
    total = hashlib.sha256()
    for array in as_numbers(content):
        total.update(f"{array.dtype}{array.shape}".encode())
        total.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def digest_of_json(content: object) -> str:
    """Return a digest of what JSON can say, whatever the order of its names."""
    return digest(json.dumps(content, sort_keys=True))


def is_digest(text: str) -> bool:
    """Return whether a text is what `digest` returns."""
    return re.fullmatch("[0-9a-f]{64}", text) is not None


def as_numbers(tree: PyTree) -> list[np.ndarray]:
    """Return the arrays of a pytree on the host, random keys as their data."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf)]
    return [np.asarray(array) for array in on_host([key_data(array) for array in arrays])]


def with_numbers(tree: PyTree, numbers: list[np.ndarray]) -> PyTree:
    """Return the pytree with other numbers in its arrays, on the same devices."""
    remaining = iter(numbers)
    return jax.tree.map(lambda x: _like(x, next(remaining)) if eqx.is_array(x) else x, tree)


def _like(leaf: Array | np.ndarray, numbers: np.ndarray) -> Array:
    array = jnp.asarray(numbers)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
        return jax.device_put(array, leaf.sharding)
    return array


def key_data(leaf: Array | np.ndarray) -> Array | np.ndarray:
    """Return the numbers of a random key, and any other array as it is."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def on_host(tree: PyTree) -> PyTree:
    """Return the tree with its arrays on the host, whole where other processes hold parts of them."""

    def whole(leaf):
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return leaf
        return multihost_utils.process_allgather(leaf, tiled=True)

    return jax.device_get(jax.tree.map(whole, tree))

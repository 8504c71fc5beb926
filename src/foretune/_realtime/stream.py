"""Streams of minibatches, cut into windows: any iterable of pytrees that NumPy can read."""

from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .._problem.batches import Minibatches
from .._problem.checks import check_count, check_data, check_numbers, describe, describe_tree
from .state import differing, shapes_of

END = object()  # of a stream


def windows(stream: Iterable[PyTree] | Minibatches, n: int) -> Iterator[PyTree]:
    """Cut a stream of minibatches into windows of n, stacked on a leading axis; the last is shorter.

    Of `Minibatches` it makes shorter `Minibatches`, whose data stays where it is.

    >>> import foretune as ft, numpy as np
    >>> batches = [{"x": np.zeros((8, 3))} for _ in range(5)]
    >>> [window["x"].shape for window in ft.windows(batches, 2)]
    [(2, 8, 3), (2, 8, 3), (1, 8, 3)]
    """
    check_count(n, f"windows(n={n})")
    if isinstance(stream, Minibatches):
        firsts = range(0, stream.steps, n)
        return (stream.at(stream.indices[first : first + n]) for first in firsts)
    check_stream(stream, "the stream of minibatches")
    return _windows(stream, n)


def _windows(stream: Iterable[PyTree], n: int) -> Iterator[PyTree]:
    count, expected, batches = 0, None, []
    for batch in stream:
        if expected is None:
            check_data(batch, "batch")
        batch = jax.tree.map(_copied, batch)
        shape = shapes_of(batch, "batch")
        if expected is None:
            check_numbers(batch, "minibatch 0")
        elif path := differing(expected, shape):
            raise ValueError(
                f"minibatch {count} of the stream (counted from 0) differs from those before it: "
                f"{path} is {shape.get(path, 'absent')}, it was {expected.get(path, 'absent')}. Drop "
                "the last, smaller batch of an epoch (`drop_last=True` in most loaders), or pad it."
            )
        expected, count = shape, count + 1
        batches.append(batch)
        if len(batches) == n:
            yield jax.tree.map(_stack, *batches)
            batches = []
    if batches:
        yield jax.tree.map(_stack, *batches)


def _copied(leaf: object) -> Array | np.ndarray:
    return leaf if isinstance(leaf, jax.Array) else np.array(leaf)  # a loader may reuse its own


def _stack(*leaves: Array | np.ndarray) -> Array | np.ndarray:
    return jnp.stack(leaves) if isinstance(leaves[0], jax.Array) else np.stack(leaves)


def check_stream(stream: object, name: str) -> None:
    """Raise where a stream is one batch, or nothing that can be iterated over."""
    one = hasattr(stream, "shape")
    if isinstance(stream, tuple | dict | list):
        items = stream.values() if isinstance(stream, dict) else stream
        shapes = [getattr(item, "shape", None) for item in items]
        differ = None not in shapes and len(set(shapes)) > 1  # [x, y]: no list of batches
        one = differ if isinstance(stream, list) else any(shape is not None for shape in shapes)
    if one:
        raise TypeError(
            f"{name} must be an iterable of batches, but it looks like one batch, of\n"
            f"{describe_tree(stream, 'batch')}\nGive a list of them, or `itertools.repeat(batch)`."
        )
    if isinstance(stream, str | bytes) or not isinstance(stream, Iterable):
        raise TypeError(f"{name} must be an iterable of batches, got {describe(stream)}.")


def repeated(stream: Iterable[PyTree]) -> Iterator[PyTree]:
    """Go through a stream of validation data again and again; an iterator only once."""
    while True:
        empty = True
        for batch in stream:
            if empty:
                check_data(batch, "validation")
            empty = False
            yield jax.tree.map(_copied, batch)
        if empty or isinstance(stream, Iterator):
            return


def following(iterator: Iterator[PyTree]) -> PyTree:
    """Return what comes next, on the device, or END."""
    batch = next(iterator, END)
    if batch is END:
        return END
    # What is on devices stays there: other processes may have parts of it.
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jax.device_put(x), batch)

"""Batches: what the steps train on, one entry for each of T steps."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int, PyTree

from .checks import (
    as_arrays,
    as_data,
    check_count,
    check_key,
    check_leading_axis,
    check_signature,
    describe,
)
from .warn import warn

MOST_INDICES = 2**31  # drawn at once: 8 GiB
ROWS = 20  # steps of a row each, from which on they are suspected to be a whole data set


class Batches(eqx.Module):
    """What T steps train on: `xs`, which the loop scans over, and `batch(x)`, an entry's batch."""

    xs: eqx.AbstractVar[PyTree]
    steps: eqx.AbstractVar[int]

    @abc.abstractmethod
    def batch(self, x: PyTree) -> PyTree:
        """Return the batch of one entry of `xs`."""

    def first(self) -> PyTree:
        """Return the batch of the first step."""
        return self.batch(jax.tree.map(lambda leaf: leaf[0], self.xs))

    def whole(self) -> PyTree:
        """Return all the data as one batch, where that is known."""
        what = f"all the data as one batch is needed, not {type(self).__name__}"
        raise TypeError(f"{what}: give `FullBatch(data, steps)` or `Minibatches(data, indices)`.")

    def reshuffled(self, key: object) -> "Minibatches":
        """Return other minibatches of the same data, where they can be drawn."""
        what = f"there are no minibatches to draw anew in {type(self).__name__}"
        raise TypeError(f"{what}: give the problem `Minibatches.shuffled(data, ...)`.")


class Minibatches(Batches):
    """T minibatches as indices into data that lies on the device once, whatever T is.

    Args:
        data: a pytree of arrays that share their leading axis, the examples.
        indices: integers of shape (T, batch size), or (T, ...) in general: the rows of each step.
        gather: makes the minibatch, `gather(data, indices[t])`, where it is not rows of the data:
            windows of a signal, crops, pairs. The indices' range is not checked then.

    >>> import foretune as ft, jax, jax.numpy as jnp
    >>> batches = ft.Minibatches(jnp.arange(10.0), jnp.array([[0, 1], [8, 9], [4, 4]]))
    >>> batches.steps
    3
    >>> batches.batch(batches.xs[1])
    Array([8., 9.], dtype=float32)
    >>> def context(signal, i):  # each sample with its neighbours
    ...     return signal[i[:, None] + jnp.arange(-1, 2)]
    >>> batches = ft.Minibatches(jnp.arange(10.0), jnp.array([[3, 8]]), gather=context)
    >>> batches.batch(batches.xs[0])
    Array([[2., 3., 4.],
           [7., 8., 9.]], dtype=float32)
    """

    data: PyTree[Array]
    indices: Int[Array, "T ..."]
    gather: Callable[[PyTree, Array], PyTree] | None = eqx.field(static=True)

    def __init__(self, data: PyTree, indices: Any, gather: Any = None):
        if gather is not None:
            check_signature(gather, "gather(data, indices)")
        self.data, self.gather = as_data(data, "Minibatches' data"), gather
        n = check_leading_axis(self.data, "Minibatches' data") if gather is None else None
        self.indices = as_arrays(indices, "Minibatches' indices")
        shown = describe(self.indices)
        if not (eqx.is_array(self.indices) and jnp.issubdtype(self.indices.dtype, jnp.integer)):
            raise TypeError(f"Minibatches' indices must be an integer array, got {shown}.")
        if self.indices.ndim == 0 or self.indices.size == 0:
            raise ValueError(f"Minibatches' indices are {shown}: give (T, batch size), not empty.")
        if isinstance(self.indices, Tracer):
            return
        with jax.ensure_compile_time_eval():  # as given: they may wrap on their way to the device
            low, high = int(indices.min()), int(indices.max())
        run, dtype = f"Minibatches' indices run from {low} to {high}", self.indices.dtype
        if low < jnp.iinfo(dtype).min or high > jnp.iinfo(dtype).max:
            raise ValueError(f"{run}: they would wrap as {dtype}. Switch JAX to 64 bits.")
        if n is not None and (low < 0 or high >= n):
            raise ValueError(f"{run}, but the data has {n} examples.")

    def at(self, indices: Array | np.ndarray | None) -> "Minibatches":
        """Return other minibatches of the same data, without looking at the indices' values."""
        return eqx.tree_at(lambda batches: batches.indices, self, indices)

    @classmethod
    def shuffled(cls, data: PyTree, *, batch_size: int, steps: int, key: object) -> "Minibatches":
        """Draw `steps` minibatches by reshuffling the examples at each epoch."""
        n = check_leading_axis(as_arrays(data, "Minibatches' data"), "Minibatches' data")
        check_count(steps, f"steps={steps!r}")
        check_count(batch_size, f"batch_size={batch_size!r}")
        if batch_size > n:
            raise ValueError(f"batch_size={batch_size} must lie between 1 and the {n} examples.")
        if steps * batch_size >= MOST_INDICES:
            asked = f"steps={steps} of batch_size={batch_size}"
            raise ValueError(f"{asked} are too many indices to draw at once.")
        check_key(key, "the key of Minibatches.shuffled")
        return cls(data, shuffled_rows(n, batch_size, steps, key))

    def reshuffled(self, key: object) -> "Minibatches":
        """Draw as many minibatches of the same size anew, as `shuffled` does."""
        check_key(key, "the key of Minibatches.reshuffled")
        if self.gather is not None or self.indices.ndim != 2:
            made_by = "a gather" if self.gather else f"indices of shape {self.indices.shape}"
            why = f"these are made by {made_by}: draw them yourself"
            raise ValueError(f"reshuffled draws rows of the data; {why}.")
        n = jax.tree.leaves(self.data)[0].shape[0]
        steps, batch_size = self.indices.shape
        if batch_size > n:
            raise ValueError(f"a batch of {batch_size} cannot be drawn from {n} examples anew.")
        return self.at(shuffled_rows(n, batch_size, steps, key).astype(self.indices.dtype))

    @property
    def steps(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.indices.shape[0]

    @property
    def xs(self) -> Int[Array, "T ..."]:
        return self.indices

    def batch(self, x: Int[Array, "..."]) -> PyTree[Array]:
        if self.gather is not None:
            return self.gather(self.data, x)
        return jax.tree.map(lambda leaf: leaf[x], self.data)

    def whole(self) -> PyTree:
        return super().whole() if self.gather is not None else self.data


def shuffled_rows(n: int, batch_size: int, steps: int, key: Any) -> Int[Array, "T b"]:
    """Return indices of minibatches, the n examples in a new order at each epoch."""
    per_epoch = n // batch_size
    keys = jax.random.split(key, -(-steps // per_epoch))
    order = jax.vmap(lambda k: jax.random.permutation(k, n))(keys)
    return order[:, : per_epoch * batch_size].reshape(-1, batch_size)[:steps]


class FullBatch(Batches):
    """The same data at each of T steps: full-batch descent.

    >>> import foretune as ft, jax.numpy as jnp
    >>> ft.FullBatch({"x": jnp.ones((5, 2))}, steps=100).steps
    100
    """

    data: PyTree[Array]
    steps: int = eqx.field(static=True)
    xs: None = None  # every step sees the same data

    def __init__(self, data: PyTree, steps: int):
        check_count(steps, f"FullBatch's steps={steps}")
        self.data, self.steps = as_data(data, "FullBatch's data"), steps

    def batch(self, x: None) -> PyTree[Array]:
        return self.data

    def whole(self) -> PyTree[Array]:
        return self.data


class Stacked(Batches):
    """A pytree of arrays with leading axis T, one entry a step."""

    xs: PyTree[Array]

    def __init__(self, xs: PyTree):
        self.xs = as_data(xs, "batches")
        check_leading_axis(self.xs, "batches", "T, one entry per step")

    @property
    def steps(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return jax.tree.leaves(self.xs)[0].shape[0]

    def batch(self, x: PyTree[Array]) -> PyTree[Array]:
        return x


def warn_of_rows(batches: Batches, validation: PyTree) -> None:
    """Warn where stacked batches look like a whole data set: a step has the shape of a row of it."""
    if not isinstance(batches, Stacked) or batches.steps < ROWS:
        return
    rows, others = jax.tree.leaves(batches.xs), jax.tree.leaves(validation)
    same = jax.tree.structure(batches.xs) == jax.tree.structure(validation) and all(
        eqx.is_array(b) and b.ndim > 0 and a.shape[1:] == b.shape[1:]
        for a, b in zip(rows, others, strict=True)
    )
    if same and any(leaf.ndim > 1 for leaf in rows):
        row = f"batches has one row for each of {batches.steps} steps"
        give = "Give `FullBatch(data, steps=T)` or `Minibatches.shuffled(data, ...)`"
        stack = "or stack minibatches, (T, batch size, ...)"
        warn(f"{row}: it looks like a whole data set. {give}, {stack}.")

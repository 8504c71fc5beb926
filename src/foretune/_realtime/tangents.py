"""What Z is computed from: the loss in another precision, or on a part of the minibatch.

Z_t = A_t Z_{t-1} + B_t needs the step's derivative alone, and an estimate of it may do where the step
itself stays exact. On a part of the minibatch, of c of its B rows,

    rows of step t:  (t + floor(i B / c)) mod B,   i = 0 .. c - 1,

evenly spread over the minibatch and moved on by one at each step: every row has its turn equally often,
so for a loss that is a mean over rows the derivative of the gradient is right on average. Its noise is
that of a smaller minibatch, and the curvature in A_t is overestimated where it is largest, so that over
hundreds of steps Z may grow where the exact one does not: keep the discount below 1.
"""

import contextlib
import numbers
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._problem.checks import named_leaves


def tangents_of(given: Any) -> tuple[Any, float]:
    """Return what `RealTime(tangents=...)` asks for: a floating-point type or None, and a share."""
    dtype, share = None, 1.0
    for part in given if isinstance(given, tuple | list) else (given,):
        if part is None:
            continue
        if isinstance(part, numbers.Real) and not isinstance(part, bool):
            share = float(part)
            if not 0 < share <= 1:
                raise ValueError(f"RealTime(tangents={part}): a share of the rows in (0, 1].")
        else:
            dtype = _floating(part)
    return dtype, share


def _floating(dtype: Any) -> Any:
    with contextlib.suppress(TypeError):
        if jnp.issubdtype(np.dtype(dtype), jnp.floating):
            return np.dtype(dtype)
    raise TypeError(
        f"RealTime(tangents={dtype!r:.60}): a floating-point type, `jnp.bfloat16` say, a share of the "
        "minibatch's rows, `0.25` say, or both, `(0.25, jnp.bfloat16)`."
    )


def part_of(batch: PyTree, share: float, t: Any) -> PyTree:
    """Return a share of a minibatch's rows, others at each step t."""
    sizes = {
        path: leaf.shape[0]
        for path, leaf in named_leaves(batch, "minibatch").items()
        if eqx.is_array(leaf) and leaf.ndim > 0
    }
    if len(set(sizes.values())) != 1:
        listed = ", ".join(f"{path}: {size}" for path, size in sizes.items()) or "none"
        raise ValueError(
            f"RealTime(tangents={share}) takes a share of the minibatch's rows, so all its arrays must "
            f"have the same leading axis; they have {listed}. Leave `tangents` out, or put what is not "
            "by row elsewhere."
        )
    (B,) = set(sizes.values())
    c = max(round(share * B), 1)
    rows = (jnp.asarray(t, jnp.int32) + np.arange(c, dtype=np.int32) * B // c) % B

    def take(leaf):
        return leaf[rows] if eqx.is_array(leaf) and leaf.ndim > 0 else leaf

    return jax.tree.map(take, batch)

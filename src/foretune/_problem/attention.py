"""Attention in memory that is linear in the length, differentiable twice and in both modes.

The scores of a chunk of queries against all keys are computed, used and forgotten; each derivative
computes them again (`jax.checkpoint`). `jax.nn.dot_product_attention` by XLA keeps all scores; fused
kernels have one derivative alone, in reverse mode.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from .checks import check_count, check_flag, describe


def attention(
    q: Float[Array, "..."],
    k: Float[Array, "..."],
    v: Float[Array, "..."],
    *,
    causal: bool = True,
    chunk: int = 256,
) -> Float[Array, "..."]:
    """Return softmax(q k' / sqrt(d)) v of each head, in memory linear in the length.

    Args:
        q: queries, `(..., length, heads, size)`.
        k: keys, of the same heads and size; their length may be another unless `causal`.
        v: values, as many as keys.
        causal: whether a query sees only the keys up to its own place.
        chunk: queries in work at a time. Up to that length all scores are kept, as usual.

    Scores are float32 at least. It has derivatives of any order in both modes.

    >>> import foretune as ft, jax, jax.numpy as jnp
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 50, 4, 8))
    >>> whole, chunked = ft.attention(q, k, v), ft.attention(q, k, v, chunk=16)
    >>> chunked.shape, bool(jnp.allclose(whole, chunked, atol=1e-5))
    ((2, 50, 4, 8), True)
    """
    check_flag(causal, "attention's causal")
    check_count(chunk, f"attention(chunk={chunk!r})")
    _check_shapes(q, k, v, causal)
    length = q.shape[-3]
    if length <= chunk:
        return _attend(causal, q, k, v, 0)
    count = -(-length // chunk)
    padding = [(0, 0)] * (q.ndim - 3) + [(0, count * chunk - length), (0, 0), (0, 0)]
    padded = jnp.pad(q, padding)  # queries beyond the end see all keys, and are cut off again
    chunks = padded.reshape(*q.shape[:-3], count, chunk, *q.shape[-2:])
    attend = jax.checkpoint(functools.partial(_attend, causal), prevent_cse=False)
    entries = jnp.moveaxis(chunks, -4, 0), chunk * jnp.arange(count, dtype=np.int32)
    out = lax.map(lambda entry: attend(entry[0], k, v, entry[1]), entries)
    out = jnp.moveaxis(out, 0, -4)
    out = out.reshape(*q.shape[:-3], count * chunk, *out.shape[-2:])
    return out[..., :length, :, :]


def _attend(causal: bool, q: Array, k: Array, v: Array, first: int | Array) -> Array:
    """Return the attention of queries whose first stands at place `first`."""
    kind = np.promote_types(q.dtype, np.float32)
    scores = jnp.einsum("...tnd,...snd->...nts", q, k, preferred_element_type=kind)
    scores = scores * jnp.asarray(q.shape[-1] ** -0.5, kind)
    if causal:
        places = lax.broadcasted_iota(jnp.int32, scores.shape[-2:], 0) + first
        seen = lax.broadcasted_iota(jnp.int32, scores.shape[-2:], 1) <= places
        seen = jnp.broadcast_to(seen, scores.shape)
        scores = jnp.where(seen, scores, jnp.asarray(jnp.finfo(kind).min, kind))
    return jnp.einsum("...nts,...snd->...tnd", jax.nn.softmax(scores).astype(v.dtype), v)


def _check_shapes(q: Array, k: Array, v: Array, causal: bool) -> None:
    shown = f"q is {describe(q)}, k {describe(k)} and v {describe(v)}"
    if not (q.ndim == k.ndim == v.ndim >= 3):
        raise ValueError(f"attention: {shown}; give each as (..., length, heads, size).")
    same = q.shape[:-3] == k.shape[:-3] == v.shape[:-3] and q.shape[-1] == k.shape[-1]
    if not (same and q.shape[-2] == k.shape[-2] == v.shape[-2] and k.shape[-3] == v.shape[-3]):
        raise ValueError(
            f"attention: {shown}; leading axes and heads must be the same in all, sizes in q and k, "
            "lengths in k and v. Repeat shared keys and values with `jnp.repeat`."
        )
    if causal and q.shape[-3] != k.shape[-3]:
        raise ValueError(f"attention(causal=True): {shown}; q and k must be of one length.")

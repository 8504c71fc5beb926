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

    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 50, 4, 8))
    >>> whole, chunked = attention(q, k, v), attention(q, k, v, chunk=16)
    >>> chunked.shape, bool(jnp.allclose(whole, chunked, atol=1e-5))
    ((2, 50, 4, 8), True)
    """
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (q, k, v)):
        raise TypeError("q, k and v must be floating-point.")
    length = q.shape[-3]
    assert q.shape[-2:] == k.shape[-2:], "repeat shared keys and values with `jnp.repeat`"
    assert length == k.shape[-3] or not causal
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

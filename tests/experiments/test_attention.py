"""Attention by chunks: plain attention, its derivatives and theirs, in memory linear in the length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.language.attention import attention

from ..problems import assert_trees_close


def plain(q, k, v, causal=True):
    scores = jnp.einsum("btnd,bsnd->bnts", q, k) / np.sqrt(q.shape[-1])
    if causal:
        t, s = scores.shape[-2:]
        seen = jnp.broadcast_to(jnp.tril(jnp.ones((t, s), bool)), scores.shape)
        scores = jnp.where(seen, scores, -jnp.inf)
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores), v)


def arrays(length=10, keys=10):
    draw = np.random.default_rng(0).normal
    return tuple(jnp.asarray(draw(size=(2, n, 2, 3))) for n in (length, keys, keys))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("chunk", [4, 5, 100])
def test_values_and_derivatives_of_both_orders_and_modes(chunk):
    qkv, along = arrays(), jax.tree.map(jnp.sin, arrays())

    def derivatives(f):
        def scalar(*qkv):
            return jnp.sum(jnp.tanh(f(*qkv)))

        gradient = jax.grad(scalar, (0, 1, 2))
        forward_over_reverse = jax.jvp(gradient, qkv, along)[1]
        reverse_over_reverse = jax.vjp(gradient, *qkv)[1](along)
        return f(*qkv), jax.jvp(f, qkv, along)[1], forward_over_reverse, reverse_over_reverse

    found = jax.jit(lambda: derivatives(lambda *qkv: attention(*qkv, chunk=chunk)))()
    assert_trees_close(found, jax.jit(lambda: derivatives(plain))(), 1e-9, 1e-12)
    assert_trees_close(found[2], found[3], 1e-9, 1e-12)  # a Hessian is symmetric


@pytest.mark.usefixtures("x64")
def test_keys_of_another_length():
    q, k, v = arrays(length=7, keys=9)
    found = attention(q, k, v, causal=False, chunk=2)
    np.testing.assert_allclose(found, plain(q, k, v, causal=False), rtol=1e-12)


def test_low_precision_inputs_have_scores_in_float32():
    q, k, v = (leaf.astype(jnp.bfloat16) for leaf in arrays())
    found = attention(q, k, v, chunk=4)
    assert found.dtype == jnp.bfloat16
    exact = plain(*(leaf.astype(jnp.float32) for leaf in (q, k, v)))
    np.testing.assert_allclose(found.astype(jnp.float32), exact, atol=0.02)


@pytest.mark.parametrize(("which", "kind"), [(2, int), (2, bool), (0, complex)])
def test_what_is_not_real_is_refused(which, kind):
    qkv = [leaf.astype(kind) if i == which else leaf for i, leaf in enumerate(arrays())]
    with pytest.raises(TypeError, match="must be floating-point"):
        attention(*qkv)


@pytest.mark.second_tier
def test_memory_grows_with_the_length_not_its_square():
    def temporary(length, f):
        q = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
        gradient = jax.grad(lambda *qkv: jnp.sum(jnp.tanh(f(*qkv))), (0, 1, 2))
        program = jax.jit(lambda x, u: jax.jvp(gradient, x, u)[1])
        compiled = program.lower((q, q, q), (q, q, q)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    chunked = lambda *qkv: attention(*qkv, chunk=32)  # noqa: E731
    assert temporary(2048, chunked) < 5 * temporary(512, chunked)  # four times as long
    assert temporary(2048, plain) > 12 * temporary(512, plain)

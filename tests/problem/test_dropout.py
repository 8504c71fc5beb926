"""Dropout that is differentiated in its rate: its noise, its derivative, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import foretune as ft

KEYS = jax.random.split(jax.random.key(0), 4000)


def bernoulli(x, rate, *, key):
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return x * kept.astype(x.dtype) / (1 - rate)


def network(noise, rate, key):
    """Return the error of a small network after a step with noise on its hidden units."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(8, 3)))
    w = {"in": jnp.asarray(rng.normal(size=(3, 6))), "out": jnp.asarray(rng.normal(size=6))}

    def loss(w, noise):
        return jnp.mean((jnp.tanh(noise(jax.nn.softplus(x @ w["in"]))) @ w["out"] - x[:, 0]) ** 2)

    grads = jax.grad(loss)(w, lambda x: noise(x, rate, key=key))
    return loss(jax.tree.map(lambda a, b: a - 0.3 * b, w, grads), lambda x: x)


@functools.partial(jax.jit, static_argnums=0)
def sampled(noise, rate, delta, keys):
    """Return, for each key, the derivative and a central difference."""

    def of_key(key):
        rates = jnp.stack([rate, rate + delta, rate - delta])
        values, grads = jax.vmap(lambda r: jax.value_and_grad(network, 1)(noise, r, key))(rates)
        return grads[0], (values[1] - values[2]) / (2 * delta)

    return jax.vmap(of_key)(keys)


def compare(noise, rate, delta):
    """Return the mean derivative over keys, that of the mean, and the standard error of both."""
    grads, differences = sampled(noise, jnp.array(rate), jnp.array(delta), KEYS)
    error = jnp.hypot(jnp.std(grads), jnp.std(differences)) / np.sqrt(len(KEYS))
    return float(jnp.mean(grads)), float(jnp.mean(differences)), float(error)


@pytest.mark.second_tier
def test_the_derivative_is_that_of_the_mean_and_bernoullis_is_not(x64):
    grad, difference, error = compare(ft.dropout, 0.2, 1e-4)
    np.testing.assert_allclose(grad, difference, rtol=1e-4)
    assert abs(grad) > 10 * error
    grad, difference, error = compare(bernoulli, 0.2, 0.05)
    assert abs(grad - difference) > max(10 * error, 0.5 * abs(difference))


def test_a_descent_may_begin_at_rate_0(x64):
    """The derivative there is finite, and near that of a small rate."""
    at_0, difference, error = compare(ft.dropout, 0.0, 1e-5)
    near, _, _ = compare(ft.dropout, 0.02, 1e-5)
    np.testing.assert_allclose(at_0, difference, rtol=1e-3)
    assert abs(at_0 - near) < 3 * error + 0.1 * abs(near)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_mean_and_variance_are_those_of_dropout(rate):
    x = jnp.full((200, 500), 2.0)
    for noise in (ft.dropout, bernoulli):
        y = noise(x, rate, key=KEYS[0])
        np.testing.assert_allclose(jnp.mean(y), 2.0, rtol=0.02)
        np.testing.assert_allclose(jnp.var(y), 4 * rate / (1 - rate), rtol=0.03)


def test_inference_and_a_fixed_rate_of_0_change_nothing():
    x = jnp.arange(3.0)
    assert ft.dropout(x, jnp.array(0.5), key=None, inference=True) is x
    np.testing.assert_array_equal(ft.dropout(x, 0.0, key=KEYS[0]), x)


def test_a_rate_for_each_unit_and_any_precision():
    x = jnp.ones((4000, 2), jnp.bfloat16)
    y = ft.dropout(x, jnp.array([0.01, 0.8]), key=KEYS[0])
    assert y.dtype == jnp.bfloat16
    low, high = np.std(np.asarray(y, np.float32), axis=0)
    assert low < 0.2
    assert high > 1.5


@pytest.mark.parametrize(
    ("arguments", "error", "pattern"),
    [
        ({"rate": 1.0}, ValueError, r"must lie in \[0, 1\), got 1.0"),
        ({"rate": jnp.array(-0.1)}, ValueError, r"must lie in \[0, 1\)"),
        ({"rate": np.array([0.1, np.nan])}, ValueError, r"must lie in \[0, 1\)"),
        ({"rate": "0.1"}, ValueError, r"must lie in \[0, 1\)"),
        ({"x": jnp.arange(2)}, TypeError, r"x must be floating-point, got int32\[2\]"),
        ({"key": 0}, TypeError, "key of dropout must be one random key"),
        ({"key": KEYS[:2]}, TypeError, "key of dropout must be one random key"),
        ({"inference": 1}, TypeError, "inference=1: give True or False"),
    ],
)
def test_what_is_refused(arguments, error, pattern):
    given = {"x": jnp.ones(2), "rate": 0.5, "key": KEYS[0]} | arguments
    with pytest.raises(error, match=pattern):
        ft.dropout(given.pop("x"), given.pop("rate"), **given)

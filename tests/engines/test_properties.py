"""Forward = reverse = finite differences on random pytrees, shapes, lengths and batch sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foretune as ft

from ..conftest import setting


@pytest.fixture(autouse=True)
def quick_compilation():
    """The programs are tiny and many: spend no time on optimizing them."""
    with setting(jax_disable_most_optimizations=True):
        yield


shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)
names = st.sampled_from(["a", "b", "c"])
trees = st.recursive(
    shapes,
    lambda inner: st.one_of(
        st.dictionaries(names, inner, min_size=1, max_size=2),
        st.lists(inner, min_size=1, max_size=2),
        st.tuples(inner, inner),
    ),
    max_leaves=4,
)


def is_shape(node):
    return isinstance(node, tuple) and all(isinstance(n, int) for n in node)


def filled(tree, rng, scale=1.0):
    return jax.tree.map(lambda shape: scale * rng.normal(size=shape), tree, is_leaf=is_shape)


def total(tree, f):
    return sum(jnp.sum(f(leaf)) for leaf in jax.tree.leaves(tree))


class Iteration(ft.Dynamics):
    """A smooth map of any state by any hyperparameters, with a counter and data in it."""

    def init(self, params, hparams):
        return {"float": params, "count": jnp.array(0)}

    def step(self, state, hparams, batch):
        drive = jnp.tanh(total(hparams, jnp.sin) + jnp.mean(batch))
        pull = total(state["float"], jnp.sin)
        new = jax.tree.map(lambda s: 0.7 * s + 0.2 * jnp.cos(s + pull) + drive, state["float"])
        return {"float": new, "count": state["count"] + 1}


def error(state, hparams, batch):
    return total(state["float"], jnp.square) + 0.1 * total(hparams, jnp.square) * state["count"]


@pytest.mark.second_tier
@settings(max_examples=8)
@given(
    params=trees, hparams=trees, T=st.integers(1, 12), B=st.integers(1, 5), m=st.integers(1, 9),
    from_start=st.booleans(), trajectory=st.booleans(), indexed=st.booleans(),
)  # fmt: skip
@pytest.mark.usefixtures("x64")
def test_any_dynamics(params, hparams, T, B, m, from_start, trajectory, indexed):
    rng = np.random.default_rng(T + 100 * B)
    start, hparams = filled(params, rng), filled(hparams, rng)
    data = rng.normal(size=(7, 2))
    indices = rng.integers(0, 7, (T, B))

    def init(hparams):
        return jax.tree.map(lambda leaf: leaf * (1 + 0.1 * total(hparams, jnp.cos)), start)

    problem = ft.Problem(
        Iteration(),
        error,
        init if from_start else start,
        ft.Minibatches(data, indices) if indexed else data[indices],
        trajectory=trajectory,
    )
    reverse, forward = ft.Reverse()(problem, hparams), ft.Forward(chunk=m)(problem, hparams)
    scale = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(reverse.grad))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10 * scale),
        tuple(forward),
        tuple(reverse),
    )
    v = filled(jax.tree.map(np.shape, hparams), rng)
    h = 1e-5
    high, low = (  # by the program that is compiled already
        ft.Reverse()(problem, jax.tree.map(lambda x, d: x + s * d, hparams, v)).value
        for s in (h, -h)
    )
    slope = sum(
        jnp.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (reverse.grad, v)), strict=True)
    )
    np.testing.assert_allclose(slope, (high - low) / (2 * h), rtol=1e-5, atol=1e-7)


@pytest.mark.second_tier
@pytest.mark.promotes("Adam multiplies floats by counts")
@settings(max_examples=6)
@given(
    T=st.integers(1, 15), n=st.integers(1, 12), d=st.integers(1, 4), B=st.integers(1, 6),
    optimizer=st.sampled_from(["sgd", "adam", "rmsprop"]),
)  # fmt: skip
@pytest.mark.usefixtures("x64")
def test_training_with_example_weights(T, n, d, B, optimizer):
    rng = np.random.default_rng(T + 20 * n + 300 * d)
    x, y = rng.normal(size=(n, d)), rng.normal(size=n)
    make = {
        "sgd": lambda h: optax.sgd(h["lr"], h["inertia"]),
        "adam": lambda h: optax.adam(h["lr"], b1=h["inertia"], eps_root=1e-6),
        "rmsprop": lambda h: optax.rmsprop(h["lr"], decay=h["inertia"], eps=1e-3),
    }[optimizer]

    def loss(w, hparams, batch):
        x, y, i = batch
        return jnp.mean(hparams["weight"][i] * (jnp.sin(x @ w) - y) ** 2)

    problem = ft.Problem(
        ft.Training(loss, make),
        lambda state, h, batch: jnp.mean((jnp.sin(batch[0] @ state.params) - batch[1]) ** 2),
        rng.normal(size=d),
        ft.Minibatches((x, y, np.arange(n)), rng.integers(0, n, (T, B))),
        (x + 0.1, y),
    )
    hparams = {"weight": rng.uniform(0.5, 1, n), "lr": np.array(0.05), "inertia": np.array(0.8)}
    reverse, forward = ft.Reverse()(problem, hparams), ft.Forward(chunk=4)(problem, hparams)
    for name in hparams:
        scale = float(jnp.linalg.norm(reverse.grad[name]))
        np.testing.assert_allclose(
            forward.grad[name], reverse.grad[name], rtol=1e-9, atol=1e-10 * scale + 1e-14
        )

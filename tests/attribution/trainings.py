"""Trainings whose errors are attributed to their examples."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft

N, B, D, K, T = 12, 4, 3, 3, 9  # three epochs
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(N, D)), RNG.normal(size=N)
QUERIES = RNG.normal(size=(K, D)), RNG.normal(size=K)
INDICES = np.concatenate([RNG.permutation(N).reshape(-1, B) for _ in range(3)])
INIT = {"a": RNG.normal(size=(D, 5)), "b": RNG.normal(size=5)}
NORMED = INIT, {"mean": np.zeros(5), "seen": np.zeros((), np.int32)}


def hidden(params, x):
    return jnp.tanh(x @ params["a"])


def squares(params, hparams, batch):
    """Return the loss of each example."""
    return (hidden(params, batch[0]) @ params["b"] - batch[1]) ** 2


def mean_square(params, hparams, batch):
    return jnp.mean(squares(params, hparams, batch))


def penalised(params, hparams, batch):
    return mean_square(params, hparams, batch) + hparams["decay"] * jnp.sum(params["a"] ** 2)


def dropped(params, hparams, batch, *, key):
    keep = jax.random.bernoulli(key, 0.5, (len(batch[1]), 5)).astype(batch[0].dtype)
    return ((keep * hidden(params, batch[0])) @ params["b"] - batch[1]) ** 2


def normed(params, hparams, batch, state):
    h = batch[0] @ params["a"]
    mean, variance = jnp.mean(h, 0), jnp.var(h, 0)
    state = {
        "mean": 0.9 * state["mean"] + 0.1 * mean,
        "seen": state["seen"] + 1,
    }
    h = jnp.tanh((h - mean[None]) / jnp.sqrt(variance + 0.1)[None])
    return (h @ params["b"] - batch[1]) ** 2, state


def mean_dropped(params, hparams, batch, *, key):
    return jnp.mean(dropped(params, hparams, batch, key=key))


def mean_normed(params, hparams, batch, state):
    l, state = normed(params, hparams, batch, state)
    return jnp.mean(l), state


def error(state, hparams, batch):
    return mean_square(state.params, hparams, batch)


def normed_error(state, hparams, batch):
    h = jnp.tanh(batch[0] @ state.params["a"] - state.model_state["mean"][None])
    return jnp.mean((h @ state.params["b"] - batch[1]) ** 2)


def momentum(hparams):
    return optax.sgd(hparams["lr"], 0.9)


def adam(hparams):
    return optax.adam(hparams["lr"], eps_root=1e-6)


def of_numbers(losses, has_state=False):
    """Return the loss with the weights written out, as a user would: batches have numbers."""

    def loss(params, hparams, batch, *state, **key):
        x, y, i = batch
        found = losses(params, hparams, (x, y), *state, **key)
        if not has_state:
            return jnp.mean(hparams["weight"][i] * found)
        return jnp.mean(hparams["weight"][i] * found[0]), found[1]

    return loss


def of_numbers_penalised(params, hparams, batch):
    return of_numbers(squares)(params, hparams, batch) + hparams["decay"] * jnp.sum(
        params["a"] ** 2
    )


# name: the training, that with weights, losses, objective, start
CASES = {
    "momentum": (
        ft.Training(mean_square, momentum),
        ft.Training(of_numbers(squares), momentum),
        None,
        error,
        INIT,
    ),
    "adam": (
        ft.Training(mean_square, adam),
        ft.Training(of_numbers(squares), adam),
        None,
        error,
        INIT,
    ),
    "penalty": (
        ft.Training(penalised, momentum),
        ft.Training(of_numbers_penalised, momentum),
        squares,
        error,
        INIT,
    ),
    "batch norm": (
        ft.Training(mean_normed, momentum, has_state=True),
        ft.Training(of_numbers(normed, True), momentum, has_state=True),
        normed,
        normed_error,
        NORMED,
    ),
    "dropout": (
        ft.Training(mean_dropped, adam, key=jax.random.key(3)),
        ft.Training(of_numbers(dropped), adam, key=jax.random.key(3)),
        dropped,
        error,
        INIT,
    ),
}


def problem_of(dynamics, objective=error, init=INIT, batches=None, **options):
    batches = ft.Minibatches((X, Y), INDICES) if batches is None else batches
    return ft.Problem(dynamics, objective, init, batches, validation=QUERIES, **options)


def plain(**options):
    return problem_of(CASES["momentum"][0], **options), {"lr": jnp.array(0.05)}


def of_query(problem, k):
    return problem.replace(validation=jax.tree.map(lambda leaf: leaf[k : k + 1], QUERIES))


def same(actual, expected):
    np.testing.assert_allclose(actual.scores, expected.scores, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(actual.errors, expected.errors, rtol=1e-5)


def refused(kind, words, *, problem=None, queries=QUERIES, hparams=None, **options):
    made, used = plain()
    with pytest.raises(kind, match=words):
        ft.attribute(problem or made, used if hparams is None else hparams, queries, **options)


def ridge():
    """Return a convex problem, trained until it has converged."""

    def loss(w, hparams, batch):
        return jnp.mean((batch[0] @ w - batch[1]) ** 2) + 0.1 * jnp.sum(w**2)

    def losses(w, hparams, batch):
        return (batch[0] @ w - batch[1]) ** 2

    rng = np.random.default_rng(1)
    x = rng.normal(size=(40, 3)).astype(np.float32)
    y = (x @ np.array([1.0, -1.0, 0.5]) + rng.normal(size=40)).astype(np.float32)
    problem = ft.Problem(
        ft.Training(loss, optax.sgd(0.2)),
        lambda state, h, batch: jnp.mean((batch[0] @ state.params - batch[1]) ** 2),
        np.zeros(3, np.float32),
        ft.FullBatch((x, y), steps=60),
    )
    queries = rng.normal(size=(4, 3)).astype(np.float32), np.ones(4, np.float32)
    return problem, queries, losses, x, y

"""Tuning tasks that several benchmarks share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import foretune as ft
from experiments.datasets import load

Task = tuple[ft.Problem, dict[str, Any], dict[str, Any], Callable[..., dict[str, Any]]]


def _digits(seed: int):
    x, y = map(np.asarray, load_digits(return_X_y=True))
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(y))
    return (x[order] / 16).astype(np.float32), y[order], rng


def digits_arrays(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's handwritten digits, shuffled."""
    x, y, _ = _digits(seed)
    return x, y.astype(np.int32)


def mnist_arrays() -> tuple[np.ndarray, ...]:
    """Return MNIST's training and test images and labels."""
    x, y, *_ = load("mnist")
    return x[:60_000], y[:60_000], x[60_000:], y[60_000:]


def _cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def digits_cleaning(T: int = 100, seed: int = 0) -> Task:
    """Data hyper-cleaning: a weight for each of 900 examples, a third of them wrongly labelled."""
    x, y, rng = _digits(seed)
    wrong = rng.random(900) < 1 / 3
    labels = np.where(wrong, (y[:900] + rng.integers(1, 10, 900)) % 10, y[:900])

    def losses(params, batch):
        return _cross_entropy(batch[0] @ params["w"] + params["b"], batch[1])

    problem = ft.Problem(
        ft.Training(lambda p, h, b: jnp.mean(h["weight"] * losses(p, b)), optax.sgd(1.0)),
        lambda state, h, b: jnp.mean(losses(state.params, b)),
        {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)},
        ft.FullBatch((x[:900], labels), steps=T),
        (x[900:1200], y[900:1200]),
    )

    def evaluate(state, hparams):
        found = hparams["weight"] < 1e-3
        hits = jnp.sum(found & wrong)
        f1 = 2 * hits / (jnp.sum(found) + wrong.sum())
        logits = x[1200:] @ state.params["w"] + state.params["b"]
        return {"f1": f1, "test_accuracy": jnp.mean(jnp.argmax(logits, 1) == y[1200:])}

    constraints = {"weight": ft.CappedSimplex(600.0)}
    return problem, {"weight": jnp.full(900, 0.5)}, constraints, evaluate


def digits_rates(T: int = 200, seed: int = 0) -> Task:
    """Learning rate, momentum and weight decay of a small network, from a bad start."""
    x, y, _ = _digits(seed)
    keys = jax.random.split(jax.random.key(seed), 3)
    params = [
        jax.random.normal(keys[0], (64, 32)) / 8,
        jax.random.normal(keys[1], (32, 10)) / 32**0.5,
    ]

    def losses(params, batch):
        return _cross_entropy(jnp.tanh(batch[0] @ params[0]) @ params[1], batch[1])

    def penalised(params, hparams, batch):
        penalty = sum(jnp.sum(w**2) for w in params)
        return jnp.mean(losses(params, batch)) + hparams["decay"] * penalty

    problem = ft.Problem(
        ft.Training(penalised, lambda h: optax.sgd(h["lr"], h["momentum"])),
        lambda state, h, b: jnp.mean(losses(state.params, b)),
        params,
        ft.Minibatches.shuffled((x[:900], y[:900]), batch_size=50, steps=T, key=keys[2]),
        (x[900:1200], y[900:1200]),
    )

    def evaluate(state, hparams):
        logits = jnp.tanh(x[1200:] @ state.params[0]) @ state.params[1]
        return {"test_accuracy": jnp.mean(jnp.argmax(logits, 1) == y[1200:])}

    hparams = {"lr": jnp.array(0.01), "momentum": jnp.array(0.1), "decay": jnp.array(0.01)}
    constraints = {"lr": ft.Log(), "momentum": ft.Logit(0.0, 1.0), "decay": ft.Log()}
    return problem, hparams, constraints, evaluate

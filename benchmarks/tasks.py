"""Data and networks that several benchmarks share."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def digits_arrays(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's handwritten digits, shuffled."""
    from sklearn.datasets import load_digits

    x, y = map(np.asarray, load_digits(return_X_y=True))
    order = np.random.default_rng(seed).permutation(len(y))
    return (x[order] / 16).astype(np.float32), y[order].astype(np.int32)


def mnist_arrays() -> tuple[np.ndarray, ...]:
    """Return MNIST's training and test images and labels."""
    from experiments.datasets import load

    x, y, *_ = load("mnist")
    return x[:60_000], y[:60_000], x[60_000:], y[60_000:]


def random_arrays(n: int, *shape: int, classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Return random inputs and labels."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, *shape)).astype(np.float32), rng.integers(0, classes, n)


def layers(key: Any, *sizes: int) -> list[dict[str, jax.Array]]:
    """Return the initial weights of `mlp`, of variance 2 / inputs."""
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"w": jax.random.normal(k, (a, b)) * (2 / a) ** 0.5, "b": jnp.zeros(b)}
        for k, (a, b) in zip(keys, itertools.pairwise(sizes), strict=True)
    ]


def mlp(params: Any, x: Any, activation: Any = jax.nn.relu) -> jax.Array:
    """Return the outputs of a network."""
    for layer in params[:-1]:
        x = activation(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def cross_entropy(logits: Any, labels: Any) -> jax.Array:
    """Return the mean cross entropy."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

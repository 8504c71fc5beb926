"""Small problems that several tests share."""

import os

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft

SLOW = pytest.mark.skipif(
    not os.environ.get("FORETUNE_SLOW_TESTS"), reason="slow: set FORETUNE_SLOW_TESTS=1 to run it"
)


def regression(steps=10, *, optimizer=None, n=20, d=3, dtype=np.float32, **options):
    """Return a linear regression with a learning rate and a penalty, and its hyperparameters."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(n, d)).astype(dtype), rng.normal(size=n).astype(dtype)
    optimizer = optimizer or (lambda h: optax.sgd(h["lr"], 0.5))
    arguments = {
        "dynamics": ft.Training(penalised, optimizer),
        "objective": squared_error,
        "init": {"w": np.zeros(d, dtype), "b": np.zeros((), dtype)},
        "batches": ft.FullBatch((x, y), steps=steps),
        "validation": (x[::-1] + 0.1, y),
    }
    problem = ft.Problem(**(arguments | options))
    return problem, {"lr": jnp.array(0.1, dtype), "decay": jnp.array(0.02, dtype)}


def squares(params, batch):
    return jnp.mean((batch[0] @ params["w"] + params["b"] - batch[1]) ** 2)


def penalised(params, hparams, batch):
    return squares(params, batch) + hparams["decay"] * jnp.sum(params["w"] ** 2)


def squared_error(state, hparams, batch):
    return squares(state.params, batch)


def assert_trees_close(actual, expected, rtol, atol=0.0):
    import jax

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), actual, expected
    )

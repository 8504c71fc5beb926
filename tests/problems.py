"""Small problems that several tests share.

Their functions are made once, so that tests share the compiled programs as well.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft


def regression(steps=10, *, optimizer=None, n=20, d=3, dtype=np.float32, **options):
    """Return a linear regression with a learning rate and a penalty, and its hyperparameters."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(n, d)).astype(dtype), rng.normal(size=n).astype(dtype)
    arguments = {
        "dynamics": ft.Training(penalised, optimizer or momentum),
        "objective": squared_error,
        "init": {"w": np.zeros(d, dtype), "b": np.zeros((), dtype)},
        "batches": ft.FullBatch((x, y), steps=steps),
        "validation": (x[::-1] + 0.1, y),
    }
    problem = ft.Problem(**(arguments | options))
    return problem, {"lr": jnp.array(0.1, dtype), "decay": jnp.array(0.02, dtype)}


def momentum(hparams):
    return optax.sgd(hparams["lr"], 0.5)


def squares(params, batch):
    return jnp.mean((batch[0] @ params["w"] + params["b"] - batch[1]) ** 2)


def penalised(params, hparams, batch):
    return squares(params, batch) + hparams["decay"] * jnp.sum(params["w"] ** 2)


def squared_error(state, hparams, batch):
    return squares(state.params, batch)


def assert_trees_close(actual, expected, rtol, atol=0.0):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), actual, expected
    )

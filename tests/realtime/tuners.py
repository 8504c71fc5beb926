"""Tuners of a linear regression, and their data."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft

from ..problems import penalised, squared_error

STILL = optax.sgd(0.0)  # the hyperparameters stay where they are
EXACT = {"discount": 1.0, "rollback": None}


def sgd(h):
    return optax.sgd(h["lr"], h["momentum"])


def adam(h):
    return optax.adam(h["lr"], b1=h["momentum"], eps_root=1e-8)


def data(windows=3, delta=4, n=8, d=3, dtype=np.float32, seed=0):
    """Return windows of minibatches of a linear regression, and a validation batch."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(windows, delta, n, d)).astype(dtype)
    y = (x @ np.arange(1, d + 1) + 0.1 * rng.normal(size=x.shape[:-1])).astype(dtype)
    validation = rng.normal(size=(20, d)).astype(dtype)
    return list(zip(x, y, strict=True)), (validation, (validation @ np.arange(1, d + 1)))


def start(dtype=np.float32, d=3, **hparams):
    given = {"lr": 0.02, "momentum": 0.5, "decay": 0.01} | hparams
    params = {"w": np.full(d, 0.1, dtype), "b": np.zeros((), dtype)}
    return params, {name: jnp.asarray(value, dtype) for name, value in given.items()}


def tuner(optimizer=sgd, outer=STILL, objective=squared_error, **options):
    return ft.RealTime(ft.Training(penalised, optimizer), objective, outer, **options)


def joined(windows):
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *windows)


class Decay(ft.Dynamics):
    """A dynamics that is no training."""

    def init(self, params, hparams):
        return params

    def step(self, state, hparams, batch):
        return state * hparams["rate"] + batch

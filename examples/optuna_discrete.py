"""Optuna chooses depth, width, activation and batch size; gradients tune the rest in each trial.

    pip install ".[data,optuna]"
    python examples/optuna_discrete.py [--trials 10] [--storage study.log]

Handwritten digits. Every trial trains once, and tunes learning rate, momentum and weight decay while it
does, from what the best trial so far has tuned. Start the same command with the same --storage in
several terminals: they work on one study. About a minute on two CPU cores, most of it compilation.
"""

import argparse
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optuna
from optuna.storages.journal import JournalFileBackend
from sklearn.datasets import load_digits

import foretune as ft
import foretune.optuna as fo

# %% Options
parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
parser.add_argument("--trials", type=int, default=10)
parser.add_argument("--storage", type=Path, help="a journal file, to share with other workers")
arguments = parser.parse_args()

# %% The network and its training
ACTIVATIONS = {"relu": jax.nn.relu, "tanh": jnp.tanh, "gelu": jax.nn.gelu}
START = {"lr": jnp.array(0.05), "momentum": jnp.array(0.5), "decay": jnp.array(1e-4)}
CONSTRAINTS = {"lr": ft.NonNegative(), "momentum": ft.Box(0.0, 0.999), "decay": ft.NonNegative()}
EXAMPLES, WINDOWS = 30_000, 30  # seen by each trial, and the windows they come in


def network(activation, params, x):
    for layer in params[:-1]:
        h = x @ layer["w"] + layer["b"]
        x = jax.lax.switch(activation, list(ACTIVATIONS.values()), h)  # data: one program for all
    return x @ params[-1]["w"] + params[-1]["b"]


def cross_entropy(activation, params, batch):
    logits = network(activation, params, batch[0])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]))


def loss(activation, params, hparams, batch):
    penalty = sum(jnp.sum(layer["w"] ** 2) for layer in params)
    return cross_entropy(activation, params, batch) + hparams["decay"] * penalty


def error(activation, state, hparams, batch):
    return cross_entropy(activation, state.params, batch)


def optimizer(hparams):
    return optax.sgd(hparams["lr"], hparams["momentum"])


def make_params(depth, width):
    rng = np.random.default_rng(0)  # NumPy compiles nothing
    return [
        {
            "w": (rng.normal(size=(a, b)) * (2 / a) ** 0.5).astype(np.float32),
            "b": np.zeros(b, np.float32),
        }
        for a, b in itertools.pairwise((64, *[width] * depth, 10))
    ]


# %% The data
x, y = map(np.asarray, load_digits(return_X_y=True))
order = np.random.default_rng(0).permutation(len(y))
x, y = (x[order] / 16).astype(np.float32), y[order]
train, validation, test = ((x[s], y[s]) for s in np.split(np.arange(len(y)), [900, 1200]))
train = jax.device_put(train)


# %% A trial
def objective(trial):
    depth = trial.suggest_categorical("depth", [1, 2])
    width = trial.suggest_categorical("width", [32, 128])
    batch_size = trial.suggest_categorical("batch_size", [20, 100])
    chosen = trial.suggest_categorical("activation", list(ACTIVATIONS))
    activation = jnp.array(list(ACTIVATIONS).index(chosen))
    steps = EXAMPLES // batch_size
    tuner = ft.RealTime(
        ft.Training(jax.tree_util.Partial(loss, activation), optimizer),
        jax.tree_util.Partial(error, activation),
        constraints=CONSTRAINTS,
    )
    with fo.prune_nonfinite(trial):
        result = tuner.run(
            ft.Minibatches.shuffled(
                train, batch_size=batch_size, steps=steps, key=jax.random.key(0)
            ),
            [validation],
            params=jax.device_put(make_params(depth, width)),
            hparams=fo.warm_start(trial, START),
            window=steps // WINDOWS,
            callbacks=[fo.Pruning(trial)],
        )
    logits = network(activation, result.state.train.params, test[0])
    trial.set_user_attr("test accuracy", 100 * float(jnp.mean(jnp.argmax(logits, 1) == test[1])))
    return fo.keep(trial, result)


# %% The study
storage = arguments.storage and optuna.storages.JournalStorage(
    JournalFileBackend(str(arguments.storage))
)
study = optuna.create_study(
    study_name="digits",
    storage=storage,
    load_if_exists=True,
    sampler=optuna.samplers.TPESampler(seed=None if storage else 0),
    pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=5),
)
study.optimize(objective, n_trials=arguments.trials)

# %% The best trial
best = study.best_trial
tuned = ", ".join(f"{n[2:-2]} {v:.4g}" for n, v in best.user_attrs[fo.HPARAMS].items())
print(f"trial {best.number}: {best.params}, tuned to {tuned}")
print(f"validation error {best.value:.4f}, test accuracy {best.user_attrs['test accuracy']:.1f} %")

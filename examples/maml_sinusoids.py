"""MAML: initial weights from which five steps on ten points learn a sinusoid.

A task is a sinusoid of random amplitude and phase. Five steps of gradient descent on ten of its points,
the support, are the inner problem; the error on ten others, the query, is what the initial weights are
learnt by, 25 tasks at a time, drawn anew at each step. Exactly, and to first order.

    pip install .
    python examples/maml_sinusoids.py [--iterations 5000]
"""

import argparse
import time

import jax
import jax.numpy as jnp
import optax

import foretune as ft

# %% Options
parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
parser.add_argument("--iterations", type=int, default=5000)
arguments = parser.parse_args()


# %% The tasks
def sinusoid(key):
    """Return the support and the query of a random task."""
    amplitude_key, phase_key, x_key = jax.random.split(key, 3)
    amplitude = jax.random.uniform(amplitude_key, minval=0.1, maxval=5.0)
    phase = jax.random.uniform(phase_key, maxval=jnp.pi)
    x = jax.random.uniform(x_key, (2, 10, 1), minval=-5.0, maxval=5.0)
    y = amplitude * jnp.sin(x + phase)
    return (x[0], y[0]), (x[1], y[1])


# %% The network
def start(key, sizes=(1, 40, 40, 1)):
    """Return random weights."""
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"w": jax.random.normal(k, (a, b)) / a**0.5, "b": jnp.zeros(b)}
        for k, a, b in zip(keys, sizes, sizes[1:], strict=False)
    ]


def network(weights, x):
    """Return the network's guess at x."""
    for layer in weights[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ weights[-1]["w"] + weights[-1]["b"]


def loss(weights, hparams, points):
    """Return the mean squared error."""
    x, y = points
    return jnp.mean((network(weights, x) - y) ** 2)


# %% MAML
training = ft.Training(loss, optax.sgd(0.01))


def task(key, steps=5):
    """Return the inner problem of a random task, whose hyperparameters are the initial weights."""
    support, query = sinusoid(key)
    return ft.Problem(
        training,
        objective=lambda state, weights, points: loss(state.params, weights, points),
        init=lambda weights: weights,
        batches=ft.FullBatch(support, steps),
        validation=query,
    )


def learn(engine):
    """Return the learnt weights, and the seconds that took."""
    began = time.perf_counter()
    result = ft.minimize(
        ft.Mean.of_draws(task, 25),
        start(jax.random.key(0)),
        key=jax.random.key(1),
        steps=arguments.iterations,
        engine=engine,
        optimizer=optax.adam(1e-3),
    )
    return result.hparams, time.perf_counter() - began


# %% The test
def error(weights, steps):
    """Return the mean error on fresh tasks after some steps on their support."""
    keys = jax.random.split(jax.random.key(2), 1000)
    return jnp.mean(jax.vmap(lambda key: task(key, steps).response(weights)[0])(keys))


def show(name, weights, seconds=0.0):
    """Print the errors after 1 and 5 steps."""
    print(
        f"{name:12} 1 step {error(weights, 1):.3f}, 5 steps {error(weights, 5):.3f} ({seconds:.0f} s)"
    )


show("random", start(jax.random.key(0)))
show("first order", *learn(ft.Reverse(first_order=True)))
show("MAML", *learn(ft.Reverse()))

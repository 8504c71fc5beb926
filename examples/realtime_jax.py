"""A plain JAX training loop that finds its own learning rate and momentum while it trains.

    pip install ".[data]"
    python examples/realtime_jax.py [--steps 1000]

The loop is the usual one. Only its `update` has been replaced: by one that also sees a validation
batch. The learning rate starts at a thousandth of what would be good.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import foretune as ft

# %% Options
parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
parser.add_argument("--steps", type=int, default=1000)
arguments = parser.parse_args()


# %% The network
def network(params, x):
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def loss(params, batch):
    x, y = batch
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(network(params, x), y))


def accuracy(params, x, y):
    return float(jnp.mean(jnp.argmax(network(params, x), axis=1) == y))


# %% The data
x, y = map(np.asarray, load_digits(return_X_y=True))
rng = np.random.default_rng(0)
order = rng.permutation(len(y))
x, y = (x[order] / 16).astype(np.float32), y[order]
train, validation, test = slice(0, 900), slice(900, 1200), slice(1200, None)

# %% The parameters, and an optimizer that tunes itself
keys = jax.random.split(jax.random.key(0))
params = {
    "w1": jax.random.normal(keys[0], (64, 64)) / 8,
    "b1": jnp.zeros(64),
    "w2": jax.random.normal(keys[1], (64, 10)) / 8,
    "b2": jnp.zeros(10),
}

# Was: optimizer = optax.sgd(1e-4, momentum=0.5), and an `update` that takes its gradient step.
optimizer = ft.tuned(optax.sgd, loss, learning_rate=1e-4, momentum=0.5)

# %% The training loop
state = optimizer.init(params)
for step in range(arguments.steps):
    batch = rng.integers(0, 900, 50)
    state, value = optimizer.update(
        state, (x[train][batch], y[train][batch]), (x[validation], y[validation])
    )
    if step % 200 == 199:
        rates = ", ".join(f"{name} {float(h):.4f}" for name, h in state.hparams.items())
        print(f"step {step + 1:4}: loss {float(value):.4f}, {rates}")

# %% The test
print(f"test accuracy {100 * accuracy(state.params, x[test], y[test]):.1f} %")

"""A Flax NNX model with batch normalisation and dropout, tuned over a stream with `RealTime.run`.

    pip install ".[data]" flax
    python examples/realtime_flax.py [--steps 1000]

The model is split into its parameters and the rest (its batch statistics and the state of its random
numbers), which the training carries as model state. The stream is any Python iterable of minibatches;
here it is a generator.
"""

import argparse
import itertools

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import foretune as ft

# %% Options
parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
parser.add_argument("--steps", type=int, default=1000)
arguments = parser.parse_args()

# %% The data
x, y = map(np.asarray, load_digits(return_X_y=True))
rng = np.random.default_rng(0)
order = rng.permutation(len(y))
x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int32)

# %% The model
rngs = nnx.Rngs(0)
model = nnx.Sequential(
    nnx.Linear(64, 64, rngs=rngs),
    nnx.BatchNorm(64, rngs=rngs),
    nnx.relu,
    nnx.Dropout(0.1, rngs=rngs),
    nnx.Linear(64, 10, rngs=rngs),
)
graph, params, rest = nnx.split(model, nnx.Param, ...)


# %% The loss
def mean_loss(logits, labels):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def loss(params, hparams, batch, model_state):
    model = nnx.merge(graph, params, model_state)
    model.train()
    value = mean_loss(model(batch[0]), batch[1])
    return value, nnx.split(model, nnx.Param, ...)[2]  # with its new batch statistics


def predict(state, x):
    model = nnx.merge(graph, state.params, state.model_state)
    model.eval()
    return model(x)


# %% The stream
def minibatches():
    for _ in range(arguments.steps):
        batch = rng.integers(0, 900, 50)
        yield x[batch], y[batch]


# %% The training
tuner = ft.RealTime(
    ft.Training(loss, lambda h: optax.sgd(h["lr"], h["momentum"]), has_state=True),
    objective=lambda state, hparams, batch: mean_loss(predict(state, batch[0]), batch[1]),
    constraints={"lr": ft.NonNegative(), "momentum": ft.Box(0.0, 0.999)},
)
result = tuner.run(
    minibatches(),
    itertools.repeat((x[900:1200], y[900:1200])),
    params=(params, rest),
    hparams={"lr": jnp.array(0.0), "momentum": jnp.array(0.0)},  # the null start
    window=10,
    callbacks=[ft.Progress()],
)

# %% What was tuned
for record in result.history[9 :: max(10, len(result.history) // 5)]:
    rates = ", ".join(f"{name} {h:.4f}" for name, h in record["hparams"].items())
    print(f"window {record['step']:3}: validation error {record['value']:.4f}, {rates}")
right = jnp.argmax(predict(result.state.train, x[1200:]), axis=1) == y[1200:]
print(f"test accuracy {100 * float(jnp.mean(right)):.1f} %")

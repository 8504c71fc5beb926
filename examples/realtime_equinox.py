"""An Equinox model whose AdamW tunes learning rate and weight decay while it trains.

    pip install ".[data]"
    python examples/realtime_equinox.py [--steps 1000]

An Equinox model is a pytree of parameters, and is given as it is. `eps_root` keeps the derivative of
Adam finite where a gradient is exactly 0 (the digits' border pixels).
"""

import argparse
import functools

import equinox as eqx
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


# %% The loss
def loss(model, batch):
    x, y = batch
    logits = jax.vmap(model)(x)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))


# %% The data
x, y = map(np.asarray, load_digits(return_X_y=True))
rng = np.random.default_rng(0)
order = rng.permutation(len(y))
x, y = (x[order] / 16).astype(np.float32), y[order]

# %% The model, and an optimizer that tunes itself
model = eqx.nn.MLP(64, 10, width_size=64, depth=1, key=jax.random.key(0))
adamw = functools.partial(optax.adamw, eps_root=1e-8)
optimizer = ft.tuned(adamw, loss, learning_rate=1e-5, weight_decay=1e-2)

# %% The training loop
state = optimizer.init(model)
for step in range(arguments.steps):
    batch = rng.integers(0, 900, 50)
    state, value = optimizer.update(state, (x[batch], y[batch]), (x[900:1200], y[900:1200]))
    if step % 200 == 199:
        rates = ", ".join(f"{name} {float(h):.2e}" for name, h in state.hparams.items())
        print(f"step {step + 1:4}: loss {float(value):.4f}, {rates}")

# %% The test
model = state.params
right = jnp.argmax(jax.vmap(model)(x[1200:]), axis=1) == y[1200:]
print(f"test accuracy {100 * float(jnp.mean(right)):.1f} %")

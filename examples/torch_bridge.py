# pyright: reportMissingImports=false
"""A PyTorch network whose learning rate, momentum and weight decay are tuned by hypergradients.

    pip install ".[data,torch]"
    python examples/torch_bridge.py [--steps 150] [--hyper-steps 25]

The network is an ordinary `torch.nn.Module` with batch normalisation. foretune differentiates its
whole training (in JAX, through torchax), descends on the three hyperparameters, and puts the tuned
weights back into the module, which then classifies the test digits in PyTorch.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from sklearn.datasets import load_digits

import foretune as ft
import foretune.torch as ftt

# %% Options
parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
parser.add_argument("--steps", type=int, default=150, help="steps of each training")
parser.add_argument("--hyper-steps", type=int, default=25, help="hypergradients taken")
arguments = parser.parse_args()

# %% The data
x, y = map(np.asarray, load_digits(return_X_y=True))
order = np.random.default_rng(0).permutation(len(y))
x = (x[order] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
y = y[order].astype(np.int32)

# %% The module, and its bridge
torch.manual_seed(0)
module = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3),
    torch.nn.BatchNorm2d(8),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(2),
    torch.nn.Flatten(),
    torch.nn.Linear(72, 10),
)
model = ftt.bridge(module)


# %% The training
def mean_loss(logits, labels):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def loss(params, hparams, batch, buffers):
    logits, buffers = model.apply(params, batch[0], buffers=buffers, train=True)
    return mean_loss(logits, batch[1]), buffers  # with the new batch statistics


def error(state, hparams, batch):
    logits = model.apply(state.params, batch[0], buffers=state.model_state)
    return mean_loss(logits, batch[1])


def optimizer(h):
    return optax.chain(
        optax.add_decayed_weights(h["decay"]), optax.sgd(h["lr"], momentum=h["momentum"])
    )


problem = ft.Problem(
    ft.Training(loss, optimizer, has_state=True),
    error,
    init=(model.params, model.buffers),
    batches=ft.Minibatches.shuffled(
        (x[:600], y[:600]), batch_size=50, steps=arguments.steps, key=jax.random.key(0)
    ),
    validation=(x[600:1200], y[600:1200]),
)

# %% The tuning
result = ft.minimize(
    problem,
    {"lr": jnp.array(1e-3), "momentum": jnp.array(0.5), "decay": jnp.array(1e-4)},
    steps=arguments.hyper_steps,
    engine=ft.Reverse(),
    optimizer=optax.adam(0.3),
    constraints={"lr": ft.Log(), "momentum": ft.Logit(0.0, 1.0), "decay": ft.Log()},
    callbacks=[ft.Progress()],
)
tuned = ", ".join(f"{name} {float(h):.2g}" for name, h in result.hparams.items())
print(f"validation error {result.history[0]['value']:.4f}, then {result.value:.4f} with {tuned}")

# %% Back in PyTorch
model.load(result.state.params, result.state.model_state)
with torch.no_grad():
    right = module.eval()(torch.tensor(x[1200:])).argmax(1).numpy() == y[1200:]
print(f"test accuracy {100 * right.mean():.1f} %, computed by PyTorch")

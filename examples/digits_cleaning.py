"""Data hyper-cleaning on scikit-learn's digits: which training labels are wrong?

A third of the training labels are changed at random. Each training example gets a weight in the
training loss, and the weights are hyperparameters: they descend on the error of a few checked
examples, by the exact hypergradient of the whole training in reverse mode, with a bound on each
weight and on their sum. Weights at 0 mark the wrong labels (Franceschi et al., ICML 2017, section 5.1).

    pip install ".[data]"
    python examples/digits_cleaning.py [--iterations 150]
"""

import argparse

import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import foretune as ft

# %% Options
parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
parser.add_argument("--iterations", type=int, default=150, help="hyper-iterations")
parser.add_argument("--steps", type=int, default=300, help="steps of each training run (T)")
arguments = parser.parse_args()


# %% The data
def data(rng, wrong_share=1 / 3):
    """Return training data with wrong labels, which ones are wrong, checked data, test data."""
    x, y = map(np.asarray, load_digits(return_X_y=True))
    order = rng.permutation(len(y))
    x, y = (x[order] / 16).astype(np.float32), y[order]
    train, checked, test = slice(0, 900), slice(900, 1200), slice(1200, None)
    wrong = rng.random(900) < wrong_share
    labels = np.where(wrong, (y[train] + rng.integers(1, 10, 900)) % 10, y[train])
    return (x[train], labels), wrong, (x[checked], y[checked]), (x[test], y[test])


train, wrong, checked, test = data(np.random.default_rng(0))


# %% The training
def logits(params, x):
    """Return the softmax regression's class scores."""
    return x @ params["w"] + params["b"]


def losses(params, batch):
    """Return the cross-entropy of each example."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, batch[0]), batch[1])


problem = ft.Problem(
    dynamics=ft.Training(
        lambda params, h, batch: jnp.mean(h["weight"] * losses(params, batch)),
        optimizer=optax.sgd(1.0),
    ),
    objective=lambda state, h, batch: jnp.mean(losses(state.params, batch)),
    init={"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)},
    batches=ft.FullBatch(train, steps=arguments.steps),
    validation=checked,
)


def accuracy(state, batch):
    return float(jnp.mean(jnp.argmax(logits(state.params, batch[0]), 1) == batch[1]))


# %% Before
hparams = {"weight": jnp.full(len(wrong), 0.5)}
value, state = problem.response(hparams)
print(f"{wrong.sum()} of {len(wrong)} training labels are wrong; 300 others are checked.")
print(f"before: validation error {value:.3f}, test accuracy {accuracy(state, test):.1%}")

# %% The tuning
result = ft.minimize(
    problem,
    hparams,
    steps=arguments.iterations,
    engine=ft.Reverse(),
    optimizer=optax.adam(0.01),
    constraints={"weight": ft.CappedSimplex(total=len(wrong) * 2 / 3)},
    callbacks=[ft.Progress("tuning 900 weights")],
)

# %% After
value, state = result.value, result.state
found = np.asarray(result.hparams["weight"]) < 1e-3
right = int((found & wrong).sum())
print(f"after:  validation error {value:.3f}, test accuracy {accuracy(state, test):.1%}")
print(
    f"weights at 0: {found.sum()}; of these {right} of the {wrong.sum()} wrong labels "
    f"(recall {right / wrong.sum():.0%}, precision {right / max(found.sum(), 1):.0%})"
)

"""Which training digits made this wrong prediction?

A small network is trained on scikit-learn's digits, of which one in ten has a wrong label. For test
digits that it gets wrong, `attribute` gives the derivative of their error in the weight of each
training digit, through the whole training: those with the highest scores misled it. The mean of the
scores over checked digits finds the wrong labels. Trainings without random parts of the digits tell how
far the scores can be believed.

    pip install ".[data]"
    python examples/attribution.py [--steps 300]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.stats import spearmanr
from sklearn.datasets import load_digits

import foretune as ft

# %% Options
parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
parser.add_argument("--steps", type=int, default=300, help="steps of the training (T)")
parser.add_argument("--subsets", type=int, default=30, help="trainings to validate the scores")
arguments = parser.parse_args()

# %% The data
rng = np.random.default_rng(0)
x, y = map(np.asarray, load_digits(return_X_y=True))
order = rng.permutation(len(y))
x, y = (x[order] / 16).astype(np.float32), y[order]
wrong = rng.random(900) < 0.1
labels = np.where(wrong, (y[:900] + rng.integers(1, 10, 900)) % 10, y[:900])
train, checked, test = (x[:900], labels), (x[900:1100], y[900:1100]), (x[1100:], y[1100:])


# %% The training
def logits(params, x):
    """Return the class scores of a network with one hidden layer."""
    return jnp.tanh(x @ params["a"]) @ params["b"]


def cross_entropy(params, batch):
    """Return the mean cross-entropy of a batch."""
    scores = logits(params, batch[0])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, batch[1]))


problem = ft.Problem(
    dynamics=ft.Training(
        lambda params, h, batch: cross_entropy(params, batch),
        optimizer=lambda h: optax.sgd(h["lr"], 0.9),
    ),
    objective=lambda state, h, batch: cross_entropy(state.params, batch),
    init={
        "a": (rng.normal(size=(64, 32)) / 8).astype(np.float32),
        "b": (rng.normal(size=(32, 10)) / 6).astype(np.float32),
    },
    batches=ft.Minibatches.shuffled(
        train, batch_size=100, steps=arguments.steps, key=jax.random.key(0)
    ),
    validation=checked,
)
hparams = {"lr": jnp.array(0.1)}
value, state = problem.response(hparams)
predicted = np.argmax(logits(state.params, test[0]), 1)
print(f"test accuracy {np.mean(predicted == test[1]):.1%}; {wrong.sum()} of 900 labels are wrong")

# %% What misled it?
missed = np.flatnonzero(predicted != test[1])[:5]
queries = test[0][missed], test[1][missed]
found = ft.attribute(problem, hparams, queries)


def drawn(*digits):
    """Return digits side by side, as lines of text."""
    rows = [
        ["".join(" .:*#"[int(p * 4.99)] for p in row) for row in d.reshape(8, 8)] for d in digits
    ]
    return "\n".join("   ".join(parts) for parts in zip(*rows, strict=True))


for k, i in enumerate(missed):
    harmful = found.bottom(3)[k]
    named = ", ".join(f"{labels[j]}{' (wrong)' if wrong[j] else ''}" for j in harmful)
    print(f"\na {test[1][i]}, taken for a {predicted[i]}; most harmful are those labelled {named}:")
    print(drawn(test[0][i], *(x[j] for j in harmful)))

# %% Without them
harmful = found.bottom(5)[0]


def weighted(params, h, batch):
    scores = logits(params, batch[0])
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch[1])
    return jnp.mean(h["weight"][batch[2]] * losses)


retrained = problem.replace(
    dynamics=ft.Training(weighted, problem.dynamics.optimizer),
    batches=ft.Minibatches((*train, np.arange(900)), problem.batches.indices),
    validation=(queries[0][:1], queries[1][:1]),
)
weight = jnp.ones(900)
error = float(retrained.response({**hparams, "weight": weight.at[harmful].set(0.0)})[0])
print(
    f"\nthe first one's error is {found.errors[0]:.2f}; without the 5 most harmful "
    f"{found.errors[0] + found.change(harmful)[0]:.2f} is predicted, and {error:.2f} is what comes out"
)

# %% Wrong labels
everything = ft.attribute(problem, hparams, checked, callbacks=[ft.Progress("queries")])
harm = everything.scores.mean(0)
suspects = np.argsort(-harm)[: wrong.sum()]
print(
    f"of the {len(suspects)} most harmful to checked digits, {wrong[suspects].mean():.0%} are wrong"
)

# %% Can the scores be believed?
retrained = retrained.replace(validation=checked)
predicted, measured = [], []
for _ in range(arguments.subsets):
    left_out = rng.choice(900, 90, replace=False)
    predicted.append(everything.change(left_out).mean())
    at = {**hparams, "weight": weight.at[left_out].set(0.0)}
    measured.append(float(retrained.response(at)[0]) - everything.errors.mean())
print(
    f"rank correlation of predicted and measured change over {arguments.subsets} trainings, each "
    f"without a tenth of the digits: {spearmanr(predicted, measured)[0]:.2f}"
)

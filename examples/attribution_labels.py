"""Wrong labels, found by what they did to checked examples; and by `LabelCleaner`.

One in ten of 600 of scikit-learn's digits has a wrong label. A single query, the mean error of 150
checked digits, is attributed to the training digits: those that harm it most are suspects. It costs one
training and its way back. `LabelCleaner` models the noise itself, takes longer, and finds more.

    pip install ".[apps,data]"
    python examples/attribution_labels.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import foretune as ft
from foretune.apps import LabelCleaner

# %% The data
rng = np.random.default_rng(0)
x, y = map(np.asarray, load_digits(return_X_y=True))
order = rng.permutation(len(y))
x, y = (x[order] / 16).astype(np.float32), y[order]
wrong = rng.permutation(600) < 60
given = np.where(wrong, (y[:600] + rng.integers(1, 10, 600)) % 10, y[:600])
checked = x[600:750], y[600:750]


# %% The training
def loss(params, hparams, batch):
    """Return the cross-entropy of softmax regression."""
    scores = batch[0] @ params
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, batch[1]))


def error(state, hparams, batch):
    """Return the same for the trained parameters."""
    return loss(state.params, hparams, batch)


problem = ft.Problem(
    dynamics=ft.Training(loss, lambda h: optax.sgd(h["lr"], 0.9)),
    objective=error,
    init=jnp.zeros((64, 10)),
    batches=ft.Minibatches.shuffled(
        (x[:600], given), batch_size=100, steps=120, key=jax.random.key(0)
    ),
    validation=checked,
)

# %% One query: the mean error of the checked digits
found = ft.attribute(problem, {"lr": jnp.array(0.05)}, [error])
suspects = found.bottom(60)[0]
print(f"attribute: {wrong[suspects].sum()} of 60 wrong labels among the 60 most harmful")

# %% The same with the estimator
cleaner = LabelCleaner(random_state=0).fit(x[:600], given, *checked)
first = cleaner.ranking_[:60]
print(f"LabelCleaner: {wrong[first].sum()} of 60 among the 60 most suspicious")

"""Weights for the examples of a noisy text set: which sentences have the wrong label?

The texts are sentences from the documentation of four Python packages, which are installed anyway; the
label is the package. 30 % of 1500 training labels are wrong. A weight for each example is a
hyperparameter of a softmax regression on word counts, tuned on 300 sentences with right labels.

    pip install ".[apps]"
    python examples/noisy_text.py [--steps 100] [--iterations 80]
"""

import argparse
import importlib
import inspect
import itertools
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from sklearn.feature_extraction.text import TfidfVectorizer

import foretune as ft

# %% Options
parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--iterations", type=int, default=80)
arguments = parser.parse_args()

# %% The texts
PACKAGES = ("numpy", "scipy.stats", "matplotlib.axes", "sklearn.ensemble")
TRAIN, CHECKED, TEST = 1500, 300, 600


def sentences(package: str) -> list[str]:
    """Return the sentences of the docstrings of a package's public names, without its own name."""
    module = importlib.import_module(package)
    texts = []
    for name in dir(module):
        member = getattr(module, name)
        if name[0] == "_" or inspect.ismodule(member):
            continue
        parts = [member, *(vars(member).values() if inspect.isclass(member) else [])]
        texts += [inspect.getdoc(part) or "" for part in parts if callable(part)]
    found = re.split(r"(?<=[.!?])\s+|\n\n+", "\n\n".join(texts))
    own = package.split(".")[0]
    clean = {re.sub(r"\s+", " ", s.replace(own, "")).strip() for s in found}
    return sorted(s for s in clean if len(s.split()) > 7 and ">>>" not in s)


def load() -> tuple[np.ndarray, np.ndarray]:
    """Return word counts and labels, shuffled, as many of each package."""
    texts = [sentences(package) for package in PACKAGES]
    each = (TRAIN + CHECKED + TEST) // len(PACKAGES)
    rng = np.random.default_rng(0)
    chosen = [[t[i] for i in rng.permutation(len(t))[:each]] for t in texts]
    labels = np.repeat(np.arange(len(PACKAGES)), [len(c) for c in chosen])
    words = TfidfVectorizer(max_features=1000, sublinear_tf=True, stop_words="english")
    counts: Any = words.fit_transform(itertools.chain(*chosen))
    x = counts.toarray().astype(np.float32)
    order = rng.permutation(len(labels))
    return x[order], labels[order].astype(np.int32)


x, y = load()

# %% Wrong labels
rng = np.random.default_rng(1)
wrong = rng.random(TRAIN) < 0.3
other = (y[:TRAIN] + rng.integers(1, len(PACKAGES), TRAIN)) % len(PACKAGES)
labels = np.where(wrong, other, y[:TRAIN]).astype(np.int32)
checked, test = slice(TRAIN, TRAIN + CHECKED), slice(TRAIN + CHECKED, None)


# %% The training
def cross_entropy(w, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w.T, y)


def loss(w, hparams, batch):
    x, y = batch
    return jnp.mean(hparams["weight"] * cross_entropy(w, x, y))


def error(state, hparams, batch):
    return jnp.mean(cross_entropy(state.params, *batch))


problem = ft.Problem(
    dynamics=ft.Training(loss, optax.sgd(20.0)),
    objective=error,
    init=jnp.zeros((len(PACKAGES), x.shape[1])),
    batches=ft.FullBatch((x[:TRAIN], labels), steps=arguments.steps),
    validation=(x[checked], y[checked]),
)

# %% The tuning
start = {"weight": jnp.full(TRAIN, 0.5)}
result = ft.minimize(
    problem,
    start,
    steps=arguments.iterations,
    engine=ft.Reverse(),
    optimizer=optax.adam(0.02),
    constraints=ft.CappedSimplex(0.7 * TRAIN),
    callbacks=[ft.Progress()],
)


# %% What was found
def accuracy(state):
    return 100 * np.mean(np.argmax(x[test] @ state.params.T, 1) == y[test])


weight = np.asarray(result.hparams["weight"])
suspicious = np.argsort(weight)[: wrong.sum()]
print(f"of the {wrong.sum()} smallest weights, {wrong[suspicious].mean():.0%} are wrong labels")
print(f"test accuracy, all labels alike: {accuracy(problem.response(start)[1]):.1f} %")
print(f"test accuracy, tuned weights: {accuracy(result.state):.1f} %")

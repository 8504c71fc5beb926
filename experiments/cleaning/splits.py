"""Balanced splits with wrong training labels, and scores of what was found."""

from typing import NamedTuple

import numpy as np

from foretune.apps._tables import DataError

from ..datasets import Dataset
from .noise import corrupt

SUSPECT_BELOW = 1e-3
"""Weights below it mark a label as wrong."""
LARGEST = 20_000
"""The experiment uses this many examples at most: the paper's number."""


class Split(NamedTuple):
    """One seed's data."""

    x: np.ndarray
    given: np.ndarray
    wrong: np.ndarray
    x_checked: np.ndarray
    checked: np.ndarray
    x_test: np.ndarray
    test: np.ndarray


def split(dataset: Dataset, noise: float, seed: int) -> Split:
    """Return a balanced split 1 : 1 : 2 with wrong training labels."""
    rng = np.random.default_rng(seed)
    classes, labels, counts = np.unique(dataset.y, return_inverse=True, return_counts=True)
    each = min(int(counts.min()), LARGEST // len(classes))
    n = each * len(classes) // 4
    if len(classes) < 2 or n < 2 * len(classes):
        raise DataError(
            f"{dataset.name} has {len(classes)} classes with {counts.min()} examples in the smallest: "
            "the experiment needs two classes or more, with 8 examples each."
        )
    members = [rng.permutation(np.flatnonzero(labels == k))[:each] for k in range(len(classes))]
    chosen = rng.permutation(np.concatenate(members))
    x, y = dataset.x[chosen], labels[chosen]
    given, wrong = corrupt(y[:n], noise, rng)
    return Split(x[:n], given, wrong, x[n : 2 * n], y[n : 2 * n], x[2 * n :], y[2 * n :])


class Scores(NamedTuple):
    """How well wrong labels were found; the positive class is "wrong"."""

    f1: float
    precision: float
    recall: float
    true_positives: int
    false_positives: int


def score(found: np.ndarray, wrong: np.ndarray) -> Scores:
    """Return the scores of a mask of suspects."""
    true, false = int((found & wrong).sum()), int((found & ~wrong).sum())
    f1 = 2 * true / max(int(found.sum()) + int(wrong.sum()), 1)
    return Scores(f1, true / max(true + false, 1), true / max(int(wrong.sum()), 1), true, false)

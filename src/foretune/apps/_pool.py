"""Out-of-fold class probabilities of classifiers, which judge rows that they have not seen."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track
from scipy import sparse
from sklearn.base import clone, is_classifier
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    RandomForestClassifier,
    VotingClassifier,
)
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import _safe_indexing

from . import _noise
from ._models import make_features, make_model

MOST_TRAINED = 50_000
"""Each classifier of a fold trains on this many rows at most."""
WIDE = 100
"""With more columns than this the pool has no boosted trees: pixels and words take them long."""
COMMON = 10
"""Boosted trees stop early, by rows set aside, where every class has this many."""
MOST_KERNEL = 20_000
"""With more rows than this the pool has no kernel model."""


def pool_of(X: Any, labels: np.ndarray, classes: int, seed: int) -> dict[str, Any]:
    """Return the classifiers that are pooled, beside the kernel model."""
    n, width = X.shape
    rarest = np.bincount(labels, minlength=classes).min()
    logistic = LogisticRegression(max_iter=1000)
    forest = RandomForestClassifier(200 if n <= 2000 else 100, n_jobs=-1, random_state=seed)
    if sparse.issparse(X):
        return {"logistic": logistic, "forest": forest}
    members = {"logistic": make_pipeline(StandardScaler(), logistic), "forest": forest}
    if width <= WIDE:
        few = classes <= 4
        members["boosting"] = HistGradientBoostingClassifier(
            max_iter=100 if few else 30,
            learning_rate=0.1 if few else 0.2,
            early_stopping=bool(rarest >= COMMON),  # pyright: ignore[reportArgumentType]
            random_state=seed,
        )
    return members


def voting(members: dict[str, Any]) -> VotingClassifier:
    """Return the model that a pool ends with: the mean of its classifiers."""
    return VotingClassifier(list(members.items()), voting="soft")


def check_estimator(estimator: Any) -> None:
    """Raise unless it is None, "pool", or a classifier with probabilities."""
    if estimator is None or (isinstance(estimator, str) and estimator == "pool"):
        return
    fits = not isinstance(estimator, type | str) and hasattr(estimator, "fit")
    if not (fits and is_classifier(estimator) and hasattr(estimator, "predict_proba")):
        raise ValueError(
            f"estimator={estimator!r:.80}: give None, 'pool', or a scikit-learn classifier that has "
            "`fit` and `predict_proba`."
        )


def out_of_fold(
    name: str,
    estimator: Any,
    X: Any,
    labels: np.ndarray,
    fold: np.ndarray,
    classes: int,
    *,
    seed: int,
    progress: bool = True,
) -> np.ndarray:
    """Return each row's class probabilities by a classifier trained on the other folds."""
    found = np.zeros((len(labels), classes))
    rng, folds = np.random.default_rng(seed), np.unique(fold)
    shown = track(
        folds, f"{name}, by folds", disable=not (progress and sys.stderr.isatty()), transient=True
    )
    for k in shown:
        train, held = np.flatnonzero(fold != k), np.flatnonzero(fold == k)
        if len(train) > MOST_TRAINED:
            train = np.sort(rng.permutation(train)[:MOST_TRAINED])
        model: Any = clone(estimator)
        model.fit(_safe_indexing(X, train), labels[train])
        found[np.ix_(held, model.classes_)] = model.predict_proba(_safe_indexing(X, held))
    return found


def kernel_probabilities(
    X: Any,
    given: np.ndarray,
    checked: np.ndarray,
    fold: np.ndarray,
    classes: int,
    *,
    seed: int,
    steps: int,
    hyper_steps: int,
    engine: Any,
    callbacks: Any,
) -> np.ndarray:
    """Return the same by the kernel model, trained through a matrix of label noise."""
    features = make_features("kernel", seed).fit(X)
    z = features.transform(X)
    model = make_model("kernel", features, z)
    train = (fold[None] != np.arange(fold.max() + 1)[:, None]).astype(np.float32)
    data = _noise.Data(*(jnp.asarray(a) for a in (z, given, checked, train)))
    tuned = _noise.tune(
        model,
        data,
        classes,
        steps=steps,
        hyper_steps=hyper_steps,
        engine=engine,
        key=jax.random.key(seed),
        callbacks=callbacks,
    )
    return np.concatenate([tuned.probabilities, tuned.checked_probabilities])

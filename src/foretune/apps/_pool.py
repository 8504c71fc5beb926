"""Out-of-fold predictions of classifiers and regressors, which judge rows that they have not seen."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track
from scipy import sparse
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.linear_model import LogisticRegression, Ridge, RidgeCV
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import _safe_indexing
from sklearn.utils.validation import _check_sample_weight, has_fit_parameter

from . import _noise
from ._columns import Native, row_count
from ._labels import listed
from ._models import make_features, make_model

MOST_TRAINED = 50_000
"""Each classifier of a fold trains on this many rows at most."""
WIDE = 100
"""With more columns than this the pool has no boosted trees: pixels and words take them long. Words
of few kinds are one column to them."""
COMMON = 10
"""Boosted trees stop early, by rows set aside, where every class has this many."""
LEAST_KEPT = 2
"""Rows of each class that classifiers are trained on, of those that are kept."""
MOST_KERNEL = 20_000
"""With more rows than this the pool has no kernel model."""
TREES = 200
"""Of a forest; half as many with more than 2,000 rows."""
SMALL = 500
"""With fewer rows than this a forest's trees are grown one after another, which is faster."""
KERNEL_TUNED, KERNEL_STEPS, KERNEL_RATE = 1_000, 15, 0.3
"""In the pool the kernel model's regularisers descend on this many given rows, in half as many steps of
twice the rate: five times as fast as on 3,000 rows, and the pool finds as many wrong labels."""


def pool_of(
    X: Any, labels: np.ndarray, classes: int, seed: int, native: Native | None = None
) -> dict[str, Any]:
    """Return the classifiers that are pooled, beside the kernel model."""
    n, width = len(labels), X.shape[1]
    rarest = np.bincount(labels, minlength=classes).min()
    logistic = LogisticRegression(max_iter=1000)
    forest = RandomForestClassifier(**_trees(n), random_state=seed)
    if sparse.issparse(X):
        return {"logistic": logistic, "forest": forest}
    members = {"logistic": make_pipeline(StandardScaler(), logistic), "forest": forest}
    if (width if native is None else native.width) <= WIDE:
        few = classes <= 4
        boosting = HistGradientBoostingClassifier(
            max_iter=100 if few else 30,
            learning_rate=0.1 if few else 0.2,
            # the tenth of a fold's rows that are set aside need a row of each class
            early_stopping=bool(rarest >= COMMON and 0.08 * n >= classes),  # pyright: ignore[reportArgumentType]
            random_state=seed,
        )
        members["boosting"] = natively(boosting, native)
    return members


def regressors_of(X: Any, seed: int, native: Native | None = None) -> dict[str, Any]:
    """Return the regressors that are pooled."""
    n, width = X.shape
    forest = RandomForestRegressor(
        **_trees(n), max_features=1 / 3, min_samples_leaf=2, random_state=seed
    )
    if sparse.issparse(X):
        return {"ridge": Ridge(), "forest": forest}
    ridge = RidgeCV(np.logspace(-2, 4, 13)) if width <= WIDE else Ridge(width)
    members = {"ridge": make_pipeline(StandardScaler(), ridge), "forest": forest}
    if (width if native is None else native.width) <= WIDE:
        boosting = HistGradientBoostingRegressor(
            early_stopping=n >= 10 * COMMON,  # pyright: ignore[reportArgumentType]
            random_state=seed,
        )
        members["boosting"] = natively(boosting, native)
    return members


def natively(boosting: Any, native: Native | None) -> Any:
    """Return boosted trees that take rows of an encoder, with words as categories."""
    if native is None:
        return boosting
    return make_pipeline(native, boosting.set_params(categorical_features=native.categories))


def _trees(n: int) -> dict[str, Any]:
    return {"n_estimators": TREES if n <= 2000 else TREES // 2, "n_jobs": 1 if n < SMALL else -1}


class Mean:
    """The model that a pool ends with: the mean of its members, by weights."""

    def __init__(
        self,
        members: dict[str, Any],
        classes: int | None = None,
        weights: Any = None,
        most: int | None = MOST_TRAINED,
    ):
        self.members, self.classes, self.weights, self.most = members, classes, weights, most

    def fit(self, X: Any, y: np.ndarray, rows: np.ndarray, weight: Any, seed: int) -> "Mean":
        """Fit each member on these rows, `most` of them."""
        rng = np.random.default_rng(seed)
        self.fitted = [
            fit_some(clone(member), X, y, rows, weight, rng, self.most)
            for member in self.members.values()
        ]
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return the mean prediction of regressors."""
        return np.average([model.predict(X) for model in self.fitted], axis=0, weights=self.weights)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the mean probabilities of classifiers, of classes 0, 1, ..."""
        found = np.zeros((row_count(X), self.classes or 0))
        for model in self.fitted:
            found[:, model.classes_] += model.predict_proba(X) / len(self.fitted)
        return found


def kept(trust: np.ndarray, labels: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    """Return the rows of trusted labels; of a class that would lose all of them, the two best.

    No classifier can be trained on one class, and a split by class needs two rows of each.
    """
    use = np.ones(len(labels), bool) if weight is None else weight > 0
    keep = use & (trust >= 0.5)
    for label in np.unique(labels):
        mine = np.flatnonzero(use & (labels == label))
        if keep[mine].sum() < 2:
            keep[mine[np.argsort(-trust[mine], kind="stable")[:2]]] = True
    return np.flatnonzero(keep)


def kept_by_fold(
    trust: np.ndarray, labels: np.ndarray, weight: np.ndarray | None, fold: np.ndarray
) -> np.ndarray:
    """Return a mask of the rows of trusted labels.

    All rows of a class are kept where too few trusted ones are outside of some fold.
    """
    keep = np.zeros(len(labels), bool)
    keep[kept(trust, labels, weight)] = True
    for label in np.unique(labels):
        mine = labels == label
        if min(np.sum(keep & mine & (fold != k)) for k in np.unique(fold)) < LEAST_KEPT:
            keep |= mine
    return keep


def check_estimator(estimator: Any, regression: bool = False) -> None:
    """Raise unless it is None, "pool", or a classifier with probabilities (or a regressor)."""
    if estimator is None or (isinstance(estimator, str) and estimator == "pool"):
        return
    fits = not isinstance(estimator, type | str) and hasattr(estimator, "fit")
    if regression:
        if not (fits and is_regressor(estimator)):
            raise ValueError(
                f"estimator={estimator!r:.80}: give None, 'pool', or a scikit-learn regressor."
            )
    elif not (fits and is_classifier(estimator) and hasattr(estimator, "predict_proba")):
        raise ValueError(
            f"estimator={estimator!r:.80}: give None, 'pool', or a scikit-learn classifier that has "
            "`fit` and `predict_proba`."
        )


def check_folds(
    labels: np.ndarray, fold: np.ndarray, weight: np.ndarray | None, names: np.ndarray
) -> None:
    """Raise where the rows outside of some fold have only one class."""
    use = np.ones(len(labels), bool) if weight is None else weight > 0
    for k in np.unique(fold):
        left = np.unique(labels[use & (fold != k)])
        if len(left) < 2:
            rows = np.bincount(labels[use], minlength=len(names)).tolist()
            raise ValueError(
                "labels are judged by classifiers that were trained on other folds, and without fold "
                f"{k} there is only {listed(names[left])} left. Rows of each class, without those of "
                f"weight 0: {dict(zip(names.tolist(), rows, strict=True))}. Give two rows or more of "
                "each of two classes."
            )


def check_weight(weight: Any, n: int, estimator: Any = None) -> np.ndarray | None:
    """Return sample weights as an array, by scikit-learn's conventions, or None.

    Raise where they are negative, or where an estimator of the user's does not take them.
    """
    if weight is None:
        return None
    array = _check_sample_weight(weight, np.zeros((n, 1)), dtype=np.float64, copy=True)
    if (array < 0).any():
        row = int(np.flatnonzero(array < 0)[0])
        raise ValueError(f"sample_weight is negative in row {row}: give weights of 0 or more.")
    if estimator is not None and not isinstance(estimator, str):
        last = estimator.steps[-1][1] if isinstance(estimator, Pipeline) else estimator
        if not has_fit_parameter(last, "sample_weight"):
            raise ValueError(
                f"sample_weight was given, and the fit of {type(last).__name__} does not take it: "
                "leave sample_weight out, or give an estimator that does."
            )
    return array


def fit(model: Any, X: Any, y: np.ndarray, weight: np.ndarray | None) -> Any:
    """Fit, with sample weights if there are any: in a pipeline they are its last step's."""
    if weight is None:
        return model.fit(X, y)
    prefix = f"{model.steps[-1][0]}__" if isinstance(model, Pipeline) else ""
    return model.fit(X, y, **{f"{prefix}sample_weight": weight})


def fit_some(
    model: Any,
    X: Any,
    y: np.ndarray,
    rows: np.ndarray,
    weight: Any,
    rng: np.random.Generator,
    most: int | None = MOST_TRAINED,
) -> Any:
    """Fit on these rows, `most` of them, without those of weight 0."""
    if weight is not None and (weight[rows] > 0).any():
        rows = rows[weight[rows] > 0]
    if most is not None and len(rows) > most:
        rows = np.sort(rng.permutation(rows)[:most])
    return fit(model, _safe_indexing(X, rows), y[rows], None if weight is None else weight[rows])


def out_of_fold(
    name: str,
    estimator: Any,
    X: Any,
    labels: np.ndarray,
    fold: np.ndarray,
    classes: int | None,
    *,
    seed: int,
    weight: np.ndarray | None = None,
    keep: np.ndarray | None = None,
    progress: bool = True,
) -> np.ndarray:
    """Return each row's class probabilities by a classifier trained on the other folds.

    With `classes=None` it is a regressor, and its predictions are returned. Rows outside of `keep` are
    predicted, not trained on.
    """
    n = len(labels)
    found = np.zeros(n) if classes is None else np.zeros((n, classes))
    rng, folds = np.random.default_rng(seed), np.unique(fold)
    shown = track(
        folds, f"{name}, by folds", disable=not (progress and sys.stderr.isatty()), transient=True
    )
    for k in shown:
        train, held = fold != k, np.flatnonzero(fold == k)
        if keep is not None and (train & keep).any():
            train = train & keep
        model: Any = fit_some(clone(estimator), X, labels, np.flatnonzero(train), weight, rng)
        if classes is None:
            found[held] = np.asarray(model.predict(_safe_indexing(X, held))).reshape(len(held))
        else:
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
    hyper_steps: int | None,
    engine: Any,
    callbacks: Any,
    weight: np.ndarray | None = None,
) -> np.ndarray:
    """Return the same by the kernel model, trained through a matrix of label noise."""
    features = make_features("kernel", seed).fit(X)
    z = features.transform(X)
    model = make_model("kernel", features, z)
    train = (fold[None] != np.arange(fold.max() + 1)[:, None]).astype(np.float32)
    data = _noise.Data(
        *map(jnp.asarray, (z, given, checked, train)), weight=_noise.mean_one(weight)
    )
    tuned = _noise.tune(
        model,
        data,
        classes,
        steps=steps,
        hyper_steps=KERNEL_STEPS if hyper_steps is None else hyper_steps,
        engine=engine,
        key=jax.random.key(seed),
        callbacks=callbacks,
        rate=KERNEL_RATE if hyper_steps is None else _noise.RATE,
        tuned_on=_noise.some_rows(data, KERNEL_TUNED, np.random.default_rng(seed)),
    )
    return np.concatenate([tuned.probabilities, tuned.checked_probabilities])

"""Out-of-fold predictions of classifiers and regressors, which judge rows that they have not seen."""

import sys
from collections.abc import Mapping
from typing import NamedTuple, Protocol, cast, runtime_checkable

import jax
import numpy as np
from rich.progress import track
from scipy import sparse
from sklearn.base import BaseEstimator, clone, is_classifier, is_regressor
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
from ._checks import listed
from ._columns import Native
from ._features import Rows
from ._models import prepared

MOST_TRAINED = 50_000
"""Each member trains on this many rows of a fold at most."""
WIDE = 100
"""With more columns than this there are no boosted trees: pixels and text take them long. A column of
categories is one column to them."""
COMMON = 10
"""Boosted trees stop early, by rows set aside, where every class has this many."""
LEAST_TRAINED = 2
"""Rows of each class that classifiers are trained on, whatever is held of their labels."""
MOST_KERNEL = 20_000
"""With more rows than this the kernel model is no member."""
TREES = 200
"""Of a forest; half as many with more than 2,000 rows."""
SMALL = 500
"""With fewer rows than this a forest's trees are grown one after another, which is faster."""
KERNEL_TUNED, KERNEL_STEPS, KERNEL_RATE = 1_000, 15, 0.3
"""In the ensemble the kernel model's regularisers descend on this many observed rows, in half as many
steps of twice the rate: five times as fast as on 3,000 rows, and as many wrong labels are found."""


@runtime_checkable
class Member(Protocol):
    """A classifier or a regressor of scikit-learn."""

    def fit(self, X: Rows, y: np.ndarray, **options: np.ndarray) -> "Member": ...
    def predict(self, X: Rows) -> np.ndarray: ...


@runtime_checkable
class Classifier(Member, Protocol):
    """One with probabilities."""

    classes_: np.ndarray

    def predict_proba(self, X: Rows) -> np.ndarray: ...


Members = Mapping[str, BaseEstimator]


class Folds(NamedTuple):
    """Rows and their labels in folds, by which members are trained without the rows they judge."""

    rows: Rows
    labels: np.ndarray
    fold: np.ndarray
    weight: np.ndarray | None
    seed: int
    progress: bool
    classes: int | None = None
    """None: labels are the values of a regression."""

    def predictions(
        self, name: str, estimator: BaseEstimator, use: np.ndarray | None = None
    ) -> np.ndarray:
        """Return each row's class probabilities, or value, by an estimator trained on other folds.

        Rows outside of the mask `use` are predicted, not trained on.
        """
        n = len(self.labels)
        found = np.zeros(n) if self.classes is None else np.zeros((n, self.classes))
        rng, quiet = np.random.default_rng(self.seed), not (self.progress and sys.stderr.isatty())
        for k in track(np.unique(self.fold), f"{name}, by folds", disable=quiet, transient=True):
            train, held = self.fold != k, np.flatnonzero(self.fold == k)
            if use is not None and (train & use).any():
                train = train & use
            model = self.trained(estimator, np.flatnonzero(train), rng, MOST_TRAINED)
            rows = _safe_indexing(self.rows, held)
            if self.classes is None:
                found[held] = np.asarray(model.predict(rows)).reshape(len(held))
            else:
                classifier = cast(Classifier, model)
                found[np.ix_(held, classifier.classes_)] = classifier.predict_proba(rows)
        return found

    def trained(
        self, estimator: BaseEstimator, rows: np.ndarray, rng: np.random.Generator, most: int | None
    ) -> Member:
        """Return the estimator, trained on `most` of these rows, without those of weight 0.

        In a pipeline sample weights are its last step's.
        """
        if self.weight is not None and (self.weight[rows] > 0).any():
            rows = rows[self.weight[rows] > 0]
        if most is not None and len(rows) > most:
            rows = np.sort(rng.permutation(rows)[:most])
        model, options = clone(estimator), {}
        if self.weight is not None:
            prefix = f"{model.steps[-1][0]}__" if isinstance(model, Pipeline) else ""
            options = {f"{prefix}sample_weight": self.weight[rows]}
        return cast(Member, model).fit(
            _safe_indexing(self.rows, rows), self.labels[rows], **options
        )

    def final(self, members: Members, rows: np.ndarray, most: int | None) -> list[Member]:
        """Return the members, trained on these rows."""
        rng = np.random.default_rng(self.seed)
        return [self.trained(member, rows, rng, most) for member in members.values()]

    def check(self, names: np.ndarray) -> None:
        """Raise where the rows outside of some fold have only one class."""
        use = np.ones(len(self.labels), bool) if self.weight is None else self.weight > 0
        for k in np.unique(self.fold):
            left = np.unique(self.labels[use & (self.fold != k)])
            if len(left) < 2:
                rows = np.bincount(self.labels[use], minlength=len(names)).tolist()
                raise ValueError(
                    "labels are judged by classifiers that were trained on other folds, and without "
                    f"fold {k} there is only {listed(names[left])} left. Rows of each class, without "
                    f"those of weight 0: {dict(zip(names.tolist(), rows, strict=True))}. Give two rows "
                    "or more of each of two classes."
                )


class Classifiers(NamedTuple):
    """The model that an ensemble of classifiers ends with: the mean of its members."""

    members: list[Classifier]
    classes: int

    def predict_proba(self, rows: Rows) -> np.ndarray:
        """Return the mean probabilities of classes 0, 1, ..."""
        found = [(model.classes_, model.predict_proba(rows)) for model in self.members]
        mean = np.zeros((len(found[0][1]), self.classes))
        for classes, p in found:
            mean[:, classes] += p / len(found)
        return mean


def classifiers_of(
    X: Rows, labels: np.ndarray, classes: int, seed: int, native: Native | None = None
) -> dict[str, BaseEstimator]:
    """Return the classifiers of the ensemble, beside the kernel model."""
    n = len(labels)
    rarest = np.bincount(labels, minlength=classes).min()
    logistic = LogisticRegression(max_iter=1000)
    trees, jobs = _trees(n)
    forest = RandomForestClassifier(trees, n_jobs=jobs, random_state=seed)
    if sparse.issparse(X):
        return {"logistic": logistic, "forest": forest}
    few = classes <= 4
    boosting = HistGradientBoostingClassifier(
        max_iter=100 if few else 30,
        learning_rate=0.1 if few else 0.2,
        # the tenth of a fold's rows that are set aside need a row of each class
        early_stopping=bool(rarest >= COMMON and 0.08 * n >= classes),  # pyright: ignore[reportArgumentType]
        random_state=seed,
    )
    return _dense_members("logistic", logistic, forest, boosting, X, native)


def regressors_of(X: Rows, seed: int, native: Native | None = None) -> dict[str, BaseEstimator]:
    """Return the regressors of the ensemble."""
    n, width = X.shape
    trees, jobs = _trees(n)
    forest = RandomForestRegressor(
        trees, n_jobs=jobs, max_features=1 / 3, min_samples_leaf=2, random_state=seed
    )
    if sparse.issparse(X):
        return {"ridge": Ridge(), "forest": forest}
    ridge = RidgeCV(np.logspace(-2, 4, 13)) if width <= WIDE else Ridge(width)
    boosting = HistGradientBoostingRegressor(
        early_stopping=n >= 10 * COMMON,  # pyright: ignore[reportArgumentType]
        random_state=seed,
    )
    return _dense_members("ridge", ridge, forest, boosting, X, native)


def _dense_members(
    name: str,
    linear: BaseEstimator,
    forest: BaseEstimator,
    boosting: BaseEstimator,
    X: Rows,
    native: Native | None,
) -> dict[str, BaseEstimator]:
    members = {name: make_pipeline(StandardScaler(), linear), "forest": forest}
    if (X.shape[1] if native is None else native.width) <= WIDE:
        members["boosting"] = natively(boosting, native)
    return members


def natively(boosting: BaseEstimator, native: Native | None) -> BaseEstimator:
    """Return boosted trees that take rows of an encoder, with columns of categories as such."""
    if native is None:
        return boosting
    return make_pipeline(native, boosting.set_params(categorical_features=native.categories))


def _trees(n: int) -> tuple[int, int]:
    """Return the number of a forest's trees and of the jobs that grow them."""
    return TREES if n <= 2000 else TREES // 2, 1 if n < SMALL else -1


def kernel_probabilities(
    folds: Folds, observed: np.ndarray, trusted: np.ndarray, descent: _noise.Descent
) -> np.ndarray:
    """Return out-of-fold probabilities by the kernel model, trained through a matrix of label noise."""
    assert folds.classes is not None
    _, z, model = prepared("kernel", folds.rows, folds.seed)
    data = _noise.Data.of(z, observed, trusted, folds.fold, folds.weight)
    some = data.sample(KERNEL_TUNED, np.random.default_rng(folds.seed))
    key = jax.random.key(folds.seed)
    tuned = _noise.tune(model, data, folds.classes, descent, key, tuned_on=some)
    if tuned.result.stopped == "interrupted":
        raise KeyboardInterrupt
    return tuned.probabilities


def trained_rows(trust: np.ndarray, labels: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    """Return the rows that are no suspects; of a class that would lose all of them, the two best.

    No classifier can be trained on one class, and a split by class needs two rows of each.
    """
    positive = np.ones(len(labels), bool) if weight is None else weight > 0
    use = positive & (trust >= 0.5)
    for label in np.unique(labels):
        mine = np.flatnonzero(positive & (labels == label))
        if use[mine].sum() < LEAST_TRAINED:
            use[mine[np.argsort(-trust[mine], kind="stable")[:LEAST_TRAINED]]] = True
    return np.flatnonzero(use)


def trained_by_fold(trust: np.ndarray, folds: Folds) -> np.ndarray:
    """Return a mask of the rows that are no suspects.

    All rows of a class are trained on where too few are left outside of some fold.
    """
    labels, fold = folds.labels, folds.fold
    use = np.zeros(len(labels), bool)
    use[trained_rows(trust, labels, folds.weight)] = True
    for label in np.unique(labels):
        mine = labels == label
        if min(np.sum(use & mine & (fold != k)) for k in np.unique(fold)) < LEAST_TRAINED:
            use |= mine
    return use


def check_estimator(estimator: object, names: tuple[str, ...], regression: bool = False) -> None:
    """Raise unless it is one of the names, or a classifier with probabilities (or a regressor)."""
    if isinstance(estimator, str) and estimator in names:
        return
    if hasattr(estimator, "fit") and not isinstance(estimator, type):
        classifies = is_classifier(estimator) and hasattr(estimator, "predict_proba")
        if is_regressor(estimator) if regression else classifies:
            return
    kind = "regressor" if regression else "classifier that has `fit` and `predict_proba`"
    raise ValueError(
        f"estimator={estimator!r:.80}: give {', '.join(map(repr, names))}, or a scikit-learn {kind}."
    )


def check_weight(weight: object, n: int, estimator: object) -> np.ndarray | None:
    """Return sample weights as an array, by scikit-learn's conventions, or None.

    Raise where they are negative, or where an estimator of the user's does not take them.
    """
    if weight is None:
        return None
    array = _check_sample_weight(weight, np.zeros((n, 1)), dtype=np.float64, copy=True)
    if (array < 0).any():
        row = int(np.flatnonzero(array < 0)[0])
        raise ValueError(f"sample_weight is negative in row {row}: give weights of 0 or more.")
    last = estimator.steps[-1][1] if isinstance(estimator, Pipeline) else estimator
    if isinstance(last, BaseEstimator) and not has_fit_parameter(last, "sample_weight"):
        raise ValueError(
            f"sample_weight was given, and the fit of {type(last).__name__} does not take it: "
            "leave sample_weight out, or give an estimator that does."
        )
    return array

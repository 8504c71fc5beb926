"""Probabilities of classifiers for rows that they have not been trained on.

Logistic regression and boosted trees judge each fold by what they learnt on the others; a forest judges
a row by the trees that have not drawn it (out of bag), and least squares on a kernel's features by what
leaving the row out changes, which has a closed form. So forests and kernel are trained once, not once
per fold. A classifier of the user's is trained by folds.
"""

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import numpy as np
from rich.progress import track
from sklearn.base import BaseEstimator, clone, is_classifier
from sklearn.ensemble import (
    ExtraTreesClassifier,
    HistGradientBoostingClassifier,
    RandomForestClassifier,
)
from sklearn.exceptions import ConvergenceWarning
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.utils import _safe_indexing

from ._columns import Encoder, Rows, Views

MOST_TRAINED = 10_000
"""A model, and each tree of a forest, learns from at most this many rows."""
MOST_CLASSES = 20
"""With more classes there are no boosted trees, which are grown for each class."""
COMMON = 20
"""Boosted trees learn from classes of as many rows: to stop early a tenth of them is set aside."""
TREES, LANDMARKS = 200, 400
"""Of a forest, and of the kernel's approximation."""
RIDGES = np.logspace(-3, 2, 11)
FORESTS = (RandomForestClassifier, ExtraTreesClassifier)
Classifier = Any
"""A classifier of scikit-learn, with probabilities."""


class Kernel(BaseEstimator):
    """Least squares from a Gaussian kernel's features (Nystroem's approximation) to the classes.

    The ridge is the one with the least error on rows that are left out, one at a time.
    """

    def __init__(self, seed: int = 0):
        self.seed = seed

    def fit(self, X: Rows, y: np.ndarray) -> "Kernel":
        """Fit all ridges, and keep the best; `unseen_` has each row's probabilities without it."""
        self.classes_, codes = np.unique(y, return_inverse=True)
        squares = X.multiply(X) if hasattr(X, "multiply") else X * X
        self.length_ = float(np.sqrt(squares.sum() / X.shape[0])) or 1.0
        # rows of mean squared length 1, so that this gamma is the usual bandwidth
        some = min(LANDMARKS, X.shape[0])
        self.features_ = Nystroem(gamma=1.0, n_components=some, random_state=self.seed)
        self.features_.fit(X / self.length_)
        score = {"scoring": "neg_mean_squared_error", "store_cv_results": True}
        found: Any = RidgeCV(RIDGES, fit_intercept=False, **score)
        found.fit(self._features(X), np.eye(len(self.classes_))[codes])
        unseen = found.cv_results_[..., RIDGES.tolist().index(found.alpha_)]
        self.beta_, self.unseen_ = found.coef_.T, _as_probabilities(unseen)
        return self

    def _features(self, X: Rows) -> np.ndarray:
        Z = self.features_.transform(X / self.length_)
        return np.hstack([Z, np.ones((len(Z), 1))])

    def predict_proba(self, X: Rows) -> np.ndarray:
        """Return what least squares has for probabilities."""
        return _as_probabilities(self._features(X) @ self.beta_)


def _as_probabilities(values: np.ndarray) -> np.ndarray:
    p = np.clip(values, 1e-3, 1.0)
    return p / p.sum(1, keepdims=True)


class Member(NamedTuple):
    """A classifier, and the view of the rows that it takes (None: rows as they are)."""

    estimator: BaseEstimator
    view: str | None = None

    def rows(self, X: Rows) -> Rows:
        """Return the rows as it takes them."""
        return X if self.view is None else getattr(cast(Views, X), self.view)


class Labelled(NamedTuple):
    """Rows (or their views) with the labels to learn from, and the folds in which they are judged."""

    rows: Rows
    labels: np.ndarray
    fold: np.ndarray
    classes: int
    seed: int
    quiet: bool

    def unseen(self, name: str, member: Member) -> np.ndarray:
        """Return each row's probabilities by a classifier that was not trained on it."""
        X, n = member.rows(self.rows), len(self.labels)
        if isinstance(member.estimator, FORESTS) and member.view is not None:
            forest = self.trained(member, np.arange(n))
            unseen = np.nan_to_num(forest.oob_decision_function_, nan=1 / self.classes)
            return in_all_classes(unseen, forest.classes_, self.classes)
        if isinstance(member.estimator, Kernel):
            some = self.sample(np.arange(n))
            kernel = self.trained(member, some)
            found = kernel.predict_proba(X)
            found[some] = kernel.unseen_
            return in_all_classes(found, kernel.classes_, self.classes)
        found = np.zeros((n, self.classes))
        folds, shown = np.unique(self.fold), f"{name}, by folds"
        for k in track(folds, shown, disable=self.quiet, transient=True):
            held, rest = np.flatnonzero(self.fold == k), np.flatnonzero(self.fold != k)
            model = self.trained(member, rest if member.view is None else self.sample(rest))
            p = model.predict_proba(_safe_indexing(X, held))
            found[held] = in_all_classes(p, model.classes_, self.classes)
        return found

    def sample(self, rows: np.ndarray) -> np.ndarray:
        """Return at most `MOST_TRAINED` of these rows."""
        if len(rows) <= MOST_TRAINED:
            return rows
        return np.sort(np.random.default_rng(self.seed).permutation(rows)[:MOST_TRAINED])

    def trained(self, member: Member, rows: np.ndarray) -> Classifier:
        """Return the classifier, trained on these rows."""
        labels = self.labels[rows]
        if isinstance(member.estimator, HistGradientBoostingClassifier) and member.view is not None:
            common = np.bincount(labels)[labels] >= COMMON
            if len(np.unique(labels[common])) > 1:
                rows, labels = rows[common], labels[common]
        model: Classifier = clone(member.estimator)
        with warnings.catch_warnings():
            if member.view is not None:
                warnings.simplefilter("ignore", ConvergenceWarning)
                warnings.filterwarnings("ignore", message="Some inputs do not have OOB scores")
                warnings.filterwarnings("ignore", message="The number of unique classes")
            return model.fit(_safe_indexing(member.rows(self.rows), rows), labels)


class Ensemble(NamedTuple):
    """The model that a cleaner ends with: the mean of its members."""

    encoder: Encoder | None
    members: list[Member]
    models: list[Classifier]
    classes: int

    def predict_proba(self, X: Rows) -> np.ndarray:
        """Return the mean probabilities of classes 0, 1, ..."""
        rows = X if self.encoder is None else self.encoder.transform(X)
        found = [
            in_all_classes(model.predict_proba(member.rows(rows)), model.classes_, self.classes)
            for member, model in zip(self.members, self.models, strict=True)
        ]
        return np.mean(found, axis=0)


def in_all_classes(p: np.ndarray, classes: np.ndarray, count: int) -> np.ndarray:
    """Return probabilities of some classes as those of all."""
    found = np.zeros((len(p), count))
    found[:, classes] = p
    return found


def members_of(
    encoder: Encoder, rows: int, labels: np.ndarray, seed: int
) -> Iterator[tuple[str, Member]]:
    """Yield the members of the default ensemble, and their names."""
    counts = np.bincount(labels)
    few, many = np.sum(counts > 0) <= 4, len(counts) > MOST_CLASSES
    yield "logistic", Member(LogisticRegression(max_iter=300), "wide")
    for name, leaf in (("forest", 1), ("smooth forest", 5)):
        # splits drawn at random: with many classes to try all takes minutes
        kind = ExtraTreesClassifier if many else RandomForestClassifier
        forest = kind(
            TREES // 4 if many else TREES,
            min_samples_leaf=leaf,
            bootstrap=True,
            oob_score=True,
            max_samples=MOST_TRAINED if rows > MOST_TRAINED else None,
            n_jobs=-1 if rows > 2000 else 1,
            random_state=seed,
        )
        yield name, Member(forest, "narrow")
    yield "kernel", Member(Kernel(seed), "wide")
    if not many:
        boosting = HistGradientBoostingClassifier(
            max_iter=100 if few else 30,
            learning_rate=0.1 if few else 0.2,
            early_stopping=bool(np.sum(counts >= 1.25 * COMMON) >= 2),  # pyright: ignore[reportArgumentType]
            categorical_features=list(encoder.categories) or None,  # pyright: ignore[reportArgumentType]
            random_state=seed,
        )
        yield "boosting", Member(boosting, "narrow")


def own_classifier(estimator: object) -> BaseEstimator | None:
    """Return a classifier of the user's, None for the ensemble; raise for anything else."""
    if isinstance(estimator, str) and estimator == "ensemble":
        return None
    is_object = hasattr(estimator, "fit") and not isinstance(estimator, type)
    if is_object and is_classifier(estimator) and hasattr(estimator, "predict_proba"):
        return cast(BaseEstimator, estimator)
    raise ValueError(
        f"estimator={estimator!r:.80}: give 'ensemble', or a scikit-learn classifier that has `fit` "
        "and `predict_proba`."
    )


def make_folds(labels: np.ndarray, folds: int, rng: np.random.Generator) -> np.ndarray:
    """Return a fold for each example, each fold with its share of every label."""
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    fold = np.empty(len(labels), int)
    fold[order] = np.arange(len(labels)) % folds
    return fold

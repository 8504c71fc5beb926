"""Out-of-fold probabilities of classifiers, which judge rows that they have not seen."""

import sys
from collections.abc import Mapping
from typing import NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
from rich.progress import track
from scipy import sparse
from sklearn.base import BaseEstimator, clone, is_classifier
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import _safe_indexing
from sklearn.utils.validation import _check_sample_weight, has_fit_parameter

from .._outer.callbacks import Progress
from . import _noise
from ._checks import listed
from ._columns import Native
from ._features import Rows
from ._label_model import LabelJudgement, judge, twice

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
MOST_LOOKED = 100_000
"""Rows up to which the ensemble looks twice."""
MOST_WRONG = 0.5
"""The share of suspects up to which it does. Where most are suspects, to train on the rest would only
confirm it."""


@runtime_checkable
class Classifier(Protocol):
    """A classifier of scikit-learn, with probabilities."""

    classes_: np.ndarray

    def fit(self, X: Rows, y: np.ndarray, **options: np.ndarray) -> "Classifier": ...
    def predict_proba(self, X: Rows) -> np.ndarray: ...


Members = Mapping[str, BaseEstimator]


class Inputs(NamedTuple):
    """Rows with observed labels, then rows with trusted ones."""

    rows: Rows
    observed: np.ndarray
    trusted: np.ndarray
    known: np.ndarray
    """The observed labels of trusted rows, which some of the observed rows were; -1 for others."""
    weight: np.ndarray | None
    """Of all rows; a trusted one counts as the mean observed one does."""
    native: Native | None
    judged: np.ndarray
    """Where in X the observed rows are."""
    verified: np.ndarray
    """Where in X the first of the trusted rows are."""

    @property
    def labels(self) -> np.ndarray:
        """Observed labels, then trusted ones."""
        return np.concatenate([self.observed, self.trusted])


class Folds(NamedTuple):
    """Rows and their labels in folds, by which members are trained without the rows they judge."""

    rows: Rows
    labels: np.ndarray
    fold: np.ndarray
    weight: np.ndarray | None
    seed: int
    progress: bool
    classes: int

    @property
    def counted(self) -> np.ndarray:
        """A mask of the rows whose weight is not 0."""
        return np.ones(len(self.labels), bool) if self.weight is None else self.weight > 0

    def predictions(self, name: str, estimator: BaseEstimator, use: np.ndarray) -> np.ndarray:
        """Return each row's class probabilities, by an estimator trained on other folds.

        Rows outside of the mask `use` are predicted, not trained on.
        """
        found = np.zeros((len(self.labels), self.classes))
        rng, quiet = np.random.default_rng(self.seed), not (self.progress and sys.stderr.isatty())
        for k in track(np.unique(self.fold), f"{name}, by folds", disable=quiet, transient=True):
            held = np.flatnonzero(self.fold == k)
            rows = np.flatnonzero(use & (self.fold != k))
            model = self.trained(estimator, rows, rng, MOST_TRAINED)
            p = model.predict_proba(_safe_indexing(self.rows, held))
            found[np.ix_(held, model.classes_)] = p
        return found

    def trained(
        self, estimator: BaseEstimator, rows: np.ndarray, rng: np.random.Generator, most: int | None
    ) -> Classifier:
        """Return the estimator, trained on `most` of these rows, without those of weight 0.

        In a pipeline sample weights are its last step's.
        """
        rows = rows[self.counted[rows]]
        if most is not None and len(rows) > most:
            rows = np.sort(rng.permutation(rows)[:most])
        model, options = clone(estimator), {}
        if self.weight is not None:
            prefix = f"{model.steps[-1][0]}__" if isinstance(model, Pipeline) else ""
            options = {f"{prefix}sample_weight": self.weight[rows]}
        classifier = cast(Classifier, model)
        return classifier.fit(_safe_indexing(self.rows, rows), self.labels[rows], **options)

    def check(self, names: np.ndarray) -> None:
        """Raise where the rows outside of some fold have only one class."""
        for k in np.unique(self.fold):
            left = np.unique(self.labels[self.counted & (self.fold != k)])
            if len(left) < 2:
                rows = np.bincount(self.labels[self.counted], minlength=len(names)).tolist()
                raise ValueError(
                    "labels are judged by classifiers that were trained on other folds, and without "
                    f"fold {k} there is only {listed(names[left])} left. Rows of each class, without "
                    f"those of weight 0: {dict(zip(names.tolist(), rows, strict=True))}. Give two rows "
                    "or more of each of two classes."
                )

    def trusted_rows(self, trust: np.ndarray) -> np.ndarray:
        """Return a mask of the rows that are no suspects; of a class that would lose all, the two best.

        No classifier can be trained on one class, and a split by class needs two rows of each.
        """
        use = self.counted & (trust >= 0.5)
        for label in np.unique(self.labels):
            mine = np.flatnonzero(self.counted & (self.labels == label))
            if use[mine].sum() < LEAST_TRAINED:
                use[mine[np.argsort(-trust[mine], kind="stable")[:LEAST_TRAINED]]] = True
        return use

    def with_whole_classes(self, use: np.ndarray) -> np.ndarray:
        """Return a mask with all rows of a class of which too few are left outside of some fold."""
        use = use.copy()
        for label in np.unique(self.labels):
            mine = self.labels == label
            outside = [np.sum(use & mine & (self.fold != k)) for k in np.unique(self.fold)]
            if min(outside) < LEAST_TRAINED:
                use |= mine
        return use


class Classifiers(NamedTuple):
    """The model that an ensemble ends with: the mean of its members."""

    members: list[Classifier]
    classes: int

    def predict_proba(self, rows: Rows) -> np.ndarray:
        """Return the mean probabilities of classes 0, 1, ..."""
        found = [(model.classes_, model.predict_proba(rows)) for model in self.members]
        mean = np.zeros((len(found[0][1]), self.classes))
        for classes, p in found:
            mean[:, classes] += p / len(found)
        return mean


def judged_by(
    own: BaseEstimator | None, inputs: Inputs, folds: Folds
) -> tuple[LabelJudgement, list[str], Classifiers]:
    """Judge the observed labels by out-of-fold probabilities of one's own classifier, or the ensemble.

    Return what is held of them, the names of the members, and the final model. The ensemble looks twice
    where it may: its classifiers are trained again without the suspects.
    """
    n, everything = len(inputs.observed), np.ones(len(folds.labels), bool)
    kernel: dict[str, np.ndarray] = {}
    if own is None and len(folds.labels) <= MOST_KERNEL:
        kernel["kernel"] = kernel_probabilities(folds, inputs.observed, inputs.trusted)

    def members(use: np.ndarray) -> Members:
        if own is not None:
            return {"estimator": own}
        labels = folds.labels[use]
        return classifiers_of(folds.rows, labels, folds.classes, folds.seed, inputs.native)

    def look(use: np.ndarray) -> LabelJudgement:
        by_fold = [folds.predictions(name, each, use) for name, each in members(use).items()]
        q = np.stack([*by_fold, *kernel.values()])
        return judge(
            *(q[:, :n], inputs.observed),
            *(q[:, n:], inputs.trusted, inputs.known),
            seed=folds.seed,
            callbacks=[Progress("weighing the labels")] if folds.progress else [],
            weight=None if inputs.weight is None else inputs.weight[:n],
        )

    def trusted_by(judged: LabelJudgement) -> np.ndarray:
        return folds.trusted_rows(np.concatenate([judged.right, np.ones(len(inputs.trusted))]))

    judged = look(everything)
    wrong = np.mean(judged.right < 0.5)
    if own is None and n <= MOST_LOOKED and 0 < wrong <= MOST_WRONG:
        second = look(folds.with_whole_classes(trusted_by(judged)))
        judged = twice(judged, second, inputs.observed)
    use, rng = trusted_by(judged), np.random.default_rng(folds.seed)
    most = None if own is not None else MOST_TRAINED
    final = members(use)
    models = [folds.trained(each, np.flatnonzero(use), rng, most) for each in final.values()]
    return judged, [*final, *kernel], Classifiers(models, folds.classes)


def classifiers_of(
    X: Rows, labels: np.ndarray, classes: int, seed: int, native: Native | None = None
) -> dict[str, BaseEstimator]:
    """Return the classifiers of the ensemble, beside the kernel model."""
    n = len(labels)
    rarest = np.bincount(labels, minlength=classes).min()
    logistic = LogisticRegression(max_iter=1000)
    trees = TREES if n <= 2000 else TREES // 2
    jobs = 1 if n < SMALL else -1
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
    members = {"logistic": make_pipeline(StandardScaler(), logistic), "forest": forest}
    if native is None and X.shape[1] <= WIDE:
        members["boosting"] = boosting
    elif native is not None and native.width <= WIDE:
        boosting.set_params(categorical_features=native.categories)
        members["boosting"] = make_pipeline(native, boosting)
    return members


def kernel_probabilities(folds: Folds, observed: np.ndarray, trusted: np.ndarray) -> np.ndarray:
    """Return out-of-fold probabilities by the kernel model, trained through a matrix of label noise."""
    z, model = _noise.kernel_model(folds.rows, folds.seed)
    data = _noise.Data.of(z, observed, trusted, folds.fold, folds.weight)
    some = data.sample(_noise.MOST_TUNED, np.random.default_rng(folds.seed))
    bar = [Progress("finding wrong labels")] if folds.progress else []
    return _noise.tune(model, data, some, folds.classes, bar)[0]


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

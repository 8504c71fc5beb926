"""`LabelCleaner`: which training labels are wrong, and what model do I get without them?"""

import warnings
from numbers import Integral
from typing import cast

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import Tags, _safe_indexing, check_random_state, indexable
from sklearn.utils._param_validation import Interval
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _num_samples, check_is_fitted, column_or_1d, validate_data

from . import _ensemble, _noise
from ._checks import listed, plain_labels, positions, verified_rows
from ._columns import column_encoder, is_mixed, native_columns, stack_rows
from ._features import Rows
from ._found import FoundLabels

FLOATS = (np.float64, np.float32)


class LabelCleaner(FoundLabels, ClassifierMixin, BaseEstimator):
    """Finds wrong labels in a training set, with the help of a few trusted ones or without.

    Parameters
    ----------
    estimator : "ensemble" or a scikit-learn classifier, default="ensemble"
        What judges the labels, each row by models that have not seen it. "ensemble" is
        logistic regression, a forest, boosted trees and a kernel model that is trained through a matrix
        of how labels go wrong, combined by weights that are learnt. Your own classifier takes X as it
        is.
    folds : int, default=5
        An example is judged by models that were trained on the other folds.
    progress : bool, default=True
        Show a progress bar when the output is a terminal.
    random_state : int, RandomState or None, default=None
        Folds, kernel landmarks and classifiers follow it.

    Attributes
    ----------
    weights_ : array of n, in [0, 1]
        The probability that each label is right; 0 or 1 for verified ones.
    suspects_ : bool array of n
        The labels held to be wrong: a weight below 1/2.
    ranking_ : int array of n
        Indices, the most suspicious first.
    suggested_ : array of n
        The most probable label.
    probability_wrong_ : array of n
        1 - weight. `noise_rate_` is its mean, `unflagged_` its sum over labels that are not suspects:
        how many more are wrong.
    noise_matrix_ : array (n_classes, n_classes)
        p(observed label | true label) as learnt.
    ensemble_ : dict
        The weight of each classifier of the ensemble, or of your own.
    probabilities_ : array (n, n_classes)
        The probability of each class, by models that have not seen the row. Its observed label has no
        part in it, unless it is verified.
    reliability_ : array (trusted rows, 2) or None
        With 20 trusted rows or more: of each, held out, the probability of its observed label (where
        none is known, of the most probable one), and whether it is right.
    history_ : list of dict
        With 20 trusted rows or more, the descent of the regularisers by which the classifiers are
        combined: `step`, `value`, `gradient_norm`. `stopped_` says why it ended.
    classes_, n_features_in_, feature_names_in_
        As in scikit-learn.

    `predict` and `predict_proba` are of a final model, trained without the suspects, and on the trusted
    examples.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.datasets import make_blobs
    >>> from sklearn.naive_bayes import GaussianNB
    >>> from foretune.apps import LabelCleaner
    >>> X, y = make_blobs(240, centers=3, random_state=0, cluster_std=0.8)
    >>> observed = y[:200].copy()
    >>> observed[:20] = (observed[:20] + 1) % 3  # the first 20 are wrong
    >>> cleaner = LabelCleaner(GaussianNB(), random_state=0).fit(X[:200], observed)
    >>> bool(cleaner.suspects_[:20].mean() > 0.8 and cleaner.suspects_[20:].mean() < 0.1)
    True
    """

    _parameter_constraints = {  # noqa: RUF012, scikit-learn's table of what is accepted
        "folds": [Interval(Integral, 2, None, closed="left")],
        "random_state": ["random_state"],
    }

    def __init__(
        self,
        estimator: object = "ensemble",
        *,
        folds: object = 5,
        progress: object = True,
        random_state: object = None,
    ):
        self.estimator = estimator
        self.folds = folds
        self.progress = progress
        self.random_state = random_state

    def fit(
        self,
        X: Rows,
        y: object,
        X_clean: Rows = None,
        y_clean: object = None,
        *,
        checked: object = None,
        checked_labels: object = None,
        sample_weight: object = None,
    ) -> "LabelCleaner":
        """Find the wrong labels of (X, y).

        Trusted labels are those of other rows, (X_clean, y_clean), or of rows of X that have been
        verified: `checked` are their numbers, or a mask, and `checked_labels` their right labels. Rows
        train by their `sample_weight`; one of weight 0 is judged, and no model is trained on it.
        """
        inputs = self.inputs(X, y, (X_clean, y_clean), (checked, checked_labels), sample_weight)
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        count, rng = min(cast(int, self.folds), len(inputs.observed)), np.random.default_rng(seed)
        fold = np.concatenate(
            [_noise.make_folds(part, count, rng) for part in (inputs.observed, inputs.trusted)]
        )
        folds = _ensemble.Folds(
            *(inputs.rows, inputs.labels, fold, inputs.weight),
            *(seed, bool(self.progress), len(self.classes_)),
        )
        folds.check(self.classes_)
        judgement, members, self._final = _ensemble.judged_by(self._own, inputs, folds)
        right, observed = (part[: len(inputs.verified)] for part in (inputs.trusted, inputs.known))
        self._conclude(judgement, members, inputs.judged, inputs.verified, right, observed)
        return self

    def inputs(
        self,
        X: Rows,
        y: object,
        clean: tuple[Rows, object] = (None, None),
        checked: tuple[object, object] = (None, None),
        sample_weight: object = None,
    ) -> _ensemble.Inputs:
        """Return what `fit` works on, or raise where it would."""
        self._validate_params()
        self._own = _ensemble.own_classifier(self.estimator)
        if y is None:
            raise ValueError("requires y to be passed, but the target y is None.")
        self._learn_columns(X)
        rows, observed = self._rows(X), self._observed(y)
        n = len(observed)
        if n != _num_samples(rows):
            raise ValueError(f"y has {n} labels, and X has {_num_samples(rows)} rows.")
        weight = _ensemble.check_weight(sample_weight, n, self.estimator)
        verified = verified_rows(*checked, n)
        judged = np.setdiff1d(np.arange(n), verified)
        trusted, known = np.zeros(0, observed.dtype), observed[verified]
        if len(verified):
            trusted = positions(checked[1], self.classes_, "checked_labels", "y")
            rows = _safe_indexing(rows, np.concatenate([judged, verified]))
        if (clean[0] is None) != (clean[1] is None):
            raise ValueError("give X_clean and y_clean together, or neither.")
        if clean[0] is not None:
            more = self._rows(clean[0], "X_clean: ")
            labels = positions(clean[1], self.classes_, "y_clean", "y")
            if labels.shape != (_num_samples(more),):
                raise ValueError(
                    f"y_clean has shape {labels.shape}, and X_clean has {_num_samples(more)} rows: "
                    "give one label for each row."
                )
            rows, trusted = stack_rows(rows, more), np.concatenate([trusted, labels])
            known = np.concatenate([known, np.full(len(labels), -1)])
        if weight is not None:
            weight = np.concatenate([weight[judged], np.full(len(trusted), weight.mean())])
        absent = np.setdiff1d(np.arange(len(self.classes_)), trusted)
        if len(trusted) and len(absent):
            warnings.warn(
                f"no trusted example of {listed(self.classes_[absent])}: labels of that kind are "
                "judged by the observed ones alone.",
                stacklevel=3,
            )
        native = native_columns(self._encoder)
        return _ensemble.Inputs(
            rows, observed[judged], trusted, known, weight, native, judged, verified
        )

    def _learn_columns(self, X: Rows) -> None:
        """Learn the number, names and encoding of the columns."""
        self._encoder = None
        if is_mixed(X):
            self.feature_names_in_ = np.asarray(X.columns, object)
            self.n_features_in_ = len(X.columns)
            if self._own is None:
                self._encoder = column_encoder(X).fit(X)
        elif self._own is not None:
            shape = getattr(X, "shape", ())
            self.n_features_in_ = shape[1] if len(shape) > 1 else 0  # texts are one column of none
        else:
            validate_data(self, X, accept_sparse="csr", dtype=FLOATS)

    def _observed(self, y: object) -> np.ndarray:
        """Set the classes, and return the labels as their numbers."""
        array = column_or_1d(plain_labels(y, "y"), warn=True)
        check_classification_targets(array)
        self.classes_, observed = np.unique(array, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"y has only one class, {listed(self.classes_)}: there is nothing to confuse it "
                "with. LabelCleaner needs labels of two classes or more."
            )
        return observed

    def _rows(self, X: Rows, where: str = "") -> Rows:
        """Return rows as what judges them takes them."""
        if self._encoder is not None:
            return np.asarray(self._encoder.transform(X), np.float64)
        if self._own is not None:
            return indexable(X)[0]
        try:
            return validate_data(self, X, reset=False, accept_sparse="csr", dtype=FLOATS)
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None

    def predict(self, X: Rows) -> np.ndarray:
        """Return the label of each row by the final model."""
        best = np.argmax(self.predict_proba(X), axis=1)
        return self.classes_[best]

    def predict_proba(self, X: Rows) -> np.ndarray:
        """Return the probability of each class, in the order of `classes_`."""
        check_is_fitted(self, "weights_")
        return self._final.predict_proba(self._rows(X))

    def __sklearn_tags__(self) -> Tags:
        """Tell scikit-learn that sparse input is taken."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

"""What `LabelCleaner` and `ValueCleaner` share: how rows come in, and how findings go out."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import Tags, _safe_indexing, check_random_state
from sklearn.utils.validation import _num_samples, validate_data

from .._outer.run import Result
from ._checks import verified_rows
from ._columns import Native, column_encoder, is_mixed, native_columns, stack_rows
from ._ensemble import check_weight
from ._features import Rows

FLOATS = (np.float64, np.float32)
MOST_WRONG = 0.5
"""The share of suspects up to which members are trained again without them. Where most are suspects, to
train on the rest would only confirm it."""


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

    def spread(self, judged: np.ndarray, verified: np.ndarray) -> np.ndarray:
        """Return what is found of each row of X, those that were verified among them."""
        found = np.empty((len(self.judged) + len(self.verified), *judged.shape[1:]), judged.dtype)
        found[self.judged], found[self.verified] = judged, verified
        return found


class Cleaner(BaseEstimator):
    """The base of both."""

    estimator: object
    random_state: object

    @property
    def _takes_anything(self) -> bool:
        """Whether an estimator of the user's takes X as it is."""
        return not (self.estimator is None or isinstance(self.estimator, str | tuple))

    def _inputs(
        self,
        X: Rows,
        y: object,
        parsed: Callable[[object, str], np.ndarray],
        clean: tuple[Rows, object],
        checked: tuple[object, object],
        sample_weight: object,
    ) -> Inputs:
        """Return all rows and labels, or raise.

        `parsed(labels, name)` returns labels as an array; `clean` are X_clean and y_clean, `checked`
        rows of X and their right labels.
        """
        if y is None:
            raise ValueError("requires y to be passed, but the target y is None.")
        self._encoder = None
        if is_mixed(X):
            self.feature_names_in_ = np.asarray(X.columns, object)
            self.n_features_in_ = len(X.columns)
            if not self._takes_anything:
                self._encoder = column_encoder(X).fit(X)
        elif self._takes_anything:
            self.n_features_in_ = getattr(X, "shape", (0, 0))[1]
        else:
            validate_data(self, X, accept_sparse="csr", dtype=FLOATS)
        rows, observed = self._rows(X), parsed(y, "y")
        n = len(observed)
        if n != _num_samples(rows):
            raise ValueError(f"y has {n} labels, and X has {_num_samples(rows)} rows.")
        weight = check_weight(sample_weight, n, self.estimator)
        verified = verified_rows(*checked, n, "checked_labels")
        judged = np.setdiff1d(np.arange(n), verified)
        trusted, known = np.zeros(0, observed.dtype), observed[verified]
        if len(verified):
            trusted = parsed(checked[1], "checked_labels")
            rows = _safe_indexing(rows, np.concatenate([judged, verified]))
        if (clean[0] is None) != (clean[1] is None):
            raise ValueError("give X_clean and y_clean together, or neither.")
        if clean[0] is not None:
            more, labels = self._rows(clean[0], "X_clean: "), parsed(clean[1], "y_clean")
            if labels.shape != (_num_samples(more),):
                raise ValueError(
                    f"y_clean has shape {labels.shape}, and X_clean has {_num_samples(more)} rows: "
                    "give one label for each row."
                )
            rows, trusted = stack_rows(rows, more), np.concatenate([trusted, labels])
            known = np.concatenate([known, np.full(len(labels), -1)])
        observed = observed[judged]
        if weight is not None:
            weight = np.concatenate([weight[judged], np.full(len(trusted), weight.mean())])
        native = native_columns(self._encoder)
        return Inputs(rows, observed, trusted, known, weight, native, judged, verified)

    def _rows(self, X: Rows, where: str = "") -> Rows:
        """Return rows as what judges them takes them."""
        if self._encoder is not None:
            return np.asarray(self._encoder.transform(X), np.float64)
        if self._takes_anything:
            return X
        try:
            return validate_data(self, X, reset=False, accept_sparse="csr", dtype=FLOATS)
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None

    def _found(self, weights: np.ndarray, result: Result | None) -> None:
        """Set what follows from the weights, and what is known of the descent."""
        self.weights_ = weights
        self.probability_wrong_ = 1 - weights
        self.suspects_ = weights < 0.5
        self.noise_rate_ = float(self.probability_wrong_.mean())
        self.unflagged_ = float(self.probability_wrong_[~self.suspects_].sum())
        self.history_ = [] if result is None else result.history
        self.stopped_ = "no descent" if result is None else result.stopped
        if self.stopped_ == "interrupted":
            warnings.warn(
                f"interrupted after {len(self.history_)} evaluations: the weights are those of an "
                "unfinished descent.",
                stacklevel=4,
            )

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))

    def __sklearn_tags__(self) -> Tags:
        """Tell scikit-learn that sparse input is taken."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

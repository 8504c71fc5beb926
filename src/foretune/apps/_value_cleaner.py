"""`ValueCleaner`: which training values of a regression are wrong, and what model do I get without?"""

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from .._outer.callbacks import Progress
from . import _pool
from ._columns import Native, column_encoder, has_words, native_columns, row_count, stack_rows
from ._labels import FLOATS, check_whole
from ._value_model import FAR, MOST_WRONG, Judgement, judge_values, local_spread, scale_of
from ._values import LEAST_ROWS, numbers, ranked

ROUNDS, MOST_ROUNDS = 3, 20_000
"""The regressors are trained this often, each time without the suspects; twice beyond so many rows."""
LEAST_SPREAD = 100
"""From this many rows on a regressor of the residuals' size is one of the local spreads."""


class ValueCleaner(RegressorMixin, BaseEstimator):
    """Finds wrong values of a regression's target, with or without a few checked examples.

    Values are judged by regressors that have not seen them, and their residuals by a mixture: right
    values lie around the prediction at a distance that depends on the row, wrong ones anywhere.

    Parameters
    ----------
    estimator : None, "pool" or a scikit-learn regressor, default=None
        What predicts the values, by folds. None and "pool" are ridge regression, a forest and boosted
        trees, combined by weights that are learnt; data frames may have words, dates, text and gaps. A
        regressor of your own takes X as it is.
    folds : int, default=5
        A value is judged by regressors that were trained on the other folds.
    progress : bool, default=True
        Show progress when the output is a terminal.
    random_state : int, RandomState or None, default=None
        Folds and regressors follow it.

    Attributes
    ----------
    weights_ : array of n, in [0, 1]
        The probability that each value is right.
    suspects_ : bool array of n
        The values held to be wrong: a weight below 1/2.
    ranking_ : int array of n
        Indices, the most suspicious first.
    suggested_ : array of n
        The pooled prediction, by regressors that have not seen the value.
    confidence_ : array of n
        That the value is wrong: 1 - weight. `noise_rate_` is its mean, `unflagged_` its sum over values
        that are not suspects.
    spread_ : array of n
        The scale of right values around the prediction, by row.
    pool_ : dict
        The weight of each regressor; they sum to 1.
    history_ : list of dict
        The descent of the regularisers, with 20 checked rows or more. `stopped_` says why it ended.
    n_features_in_, feature_names_in_
        As in scikit-learn.

    `predict` is of a final model, trained on what is kept and the checked examples.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.datasets import make_friedman1
    >>> from foretune.apps import ValueCleaner
    >>> X, y = make_friedman1(300, noise=0.5, random_state=0)
    >>> y[:15] *= 10  # a decimal point slipped
    >>> cleaner = ValueCleaner(random_state=0).fit(X, y)
    >>> bool(cleaner.suspects_[:15].mean() > 0.8 and cleaner.suspects_[15:].mean() < 0.05)
    True
    """

    def __init__(
        self,
        estimator: Any = None,
        *,
        folds: Any = 5,
        progress: Any = True,
        random_state: Any = None,
    ):
        self.estimator = estimator
        self.folds = folds
        self.progress = progress
        self.random_state = random_state

    def fit(
        self, X: Any, y: Any, X_clean: Any = None, y_clean: Any = None, *, sample_weight: Any = None
    ) -> "ValueCleaner":
        """Find the wrong values of (X, y), given checked examples (X_clean, y_clean) or none.

        Rows of (X, y) train by their `sample_weight`; one of weight 0 is judged, and trains nothing.
        """
        everything, given, checked, weight = self._checked_input(
            X, y, X_clean, y_clean, sample_weight
        )
        n, c, pooled = len(given), len(checked), self._pooled
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        rng = np.random.default_rng(seed)
        fold = np.concatenate([rng.permutation(m) % min(self.folds, n) for m in (n, c)])
        members: dict[str, Any] = {"estimator": self.estimator}
        native = native_columns(self._encoder)
        if pooled:
            members = _pool.regressors_of(everything, seed, native)
        scale = scale_of(given)
        values = np.concatenate([given, checked])
        scaled = scale(values)
        # One value far away must not carry a regressor away; one's own may need values as they are.
        target = scaled if pooled else np.clip(values, *scale.back([-FAR, FAR]))
        keep = np.ones(n + c, bool)

        def judge(keep: np.ndarray, last: bool) -> Judgement:
            def predict(name, member, of=target):
                options = {"seed": seed, "weight": weight, "keep": keep, "progress": self.progress}
                return _pool.out_of_fold(name, member, everything, of, fold, None, **options)

            f = np.stack([predict(name, member) for name, member in members.items()])
            f = np.clip(f, -FAR, FAR) if pooled else scale(f)
            more = []
            if n >= LEAST_SPREAD and "boosting" in members:
                more = [_error_by_row(f, scaled, predict, seed, native)]
            g = local_spread(f, scaled, more)
            given_rows, checked_rows = (
                (f[:, r], scaled[r], g[:, r]) for r in (slice(n), slice(n, None))
            )
            return judge_values(
                *given_rows,
                *checked_rows,
                weight=None if weight is None else weight[:n],
                seed=seed,
                callbacks=[Progress("weighing the values")] if self.progress and last else (),
                tune=last,
            )

        for _ in range(ROUNDS - 1 if n <= MOST_ROUNDS else 1):
            suspects = judge(keep, last=False).right < 0.5
            # Where most are suspects, to train on the rest would only confirm it.
            keep[:n] = ~suspects if suspects.mean() <= MOST_WRONG else True
        judged = judge(keep, last=True)
        suspects = judged.right < 0.5
        keep[:n] = ~suspects
        self.weights_ = judged.right
        self.suspects_ = suspects
        self.confidence_ = 1 - judged.right
        self.suggested_ = scale.back(judged.expected)
        self.spread_ = scale.width(judged.expected, judged.scale)
        self.noise_rate_ = float(self.confidence_.mean())
        self.unflagged_ = float(self.confidence_[~suspects].sum())
        self.ranking_ = ranked(self.weights_, given, self.suggested_)
        self.pool_ = dict(zip(members, judged.pool.tolist(), strict=True))
        descended = judged.result
        self.history_ = [] if descended is None else descended.history
        self.stopped_ = "no descent" if descended is None else descended.stopped
        rows = np.flatnonzero(keep if keep.any() else ~keep)
        most = _pool.MOST_TRAINED if pooled else None
        final = _pool.Mean(members, weights=judged.pool, most=most)
        self._final = final.fit(everything, values, rows, weight, seed)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return the value of each row by the final model."""
        check_is_fitted(self, "weights_")
        return np.asarray(self._final.predict(self._rows(X)))

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn that sparse input is taken."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    @property
    def _pooled(self) -> bool:
        return self.estimator is None or isinstance(self.estimator, str)

    def _checked_input(self, X, y, X_clean, y_clean, sample_weight=None):
        """Return all rows, given and checked values, and the weights of all rows, or raise."""
        _pool.check_estimator(self.estimator, regression=True)
        check_whole("folds", self.folds, 2)
        if y is None:
            raise ValueError("requires y to be passed, but the target y is None.")
        given = numbers(column_or_1d(y, warn=True), "y")
        self._encoder: Any = None
        if has_words(X):
            self.feature_names_in_ = np.asarray(X.columns, object)
            self.n_features_in_ = len(X.columns)
            if self._pooled:
                self._encoder = column_encoder(X).fit(X)
        elif self._pooled:
            X = validate_data(self, X, accept_sparse="csr", dtype=FLOATS)
        else:
            self.n_features_in_ = getattr(X, "shape", (0, 0))[1]
        if len(given) != row_count(X):
            raise ValueError(f"y has {len(given)} values, and X has {row_count(X)} rows.")
        if len(given) < LEAST_ROWS:
            raise ValueError(f"y has n_samples={len(given)}: {LEAST_ROWS} or more are needed.")
        everything, checked = self._encoded(X), np.zeros(0)
        weight = _pool.check_weight(sample_weight, len(given), self.estimator)
        if X_clean is not None or y_clean is not None:
            if X_clean is None or y_clean is None:
                raise ValueError("give X_clean and y_clean together, or neither.")
            checked = numbers(y_clean, "y_clean")
            if checked.shape != (row_count(X_clean),):
                raise ValueError(
                    f"y_clean has shape {checked.shape}, and X_clean has {row_count(X_clean)} rows: "
                    "give one value for each row."
                )
            everything = stack_rows(everything, self._rows(X_clean))
            if weight is not None:  # a checked row counts as one of the given ones does
                weight = np.concatenate([weight, np.full(len(checked), weight.mean())])
        return everything, given, checked, weight

    def _encoded(self, X):
        return X if self._encoder is None else np.asarray(self._encoder.transform(X), np.float64)

    def _rows(self, X):
        """Return rows as the regressors take them."""
        if self._encoder is None and self._pooled:
            return validate_data(self, X, reset=False, accept_sparse="csr", dtype=FLOATS)
        return self._encoded(X)


def _error_by_row(
    f: np.ndarray, scaled: np.ndarray, predict: Any, seed: int, native: Native | None
) -> np.ndarray:
    """Return exp of a regressor's prediction of log |residual|, out of fold."""
    error = np.abs(scaled - f.mean(0))
    least = max(0.1 * float(np.median(error)), 1e-6)
    trees = HistGradientBoostingRegressor(
        max_iter=50, max_leaf_nodes=8, min_samples_leaf=30, random_state=seed
    )
    trees = _pool.natively(trees, native)
    return np.exp(predict("size of errors", trees, np.log(error + least)))

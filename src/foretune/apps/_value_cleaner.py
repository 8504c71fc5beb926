"""`ValueCleaner`: which training values of a regression are wrong, and what model do I get without?"""

from numbers import Integral
from typing import cast

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.utils._param_validation import Interval
from sklearn.utils.validation import check_is_fitted, column_or_1d

from .._outer.callbacks import Progress
from . import _ensemble
from ._checks import LEAST_ROWS, numbers
from ._cleaner import MOST_WRONG, Cleaner, Inputs
from ._columns import Native
from ._features import Rows
from ._predictions import ranked
from ._value_model import FAR, Observed, ValueJudgement, judge_values, local_spread, scale_of

ROUNDS, MOST_ROUNDS = 3, 20_000
"""The regressors are trained this often, each time without the suspects; twice beyond so many rows."""
LEAST_SPREAD = 100
"""From this many rows on a regressor of the residuals' size is one of the local spreads."""


class ValueCleaner(RegressorMixin, Cleaner):
    """Finds wrong values of a regression's target, with the help of a few trusted ones or without.

    Values are judged by regressors that have not seen them, and their residuals by a mixture: right
    values lie around the prediction at a distance that depends on the row, wrong ones anywhere.

    Parameters
    ----------
    estimator : "ensemble" or a scikit-learn regressor, default="ensemble"
        What predicts the values, by folds. "ensemble" (also "pool") is ridge regression, a forest and
        boosted trees, combined by weights that are learnt; data frames may have categories, dates,
        text and missing values. A regressor of your own takes X as it is.
    folds : int, default=5
        A value is judged by regressors that were trained on the other folds.
    progress : bool, default=True
        Show progress when the output is a terminal.
    random_state : int, RandomState or None, default=None
        Folds and regressors follow it.

    Attributes
    ----------
    weights_, suspects_, ranking_, probability_wrong_, noise_rate_, unflagged_
        As in `LabelCleaner`.
    suggested_ : array of n
        The ensemble's prediction, by regressors that have not seen the value.
    spread_ : array of n
        The scale of right values around the prediction, by row.
    ensemble_ : dict
        The weight of each regressor; they sum to 1.
    history_, stopped_
        The descent of the regularisers, with 20 trusted rows or more.
    n_features_in_, feature_names_in_
        As in scikit-learn.

    `predict` is of a final model, trained without the suspects, and on the trusted examples.

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

    _parameter_constraints = {  # noqa: RUF012, scikit-learn's table of what is accepted
        "folds": [Interval(Integral, 2, None, closed="left")],
        "random_state": ["random_state"],
    }

    def __init__(
        self,
        estimator: object = "ensemble",
        *,
        folds: object = 5,
        progress: bool = True,
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
        sample_weight: object = None,
    ) -> "ValueCleaner":
        """Find the wrong values of (X, y), given trusted examples (X_clean, y_clean) or none.

        Rows of (X, y) train by their `sample_weight`; one of weight 0 is judged, and trains nothing.
        """
        inputs = self.inputs(X, y, (X_clean, y_clean), sample_weight)
        n, c = len(inputs.observed), len(inputs.trusted)
        seed = self._seed()
        rng, own, count = np.random.default_rng(seed), self._takes_anything, cast(int, self.folds)
        fold = np.concatenate([rng.permutation(m) % min(count, n) for m in (n, c)])
        scale = scale_of(inputs.observed)
        scaled = scale(inputs.labels)
        # One value far away must not carry a regressor away; one's own may need values as they are.
        target = np.clip(inputs.labels, *scale.back([-FAR, FAR])) if own else scaled
        folds = _ensemble.Folds(inputs.rows, target, fold, inputs.weight, seed, self.progress)
        members: _ensemble.Members = {"estimator": cast(BaseEstimator, self.estimator)}
        if not own:
            members = _ensemble.regressors_of(inputs.rows, seed, inputs.native)

        def look(use: np.ndarray, last: bool) -> ValueJudgement:
            f = np.stack([folds.predictions(name, each, use) for name, each in members.items()])
            f = scale(f) if own else np.clip(f, -FAR, FAR)
            more = []
            if n >= LEAST_SPREAD and "boosting" in members:
                more = [_error_by_row(f, scaled, folds, use, inputs.native)]
            g = local_spread(f, scaled, more)
            return judge_values(
                Observed(f[:, :n], scaled[:n], g[:, :n]),
                Observed(f[:, n:], scaled[n:], g[:, n:]),
                weight=None if inputs.weight is None else inputs.weight[:n],
                seed=seed,
                callbacks=[Progress("weighing the values")] if self.progress and last else (),
                tuned=last,
            )

        use = np.ones(n + c, bool)
        for _ in range(ROUNDS - 1 if n <= MOST_ROUNDS else 1):
            suspects = look(use, last=False).right < 0.5
            use[:n] = ~suspects if suspects.mean() <= MOST_WRONG else True
        judged = look(use, last=True)
        self._found(judged.right, judged.result)
        self.suggested_ = scale.back(judged.expected)
        self.spread_ = scale.width(judged.expected, judged.scale)
        self.ranking_ = ranked(self.weights_, inputs.observed, self.suggested_)
        self.ensemble_ = dict(zip(members, judged.ensemble.tolist(), strict=True))
        use[:n] = ~self.suspects_
        rows = np.flatnonzero(use if use.any() else ~use)
        most = None if own else _ensemble.MOST_TRAINED
        self._final = folds._replace(labels=inputs.labels).final(members, rows, most)
        return self

    def inputs(
        self,
        X: Rows,
        y: object,
        clean: tuple[Rows, object] = (None, None),
        sample_weight: object = None,
    ) -> Inputs:
        """Return what `fit` works on, or raise where it would."""
        self._validate_params()
        _ensemble.check_estimator(self.estimator, ("ensemble", "pool"), regression=True)

        def parsed(values: object, name: str) -> np.ndarray:
            return numbers(column_or_1d(values, warn=True) if name == "y" else values, name)

        found = self._inputs(X, y, parsed, clean, (None, None), sample_weight)
        if len(found.observed) < LEAST_ROWS:
            raise ValueError(
                f"y has n_samples={len(found.observed)}: {LEAST_ROWS} or more are needed."
            )
        return found

    def predict(self, X: Rows) -> np.ndarray:
        """Return the value of each row by the final model."""
        check_is_fitted(self, "weights_")
        rows, weights = self._rows(X), list(self.ensemble_.values())
        return np.average([model.predict(rows) for model in self._final], axis=0, weights=weights)


def _error_by_row(
    f: np.ndarray,
    scaled: np.ndarray,
    folds: _ensemble.Folds,
    use: np.ndarray,
    native: Native | None,
) -> np.ndarray:
    """Return exp of a regressor's prediction of log |residual|, out of fold."""
    error = np.abs(scaled - f.mean(0))
    least = max(0.1 * float(np.median(error)), 1e-6)
    trees = HistGradientBoostingRegressor(
        max_iter=50, max_leaf_nodes=8, min_samples_leaf=30, random_state=folds.seed
    )
    of_errors = folds._replace(labels=np.log(error + least))
    return np.exp(of_errors.predictions("size of errors", _ensemble.natively(trees, native), use))

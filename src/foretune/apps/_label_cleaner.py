"""`LabelCleaner`: which training labels are wrong, and what model do I get without them?"""

import sys
from collections.abc import Iterable
from copy import copy
from numbers import Integral
from typing import Any, NamedTuple, cast

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import Tags, _safe_indexing, check_random_state, indexable
from sklearn.utils._param_validation import Interval
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _num_samples, check_is_fitted, column_or_1d, validate_data

from ._checks import check_unmasked, listed, numbers_of_rows, plain_labels, positions, verified_rows
from ._columns import Encoder, Rows, check_frame, is_frame, is_mixed, row_order, stack_rows
from ._ensemble import (
    FORESTS,
    Ensemble,
    Labelled,
    Member,
    make_folds,
    members_of,
    own_classifier,
)
from ._label_model import judge
from ._predictions import FoundLabels

LEAST_TRAINED = 2  # rows of each class that the final model is trained on


class Inputs(NamedTuple):
    """Rows of X, then of X_clean, with observed and true labels; -1 where one is not known."""

    rows: Rows
    observed: np.ndarray
    true: np.ndarray
    encoder: Encoder | None

    @property
    def labels(self) -> np.ndarray:
        """True labels, and observed ones where these are not known."""
        return np.where(self.true >= 0, self.true, self.observed)


class LabelCleaner(FoundLabels, ClassifierMixin, BaseEstimator):
    """Finds wrong labels in a training set, with the help of a few trusted ones or without.

    Parameters
    ----------
    estimator : "ensemble" or a scikit-learn classifier, default="ensemble"
        What judges the labels, each row by models that have not seen it. "ensemble" is logistic
        regression, two forests, least squares on a kernel and boosted trees, combined by weights that
        are learnt. Your own classifier takes X as it is.
    folds : int, default=5
        An example is judged by models that were trained on the other folds.
    text : list of str, default=()
        Columns of a data frame that are free text, whatever they look like.
    progress : bool, default=True
        Show a progress bar when the output is a terminal.
    random_state : int, RandomState or None, default=None
        Folds and classifiers follow it. The order of the rows changes nothing.

    Attributes
    ----------
    weights_ : array of n, in [0, 1]
        The probability that each label is right; 0 or 1 for verified ones.
    suspects_ : bool array of n
        The suspected labels: those of the lowest weights, as many as give the greatest expected F1.
    ranking_ : int array of n
        Indices, the most suspicious first.
    suggested_ : array of n
        The most probable other label of a suspect, the observed label of other rows.
    probability_wrong_ : array of n
        1 - weight.
    noise_rate_, noise_rate_interval_ : float, pair of floats
        The share of wrong labels, and where it may be. With 20 verified rows or more whose observed
        labels are known the interval has a probability of about 95 %, if these were drawn at random;
        without them it only shows what other assumptions on the noise would give.
    unflagged_, unflagged_interval_ : float, pair of floats, or None
        How many wrong labels are not suspected; None without 20 such rows.
    noise_matrix_ : array (n_classes, n_classes)
        p(observed label | true label) as learnt.
    ensemble_ : dict
        The exponent of each classifier's probabilities.
    probabilities_ : array (n, n_classes)
        The probability of each class, by models that have not seen the row. Its observed label has no
        part in it, unless it is verified.
    reliability_ : array (verified rows, 2) or None
        Of 20 verified rows or more, judged as if they were not: the probability that the observed label
        is right, and whether it is.
    classes_, n_features_in_, feature_names_in_
        As in scikit-learn.

    `predict` and `predict_proba` are of a final model, trained without the suspects, and on the
    verified rows.

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

    _final: Ensemble
    _seed: int

    def __init__(
        self,
        estimator: object = "ensemble",
        *,
        folds: object = 5,
        text: object = (),
        progress: object = True,
        random_state: object = None,
    ):
        self.estimator = estimator
        self.folds = folds
        self.text = text
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
    ) -> "LabelCleaner":
        """Find the wrong labels of (X, y).

        Verified labels are those of some rows of X, `checked` (numbers, or a mask), or of other rows,
        (X_clean, y_clean). The former teach more: they show how observed labels go wrong.
        """
        new = copy(self)  # an interrupt, or an error, leaves an earlier fit as it was
        inputs = new.inputs(X, y, (X_clean, y_clean), (checked, checked_labels))
        new._seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        order = row_order(inputs.rows, inputs.labels)
        order = order[np.argsort(inputs.observed[order] < 0, kind="stable")]
        observed, true = inputs.observed[order], inputs.true[order]
        training, members = new._training(inputs, order)
        q = np.stack([training.unseen(name, member) for name, member in members.items()])
        found = judge(q, observed, true, new._seed)
        back = np.argsort(order[: len(found.right)])
        by_row = ("right", "suspects", "likely", "probabilities")
        found = found._replace(**{name: getattr(found, name)[back] for name in by_row})
        new._conclude(found, members)
        new._final = new._without_suspects(inputs)
        self.__dict__ = new.__dict__
        return self

    def _without_suspects(self, inputs: Inputs) -> Ensemble:
        """Return the final model; a class that would lose all its rows keeps the two best."""
        trust, suspect = np.ones(len(inputs.true)), np.zeros(len(inputs.true), bool)
        judged = np.flatnonzero(inputs.true[: len(self.weights_)] < 0)
        trust[judged], suspect[judged] = self.weights_[judged], self.suspects_[judged]
        for label in np.unique(inputs.labels):
            mine = np.flatnonzero(inputs.labels == label)
            if np.sum(~suspect[mine]) < LEAST_TRAINED:
                suspect[mine[np.argsort(-trust[mine], kind="stable")[:LEAST_TRAINED]]] = False
        training, members = self._training(inputs, np.flatnonzero(~suspect))
        rows = np.arange(len(training.labels))
        if inputs.encoder is not None:
            rows = training.sample(rows)
        for member in members.values():
            if inputs.encoder is not None and isinstance(member.estimator, FORESTS):
                member.estimator.set_params(oob_score=False)  # nothing is judged any more
        models = [training.trained(member, rows) for member in members.values()]
        return Ensemble(inputs.encoder, [*members.values()], models, len(self.classes_))

    def _training(self, inputs: Inputs, order: np.ndarray) -> tuple[Labelled, dict[str, Member]]:
        """Return the training on rows in this order, and the members."""
        rows, labels = _safe_indexing(inputs.rows, order), inputs.labels[order]
        if inputs.encoder is None:
            members = {"estimator": Member(cast(BaseEstimator, self._own))}
        else:
            members = dict(members_of(inputs.encoder, len(order), labels, self._seed))
            rows = inputs.encoder.transform(rows)
        count = min(cast(int, self.folds), len(order))
        fold = make_folds(labels, count, np.random.default_rng(self._seed))
        quiet = not (self.progress and sys.stderr.isatty())
        return Labelled(rows, labels, fold, len(self.classes_), self._seed, quiet), members

    def inputs(
        self,
        X: Rows,
        y: object,
        clean: tuple[Rows, object] = (None, None),
        checked: tuple[object, object] = (None, None),
    ) -> Inputs:
        """Return what `fit` works on, or raise where it would."""
        self._validate_params()
        self._own, text = own_classifier(self.estimator), cast(Any, self.text)
        if isinstance(text, str) or not isinstance(text, Iterable):
            raise ValueError(f"text={text!r:.60}: give a list of columns' names.")
        if y is None:
            raise ValueError("requires y to be passed, but the target y is None.")
        rows, observed = self._rows(X, reset=True), self._observed(y)
        n = len(observed)
        if n != _num_samples(rows):
            raise ValueError(f"y has {n} labels, and X has {_num_samples(rows)} rows.")
        numbers, answers = checked
        if is_frame(X) and hasattr(numbers, "get_indexer"):
            numbers = numbers_of_rows(numbers, X)
        verified, true = verified_rows(numbers, answers, n), np.full(n, -1)
        if len(verified):
            true[verified] = positions(checked[1], self.classes_, "checked_labels", "y")
        encoder = None if self._own is not None else Encoder(tuple(text)).fit(rows)
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
            rows, true = stack_rows(rows, more), np.concatenate([true, labels])
            observed = np.concatenate([observed, np.full(len(labels), -1)])
        if encoder is not None and encoder.mixed:  # the order of rows is not to depend on these
            rows = rows.drop(columns=encoder.names["identifiers"])
        inputs = Inputs(rows, observed, true, encoder)
        counts = np.bincount(inputs.labels, minlength=len(self.classes_))
        if np.sum(counts > 1) < 2:
            rows_of = dict(zip(self.classes_.tolist(), counts.tolist(), strict=True))
            raise ValueError(
                "labels are judged by models that were trained on other rows: give two rows or more "
                f"of each of two classes, not {rows_of}."
            )
        return inputs

    def _observed(self, y: object) -> np.ndarray:
        """Set the classes, and return the labels as their numbers."""
        array = column_or_1d(plain_labels(y, "y"), warn=True)
        if array.dtype != object:  # of dates and the like scikit-learn knows no type
            check_classification_targets(array)
        self.classes_, observed = np.unique(array, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"y has only one class, {listed(self.classes_)}: there is nothing to confuse it "
                "with. LabelCleaner needs labels of two classes or more."
            )
        return observed

    def _rows(self, X: Rows, where: str = "", reset: bool = False) -> Rows:
        """Return rows as what judges them takes them; with `reset` their columns are learnt."""
        if reset:
            mixed = is_mixed(X) or bool(self.text)
            self._as_it_is = self._own is not None or mixed
            if mixed and is_frame(X):
                self.feature_names_in_ = np.asarray(X.columns, object)
            shape = getattr(X, "shape", ())
            self.n_features_in_ = shape[1] if len(shape) > 1 else 0  # texts are one column of none
        check_unmasked(X, f"{where}X")
        if self._as_it_is:
            names = check_frame(X) if is_frame(X) else []
            self._names = names if reset else self._names
            odd = sorted(set(names) ^ set(self._names), key=str)
            if odd and (where or names or self._own is None):
                what = f"give a data frame with the columns of X; in one only: {listed(odd)}."
                raise ValueError(f"{where}{what}")
            return indexable(X)[0]
        try:
            given: Any = X
            return validate_data(self, given, reset=reset, accept_sparse="csr", dtype=np.float32)
        except ValueError as error:
            if "NaN" in str(error):
                raise ValueError(
                    f"{where}{str(error).splitlines()[0]} Fill in missing values, or give a "
                    "pandas.DataFrame(X), in which they may be missing."
                ) from None
            raise ValueError(f"{where}{error}") from None

    def predict(self, X: Rows) -> np.ndarray:
        """Return the label of each row by the final model."""
        best = np.argmax(self.predict_proba(X), axis=1)
        return self.classes_[best]

    def predict_proba(self, X: Rows) -> np.ndarray:
        """Return the probability of each class, in the order of `classes_`."""
        check_is_fitted(self, "weights_")
        return self._final.predict_proba(self._rows(X))

    def columns_by_importance(self) -> list[str]:
        """Return the names of the columns, the one that matters most to the final forest first."""
        encoder, models = self._final.encoder, self._final.models
        forests = [model for model in models if isinstance(model, FORESTS)]
        if encoder is None or not forests:
            return []
        matters = np.mean([forest.feature_importances_ for forest in forests], axis=0)
        names = getattr(self, "feature_names_in_", None)
        found = {name: matters[at].sum() for name, at in encoder.sources.items()}
        if names is not None and not encoder.mixed:
            found = dict(zip(map(str, names), found.values(), strict=False))
        return sorted(found, key=lambda name: -found[name])

    def __sklearn_tags__(self) -> Tags:
        """Tell scikit-learn that sparse input is taken."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

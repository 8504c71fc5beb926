"""`LabelCleaner`: which training labels are wrong, and what model do I get without them?"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from .._engines.base import check_engine
from .._outer.callbacks import Progress
from .._outer.checks import check_callbacks
from . import _noise, _pool, _weights
from ._columns import column_encoder, has_words, native_columns, row_count, stack_rows
from ._labels import FLOATS, check_whole, listed, plain_labels, second_labels, second_set
from ._models import make_features, make_model
from ._posterior import Judgement, judge, twice

STEPS = {"noise": 30, "weights": 300}
HYPER_STEPS = {"noise": 30, "weights": 200}
MOST_LOOKED, MOST_WRONG = 100_000, 0.5
"""Rows, and the share of suspects, up to which the pool looks twice. Where most are suspects, to train
on the rest would only confirm it."""


class LabelCleaner(ClassifierMixin, BaseEstimator):
    """Finds wrong labels in a training set with the help of a few checked examples.

    Parameters
    ----------
    model : {"kernel", "softmax", "mlp"} or (init, apply), default="kernel"
        "softmax" is softmax regression, "kernel" softmax regression on the inputs and on the
        components of a Gaussian kernel, "mlp" a network with one hidden layer. A pair of functions
        `init(key, n_features, n_classes) -> params` and `apply(params, x) -> class scores` is a model
        of your own; it is fed the rows of X as they are.
    estimator : None, "pool" or a scikit-learn classifier, default=None
        What judges the labels in place of `model`, by out-of-fold probabilities. A classifier of your
        own takes X as it is: a boosted tree, a pipeline with an encoder, a network's wrapper. "pool" is
        the kernel model, logistic regression, a forest and boosted trees, combined by weights that are
        learnt; data frames may have words, dates, text and gaps. None: "pool" for data frames with
        such columns, else `model`.
    method : {"noise", "weights"}, default="noise"
        "noise" learns, by hypergradients on held-out folds, a matrix of how labels go wrong and the
        model's regularisers; weights are probabilities of a right label. "weights" is data
        hyper-cleaning as published (Franceschi et al., ICML 2017): one free weight per example.
    budget : int, float or None, default=None
        A bound on the sum of the weights: a number of examples (an int, or a float above 1) or a
        fraction of them (a float up to 1, so 1.0 is all). None: chosen by the tool, from the data.
    steps : int or None, default=None
        Steps of each inner training (T); None is 30 for "noise", 300 for "weights".
    hyper_steps : int or None, default=None
        Hyper-iterations; None is 30 for "noise" (15 in the pool), 200 for "weights".
    folds : int, default=5
        Folds of the "noise" method: an example is judged by a model that has not seen it.
    engine : a foretune engine or None, default=None
        How hypergradients are computed; None is `foretune.Reverse()`.
    callbacks : sequence, default=()
        Callbacks of the descent, such as `foretune.Checkpoint(folder)` to make it resumable.
    progress : bool, default=True
        Show a progress bar when the output is a terminal.
    random_state : int, RandomState or None, default=None
        Folds, kernel landmarks and initial weights follow it.

    Attributes
    ----------
    weights_ : array of n, in [0, 1]
        How far each training label is trusted.
    suspects_ : bool array of n
        The labels held to be wrong.
    ranking_ : int array of n
        Indices, the most suspicious first.
    suggested_ : array of n
        The label that the model would give.
    confidence_ : array of n
        That the label is wrong: for "noise" its probability, for "weights" 1 - weight.
    noise_matrix_ : array (n_classes, n_classes)
        p(given label | true label) as learnt ("noise" only). `noise_rate_` is the mean confidence,
        `unflagged_` its sum over labels that are not suspects: how many more are wrong.
    pool_ : dict
        With an estimator: the weight of each classifier in the pool.
    probabilities_ : array (n, n_classes)
        With an estimator: the pooled probability of each class, by classifiers that have not seen the
        row, and were trained on all others. Its given label has no part in it.
    reliability_ : array (checked rows, 2) or None
        With an estimator and 20 checked rows or more: of each, held out, the probability of its most
        probable label and whether that is right.
    history_ : list of dict
        The descent: `step`, `value`, `gradient_norm`. `stopped_` says why it ended.
    classes_, n_features_in_, feature_names_in_
        As in scikit-learn.

    `predict` and `predict_proba` are of a final model, trained on what is kept and the checked
    examples, unweighted.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.datasets import make_blobs
    >>> from foretune.apps import LabelCleaner
    >>> X, y = make_blobs(240, centers=3, random_state=0, cluster_std=0.8)
    >>> given = y[:200].copy()
    >>> given[:20] = (given[:20] + 1) % 3  # the first 20 are wrong
    >>> cleaner = LabelCleaner(random_state=0).fit(X[:200], given, X[200:], y[200:])
    >>> bool(cleaner.suspects_[:20].mean() > 0.8 and cleaner.suspects_[20:].mean() < 0.1)
    True
    """

    def __init__(
        self,
        model: Any = "kernel",
        *,
        estimator: Any = None,
        method: Any = "noise",
        budget: Any = None,
        steps: Any = None,
        hyper_steps: Any = None,
        folds: Any = 5,
        engine: Any = None,
        callbacks: Any = (),
        progress: Any = True,
        random_state: Any = None,
    ):
        self.model = model
        self.estimator = estimator
        self.method = method
        self.budget = budget
        self.steps = steps
        self.hyper_steps = hyper_steps
        self.folds = folds
        self.engine = engine
        self.callbacks = callbacks
        self.progress = progress
        self.random_state = random_state

    def fit(
        self, X: Any, y: Any, X_clean: Any = None, y_clean: Any = None, *, sample_weight: Any = None
    ) -> "LabelCleaner":
        """Find the wrong labels of (X, y), given checked examples (X_clean, y_clean).

        Without checked examples the "noise" method goes by the given labels alone. Rows of (X, y)
        train by their `sample_weight`; one of weight 0 is judged, and no model is trained on it.
        """
        if self._pools(X):
            return self._fit_pool(X, y, X_clean, y_clean, sample_weight)
        self._final = None
        X, given, checked_X, checked, budget = self._checked_input(X, y, X_clean, y_clean)
        weight = self._weight_of(sample_weight, len(given), 0 if checked is None else len(checked))
        random = check_random_state(self.random_state)
        seed = int(random.randint(np.iinfo(np.int32).max))
        key = jax.random.key(seed)
        everything = X if checked_X is None else stack_rows(X, checked_X)
        self._features = make_features(self.model, seed).fit(everything)
        z = self._features.transform(everything)
        self._model = make_model(self.model, self._features, z)
        labels = given if checked is None else np.concatenate([given, checked])
        n, classes = len(given), len(self.classes_)

        if self.method == "noise":
            probabilities, l2 = self._fit_noise(z, given, labels[n:], budget, key, seed, weight)
        else:
            probabilities, l2 = self._fit_weights(z, given, labels[n:], budget, key, weight)
        self._count()
        # equal weights (many are 0 under a budget) in the order of the model's doubt
        doubt = 1 - probabilities[np.arange(n), given]
        self.ranking_ = np.lexsort((-doubt, -self.confidence_))
        keep = np.concatenate([~self.suspects_, np.ones(len(labels) - n, bool)])
        if weight is not None:
            keep = keep * weight
        if not keep.any():
            raise ValueError(
                "every label came out as suspect, and there are no checked examples to train a "
                "model on: give checked examples, or a larger budget."
            )
        self._params = _noise.train_plain(
            self._model, z, labels, keep, l2, classes, 2 * self._steps, key
        )
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return the label of each row by the final model."""
        best = np.argmax(self.predict_proba(X), axis=1)
        return self.classes_[best]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, in the order of `classes_`."""
        check_is_fitted(self, "weights_")
        if self._final is not None:
            return self._final.predict_proba(self._encoded(X))
        X = validate_data(self, X, reset=False, accept_sparse="csr", dtype=FLOATS)
        scores = self._model.apply(self._params, jnp.asarray(self._features.transform(X)))
        probabilities = np.asarray(jax.nn.softmax(scores), np.float64)
        return probabilities / probabilities.sum(axis=1, keepdims=True)

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn that sparse input is taken."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _pools(self, X) -> bool:
        _pool.check_estimator(self.estimator)
        if self.estimator is not None and self.method != "noise":
            raise ValueError(
                f"method={self.method!r} trains the model itself: leave `estimator` out."
            )
        return self.estimator is not None or (self.method == "noise" and has_words(X))

    def _weight_of(self, sample_weight, n: int, checked: int):
        """Return the weights of all rows; a checked one counts as the mean given one does."""
        weight = _pool.check_weight(sample_weight, n, self.estimator)
        if weight is None:
            return None
        return np.concatenate([weight, np.full(checked, weight.mean())])

    def _fit_pool(self, X, y, X_clean, y_clean, sample_weight):
        """Judge labels by out-of-fold probabilities of any classifiers."""
        if y is None:
            raise ValueError("requires y to be passed, but the target y is None.")
        given = self._classes_of(column_or_1d(plain_labels(y, "y"), warn=True))
        pooled = self.estimator is None or isinstance(self.estimator, str)
        rows: Any = X
        self._encoder: Any = None
        if has_words(X):
            self.feature_names_in_ = np.asarray(X.columns, object)
            self.n_features_in_ = len(X.columns)
            if pooled:
                self._encoder = column_encoder(X).fit(X)
                rows = self._encoded(X)
        elif pooled:
            rows = validate_data(self, X, accept_sparse="csr", dtype=FLOATS)
        else:
            self.n_features_in_ = getattr(X, "shape", (0, 0))[1]
        if len(given) != row_count(rows):
            raise ValueError(f"y has {len(given)} labels, and X has {row_count(rows)} rows.")
        checked, everything = np.zeros(0, int), rows
        if X_clean is not None or y_clean is not None:
            if X_clean is None or y_clean is None:
                raise ValueError("give X_clean and y_clean together, or neither.")
            checked, absent = second_labels(self, y_clean, row_count(X_clean), "clean")
            self._warn_of_absent(absent)
            everything = stack_rows(rows, self._encoded(X_clean))
        budget = self._options(len(given))
        weight = self._weight_of(sample_weight, len(given), len(checked))
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        rng, n, classes = np.random.default_rng(seed), len(given), len(self.classes_)
        fold = np.concatenate(
            [_noise.make_folds(labels, min(self.folds, n), rng) for labels in (given, checked)]
        )
        labels = np.concatenate([given, checked])
        _pool.check_folds(labels, fold, weight, self.classes_)
        members: dict[str, Any] = {"estimator": self.estimator}
        native = native_columns(self._encoder)
        shared = {"seed": seed, "weight": weight}
        kernel: dict[str, np.ndarray] = {}
        if pooled:
            members = _pool.pool_of(everything, labels, classes, seed % 2**31, native)
        if pooled and len(labels) <= _pool.MOST_KERNEL:
            options = self._descent(None) | {"hyper_steps": self.hyper_steps}
            del options["key"]
            kernel["kernel"] = _pool.kernel_probabilities(
                everything, given, checked, fold, classes, **shared, **options
            )

        def look(members: dict[str, Any], keep: np.ndarray | None = None) -> Judgement:
            options = shared | {"keep": keep, "progress": self.progress}
            by_fold = {
                name: _pool.out_of_fold(name, member, everything, labels, fold, classes, **options)
                for name, member in members.items()
            }
            q = np.stack([*by_fold.values(), *kernel.values()])
            return judge(
                q[:, :n],
                given,
                q[:, n:],
                checked,
                np.full(len(checked), -1),
                seed=seed,
                callbacks=[Progress("weighing the labels")] if self.progress else [],
                weight=None if weight is None else weight[:n],
            )

        judged = look(members)
        wrong = np.mean(judged.right < 0.5)
        if pooled and n <= MOST_LOOKED and 0 < wrong <= MOST_WRONG:
            trust = np.concatenate([judged.right, np.ones(len(checked))])
            keep = _pool.kept_by_fold(trust, labels, weight, fold)
            again = _pool.pool_of(everything, labels[keep], classes, seed % 2**31, native)
            judged = twice(judged, look(again, keep), given)
        self.weights_ = judged.right
        if budget is not None:
            self.weights_ = _noise.fit_budget(judged.right, budget)
        self.confidence_ = 1 - judged.right
        self.suspects_ = self.weights_ < 0.5
        self.suggested_ = self.classes_[judged.likely]
        self.probabilities_ = judged.probabilities
        self.noise_matrix_ = judged.noise
        self._count()
        self.pool_ = dict(zip([*members, *kernel], judged.pool.tolist(), strict=True))
        self.ranking_ = np.argsort(-self.confidence_, kind="stable")
        descended = judged.result
        self.history_ = [] if descended is None else descended.history
        self.stopped_ = "no descent" if descended is None else descended.stopped
        self.reliability_ = judged.claims
        trust = np.concatenate([self.weights_, np.ones(len(checked))])
        keep = _pool.kept(trust, labels, weight)
        if pooled:
            members = _pool.pool_of(everything, labels[keep], classes, seed % 2**31, native)
        most = _pool.MOST_TRAINED if pooled else None
        final = _pool.Mean(members, classes, most=most)
        self._final = final.fit(everything, labels, keep, weight, seed)
        return self

    def _encoded(self, X):
        if self._encoder is not None:
            return np.asarray(self._encoder.transform(X), np.float64)
        if self.estimator is None or isinstance(self.estimator, str):
            return validate_data(self, X, reset=False, accept_sparse="csr", dtype=FLOATS)
        return X

    def _fit_noise(self, z, given, checked, budget, key, seed, weight):
        folds, rng = min(self.folds, len(given)), np.random.default_rng(seed)
        fold = np.concatenate(
            [_noise.make_folds(given, folds, rng), _noise.make_folds(checked, folds, rng)]
        )
        train = (fold[None] != np.arange(folds)[:, None]).astype(np.float32)
        data = _noise.Data(
            *map(jnp.asarray, (z, given, checked, train)), weight=_noise.mean_one(weight)
        )
        classes = len(self.classes_)
        tuned = _noise.tune(self._model, data, classes, **self._descent(key))
        posterior = _noise.true_label(tuned.probabilities, tuned.noise, given)
        right = posterior[np.arange(len(given)), given]
        self.confidence_ = 1 - right
        self.weights_ = right if budget is None else _noise.fit_budget(right, budget)
        self.suspects_ = self.weights_ < 0.5
        self.suggested_ = self.classes_[np.argmax(posterior, axis=1)]
        self.noise_matrix_ = tuned.noise
        self._descended(tuned.result)
        return tuned.probabilities, tuned.l2

    def _fit_weights(self, z, given, checked, budget, key, weight):
        n = len(given)
        z, classes = jnp.asarray(z), len(self.classes_)
        if budget is None:
            budget = self._agreeing(z, given, checked, key)
        weights, probabilities, result = _weights.tune_weights(
            self._model,
            z[:n],
            jnp.asarray(given),
            z[n:],
            jnp.asarray(checked),
            classes,
            budget=budget,
            sample_weight=1.0 if weight is None else _noise.mean_one(weight[:n]),
            **self._descent(key),
        )
        self.weights_ = weights
        self.confidence_ = 1 - weights
        self.suspects_ = weights < _weights.SUSPECT_BELOW
        self.suggested_ = self.classes_[np.argmax(probabilities, axis=1)]
        self._descended(result)
        return probabilities, np.full(self._model.groups, _noise.START_L2)

    def _count(self) -> None:
        self.noise_rate_ = float(self.confidence_.mean())
        self.unflagged_ = float(self.confidence_[~self.suspects_].sum())

    def _descended(self, result) -> None:
        self.history_, self.stopped_ = result.history, result.stopped
        if result.stopped == "interrupted":
            warnings.warn(
                f"interrupted after {len(result.history)} evaluations: the weights are those of an "
                "unfinished descent.",
                stacklevel=4,
            )

    def _agreeing(self, z, given, checked, key) -> float:
        """Return the number of labels that a model of the checked examples alone agrees with."""
        n, l2 = len(given), np.full(self._model.groups, _noise.START_L2)
        params = _noise.train_plain(
            self._model,
            z,
            np.concatenate([given, checked]),
            np.arange(len(z)) >= n,
            l2,
            len(self.classes_),
            self._steps,
            key,
        )
        agree = np.argmax(np.asarray(self._model.apply(params, z[:n])), axis=1) == given
        return max(float(agree.sum()), 1.0)

    def _descent(self, key) -> dict[str, Any]:
        bar = [Progress("finding wrong labels")] if self.progress else []
        return {
            "steps": self._steps,
            "hyper_steps": HYPER_STEPS[self.method]
            if self.hyper_steps is None
            else self.hyper_steps,
            "engine": self.engine,
            "key": key,
            "callbacks": [*bar, *self.callbacks],
        }

    @property
    def _steps(self) -> int:
        return STEPS[self.method] if self.steps is None else self.steps

    def _checked_input(self, X, y, X_clean, y_clean):
        X, given = self._training_data(X, y)
        rows, checked = self._checked_data(X_clean, y_clean)
        make_features(self.model, 0)
        return X, given, rows, checked, self._options(len(given))

    def _training_data(self, X, y):
        labels: Any = None if y is None else plain_labels(y, "y")  # None: scikit-learn's message
        X, y = validate_data(self, X, labels, accept_sparse="csr", dtype=FLOATS)
        return X, self._classes_of(y)

    def _classes_of(self, y):
        check_classification_targets(y)
        self.classes_, given = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"y has only one class, {listed(self.classes_)}: there is nothing to confuse it with. "
                "LabelCleaner needs labels of two classes or more."
            )
        return given

    def _checked_data(self, X_clean, y_clean):
        if X_clean is None and y_clean is None:
            if self.method == "weights":
                raise ValueError(
                    "method='weights' needs checked examples: fit(X, y, X_clean, y_clean)."
                )
            return None, None
        rows, checked, absent = second_set(self, X_clean, y_clean, "clean")
        if len(checked) < len(self.classes_):
            raise ValueError(
                f"{len(checked)} checked examples for {len(self.classes_)} classes: check at least "
                "one example of each class, better five."
            )
        self._warn_of_absent(absent)
        return rows, checked

    def _warn_of_absent(self, absent) -> None:
        if absent:
            warnings.warn(
                f"no checked example of {listed(absent)}: labels of that kind are judged by the given "
                "ones alone.",
                stacklevel=4,
            )

    def _options(self, n: int) -> float | None:
        if self.method not in STEPS:
            raise ValueError(f"method={self.method!r}: give 'noise' or 'weights'.")
        for name in ("steps", "hyper_steps"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        check_whole("folds", self.folds, 2)
        check_engine(self.engine)
        check_callbacks(self.callbacks)
        if self.budget is None:
            return None
        if isinstance(self.budget, bool) or not isinstance(self.budget, int | float | np.number):
            raise ValueError(f"budget={self.budget!r}: give a number of examples, or a fraction.")
        whole = isinstance(self.budget, int | np.integer)
        budget = float(self.budget) * (1 if whole or self.budget > 1 else n)
        if not 0 < budget <= n:
            raise ValueError(
                f"budget={self.budget!r} for {n} training examples: give a number of examples in "
                f"(0, {n}], or a fraction in (0, 1]."
            )
        return budget

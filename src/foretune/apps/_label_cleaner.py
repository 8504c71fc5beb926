"""`LabelCleaner`: which training labels are wrong, and what model do I get without them?"""

import warnings
from collections.abc import Sequence
from numbers import Integral
from typing import cast

import jax
import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils._param_validation import Interval
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d

from .._engines.base import AbstractEngine
from .._outer.callbacks import Callback, Progress
from . import _ensemble, _noise
from ._checks import listed, plain_labels, positions
from ._cleaner import MOST_WRONG, Cleaner, Inputs
from ._features import Rows
from ._label_model import LabelJudgement, judge, twice
from ._models import NAMES, Own, Trained, prepared

STEPS = 30
MOST_LOOKED = 100_000
"""Rows up to which the ensemble looks twice."""


class LabelCleaner(ClassifierMixin, Cleaner):
    """Finds wrong labels in a training set, with the help of a few trusted ones or without.

    Parameters
    ----------
    estimator : str, (init, apply) or a scikit-learn classifier, default="ensemble"
        What judges the labels, each row by models that have not seen it. "ensemble" (or "pool") is the
        kernel model, logistic regression, a forest and boosted trees, combined by weights that are
        learnt. "kernel" is softmax regression on the inputs and on the components of a Gaussian kernel,
        trained through a matrix of how labels go wrong, which is tuned by hypergradients; so are
        "softmax", without the kernel, "mlp", with one hidden layer, and a pair of functions
        `init(key, n_features, n_classes) -> params` and `apply(params, x) -> class scores`. Your own
        classifier takes X as it is.
    steps : int, default=30
        Steps of each training of the kernel model, or what stands in its place (T).
    hyper_steps : int or None, default=None
        Its hyper-iterations; None is 30, in the ensemble 15.
    folds : int, default=5
        An example is judged by models that were trained on the other folds.
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
        By an ensemble or a classifier of your own, with 20 trusted rows or more: of each, held out, the
        probability of its observed label, or of the most probable one where none is known, and whether
        it is right.
    history_ : list of dict
        The descent: `step`, `value`, `gradient_norm`. `stopped_` says why it ended.
    classes_, n_features_in_, feature_names_in_
        As in scikit-learn.

    `predict` and `predict_proba` are of a final model, trained without the suspects, and on the trusted
    examples.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.datasets import make_blobs
    >>> from foretune.apps import LabelCleaner
    >>> X, y = make_blobs(240, centers=3, random_state=0, cluster_std=0.8)
    >>> observed = y[:200].copy()
    >>> observed[:20] = (observed[:20] + 1) % 3  # the first 20 are wrong
    >>> cleaner = LabelCleaner("kernel", random_state=0).fit(X[:200], observed, X[200:], y[200:])
    >>> bool(cleaner.suspects_[:20].mean() > 0.8 and cleaner.suspects_[20:].mean() < 0.1)
    True
    """

    classes_: np.ndarray
    _parameter_constraints = {  # noqa: RUF012, scikit-learn's table of what is accepted
        "steps": [Interval(Integral, 1, None, closed="left")],
        "hyper_steps": [Interval(Integral, 1, None, closed="left"), None],
        "folds": [Interval(Integral, 2, None, closed="left")],
        "callbacks": [list, tuple],
        "random_state": ["random_state"],
    }

    def __init__(
        self,
        estimator: object = "ensemble",
        *,
        steps: object = STEPS,
        hyper_steps: object = None,
        folds: object = 5,
        engine: AbstractEngine | None = None,
        callbacks: Sequence[Callback] | None = (),
        progress: bool = True,
        random_state: object = None,
    ):
        self.estimator = estimator
        self.steps = steps
        self.hyper_steps = hyper_steps
        self.folds = folds
        self.engine = engine
        self.callbacks = callbacks
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
        seed = self._seed()
        folds, rng = min(cast(int, self.folds), len(inputs.observed)), np.random.default_rng(seed)
        fold = np.concatenate(
            [_noise.make_folds(part, folds, rng) for part in (inputs.observed, inputs.trusted)]
        )
        if isinstance(self.estimator, tuple) or self.estimator in NAMES:
            return self._fit_model(inputs, fold, seed)
        return self._fit_ensemble(inputs, fold, seed)

    def inputs(
        self,
        X: Rows,
        y: object,
        clean: tuple[Rows, object] = (None, None),
        checked: tuple[object, object] = (None, None),
        sample_weight: object = None,
    ) -> Inputs:
        """Return what `fit` works on, or raise where it would."""
        self._validate_params()
        if not isinstance(self.estimator, tuple):
            _ensemble.check_estimator(self.estimator, ("ensemble", "pool", *NAMES))
        elif len(self.estimator) != 2 or not all(callable(part) for part in self.estimator):
            raise ValueError(f"estimator={self.estimator!r}: give two functions, (init, apply).")

        def parsed(labels: object, name: str) -> np.ndarray:
            if name != "y":
                return positions(labels, self.classes_, name, "y")
            array = column_or_1d(plain_labels(labels, name), warn=True)
            check_classification_targets(array)
            self.classes_, observed = np.unique(array, return_inverse=True)
            if len(self.classes_) < 2:
                raise ValueError(
                    f"y has only one class, {listed(self.classes_)}: there is nothing to confuse it "
                    "with. LabelCleaner needs labels of two classes or more."
                )
            return observed

        found = self._inputs(X, y, parsed, clean, checked, sample_weight)
        absent = np.setdiff1d(np.arange(len(self.classes_)), found.trusted)
        if len(found.trusted) and len(absent):
            warnings.warn(
                f"no trusted example of {listed(self.classes_[absent])}: labels of that kind are "
                "judged by the observed ones alone.",
                stacklevel=3,
            )
        return found

    def _fit_model(self, inputs: Inputs, fold: np.ndarray, seed: int) -> "LabelCleaner":
        """Judge by a model that is trained through a matrix of label noise."""
        key, classes, n = jax.random.key(seed), len(self.classes_), len(inputs.observed)
        name = cast(str | Own, self.estimator)
        features, z, model = prepared(name, inputs.rows, seed)
        data = _noise.Data.of(z, inputs.observed, inputs.trusted, fold, inputs.weight)
        tuned = _noise.tune(model, data, classes, self._descent(STEPS, _noise.RATE), key)
        p = tuned.probabilities[:n]
        posterior = _noise.true_label(p, tuned.noise, inputs.observed)
        right = posterior[np.arange(n), inputs.observed]
        judged = LabelJudgement(
            right, posterior.argmax(1), p, tuned.noise, np.ones(1), tuned.result
        )
        use = np.zeros(len(inputs.labels), np.float32)
        rows = self._conclude(inputs, judged, ["estimator"])
        use[rows] = 1.0 if inputs.weight is None else inputs.weight[rows]
        steps = 2 * cast(int, self.steps)
        params = _noise.train_plain(model, z, inputs.labels, use, classes, steps, key, tuned.l2)
        self._final = Trained(features, model, params)
        return self

    def _fit_ensemble(self, inputs: Inputs, fold: np.ndarray, seed: int) -> "LabelCleaner":
        """Judge by out-of-fold probabilities of any classifiers."""
        labels, classes, n = inputs.labels, len(self.classes_), len(inputs.observed)
        folds = _ensemble.Folds(
            inputs.rows, labels, fold, inputs.weight, seed, self.progress, classes
        )
        folds.check(self.classes_)
        kernel: dict[str, np.ndarray] = {}
        if not self._takes_anything and len(labels) <= _ensemble.MOST_KERNEL:
            descent = self._descent(_ensemble.KERNEL_STEPS, _ensemble.KERNEL_RATE)
            trained = (inputs.observed, inputs.trusted, descent)
            kernel["kernel"] = _ensemble.kernel_probabilities(folds, *trained)

        def members(of: np.ndarray) -> _ensemble.Members:
            if self._takes_anything:
                return {"estimator": cast(BaseEstimator, self.estimator)}
            rows = inputs.rows
            return _ensemble.classifiers_of(rows, labels[of], classes, seed, inputs.native)

        def look(members: _ensemble.Members, use: np.ndarray | None = None) -> LabelJudgement:
            by_fold = [folds.predictions(name, each, use) for name, each in members.items()]
            q = np.stack([*by_fold, *kernel.values()])
            return judge(
                *(q[:, :n], inputs.observed),
                *(q[:, n:], inputs.trusted, inputs.known),
                seed=seed,
                callbacks=[Progress("weighing the labels")] if self.progress else [],
                weight=None if inputs.weight is None else inputs.weight[:n],
            )

        first = members(np.arange(len(labels)))
        judged = look(first)
        wrong = np.mean(judged.right < 0.5)
        if not self._takes_anything and n <= MOST_LOOKED and 0 < wrong <= MOST_WRONG:
            trust = np.concatenate([judged.right, np.ones(len(inputs.trusted))])
            use = _ensemble.trained_by_fold(trust, folds)
            judged = twice(judged, look(members(np.flatnonzero(use)), use), inputs.observed)
        rows = self._conclude(inputs, judged, [*first, *kernel])
        most = None if self._takes_anything else _ensemble.MOST_TRAINED
        final = cast(list[_ensemble.Classifier], folds.final(members(rows), rows, most))
        self._final = _ensemble.Classifiers(final, classes)
        return self

    def _conclude(self, inputs: Inputs, judged: LabelJudgement, names: list[str]) -> np.ndarray:
        """Set what was found, and return the rows that the final model is trained on."""
        verified = inputs.trusted[: len(inputs.verified)]
        agrees = (inputs.known[: len(verified)] == verified).astype(float)
        self._found(inputs.spread(judged.right, agrees), judged.result)
        self.ranking_ = np.argsort(-self.probability_wrong_, kind="stable")
        self.suggested_ = self.classes_[inputs.spread(judged.likely, verified)]
        one_hot = np.eye(len(self.classes_))[verified]
        self.probabilities_ = inputs.spread(judged.probabilities, one_hot)
        self.noise_matrix_ = judged.noise
        self.ensemble_ = dict(zip(names, judged.ensemble.tolist(), strict=True))
        self.reliability_ = judged.reliability
        trust = np.concatenate([judged.right, np.ones(len(inputs.trusted))])
        return _ensemble.trained_rows(trust, inputs.labels, inputs.weight)

    def _descent(self, hyper_steps: int, rate: float) -> _noise.Descent:
        """Return how the kernel model descends, by default in so many steps of this rate."""
        bar = [Progress("finding wrong labels")] if self.progress else []
        callbacks, steps = [*bar, *(self.callbacks or ())], cast(int, self.steps)
        if self.hyper_steps is not None:
            hyper_steps, rate = cast(int, self.hyper_steps), _noise.RATE
        return _noise.Descent(steps, hyper_steps, self.engine, callbacks, rate)

    def predict(self, X: Rows) -> np.ndarray:
        """Return the label of each row by the final model."""
        best = np.argmax(self.predict_proba(X), axis=1)
        return self.classes_[best]

    def predict_proba(self, X: Rows) -> np.ndarray:
        """Return the probability of each class, in the order of `classes_`."""
        check_is_fitted(self, "weights_")
        return self._final.predict_proba(self._rows(X))

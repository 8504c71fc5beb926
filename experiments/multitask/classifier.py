"""`TaskGraphClassifier`: which classes are related, and a linear model that makes use of it."""

import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy import sparse, special
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from foretune import Progress

from . import graph as graphs

FLOATS = (np.float64, np.float32)
FEWEST = {False: 2, True: 3}
"""Rows of each class that folds need, without and with early stopping."""


class TaskGraphClassifier(ClassifierMixin, BaseEstimator):
    """Linear classifier whose classes are tied by a graph, which is learnt from held-out error.

    The model minimises, by gradient descent with momentum, the sum of the cross-entropies plus

        sum_jk C_jk |w_j - w_k|^2 + rho sum_k |w_k|^2,

    and the symmetric matrix C >= 0 and rho >= 0 descend on the error of rows that the training did not
    see, by exact hypergradients. For few labelled rows and many classes.

    Parameters
    ----------
    total : float or None, default=None
        A bound on the sum of C. A small one leaves few and weak edges.
    graph : {"full", "uniform", "none"} or array (n_classes, n_classes), default="full"
        "full": one C_jk for each pair, from where "uniform" ends. "uniform": the same for all pairs.
        "none": C = 0, and a rho for each class. A symmetric non-negative matrix, in the order of the
        sorted classes: a graph that you know, of which only the strength is learnt.
    folds : int, default=5
        Folds of the labelled rows, when no validation rows are given.
    early_stopping : bool, default=True
        Choose the hyper-iteration by rows that neither the training nor the descent on C saw: the whole
        descent is repeated `folds` times without a fold, beside the one on all rows, in one program.
        Otherwise the lowest cross-validated error decides, which many C_jk over-fit. Without effect
        when validation rows are given.
    steps : int, default=100
        Steps of each training (T).
    hyper_steps : int, default=40
        Hyper-iterations; for "full" as many again, after those of "uniform".
    engine : a foretune engine or None, default=None
        How hypergradients are computed; None is `foretune.Reverse()`.
    progress : bool, default=True
        Show a progress bar when the output is a terminal.
    random_state : int, RandomState or None, default=None
        The folds follow it.

    Attributes
    ----------
    task_graph_ : array (n_classes, n_classes)
        C: symmetric, non-negative, diagonal 0. In units of the scaled rows, as is `rho_`.
    rho_ : float, or array of n_classes for graph="none"
        The strength of the plain regulariser.
    scale_ : float
        The scores' scale in `predict_proba`, tuned with the others.
    coef_, intercept_
        The model, for rows as they are given.
    history_ : list of dict
        The last descent: `step`, `value` (E, summed over the descents that early stopping adds),
        `gradient_norm`. `stopped_` says why it ended, `best_step_` which of its steps was taken: 0 for
        graph="full" means that no free graph was surely better than all pairs alike.
    classes_, n_features_in_, feature_names_in_
        As in scikit-learn.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from experiments.multitask.classifier import TaskGraphClassifier
    >>> X, y = load_digits(return_X_y=True)
    >>> model = TaskGraphClassifier(hyper_steps=5, random_state=0).fit(X[:80], y[:80])
    >>> model.task_graph_.shape
    (10, 10)
    >>> bool(model.score(X[80:], y[80:]) > 0.75)
    True
    """

    def __init__(
        self,
        total: Any = None,
        *,
        graph: Any = "full",
        folds: Any = 5,
        early_stopping: Any = True,
        steps: Any = 100,
        hyper_steps: Any = 40,
        engine: Any = None,
        progress: Any = True,
        random_state: Any = None,
    ):
        self.total = total
        self.graph = graph
        self.folds = folds
        self.early_stopping = early_stopping
        self.steps = steps
        self.hyper_steps = hyper_steps
        self.engine = engine
        self.progress = progress
        self.random_state = random_state

    def fit(self, X: Any, y: Any, X_val: Any = None, y_val: Any = None) -> "TaskGraphClassifier":
        """Learn C, rho and the model from labelled rows.

        With (X_val, y_val) the model is trained on (X, y) and C and rho descend on the validation
        error; without, on folds of (X, y). The final model is trained on all labelled rows.
        """
        X, y = self._labelled(X, y)
        counts = np.bincount(y, minlength=len(self.classes_))
        random = np.random.default_rng(check_random_state(self.random_state).randint(2**31 - 1))
        if X_val is None and y_val is None:
            self._check_counts(counts)
            nested = self.early_stopping and counts.min() >= FEWEST[True]
            plan = graphs.make_plan(y, self.folds, self.folds if nested else 0, random)
        else:
            X_val, y_val = self._validation(X_val, y_val)
            plan = graphs.single_plan(np.arange(len(y) + len(y_val)) >= len(y))
            X, y = np.concatenate([X, X_val]), np.concatenate([y, y_val])
        z, back = scaled(X)
        rows, K = graphs.Rows(z[None], y[None]), len(self.classes_)
        kind, pattern = self._kind(K)
        keep, result = graphs.tune(
            kind,
            rows,
            plan,
            pattern,
            total=self.total,
            steps=self.steps,
            hyper_steps=self.hyper_steps,
            engine=self.engine,
            callbacks=self._callbacks,
        )
        params = graphs.train(rows, keep.hparams, pattern, self.steps)
        w = np.asarray(params["w"][0, 0], np.float64)
        self.coef_ = w @ back.rotation.T / back.length
        self.intercept_ = np.asarray(params["b"][0, 0], np.float64) - self.coef_ @ back.centre
        C, rho = graphs.interactions(keep.hparams, jnp.asarray(pattern))
        self.task_graph_ = np.array(C[0, 0])
        self.rho_ = np.array(rho[0, 0]) if kind == "none" else float(rho[0, 0, 0])
        self.scale_ = float(keep.hparams["scale"][0, 0])
        self.history_, self.stopped_ = result.history, result.stopped
        self.best_step_ = int(keep.steps[0])
        if result.stopped == "interrupted":
            warnings.warn("interrupted: C and rho are of an unfinished descent.", stacklevel=2)
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Return the score of each class."""
        check_is_fitted(self, "coef_")
        X = validate_data(self, X, reset=False, accept_sparse="csr", dtype=FLOATS)
        return np.asarray(X @ self.coef_.T) + self.intercept_

    def predict(self, X: Any) -> np.ndarray:
        """Return the class of each row."""
        best = np.argmax(self.decision_function(X), axis=1)
        return self.classes_[best]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, in the order of `classes_`."""
        scores = self.decision_function(X)
        return special.softmax(self.scale_ * scores, axis=1)

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn that sparse input is taken."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _callbacks(self, phase: str) -> list[Any]:
        names = {"uniform": "all pairs alike", "full": "one C for each pair", "none": "no pairs"}
        return [Progress(names[phase])] if self.progress else []

    def _kind(self, K: int) -> tuple[str, np.ndarray]:
        """Return what is to be learnt, and the pattern of C: mean 1 over all pairs."""
        if isinstance(self.graph, str):
            return self.graph, graphs.all_pairs(K)
        A = np.asarray(self.graph, np.float64)
        if A.shape != (K, K) or (A < 0).any() or (A != A.T).any():
            raise ValueError(
                f"graph has shape {A.shape}, and y has {K} classes: give a symmetric non-negative "
                f"matrix of shape ({K}, {K})."
            )
        A = A * graphs.all_pairs(K)
        if not A.any():
            raise ValueError("graph has no edge: every entry off its diagonal is 0.")
        return "uniform", (A * (K * (K - 1) / A.sum())).astype(np.float32)

    def _labelled(self, X, y):
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=FLOATS)
        check_classification_targets(y)
        self.classes_, y = np.unique(y, return_inverse=True)
        if len(self.classes_) < 3:
            raise ValueError(
                f"y has {len(self.classes_)} classes: a graph of classes needs three or more."
            )
        return _dense(X), y

    def _validation(self, X_val, y_val):
        rows = validate_data(self, X_val, reset=False, accept_sparse="csr", dtype=FLOATS)
        if not np.array_equal(np.unique(y_val), self.classes_):
            raise ValueError("y_val must have rows of every class of y, and of no other.")
        return _dense(rows), np.searchsorted(self.classes_, y_val)

    def _check_counts(self, counts) -> None:
        if counts.min() < FEWEST[False]:
            raise ValueError(
                f"a class has only {counts.min()} row: with folds every class needs "
                f"{FEWEST[False]} rows, one to train on and one to judge by."
            )
        if self.early_stopping and counts.min() < FEWEST[True]:
            warnings.warn(
                f"a class has only {counts.min()} rows: early stopping needs {FEWEST[True]} of each, "
                "and is left out.",
                stacklevel=3,
            )


class Back:
    """How scaled rows came from the given ones: z = (x - centre) rotation / length."""

    def __init__(self, centre: np.ndarray, rotation: np.ndarray, length: float):
        self.centre, self.rotation, self.length = centre, rotation, length

    def scale(self, X: np.ndarray) -> np.ndarray:
        """Return other rows in the same way."""
        return ((X - self.centre) @ self.rotation / self.length).astype(np.float32)


def scaled(X: np.ndarray) -> tuple[np.ndarray, Back]:
    """Centre the rows, bring them to mean squared length 1, and rotate them into their own span.

    Descent from 0 never leaves the span of the rows and the regulariser does not see a rotation, so the
    model is the same, at the cost of min(rows, columns) columns.
    """
    X = X.astype(np.float64)
    centre = X.mean(axis=0)
    centred = X - centre
    length = float(np.sqrt(np.sum(centred**2) / len(X)))
    if length <= 1e-12 * max(float(np.abs(X).max()), 1e-300):
        raise ValueError("every feature of X is constant.")
    rotation = np.eye(X.shape[1])
    if X.shape[1] > X.shape[0]:
        _, _, vt = np.linalg.svd(centred, full_matrices=False)
        rotation = vt.T
    back = Back(centre, rotation, length)
    return back.scale(X), back


def _dense(X: Any) -> np.ndarray:
    return X.toarray() if sparse.issparse(X) else np.asarray(X)

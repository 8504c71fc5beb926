# ruff: noqa: E501
# fmt: off
"""The estimators of `foretune.apps`, given the wrong things."""

import numpy as np
from scipy import sparse

from .given import INF, holed

RNG = np.random.default_rng(0)
Y = np.arange(30) % 3
X = RNG.normal(size=(30, 4)) + Y[:, None]
TEXT = np.array(["a", "b", "c"])[Y]


def cleaned(X=X, y=Y, *checked, **options):
    from foretune.apps import LabelCleaner

    return LabelCleaner(**({"random_state": 0} | options)).fit(X, y, *checked)


P = np.full((30, 3), 0.2) + 0.4 * np.eye(3)[Y]


def judged(pred_probs=P, **options):
    from foretune.apps import clean_labels

    return clean_labels(Y, pred_probs, **options)


def without(y, i):
    y = y.astype(object)
    y[i] = None
    return y


ROWS = [
    ("LabelCleaner: no labels", lambda: cleaned(y=None), ValueError, "y"),
    ("LabelCleaner: too few labels", lambda: cleaned(y=Y[:5]), ValueError, "30", "5"),
    ("LabelCleaner: NaN in the rows", lambda: cleaned(holed(X)), ValueError, "NaN"),
    ("LabelCleaner: infinity in the rows", lambda: cleaned(holed(X, INF)), ValueError, "inf"),
    ("LabelCleaner: rows of text", lambda: cleaned(np.full((30, 4), "a")), ValueError, "'a'"),
    ("LabelCleaner: rows without columns", lambda: cleaned(np.zeros((30, 0))), ValueError, "0 feature"),
    ("LabelCleaner: no rows", lambda: cleaned(np.zeros((0, 4)), np.zeros(0)), ValueError, "0 sample"),
    ("LabelCleaner: a single axis", lambda: cleaned(X[:, 0]), ValueError, "2D array"),
    ("LabelCleaner: three axes", lambda: cleaned(X[:, :, None]), ValueError, "dim 3"),
    ("LabelCleaner: rows are None", lambda: cleaned(None), ValueError, "2D array"),
    ("LabelCleaner: complex rows", lambda: cleaned(X * 1j), ValueError, "Complex"),
    ("LabelCleaner: one class", lambda: cleaned(y=np.zeros(30, int)), ValueError, "class"),
    ("LabelCleaner: labels of floats", lambda: cleaned(y=X[:, 0]), ValueError, "continuous"),
    ("LabelCleaner: labels of two axes", lambda: cleaned(y=np.stack([Y, Y], 1)), ValueError, "y"),
    ("LabelCleaner: a label of NaN", lambda: cleaned(y=holed(Y.astype(float))), ValueError, "without a label"),
    ("LabelCleaner: a label of None", lambda: cleaned(y=without(Y, 4)), ValueError, "row 4"),
    ("LabelCleaner: numbers and text as labels", lambda: cleaned(y=np.array([*Y[:-1], "a"], object)), ValueError, "numbers and text"),
    ("LabelCleaner: folds 1", lambda: cleaned(folds=1), ValueError, "'folds' parameter"),
    ("LabelCleaner: folds as text", lambda: cleaned(folds="5"), ValueError, "'5'"),
    ("LabelCleaner: folds None", lambda: cleaned(folds=None), ValueError, "None"),
    ("LabelCleaner: a random state of text", lambda: cleaned(random_state="a"), ValueError, "'a'"),
    ("LabelCleaner: only rows of the second set", lambda: cleaned(X, Y, X), ValueError, "together, or neither"),
    ("LabelCleaner: only labels of the second set", lambda: cleaned(X, Y, None, Y), ValueError, "together, or neither"),
    ("LabelCleaner: columns too few in the second set", lambda: cleaned(X, Y, X[:, :2], Y), ValueError, "2 features", "X_"),
    ("LabelCleaner: NaN in the second set", lambda: cleaned(X, Y, holed(X), Y), ValueError, "NaN", "X_"),
    ("LabelCleaner: labels too few in the second set", lambda: cleaned(X, Y, X, Y[:3]), ValueError, "(3,)", "30 rows"),
    ("LabelCleaner: an unknown label in the second set", lambda: cleaned(X, Y, X, Y + 1), ValueError, "labels that y does not have: 3"),
    ("LabelCleaner: text labels in the second set", lambda: cleaned(X, Y, X, TEXT), ValueError, "does not have", "'a'"),
    ("LabelCleaner: a missing label in the second set", lambda: cleaned(X, Y, X, without(Y, 7)), ValueError, "row 7"),
    ("LabelCleaner: no row in the second set", lambda: cleaned(X, Y, X[:0], Y[:0]), ValueError, "0 sample"),
    ("LabelCleaner: predict before fit", lambda: type(cleaned())().predict(X), Exception, "not fitted"),
    ("LabelCleaner: predict of other columns", lambda: cleaned().predict(X[:, :2]), ValueError, "2 features"),
    ("LabelCleaner: predict of NaN", lambda: cleaned().predict(holed(X)), ValueError, "NaN"),
    ("LabelCleaner: an option that is none", lambda: cleaned(speed=3), TypeError, "speed"),
    ("LabelCleaner: an estimator that is none", lambda: cleaned(estimator="tree"), ValueError, "estimator='tree'"),
    ("LabelCleaner: an estimator of None", lambda: cleaned(estimator=None), ValueError, "estimator=None"),
    ("LabelCleaner: a model of one function", lambda: cleaned(estimator=(np.sum,)), ValueError, "estimator=("),
    ("LabelCleaner: a model of numbers", lambda: cleaned(estimator=(1, 2)), ValueError, "estimator=(1, 2)"),
    ("LabelCleaner: a class without checked rows", lambda: cleaned(X, Y, X[Y < 2], Y[Y < 2]), UserWarning, "no verified row of 2"),
    ("LabelCleaner: sparse rows with NaN", lambda: cleaned(sparse.csr_matrix(holed(X))), ValueError, "NaN"),
    ("clean_labels: a class twice", lambda: judged(classes=[0, 1, 1]), ValueError, "classes names a class twice"),
    ("clean_labels: no classes", lambda: judged(classes=[]), ValueError, "classes have shape (0,)"),
    ("clean_labels: classes of text", lambda: judged(classes="abc"), ValueError, "classes have shape ()"),
    ("clean_labels: classes of two axes", lambda: judged(classes=[[0, 1, 2]]), ValueError, "classes have shape (1, 3)"),
    ("clean_labels: too few classes", lambda: judged(classes=[0, 1]), ValueError, "does not have: 2"),
    ("clean_labels: a random state of text", lambda: judged(random_state="a"), ValueError, "random_state='a'"),
    ("clean_labels: a random state below 0", lambda: judged(random_state=-1), ValueError, "random_state=-1"),
    ("clean_labels: half a random state", lambda: judged(random_state=0.5), ValueError, "random_state=0.5"),
    ("clean_labels: complex probabilities", lambda: judged(P + 0j), ValueError, "a real array of shape"),
    ("clean_labels: logarithms", lambda: judged(np.log(P)), ValueError, "logarithms"),
    ("clean_labels: probabilities of NaN", lambda: judged(holed(P)), ValueError, "not finite in 1 rows"),
    ("clean_labels: words for probabilities", lambda: judged(np.full((30, 3), "a")), ValueError, "must be numbers"),
    ("clean_labels: too few columns", lambda: judged(P[:, :2]), ValueError, "(30, 2)"),
    ("clean_labels: no predictions", lambda: judged([]), ValueError, "pred_probs"),
    ("clean_labels: a row checked twice", lambda: judged(checked=[1, 1], checked_labels=[0, 0]), ValueError, "twice"),
    ("clean_labels: rows without their labels", lambda: judged(checked=[1]), ValueError, "together, or neither"),
]

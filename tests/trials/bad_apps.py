# ruff: noqa: E501
# fmt: off
"""The estimators of `foretune.apps`, given the wrong things."""

import functools

import numpy as np
from scipy import sparse

from .given import INF, NAN, holed

RNG = np.random.default_rng(0)
Y = np.arange(30) % 3
X = RNG.normal(size=(30, 4)) + Y[:, None]
TEXT = np.array(["a", "b", "c"])[Y]


def cleaned(X=X, y=Y, *checked, **options):
    from foretune.apps import LabelCleaner

    usual = {"model": "softmax", "steps": 2, "hyper_steps": 1, "random_state": 0}
    return LabelCleaner(**(usual | options)).fit(X, y, *checked)


def graph(X=X, y=Y, *validation, **options):
    from foretune.apps import TaskGraphClassifier

    usual = {"steps": 2, "hyper_steps": 1, "random_state": 0, "early_stopping": False, "folds": 2}
    return TaskGraphClassifier(**(usual | options)).fit(X, y, *validation)


def both(name, change, error, *words):
    """A row for each of the two estimators."""
    return [
        (f"LabelCleaner: {name}", functools.partial(change, cleaned), error, *words),
        (f"TaskGraphClassifier: {name}", functools.partial(change, graph), error, *words),
    ]


def without(y, i):
    y = y.astype(object)
    y[i] = None
    return y


ROWS = [
    *both("no labels", lambda fit: fit(y=None), ValueError, "y"),
    *both("too few labels", lambda fit: fit(y=Y[:5]), ValueError, "30", "5"),
    *both("NaN in the rows", lambda fit: fit(holed(X)), ValueError, "NaN"),
    *both("infinity in the rows", lambda fit: fit(holed(X, INF)), ValueError, "inf"),
    *both("rows of text", lambda fit: fit(np.full((30, 4), "a")), ValueError, "'a'"),
    *both("rows without columns", lambda fit: fit(np.zeros((30, 0))), ValueError, "0 feature"),
    *both("no rows", lambda fit: fit(np.zeros((0, 4)), np.zeros(0)), ValueError, "0 sample"),
    *both("a single axis", lambda fit: fit(X[:, 0]), ValueError, "2D array"),
    *both("three axes", lambda fit: fit(X[:, :, None]), ValueError, "dim 3"),
    *both("rows are None", lambda fit: fit(None), ValueError, "2D array"),
    *both("complex rows", lambda fit: fit(X * 1j), ValueError, "Complex"),
    *both("one class", lambda fit: fit(y=np.zeros(30, int)), ValueError, "class"),
    *both("labels of floats", lambda fit: fit(y=X[:, 0]), ValueError, "continuous"),
    *both("labels of two axes", lambda fit: fit(y=np.stack([Y, Y], 1)), ValueError, "y"),
    *both("a label of NaN", lambda fit: fit(y=holed(Y.astype(float))), ValueError, "NaN"),
    *both("a label of None", lambda fit: fit(y=without(Y, 4)), ValueError, "row 4"),
    *both("numbers and text as labels", lambda fit: fit(y=np.array([*Y[:-1], "a"], object)), ValueError, "numbers and text"),
    *both("steps 0", lambda fit: fit(steps=0), ValueError, "steps=0"),
    *both("steps 1.5", lambda fit: fit(steps=1.5), ValueError, "steps=1.5"),
    *both("steps as text", lambda fit: fit(steps="2"), ValueError, "steps='2'"),
    *both("steps NaN", lambda fit: fit(steps=NAN), ValueError, "steps=nan"),
    *both("hyper_steps 0", lambda fit: fit(hyper_steps=0), ValueError, "hyper_steps=0"),
    *both("hyper_steps as a list", lambda fit: fit(hyper_steps=[3]), ValueError, "hyper_steps=[3]"),
    *both("folds 1", lambda fit: fit(folds=1), ValueError, "folds=1"),
    *both("folds as text", lambda fit: fit(folds="5"), ValueError, "folds='5'"),
    *both("folds None", lambda fit: fit(folds=None), ValueError, "folds=None"),
    *both("an engine of text", lambda fit: fit(engine="reverse"), TypeError, "engine must be an engine"),
    *both("a random state of text", lambda fit: fit(random_state="a"), ValueError, "'a'"),
    *both("only rows of the second set", lambda fit: fit(X, Y, X), ValueError, "together, or neither"),
    *both("only labels of the second set", lambda fit: fit(X, Y, None, Y), ValueError, "together, or neither"),
    *both("columns too few in the second set", lambda fit: fit(X, Y, X[:, :2], Y), ValueError, "2 features", "X_"),
    *both("NaN in the second set", lambda fit: fit(X, Y, holed(X), Y), ValueError, "NaN", "X_"),
    *both("labels too few in the second set", lambda fit: fit(X, Y, X, Y[:3]), ValueError, "(3,)", "30 rows"),
    *both("an unknown label in the second set", lambda fit: fit(X, Y, X, Y + 1), ValueError, "labels that y does not have: 3"),
    *both("text labels in the second set", lambda fit: fit(X, Y, X, TEXT), ValueError, "does not have", "'a'"),
    *both("a missing label in the second set", lambda fit: fit(X, Y, X, without(Y, 7)), ValueError, "row 7"),
    *both("no row in the second set", lambda fit: fit(X, Y, X[:0], Y[:0]), ValueError, "0 sample"),
    *both("predict before fit", lambda fit: type(fit())().predict(X), Exception, "not fitted"),
    *both("predict of other columns", lambda fit: fit().predict(X[:, :2]), ValueError, "2 features"),
    *both("predict of NaN", lambda fit: fit().predict(holed(X)), ValueError, "NaN"),
    *both("an option that is none", lambda fit: fit(speed=3), TypeError, "speed"),
    ("LabelCleaner: a model that is none", lambda: cleaned(model="forest"), ValueError, "model='forest'"),
    ("LabelCleaner: a model of None", lambda: cleaned(model=None), ValueError, "model=None"),
    ("LabelCleaner: a model of one function", lambda: cleaned(model=(np.sum,)), ValueError, "model"),
    ("LabelCleaner: a model of numbers", lambda: cleaned(model=(1, 2)), ValueError, "model=(1, 2)"),
    ("LabelCleaner: a method that is none", lambda: cleaned(method="magic"), ValueError, "method='magic'"),
    ("LabelCleaner: a method of None", lambda: cleaned(method=None), ValueError, "method=None"),
    ("LabelCleaner: weights without checked rows", lambda: cleaned(method="weights"), ValueError, "needs checked examples"),
    ("LabelCleaner: a budget of 0", lambda: cleaned(budget=0), ValueError, "budget=0"),
    ("LabelCleaner: a budget above all", lambda: cleaned(budget=31), ValueError, "budget=31", "(0, 30]"),
    ("LabelCleaner: a budget of NaN", lambda: cleaned(budget=NAN), ValueError, "budget=nan"),
    ("LabelCleaner: a budget of text", lambda: cleaned(budget="half"), ValueError, "budget='half'"),
    ("LabelCleaner: a budget of True", lambda: cleaned(budget=True), ValueError, "budget=True"),
    ("LabelCleaner: callbacks of None", lambda: cleaned(callbacks=None), TypeError, "callbacks"),
    ("LabelCleaner: a callback that is none", lambda: cleaned(callbacks=[print]), TypeError, "callbacks must be a list"),
    ("LabelCleaner: too few checked rows", lambda: cleaned(X, Y, X[:2], Y[:2]), ValueError, "2 checked examples for 3 classes"),
    ("LabelCleaner: a class without checked rows", lambda: cleaned(X, Y, X[Y < 2], Y[Y < 2]), UserWarning, "no checked example of 2"),
    ("LabelCleaner: sparse rows with NaN", lambda: cleaned(sparse.csr_matrix(holed(X))), ValueError, "NaN"),
    ("TaskGraphClassifier: two classes", lambda: graph(y=Y % 2), ValueError, "three or more"),
    ("TaskGraphClassifier: one row of a class", lambda: graph(y=np.r_[Y[:-1], 9]), ValueError, "only one row of 9"),
    ("TaskGraphClassifier: two rows of a class", lambda: graph(y=np.r_[Y[:-2], 9, 9], early_stopping=True), UserWarning, "early stopping needs 3"),
    ("TaskGraphClassifier: rows all alike", lambda: graph(np.ones((30, 4))), ValueError, "rows of X are the same"),
    ("TaskGraphClassifier: a graph that is none", lambda: graph(graph="tree"), ValueError, "graph='tree'"),
    ("TaskGraphClassifier: a graph of None", lambda: graph(graph=None), ValueError, "graph=None"),
    ("TaskGraphClassifier: a graph of another shape", lambda: graph(graph=np.ones((2, 2))), ValueError, "(2, 2)", "(3, 3)"),
    ("TaskGraphClassifier: a graph of NaN", lambda: graph(graph=np.full((3, 3), NAN)), ValueError, "not finite at (0, 0)"),
    ("TaskGraphClassifier: a negative graph", lambda: graph(graph=-np.ones((3, 3))), ValueError, "negative at (0, 0)"),
    ("TaskGraphClassifier: a graph that is not symmetric", lambda: graph(graph=np.arange(9.0).reshape(3, 3)), ValueError, "not symmetric at (0, 1)"),
    ("TaskGraphClassifier: a graph without edges", lambda: graph(graph=np.eye(3)), ValueError, "no edge"),
    ("TaskGraphClassifier: a graph of text", lambda: graph(graph=[["a"] * 3] * 3), ValueError, "matrix of numbers"),
    ("TaskGraphClassifier: a graph of a number", lambda: graph(graph=3.0), ValueError, "shape ()"),
    ("TaskGraphClassifier: a total of 0", lambda: graph(total=0), ValueError, "total=0"),
    ("TaskGraphClassifier: a total of NaN", lambda: graph(total=NAN), ValueError, "total=nan"),
    ("TaskGraphClassifier: an infinite total", lambda: graph(total=INF), ValueError, "total=inf"),
    ("TaskGraphClassifier: a total of text", lambda: graph(total="1"), ValueError, "total='1'"),
    ("TaskGraphClassifier: a total without a graph", lambda: graph(total=1.0, graph="none"), ValueError, "graph='full'"),
    ("TaskGraphClassifier: a class without validation rows", lambda: graph(X, Y, X[Y < 2], Y[Y < 2]), ValueError, "no row of the classes 2"),
]

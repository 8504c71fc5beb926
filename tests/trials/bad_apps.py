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


def cleaned(X=X, y=Y, *clean, **options):
    from foretune.apps import LabelCleaner

    verified = {name: options.pop(name) for name in ("checked", "checked_labels") if name in options}
    return LabelCleaner(**({"random_state": 0} | options)).fit(X, y, *clean, **verified)


P = np.full((30, 3), 0.2) + 0.4 * np.eye(3)[Y]


def judged(pred_probs=P, labels=Y, **options):
    from foretune.apps import clean_labels

    return clean_labels(labels, pred_probs, **options)


def without(y, i):
    y = y.astype(object)
    y[i] = None
    return y


def objects(kind):
    """Return the labels as objects of a type."""
    y = np.empty(30, object)
    y[:] = [kind(int(label)) for label in Y]
    return y


class Plain:
    def __init__(self, value):
        self.value = value


class Unhashable(Plain):
    __hash__ = None

    def __eq__(self, other):
        return self.value == other.value


class Compared(Plain):
    """As an array compares, with no truth value."""

    __hash__ = object.__hash__

    def __ne__(self, other):
        return np.array([True, False])


def frame(**columns):
    import pandas as pd

    return pd.DataFrame(X, columns=list("wxyz")).assign(**({"t": "a"} | columns))


ODD = {
    "objects": objects(Plain), "objects without a hash": objects(Unhashable), "objects like arrays": objects(Compared),
    "lists": objects(lambda i: [i]), "sets": objects(lambda i: {i}), "dicts": objects(lambda i: {i: 1}),
    "tuples": objects(lambda i: (i, i)), "arrays": objects(np.arange), "functions": objects(lambda i: len),
}  # fmt: skip
MASKED = np.ma.array(Y, mask=np.arange(30) == 4)
ROWS = [
    *((f"LabelCleaner: {name} as labels", lambda y=y: cleaned(y=y), ValueError, "y has", "in row 0: give numbers or text") for name, y in ODD.items()),
    *((f"clean_labels: {name} as labels", lambda y=y: judged(labels=y), ValueError, "labels has", "in row 0: give numbers or text") for name, y in ODD.items()),
    ("clean_labels: lists of several lengths as labels", lambda: judged(labels=[[0]] * 15 + [[0, 1]] * 15), ValueError, "lists among its labels"),
    ("clean_labels: bytes beside text as labels", lambda: judged(labels=np.array([b"a", "b", "c"], object)[Y]), ValueError, "bytes and text"),
    ("clean_labels: a label that is masked", lambda: judged(labels=MASKED), ValueError, "without a label", "row 4"),
    ("LabelCleaner: a label that is masked", lambda: cleaned(y=MASKED), ValueError, "without a label", "row 4"),
    ("LabelCleaner: masked rows", lambda: cleaned(np.ma.masked_less(X, 0)), ValueError, "X has masked entries"),
    ("clean_labels: masked probabilities", lambda: judged(np.ma.masked_greater(P, 0.5)), ValueError, "pred_probs has masked entries"),
    ("LabelCleaner: masked numbers of checked rows", lambda: cleaned(checked=np.ma.array([1, 2], mask=[0, 1]), checked_labels=[0, 1]), ValueError, "checked has masked entries"),
    ("LabelCleaner: checked rows that are halves", lambda: cleaned(checked=[1.5], checked_labels=[0]), ValueError, "row numbers, or a mask"),
    ("LabelCleaner: checked rows below 0", lambda: cleaned(checked=[-1], checked_labels=[0]), ValueError, "count from 0"),
    ("LabelCleaner: checked rows that are not there", lambda: cleaned(checked=[30], checked_labels=[0]), ValueError, "from 30 to 30"),
    ("LabelCleaner: a set of checked rows", lambda: cleaned(checked={1, 2}, checked_labels=[0, 1]), ValueError, "row numbers, or a mask"),
    ("LabelCleaner: a slice of checked rows", lambda: cleaned(checked=slice(3), checked_labels=[0, 1, 2]), ValueError, "row numbers, or a mask"),
    ("LabelCleaner: a mask too short", lambda: cleaned(checked=[True] * 5, checked_labels=[0] * 5), ValueError, "a mask of shape (5,) for 30 rows"),
    ("LabelCleaner: all labels for a mask of few", lambda: cleaned(checked=[True] * 5 + [False] * 25, checked_labels=Y), ValueError, "5 rows are checked", "(30,)"),
    ("LabelCleaner: all rows checked", lambda: cleaned(checked=range(30), checked_labels=Y), ValueError, "nothing left to judge"),
    ("LabelCleaner: labels without checked rows", lambda: cleaned(checked_labels=[0]), ValueError, "together, or neither"),
    ("LabelCleaner: one label for a checked row", lambda: cleaned(checked=[1], checked_labels=0), ValueError, "1 rows are checked", "()"),
    ("LabelCleaner: lists as checked labels", lambda: cleaned(checked=[1, 2], checked_labels=[[1], [1, 2]]), ValueError, "checked_labels has lists"),
    ("LabelCleaner: an unknown checked label", lambda: cleaned(checked=[1], checked_labels=[9]), ValueError, "checked_labels has labels that y does not have: 9"),
    ("LabelCleaner: a missing checked label", lambda: cleaned(checked=[1], checked_labels=[None]), ValueError, "checked_labels has 1 rows without a label"),
    ("LabelCleaner: two columns of one name", lambda: cleaned(frame().set_axis(list("aabcd"), axis=1)), ValueError, "'a', 'a'", "one name of its own"),
    ("LabelCleaner: columns of lists", lambda: cleaned(frame(t=[[1]] * 30)), ValueError, "X['t'] has [1]"),
    ("LabelCleaner: a column too few in the second set", lambda: cleaned(frame(), Y, frame()[list("wxyz")][:9], Y[:9]), ValueError, "X_clean: ", "in one only: 't'"),
    ("LabelCleaner: a column too many in the second set", lambda: cleaned(frame(), Y, frame(u="b")[:9], Y[:9]), ValueError, "X_clean: ", "in one only: 'u'"),
    ("LabelCleaner: an array beside a data frame", lambda: cleaned(frame(), Y, X[:9], Y[:9]), ValueError, "X_clean: give a data frame"),
    ("LabelCleaner: one name for columns of text", lambda: cleaned(frame(), text="t"), ValueError, "text='t'", "a list"),
    ("LabelCleaner: no columns of text, said as None", lambda: cleaned(frame(), text=None), ValueError, "text=None"),
    ("LabelCleaner: columns of text of an array", lambda: cleaned(text=["t"]), ValueError, "text=['t'] names columns", "data frame"),
    ("LabelCleaner: a column of text that is none", lambda: cleaned(frame(), text=["q"]), ValueError, "there is no column 'q'"),
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
    ("LabelCleaner: sparse rows with NaN", lambda: cleaned(sparse.csr_matrix(holed(X))), ValueError, "NaN"),
    ("clean_labels: a class twice", lambda: judged(classes=[0, 1, 1]), ValueError, "classes names a class twice"),
    ("clean_labels: no classes", lambda: judged(classes=[]), ValueError, "classes have shape (0,)"),
    ("clean_labels: classes of text", lambda: judged(classes="abc"), ValueError, "classes have shape ()"),
    ("clean_labels: classes of two axes", lambda: judged(classes=[[0, 1, 2]]), ValueError, "classes have shape (1, 3)"),
    ("clean_labels: too few classes", lambda: judged(classes=[0, 1]), ValueError, "does not have: 2"),
    ("clean_labels: a random state of text", lambda: judged(random_state="a"), ValueError, "random_state='a'"),
    ("clean_labels: a random state below 0", lambda: judged(random_state=-1), ValueError, "random_state=-1"),
    ("clean_labels: half a random state", lambda: judged(random_state=0.5), ValueError, "random_state=0.5"),
    ("clean_labels: complex probabilities", lambda: judged(P + 0j), ValueError, "a real array (rows, classes)"),
    ("clean_labels: logarithms", lambda: judged(np.log(P)), ValueError, "logarithms"),
    ("clean_labels: probabilities of NaN", lambda: judged(holed(P)), ValueError, "not finite in 1 rows"),
    ("clean_labels: words for probabilities", lambda: judged(np.full((30, 3), "a")), ValueError, "must be numbers"),
    ("clean_labels: too few columns", lambda: judged(P[:, :2]), ValueError, "(30, 2)"),
    ("clean_labels: no predictions", lambda: judged([]), ValueError, "pred_probs"),
    ("clean_labels: a row checked twice", lambda: judged(checked=[1, 1], checked_labels=[0, 0]), ValueError, "twice"),
    ("clean_labels: rows without their labels", lambda: judged(checked=[1]), ValueError, "together, or neither"),
]

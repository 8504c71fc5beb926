"""`clean_labels`: which labels are wrong, from predictions that you have already."""

import warnings
from typing import Any, NamedTuple

import numpy as np

from .._outer.callbacks import Progress
from ._labels import listed, plain_labels
from ._posterior import judge

OFF_BY = 1e-2
"""Rows of probabilities may sum to 1 with this error, as half precision has it."""


class CleanedLabels(NamedTuple):
    """What `clean_labels` returns: the names are those of a fitted `LabelCleaner`."""

    weights_: np.ndarray
    """The probability that each label is right; 0 or 1 for checked ones."""
    suspects_: np.ndarray
    """The labels held to be wrong: a weight below 1/2."""
    ranking_: np.ndarray
    """Row numbers, the most suspicious first."""
    suggested_: np.ndarray
    """The most probable label; the checked one where there is one."""
    confidence_: np.ndarray
    """1 - weight."""
    noise_matrix_: np.ndarray
    """p(given label | true label) as learnt."""
    noise_rate_: float
    """The mean confidence: the share of labels that are wrong, by these probabilities."""
    pool_: dict[str, float]
    """The weight of each set of predictions."""
    classes_: np.ndarray
    """The classes, in the order of the columns."""
    history_: list[Any]
    """The descent of the regularisers, empty where there were too few checked rows for one."""
    stopped_: str
    """Why it ended."""
    reliability_: np.ndarray | None
    """A row for each checked row, judged without it: the probability that its given label is right, and
    1 where it is, else 0; None where there were fewer than 20."""

    @property
    def unflagged_(self) -> float:
        """How many wrong labels are expected among those that are not suspects."""
        return float(self.confidence_[~self.suspects_].sum())

    def __repr__(self) -> str:
        return (
            f"CleanedLabels: {self.suspects_.sum():,} of {len(self.suspects_):,} labels are suspects, "
            f"{self.unflagged_:.3g} more are expected to be wrong"
        )


def clean_labels(
    labels: Any,
    pred_probs: Any,
    checked: Any = None,
    checked_labels: Any = None,
    *,
    classes: Any = None,
    progress: bool = True,
    random_state: int = 0,
) -> CleanedLabels:
    """Find the wrong labels, given class probabilities by a model that has not seen them.

    Parameters
    ----------
    labels : array of n
        The given labels, of any type.
    pred_probs : array (n, classes), or a dict or list of them
        Out-of-fold probabilities: each row by a model that was trained without it. The columns are the
        classes in sorted order, unless `classes` says otherwise, or a data frame whose columns have
        the names of the classes. Several models are pooled, by weights that are learnt.
    checked : int array or bool array of n, or None
        Rows whose label has been verified, by number or as a mask. They teach how the predictions err:
        a regularised correction, its regularisers tuned by hypergradients on checked rows held out, so
        that a few of them do no harm.
    checked_labels : array
        Their right labels.
    classes : array, default=None
        The classes in the order of the columns, where some class has no label at all.
    progress : bool, default=True
        Show a progress bar when the output is a terminal.
    random_state : int, default=0
        The folds of checked rows follow it.

    Returns
    -------
    CleanedLabels

    Examples
    --------
    >>> import numpy as np
    >>> from foretune.apps import clean_labels
    >>> rng = np.random.default_rng(0)
    >>> true = rng.integers(0, 3, 300)
    >>> p = 0.1 + 0.7 * np.eye(3)[true]  # a good model's predictions
    >>> given = true.copy()
    >>> given[:30] = (given[:30] + 1) % 3
    >>> found = clean_labels(given, p)
    >>> int(found.suspects_[:30].sum()), int(found.suspects_.sum())
    (30, 30)
    """
    y = np.asarray(plain_labels(labels, "labels"))
    if y.ndim != 1 or not len(y):
        raise ValueError(f"labels have shape {y.shape}: give one label for each row.")
    absent = np.flatnonzero(y != y)  # NaN
    if len(absent):
        raise ValueError(
            f"labels has {len(absent)} rows without a label, the first is row {absent[0]}: give it "
            "one, or leave the row out."
        )
    names = np.unique(y) if classes is None else np.asarray(plain_labels(classes, "classes"))
    unknown = sorted(set(y.tolist()) - set(names.tolist()))
    if unknown:
        raise ValueError(f"labels has {listed(unknown)}, which classes={listed(names)} lacks.")
    if len(names) < 2:
        raise ValueError(f"labels has only one class, {listed(names)}: nothing to confuse it with.")
    position = {name: i for i, name in enumerate(names.tolist())}
    given = np.array([position[label] for label in y.tolist()])
    q = {
        name: _probabilities(name, array, len(y), names, given)
        for name, array in by_name(pred_probs, "pred_probs", 2).items()
    }
    rows, right = _checked(checked, checked_labels, len(y), position)
    if len(rows) == len(y):
        raise ValueError("every row is checked: there is nothing left to judge.")
    rest = np.setdiff1d(np.arange(len(y)), rows)
    stack = np.stack(list(q.values()))
    found = judge(
        stack[:, rest],
        given[rest],
        stack[:, rows],
        right,
        given[rows],
        seed=random_state,
        callbacks=[Progress("weighing the labels")] if progress else (),
    )
    weights, likely = np.empty(len(y)), np.empty(len(y), int)
    weights[rest], likely[rest] = found.right, found.likely
    weights[rows], likely[rows] = given[rows] == right, right
    return CleanedLabels(
        weights,
        weights < 0.5,
        np.argsort(weights, kind="stable"),
        names[likely],
        1 - weights,
        found.noise,
        float(np.mean(1 - weights)),
        dict(zip(q, found.pool.tolist(), strict=True)),
        names,
        [] if found.result is None else found.result.history,
        "no descent" if found.result is None else found.result.stopped,
        found.claims,
    )


def by_name(given: Any, what: str, axes: int) -> dict[str, Any]:
    """Return one array, or a dict or list of them, each of so many axes, by the names of errors."""
    if isinstance(given, dict):
        named = {f"{what}[{name!r}]": array for name, array in given.items()}
    elif isinstance(given, list | tuple) and all(np.ndim(array) == axes for array in given):
        named = {f"{what}[{i}]": array for i, array in enumerate(given)}
    else:
        named = {what: given}
    if not named:
        shape = "(rows, classes)" if axes == 2 else "(rows,)"
        raise ValueError(f"{what} is empty: give an array of shape {shape}.")
    return named


def _probabilities(
    name: str, array: Any, n: int, classes: np.ndarray, given: np.ndarray
) -> np.ndarray:
    array = _in_order(name, array, classes)
    try:
        p = np.asarray(array, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be numbers, an array of shape (rows, classes).") from None
    K = len(classes)
    if p.ndim != 2 or p.shape[0] != n:
        raise ValueError(f"{name} has shape {p.shape}: {n} labels need shape ({n}, {K}).")
    if p.shape[1] != K:
        raise ValueError(
            f"{name} has {p.shape[1]} columns, and the labels have {K} classes, {listed(classes)}: "
            "give a column for each class. Where a class has no label, name all by `classes=`."
        )
    bad = np.flatnonzero(~np.isfinite(p).all(axis=1))
    if len(bad):
        raise ValueError(f"{name} is not finite in {len(bad)} rows, the first is row {bad[0]}.")
    if p.max() <= 0:
        raise ValueError(f"{name} has no positive entry: logarithms? Give their exponential.")
    if p.min() < 0 or p.max() > 1 + OFF_BY:
        row = int(np.argwhere((p < 0) | (p > 1 + OFF_BY))[0, 0])
        remedy = (
            "give their softmax" if p.min() < 0 else "divide each row by its sum, or give a softmax"
        )
        raise ValueError(
            f"{name} has entries outside of [0, 1], the first in row {row}: scores are not "
            f"probabilities; {remedy}."
        )
    sums = p.sum(axis=1)
    off = np.flatnonzero(np.abs(sums - 1) > OFF_BY)
    if len(off):
        raise ValueError(
            f"{name} has {len(off)} rows that do not sum to 1, the first is row {off[0]} with "
            f"{sums[off[0]]:.4g}. Give each row's probability of every class; where they were rounded, "
            "divide each row by its sum."
        )
    if n >= 50 and np.mean(p.argmax(1) == given) > 0.999:
        warnings.warn(
            f"{name} agrees with nearly every given label: predictions do where the model was trained "
            "on these very rows, and no wrong label is found then. Give out-of-fold predictions: "
            "`cross_val_predict(model, X, y, method='predict_proba')`. If they are, all labels may be "
            "right.",
            stacklevel=4,
        )
    return p / sums[:, None]


def _in_order(name: str, array: Any, classes: np.ndarray) -> Any:
    """Return a data frame whose columns have the names of classes with these in order."""
    columns = [str(column) for column in getattr(array, "columns", ())]
    wanted = [str(label) for label in classes.tolist()]
    if not set(columns) & set(wanted) or columns == [str(i) for i in range(len(columns))]:
        return array  # they have other names, or numbers: by position
    if set(columns) != set(wanted) or len(columns) != len(wanted):
        raise ValueError(
            f"{name} has the columns {listed(columns)}, and the labels have the classes "
            f"{listed(wanted)}: give a column of that name for each class, and no other."
        )
    return array.iloc[:, [columns.index(label) for label in wanted]]


def _checked(
    checked: Any, labels: Any, n: int, position: dict[Any, int]
) -> tuple[np.ndarray, np.ndarray]:
    rows = checked_rows(checked, labels, n, "checked_labels")
    if checked is None:
        return rows, np.zeros(0, int)
    right = np.asarray(plain_labels(labels, "checked_labels"))
    if right.shape != rows.shape:
        raise ValueError(f"{len(rows)} rows are checked, and checked_labels has {right.shape}.")
    unknown = sorted(set(right.tolist()) - set(position))
    if unknown:
        raise ValueError(
            f"checked_labels has {listed(unknown)}; the classes are {listed(list(position))}."
        )
    return rows, np.array([position[label] for label in right.tolist()], int)


def checked_rows(checked: Any, labels: Any, n: int, name: str) -> np.ndarray:
    """Return the numbers of the checked rows, given by number or as a mask."""
    if (checked is None) != (labels is None):
        raise ValueError(f"give checked and {name} together, or neither.")
    if checked is None:
        return np.zeros(0, int)
    rows = np.asarray(checked)
    if rows.dtype == bool:
        if rows.shape != (n,):
            raise ValueError(f"checked is a mask of shape {rows.shape} for {n} rows.")
        rows = np.flatnonzero(rows)
    if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
        raise ValueError("checked must be row numbers, or a mask of all rows.")
    rows = rows.astype(int)
    if len(rows) and (rows.min() < 0 or rows.max() >= n):
        raise ValueError(
            f"checked has rows from {rows.min()} to {rows.max()}; there are {n}, which count from 0."
        )
    if len(np.unique(rows)) < len(rows):
        raise ValueError("checked names a row twice.")
    return rows

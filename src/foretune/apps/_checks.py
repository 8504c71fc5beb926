"""Labels and predictions as users have them -> arrays, or an error that says what to mend."""

import warnings
from collections.abc import Mapping, Sequence
from datetime import date
from numbers import Number
from typing import Any

import numpy as np
from scipy import sparse

PLAIN = (str, bytes, Number, np.generic, date)
OFF_BY = 1e-2
"""Rows of probabilities may sum to 1 with this error, as half precision has it."""


def plain_labels(labels: Any, name: str) -> np.ndarray:
    """Return labels of any type as an array of numbers or strings, or raise where one is missing."""
    if sparse.issparse(labels):
        raise ValueError(f"{name} is a sparse matrix: give one label for each row.")
    try:
        array, mask = np.asarray(labels), np.ma.getmask(labels)
    except ValueError:  # lists of several lengths
        raise ValueError(f"{name} has lists among its labels: give one for each row.") from None
    if array.ndim != 1:
        return array
    missing = np.flatnonzero(np.array([_is_missing(label) for label in array], bool) | mask)
    if len(missing):
        raise ValueError(
            f"{name} has {len(missing)} rows without a label, the first is row {missing[0]}: give it "
            "one, or leave the row out."
        )
    if array.dtype != object:
        return array
    kinds = {_kind(label): i for i, label in reversed([*enumerate(array)])}
    for i in (i for i in kinds.values() if not isinstance(array[i], PLAIN)):
        raise ValueError(f"{name} has {array[i]!r:.80} in row {i}: give numbers or text.")
    if len(kinds) > 1:  # as one array the number 1 and the text "1" would be one label
        (a, i), (b, j), *_ = sorted(kinds.items())
        raise ValueError(
            f"{name} has {a} and {b}, {array[i]!r} in row {i} and {array[j]!r} in row {j}: give labels "
            "of one type."
        )
    return np.asarray(array.tolist())


def _is_missing(label: object) -> bool:
    """None, NaN, and pandas's NA, whose comparisons have no truth value."""
    if not isinstance(label, PLAIN):
        return label is None or type(label).__name__ == "NAType"
    return bool(label != label)


def _kind(label: object) -> str:
    names = {"text": str, "numbers": Number | np.number | np.bool_}
    return next((k for k, kind in names.items() if isinstance(label, kind)), type(label).__name__)


def check_unmasked(given: object, name: str) -> None:
    """Raise where a masked array has masked entries: their numbers would be taken."""
    if np.ma.is_masked(given):
        raise ValueError(f"{name} has masked entries: fill them in, or leave those rows out.")


def positions(labels: object, classes: np.ndarray, name: str, of: str) -> np.ndarray:
    """Return the position of each label in `classes`, which are those of the argument `of`."""
    array = plain_labels(labels, name)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}: give one label for each row.")
    position = {label: i for i, label in enumerate(classes.tolist())}
    unknown = sorted(set(array.tolist()) - set(position), key=str)
    if unknown:
        raise ValueError(
            f"{name} has labels that {of} does not have: {listed(unknown)}; {of} has "
            f"{listed(classes)}. Leave those rows out, or mend the labels' spelling or type."
        )
    return np.array([position[label] for label in array.tolist()], int)


def listed(names: Sequence[object] | np.ndarray) -> str:
    """Return some labels, in words."""
    shown = ", ".join(map(repr, np.asarray(names, object)[:8].tolist()))
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def by_name(given: object, what: str) -> dict[str, object]:
    """Return one matrix, or a dict or list of matrices, by their names in errors."""
    if isinstance(given, Mapping):
        named = {f"{what}[{name!r}]": array for name, array in given.items()}
    elif isinstance(given, list | tuple) and all(np.ndim(array) == 2 for array in given):
        named = {f"{what}[{i}]": array for i, array in enumerate(given)}
    else:
        named = {what: given}
    if not named:
        raise ValueError(f"{what} is empty: give one array or more.")
    return named


def numbers_of_rows(labels: Any, X: Any) -> np.ndarray:
    """Return the numbers of a data frame's rows by their labels, an index."""
    if labels.dtype == bool:
        return labels.to_numpy()  # a mask
    if not X.index.is_unique:
        raise ValueError("the index of X has a row twice: give checked as row numbers.")
    unknown = labels[~labels.isin(X.index)].tolist()
    if len(unknown):
        raise ValueError(f"checked has the row {unknown[0]!r:.80}, which is not in the index of X.")
    return X.index.get_indexer(labels)


def verified_rows(checked: object, answers: object, n: int) -> np.ndarray:
    """Return the numbers of the verified rows, given by number or as a mask."""
    if (checked is None) != (answers is None):
        raise ValueError("give checked and checked_labels together, or neither.")
    check_unmasked(checked, "checked")
    rows = np.zeros(0, int) if checked is None else np.asarray(checked)
    if rows.dtype == bool:
        if rows.shape != (n,):
            raise ValueError(f"checked is a mask of shape {rows.shape} for {n} rows.")
        rows = np.flatnonzero(rows)
    if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
        raise ValueError("checked must be row numbers, or a mask of all rows.")
    if len(rows) and (rows.min() < 0 or rows.max() >= n):
        raise ValueError(
            f"checked has rows from {rows.min()} to {rows.max()}; there are {n}, which count from 0."
        )
    if len(np.unique(rows)) < len(rows):
        raise ValueError("checked names a row twice.")
    if len(rows) == n:
        raise ValueError("every row is checked: there is nothing left to judge.")
    shape = plain_labels(answers, "checked_labels").shape
    if answers is not None and shape[:1] != rows.shape:
        raise ValueError(f"{len(rows)} rows are checked, and checked_labels has {shape}.")
    return rows.astype(int)


def probabilities(
    name: str, array: object, classes: np.ndarray, observed: np.ndarray
) -> np.ndarray:
    """Return out-of-fold probabilities (rows, classes) in the order of the classes, or raise."""
    check_unmasked(array, name)
    array = _in_order(name, array, classes)
    try:
        given = np.asarray(array)
        if np.iscomplexobj(given):
            raise TypeError
        p = given.astype(np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be numbers, a real array (rows, classes).") from None
    n, K = len(observed), len(classes)
    if p.shape != (n, K):
        raise ValueError(
            f"{name} has shape {p.shape}: {n} labels of the classes {listed(classes)} need shape "
            f"({n}, {K}). Where a class has no label, name all by `classes=`."
        )
    bad = np.flatnonzero(~np.isfinite(p).all(axis=1))
    if len(bad):
        raise ValueError(f"{name} is not finite in {len(bad)} rows, the first is row {bad[0]}.")
    if p.max() <= 0:
        raise ValueError(f"{name} has no positive entry: logarithms? Give their exponential.")
    sums = p.sum(axis=1)
    off = np.flatnonzero((np.abs(sums - 1) > OFF_BY) | (p.min(axis=1) < 0))
    if len(off):
        raise ValueError(
            f"{name} has {len(off)} rows that are no probabilities, the first is row {off[0]} with a "
            f"sum of {sums[off[0]]:.4g} and a least entry of {p[off[0]].min():.4g}. Give each row's "
            "probability of every class: of scores their softmax."
        )
    if n >= 50 and np.mean(p.argmax(1) == observed) > 0.999:
        warnings.warn(
            f"{name} agrees with nearly every observed label: predictions do where the model was "
            "trained on these very rows, and no wrong label is found then. Give out-of-fold "
            "predictions: `cross_val_predict(model, X, y, method='predict_proba')`. If they are, all "
            "labels may be right.",
            stacklevel=4,
        )
    return p / sums[:, None]


def _in_order(name: str, array: object, classes: np.ndarray) -> object:
    """Return a data frame whose columns have the names of classes with these in order."""
    columns = [str(column) for column in getattr(array, "columns", ())]
    wanted = [str(label) for label in classes.tolist()]
    if not set(columns) & set(wanted) or columns == [str(i) for i in range(len(columns))]:
        return array  # they have other names, or numbers: by position
    if sorted(columns) != sorted(wanted):
        raise ValueError(
            f"{name} has the columns {listed(columns)}, and the labels have the classes "
            f"{listed(wanted)}: give a column of that name for each class, and no other."
        )
    return np.asarray(array)[:, [columns.index(label) for label in wanted]]

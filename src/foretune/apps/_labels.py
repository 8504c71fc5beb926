"""Labelled rows as the estimators take them: labels of any type, and a second set beside the first."""

import numbers
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.utils.validation import validate_data

FLOATS = (np.float64, np.float32)


def plain_labels(labels: Any, name: str) -> Any:
    """Return labels that may come as objects (as pandas likes them) as numbers or strings."""
    if sparse.issparse(labels):
        return labels
    array = np.asarray(labels)
    if array.dtype != object or array.ndim != 1:
        return array
    missing = [i for i, label in enumerate(array) if _is_missing(label)]
    if missing:
        raise ValueError(
            f"{name} has {len(missing)} rows without a label, the first is row {missing[0]}: give it "
            "one, or leave the row out."
        )
    kinds = {isinstance(label, str): i for i, label in reversed([*enumerate(array)])}
    if len(kinds) > 1:  # as one array the number 1 and the text "1" would be one label
        (_, i), (_, j) = sorted(kinds.items())
        raise ValueError(
            f"{name} has numbers and text, {array[i]!r} in row {i} and {array[j]!r} in row {j}: give "
            "labels of one type."
        )
    return np.asarray(array.tolist())


def _is_missing(label: Any) -> bool:
    """None, NaN, and pandas's NA, whose comparisons have no truth value."""
    return label is None or type(label).__name__ == "NAType" or bool(label != label)


def second_set(estimator: Any, X: Any, y: Any, name: str) -> tuple[Any, np.ndarray, list[Any]]:
    """Return the rows X_name, their labels y_name as positions in `classes_`, and absent classes."""
    if X is None or y is None:
        raise ValueError(f"give X_{name} and y_{name} together, or neither.")
    try:
        rows: Any = validate_data(estimator, X, reset=False, accept_sparse="csr", dtype=FLOATS)
    except ValueError as error:
        raise ValueError(f"X_{name}: {error}") from None
    return rows, *second_labels(estimator, y, rows.shape[0], name)


def second_labels(estimator: Any, y: Any, rows: int, name: str) -> tuple[np.ndarray, list[Any]]:
    """Return the labels y_name as positions in `classes_`, and absent classes."""
    y = plain_labels(y, f"y_{name}")
    if y.ndim != 1 or len(y) != rows:
        raise ValueError(
            f"y_{name} has shape {y.shape}, and X_{name} has {rows} rows: give one label for "
            "each row."
        )
    names, index = np.unique(y, return_inverse=True)
    unknown = [label for label in names if not np.any(estimator.classes_ == label)]
    if unknown:
        raise ValueError(
            f"y_{name} has labels that y does not have: {listed(unknown)}; y has "
            f"{listed(estimator.classes_)}. Leave those rows out, or mend the labels' spelling or type."
        )
    absent = [label for label in estimator.classes_ if not np.any(names == label)]
    position = np.array([int(np.flatnonzero(estimator.classes_ == label)[0]) for label in names])
    return position[index], absent


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise unless an option is a whole number from `least` on."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{name}={value!r}: give a whole number, {least} or more.")


def listed(names: Any) -> str:
    """Return some labels, in words."""
    shown = ", ".join(repr(getattr(name, "item", lambda name=name: name)()) for name in names[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")

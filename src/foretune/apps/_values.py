"""`clean_values`: which numbers are wrong, from predictions that you have already."""

import warnings
from typing import Any, NamedTuple

import numpy as np

from .._outer.callbacks import Progress
from ._clean_labels import by_name, checked_rows
from ._value_model import judge_values, local_spread, scale_of

LEAST_ROWS = 3


class CleanedValues(NamedTuple):
    """What `clean_values` returns: the names are those of a fitted `ValueCleaner`."""

    weights_: np.ndarray
    """The probability that each value is right; 0 or 1 for checked ones."""
    suspects_: np.ndarray
    """The values held to be wrong: a weight below 1/2."""
    ranking_: np.ndarray
    """Row numbers, the most suspicious first."""
    suggested_: np.ndarray
    """The pooled prediction; the checked value where there is one."""
    confidence_: np.ndarray
    """1 - weight."""
    spread_: np.ndarray
    """The scale of right values around the prediction, by row."""
    noise_rate_: float
    """The mean confidence: the share of values that are wrong, by these probabilities."""
    pool_: dict[str, float]
    """The weight of each set of predictions; they sum to 1."""
    history_: list[Any]
    """The descent of the regularisers, empty where there were too few checked rows for one."""
    stopped_: str
    """Why it ended."""

    @property
    def unflagged_(self) -> float:
        """How many wrong values are expected among those that are not suspects."""
        return float(self.confidence_[~self.suspects_].sum())


def clean_values(
    values: Any,
    predictions: Any,
    checked: Any = None,
    checked_values: Any = None,
    *,
    progress: bool = True,
    random_state: int = 0,
) -> CleanedValues:
    """Find the wrong numbers, given predictions by a model that has not seen them.

    Parameters
    ----------
    values : array of n
        The given values: a regression's targets.
    predictions : array of n, or a dict or list of them
        Out-of-fold predictions: each row by a model that was trained without it, as
        `cross_val_predict` returns them. Several models are pooled, by weights that are learnt.
    checked : int array or bool array of n, or None
        Rows whose value has been verified, by number or as a mask.
    checked_values : array
        Their right values. A given value counts as right where it is equal.
    progress : bool, default=True
        Show a progress bar when the output is a terminal.
    random_state : int, default=0
        The folds of checked rows follow it.

    Returns
    -------
    CleanedValues

    Examples
    --------
    >>> import numpy as np
    >>> from foretune.apps import clean_values
    >>> rng = np.random.default_rng(0)
    >>> f = rng.normal(size=300)  # a model's predictions
    >>> y = f + 0.1 * rng.normal(size=300)
    >>> y[:15] += 2
    >>> found = clean_values(y, f)
    >>> int(found.suspects_[:15].sum()), bool(found.suspects_[15:].sum() < 5)
    (15, True)
    """
    y = numbers(values, "values")
    if y.ndim != 1 or len(y) < LEAST_ROWS:
        raise ValueError(
            f"values has shape {y.shape}: give one number for each row, {LEAST_ROWS} rows or more."
        )
    f = {
        name: _predicted(name, array, y)
        for name, array in by_name(predictions, "predictions", 1).items()
    }
    rows = checked_rows(checked, checked_values, len(y), "checked_values")
    right = np.zeros(0) if checked is None else numbers(checked_values, "checked_values")
    if right.shape != rows.shape:
        raise ValueError(f"{len(rows)} rows are checked, and checked_values has {right.shape}.")
    if len(rows) == len(y):
        raise ValueError("every row is checked: there is nothing left to judge.")
    rest = np.setdiff1d(np.arange(len(y)), rows)
    scale = scale_of(y)
    scaled, stack = scale(y), scale(np.stack(list(f.values())))
    g = local_spread(stack, scaled)
    found = judge_values(
        stack[:, rest],
        scaled[rest],
        g[:, rest],
        stack[:, rows],
        scale(right),
        g[:, rows],
        scaled[rows],
        (y[rows] == right).astype(int),
        seed=random_state,
        callbacks=[Progress("weighing the values")] if progress else (),
    )
    weights, suggested, spread = np.empty(len(y)), np.empty(len(y)), np.full(len(y), np.nan)
    weights[rest], suggested[rest] = found.right, scale.back(found.expected)
    weights[rows], suggested[rows] = y[rows] == right, right
    spread[rest] = scale.width(found.expected, found.scale)
    return CleanedValues(
        weights,
        weights < 0.5,
        ranked(weights, y, suggested),
        suggested,
        1 - weights,
        spread,
        float(np.mean(1 - weights)),
        dict(zip(f, found.pool.tolist(), strict=True)),
        [] if found.result is None else found.result.history,
        "no descent" if found.result is None else found.result.stopped,
    )


def ranked(weights: np.ndarray, y: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return row numbers, the lowest weight first; equal weights by the distance."""
    return np.lexsort((-np.abs(y - expected), weights))


def numbers(values: Any, name: str) -> np.ndarray:
    """Return finite numbers as float64, or raise with the first row that has none."""
    try:
        array = np.asarray(values)
        if array.dtype.kind in "cSU":
            raise TypeError
        array = np.asarray(array, np.float64)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} must be numbers; for classes there are `LabelCleaner` and `clean_labels`."
        ) from None
    bad = np.argwhere(~np.isfinite(array))
    if len(bad):
        raise ValueError(
            f"{name} is missing or infinite in {len(bad)} rows, the first is row {bad[0, 0]}: give "
            "it a number, or leave the row out."
        )
    return array


def _predicted(name: str, array: Any, y: np.ndarray) -> np.ndarray:
    f = numbers(array, name)
    if f.shape != y.shape:
        raise ValueError(
            f"{name} has shape {f.shape}: {len(y)} values need shape ({len(y)},), or a dict or list "
            "of such arrays."
        )
    spread = np.abs(y - np.median(y)).mean()
    if len(y) >= 50 and spread > 0 and np.mean(np.abs(y - f) <= 1e-6 * spread) > 0.9:
        warnings.warn(
            f"{name} repeats nearly every given value: predictions look like that where the model was "
            "trained on these very rows, and no wrong value is found then. Give out-of-fold "
            "predictions: `cross_val_predict(model, X, y)`.",
            stacklevel=4,
        )
    return f

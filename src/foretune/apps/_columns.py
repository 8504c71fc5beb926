"""Rows of any kind -> the numbers that models take.

Two views of the same rows. `wide` is for linear models and kernels: numbers standardised (with the
median where they are missing, and a column that marks it), an indicator for each category, the TF-IDF
of free text. `narrow` is for trees: numbers as they are (missing ones below all others), categories as
codes, the leading components of text. Of an array all columns are numbers; where they have comparable
ranges, as pixels have, they share one scale. An array with many columns and few entries that are not
zero is taken for word counts: it is not centred, and `narrow` are its components.

A column of text of which each row has its own word is an identifier, and is left out with a warning. No
label is used.
"""

import warnings
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np
from scipy import sparse
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

from ._checks import listed

if TYPE_CHECKING:
    from pandas import DataFrame, Series
else:  # pandas is an extra
    DataFrame = Series = object

Rows = Any
"""What scikit-learn takes for X: an array, a sparse matrix, a data frame, a list. It has no types."""
MOST_CATEGORIES = 50
"""Columns of more distinct texts are free text, or identifiers."""
COMPONENTS, WIDE = 30, 100
"""Of text, and of arrays with more columns than `WIDE`, boosted trees get this many components."""
BELOW = -1e30
"""What missing numbers are for trees."""
MOST_FILLED = 0.1
"""Word counts have a smaller share of entries that are not zero."""


class Views(NamedTuple):
    """Rows as models take them."""

    wide: Rows
    narrow: np.ndarray


def is_frame(X: Rows) -> TypeGuard[DataFrame]:
    """Return whether X is a data frame."""
    return hasattr(X, "iloc") and hasattr(X, "dtypes") and hasattr(X, "columns")


def is_mixed(X: Rows) -> TypeGuard[DataFrame]:
    """Return whether X is a data frame with columns that are not numbers, or with missing values."""
    return is_frame(X) and (
        any(dtype.kind not in "biuf" for dtype in X.dtypes) or bool(X.isna().to_numpy().any())
    )


def check_frame(X: DataFrame) -> list[object]:
    """Return the names of the columns, or raise where two are the same or one holds lists."""
    names = list(X.columns)
    if len(set(names)) < len(names) or X.columns.nlevels > 1:
        raise ValueError(f"X has the columns {listed(names)}: give each one name of its own.")
    for name in names:
        lists = X[name].dtype == object and [x for x in X[name] if not isinstance(x, Hashable)]
        if lists:
            raise ValueError(f"X[{name!r}] has {lists[0]!r:.60}: give numbers, text or dates.")
    return names


class Encoder:
    """Learns the columns of rows, and returns the two views of these and others."""

    categories: Sequence[int] = ()
    """The columns of `narrow` that are codes."""
    sources: dict[str, list[int]]
    """The columns of `narrow` that each column becomes; empty where they are mixed."""
    wide: Any
    narrow: Any

    def __init__(self, text: tuple[str, ...] = ()):
        self.text = text

    def fit(self, X: Rows) -> "Encoder":
        """Learn the columns; those named by `text` are free text."""
        self.mixed = is_mixed(X) or bool(self.text)
        if self.mixed:
            self._fit_frame(X)
            return self
        filled = X.count_nonzero() if sparse.issparse(X) else np.count_nonzero(X)
        self.counts = X.shape[1] > WIDE and filled < MOST_FILLED * np.prod(X.shape)
        X = self._matrix(X)
        self.wide = StandardScaler(with_mean=not self.counts).fit(X)
        if self.counts:  # rows of mean squared length 1
            squares = X.multiply(X).sum() / X.shape[0]
            self.wide.scale_ = np.full(X.shape[1], np.sqrt(squares) or 1.0)
        elif _comparable(X):
            self.wide.scale_ = np.full(X.shape[1], np.sqrt(np.mean(X.var(axis=0))))
        self.narrow, self.sources = None, {str(i): [i] for i in range(X.shape[1])}
        if X.shape[1] > WIDE:
            self.sources = {}
            self.narrow = Components().fit(self.wide.transform(X))
        return self

    def _matrix(self, X: Rows) -> Rows:
        """Return an array as one of two kinds, whichever it is given as."""
        if self.counts:
            return sparse.csr_matrix(X, dtype=np.float64)
        return np.asarray(X.toarray() if sparse.issparse(X) else X, np.float64)

    def _fit_frame(self, X: DataFrame) -> None:
        if not is_frame(X):
            raise ValueError(f"text={list(self.text)} names columns: give X as a data frame.")
        columns = list(X.columns)
        unknown = [name for name in self.text if name not in columns]
        if unknown:
            raise ValueError(f"there is no column {unknown[0]!r}, only {listed(columns)}.")
        names = self.names = columns_by_kind(X, self.text)
        X = self._plain(X)
        numbers = [*names["numbers"], *names["dates"]]
        median = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)
        below = SimpleImputer(strategy="constant", fill_value=BELOW, keep_empty_features=True)
        one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=bool(names["text"]))
        codes = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
        wide: list[tuple[str, Any, Any]] = [
            ("numbers", make_pipeline(median, StandardScaler()), numbers),
            ("categories", one_hot, names["categories"]),
        ]
        narrow: list[tuple[str, Any, Any]] = [
            ("categories", codes, names["categories"]),
            ("numbers", below, numbers),
        ]
        for name in names["text"]:
            wide.append((f"text of {name}", Words(), name))
            narrow.append((f"text of {name}", make_pipeline(Words(), Components()), name))
        self.wide = ColumnTransformer(wide, sparse_threshold=1.0).fit(X)
        for name in self.text:
            if self.wide.named_transformers_[f"text of {name}"].words_ is None:
                raise ValueError(f"column {name!r} as text: no two rows have a word in common.")
        self.narrow = ColumnTransformer(narrow, sparse_threshold=0.0).fit(X)
        self.categories = range(len(names["categories"]))
        single = [*names["categories"], *numbers]
        self.sources = {name: [i] for i, name in enumerate(single)}
        for name in names["text"]:
            span = self.narrow.output_indices_[f"text of {name}"]
            self.sources[name] = list(range(span.start, span.stop))

    def _plain(self, X: DataFrame) -> DataFrame:
        """Return numbers and dates as floating-point numbers, and all else as text."""
        X = X.copy()
        for name in self.names["numbers"]:
            X[name] = X[name].astype(np.float64)
        for name in self.names["dates"]:
            kind = "datetime64[s]" if X[name].dtype.kind == "M" else "timedelta64[s]"
            dates = X[name].to_numpy(kind)
            X[name] = np.where(np.isnat(dates), np.nan, dates.astype(np.int64))
        for name in (*self.names["categories"], *self.names["text"]):
            X[name] = X[name].astype(object).where(X[name].notna(), "").astype(str)
        return X

    def transform(self, X: Rows) -> Views:
        """Return the views."""
        if self.mixed:
            X = self._plain(X)
            wide, narrow = self.wide.transform(X), self.narrow.transform(X)
        else:
            X = self._matrix(X)
            wide = self.wide.transform(X)
            narrow = X if self.narrow is None else self.narrow.transform(wide)
        wide = sparse.csr_matrix(wide) if sparse.issparse(wide) else np.asarray(wide, np.float64)
        return Views(wide, np.asarray(narrow, np.float64))


def columns_by_kind(X: DataFrame, text: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """Return the columns of each kind: numbers, dates, categories, text, identifiers."""
    found: dict[str, list[str]] = {
        kind: [] for kind in ("numbers", "dates", "categories", "text", "identifiers")
    }
    for name in X.columns:
        found["text" if name in text else _kind(X.loc[:, name])].append(name)
    if found["identifiers"]:
        warnings.warn(
            f"left out: {', '.join(map(repr, found['identifiers']))}. Each row has its own word there, "
            "as in an identifier, so nothing can be learnt from it about other rows.",
            stacklevel=5,
        )
    if len(found["identifiers"]) == len(X.columns):
        raise ValueError("no column is left to learn from: all are identifiers.")
    return found


def _kind(column: Series) -> str:
    if column.dtype.kind in "biuf":
        return "numbers"
    if column.dtype.kind in "mM":
        return "dates"
    texts = column.dropna().astype(str)
    distinct = texts.nunique()
    if distinct <= MOST_CATEGORIES:
        return "categories"
    short = texts.str.split().str.len().median() < 3
    return "identifiers" if short and distinct > 0.95 * len(texts) else "text"


class Words(TransformerMixin, BaseEstimator):
    """TF-IDF of the words that two rows have at least; where there are none, a column of 0."""

    def fit(self, texts: Rows, y: object = None) -> "Words":
        """Learn the words."""
        words = TfidfVectorizer(sublinear_tf=True, min_df=2, token_pattern=r"(?u)\b\w+\b")
        try:
            self.words_ = words.fit(texts)
        except ValueError:  # no word at all, or none that two rows have
            self.words_ = None
        return self

    def transform(self, texts: Rows) -> Rows:
        """Return a column for each word."""
        if self.words_ is None:
            return sparse.csr_matrix((len(texts), 1))
        return self.words_.transform(texts)


class Components(TransformerMixin, BaseEstimator):
    """The leading components of many columns, or these where they are few."""

    def fit(self, rows: Rows, y: object = None) -> "Components":
        """Learn the components."""
        few = min(rows.shape) <= COMPONENTS + 1
        self.svd_ = None if few else TruncatedSVD(COMPONENTS, random_state=0).fit(rows)
        return self

    def transform(self, rows: Rows) -> np.ndarray:
        """Return the components."""
        if self.svd_ is not None:
            return self.svd_.transform(rows)
        return rows.toarray() if sparse.issparse(rows) else rows


def _comparable(X: np.ndarray) -> bool:
    """Return whether columns have one range, like pixels: the one that is always 0 counts least."""
    spans = np.ptp(X, axis=0)
    spans = spans[spans > 0]
    return len(spans) > 0 and bool(np.quantile(spans, 0.25) >= spans.max() / 2)


def row_order(X: Rows, labels: np.ndarray) -> np.ndarray:
    """Return an order of the rows that follows from what they hold, not from where they stand."""
    if is_mixed(X):
        from pandas import util

        key = np.asarray(util.hash_pandas_object(X, index=False))  # pyright: ignore
    else:
        X = X if sparse.issparse(X) else np.asarray(X)
        if X.ndim != 2 or X.dtype.kind not in "biuf":
            return np.arange(len(labels))
        key = X @ np.random.default_rng(0).normal(size=X.shape[1])
    return np.lexsort((labels, key))


def stack_rows(first: Rows, second: Rows) -> Rows:
    """Stack rows of any kind that an estimator takes."""
    if isinstance(first, list):
        return [*first, *second]
    if is_frame(first):
        import pandas as pd

        return pd.concat([first, second], ignore_index=True)
    if sparse.issparse(first) or sparse.issparse(second):
        return sparse.vstack([first, second], format="csr")
    return np.concatenate([first, second])

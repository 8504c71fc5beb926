"""Columns of a data frame -> numbers, by scikit-learn's encoders.

Numbers get the median where they are missing, and a column that marks it; categories, text of few
kinds, become indicator columns, dates seconds, other text the leading components of its TF-IDF. A
column of text of which each row has its own word is an identifier, and is left out with a warning.

Boosted trees take categories as they are: `Native` makes such columns of the same array.
"""

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeGuard

import numpy as np
from scipy import sparse
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder

from ._features import Rows

if TYPE_CHECKING:
    from pandas import DataFrame, Series
else:  # pandas is an extra
    DataFrame = Series = object

MOST_CATEGORIES = 50
"""Columns of more distinct texts are free text, or identifiers."""
COMPONENTS = 30
"""Of a column of text."""


def is_frame(X: Rows) -> TypeGuard[DataFrame]:
    """Return whether X is a data frame."""
    return hasattr(X, "iloc") and hasattr(X, "dtypes") and hasattr(X, "columns")


def is_mixed(X: Rows) -> TypeGuard[DataFrame]:
    """Return whether X is a data frame with columns that are not numbers, or with missing values."""
    return is_frame(X) and (
        any(dtype.kind not in "biuf" for dtype in X.dtypes) or bool(X.isna().to_numpy().any())
    )


def column_encoder(X: DataFrame, text: tuple[str, ...] = ()) -> ColumnTransformer:
    """Return the encoder that suits the columns of a data frame, not yet fitted.

    The columns named by `text` are text with all its words: the array is then sparse.
    """
    kinds = {name: "text" if name in text else _kind(X.loc[:, name]) for name in X.columns}
    numbers, dates, categories, texts, identifiers = (
        [name for name in X.columns if kinds[name] == kind]
        for kind in ("numbers", "dates", "categories", "text", "identifier")
    )
    if identifiers:
        warnings.warn(
            f"left out: {', '.join(map(repr, identifiers))}, of which each row has its own word: like "
            "an identifier, it has nothing to tell about other rows.",
            stacklevel=4,
        )
    fill = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)
    parts: list[tuple[str, BaseEstimator, list[str] | str]] = []
    if numbers:
        parts.append(("numbers", fill, numbers))
    if dates:
        parts.append(("dates", make_pipeline(FunctionTransformer(_seconds), fill), dates))
    if categories:
        one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
        encode = make_pipeline(FunctionTransformer(_as_text), one_hot)
        parts.append(("categories", encode, categories))
    for name in texts:
        words = TfidfVectorizer(sublinear_tf=True, min_df=2) if name in text else Text()
        parts.append((f"text of {name}", make_pipeline(FunctionTransformer(_as_text), words), name))
    if not parts:
        raise ValueError("no column is left to learn from: all are identifiers.")
    return ColumnTransformer(parts, sparse_threshold=1.0 if text else 0.0)


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
    return "identifier" if short and distinct > 0.95 * len(texts) else "text"


class Native(TransformerMixin, BaseEstimator):
    """The encoder's array as boosted trees take it: a column of categories is one column of codes.

    `plain` are the columns of numbers, dates and text. `categories_at` has the indicators of each
    column of categories, without that of a missing value. Codes come last; missing and unknown
    categories are NaN.
    """

    def __init__(self, plain: list[int], categories_at: list[slice]):
        self.plain, self.categories_at = plain, categories_at

    @property
    def width(self) -> int:
        """The number of columns."""
        return len(self.plain) + len(self.categories_at)

    @property
    def categories(self) -> list[int]:
        """The columns that are codes of categories."""
        return list(range(len(self.plain), self.width))

    def fit(self, rows: np.ndarray, y: object = None) -> "Native":
        """Learn nothing."""
        return self

    def transform(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows in columns of their own."""
        found = np.empty((len(rows), self.width))
        found[:, : len(self.plain)] = rows[:, self.plain]
        for column, at in zip(self.categories, self.categories_at, strict=True):
            found[:, column] = np.where(rows[:, at].any(1), rows[:, at].argmax(1), np.nan)
        return found


def native_columns(encoder: ColumnTransformer | None) -> Native | None:
    """Return those of a fitted encoder, or None where its array has no categories."""
    if encoder is None:
        return None
    plain, categories = [], []
    for name, part, _ in encoder.transformers_:
        found = encoder.output_indices_[name]
        last = part[-1] if isinstance(part, Pipeline) else part
        if isinstance(last, OneHotEncoder):
            categories.extend(_indicators(last, found.start))
        else:
            plain.extend(range(found.start, found.stop))
    return Native(plain, categories) if categories else None


def _indicators(encoder: OneHotEncoder, start: int) -> Iterator[slice]:
    """Yield those of each column; a missing value, which is "", is the first category, and none."""
    for categories in encoder.categories_:
        first, stop = start + (categories[0] == ""), start + len(categories)
        if first < stop:
            yield slice(first, stop)
        start = stop


class Text(TransformerMixin, BaseEstimator):
    """The leading components of TF-IDF; of text without a repeated word, nothing: a column of 0."""

    def fit(self, texts: Rows, y: object = None) -> "Text":
        """Learn the words, those that two rows have at least, and the components."""
        words = TfidfVectorizer(sublinear_tf=True, min_df=2)
        try:
            width = words.fit_transform(texts).shape[1]
        except ValueError:  # no word at all, or none that two rows have
            self.components_ = None
            return self
        svd = TruncatedSVD(min(COMPONENTS, width), random_state=0)
        self.components_ = make_pipeline(words, svd).fit(texts)
        return self

    def transform(self, texts: Rows) -> np.ndarray:
        """Return the components."""
        if self.components_ is None:
            return np.zeros((len(texts), 1))
        return self.components_.transform(texts)


def _as_text(column: DataFrame | Series) -> DataFrame | Series:
    return column.astype(object).where(column.notna(), "").astype(str)


def _seconds(frame: DataFrame) -> np.ndarray:
    def seconds(column):
        numbers = column.to_numpy("datetime64[s]" if column.dtype.kind == "M" else "timedelta64[s]")
        return np.where(np.isnat(numbers), np.nan, numbers.astype(np.int64))

    return np.stack([seconds(frame[name]) for name in frame.columns], axis=1)


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

"""Columns of a data frame -> numbers, by scikit-learn's encoders.

Numbers get the median where they are missing, and a column that says so; words of few kinds become
indicator columns, dates seconds, free text the leading components of its TF-IDF. A column of words of
which each row has its own is an identifier, and is left out with a warning.

Boosted trees take kinds of words as they are: `Native` makes such columns of the same array.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder

MOST_WORDS = 50
"""Columns of more distinct words become text, or are identifiers."""
COMPONENTS = 30
"""Of a column of text."""


def is_frame(X: Any) -> bool:
    """Return whether X is a data frame."""
    return hasattr(X, "iloc") and hasattr(X, "dtypes") and hasattr(X, "columns")


def has_words(X: Any) -> bool:
    """Return whether X is a data frame with columns that are not numbers, or with gaps."""
    return is_frame(X) and (
        any(dtype.kind not in "biuf" for dtype in X.dtypes) or bool(X.isna().to_numpy().any())
    )


def column_encoder(X: Any) -> ColumnTransformer:
    """Return the encoder that suits the columns of a data frame, not yet fitted."""
    parts: list[Any] = []
    numbers = [name for name in X.columns if X[name].dtype.kind in "biuf"]
    dates = [name for name in X.columns if X[name].dtype.kind in "mM"]
    few, texts, identifiers = [], [], []
    for name in X.columns:
        if name in numbers or name in dates:
            continue
        column = X[name].dropna().astype(str)
        kinds = column.nunique()
        if kinds <= MOST_WORDS:
            few.append(name)
        elif kinds > 0.95 * len(column) and column.str.split().str.len().median() < 3:
            identifiers.append(name)
        else:
            texts.append(name)
    if identifiers:
        warnings.warn(
            f"left out: {', '.join(map(repr, identifiers))}, of which each row has its own word; it "
            "looks like an identifier, which says nothing about other rows.",
            stacklevel=4,
        )
    fill = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)
    if numbers:
        parts.append(("numbers", fill, numbers))
    if dates:
        parts.append(("dates", make_pipeline(FunctionTransformer(_seconds), fill), dates))
    if few:
        words = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
        parts.append(("words", make_pipeline(FunctionTransformer(_as_text), words), few))
    for name in texts:
        parts.append(
            (f"text of {name}", make_pipeline(FunctionTransformer(_as_text), Text()), name)
        )
    if not parts:
        raise ValueError("no column is left to learn from: all are identifiers.")
    return ColumnTransformer(parts, sparse_threshold=0.0)


class Native(TransformerMixin, BaseEstimator):
    """The encoder's array as boosted trees take it: a column of words is one column of codes.

    `kept` are the columns of numbers, dates and text. `words` has the indicators of each column of
    words, without that of a gap. Codes come last; gaps and unknown words are NaN.
    """

    def __init__(self, kept: list[int], words: list[slice]):
        self.kept, self.words = kept, words

    @property
    def width(self) -> int:
        """The number of columns."""
        return len(self.kept) + len(self.words)

    @property
    def categories(self) -> list[int]:
        """The columns that are codes of words."""
        return list(range(len(self.kept), self.width))

    def fit(self, rows: np.ndarray, y: Any = None) -> "Native":
        """Learn nothing."""
        return self

    def transform(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows in columns of their own."""
        found = np.empty((len(rows), self.width))
        found[:, : len(self.kept)] = rows[:, self.kept]
        for column, kinds in zip(self.categories, self.words, strict=True):
            known, code = rows[:, kinds].any(1), rows[:, kinds].argmax(1)
            found[:, column] = np.where(known, code, np.nan)
        return found


def native_columns(encoder: Any) -> Native | None:
    """Return those of a fitted encoder, or None where its array has no words."""
    if encoder is None:
        return None
    kept, words = [], []
    for name, part, _ in encoder.transformers_:
        found = encoder.output_indices_[name]
        last = part[-1] if isinstance(part, Pipeline) else part
        if isinstance(last, OneHotEncoder):
            words.extend(_indicators(last, found.start))
        else:
            kept.extend(range(found.start, found.stop))
    return Native(kept, words) if words else None


def _indicators(words: OneHotEncoder, start: int) -> Iterator[slice]:
    """Yield those of each column's words: a gap, which is "", is the first kind, and no word."""
    for kinds in words.categories_:
        first, stop = start + (kinds[0] == ""), start + len(kinds)
        if first < stop:
            yield slice(first, stop)
        start = stop


class Text(TransformerMixin, BaseEstimator):
    """The leading components of TF-IDF; of text without a repeated word, nothing: a column of 0."""

    def fit(self, texts: Any, y: Any = None) -> "Text":
        """Learn the words, those that two rows have at least, and the components."""
        self.fit_transform(texts)
        return self

    def fit_transform(self, X: Any, y: Any = None, **_: Any) -> np.ndarray:
        """Learn them, and return the components of these rows."""
        self.words_: Any = TfidfVectorizer(sublinear_tf=True, min_df=2)
        try:
            found = self.words_.fit_transform(X)
        except ValueError:  # no word at all, or none that two rows have
            self.words_ = None
            return self.transform(X)
        self.components_ = TruncatedSVD(min(COMPONENTS, found.shape[1]), random_state=0)
        return self.components_.fit_transform(found)

    def transform(self, texts: Any) -> np.ndarray:
        """Return the components."""
        if self.words_ is None:
            return np.zeros((len(texts), 1))
        return self.components_.transform(self.words_.transform(texts))


def _as_text(column: Any) -> Any:
    return column.astype(object).where(column.notna(), "").astype(str)


def _seconds(frame: Any) -> np.ndarray:
    def seconds(column):
        numbers = column.to_numpy("datetime64[s]" if column.dtype.kind == "M" else "timedelta64[s]")
        return np.where(np.isnat(numbers), np.nan, numbers.astype(np.int64))

    return np.stack([seconds(frame[name]) for name in frame.columns], axis=1)


def row_count(X: Any) -> int:
    """Return the number of rows of an array, a data frame or a list."""
    return X.shape[0] if hasattr(X, "shape") else len(X)


def stack_rows(first: Any, second: Any) -> Any:
    """Stack rows of any kind that an estimator takes."""
    if isinstance(first, list):
        return [*first, *second]
    if is_frame(first):
        import pandas as pd

        return pd.concat([first, second], ignore_index=True)
    if sparse.issparse(first) or sparse.issparse(second):
        return sparse.vstack([first, second], format="csr")
    return np.concatenate([first, second])

"""Labelled rows from .npz, .csv and .parquet files.

An .npz file has rows under `x` (or `X`, `data`, `images`) and labels under `y` (or `label`, `labels`,
`target`, `class`); rows of more than one axis are images. It is read without pickle. A .csv or .parquet
file has one row per example, with the label in a column of one of those names or the one asked for.

Labels of a .csv file are text, exactly as written: 1, 01 and 007 are three classes, and so are None and
NA. Only an empty cell is a missing label. The other formats keep the type that they give to labels;
`with_labels_alike` makes those of two files comparable.
"""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.utils import check_array

from ._checks import plain_labels
from ._columns import DataFrame, Encoder, Rows, is_frame, is_mixed
from ._optional import needs

ROWS = ("x", "X", "data", "images")
AS_TEXT: Any = {"dtype": str, "keep_default_na": False}
LABELS = ("label", "labels", "y", "target", "class")


class DataError(ValueError):
    """Data that is not there, or cannot be read; the message says what to do."""


class Table(NamedTuple):
    """Labelled rows: `x` is an array (.npz) or a data frame."""

    x: np.ndarray | DataFrame
    y: np.ndarray
    """Empty where the file has no labels, and may have none."""
    image_shape: tuple[int, ...] | None
    path: str
    label: str = "label"
    """The name of the labels' column, or array."""

    def matrix(self) -> Rows:
        """Return the rows as numbers: those of an array as they are, others as `encoded` has them."""
        return encoded([self])[0] if is_mixed(self.x) else self._checked()

    def _checked(self) -> np.ndarray:
        return check_array(self.x, dtype="float32", input_name=self.path)

    def as_written(self) -> "Table":
        """Return the table with the cells of a .csv file as its text: 007 is not 7."""
        if not self.path.endswith(".csv"):
            return self
        return self._replace(x=read_frame(Path(self.path), **AS_TEXT)[self.columns])

    @property
    def columns(self) -> list[str]:
        """The columns' names; those of an array are numbers."""
        return list(map(str, self.x.columns if is_frame(self.x) else range(self.x.shape[1])))


def read_table(
    path: str | Path,
    label: str | None = None,
    image_shape: tuple[int, ...] | None = None,
    drop: tuple[str, ...] = (),
    labelled: bool = True,
) -> Table:
    """Read labelled rows from a file; with `labelled=False` labels may be missing altogether."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file.")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty.")
    if path.suffix == ".npz":
        table = _read_npz(path, label, labelled)
    elif path.suffix in (".csv", ".parquet"):
        table = _read_frame(path, label, drop, labelled)
    else:
        raise DataError(f"{path}: give a .npz, .csv or .parquet file.")
    if 0 in table.x.shape:
        raise DataError(f"{path} has no {'columns beside the labels' if len(table.x) else 'rows'}.")
    if image_shape is None:
        return table
    if table.x.shape[1] != np.prod(image_shape):
        raise DataError(
            f"{path} has {table.x.shape[1]} columns, and an image of "
            f"{'x'.join(map(str, image_shape))} has {np.prod(image_shape)} values."
        )
    return table._replace(image_shape=tuple(image_shape))


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file, read without pickle, or raise `DataError` with its name."""
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except Exception as error:  # damage shows in many ways: in zipfile, in zlib, in the header
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    return DataError(f"{path} cannot be read as {path.suffix}: {reason}")


def _label_name(names: Iterable[str], label: str | None) -> str | None:
    names = list(names)
    return next((n for n in (LABELS if label is None else (label,)) if n in names), None)


def _read_npz(path: Path, label: str | None, labelled: bool) -> Table:
    arrays = read_arrays(path)
    rows = next((arrays[name] for name in ROWS if name in arrays), None)
    name = _label_name(arrays, label)
    if rows is None or (name is None and labelled):
        raise DataError(
            f"{path} holds {', '.join(arrays) or 'nothing'}: it needs rows under one of "
            f"{', '.join(ROWS)} and labels under {label or ' or '.join(LABELS)}."
        )
    y = np.zeros(0) if name is None else arrays[name]
    if rows.ndim < 2 or (name is not None and y.shape != rows.shape[:1]):
        raise DataError(
            f"{path}: rows have shape {rows.shape} and labels {y.shape}; expected (n, ...) and (n,)."
        )
    if rows.dtype.kind not in "biuf":
        raise DataError(f"{path}: rows have dtype {rows.dtype}, expected numbers.")
    shape = rows.shape[1:] if rows.ndim > 2 else None
    columns = int(np.prod(rows.shape[1:]))  # not -1, which there is none for without rows
    flat = rows.reshape(len(rows), columns)
    return Table(flat, _labels(y, path), shape, str(path), name or "label")


def read_frame(path: Path, **options: Any) -> DataFrame:
    """Return the rows of a .parquet file; or of a .csv file, whose columns have names of their own."""
    with needs("data", f"reading {path.suffix} files"):
        import pandas as pd
    try:
        if path.suffix == ".parquet":
            return pd.read_parquet(path)
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            first = pd.read_csv(path, header=None, nrows=1, **AS_TEXT).iloc[0]
            if (twice := first[first.duplicated() & (first != "")].tolist()) != []:
                raise ValueError(f"two columns have the name {twice[0]!r}.")
            return pd.read_csv(path, index_col=False, **options)
    except pd.errors.ParserWarning:
        more = ValueError("rows have more cells than the first line has names.")
        raise _unreadable(path, more) from None
    except Exception as error:  # parsers raise many kinds
        raise _unreadable(path, error) from error


def _read_frame(path: Path, label: str | None, drop: tuple[str, ...], labelled: bool) -> Table:
    frame = read_frame(path)
    frame.columns = [str(name) for name in frame.columns]
    may_be = [name for name in frame.columns if name not in drop or name == label]
    columns, name = ", ".join(frame.columns[:20]), _label_name(may_be, label)
    if name is None and labelled:
        wanted = "none named " + ", ".join(LABELS) if label is None else f"no {label!r}"
        raise DataError(f"{path} has the columns {columns}, {wanted}: name it with --label COLUMN.")
    missing = [column for column in drop if column not in frame.columns]
    if missing:
        raise DataError(f"{path} has the columns {columns}; there is no {missing[0]!r} to drop.")
    if frame.columns[0].startswith("Unnamed: ") and frame.columns[0] not in drop:
        warnings.warn(
            f"{path}: the column {frame.columns[0]!r} has no name and may be a row number; leave it "
            f'out with --drop "{frame.columns[0]}".',
            stacklevel=3,
        )
    if name is None:
        return Table(frame.drop(columns=[*drop]), np.zeros(0), None, str(path))
    rows, labels = frame.drop(columns=[name, *drop]), frame[name]
    if path.suffix == ".csv":  # as text, of which nothing but "" is missing
        labels = read_frame(path, usecols=[name], **AS_TEXT)[name]
        labels = labels.where(labels.str.strip() != "")
    values = labels.astype(object).where(labels.notna(), None).to_numpy()
    if labels.dtype.kind not in "ifub":  # text, categories, dates
        values = np.array([None if value is None else str(value) for value in values], object)
    return Table(rows, _labels(values, path), None, str(path), name)


def _labels(values: np.ndarray, path: Path) -> np.ndarray:
    """Return labels as an array of numbers or of text, or raise where one is missing."""
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8", "backslashreplace")
    if values.dtype.kind in "UO":
        values = values.astype(object)
        values[values == ""] = None
    try:
        return plain_labels(values, str(path))
    except ValueError as error:
        raise DataError(str(error)) from None


def with_labels_alike(first: Table, second: Table) -> tuple[Table, Table]:
    """Return both tables with labels that can be compared: numbers of one as text beside text."""
    if "U" in (first.y.dtype.kind, second.y.dtype.kind):
        first, second = (t._replace(y=np.array([*map(str, t.y)])) for t in (first, second))
    return first, second


def encoded(tables: list[Table], text: tuple[str, ...] = ()) -> list[Rows]:
    """Return the rows of files as a linear model takes them, scaled and encoded as the first decides.

    Columns named by `text` become TF-IDF, with all its words.
    """
    check_columns(tables)
    mixed = bool(text) or is_mixed(tables[0].x)
    rows = [table.x if mixed else table._checked() for table in tables]
    try:
        encoder = Encoder(text).fit(rows[0])
    except ValueError as error:
        raise DataError(f"{tables[0].path}: {error}") from error
    return [encoder.transform(x).wide for x in rows]


def check_columns(tables: list[Table]) -> None:
    """Raise where files have other columns than the first."""
    for table in tables:
        odd = sorted(set(table.columns) ^ set(tables[0].columns))
        if odd:
            raise DataError(
                f"{table.path} and {tables[0].path} need the same columns; these are in one only: "
                f"{', '.join(odd[:8])}. Leave columns out with --drop."
            )

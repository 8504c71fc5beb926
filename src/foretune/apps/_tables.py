"""Labelled rows from .npz, .csv and .parquet files.

An .npz file has rows under `x` (or `X`, `data`, `images`) and labels under `y` (or `label`, `labels`,
`target`, `class`); rows of more than one axis are images. It is read without pickle. A .csv or .parquet
file has one row per example, with the label in a column of one of those names or the one asked for.

Labels of a .csv file are text, exactly as written: 1, 01 and 007 are three classes, and so are None and
NA. Only an empty cell is a missing label. The other formats keep the type that they give to labels;
`with_labels_alike` makes those of two files comparable.
"""

import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
from sklearn.utils import check_array

from ._columns import DataFrame, Encoder, Rows, is_frame, is_mixed
from ._optional import needs

ROWS = ("x", "X", "data", "images")
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
        """Return the rows as numbers; `encoded` returns those of several files in the same columns."""
        return encoded([self])[0]

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


def _read_npz(path: Path, label: str | None, labelled: bool) -> Table:
    arrays = read_arrays(path)
    rows = next((arrays[name] for name in ROWS if name in arrays), None)
    names = LABELS if label is None else (label,)
    name = next((name for name in names if name in arrays), names[0])
    labels = arrays.get(name)
    if rows is None or (labels is None and labelled):
        raise DataError(
            f"{path} holds {', '.join(arrays) or 'nothing'}: it needs rows under one of "
            f"{', '.join(ROWS)} and labels under {' or '.join(names)}."
        )
    y = np.zeros(0) if labels is None else labels
    if rows.ndim < 2 or (labels is not None and y.shape != rows.shape[:1]):
        raise DataError(
            f"{path}: rows have shape {rows.shape} and labels {y.shape}; expected (n, ...) and (n,)."
        )
    if rows.dtype.kind not in "biuf":
        raise DataError(f"{path}: rows have dtype {rows.dtype}, expected numbers.")
    shape = rows.shape[1:] if rows.ndim > 2 else None
    columns = int(np.prod(rows.shape[1:]))  # not -1, which there is none for without rows
    return Table(rows.reshape(len(rows), columns), _labels(y, path), shape, str(path), name)


def _read_frame(path: Path, label: str | None, drop: tuple[str, ...], labelled: bool) -> Table:
    with needs("data", f"reading {path.suffix} files"):
        import pandas as pd

    try:
        frame = _read_csv(path, label) if path.suffix == ".csv" else pd.read_parquet(path)
    except Exception as error:  # parsers raise many kinds
        raise _unreadable(path, error) from error
    frame.columns = [str(name) for name in frame.columns]
    columns = ", ".join(frame.columns[:20])
    names = [name for name in (LABELS if label is None else (label,)) if name in frame.columns]
    if not names and labelled:
        wanted = "none named " + ", ".join(LABELS) if label is None else f"no {label!r}"
        raise DataError(f"{path} has the columns {columns}, {wanted}: name it with --label COLUMN.")
    missing = [name for name in drop if name not in frame.columns]
    if missing:
        raise DataError(f"{path} has the columns {columns}; there is no {missing[0]!r} to drop.")
    if frame.columns[0].startswith("Unnamed: ") and frame.columns[0] not in drop:
        warnings.warn(
            f"{path}: the column {frame.columns[0]!r} has no name and may be a row number; leave it "
            f'out with --drop "{frame.columns[0]}".',
            stacklevel=3,
        )
    rows = frame.drop(columns=[*names[:1], *drop])
    if not names:
        return Table(rows, np.zeros(0), None, str(path))
    labels = frame[names[0]]
    values = labels.astype(object).where(labels.notna(), None).to_numpy()
    if labels.dtype.kind not in "ifub":  # text, categories, dates
        values = np.array([None if value is None else str(value) for value in values], object)
    return Table(rows, _labels(values, path), None, str(path), names[0])


def _read_csv(path: Path, label: str | None) -> DataFrame:
    """Read a .csv file with its labels as text, an empty one as None."""
    import pandas as pd

    header = [str(name) for name in pd.read_csv(path, nrows=0).columns]
    name = next((n for n in (LABELS if label is None else (label,)) if n in header), None)
    # The mark before it keeps pandas from reading NA, None or nan as no label.
    marked = {} if name is None else {name: lambda text: f"'{text}"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)
        try:
            frame = pd.read_csv(path, converters=marked, index_col=False)
        except pd.errors.ParserWarning:
            raise ValueError("rows have more cells than the first line has names.") from None
    if name is not None:
        frame[name] = [text[1:] if text[1:].strip() else None for text in frame[name]]
    return frame


def _labels(values: np.ndarray, path: Path) -> np.ndarray:
    """Return labels as an array of numbers or of text, or raise where one is missing."""
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8", "backslashreplace")
    missing = np.array([v is None or v != v or (isinstance(v, str) and not v) for v in values])
    if missing.any():
        rows = np.flatnonzero(missing)
        raise DataError(
            f"{path}: {len(rows)} of {len(values)} rows have no label, the first is row {rows[0]} "
            "(rows count from 0): give it one, or leave the row out."
        )
    return np.asarray(values.tolist()) if values.dtype == object else values


def with_labels_alike(first: Table, second: Table) -> tuple[Table, Table]:
    """Return both tables with labels that can be compared: numbers of one as text beside text."""
    if "U" in (first.y.dtype.kind, second.y.dtype.kind):
        first, second = (
            table._replace(y=np.array(list(map(str, table.y)))) for table in (first, second)
        )
    return first, second


def encoded(tables: list[Table], text: tuple[str, ...] = ()) -> list[Rows]:
    """Return the rows of files as numbers, in columns that the first decides: see `_columns.py`.

    Columns named by `text` become TF-IDF, with all its words.
    """
    check_columns(tables, text)
    first = tables[0].x
    if not text and not is_mixed(first):
        return [check_array(table.x, dtype="float32", input_name=table.path) for table in tables]
    try:
        encoder = Encoder(text).fit(first)
    except ValueError as error:
        raise DataError(f"{tables[0].path}: {error}") from error
    return [encoder.transform(table.x).wide for table in tables]


def check_columns(tables: list[Table], text: tuple[str, ...] = ()) -> None:
    """Raise where files have other columns than the first, or it lacks one that is named."""
    first = tables[0]
    for table in tables:
        odd = sorted(set(table.columns) ^ set(first.columns))
        if odd:
            raise DataError(
                f"{table.path} and {first.path} need the same columns; these are in one only: "
                f"{', '.join(odd[:8])}. Leave columns out with --drop."
            )
    unknown = [name for name in text if name not in first.columns]
    if unknown:
        columns = ", ".join(first.columns)
        raise DataError(f"{first.path} has the columns {columns}; there is no {unknown[0]!r}.")

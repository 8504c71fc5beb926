"""Labelled rows from .npz, .csv and .parquet files.

An .npz file has rows under `x` (or `X`, `data`, `images`) and labels under `y` (or `label`, `labels`,
`target`, `class`); rows of more than one axis are images. It is read without pickle. A .csv or .parquet
file has one row per example, with the label in a column of one of those names or the one asked for.
Numbers are used as they are, columns of few distinct words become indicator columns, and columns of
free text become TF-IDF when they are named as such.

Labels of a .csv file are text, exactly as written: 1, 01 and 007 are three classes, and so are None and
NA. Only an empty cell is a missing label. The other formats keep the type that they give to labels;
`with_labels_alike` makes those of two files comparable.
"""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ._optional import needs

ROWS = ("x", "X", "data", "images")
LABELS = ("label", "labels", "y", "target", "class")
FEW = 50
"""A column of words with at most this many distinct ones becomes indicator columns."""


class DataError(ValueError):
    """Data that is not there, or cannot be read; the message says what to do."""


class Table(NamedTuple):
    """Labelled rows: `x` is an array (.npz) or a data frame."""

    x: Any
    y: Any  # an array, or None where a file without labels may be read
    image_shape: tuple[int, ...] | None
    path: str

    def matrix(self) -> Any:
        """Return the rows as numbers; encode with `Encoder` to share columns between files."""
        return Encoder().fit(self).transform(self)


def read_table(
    path: str | Path,
    label: str | None = None,
    image_shape: tuple[int, ...] | None = None,
    drop: tuple[str, ...] = (),
    labelled: bool = True,
) -> Table:
    """Read labelled rows from a file; with `labelled=False` labels may be missing altogether.

    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/a.npz", x=np.zeros((3, 8, 8)), y=np.array(["a", "b", "a"]))
    ...     table = read_table(f"{folder}/a.npz")
    >>> table.x.shape, table.image_shape, table.y.tolist()
    ((3, 64), (8, 8), ['a', 'b', 'a'])
    """
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
    if table.x.shape[0] == 0:
        raise DataError(f"{path} has no rows.")
    if image_shape is not None:
        if table.x.shape[1] != np.prod(image_shape):
            shape = "x".join(map(str, image_shape))
            raise DataError(
                f"{path} has {table.x.shape[1]} columns, and an image of {shape} has "
                f"{np.prod(image_shape)} values."
            )
        table = table._replace(image_shape=tuple(image_shape))
    return table


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file, read without pickle, or raise `DataError` with its name."""
    try:
        with Path(path).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except Exception as error:  # damage shows in many ways: in zipfile, in zlib, in the header
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise DataError(f"{path} cannot be read as .npz: {reason}") from error


def read_numbers(path: str | Path) -> Any:
    """Return a table of numbers from .npy, .npz (its one array, or `pred_probs`) or .csv, a frame."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file.")
    if path.suffix == ".npz":
        arrays = read_arrays(path)
        if len(arrays) != 1 and "pred_probs" not in arrays:
            raise DataError(f"{path} holds {', '.join(arrays)}: name the one to use pred_probs.")
        return arrays.get("pred_probs", next(iter(arrays.values())))
    try:
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False)
        if path.suffix == ".csv":
            with needs("data", "reading .csv files"):
                import pandas as pd
            return pd.read_csv(path).astype(np.float64)
    except Exception as error:  # parsers raise many kinds
        reason = str(error).strip().split("\n")[0]
        raise DataError(f"{path} cannot be read as {path.suffix}: {reason}") from error
    raise DataError(f"{path}: give a .npy, .npz or .csv file.")


def _read_npz(path: Path, label: str | None, labelled: bool) -> Table:
    arrays = read_arrays(path)
    rows = next((arrays[name] for name in ROWS if name in arrays), None)
    names = LABELS if label is None else (label,)
    labels = next((arrays[name] for name in names if name in arrays), None)
    if rows is None or (labels is None and labelled):
        raise DataError(
            f"{path} holds {', '.join(arrays) or 'nothing'}: it needs rows under one of "
            f"{', '.join(ROWS)} and labels under {' or '.join(names)}."
        )
    of_labels = rows.shape[:1] if labels is None else labels.shape
    if rows.ndim < 2 or of_labels != rows.shape[:1]:
        raise DataError(
            f"{path}: rows have shape {rows.shape} and labels {of_labels}; "
            "expected (n, ...) and (n,)."
        )
    if rows.dtype.kind not in "biuf":
        raise DataError(f"{path}: rows have dtype {rows.dtype}, expected numbers.")
    shape = rows.shape[1:] if rows.ndim > 2 else None
    columns = int(np.prod(rows.shape[1:]))  # not -1, which there is none for without rows
    y = None if labels is None else _labels(labels, path)
    return Table(rows.reshape(len(rows), columns), y, shape, str(path))


def _read_frame(path: Path, label: str | None, drop: tuple[str, ...], labelled: bool) -> Table:
    with needs("data", f"reading {path.suffix} files"):
        import pandas as pd

    try:
        frame = _read_csv(path, label) if path.suffix == ".csv" else pd.read_parquet(path)
    except Exception as error:  # parsers raise many kinds
        reason = str(error).strip().split("\n")[0]
        raise DataError(f"{path} cannot be read as {path.suffix}: {reason}") from error
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
    if not names:
        return Table(frame.drop(columns=list(drop)), None, None, str(path))
    labels: Any = frame[names[0]]
    values = labels.astype(object).where(labels.notna(), None).to_numpy()
    if labels.dtype.kind not in "ifub":  # text, categories, dates
        values = np.array([None if value is None else str(value) for value in values], object)
    return Table(frame.drop(columns=[names[0], *drop]), _labels(values, path), None, str(path))


def _read_csv(path: Path, label: str | None) -> Any:
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
            f"{path}: {rows_have(len(rows))} no label, the first is row {rows[0]} (rows count from 0): "
            "give it one, or leave the row out."
        )
    return np.asarray(values.tolist()) if values.dtype == object else values


def rows_have(count: Any) -> str:
    """Return `1 row has` or `2 rows have`."""
    return "1 row has" if count == 1 else f"{count:,} rows have"


def with_labels_alike(first: Table, second: Table) -> tuple[Table, Table]:
    """Return both tables with labels that can be compared: numbers of one as text beside text.

    >>> a = Table(None, np.array(["1", "01"]), None, "a.csv")
    >>> b = Table(None, np.array([1, 2]), None, "b.parquet")
    >>> [table.y.tolist() for table in with_labels_alike(a, b)]
    [['1', '01'], ['1', '2']]
    """
    if "U" not in (first.y.dtype.kind, second.y.dtype.kind):
        return first, second
    first, second = (
        table if table.y.dtype.kind == "U" else table._replace(y=np.array(list(map(str, table.y))))
        for table in (first, second)
    )
    return first, second


class Encoder:
    """Turns the rows of a table into numbers, the same columns for every file."""

    def __init__(self, text: tuple[str, ...] = ()):
        self.text = text

    def fit(self, table: Table) -> "Encoder":
        """Learn the columns, their words and their vocabulary from one file."""
        self.path, self.pieces = table.path, []
        if isinstance(table.x, np.ndarray):
            self.columns = table.x.shape[1]
            return self
        self.columns = list(table.x.columns)
        unknown = [name for name in self.text if name not in self.columns]
        if unknown:
            raise DataError(
                f"{table.path} has the columns {', '.join(self.columns)}; there is no {unknown[0]!r}."
            )
        for name in self.columns:
            self.pieces.append(self._piece(name, table.x[name]))
        if not self.pieces:
            raise DataError(f"{table.path} has a label column and nothing else.")
        return self

    def _piece(self, name: str, column: Any) -> Any:
        if name in self.text:
            from sklearn.feature_extraction.text import TfidfVectorizer

            try:
                return TfidfVectorizer(sublinear_tf=True, min_df=2).fit(
                    column.fillna("").astype(str)
                )
            except ValueError as error:
                raise DataError(f"{self.path}: column {name!r} as text: {error}") from error
        if column.dtype.kind in "biuf":
            return None
        from sklearn.preprocessing import OneHotEncoder

        if column.nunique() > FEW:
            raise DataError(
                f"{self.path}: column {name!r} has {column.nunique()} distinct texts, the first is "
                f"{str(column.iloc[0])[:40]!r}. Name it with --text {name} to use its words, or "
                f"leave it out with --drop {name}."
            )
        return OneHotEncoder(handle_unknown="ignore").fit(_words(column))

    def transform(self, table: Table) -> Any:
        """Return an array of float32, or a sparse matrix where there is text."""
        if isinstance(table.x, np.ndarray):
            found = table.x.shape[1]
            if self.columns != found:
                raise DataError(
                    f"{table.path} has {found} columns and {self.path} has "
                    f"{self.columns if isinstance(self.columns, int) else len(self.columns)}: "
                    "both files need the same."
                )
            return _finite(table.x.astype(np.float32), [str(i) for i in range(found)], table.path)
        if isinstance(self.columns, int) or set(table.x.columns) != set(self.columns):
            mine = [] if isinstance(self.columns, int) else self.columns
            odd = sorted(set(table.x.columns) ^ set(mine))
            raise DataError(
                f"{table.path} and {self.path} need the same columns; these are in one only: "
                f"{', '.join(odd[:8])}. Leave columns out with --drop."
            )
        parts, plain = [], []
        for name, piece in zip(self.columns, self.pieces, strict=True):
            column = table.x[name]
            if piece is None:
                if column.dtype.kind not in "biuf":
                    raise DataError(
                        f"{table.path}: column {name!r} has words, and numbers in {self.path}."
                    )
                plain.append(column.to_numpy(np.float32))
            elif name in self.text:
                parts.append(piece.transform(column.fillna("").astype(str)))
            else:
                parts.append(piece.transform(_words(column)))
        numbers = [
            name for name, piece in zip(self.columns, self.pieces, strict=True) if piece is None
        ]
        if plain:
            parts.insert(0, _finite(np.stack(plain, axis=1), numbers, table.path))
        if len(parts) == 1 and isinstance(parts[0], np.ndarray):
            return parts[0]
        from scipy import sparse

        joined = sparse.hstack(parts, format="csr", dtype=np.float32)
        return joined if self.text else joined.toarray()


def _words(column: Any) -> Any:
    return column.astype(object).where(column.notna(), "").astype(str).to_numpy().reshape(-1, 1)


def _finite(rows: np.ndarray, names: list[str], path: str) -> np.ndarray:
    bad = ~np.isfinite(rows)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise DataError(
            f"{path}: {rows_have(bad.any(axis=1).sum())} missing or infinite numbers, the first in "
            f"row {row} (rows count from 0), column {names[column]}: fill them or leave the rows out."
        )
    return rows

"""Rows and labels as a spreadsheet, and a run's page, show them."""

import csv
import io
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from .._files.files import write_whole
from ..report import RunFolder, picture, shown
from ._columns import is_frame
from ._tables import Table

COLUMNS, LONGEST = 6, 200
"""Columns of a row, and characters of a cell, on the page."""
_BLANK = " \t\n\r\v\f\u00a0\u200b\u2060\u3000\ufeff"
"""What a spreadsheet may leave out before a sign."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def write_csv(path: Path, columns: list[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a list, whole or not at all."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode("utf-8", "backslashreplace"))


def cell(label: object) -> str:
    r"""Return a label for a spreadsheet: text that it would run as a formula gets an apostrophe.

    Control codes and controls of direction are written out, but for tabs and ends of lines.

    >>> [cell(label) for label in ("cat", "-1", "=1+1", " @SUM(A1)", -2)]
    ['cat', '-1', "'=1+1", "' @SUM(A1)", '-2']
    """
    text = shown(str(label), allowed="\t\n\r")
    rest = text.lstrip(_BLANK)
    first = unicodedata.normalize("NFKC", rest[:1])  # a full-width sign is one too
    formula = first in ("=", "+", "-", "@") or text.startswith(("\t", "\r", "\n"))
    return f"'{text}" if formula and not _NUMBER.fullmatch(text.strip()) else text


def row_shown(
    folder: RunFolder, table: Table, i: int, kind: str, first: Sequence[str] = ()
) -> dict[str, object]:
    """Return a row for the page: its picture, which is written, or columns, beginning with `first`."""
    x = table.x.iloc[i].to_numpy() if is_frame(table.x) else table.x[i]
    if table.image_shape:
        pixels = x.astype(float).reshape(table.image_shape)
        return {"image": write_picture(folder, kind, i, pixels), "row": None}
    row = dict(zip(table.columns, x, strict=True))
    names = [*first, *(name for name in table.columns if name not in first)][:COLUMNS]
    return {"image": None, "row": {name: _short(row[name]) for name in names}}


def write_picture(folder: RunFolder, kind: str, i: int, pixels: np.ndarray) -> str:
    """Write an image among the run's figures, and return its name there."""
    name = f"figures/{kind}-{i}.png"
    picture(folder.path / name, pixels)
    return name


def columns_note(table: Table, which: str = "first") -> str:
    """Return a sentence on the columns that are not shown, or nothing."""
    if table.image_shape or table.x.shape[1] <= COLUMNS:
        return ""
    return f" The {which} {COLUMNS} of {table.x.shape[1]} columns are shown."


def _short(value: object) -> int | float | str:
    if isinstance(value, int | float | np.integer | np.floating):
        return int(value) if float(value).is_integer() else float(value)
    text = str(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."

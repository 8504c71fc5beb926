"""`foretune clean`: a file of labelled rows, and verified ones, -> suspects, clean rows, a report."""

import io
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._files.files import write_whole
from ..report import RunFolder, histogram, say, write_page
from . import LabelCleaner
from ._checks import positions
from ._columns import is_frame
from ._shown import cell, columns_note, row_shown, write_csv
from ._tables import (
    AS_TEXT,
    DataError,
    Table,
    check_columns,
    read_frame,
    read_table,
    with_labels_alike,
)

SHOWN = 24
FEW_KINDS = 20
"""Labels of so few kinds are classes, whatever they look like."""
ROW = "row"
"""The column of row numbers in the lists, by which verified rows are found without `--id`."""


class Settings(NamedTuple):
    """What is asked for."""

    train: str
    clean: str | None = None
    checked: str | None = None
    id: str | None = None
    label: str | None = None
    text: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    image: tuple[int, ...] | None = None
    relabel: bool = False
    seed: int = 0


def run(out: str | Path, settings: Settings) -> Path:
    """Clean, write the lists and the report, and return the report's path."""
    options = (settings.label, settings.image, settings.drop)
    whole = read_table(settings.train, *options)
    check_classes(whole)
    files = [settings.train]
    if settings.id is not None and settings.checked is None:
        raise DataError(f"--id {settings.id} finds the rows of --checked: give that file, too.")
    table, checked = whole, {}
    if settings.checked is not None:
        files.append(settings.checked)
        table, checked = verified(whole, settings)
    tables = [table]
    if settings.clean is not None:
        more = read_table(settings.clean, *options)
        if is_frame(more.x) and settings.id is not None:
            more = more._replace(x=more.x.drop(columns=settings.id, errors="ignore"))
        tables = [*with_labels_alike(table, more)]
        files.append(settings.clean)
    check_columns(tables)
    rows, labels = tables[0].x, tables[0].y
    clean = (tables[1].x, tables[1].y) if len(tables) > 1 else (None, None)
    cleaner = LabelCleaner(text=settings.text, random_state=settings.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fit says it again
        cleaner.inputs(rows, labels, clean, (checked.get("checked"), checked.get("checked_labels")))
    trusted = len(checked.get("checked", ())) + (len(tables[1].y) if len(tables) > 1 else 0)
    asked = settings._asdict() | {"rows": len(table.y), "trusted rows": trusted}
    title = f"Suspicious labels in {Path(settings.train).name}"
    folder = RunFolder(out, kind="clean", title=title, settings=asked, files=files)
    if folder.result is None:
        say(f"judging {len(labels):,} labels, each by models that have not seen its row")
        cleaner.fit(rows, labels, *clean, **checked)
        written = whole.as_written()
        write_lists(folder, cleaner, written._replace(y=labels), checked.get("checked", ()))
        write_cleaned(folder, cleaner, written, settings.relabel)
        result = summary(cleaner, tables[0], trusted)
        shown = tables[0]
        if settings.id is not None:
            x: Any = shown.x
            ids: Any = written.x
            shown = shown._replace(x=x.assign(**{settings.id: ids[settings.id]}))
        found = gallery(folder, cleaner, shown, settings.id)
        result |= {"figures": draw(folder, cleaner), "gallery": found}
        folder.write("result.json", result)
    return write_page(folder.path)


def verified(table: Table, settings: Settings) -> tuple[Table, dict[str, np.ndarray]]:
    """Return the table without its column of identifiers, and its verified rows with their labels.

    The file of these has a column of labels, and one that finds the row: of the name `--id`, which both
    files have, or of row numbers, as the list of suspects has them.
    """
    name, path = settings.id or ROW, Path(settings.checked or "")
    frame: Any = read_frame(path, **AS_TEXT)
    lacking = [column for column in (name, table.label) if column not in frame.columns]
    if lacking:
        raise DataError(
            f"{path} has the columns {', '.join(frame.columns)}: verified rows need {name!r}, "
            f"which finds the row (name yours with --id), and {table.label!r}, its right label."
        )
    if settings.id is None:
        known = {str(i): i for i in range(len(table.y))}
    elif is_frame(table.x) and settings.id in table.x.columns:
        values: Any = table.as_written().x[settings.id].astype(str)
        if values.duplicated().any():
            twice = values[values.duplicated()].iloc[0]
            raise DataError(f"{table.path}: {settings.id!r} is {twice!r} in more than one row.")
        known = {value: i for i, value in enumerate(values)}
        table = table._replace(x=table.x.drop(columns=settings.id))
    else:
        raise DataError(f"{table.path} has no column {settings.id!r} to find rows by.")
    frame = frame[frame[table.label] != ""]
    if not len(frame):
        raise DataError(f"{path} has no verified row: no row has a label.")
    unknown = [value for value in frame[name] if value not in known]
    if unknown:
        raise DataError(f"{path}: {table.path} has no row whose {name} is {unknown[0]!r}.")
    classes = np.unique(table.y)
    labels = positions(frame[table.label].to_numpy(str), classes.astype(str), str(path), table.path)
    rows = np.array([known[value] for value in frame[name]], int)
    return table, {"checked": rows, "checked_labels": classes[labels]}


def check_classes(table: Table) -> None:
    """Raise where labels are measurements: numbers of many kinds, some with a fraction."""
    kinds = np.unique(table.y)
    try:
        numbers = kinds.astype(np.float64)
    except ValueError:
        return
    fractions = kinds[np.isfinite(numbers) & (numbers != np.round(numbers))]
    if len(kinds) > FEW_KINDS and len(fractions):
        raise DataError(
            f"{table.path}: the labels are {len(kinds):,} different numbers, some with a fraction "
            f"({fractions[0]}): measurements, not classes. `foretune clean` judges classes: name "
            "their column by --label, or group the numbers into classes."
        )


def write_lists(
    folder: RunFolder, found: LabelCleaner, table: Table, checked: Iterable[Any] = ()
) -> None:
    """Write suspects.csv, the most suspicious first, and weights.csv, every row in its order.

    Both mark the verified rows. A suspect has the columns of its row too, unless it is an image.
    Values are as in the file, but text that a spreadsheet would run gets an apostrophe (`cell`).
    """
    known = set(checked)

    def judged(i: int) -> list[object]:
        doubt = f"{found.probability_wrong_[i]:.6f}"
        return [cell(table.y[i]), cell(found.suggested_[i]), doubt, int(i in known)]

    suspects = [int(i) for i in found.ranking_ if found.suspects_[i]]
    columns = [ROW, "observed", "suggested", "probability_wrong", "verified"]
    names = ["rank", *columns, *([] if table.image_shape else map(cell, table.columns))]
    lines = ([k, i, *judged(i), *map(cell, _values(table, i))] for k, i in enumerate(suspects, 1))
    write_csv(folder.path / "suspects.csv", names, lines)
    marks = enumerate(zip(found.weights_, found.suspects_, strict=True))
    lines = ([i, *judged(i), f"{weight:.6f}", int(mark)] for i, (weight, mark) in marks)
    write_csv(folder.path / "weights.csv", [*columns, "weight", "suspect"], lines)


def _values(table: Table, i: int) -> list[object]:
    if not is_frame(table.x):
        return [] if table.image_shape else table.x[i].tolist()
    return ["" if v != v or v is None else v for v in table.x.iloc[i].astype(object)]


def write_cleaned(folder: RunFolder, found: LabelCleaner, table: Table, relabel: bool) -> None:
    """Write the rows without the suspects, or with their suggested labels; verified labels are right.

    As cleaned.csv, or as cleaned.npz where the rows were such arrays. Values stay as they are.
    """
    keep = np.ones(len(table.y), bool) if relabel else ~found.suspects_
    labels = found.suggested_ if relabel else table.y
    if is_frame(table.x):
        rows = table.x[keep].assign(**{table.label: labels[keep]})
        write_whole(folder.path / "cleaned.csv", rows.to_csv(index=False).encode())
    else:
        data, shape = io.BytesIO(), table.image_shape or table.x.shape[1:]
        arrays = {"x": table.x[keep].reshape(-1, *shape), table.label: labels[keep]}
        np.savez_compressed(data, **arrays)
        write_whole(folder.path / "cleaned.npz", data.getvalue())


def summary(found: LabelCleaner, table: Table, trusted: int) -> dict[str, object]:
    """Return the headline, notes and the table of classes."""
    rows = []
    for name in found.classes_.tolist():
        mine = table.y == name
        suspects, likely = found.suspects_ & mine, "-"
        if suspects.any():
            labels, counts = np.unique(found.suggested_[suspects], return_counts=True)
            likely = str(labels[np.argmax(counts)])
        count, n = int(suspects.sum()), int(mine.sum())
        rows.append([str(name), n, count, f"{count / n:.1%}", likely])
    count, n = int(found.suspects_.sum()), len(table.y)
    helped = f"with the help of {trusted:,} trusted rows" if trusted else "without trusted rows"
    members = ", ".join(f"{name} ({weight:.2f})" for name, weight in found.ensemble_.items())
    columns = ["observed label", "rows", "suspects", "share", "most often suggested"]
    return {
        "headline": f"{count:,} of {n:,} labels are suspicious ({count / n:.1%}).",
        "notes": [
            f"The labels were judged {helped}, each by models that have not seen its row: {members}; "
            "a larger number gives a model more say. Rows count from 0, without a header. suspects.csv "
            "lists the suspects, weights.csv every row, cleaned.csv (or .npz) the rows without the "
            "suspects, or all with --relabel.",
            "The number of suspects balances false alarms against misses: look at each before you "
            f"change it. {_expected(found)}",
        ],
        "tables": [{"title": "Suspects by observed label", "columns": columns, "rows": rows}],
    }


def _expected(found: LabelCleaner) -> str:
    low, high = found.noise_rate_interval_
    wrong = f"Between {low:.1%} and {high:.1%} of all labels are expected to be wrong"
    if found.unflagged_ is None or found.unflagged_interval_ is None:
        return f"{wrong}. Verified rows would show how many of them are not suspected."
    low, high = found.unflagged_interval_
    return f"{wrong}; {low:.0f} to {high:.0f} of the wrong labels are not suspected."


def draw(folder: RunFolder, found: LabelCleaner) -> list[dict[str, str]]:
    """Draw the weights."""
    masks = {"others": ~found.suspects_, "suspects": found.suspects_}
    groups = {name: found.weights_[mask] for name, mask in masks.items() if mask.any()}
    xlabel = "weight: the probability that the label is right"
    histogram(folder.figures / "weights.svg", groups, xlabel=xlabel)
    return [{"file": "figures/weights.svg", "title": "Weights", "caption": "All rows."}]


def gallery(
    folder: RunFolder, found: LabelCleaner, table: Table, name: str | None
) -> dict[str, object]:
    """Return the most suspicious rows, by the column that names them; or as pictures of images."""
    first = [*([] if name is None else [name]), *found.columns_by_importance()]
    items = [
        {
            "index": int(i),
            "observed": str(table.y[i]),
            "suggested": str(found.suggested_[i]),
            "probability_wrong": float(found.probability_wrong_[i]),
            "wrong": None,
            **row_shown(folder, table, int(i), "suspect", first),
        }
        for i in found.ranking_[:SHOWN]
        if found.suspects_[i]
    ]
    count, columns = int(found.suspects_.sum()), columns_note(table, "most important")
    note = f"The first {len(items)} of {count} suspects.{columns}" if items else "None."
    return {"title": "Most suspicious labels", "note": note, "items": items}

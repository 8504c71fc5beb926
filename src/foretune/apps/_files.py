"""`foretune clean`: a file of labelled rows, and one of checked ones, -> suspects and a report."""

import csv
import io
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._outer.callbacks import History
from .._outer.checkpoint import Checkpoint
from .._outer.files import write_whole
from ..report import RunFolder, curves, histogram, write_page
from . import LabelCleaner
from ._gallery import gallery_item
from ._tables import Encoder, Table, read_table, with_labels_alike

SHOWN = 24
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class Settings(NamedTuple):
    """What is asked for."""

    train: str
    clean: str | None = None
    label: str | None = None
    text: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    image: tuple[int, ...] | None = None
    model: str = "kernel"
    method: str = "noise"
    budget: float | None = None
    steps: int | None = None
    iterations: int | None = None
    seed: int = 0


def run(out: str | Path, settings: Settings) -> Path:
    """Clean, write the lists and the report, and return the report's path."""
    options = (settings.label, settings.image, settings.drop)
    table, checked, files = read_table(settings.train, *options), None, [settings.train]
    if settings.clean is not None:
        table, checked = with_labels_alike(table, read_table(settings.clean, *options))
        files.append(settings.clean)
    encoder = Encoder(settings.text).fit(table)
    X = encoder.transform(table)
    clean = (None, None) if checked is None else (encoder.transform(checked), checked.y)
    asked = settings._asdict() | {
        "rows": len(table.y),
        "checked rows": len(checked.y) if checked else 0,
    }
    title = f"Suspicious labels in {Path(settings.train).name}"
    cleaner = LabelCleaner(
        settings.model,
        method=settings.method,
        budget=settings.budget,
        steps=settings.steps,
        hyper_steps=settings.iterations,
        random_state=settings.seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fit says it again
        cleaner._checked_input(X, table.y, *clean)  # before the folder is taken
    folder = RunFolder(out, kind="clean", title=title, settings=asked, files=files)
    if folder.result is not None:
        return write_page(folder.path)
    cleaner.callbacks = [Checkpoint(folder.checkpoints, every=10), History(folder.metrics)]
    cleaner.fit(X, table.y, *clean)
    if cleaner.stopped_ == "interrupted":
        raise KeyboardInterrupt
    write_lists(folder, cleaner, table)
    folder.write(
        "result.json",
        {
            **summary(cleaner, table, checked),
            "figures": draw(folder, cleaner),
            "gallery": gallery(folder, cleaner, table),
        },
    )
    return write_page(folder.path)


def write_lists(folder: RunFolder, cleaner: LabelCleaner, table: Table) -> None:
    """Write suspects.csv, the most suspicious first, and weights.csv, every row in its order.

    Labels are as in the file that was read, but for one thing: text that a spreadsheet would take for
    a formula gets an apostrophe before it (`cell`).
    """
    suspects = [i for i in cleaner.ranking_ if cleaner.suspects_[i]]
    _write_csv(
        folder.path / "suspects.csv",
        ["rank", "row", "given", "suggested", "confidence", "weight"],
        ([rank, i, *_judgement(cleaner, table, i)] for rank, i in enumerate(suspects, start=1)),
    )
    _write_csv(
        folder.path / "weights.csv",
        ["row", "given", "suggested", "confidence", "weight", "suspect"],
        (
            [i, *_judgement(cleaner, table, i), int(cleaner.suspects_[i])]
            for i in range(len(table.y))
        ),
    )


def _write_csv(path: Path, columns: list[str], rows: Iterable[list[Any]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode("utf-8", "backslashreplace"))


def cell(label: Any) -> str:
    """Return a label for a spreadsheet: text that it would run as a formula gets an apostrophe.

    >>> [cell(label) for label in ("cat", "-1", "=1+1", "@SUM(A1)", -2)]
    ['cat', '-1', "'=1+1", "'@SUM(A1)", '-2']
    """
    text = str(label)
    formula = text.startswith(("=", "+", "-", "@", "\t", "\r")) and not _NUMBER.fullmatch(text)
    return f"'{text}" if formula else text


def _judgement(cleaner: LabelCleaner, table: Table, i: Any) -> list[Any]:
    numbers = (cleaner.confidence_[i], cleaner.weights_[i])
    labels = (table.y[i], cleaner.suggested_[i])
    return [*map(cell, labels), *(f"{number:.6f}" for number in numbers)]


def summary(cleaner: LabelCleaner, table: Table, checked: Table | None) -> dict[str, Any]:
    """Return the headline, notes and the table of classes."""
    rows = []
    for name in cleaner.classes_:
        mine = table.y == name
        found = cleaner.suspects_ & mine
        likely = "-"
        if found.any():
            names, counts = np.unique(cleaner.suggested_[found], return_counts=True)
            likely = str(names[np.argmax(counts)])
        rows.append(
            [str(name), int(mine.sum()), int(found.sum()), found.sum() / mine.sum(), likely]
        )
    count, n = int(cleaner.suspects_.sum()), len(table.y)
    helped = (
        f"with the help of {len(checked.y):,} checked rows" if checked else "without checked rows"
    )
    marked = [str(name) for name in cleaner.classes_ if cell(name) != str(name)]
    return {
        "headline": f"{count:,} of {n:,} labels are suspicious ({count / n:.1%}).",
        "notes": [
            f"Judged {helped}. Rows count from 0, without a header. "
            "suspects.csv lists the suspects, weights.csv every row.",
            "A suspect is a label that the model of the data and of its label noise holds to be wrong "
            "more probably than not; look at it before you change it."
            if cleaner.method == "noise"
            else "A suspect is a row whose weight fell to 0 in the descent on the checked rows' error.",
            *(
                f"In the two lists an apostrophe stands before {name}, which a spreadsheet would take "
                "for a formula."
                for name in marked[:3]
            ),
        ],
        "tables": [
            {
                "title": "Suspects by given label",
                "columns": ["given label", "rows", "suspects", "share", "most often suggested"],
                "rows": rows,
            }
        ],
    }


def draw(folder: RunFolder, cleaner: LabelCleaner) -> list[dict[str, str]]:
    """Draw the weights and the descent."""
    kept = ~cleaner.suspects_
    groups = {"suspects": cleaner.weights_[~kept], "kept": cleaner.weights_[kept]}
    histogram(
        folder.figures / "weights.svg",
        {name: values for name, values in groups.items() if len(values)},
        xlabel="weight: how far the label is trusted",
    )
    steps = [record["step"] for record in cleaner.history_]
    values = [record["value"] for record in cleaner.history_]
    line = {"label": "error", "x": steps, "y": values}
    curves(
        folder.figures / "descent.svg",
        [{"title": "", "ylabel": "held-out error", "lines": [line]}],
        xlabel="hyper-iteration",
    )
    return [
        {"file": "figures/weights.svg", "title": "Weights", "caption": "All rows."},
        {
            "file": "figures/descent.svg",
            "title": "The descent",
            "caption": "The error that the hypergradients lower.",
        },
    ]


def gallery(folder: RunFolder, cleaner: LabelCleaner, table: Table) -> dict[str, Any]:
    """Return the most suspicious rows, as pictures where rows are images."""
    items = []
    for i in cleaner.ranking_[:SHOWN]:
        if not cleaner.suspects_[i]:
            break
        pixels, row = None, None
        if table.image_shape:
            x = table.x[i] if isinstance(table.x, np.ndarray) else table.x.iloc[i].to_numpy()
            pixels = x.astype(float).reshape(table.image_shape)
        elif isinstance(table.x, np.ndarray):
            row = {str(j): float(v) for j, v in enumerate(table.x[i][:6])}
        else:
            row = {name: _short(table.x[name].iloc[i]) for name in table.x.columns[:6]}
        given, model = table.y[i], cleaner.suggested_[i]
        item = gallery_item(folder, cleaner, i, given=given, model=model, pixels=pixels, row=row)
        items.append(item)
    count = int(cleaner.suspects_.sum())
    note = f"The first {len(items)} of {count} suspects." if items else "No label is suspicious."
    if items and not table.image_shape and table.x.shape[1] > 6:
        note += f" The first 6 of {table.x.shape[1]} columns."
    return {"title": "Most suspicious labels", "note": note, "items": items}


def _short(value: Any) -> Any:
    if isinstance(value, (int, float, np.integer, np.floating)):
        return float(value)
    text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."

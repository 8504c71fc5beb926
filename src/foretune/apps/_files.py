"""`foretune clean`: a file of labelled rows, and one of checked ones, -> suspects and a report."""

import csv
import io
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._files.files import write_whole
from .._outer.callbacks import History
from .._outer.checkpoint import Checkpoint
from ..report import RunFolder, curves, histogram, write_page
from . import LabelCleaner, ValueCleaner, clean_labels
from ._columns import has_words, is_frame
from ._gallery import gallery_item
from ._tables import DataError, Encoder, Table, read_numbers, read_table, with_labels_alike

SHOWN = 24
FEW_KINDS = 20
"""Labels of so few kinds are classes, whatever they look like."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


BINS = 8
"""Groups of the reliability plot."""


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
    pool: bool = False
    pred_probs: str | None = None
    values: bool | None = None


def run(out: str | Path, settings: Settings) -> Path:
    """Clean, write the lists and the report, and return the report's path."""
    if settings.pred_probs is not None:
        return _run_on_predictions(out, settings)
    options = (settings.label, settings.image, settings.drop)
    table, checked, files = read_table(settings.train, *options), None, [settings.train]
    if settings.clean is not None:
        table, checked = with_labels_alike(table, read_table(settings.clean, *options))
        files.append(settings.clean)
    plain = settings.method == "noise" and settings.budget is None and not settings.image
    values = looks_numeric(table.y) if settings.values is None and plain else settings.values
    if values:
        return _run_on_values(out, settings, table, checked, files)
    # Words, dates and gaps are the pool's, unless the columns of text are named.
    pooled = settings.pool or (
        settings.method == "noise" and not settings.text and has_words(table.x)
    )
    if pooled and is_frame(table.x):
        encode = lambda table: table.x  # noqa: E731
    else:
        encode = Encoder(settings.text).fit(table).transform
    X = encode(table)
    clean = (None, None) if checked is None else (encode(checked), checked.y)
    cleaner = LabelCleaner(
        settings.model,
        estimator="pool" if pooled else None,
        method=settings.method,
        budget=settings.budget,
        steps=settings.steps,
        hyper_steps=settings.iterations,
        random_state=settings.seed,
    )
    if not pooled:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fit says it again
            cleaner._checked_input(X, table.y, *clean)  # before the folder is taken
    folder = _folder(out, settings, table, len(checked.y) if checked else 0, files)
    if folder.result is not None:
        return write_page(folder.path)
    cleaner.callbacks = [Checkpoint(folder.checkpoints, every=10), History(folder.metrics)]
    cleaner.fit(X, table.y, *clean)
    if cleaner.stopped_ == "interrupted":
        raise KeyboardInterrupt
    return _written(folder, cleaner, table, len(checked.y) if checked else 0)


def _run_on_values(
    out: str | Path, settings: Settings, table: Table, checked: Table | None, files: list[str]
) -> Path:
    """The same for labels that are numbers."""
    y = as_numbers(table)
    if has_words(table.x) and not settings.text:
        encode = lambda table: table.x  # noqa: E731
    else:
        encode = Encoder(settings.text).fit(table).transform
    X, clean, count = encode(table), (None, None), 0
    if checked is not None:
        clean, count = (encode(checked), as_numbers(checked)), len(checked.y)
    cleaner = ValueCleaner(random_state=settings.seed)
    cleaner._checked_input(X, y, *clean)  # before the folder is taken
    folder = _folder(out, settings, table, count, files)
    if folder.result is not None:
        return write_page(folder.path)
    return _written(folder, cleaner.fit(X, y, *clean), table._replace(y=y), count)


def looks_numeric(labels: np.ndarray) -> bool:
    """Return whether labels are measurements: numbers of many kinds, some with a fraction."""
    if len(np.unique(labels)) <= FEW_KINDS:
        return False
    try:
        values = labels.astype(np.float64)
    except ValueError:
        return False
    return bool(np.isfinite(values).all() and (values != np.round(values)).any())


def as_numbers(table: Table) -> np.ndarray:
    """Return labels as numbers, or raise with the first that is none."""
    for row, label in enumerate(table.y):
        try:
            float(label)
        except ValueError:
            raise DataError(
                f"{table.path}: the label of row {row} is {str(label)!r}, not a number (rows count "
                "from 0): mend it, or leave --values out."
            ) from None
    return table.y.astype(np.float64)


def _run_on_predictions(out: str | Path, settings: Settings) -> Path:
    """The same for class probabilities that the user brings; checked rows are rows of the table."""
    table = read_table(settings.train, settings.label, settings.image, settings.drop)
    files, rows, right = [settings.train, str(settings.pred_probs)], None, None
    if settings.clean is not None:
        files.append(settings.clean)
        checked = _verified(settings.clean, settings.label)
        if not is_frame(checked.x) or "row" not in checked.x.columns:
            raise DataError(
                f"{settings.clean}: with --pred-probs the checked rows are rows of {settings.train}: "
                f"give a .csv with the columns row (counted from 0) and {settings.label or 'label'}."
            )
        table, checked = with_labels_alike(table, checked)
        rows, right = checked.x["row"].to_numpy(), checked.y
    found = clean_labels(
        table.y, read_numbers(str(settings.pred_probs)), rows, right, random_state=settings.seed
    )
    count = 0 if rows is None else len(rows)
    folder = _folder(out, settings, table, count, files)
    if folder.result is not None:
        return write_page(folder.path)
    return _written(folder, found, table, count)


def _verified(path: str, label: str | None) -> Table:
    """Return verified rows, their labels in the column of that name, or in `label`."""
    try:
        return read_table(path, label)
    except DataError:
        if label is None:
            raise
    return read_table(path, None)


def _folder(
    out: str | Path, settings: Settings, table: Table, checked: int, files: list[str]
) -> RunFolder:
    asked = settings._asdict() | {"rows": len(table.y), "checked rows": checked}
    title = f"Suspicious labels in {Path(settings.train).name}"
    return RunFolder(out, kind="clean", title=title, settings=asked, files=files)


def _written(folder: RunFolder, cleaner: Any, table: Table, checked: int) -> Path:
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


def write_lists(folder: RunFolder, cleaner: Any, table: Table) -> None:
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


def _judgement(cleaner: Any, table: Table, i: Any) -> list[Any]:
    numbers = (cleaner.confidence_[i], cleaner.weights_[i])
    labels = (table.y[i], cleaner.suggested_[i])
    return [*map(cell, labels), *(f"{number:.6f}" for number in numbers)]


def summary(cleaner: Any, table: Table, checked: int) -> dict[str, Any]:
    """Return the headline, notes and the table of classes."""
    rows = []
    names = getattr(cleaner, "classes_", ())  # numbers have none
    for name in names:
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
    helped = f"with the help of {checked:,} checked rows" if checked else "without checked rows"
    marked = [str(name) for name in names if cell(name) != str(name)]
    what = "labels" if len(names) else "values"
    return {
        "headline": f"{count:,} of {n:,} {what} are suspicious ({count / n:.1%}).",
        "notes": [
            f"Judged {helped}. Rows count from 0, without a header. "
            "suspects.csv lists the suspects, weights.csv every row.",
            f"A suspect is one of the {what} that the model of data and noise holds to be wrong "
            "more probably than not; look at it before you change it. By its probabilities some "
            f"{cleaner.unflagged_:.0f} of the other {what} are wrong too."
            if getattr(cleaner, "method", "noise") == "noise"
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
        ]
        if rows
        else [],
    }


def draw(folder: RunFolder, cleaner: Any) -> list[dict[str, str]]:
    """Draw the weights and the descent."""
    kept = ~cleaner.suspects_
    groups = {"suspects": cleaner.weights_[~kept], "kept": cleaner.weights_[kept]}
    histogram(
        folder.figures / "weights.svg",
        {name: values for name, values in groups.items() if len(values)},
        xlabel="weight: how far the label is trusted",
    )
    shown = [{"file": "figures/weights.svg", "title": "Weights", "caption": "All rows."}]
    claims = getattr(cleaner, "reliability_", None)
    if claims is not None:
        shown.append(draw_reliability(folder, claims))
    if not cleaner.history_:
        return shown
    steps = [record["step"] for record in cleaner.history_]
    values = [record["value"] for record in cleaner.history_]
    line = {"label": "error", "x": steps, "y": values}
    curves(
        folder.figures / "descent.svg",
        [{"title": "", "ylabel": "held-out error", "lines": [line]}],
        xlabel="hyper-iteration",
    )
    descent = {
        "file": "figures/descent.svg",
        "title": "The descent",
        "caption": "The error that the hypergradients lower.",
    }
    return [*shown, descent]


def draw_reliability(folder: RunFolder, claims: np.ndarray) -> dict[str, str]:
    """Draw, by groups of checked rows, how often a label was right that was held to be so."""
    groups = np.array_split(claims[np.argsort(claims[:, 0], kind="stable")], BINS)
    x, y, n = np.array([[*group.mean(0), len(group)] for group in groups if len(group)]).T
    error = np.sqrt(np.maximum(y * (1 - y), 1 / (4 * n)) / n)
    lines = [
        {"label": "checked rows", "x": x, "y": y, "band": (y - error, y + error)},
        {"label": "if probabilities are right", "x": [0.0, 1.0], "y": [0.0, 1.0]},
    ]
    curves(
        folder.figures / "reliability.svg",
        [{"title": "", "ylabel": "share that is right", "lines": lines}],
        xlabel="probability that the label is right",
    )
    return {
        "file": "figures/reliability.svg",
        "title": "Reliability",
        "caption": f"{len(claims):,} checked rows in {len(groups)} groups, each judged by what was "
        "learnt without it; the band is one standard error.",
    }


def gallery(folder: RunFolder, cleaner: Any, table: Table) -> dict[str, Any]:
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

"""`foretune clean`: a file of labelled rows and a file of checked ones -> suspects and a report."""

import csv
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._outer.callbacks import History
from .._outer.checkpoint import Checkpoint
from ..report import RunFolder, curves, digest, histogram, write_page
from . import LabelCleaner
from ._gallery import gallery_item
from ._tables import Encoder, Table, read_table, with_labels_alike

SHOWN = 24


class Settings(NamedTuple):
    """What is asked for."""

    train: str
    clean: str
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
    table, checked = with_labels_alike(
        read_table(settings.train, *options), read_table(settings.clean, *options)
    )
    encoder = Encoder(settings.text).fit(table)
    X, X_checked = encoder.transform(table), encoder.transform(checked)
    title = f"Suspicious labels in {Path(settings.train).name}"
    files = {
        "rows": len(table.y),
        "checked rows": len(checked.y),
        "digests": [digest(settings.train), digest(settings.clean)],
    }
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
        cleaner._checked_input(X, table.y, X_checked, checked.y)  # before the folder is taken
    folder = RunFolder(out, kind="clean", title=title, settings={**settings._asdict(), **files})
    if folder.result is not None:
        return write_page(folder.path)
    cleaner.callbacks = [Checkpoint(folder.checkpoints, every=10), History(folder.metrics)]
    cleaner.fit(X, table.y, X_checked, checked.y)
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
    """Write suspects.csv, the most suspicious first, and weights.csv, every row in its order."""
    columns = ["rank", "row", "given", "suggested", "confidence", "weight"]
    suspects = [i for i in cleaner.ranking_ if cleaner.suspects_[i]]
    with (folder.path / "suspects.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for rank, i in enumerate(suspects, start=1):
            writer.writerow([rank, i, table.y[i], *_judgement(cleaner, i)])
    with (folder.path / "weights.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "given", "suggested", "confidence", "weight", "suspect"])
        for i, given in enumerate(table.y):
            writer.writerow([i, given, *_judgement(cleaner, i), int(cleaner.suspects_[i])])


def _judgement(cleaner: LabelCleaner, i: Any) -> list[Any]:
    numbers = (cleaner.confidence_[i], cleaner.weights_[i])
    return [cleaner.suggested_[i], *(f"{number:.6f}" for number in numbers)]


def summary(cleaner: LabelCleaner, table: Table, checked: Table) -> dict[str, Any]:
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
    return {
        "headline": f"{count:,} of {n:,} labels are suspicious ({count / n:.1%}).",
        "notes": [
            f"Judged with the help of {len(checked.y):,} checked rows. Rows count from 0, without a "
            "header. suspects.csv lists the suspects, weights.csv every row.",
            "A suspect is a label that the model of the data and of its label noise holds to be wrong "
            "more probably than not; look at it before you change it."
            if cleaner.method == "noise"
            else "A suspect is a row whose weight fell to 0 in the descent on the checked rows' error.",
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

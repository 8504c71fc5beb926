"""`foretune clean`: a file of labelled rows, and one of trusted ones, -> suspects and a report."""

import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..report import RunFolder, curves, histogram, write_page
from . import LabelCleaner
from ._shown import cell, columns_note, row_shown, write_csv
from ._tables import DataError, Table, check_columns, encoded, read_table, with_labels_alike

SHOWN = 24
FEW_KINDS = 20
"""Labels of so few kinds are classes, whatever they look like."""
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
    seed: int = 0


def run(out: str | Path, settings: Settings) -> Path:
    """Clean, write the lists and the report, and return the report's path."""
    options = (settings.label, settings.image, settings.drop)
    table = read_table(settings.train, *options)
    check_classes(table)
    tables, files = [table], [settings.train]
    if settings.clean is not None:
        tables = [*with_labels_alike(table, read_table(settings.clean, *options))]
        files.append(settings.clean)
    check_columns(tables, settings.text)
    rows = encoded(tables, settings.text) if settings.text else [table.x for table in tables]
    clean = (rows[1], tables[1].y) if len(tables) > 1 else (None, None)
    trusted = len(tables[1].y) if len(tables) > 1 else 0
    cleaner = LabelCleaner(random_state=settings.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fit says it again
        cleaner.inputs(rows[0], tables[0].y, clean)  # before the folder is taken
    asked = settings._asdict() | {"rows": len(table.y), "trusted rows": trusted}
    title = f"Suspicious labels in {Path(settings.train).name}"
    folder = RunFolder(out, kind="clean", title=title, settings=asked, files=files)
    if folder.result is None:
        cleaner.fit(rows[0], tables[0].y, *clean)
        write_lists(folder, cleaner, tables[0])
        result = summary(cleaner, tables[0], trusted)
        result |= {"figures": draw(folder, cleaner), "gallery": gallery(folder, cleaner, tables[0])}
        folder.write("result.json", result)
    return write_page(folder.path)


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


def write_lists(folder: RunFolder, found: LabelCleaner, table: Table) -> None:
    """Write suspects.csv, the most suspicious first, and weights.csv, every row in its order.

    Labels are as in the file that was read, but for one thing: text that a spreadsheet would take for
    a formula gets an apostrophe before it (`cell`).
    """

    def judged(i: int) -> list[str]:
        return [cell(table.y[i]), cell(found.suggested_[i]), f"{found.probability_wrong_[i]:.6f}"]

    suspects = [int(i) for i in found.ranking_ if found.suspects_[i]]
    columns = ["row", "observed", "suggested", "probability_wrong"]
    write_csv(
        folder.path / "suspects.csv",
        ["rank", *columns],
        ([rank, i, *judged(i)] for rank, i in enumerate(suspects, start=1)),
    )
    write_csv(
        folder.path / "weights.csv",
        [*columns, "weight", "suspect"],
        (
            [i, *judged(i), f"{found.weights_[i]:.6f}", int(found.suspects_[i])]
            for i in range(len(table.y))
        ),
    )


def summary(found: LabelCleaner, table: Table, trusted: int) -> dict[str, object]:
    """Return the headline, notes and the table of classes."""
    rows, names = [], found.classes_.tolist()
    for name in names:
        mine = table.y == name
        suspects, likely = found.suspects_ & mine, "-"
        if suspects.any():
            labels, counts = np.unique(found.suggested_[suspects], return_counts=True)
            likely = str(labels[np.argmax(counts)])
        count, n = int(suspects.sum()), int(mine.sum())
        rows.append([str(name), n, count, count / n, likely])
    count, n = int(found.suspects_.sum()), len(table.y)
    helped = f"with the help of {trusted:,} trusted rows" if trusted else "without trusted rows"
    columns = ["observed label", "rows", "suspects", "share", "most often suggested"]
    return {
        "headline": f"{count:,} of {n:,} labels are suspicious ({count / n:.1%}).",
        "notes": [
            f"Judged {helped}. Rows count from 0, without a header. "
            "suspects.csv lists the suspects, weights.csv every row.",
            f"A suspect is one of the labels that the model of data and noise holds to be wrong "
            "more probably than not; look at it before you change it. By its probabilities some "
            f"{found.unflagged_:.0f} of the other labels are wrong too.",
            *(
                f"In the two lists an apostrophe stands before {name}, which a spreadsheet would take "
                "for a formula."
                for name in [name for name in map(str, names) if cell(name) == f"'{name}"][:3]
            ),
        ],
        "tables": [{"title": "Suspects by observed label", "columns": columns, "rows": rows}],
    }


def draw(folder: RunFolder, found: LabelCleaner) -> list[dict[str, str]]:
    """Draw the weights and the descent."""
    groups = {
        "suspects": found.weights_[found.suspects_],
        "others": found.weights_[~found.suspects_],
    }
    histogram(
        folder.figures / "weights.svg",
        {name: values for name, values in groups.items() if len(values)},
        xlabel="weight: the probability that the label is right",
    )
    shown = [{"file": "figures/weights.svg", "title": "Weights", "caption": "All rows."}]
    if found.reliability_ is not None:
        shown.append(draw_reliability(folder, found.reliability_))
    if found.history_:
        x, y = ([record[name] for record in found.history_] for name in ("step", "value"))
        lines = [{"label": "error", "x": x, "y": y}]
        panel = {"title": "", "ylabel": "held-out error", "lines": lines}
        curves(folder.figures / "descent.svg", [panel], xlabel="hyper-iteration")
        caption = "The error that the hypergradients lower."
        shown.append({"file": "figures/descent.svg", "title": "The descent", "caption": caption})
    return shown


def draw_reliability(folder: RunFolder, claims: np.ndarray) -> dict[str, str]:
    """Draw, by groups of trusted rows, how often a label was right that was held to be so."""
    groups = np.array_split(claims[np.argsort(claims[:, 0], kind="stable")], BINS)
    x, y, n = np.array([[*group.mean(0), len(group)] for group in groups if len(group)]).T
    error = np.sqrt(np.maximum(y * (1 - y), 1 / (4 * n)) / n)
    lines = [
        {"label": "trusted rows", "x": x, "y": y, "band": (y - error, y + error)},
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
        "caption": f"{len(claims):,} trusted rows in {len(groups)} groups, each judged by what was "
        "learnt without it; the band is one standard error.",
    }


def gallery(folder: RunFolder, found: LabelCleaner, table: Table) -> dict[str, object]:
    """Return the most suspicious rows, as pictures where rows are images."""
    items = [
        {
            "index": int(i),
            "observed": str(table.y[i]),
            "suggested": str(found.suggested_[i]),
            "probability_wrong": float(found.probability_wrong_[i]),
            "wrong": None,
            **row_shown(folder, table, int(i), "suspect"),
        }
        for i in found.ranking_[:SHOWN]
        if found.suspects_[i]
    ]
    count = int(found.suspects_.sum())
    note = "No label is suspicious."
    if items:
        note = f"The first {len(items)} of {count} suspects.{columns_note(table)}"
    return {"title": "Most suspicious labels", "note": note, "items": items}

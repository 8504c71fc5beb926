"""Tables and figures of few-shot learning."""

from functools import partial
from typing import Any

import jax
import numpy as np

from foretune.report import curves, picture

from ..runs import RunFolder, logarithmic
from .tasks import Letters, Size, sampled

Records = list[dict[str, Any]]
Cells = dict[tuple[str, int, int, int], Records]  # by method, ways, shots and inner steps
PROTOTYPES = "prototypical network"
BY_STEPS = ("MAML", "representation, own head")
OURS = ("MAML", "MAML from class means", "representation, own head")


def describe(
    folder: RunFolder, settings: Any, letters: Letters, records: Records, usual: dict[str, int]
) -> dict[str, Any]:
    """Return the result: headline, tables, figures, and every number behind them.

    `usual` are the methods of the main table with their inner steps.
    """
    cells: Cells = {}
    for r in records:
        cells.setdefault((r["method"], r["ways"], r["shots"], r["inner"]), []).append(r)
    ways, shots = settings.sizes[0]
    scores = {m: mean_of(cells[m, ways, shots, inner], m)[0] for m, inner in usual.items()}
    best = max((m for m in usual if m in OURS), key=lambda m: scores[m])
    return {
        "headline": f"{Size(ways, shots, 0)}: {100 * scores[best]:.1f} % by {best}, "
        f"{100 * scores[PROTOTYPES]:.1f} % by prototypical networks.",
        "notes": [
            f"Accuracy on {settings.test:,} tasks of classes that were not seen; ± is the standard "
            f"error over tasks, seeds: {settings.seeds}. Each method made {settings.steps:,} steps "
            f"of {settings.tasks} tasks (20 ways: a quarter of them) with the same layers "
            f"({'-'.join(map(str, settings.widths))}), normalised per image: no image sees another of "
            f"its query. Learnt from {len(letters.train):,} classes, tested on {len(letters.test):,}.",
        ],
        "tables": [results(settings, cells, usual), by_steps(settings, cells), rates(records)],
        "figures": [*draw_steps(folder, settings, cells), *pictures(folder, letters, ways, shots)],
        "values": records,
    }


def mean_of(records: Records, name: str) -> tuple[float, float]:
    """Return the mean over seeds and its standard error over tasks."""
    right = [r["accuracy"][name] for r in records]
    error = np.sqrt(np.sum([a["error"] ** 2 for a in right])) / len(right)
    return float(np.mean([a["mean"] for a in right])), float(error)


def shown(records: Records, name: str) -> str:
    """Return the same in per cent."""
    mean, error = mean_of(records, name)
    return f"{100 * mean:.2f} ± {100 * error:.2f}"


def results(settings: Any, cells: Cells, usual: dict[str, int]) -> dict[str, Any]:
    """Return the table of all methods on all sizes of tasks."""
    rows = []
    for method, inner in usual.items():
        found = [cells[method, ways, shots, inner] for ways, shots in settings.sizes]
        seconds = np.mean([r["seconds"] for r in found[0]])
        rows.append([method, inner or None, *(shown(f, method) for f in found), round(seconds)])
    pretrained = next(rs for (m, *_), rs in cells.items() if m == "pretrained")
    for head in ("own head", "nearest mean"):
        names = [f"pretrained, {head}, {w} ways, {s} shots" for w, s in settings.sizes]
        seconds = round(np.mean([r["seconds"] for r in pretrained]))
        rows.append([f"pretrained, {head}", None, *(shown(pretrained, n) for n in names), seconds])
    columns = ["method", "inner steps", *(str(Size(w, s, 0)) for w, s in settings.sizes), "seconds"]
    note = "Seconds of learning at the first size, compilation included."
    return {"title": "Accuracy in per cent", "note": note, "columns": columns, "rows": rows}


def by_steps(settings: Any, cells: Cells) -> dict[str, Any]:
    """Return the table of inner steps, in learning as in the test."""
    ways, shots = settings.sizes[0]
    rows = [
        [method, inner, shown(found, method), round(np.mean([r["seconds"] for r in found]))]
        for (method, w, s, inner), found in sorted(cells.items(), key=lambda item: item[0][3])
        if (w, s) == (ways, shots) and method in BY_STEPS
    ]
    rows.sort(key=lambda row: row[0])
    return {
        "title": f"Inner steps: {Size(ways, shots, 0)}",
        "note": "Learnt and tested with so many steps on a task's support, by exact gradients. "
        "With 200 of them, a quarter of the outer steps.",
        "columns": ["method", "inner steps", "accuracy", "seconds"],
        "rows": rows,
    }


def rates(records: Records) -> dict[str, Any]:
    """Return the table of learnt rates."""
    rows = [
        [r["method"], r["ways"], r["shots"], r["inner"], name, f"{rate:.4g}"]
        for r in records
        if r["seed"] == 0
        for name, rate in r.get("rates", {}).items()
    ]
    columns = ["method", "ways", "shots", "inner steps", "of", "learnt"]
    return {"title": "Learnt rates, penalties and scales", "columns": columns, "rows": rows}


def draw_steps(folder: RunFolder, settings: Any, cells: Cells) -> list[dict[str, str]]:
    """Draw accuracy against the number of inner steps."""
    ways, shots = settings.sizes[0]
    lines = []
    for method in BY_STEPS:
        found = sorted(
            (i, rs) for (m, w, s, i), rs in cells.items() if (m, w, s) == (method, ways, shots)
        )
        y = [100 * mean_of(rs, method)[0] for _, rs in found]
        lines.append({"label": method, "x": [i for i, _ in found], "y": y})
    panel = {"title": str(Size(ways, shots, 0)), "ylabel": "accuracy in %", "lines": lines}
    log = partial(logarithmic, which="x")
    curves(folder.figures / "steps.svg", [panel], xlabel="inner steps", scale=log)
    title = "What more steps on a task do"
    return [
        {"file": "figures/steps.svg", "title": title, "caption": "Learnt and tested with them."}
    ]


def pictures(folder: RunFolder, letters: Letters, ways: int, shots: int) -> list[dict[str, str]]:
    """Draw some test tasks: a row for each class, its support first."""
    shown = []
    for k in range(3):
        size = Size(ways, shots, 5)
        pairs = sampled(jax.random.key(k), letters.test, size)
        parts = [np.asarray(x).reshape(ways, -1, *x.shape[1:3]) for x, _ in pairs]
        gap = np.ones((ways, 1, *parts[0].shape[2:])) / 2
        tiles = np.concatenate([parts[0], gap, parts[1]], 1)
        rows, columns, h, w = tiles.shape
        picture(
            folder.figures / f"task-{k}.png",
            1 - tiles.swapaxes(1, 2).reshape(rows * h, columns * w),
        )
        caption = (
            f"Left of the grey column the support, {shots} of each class; right of it the query."
        )
        shown.append(
            {"file": f"figures/task-{k}.png", "title": f"Test task {k + 1}", "caption": caption}
        )
    return shown

"""Tables and figures of the experiment on task interactions."""

from typing import Any

import numpy as np

from foretune.report import curves

from ..runs import RunFolder, drawing
from .groups import VEHICLES
from .plot import plot_task_graph

IN_PAPER = {
    "cifar10": {
        "STL": 67.47,
        "NMTL": 69.41,
        "HMTL": 70.85,
        "HMTL-S": 71.62,
        "OKL (Dinuzzo et al.)": 69.96,
        "p-norm, p = 2": 70.30,
        "p-norm, p = 4/3": 70.96,
    },
    "cifar100": {"STL": 18.99, "NMTL": 19.19, "HMTL": 21.15, "HMTL-S": 22.09},
}
REFERENCE = ("logistic regression", "folds")


def _error(values: np.ndarray, ddof: int) -> Any:
    return np.std(values, ddof=ddof) / np.sqrt(len(values))


def shown(values: np.ndarray, spread: Any, sign: str = "") -> str:
    """Return the mean, with a measure of its spread where there is more than one."""
    text = f"{np.mean(values):{sign}.2f}"
    return f"{text} ± {spread(values, ddof=1):.2f}" if len(values) > 1 else text


def contrast(graph: np.ndarray, names: list[str]) -> float | None:
    """Return the mean edge within animals and within vehicles over the mean edge between the two."""
    if not set(names) >= VEHICLES:
        return None
    vehicle = np.array([name in VEHICLES for name in names])
    same = (vehicle[:, None] == vehicle[None]) & ~np.eye(len(names), dtype=bool)
    within, between = graph[same].mean(), graph[vehicle[:, None] != vehicle[None]].mean()
    return float(within / max(between, 1e-6 * within)) if within > 0 else 0.0


def table(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return the accuracies of all methods in both ways, with paired differences."""
    splits = len(found[REFERENCE[0]][REFERENCE[1]]["accuracy"])
    rows = []
    for method, ways in found.items():
        for way, result in ways.items():
            accuracy = 100 * result["accuracy"]
            row: list[Any] = [method, str(result.get("note", way)), shown(accuracy, np.std)]
            for other in (REFERENCE, ("STL", way)):
                difference = accuracy - 100 * found[other[0]][other[1]]["accuracy"]
                row.append(None if (method, way) == other else shown(difference, _error, "+"))
            if name in IN_PAPER:
                row.append(IN_PAPER[name].get(method) if way == "single split" else None)
            rows.append(row)
    return {
        "title": name,
        "note": "Test accuracy in %."
        if splits == 1
        else f"Test accuracy in %, mean ± standard deviation over {splits} splits; differences are "
        "paired by split, ± their standard error.",
        "columns": [
            "method",
            "validated on",
            "accuracy %",
            f"over {REFERENCE[0]} ({REFERENCE[1]})",
            "over STL, same way",
            *(["in the paper"] if name in IN_PAPER else []),
        ],
        "rows": rows,
    }


def headline(name: str, found: dict[str, Any]) -> str:
    """Return what the graph did, in a sentence."""
    graph = 100 * found["HMTL"]["folds"]["accuracy"]
    plain = 100 * found["NMTL"]["folds"]["accuracy"]
    reference = 100 * found[REFERENCE[0]][REFERENCE[1]]["accuracy"]
    return (
        f"{name}: a learnt graph (HMTL, folds) {shown(graph, np.std)} %; that is "
        f"{shown(graph - plain, _error, '+')} over all pairs alike (NMTL) and "
        f"{shown(graph - reference, _error, '+')} over logistic regression."
    )


def draw(folder: RunFolder, name: str, found: dict[str, Any], splits: Any) -> list[dict[str, str]]:
    """Draw the errors over the hyper-iterations, and the graph."""
    lines = folder.records()

    def line(series, measure, label):
        steps: dict[int, list[float]] = {}
        for r in lines:
            if r["series"] == f"{name}, {series}":
                steps.setdefault(r["step"], []).append(r[measure])
        return {"label": label, "x": list(steps), "y": [float(np.mean(v)) for v in steps.values()]}

    panels = []
    phases = {"STL": "none", "NMTL": "uniform", "HMTL": "full", "HMTL-S": "full"}
    for title, measure in (
        ("Error that is descended on", "error"),
        ("Error of rows the descent did not see", "outer_error"),
    ):
        panels.append(
            {
                "title": title,
                "ylabel": "cross-entropy",
                "lines": [line(f"{m}, folds, {p}", measure, m) for m, p in phases.items()],
            }
        )
    figures = []
    curves(folder.figures / f"{name}-errors.svg", panels, xlabel="hyper-iteration")
    figures.append(
        {
            "file": f"figures/{name}-errors.svg",
            "title": f"{name}: over the hyper-iterations, with folds",
            "caption": "Mean over splits. HMTL starts where NMTL ends. Where the left falls and the "
            "right rises, the graph over-fits the folds.",
        }
    )
    if splits.classes <= 25:
        for way in ("single split", "folds"):
            graph = found["HMTL-S"][way]["graph"].mean(0)
            file = f"{name}-graph-{way.replace(' ', '-')}.svg"
            drawing(
                folder.figures / file,
                lambda axes, g=graph: plot_task_graph(g, splits.names, axes),
                size=(5.2, 5.2),
            )
            figures.append(
                {
                    "file": f"figures/{file}",
                    "title": f"{name}: graph of HMTL-S, {way}",
                    "caption": "Mean over splits; the wider an edge, the stronger the interaction.",
                }
            )
    return figures


def describe(
    folder: RunFolder, found: dict[str, dict[str, Any]], splits: dict[str, Any]
) -> dict[str, Any]:
    """Return headline, notes, tables, figures and every number."""
    headlines, tables, figures, notes = [], [], [], []
    values: dict[str, Any] = {}
    for name, results in found.items():
        s = splits[name]
        tables.append(table(name, results))
        headlines.append(headline(name, results))
        figures += draw(folder, name, results, s)
        values[name] = {
            method: {
                way: {
                    key: np.round(np.asarray(r[key], np.float64), 6).tolist()
                    for key in ("accuracy", "step")
                    if key in r
                }
                for way, r in ways.items()
            }
            for method, ways in results.items()
        }
        rows = []
        for m in ("HMTL", "HMTL-S"):
            for way, r in results[m].items():
                ratios = [contrast(g, s.names) for g in r["graph"]]
                if None not in ratios:
                    low, middle, high = np.quantile(np.array(ratios, float), [0.25, 0.5, 0.75])
                    pooled = contrast(r["graph"].mean(0), s.names)
                    rows.append(
                        [m, way, f"{middle:.2f} ({low:.2f} to {high:.2f})", round(pooled or 0, 2)]
                    )
                    values[name][m][way]["contrast"] = ratios
        if rows:
            tables.append(
                {
                    "title": f"{name}: are animals more related to animals than to vehicles?",
                    "note": "Mean edge within the groups over mean edge between them: the median over "
                    "splits (and quartiles), and that of the mean graph. 1 is indifference.",
                    "columns": ["method", "validated on", "within / between", "of the mean graph"],
                    "rows": rows,
                }
            )
        if name.startswith("cifar"):
            notes = [
                "The features are of an EfficientNet-Lite0, not the paper's Inception-V3, and each "
                "class has the same number of labelled rows: compare gains with the paper's, not "
                "levels."
            ]
    notes.append(
        "STL (single-task learning): no graph, a regulariser for each class. NMTL (naive multitask "
        "learning): one strength for all pairs of classes. HMTL: one for each pair, tuned by "
        "hypergradients. HMTL-S: the same, with a bound on their sum."
    )
    notes.append(
        "Single split: half of the labelled rows train, the others validate, as published. Folds: "
        "5 folds of all labelled rows, the scale of the scores tuned too, the hyper-iteration chosen "
        "by rows that the descent did not see. All are then trained on all labelled rows."
    )
    return {
        "headline": " ".join(headlines),
        "notes": notes,
        "tables": tables,
        "figures": figures,
        "values": values,
    }

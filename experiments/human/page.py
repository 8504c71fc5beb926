"""Tables and figures of human label noise."""

from typing import Any

import numpy as np

from foretune.report import curves

from ..runs import RunFolder

Records = list[dict[str, Any]]
BINS = 8
"""Groups of the reliability plot."""


def describe(folder: RunFolder, records: Records) -> dict[str, Any]:
    """Return the result: headline, tables, figures."""
    cells = {(r["data"], r["checked"]): [] for r in records}
    for r in records:
        cells[r["data"], r["checked"]].append(r)
    ours, plain = (mean_of(cells, name) for name in ("clean_labels", "self-confidence"))
    above = sum(ours[cell] >= plain[cell] for cell in cells)
    return {
        "headline": f"Above self-confidence in {above} of {len(cells)} cells.",
        "notes": [
            "Scores are of the rows that were not verified. F1 at the true count: of the most doubtful "
            "labels, as many as are wrong, the share that is. Labels: CIFAR-10N (Wei et al., ICLR "
            "2022), CC BY-NC 4.0; predictions: out of fold, by networks trained on those labels.",
        ],
        "tables": [
            table(cells, "f1", "F1 at the true count"),
            table(cells, "average precision", "Average precision"),
            flagged(cells),
        ],
        "figures": draw(folder, records, cells),
        "values": [{k: v for k, v in r.items() if k != "claims"} for r in records],
    }


def mean_of(cells: dict[Any, Records], method: str) -> dict[Any, float]:
    """Return a method's mean F1 in each cell."""
    return {cell: float(np.mean([r["f1"][method] for r in rs])) for cell, rs in cells.items()}


def table(cells: dict[Any, Records], measure: str, title: str) -> dict[str, Any]:
    """Return a table of the methods, mean and standard error over the seeds."""
    names = ["self-confidence", "margin", "softmax regression", "clean_labels"]
    rows = []
    for (data, checked), records in cells.items():
        shown = []
        for name in names:
            values = [r[measure][name] for r in records if name in r[measure]]
            error = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0.0
            shown.append(f"{np.mean(values):.4f} ± {error:.4f}" if values else None)
        rows.append([data, checked, round(records[0]["wrong"], 3), *shown])
    return {"title": title, "columns": ["data", "verified", "wrong", *names], "rows": rows}


def flagged(cells: dict[Any, Records]) -> dict[str, Any]:
    """Return the table of what is flagged."""
    measures = ("f1, all rows", "flagged", "f1 of the flagged")
    rows = [
        [*cell, *(round(float(np.mean([r[m] for r in records])), 4) for m in measures)]
        for cell, records in cells.items()
    ]
    return {
        "title": "What clean_labels flags",
        "note": "F1 at the true count of all rows, verified ones among them; labels flagged for each "
        "wrong one; and F1 of the flagged.",
        "columns": ["data", "verified", "F1, all rows", "flagged / wrong", "F1 of the flagged"],
        "rows": rows,
    }


def draw(folder: RunFolder, records: Records, cells: dict[Any, Records]) -> list[dict[str, str]]:
    """Draw F1 against the number of verified labels, and how reliable probabilities are."""
    names = list(dict.fromkeys(r["data"] for r in records))
    counts = sorted({r["checked"] for r in records})
    panels = []
    for data in names:
        lines = []
        for method in ("self-confidence", "softmax regression", "clean_labels"):
            y = [
                np.mean([r["f1"].get(method, np.nan) for r in cells[data, count]])
                for count in counts
            ]
            if np.isfinite(y).any():
                lines.append({"label": method, "x": counts, "y": y})
        panels.append({"title": data, "ylabel": "F1 at the true count", "lines": lines})
    curves(folder.figures / "f1.svg", panels, xlabel="verified labels")
    shown = [
        {"file": "figures/f1.svg", "title": "Verified labels", "caption": "Mean over the seeds."}
    ]
    claims = [r["claims"] for r in records if r["claims"] is not None]
    if claims:
        shown.append(draw_reliability(folder, np.concatenate(list(map(np.asarray, claims)))))
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

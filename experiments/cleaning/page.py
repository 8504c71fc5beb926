"""Table, figures and gallery of the data hyper-cleaning experiment."""

from typing import Any

import numpy as np

from foretune.apps import LabelCleaner
from foretune.apps._shown import write_picture
from foretune.report import curves, histogram

from ..datasets import Dataset
from ..runs import RunFolder
from .splits import SUSPECT_BELOW, Scores, Split


def tables(
    accuracy: dict[str, np.ndarray],
    scores: dict[str, list[Scores]],
    own: np.ndarray,
    seeds: int,
) -> dict[str, Any]:
    """Return the headline, the notes, the result table and every number behind it."""

    def show(values):
        values = 100 * np.asarray(values)
        return (
            f"{values.mean():.2f} ± {values.std(ddof=1):.2f}"
            if len(values) > 1
            else f"{values[0]:.2f}"
        )

    rows = []
    for name, of_seed in accuracy.items():
        row: list[Any] = [name, show(of_seed)]
        if name in scores:
            s = np.array(scores[name], float).mean(axis=0)
            row += [round(s[0], 4), round(s[1], 4), round(s[2], 4), round(s[3], 1), round(s[4], 1)]
        else:
            row += [None] * 5
        rows.append(row)
    reached = [100 * accuracy[name].mean() for name in scores if name.startswith("DH")]
    return {
        "headline": (
            f"Test accuracy: Baseline {show(accuracy['Baseline'])} %, hyper-cleaning "
            f"{min(reached):.2f} to {max(reached):.2f} %, Oracle {show(accuracy['Oracle'])} %."
        ),
        "notes": [
            "Accuracy is that of softmax regression trained on the kept and the checked examples. "
            "F1, precision and recall count wrong labels as positive.",
            f"LabelCleaner is this package's ensemble; with its own model it reaches {show(own)} %.",
        ],
        "tables": [
            {
                "title": "Results",
                "note": "Mean ± standard deviation over the seeds." if seeds > 1 else "One seed.",
                "columns": [
                    "method",
                    "accuracy %",
                    "F1",
                    "precision",
                    "recall",
                    "true positives",
                    "false positives",
                ],
                "rows": rows,
            }
        ],
        "values": {
            "accuracy": {name: a.tolist() for name, a in accuracy.items()},
            "own_accuracy": own.tolist(),
            "scores": {name: [s._asdict() for s in ss] for name, ss in scores.items()},
        },
    }


def draw(
    folder: RunFolder, budgets: list[int], weights: np.ndarray, first: Split
) -> list[dict[str, str]]:
    """Draw the curves and the histogram."""
    records = folder.records()

    def lines(measure):
        found = []
        for R in budgets:
            steps: dict[int, list[float]] = {}
            for r in records:
                if r["series"] == f"DH-{R}":
                    steps.setdefault(r["step"], []).append(r[measure])
            means = [float(np.mean(v)) for v in steps.values()]
            found.append({"label": f"DH-{R}", "x": list(steps), "y": means})
        return found

    panels = [
        ("Accuracy on checked examples", "accuracy", "validation_accuracy"),
        ("Accuracy on test examples", "accuracy", "test_accuracy"),
        ("Wrong labels found", "true positives", "true_positives"),
        ("Right labels discarded", "false positives", "false_positives"),
    ]
    curves(
        folder.figures / "curves.svg",
        [{"title": t, "ylabel": y, "lines": lines(m)} for t, y, m in panels],
        xlabel="hyper-iteration",
    )
    histogram(
        folder.figures / "weights.svg",
        {"right labels": weights[~first.wrong], "wrong labels": weights[first.wrong]},
        xlabel=f"weight after the last hyper-iteration (DH-{budgets[0]}, first seed)",
    )
    return [
        {
            "file": "figures/curves.svg",
            "title": "Over the hyper-iterations",
            "caption": "Mean over seeds. Accuracies are those of the weighted inner model.",
        },
        {
            "file": "figures/weights.svg",
            "title": "Weights",
            "caption": f"Weights below {SUSPECT_BELOW} mark a label as wrong.",
        },
    ]


def gallery(
    folder: RunFolder, cleaner: LabelCleaner, first: Split, dataset: Dataset, count: int = 24
) -> dict[str, Any]:
    """Return the most suspicious examples of the first seed, with pictures where rows are images."""
    names = np.unique(dataset.y)
    items = []
    for i in cleaner.ranking_[:count]:
        x, shape = first.x[i], dataset.image_shape
        items.append(
            {
                "index": int(i),
                "observed": str(names[first.given[i]]),
                "suggested": str(names[cleaner.suggested_[i]]),
                "probability_wrong": float(cleaner.probability_wrong_[i]),
                "image": write_picture(folder, "suspect", int(i), x.reshape(shape))
                if shape
                else None,
                "row": None if shape else {str(j): float(v) for j, v in enumerate(x[:6])},
                "wrong": bool(first.wrong[i]),
            }
        )
    note = "The first seed's training examples, by LabelCleaner's ranking."
    return {"title": "Most suspicious labels", "note": note, "items": items}

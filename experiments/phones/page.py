"""Tables and figures of the speech experiment."""

from typing import Any

import numpy as np

from foretune.report import curves

from ..runs import RunFolder
from .speech.corpus import Corpus

PAPER = {
    "Vanilla": 59.81,
    "RS": 60.36,
    "SMBO (GP)": 60.91,
    "RTHO": 61.97,
    "RTHO-NT": 61.38,
}
"""Test accuracies on the whole of TIMIT."""
FRACTIONS = (1 / 6, 1 / 3, 1.0)
"""Of the budget: the paper reports 50, 100 and 300 minutes."""


def describe(
    folder: RunFolder,
    corpus: Corpus,
    settings: Any,
    found: dict[str, list[dict[str, Any]]],
    speed: dict[str, float],
) -> dict[str, Any]:
    """Return the result: headline, tables, figures, and every number behind them."""
    accuracy = {name: [100 * s["test_accuracy"] for s in stages] for name, stages in found.items()}
    reference = found.get("RS")
    goal = np.mean([s["validation_accuracy"] for s in reference]) if reference else None
    results, times = [], []
    for name, stages in found.items():
        reached = []
        if goal is not None and name != "RS":
            reached = [_reached(s["curve"], goal) for s in stages]
        results.append(
            [
                name,
                _spread(accuracy[name]),
                _spread([100 * s["validation_accuracy"] for s in stages]),
                round(float(np.mean([s["seconds"] for s in stages])), 1),
                round(float(np.mean([s["steps"] for s in stages]))),
                round(float(np.mean([s["trials"] for s in stages])), 1),
                PAPER.get(name),
            ]
        )
        at = [
            _spread([100 * _value(s["curve"], fraction * settings.budget) for s in stages])
            for fraction in FRACTIONS
        ]
        times.append([name, *at, _times(reached, settings.budget)])
    budget = settings.budget
    return {
        "headline": "Test accuracy in %: "
        + ", ".join(f"{name} {np.mean(a):.2f}" for name, a in accuracy.items())
        + ".",
        "notes": [
            f"{corpus.summary()}.",
            f"A network of {settings.layers} layers of {settings.width} units, minibatches of "
            f"{settings.batch}, hyper-batches of {settings.window}. Each method had {budget:g} seconds "
            "(the paper: 300 minutes) and answers for the weights of its highest validation accuracy.",
            "RS is random search, SMBO Bayesian optimization by Optuna, RTHO real-time tuning as in "
            "the paper, foretune with this package's defaults; NT starts from zeros, knowing nothing.",
            *_alike(corpus, settings),
            *_cautions(corpus, settings, found),
        ],
        "tables": [
            {
                "title": "Accuracy",
                "note": f"Mean ± standard deviation over seeds ({_counts(found)}). Steps are those of "
                "all trials. The paper's figures are for the whole of TIMIT and another clock: compare "
                "differences, not levels.",
                "columns": [
                    "method",
                    "test accuracy %",
                    "validation accuracy %",
                    "seconds",
                    "steps",
                    "trials",
                    "test, in the paper",
                ],
                "rows": results,
            },
            {
                "title": "Validation accuracy over time",
                "note": "The highest so far, in %. The last column: when a method was first above the "
                "final accuracy of RS (the mean of its runs).",
                "columns": [
                    "method",
                    *(f"after {fraction * budget:.2g} s" for fraction in FRACTIONS[:-1]),
                    f"after {budget:g} s",
                    "above RS after",
                ],
                "rows": times,
            },
            {
                "title": "Hyperparameters",
                "note": "The lowest and the highest over seeds. Searches: those of the best trial. "
                "Real-time tuning: those at its end, after a course that the figures show.",
                "columns": ["method", "eta", "mu", "rho"],
                "rows": [
                    [
                        name,
                        *(_range([s["hparams"][h] for s in stages]) for h in ("eta", "mu", "rho")),
                    ]
                    for name, stages in found.items()
                ],
            },
            {
                "title": "Time of a step",
                "note": "Milliseconds for a minibatch; that of real-time tuning includes its share of "
                "the hyper-update.",
                "columns": ["", "ms", "of plain training"],
                "rows": [
                    [n, round(ms, 3), round(ms / speed["plain"], 2)] for n, ms in speed.items()
                ],
            },
        ],
        "figures": draw(folder, found, budget),
        "values": {"stages": found, "ms_per_step": speed},
    }


def _counts(found: dict[str, list[dict[str, Any]]]) -> str:
    usual = max(len(stages) for stages in found.values() if stages)
    fewer = [f"{len(s)} for {name}" for name, s in found.items() if len(s) < usual]
    return ", ".join([str(usual), *fewer])


def _alike(corpus: Corpus, settings: Any) -> list[str]:
    if settings.data == "synthetic":
        return ["Synthetic speech, not TIMIT: its levels are not the paper's."]
    small = len(corpus.part) < 1000
    return ["A sample of TIMIT, not the whole: its levels are not the paper's."] if small else []


def _cautions(corpus: Corpus, settings: Any, found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return what a reader should know before comparing."""
    notes = []
    if settings.quick:
        notes.append(
            "A quick run: so small a test set and so few seeds cannot rank the methods. It "
            "shows how the experiment runs."
        )
    if "SMBO (GP)" not in found:
        notes.append("SMBO (GP) was left out: Optuna's sampler needs PyTorch (pip install torch).")
    for name in ("SMBO (GP)", "SMBO (TPE)"):
        if name in found and np.mean([s["trials"] for s in found[name]]) <= 5:
            notes.append(
                f"{name} had no more than its five random points: nothing to learn from yet."
            )
    if corpus.skipped:
        shown = "; ".join(list(corpus.skipped.values())[:3])
        notes.append(f"{len(corpus.skipped)} files were left out: {shown}.")
    return notes


def _spread(values: list[float]) -> str:
    mean = f"{np.mean(values):.2f}"
    return f"{mean} ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else mean


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def _value(curve: list[list[float]], seconds: float) -> float:
    """Return the highest accuracy by then."""
    return max((a for at, a in curve if at <= 1.02 * seconds), default=0.0)


def _reached(curve: list[list[float]], goal: Any) -> float | None:
    return next((at for at, a in curve if a >= goal), None)


def _times(reached: list[float | None], budget: float) -> str | None:
    times = [at for at in reached if at is not None]
    if not times:
        return "never" if reached else None
    part = f"{100 * np.mean(times) / budget:.0f} % of the time"
    return part if len(times) == len(reached) else f"{part} ({len(times)} of {len(reached)} runs)"


def draw(
    folder: RunFolder, found: dict[str, list[dict[str, Any]]], budget: float
) -> list[dict[str, str]]:
    """Draw accuracy over time for all methods, and the four panels of each real-time run."""
    grid = np.linspace(0.02, 1, 60) * budget
    lines = []
    for name, stages in found.items():
        y = 100 * np.mean([[_value(s["curve"], t) for t in grid] for s in stages], axis=0)
        y[y <= 0] = np.nan
        if np.isfinite(y).any():
            lines.append({"label": name, "x": grid.tolist(), "y": y.tolist()})
    panel = {"title": "Validation accuracy, highest so far", "ylabel": "%", "lines": lines}
    curves(folder.figures / "time.svg", [panel], xlabel="seconds")
    figures = [
        {
            "file": "figures/time.svg",
            "title": "Over time",
            "caption": "Mean over seeds; the clock stands while programs compile.",
        }
    ]
    records = folder.records()
    for name in ("RTHO", "RTHO-NT", "foretune", "foretune-NT"):
        mine = [r for r in records if r["series"] == name and r["seed"] == 0]
        if len(mine) < 2:
            continue
        file = f"{name.lower()}.svg"
        curves(folder.figures / file, _panels(mine), xlabel="hyper-batch")
        figures.append(
            {
                "file": f"figures/{file}",
                "title": f"{name}, first seed",
                "caption": "Accuracy on training and validation frames, validation error, and the "
                "hyperparameters, over the hyper-batches.",
            }
        )
    return figures


def _panels(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def line(label, name, scale=1.0):
        kept = [r for r in records if name in r]
        y = [scale * r[name] for r in kept]
        return {"label": label, "x": [r["step"] for r in kept], "y": y}

    accuracy = [
        line("training", "training_accuracy", 100.0),
        line("validation", "validation_accuracy", 100.0),
    ]
    panels = [
        {"title": "Frame accuracy", "ylabel": "%", "lines": accuracy},
        {"title": "Validation error", "ylabel": "cross-entropy", "lines": [line("", "error")]},
        {
            "title": "Learning rate and momentum",
            "ylabel": "",
            "lines": [line("eta", "eta"), line("mu", "mu")],
        },
        {"title": "Weight of the auxiliary task", "ylabel": "rho", "lines": [line("", "rho")]},
    ]
    return [p for p in panels if all(line["x"] for line in p["lines"])]

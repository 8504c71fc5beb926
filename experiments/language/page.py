"""Tables and figures of the language experiment."""

from typing import Any

import numpy as np

from foretune.report import curves

from ..runs import RunFolder
from .model import KNOTS, Size, schedule
from .text import Text

Parts = dict[str, list[dict[str, Any]]]
OURS = "foretune, descent"


def describe(
    folder: RunFolder, text: Text, size: Size, parts: Parts, speed: float
) -> dict[str, Any]:
    """Return the result: headline, tables, figures, and every number behind them."""
    small = {name: p for name, p in parts.items() if not name.startswith("transfer, ")}
    test = {name: losses_of(p, text.target) for name, p in small.items()}
    ours = test[OURS]
    others = [name for name in small if not name.startswith("foretune")]
    best = min(others, key=lambda name: float(np.mean(test[name])))
    ahead = [name for name in others if is_below(ours, test[name])]
    headline = (
        f"Test loss on {text.target}: {np.mean(ours):.4f} learnt by hypergradients, "
        f"{np.mean(test[best]):.4f} for the best of the rest ({best}). Below {len(ahead)} of "
        f"{len(others)} by more than two standard errors."
    )
    weights = {name: shares_of(p) for name, p in small.items()}
    return {
        "headline": headline if len(ours) > 1 else headline.split(" Below")[0],
        "notes": [
            "Loss in nats a byte, of networks trained anew with what each method found; ± is "
            "the standard error over the seeds. Trainings: what it took to find it, in the time of "
            "one training (of the two shortcuts an estimate). "
            f"A training: {size.steps:,} steps, {size.layers} layers of width {size.width}, "
            f"{size.batch} x {size.context} bytes, {speed:.1f} s.",
        ],
        "tables": [
            results(text, small),
            mixtures(text, weights),
            by_source(text, small),
            *([transfer(text, parts)] if any(n.startswith("transfer, ") for n in parts) else []),
        ],
        "figures": draw(folder, text, size, parts),
        "values": [
            {"method": name, "seed": seed, **{k: v for k, v in part.items() if k != "path"}}
            for name, found in parts.items()
            for seed, part in enumerate(found)
        ],
    }


def losses_of(parts: list[dict[str, Any]], name: str) -> np.ndarray:
    """Return the test loss on one text, by seed."""
    return np.array([np.mean([t[name] for t in part["test"]]) for part in parts])


def shares_of(parts: list[dict[str, Any]]) -> np.ndarray:
    """Return the mean mixture over the seeds."""
    found = np.array([part["hparams"]["sources"] for part in parts])
    return np.mean(found / found.sum(1, keepdims=True), 0)


def error_of(values: np.ndarray) -> float:
    """Return the standard error of a mean; of one number, NaN."""
    n = len(values)
    return float(np.std(values, ddof=1) / np.sqrt(n)) if n > 1 else float("nan")


def is_below(ours: np.ndarray, other: np.ndarray) -> bool:
    """Return whether ours is lower by more than two standard errors of the difference by seed."""
    difference = other - ours
    return len(ours) > 1 and float(np.mean(difference)) > 2 * error_of(difference)


def spread(values: np.ndarray) -> str:
    """Return mean and standard error, in words."""
    return f"{np.mean(values):.4f}" + (f" ± {error_of(values):.4f}" if len(values) > 1 else "")


def results(text: Text, parts: Parts) -> dict[str, Any]:
    """Return the table of losses."""
    ours = losses_of(parts[OURS], text.target)
    rows = []
    for name, found in parts.items():
        test = losses_of(found, text.target)
        validation = np.array([part["validation"] for part in found])
        rows.append(
            [
                name,
                spread(test),
                None if name == OURS else spread(test - ours),
                spread(validation),
                round(float(np.mean([part["trainings"] for part in found])), 1),
            ]
        )
    columns = ["method", "test", "above the descent by", "validation", "trainings"]
    return {"title": f"Loss on {text.target}", "columns": columns, "rows": rows}


def mixtures(text: Text, weights: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the table of mixtures that were found."""
    rows = [
        [name, *(f"{100 * w:.1f}" for w in share)]
        for name, share in weights.items()
        if not name.endswith(" alone")
    ]
    return {"title": "Mixtures, in %", "columns": ["method", *text.names], "rows": rows}


def by_source(text: Text, parts: Parts) -> dict[str, Any]:
    """Return the table of losses on the sources."""
    rows = [
        [name, *(f"{np.mean(losses_of(found, source)):.3f}" for source in text.names)]
        for name, found in parts.items()
    ]
    return {"title": "Loss by source", "columns": ["method", *text.names], "rows": rows}


def transfer(text: Text, parts: Parts) -> dict[str, Any]:
    """Return the table of longer and wider trainings."""
    late = {n.removeprefix("transfer, "): p for n, p in parts.items() if n.startswith("transfer, ")}
    even = losses_of(late["uniform"], text.target)
    rows = []
    for name, found in late.items():
        test = losses_of(found, text.target)
        below = None if name == "uniform" else spread(even - test)
        rows.append([name, spread(test), below, found[0]["rate"]])
    return {
        "title": "The same mixtures in a longer training of a wider network",
        "columns": ["mixture", "test", "below uniform by", "peak rate, seed 0"],
        "rows": rows,
    }


def draw(folder: RunFolder, text: Text, size: Size, parts: Parts) -> list[dict[str, str]]:
    """Draw mixtures over the steps, validation losses, and the learnt schedule, of seed 0."""
    path = np.array([h["sources"] for h in parts[OURS][0]["path"]])
    path = path / path.sum(1, keepdims=True)
    lines = [
        {"label": source, "x": range(len(path)), "y": path[:, k]}
        for k, source in enumerate(text.names)
    ]
    panel = {"title": OURS, "ylabel": "share", "lines": lines}
    curves(folder.figures / "mixture.svg", [panel], xlabel="outer step")
    shown = [
        {
            "file": "figures/mixture.svg",
            "title": "Weights of the sources",
            "caption": "The mixture over the outer steps, seed 0.",
        }
    ]
    lines = []
    for name in ("random search", "TPE", OURS):
        values = np.array(parts[name][0]["values"])
        lowest = np.minimum.accumulate(values)
        x = parts[name][0]["trainings"] * (1 + np.arange(len(values))) / len(values)
        lines.append({"label": name, "x": x, "y": lowest})
    curves(
        folder.figures / "loss.svg",
        [{"title": text.target, "ylabel": "lowest validation loss", "lines": lines}],
        xlabel="time, in trainings",
    )
    shown.append({"file": "figures/loss.svg", "title": "Loss against time", "caption": "Seed 0."})
    t = np.arange(size.steps)
    learnt = np.asarray(parts[OURS][0]["hparams"]["rate"])
    start = np.full(KNOTS, parts["uniform"][0]["rate"])
    lines = [
        {"label": label, "x": t, "y": np.asarray(schedule(rate, t, size.steps))}
        for label, rate in (("cosine, best of the grid", start), ("learnt", learnt))
    ]
    curves(
        folder.figures / "schedule.svg",
        [{"title": "schedule", "ylabel": "learning rate", "lines": lines}],
        xlabel="step",
    )
    shown.append({"file": "figures/schedule.svg", "title": "Learning rate", "caption": "Seed 0."})
    return shown

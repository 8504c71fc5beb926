"""`minimize` with its defaults from twenty starts: does it end above one, and what does the rule cost?

    python -m benchmarks.take_back [--steps 20] [--out benchmarks/results/take-back-cpu.json]

Beside it what the descent was before: COCOB on the hyperparameters as they are, no step taken back. A
start that is not finite is left out; a descent whose gradient is not finite at its start fails with
an error, is counted separately and not in the median. The last column is the time of a descent in which
nothing is taken back, over that of one with `take_back=False`.
"""

import argparse
import time
import warnings
from typing import Any

import jax
import numpy as np
import optax
import optax.contrib

import foretune as ft
from benchmarks.harness import record
from benchmarks.responses import RESPONSES, starts

METHODS: dict[str, dict[str, Any]] = {
    "COCOB as before": {"optimizer": optax.contrib.cocob(alpha=100.0), "take_back": False},
    "default": {},
}


def ends(problem, hparams, constraints, steps: int, options: dict[str, Any]) -> tuple[float, float]:
    """Return the first and last error of a descent, the last infinite where it fails.

    Both are of one program: where training is chaotic another one, that rounds otherwise, has another.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = ft.minimize(problem, hparams, steps=steps, constraints=constraints, **options)
        except ft.NonFiniteError:
            return float("inf"), float("inf")
    return float(result.history[0]["value"]), float(result.value)


def overhead(response, steps: int, rounds: int = 5) -> float:
    """Return the time of a descent that is never taken back, over that without the rule."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    options = {"optimizer": optax.sgd(0.0), "constraints": response.constraints, "steps": steps}
    for _ in range(rounds + 1):
        for rule in (True, False):
            began = time.perf_counter()
            ft.minimize(response.problem, response.hparams, take_back=rule, **options)
            seconds[rule].append(time.perf_counter() - began)
    return float(np.median(np.divide(seconds[True][1:], seconds[False][1:])))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--starts", type=int, default=20, help="starts of each problem")
    parser.add_argument("--steps", type=int, default=20, help="outer steps of each descent")
    parser.add_argument("--out", help="write the results to this JSON file")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    heads = (f"{method + ': above, fail':>30} {'error':>8}" for method in METHODS)
    print(f"{'':<24} {'starts':>7} {'error':>8}", *heads, "   time")
    for name, make in RESPONSES.items():
        response = make()
        rows: list[dict[str, Any]] = []
        for hparams in starts(response.hparams, arguments.starts):
            first = float(response.problem.response(hparams)[0])
            if not np.isfinite(first):
                continue
            row: dict[str, Any] = {"start": first}
            for method, options in METHODS.items():
                began, ended = ends(
                    response.problem, hparams, response.constraints, arguments.steps, options
                )
                row[method], row[f"{method}: above"] = ended, not ended <= began * 1.0001
            rows.append(row)
        ratio = overhead(response, arguments.steps)
        summary: dict[str, Any] = {"starts": len(rows), "time with / without the rule": ratio}
        cells = []
        for method in METHODS:
            ended = [row for row in rows if np.isfinite(row[method])]
            above, fail = sum(row[f"{method}: above"] for row in ended), len(rows) - len(ended)
            median = float(np.median([row[method] for row in ended]))
            summary[method] = {"above the start": above, "fail": fail, "median error": median}
            cells.append(f"{above:>27} {fail:>2} {median:>8.3f}")
        summary["start"] = float(np.median([row["start"] for row in rows]))
        results[name] = summary | {"rows": rows}
        began = f"{name:<24} {len(rows):>7} {summary['start']:>8.3f}"
        print(began, *cells, f" {ratio:>6.3f}", flush=True)
        jax.clear_caches()
        if arguments.out:
            record(arguments.out, results)


if __name__ == "__main__":
    main()

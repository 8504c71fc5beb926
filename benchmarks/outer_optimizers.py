"""Outer optimizers that need no hyper-learning rate, beside Adam over three decades of it.

    python -m benchmarks.outer_optimizers [--steps 100] [--out benchmarks/results/outer-optimizers.json]

Two tasks on the digits: data hyper-cleaning (900 weights under `CappedSimplex`) and learning rate,
momentum and weight decay of a small network (under `Log` and `Logit`). Each optimizer descends for
the same number of steps, from the same start, with its default settings, and no step is taken back but
by the default of `minimize`. Reported: the lowest validation error on the way, that of the result, and
the task's own measure at the end.
"""

import argparse
import warnings
from typing import Any

import optax
from optax import contrib

import foretune as ft
from benchmarks.harness import record
from benchmarks.tasks import digits_cleaning, digits_rates

DEFAULT = "minimize's default"
OPTIMIZERS = {
    **{f"adam({lr:g})": optax.adam(lr) for lr in (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)},
    "prodigy": contrib.prodigy(),
    "dadapt_adamw": contrib.dadapt_adamw(),
    "dog": contrib.dog(),
    "dowg": contrib.dowg(),
    "cocob": contrib.cocob(),
    "mechanize(adam)": contrib.mechanize(optax.adam(1.0), weight_decay=0.0),
    DEFAULT: None,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="outer steps of each run")
    parser.add_argument("--out", help="write the results to this JSON file")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    tasks = {
        "hyper-cleaning": (digits_cleaning(), ft.Reverse(), "f1"),
        "rates": (digits_rates(), ft.Forward(), "test_accuracy"),
    }
    for task, ((problem, hparams, constraints, evaluate), engine, measure) in tasks.items():
        print(f"\n{task:<16} {'lowest':>9} {'last':>9} {measure:>14}")
        for name, optimizer in OPTIMIZERS.items():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    result = ft.minimize(
                        problem,
                        hparams,
                        steps=arguments.steps,
                        engine=engine,
                        optimizer=optimizer,
                        constraints=constraints,
                        evaluate=evaluate,
                        evaluate_every=arguments.steps,
                        take_back=name == DEFAULT,
                    )
            except ft.NonFiniteError as error:
                reason = str(error).splitlines()[0]
                results[f"{task}: {name}"] = {"failed": reason}
                print(f"{name:<16} {reason}", flush=True)
                continue
            row = {
                "lowest": min(r["value"] for r in result.history),
                "last": float(result.value),
                measure: result.history[-1][measure],
            }
            results[f"{task}: {name}"] = row
            print(
                f"{name:<16} {row['lowest']:>9.4f} {row['last']:>9.4f} {row[measure]:>14.3f}",
                flush=True,
            )
    if arguments.out:
        record(arguments.out, results)


if __name__ == "__main__":
    main()

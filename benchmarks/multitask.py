"""What can be learnt about the graph of task interactions from a few rows, and what could be gained.

For splits of the features of CIFAR, from the best graph with all pairs alike:

signal   the correlation, over pairs of classes, of the hypergradient in C on folds of the labelled rows
         with the one on thousands of test rows: how much of the direction is more than noise
oracle   test accuracy with C tuned on half of the test rows, on the other half: what a graph could give

    python -m benchmarks.multitask cifar10 --seeds 8 --oracle-steps 60 --out why.json
    python -m benchmarks.multitask cifar100 --seeds 2 --out why100.json
"""

import argparse
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft
from benchmarks.harness import record
from experiments.datasets import load
from experiments.multitask import graph
from experiments.multitask.experiment import defaults, make_splits

STEPS = 100


def test_problem(splits, pattern, rows) -> ft.Problem:
    """Return the problem whose error is that of some of the test rows."""
    x, y = map(jnp.asarray, splits.rows)
    use = jnp.ones((len(x), 1, x.shape[1]))
    rate = jnp.asarray(graph.learning_rate(splits.rows, len(pattern)))
    x_test, y_test = (jnp.asarray(a[:, rows]) for a in (splits.x_test, splits.y_test))
    return ft.Problem(
        ft.Training(graph.training_loss, optax.sgd(1.0, graph.MOMENTUM)),
        graph.held_out_error,
        init=graph.zeros(len(x), 1, len(pattern), x.shape[2]),
        batches=ft.FullBatch((x, y, use, rate, jnp.asarray(pattern)), steps=STEPS),
        validation=(x_test, y_test, jnp.ones((len(x), 1, y_test.shape[1]))),
    )


def accuracy(splits, pattern, hparams, rows) -> np.ndarray:
    params = graph.train(splits.rows, hparams, pattern, STEPS)
    scores = graph.scores_of(params, jnp.asarray(splits.x_test[:, rows]))[:, 0]
    return np.asarray(jnp.mean(jnp.argmax(scores, -1) == splits.y_test[:, rows], -1))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("data", choices=["cifar10", "cifar100"])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--oracle-steps", type=int, default=0)
    parser.add_argument("--out", default="runs/multitask-why.json")
    arguments = parser.parse_args()
    per_class = defaults(arguments.data, False)["per_class"]
    splits = make_splits(load(arguments.data), arguments.seeds, per_class)
    K, pattern = splits.classes, graph.all_pairs(splits.classes)
    plans = [
        graph.make_plan(y, 5, 0, np.random.default_rng([k, 1])) for k, y in enumerate(splits.rows.y)
    ]
    plan = graph.joined(plans)
    keep, _ = graph.tune("uniform", splits.rows, plan, pattern, steps=STEPS, hyper_steps=40)
    pairs: Any = {**keep.hparams, "C": keep.hparams["C"][..., None, None] * jnp.asarray(pattern)}

    everything = slice(None)
    on_folds = graph.graph_problem(splits.rows, plan, pattern, STEPS)
    on_test = test_problem(splits, pattern, everything)
    upper = np.triu_indices(K, 1)
    grads = [
        np.asarray(ft.Reverse()(problem, pairs).grad["C"])[:, 0][:, upper[0], upper[1]]
        for problem in (on_folds, on_test)
    ]
    signal = [float(np.corrcoef(a, b)[0, 1]) for a, b in zip(*grads, strict=True)]
    result = {"signal": signal, "rows": int(splits.rows.y.shape[1])}
    print(f"{arguments.data}: correlation {np.mean(signal):.2f} ± {np.std(signal):.2f}", flush=True)

    if arguments.oracle_steps:
        even, odd = slice(0, None, 2), slice(1, None, 2)
        rates: Any = {"C": optax.adam(0.5 * graph.START_C / K), "other": optax.adam(0.1)}
        tuned = ft.minimize(
            test_problem(splits, pattern, even),
            pairs,
            steps=arguments.oracle_steps,
            take_back=False,
            optimizer=optax.partition(
                rates, lambda h: {name: "C" if name == "C" else "other" for name in h}
            ),
            constraints={
                "C": graph.EachMember(ft.SymmetricNonNegative()),
                "rho": ft.Log(),
                "scale": ft.Log(),
            },
            callbacks=[ft.Progress("C on test rows")],
        )
        before, after = (accuracy(splits, pattern, h, odd) for h in (pairs, tuned.hparams))
        result |= {"all pairs alike": before.tolist(), "oracle": after.tolist()}
        print(
            f"accuracy {100 * before.mean():.2f}, with C of the test rows {100 * after.mean():.2f}"
        )
    record(arguments.out, result)


if __name__ == "__main__":
    main()

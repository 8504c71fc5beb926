"""A rate and a penalty on few rows: `rehearse` beside its own start and a grid of full trainings.

    python -m benchmarks.penalty [--tasks wide ...] [--seeds 3] [--costs 4 5 40] [--out FILE.json]

Hundreds of rows, so that a rehearsal of T/32 steps has a few dozen. The training is Adam with a cosine,
its loss the error plus `decay` times the sum of squared weights. All figures are validation errors
after T steps with the same minibatches, as multiples of the best of a grid of 9 rates x 13 penalties,
the mean over seeds: of the start, of what `rehearse` found, and of that with a quarter of its penalty.
"""

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn import datasets
from sklearn.preprocessing import StandardScaler

import foretune as ft
from benchmarks.harness import Table, command_line, record
from experiments.networks import cross_entropy, dense, linear

HIDDEN, BATCH = 32, 32
RATES, DECAYS = 10 ** np.arange(-4, 0.1, 0.5), 10 ** np.arange(-6, 0.1, 0.5)
STARTS = ((1e-3, 1e-6), (1e-3, 1e-2), (0.1, 1e-4))
"""Rates and penalties: none to speak of, a strong one, and a high rate."""
Rows = tuple[np.ndarray, np.ndarray]


class Task(NamedTuple):
    """Rows, how many of them train, and a network: linear or with a hidden layer."""

    load: Callable[[], Rows]
    train: int
    classes: int  # or 0, of a regression
    hidden: bool = False


def wide() -> Rows:
    """Return a regression in which a fifth of 100 columns count."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(900, 100))
    return x, x @ (rng.normal(size=100) * (rng.random(100) < 0.2)) + 3 * rng.normal(size=900)


def noisy() -> Rows:
    """Return a classification in which a fifth of the labels is random."""
    found: Any = datasets.make_classification(
        2600, 40, n_informative=10, n_classes=4, flip_y=0.2, random_state=0
    )
    return found


def bundled(load: Callable) -> Callable[[], Rows]:
    return lambda: load(return_X_y=True)


TASKS = {
    "wide": Task(wide, 300, 0),
    "cancer": Task(bundled(datasets.load_breast_cancer), 250, 2),
    "diabetes": Task(bundled(datasets.load_diabetes), 200, 0),
    "noisy": Task(noisy, 1600, 4, hidden=True),
    "digits": Task(bundled(datasets.load_digits), 600, 10, hidden=True),
}


def makes(task: Task) -> Callable[[int, jax.Array], ft.Problem]:
    """Return `make(steps, key)`, whose objective is the error of half of the other rows."""
    x, y = task.load()
    order, n = np.random.default_rng(0).permutation(len(y)), task.train
    x, y = x[order], y[order]
    scaler: Any = StandardScaler().fit(x[:n])
    x = scaler.transform(x).astype("f4")
    y = y.astype("i4") if task.classes else ((y - y[:n].mean()) / y[:n].std()).astype("f4")
    end = n + (len(y) - n) // 2
    outputs, width = max(task.classes, 1), x.shape[1]

    def weights(key):
        a, b = jax.random.split(key)
        if not task.hidden:
            return {"out": dense(b, width, outputs)}
        return {"in": dense(a, width, HIDDEN), "out": dense(b, HIDDEN, outputs)}

    def error(weights, batch):
        hidden = jax.nn.relu(linear(weights["in"], batch[0])) if task.hidden else batch[0]
        out = linear(weights["out"], hidden)
        return (
            cross_entropy(out, batch[1]) if task.classes else jnp.mean((out[:, 0] - batch[1]) ** 2)
        )

    def loss(weights, h, batch):
        squares = [jnp.sum(layer["w"] ** 2) for layer in weights.values()]
        return error(weights, batch) + h["decay"] * sum(squares)

    def make(steps, key):
        of_weights, of_batches = jax.random.split(key)

        def optimizer(h):
            return optax.adam(optax.cosine_decay_schedule(h["lr"], steps))

        return ft.Problem(
            ft.Training(loss, optimizer),
            lambda state, h, rows: error(state.params, rows),
            init=weights(of_weights),
            batches=ft.Minibatches.shuffled(
                (x[:n], y[:n]), batch_size=BATCH, steps=steps, key=of_batches
            ),
            validation=(x[n:end], y[n:end]),
        )

    return make


def compare(name: str, steps: int, costs: list[float], seed: int) -> list[dict[str, Any]]:
    """Return a row for each start."""
    make, key = makes(TASKS[name]), jax.random.key(seed)
    respond = jax.jit(jax.vmap(lambda h: make(steps, key).response(h)[0]))

    def errors(rates, decays):
        return np.asarray(respond({"lr": jnp.array(rates), "decay": jnp.array(decays)}))

    grid = np.meshgrid(RATES, DECAYS, indexing="ij")
    lowest = np.nanmin(errors(*(axis.ravel() for axis in grid)))
    rows = []
    for rate, decay in STARTS:
        start = {"lr": jnp.array(rate), "decay": jnp.array(decay)}
        row: dict[str, Any] = {"task": name, "seed": seed, "rate": rate, "decay": decay}
        row["start"] = float(errors([rate], [decay])[0] / lowest)
        for cost in costs:
            constraints = {"lr": ft.Log(), "decay": ft.Log()}
            found = ft.rehearse(
                make, start, steps=steps, constraints=constraints, cost=cost, key=key
            )
            lr, penalty = float(found.hparams["lr"]), float(found.hparams["decay"])
            row[f"cost {cost:g}"] = float(found.value / lowest)
            row[f"cost {cost:g}, a quarter"] = float(errors([lr], [penalty / 4])[0] / lowest)
            row[f"cost {cost:g}, found"] = [lr, penalty]
        rows.append(row)
    return rows


def main() -> None:
    """Run the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--costs", nargs="+", type=float, default=[4, 5, 40])
    arguments = parser.parse_args()
    shown = [f"cost {cost:g}{more}" for cost in arguments.costs for more in ("", ", a quarter")]
    table, found = Table("task", "rate", "penalty", "start", *shown), []
    for name in arguments.tasks:
        by_seed = [
            compare(name, arguments.steps, arguments.costs, seed) for seed in range(arguments.seeds)
        ]
        for rows in zip(*by_seed, strict=True):
            means = [statistics.fmean(row[column] for row in rows) for column in ("start", *shown)]
            start = (f"{rows[0][column]:g}" for column in ("rate", "decay"))
            table.add(name, *start, *(f"{mean:.2f}" for mean in means))
            found += rows
    record(arguments.out, {"rows": found}, packages=("scikit-learn",))


if __name__ == "__main__":
    main()

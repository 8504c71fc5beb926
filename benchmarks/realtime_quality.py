"""Trainings of known length: rehearsed from starts over decades, beside what people use untuned.

    FORETUNE_DATA=... python -m benchmarks.realtime_quality [--tasks digits ...] [--seeds 3]
        [--out benchmarks/results/rehearsed-h200.json]

Learning rate and momentum of SGD, from rates of 0 to 10, and learning rate, first beta and decay of
AdamW, from rates of 1e-5 to 0.1, by `foretune.rehearse` at a cost of four plain trainings, under a
schedule with a warm-up of a twentieth and a cosine to 0. Beside it: five defaults, and the best on test
data of a grid of seven rates with the same optimizer and schedule (momentum 0.9, decay 1e-4), an oracle
which no user has. All figures are accuracies on test data that nothing else sees.

`--tasks held-out` are three that were chosen, with their networks, before `rehearse` was run on them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

import foretune as ft
from benchmarks.harness import Table, command_line, record
from benchmarks.realtime_tasks import HELD_OUT, TASKS
from benchmarks.tasks import cross_entropy

KINDS: dict[str, dict[str, Any]] = {
    "SGD": {
        "starts": [0.0, 1e-3, 0.1, 10.0],
        "others": {"momentum": 0.5},
        "constraints": {"lr": ft.NonNegative(), "momentum": ft.Box(0.0, 0.99)},
        "grid": [1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0],
        "usual": {"momentum": 0.9},
        "optimizer": lambda h, schedule: optax.sgd(schedule, h["momentum"]),
    },
    "AdamW": {
        "starts": [1e-5, 1e-3, 0.1],
        "others": {"b1": 0.9, "decay": 1e-4},
        "constraints": {"lr": ft.NonNegative(), "b1": ft.Box(0.0, 0.99), "decay": ft.NonNegative()},
        "grid": [1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1],
        "usual": {"b1": 0.9, "decay": 1e-4},
        "optimizer": lambda h, schedule: optax.adamw(
            schedule, b1=h["b1"], weight_decay=h["decay"], eps_root=1e-8
        ),
    },
}


def schedule(peak: Any, steps: int) -> Callable[[Any], Any]:
    """Return a warm-up over a twentieth of the steps, then a cosine to 0."""
    warm = max(1, steps // 20)

    def rate(t):
        decay = 0.5 * (1 + jnp.cos(jnp.pi * jnp.maximum(t - warm, 0) / (steps - warm)))
        return peak * jnp.minimum((t + 1) / warm, decay)

    return rate


def defaults(steps: int) -> dict[str, Any]:
    """Return what people train with: name -> optimizer."""

    def cosine(rate):
        return optax.cosine_decay_schedule(rate, steps)

    return {
        "AdamW 1e-3, cosine": optax.adamw(cosine(1e-3)),
        "Adam 3e-3, cosine": optax.adam(cosine(3e-3)),
        "SGD 0.1/0.9, cosine": optax.sgd(cosine(0.1), 0.9),
        "schedule-free AdamW": optax.contrib.schedule_free_adamw(2.5e-3, warmup_steps=steps // 20),
        "Prodigy, cosine": optax.contrib.prodigy(cosine(1.0)),
    }


class Bench:
    """One task: its training of any length, with any optimizer, and the score of a network."""

    def __init__(self, name: str):
        self.task = TASKS[name]()
        self.train, self.validation, test = map(jax.device_put, self.task.parts)

        def accuracy(params):
            return 100 * jnp.mean(jnp.argmax(self.task.apply(params, test[0]), 1) == test[1])

        self.accuracy = jax.jit(accuracy)
        self.makers = {kind: self._maker(kind) for kind in KINDS}  # once: programs are reused

    def problem(self, steps: int, key: Any, optimizer: Any) -> ft.Problem:
        """Return the training of so many steps."""

        def error(params, batch):
            return cross_entropy(self.task.apply(params, batch[0]), batch[1])

        of_start, of_batches = jax.random.split(key)
        batches = ft.Minibatches.shuffled(
            self.train, batch_size=self.task.batch_size, steps=steps, key=of_batches
        )
        return ft.Problem(
            ft.Training(lambda params, h, batch: error(params, batch), optimizer),
            lambda state, h, batch: error(state.params, batch),
            *(self.task.init(of_start), batches, self.validation),
        )

    def untuned(self, optimizer: Any, seed: int) -> float:
        """Return the test accuracy with an optimizer of Optax's."""
        problem = self.problem(self.task.steps, jax.random.key(seed), optimizer)
        problem = problem.replace(objective=lambda state, h, batch: h["none"])
        state: Any = problem.response({"none": jnp.array(0.0)})[1]
        params = state.params
        if isinstance(state.opt_state, optax.contrib.ScheduleFreeState):
            params = optax.contrib.schedule_free_eval_params(state.opt_state, params)
        return float(self.accuracy(params))

    def _maker(self, kind: str) -> Callable[[int, Any], ft.Problem]:
        """Return `make` of an optimizer."""

        def make(steps, key):
            def optimizer(h):
                return KINDS[kind]["optimizer"](h, schedule(h["lr"], steps))

            return self.problem(steps, key, optimizer)

        return make

    def grid(self, kind: str, seeds: int) -> dict[float, float]:
        """Return the test accuracy of full trainings: learning rate -> mean."""
        make, found = self.makers[kind], {}

        @jax.jit
        def accuracy(hparams, key):
            return self.accuracy(make(self.task.steps, key).response(hparams)[1].params)

        for rate in KINDS[kind]["grid"]:
            hparams = {"lr": rate} | KINDS[kind]["usual"]
            hparams = {name: jnp.array(x) for name, x in hparams.items()}
            found[rate] = np.mean([accuracy(hparams, jax.random.key(s)) for s in range(seeds)])
        return {rate: float(mean) for rate, mean in found.items()}

    def rehearsed(self, kind: str, rate: float, seed: int) -> tuple[float, float, dict[str, float]]:
        """Return the test accuracy, the cost, and the hyperparameters."""
        hparams = {"lr": rate} | KINDS[kind]["others"]
        result = ft.rehearse(
            self.makers[kind],
            {name: jnp.array(x) for name, x in hparams.items()},
            steps=self.task.steps,
            constraints=KINDS[kind]["constraints"],
            key=jax.random.key(seed),
        )
        cost = sum(trial["cost"] for trial in result.history)
        found = {name: float(x) for name, x in result.hparams.items()}
        return float(self.accuracy(result.state.params)), cost, found


def compare(name: str, seeds: int) -> dict[str, Any]:
    """Return the accuracies of every method on a task."""
    bench = Bench(name)
    result: dict[str, Any] = {"untuned": {}, "grid": {}, "rehearsed": {}}
    table = Table(name, "test accuracy, %", "above the best default", "above the best of the grid")
    for label, optimizer in defaults(bench.task.steps).items():
        row = result["untuned"][label] = _summary(
            [bench.untuned(optimizer, s) for s in range(seeds)]
        )
        table.add(label, row["mean"], "", "")
    best = max(row["mean"] for row in result["untuned"].values())
    for kind in KINDS:
        result["grid"][kind] = grid = bench.grid(kind, seeds)
        oracle = max(grid.values())
        table.add(f"best of 7 rates, {kind}", oracle, oracle - best, 0.0)
        for rate in KINDS[kind]["starts"]:
            runs = [bench.rehearsed(kind, rate, seed) for seed in range(seeds)]
            row = _summary([accuracy for accuracy, _, _ in runs])
            row |= {
                "cost": max(cost for _, cost, _ in runs),
                "found": [found for *_, found in runs],
            }
            row |= {"above default": row["mean"] - best, "above grid": row["mean"] - oracle}
            result["rehearsed"][f"{kind} from {rate:g}"] = row
            table.add(
                f"rehearsed, {kind} from {rate:g}",
                row["mean"],
                row["mean"] - best,
                row["mean"] - oracle,
            )
    return result


def _summary(values: list[float]) -> dict[str, Any]:
    return {"mean": float(np.mean(values)), "std": float(np.std(values)), "seeds": values}


def main() -> None:
    parser = command_line(__doc__)
    names = [name for name in TASKS if name not in HELD_OUT]
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS, "held-out"], default=names)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    results = {}
    for name in HELD_OUT if arguments.tasks == ["held-out"] else arguments.tasks:
        results[name] = compare(name, arguments.seeds)
        record(arguments.out, results)
        jax.clear_caches()


if __name__ == "__main__":
    main()

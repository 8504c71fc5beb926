"""Real-time tuning from seven starts, beside the schedules that people use without tuning.

    FORETUNE_DATA=... python -m benchmarks.realtime_quality [--tasks digits mnist ...] [--seeds 5]
        [--out benchmarks/results/realtime-quality-cpu.json]

Learning rate and momentum of SGD are tuned, from learning rates over five decades (momentum 0.5) and
from 0, in one run of 100 windows. Beside it: Adam with 1e-3 and 3e-3, SGD with 0.1 and momentum 0.9,
each with a cosine to 0; schedule-free AdamW; Prodigy with a cosine; and the best, by validation error,
of 20 random trials (constant learning rate log-uniform in [1e-4, 10], momentum uniform in [0, 1]). All
train on the same minibatches, and figures are accuracies on test data that none of them sees. The costs
are in plain trainings. Results are written after every task.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

import foretune as ft
from benchmarks.harness import Table, command_line, record
from benchmarks.realtime_tasks import TASKS
from benchmarks.tasks import cross_entropy

STARTS = {
    "null": (0.0, 0.0),
    "1e-4": (1e-4, 0.5),
    "1e-3": (1e-3, 0.5),
    "0.01": (1e-2, 0.5),
    "0.1": (1e-1, 0.5),
    "1": (1.0, 0.5),
    "10": (10.0, 0.5),
}
WINDOWS = 100
CONSTRAINTS = {"lr": ft.NonNegative(), "momentum": ft.Box(0.0, 0.999)}


def defaults(steps: int) -> dict[str, Any]:
    """Return what people train with: name -> optimizer."""

    def cosine(rate):
        return optax.cosine_decay_schedule(rate, steps)

    return {
        "Adam 1e-3, cosine": optax.adam(cosine(1e-3)),
        "Adam 3e-3, cosine": optax.adam(cosine(3e-3)),
        "SGD 0.1/0.9, cosine": optax.sgd(cosine(0.1), 0.9),
        "schedule-free AdamW": optax.contrib.schedule_free_adamw(2.5e-3, warmup_steps=steps // 20),
        "Prodigy, cosine": optax.contrib.prodigy(cosine(1.0)),
    }


class Bench:
    """One task: plain training, real-time tuning and the score of a trained network."""

    def __init__(self, name: str):
        self.task = task = TASKS[name]()
        train, validation, test = task.parts

        def mean_loss(params, batch):
            return cross_entropy(task.apply(params, batch[0]), batch[1])

        self.loss = mean_loss
        self.dynamics = ft.Training(
            lambda params, h, batch: mean_loss(params, batch),
            lambda h: optax.sgd(h["lr"], h["momentum"]),
        )
        self.error = lambda state, h, batch: mean_loss(state.params, batch)
        self.accuracy = jax.jit(
            lambda params: 100 * jnp.mean(jnp.argmax(task.apply(params, test[0]), 1) == test[1])
        )
        self.data = jax.device_put(train)
        self.validation = jax.device_put(validation)
        self.tuner = ft.RealTime(self.dynamics, self.error, constraints=CONSTRAINTS)

    def start(self, seed: int):
        """Return the initial parameters and the minibatches of a seed."""
        init_key, batch_key = jax.random.split(jax.random.key(seed))
        batches = ft.Minibatches.shuffled(
            self.data, batch_size=self.task.batch_size, steps=self.task.steps, key=batch_key
        )
        return self.task.init(init_key), batches

    def plain(self, lr: float, momentum: float, seed: int) -> tuple[float, float, float]:
        """Return validation error, test accuracy and seconds of one training."""
        params, batches = self.start(seed)
        problem = ft.Problem(self.dynamics, self.error, params, batches, self.validation)
        hparams = {"lr": jnp.array(lr), "momentum": jnp.array(momentum)}
        began = time.perf_counter()
        value, state = jax.block_until_ready(problem.response(hparams))
        seconds = time.perf_counter() - began
        return float(value), float(self.accuracy(state.params)), seconds

    def untuned(self, optimizer: Any, seeds: int) -> list[float]:
        """Return the test accuracies with an optimizer of Optax's."""
        dynamics = ft.Training(lambda params, h, batch: self.loss(params, batch), optimizer)
        accuracies = []
        for seed in range(seeds):
            params, batches = self.start(seed)
            problem = ft.Problem(dynamics, lambda s, h, b: h["none"], params, batches, None)
            state: Any = problem.response({"none": jnp.array(0.0)})[1]
            params = state.params
            if isinstance(state.opt_state, optax.contrib.ScheduleFreeState):
                params = optax.contrib.schedule_free_eval_params(state.opt_state, params)
            accuracies.append(float(self.accuracy(params)))
        return accuracies

    def realtime(self, start: tuple[float, float], seed: int) -> tuple[float, float]:
        """Return test accuracy and seconds of one tuned training."""
        params, batches = self.start(seed)
        tuner = self.tuner
        state = tuner.init(params, {"lr": jnp.array(start[0]), "momentum": jnp.array(start[1])})
        pieces = list(ft.windows(batches, self.task.steps // WINDOWS))
        tuner.lower(state, pieces[0], self.validation)  # its checks are not part of the training
        began = time.perf_counter()
        try:
            for piece in pieces:
                state, _ = tuner.update(state, piece, self.validation)
        except ft.NonFiniteError as error:
            state = error.state
        jax.block_until_ready(state)
        seconds = time.perf_counter() - began
        return float(self.accuracy(state.train.params)), seconds

    def random_search(self, seed: int, trials: int = 20) -> float:
        """Return the test accuracy of the trial that is best on validation."""
        rng = np.random.default_rng(seed)
        results = [
            self.plain(10 ** rng.uniform(-4, 1), rng.uniform(0, 1), seed) for _ in range(trials)
        ]
        return min((r for r in results if np.isfinite(r[0])), key=lambda r: r[0])[1]


def compare(name: str, seeds: int, search: bool) -> dict[str, Any]:
    """Return the accuracies of every method on a task."""
    bench = Bench(name)
    result: dict[str, Any] = {"untuned": {}, "tuned": {}}
    table = Table(name, "test accuracy, %", "above the best untuned", "with constants")
    for label, optimizer in defaults(bench.task.steps).items():
        row = result["untuned"][label] = _summary(bench.untuned(optimizer, seeds))
        table.add(label, row["mean"], "", "")
    best = max(row["mean"] for row in result["untuned"].values())
    bench.plain(0.1, 0.5, 0)
    bench.realtime((0.1, 0.5), 0)  # compiled before anything is timed
    cost = []
    for label, start in STARTS.items():
        accuracies, before = [], []
        for seed in range(seeds):
            _, plain, plain_seconds = bench.plain(*start, seed)
            tuned, seconds = bench.realtime(start, seed)
            accuracies.append(tuned)
            before.append(plain)
            cost.append(seconds / plain_seconds)
        row = _summary(accuracies) | {"constant": float(np.mean(before))}
        row["above the best untuned"] = row["mean"] - best
        result["tuned"][label] = row
        table.add(f"tuned, from {label}", row["mean"], row["mean"] - best, row["constant"])
    if search:
        found = [bench.random_search(seed) for seed in range(seeds)]
        row = result["random search of 20"] = _summary(found)
        table.add("best of 20 random trials", row["mean"], row["mean"] - best, "")
    result["cost of a tuned run, in plain ones"] = float(np.median(cost))
    print(f"{name}: a tuned run costs {np.median(cost):.1f} plain ones", flush=True)
    return result


def _summary(values: list[float]) -> dict[str, Any]:
    return {"mean": float(np.mean(values)), "std": float(np.std(values)), "seeds": values}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--no-search", action="store_true", help="without the random trials")
    arguments = parser.parse_args()
    results = {}
    for name in arguments.tasks:
        results[name] = compare(name, arguments.seeds, not arguments.no_search)
        record(arguments.out, results)
        jax.clear_caches()


if __name__ == "__main__":
    main()

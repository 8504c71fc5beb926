"""Real-time tuning from seven starts, beside the schedules that people use without tuning.

    FORETUNE_DATA=... python -m benchmarks.realtime_quality [--tasks digits mnist ...] [--seeds 5]
        [--out benchmarks/results/realtime-quality-cpu.json]
    python -m benchmarks.realtime_quality --options [--tasks digits] [--out ...]

Learning rate and momentum of SGD are tuned, from learning rates over five decades (momentum 0.5) and
from 0, in one run of 100 windows that knows its horizon. Beside it: Adam with 1e-3 and 3e-3, SGD with
0.1 and momentum 0.9, each with a cosine to 0; schedule-free AdamW; Prodigy with a cosine; and the best,
by validation error, of 20 random trials (constant learning rate log-uniform in [1e-4, 10], momentum
uniform in [0, 1]). All train on the same minibatches, and figures are accuracies on test data that none
of them sees. The costs are in plain trainings. Results are written after every task.

With `--options`, the options of `RealTime` one at a time instead, without a horizon.
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

import foretune as ft
from benchmarks.harness import record
from benchmarks.realtime_tasks import TASKS

STARTS = {
    "null": (0.0, 0.0),
    "1e-4": (1e-4, 0.5),
    "1e-3": (1e-3, 0.5),
    "0.01": (1e-2, 0.5),
    "0.1": (1e-1, 0.5),
    "1": (1.0, 0.5),
    "10": (10.0, 0.5),
}
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
            logits = task.apply(params, batch[0])
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]))

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
        self.tuners: dict[Any, Any] = {}

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

    def realtime(self, start, seed: int, windows: int = 100, make: Any = ft.RealTime, **options):
        """Return test accuracy, seconds and the last hyperparameters of one tuned training."""
        params, batches = self.start(seed)
        window = self.task.steps // windows
        key = make, windows, str(options)
        if key not in self.tuners:
            self.tuners[key] = make(self.dynamics, self.error, constraints=CONSTRAINTS, **options)
        tuner = self.tuners[key]
        state = tuner.init(params, {"lr": jnp.array(start[0]), "momentum": jnp.array(start[1])})
        pieces = list(ft.windows(batches, window))
        tuner.lower(state, pieces[0], self.validation)  # its checks are not part of the training
        began = time.perf_counter()
        try:
            for piece in pieces:
                state, _ = tuner.update(state, piece, self.validation)
        except ft.NonFiniteError as error:
            state = error.state
        jax.block_until_ready(state)
        seconds = time.perf_counter() - began
        hparams = jax.tree.map(float, state.hparams)
        return float(self.accuracy(state.train.params)), seconds, hparams

    def random_search(self, seed: int, trials: int = 20) -> float:
        """Return the test accuracy of the trial that is best on validation."""
        rng = np.random.default_rng(seed)
        results = [
            self.plain(10 ** rng.uniform(-4, 1), rng.uniform(0, 1), seed) for _ in range(trials)
        ]
        return min((r for r in results if np.isfinite(r[0])), key=lambda r: r[0])[1]


def compare(name: str, seeds: int, search: bool) -> dict[str, Any]:
    bench = Bench(name)
    result: dict[str, Any] = {"untuned": {}, "tuned": {}}
    for label, optimizer in defaults(bench.task.steps).items():
        result["untuned"][label] = _summary(bench.untuned(optimizer, seeds))
        print(f"{name}: {label} {result['untuned'][label]['mean']:.2f}", flush=True)
    best = max(row["mean"] for row in result["untuned"].values())
    horizon = {"horizon": bench.task.steps}
    bench.plain(0.1, 0.5, 0)
    bench.realtime((0.1, 0.5), 0, **horizon)  # compiled before anything is timed
    cost = []
    for label, start in STARTS.items():
        accuracies, before = [], []
        for seed in range(seeds):
            _, plain, plain_seconds = bench.plain(*start, seed)
            tuned, seconds, _ = bench.realtime(start, seed, **horizon)
            accuracies.append(tuned)
            before.append(plain)
            cost.append(seconds / plain_seconds)
        row = _summary(accuracies) | {"constant": float(np.mean(before))}
        result["tuned"][label] = row | {"above the best untuned": row["mean"] - best}
        print(
            f"{name}: from {label:>5} {row['mean']:.2f} ({row['mean'] - best:+.2f}), "
            f"constant {row['constant']:.2f}", flush=True,
        )  # fmt: skip
    if search:
        found = [bench.random_search(seed) for seed in range(seeds)]
        result["random search of 20"] = _summary(found)
        print(f"{name}: best of 20 random trials {np.mean(found):.2f}")
    result["cost of a tuned run, in plain ones"] = float(np.median(cost))
    print(f"{name}: a tuned run costs {np.median(cost):.1f} plain ones", flush=True)
    return result


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "windows=200": {"windows": 200},
    "windows=50": {"windows": 50},
    "discount=1": {"discount": 1.0},
    "discount=0.95": {"discount": 0.95},
    "rollback=None": {"rollback": None},
    "reset=10": {"reset": 10},
    "z_cap=10": {"z_cap": 10.0},
    "clip=1": {"clip": 1.0},
    "cocob": {"optimizer": optax.contrib.cocob()},
    "adam(0.005)": {"optimizer": optax.adam(0.005)},
    "the paper's": {"make": ft.RealTime.paper},
}


def options(names: list[str], seeds: int) -> dict[str, Any]:
    results: dict[str, Any] = {variant: {} for variant in VARIANTS}
    for name in names:
        bench = Bench(name)
        for variant, arguments in VARIANTS.items():
            accuracies = {
                label: [bench.realtime(start, seed, **arguments)[0] for seed in range(seeds)]
                for label, start in STARTS.items()
            }
            results[variant][name] = {label: float(np.mean(a)) for label, a in accuracies.items()}
            shown = "  ".join(f"{a:6.2f}" for a in results[variant][name].values())
            print(f"{name:<7} {variant:<15} {shown}", flush=True)
    return results


def _summary(values: list[float]) -> dict[str, Any]:
    return {"mean": float(np.mean(values)), "std": float(np.std(values)), "seeds": values}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--options", action="store_true", help="the options one at a time")
    parser.add_argument("--no-search", action="store_true", help="without the random trials")
    parser.add_argument("--out", help="write the results to this JSON file")
    arguments = parser.parse_args()
    if arguments.options:
        results = options(arguments.tasks, arguments.seeds)
        if arguments.out:
            record(arguments.out, results)
        return
    results = {}
    for name in arguments.tasks:
        results[name] = compare(name, arguments.seeds, not arguments.no_search)
        if arguments.out:
            record(arguments.out, results)
        jax.clear_caches()


if __name__ == "__main__":
    main()

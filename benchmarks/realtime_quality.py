"""Real-time tuning from badly chosen starts, beside random search, Optuna and no tuning.

    FORETUNE_DATA=... python -m benchmarks.realtime_quality [--tasks digits mnist cnn] [--seeds 5]
        [--out benchmarks/results/realtime-quality-cpu.json]
    python -m benchmarks.realtime_quality --options [--out ...]

Learning rate and momentum of SGD, on three tasks: a network 64-64-10 on scikit-learn's digits (1,000
steps), a network 784-128-64-10 on MNIST (4,000 steps) and a small convolutional network on MNIST (2,000
steps). Real-time tuning starts from learning rates over decades, and from 0, and trains once, in 100
windows with its default options. Beside
it: the same constants untuned; the best by validation error of 20 random trials (learning rate
log-uniform in [1e-4, 10], momentum uniform in [0, 1]); and Optuna's TPE over the same ranges within
the wall-clock time of the real-time run. Trials and real-time runs train for the same number of steps
on the same minibatches, and figures are accuracies on test data that none of them sees.

With `--options`, the options of `RealTime` one at a time instead.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import foretune as ft
from benchmarks.harness import record
from benchmarks.tasks import digits_arrays, mnist_arrays

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


class Task(NamedTuple):
    """Data, sizes and a network as init and apply functions."""

    parts: tuple[Any, Any, Any]  # training, validation, test
    batch_size: int
    steps: int
    init: Callable[[Any], Any]
    apply: Callable[[Any, Any], Any]


def mlp_init(sizes: tuple[int, ...], key: Any) -> list[dict[str, Any]]:
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"w": jax.random.normal(k, (a, b)) * (2 / a) ** 0.5, "b": jnp.zeros(b)}
        for k, a, b in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def mlp(params, x):
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def cnn_init(key: Any) -> dict[str, Any]:
    k = jax.random.split(key, 3)
    return {
        "c1": jax.random.normal(k[0], (9, 8)) * (2 / 9) ** 0.5,
        "b1": jnp.zeros(8),
        "c2": jax.random.normal(k[1], (72, 16)) * (2 / 72) ** 0.5,
        "b2": jnp.zeros(16),
        "w": jax.random.normal(k[2], (784, 10)) * (2 / 784) ** 0.5,
        "b": jnp.zeros(10),
    }


def cnn(params, x):
    def layer(x, w, b):  # 3x3, stride 2
        patches = lax.conv_general_dilated_patches(
            x, (3, 3), (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jax.nn.relu(patches @ w + b)

    x = layer(x.reshape(-1, 28, 28, 1), params["c1"], params["b1"])
    x = layer(x, params["c2"], params["b2"])
    return x.reshape(x.shape[0], -1) @ params["w"] + params["b"]


def make_task(name: str) -> Task:
    if name == "digits":
        x, y = digits_arrays(seed=0)
        parts = ((x[:900], y[:900]), (x[900:1200], y[900:1200]), (x[1200:], y[1200:]))
        return Task(parts, 50, 1000, functools.partial(mlp_init, (64, 64, 10)), mlp)
    x, y, x_test, y_test = mnist_arrays()
    parts = ((x[:50000], y[:50000]), (x[50000:52000], y[50000:52000]), (x_test, y_test))
    if name == "mnist":
        return Task(parts, 100, 4000, functools.partial(mlp_init, (784, 128, 64, 10)), mlp)
    return Task(parts, 100, 2000, cnn_init, cnn)


class Bench:
    """One task: plain training, real-time tuning and the score of a trained network."""

    def __init__(self, name: str):
        self.task = task = make_task(name)
        train, validation, test = task.parts

        def mean_loss(params, batch):
            logits = task.apply(params, batch[0])
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]))

        self.dynamics = ft.Training(
            lambda params, h, batch: mean_loss(params, batch),
            lambda h: optax.sgd(h["lr"], h["momentum"]),
        )
        self.error = lambda state, h, batch: mean_loss(state.params, batch)
        self.accuracy = jax.jit(
            lambda params: jnp.mean(jnp.argmax(task.apply(params, test[0]), 1) == test[1])
        )
        self.data = jax.device_put(train)
        self.validation = jax.device_put(validation)

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
        return float(value), 100 * float(self.accuracy(state.params)), seconds

    def realtime(self, start, seed: int, windows: int = 100, make: Any = ft.RealTime, **options):
        """Return test accuracy, seconds and the last hyperparameters of one tuned training."""
        params, batches = self.start(seed)
        window = self.task.steps // windows
        tuner = make(self.dynamics, self.error, constraints=CONSTRAINTS, **options)
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
        return 100 * float(self.accuracy(state.train.params)), seconds, hparams

    def random_search(self, seed: int, trials: int = 20) -> float:
        """Return the test accuracy of the trial that is best on validation."""
        rng = np.random.default_rng(seed)
        results = [
            self.plain(10 ** rng.uniform(-4, 1), rng.uniform(0, 1), seed) for _ in range(trials)
        ]
        return min((r for r in results if np.isfinite(r[0])), key=lambda r: r[0])[1]

    def optuna(self, seed: int, seconds: float) -> tuple[float, int]:
        """Return the test accuracy of the best trial within the time, and the number of trials."""
        try:
            import optuna  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise SystemExit("The comparison needs Optuna: pip install optuna.") from None

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        accuracies = {}

        def objective(trial):
            lr = trial.suggest_float("lr", 1e-4, 10, log=True)
            value, accuracy, _ = self.plain(lr, trial.suggest_float("momentum", 0, 1), seed)
            accuracies[trial.number] = accuracy
            return value if np.isfinite(value) else 1e9

        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
        study.optimize(objective, timeout=seconds)
        return accuracies[study.best_trial.number], len(study.trials)


def compare(name: str, seeds: int) -> dict[str, Any]:
    bench = Bench(name)
    bench.plain(0.1, 0.5, 0)
    bench.realtime((0.1, 0.5), 0)  # compiled before anything is timed
    rows: dict[str, dict[str, list[float]]] = {s: {"tuned": [], "untuned": []} for s in STARTS}
    search, optuna, trials, cost = [], [], [], []
    for seed in range(seeds):
        search.append(bench.random_search(seed))
        times = []
        for label, start in STARTS.items():
            _, accuracy, plain_seconds = bench.plain(*start, seed)
            tuned, seconds, hparams = bench.realtime(start, seed)
            rows[label]["tuned"].append(tuned)
            rows[label]["untuned"].append(accuracy)
            times.append(seconds)
            cost.append(seconds / plain_seconds)
            print(f"{name} seed {seed} from {label:>5}: {accuracy:6.2f} -> {tuned:6.2f}  {hparams}")
        best, count = bench.optuna(seed, float(np.median(times)))
        optuna.append(best)
        trials.append(count)
        print(f"{name} seed {seed}: search {search[-1]:.2f}, Optuna {best:.2f} ({count} trials)")
    return {
        "random search of 20": _summary(search),
        "Optuna in the same time": _summary(optuna) | {"trials": trials},
        "starts": {s: {k: _summary(v) for k, v in row.items()} for s, row in rows.items()},
        "cost of a real-time run in training runs (median)": float(np.median(cost)),
    }


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


def _summary(values: list[float]) -> dict[str, float]:
    return {"mean": float(np.mean(values)), "std": float(np.std(values))}


def show(results: dict[str, Any]) -> None:
    for name, result in results.items():
        search = result["random search of 20"]["mean"]
        print(f"\n{name}: random search {search:.2f}, ", end="")
        print(f"Optuna in the same time {result['Optuna in the same time']['mean']:.2f}, ", end="")
        cost = result["cost of a real-time run in training runs (median)"]
        print(f"a real-time run costs {cost:.1f} training runs")
        print(f"{'start':>6} {'untuned':>8} {'tuned':>7} {'std':>5} {'- search':>9}")
        for label, row in result["starts"].items():
            tuned, untuned = row["tuned"], row["untuned"]["mean"]
            gap = tuned["mean"] - search
            print(
                f"{label:>6} {untuned:>8.2f} {tuned['mean']:>7.2f} {tuned['std']:>5.2f} {gap:>+9.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tasks", nargs="+", default=["digits", "mnist", "cnn"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--options", action="store_true", help="the options one at a time")
    parser.add_argument("--out", help="write the results to this JSON file")
    arguments = parser.parse_args()
    if arguments.options:
        results = options(arguments.tasks, arguments.seeds)
    else:
        results = {name: compare(name, arguments.seeds) for name in arguments.tasks}
        show(results)
    if arguments.out:
        record(arguments.out, results)


if __name__ == "__main__":
    main()

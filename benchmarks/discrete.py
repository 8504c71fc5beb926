"""Discrete hyperparameters: Optuna alone, and Optuna around gradient-tuned continuous ones.

    [FORETUNE_DATA=...] python -m benchmarks.discrete [--tasks digits mnist] [--clocks cold warm]
        [--seconds 60] [--seeds 3] [--out benchmarks/results/discrete_cpu.json]

The space: a network's depth (1, 2, 3 hidden layers), width (32, 128), activation (relu, tanh, gelu) and
batch size (20, 100); learning rate, momentum and weight decay of SGD. All methods get the same seconds
of wall-clock time, sampler (TPE), pruner (median, at ten points of a training), number of training
examples per trial, minibatches and initial weights:

    Optuna alone      proposes all seven; a trial trains once
    with gradients    Optuna proposes the discrete four; a trial trains once, and tunes the other three
                      while it does, from the tuned values of the best trial so far (`foretune.optuna`)
    tuned seldom      the same, but only every eighth trial tunes (which costs several trainings); the
                      others train with what the best of those has tuned

Real-time tuning sees up to 1,000 validation examples at a time, in 30 windows per training. The answer
of a method is the trial with the lowest error on all validation examples at its end; the test accuracy
of that one is reported and decides nothing. A trial under way when the time is over does not count.

Every shape is compiled once per study. Two clocks: "cold" counts compilation, for all methods; "warm"
begins when all programs of the space are compiled, as they are in a second study of the same process.
The activation is data (`lax.switch`), so that it costs no program.

MNIST is there only where FORETUNE_DATA is set.
"""

import contextlib
import functools
import itertools
import os
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import foretune as ft
from benchmarks.harness import Table, command_line, record
from benchmarks.tasks import cross_entropy, digits_arrays, mlp, mnist_arrays

try:
    import optuna

    import foretune.optuna as fo
except ImportError:
    raise SystemExit("The comparison needs Optuna: pip install optuna.") from None

DEPTHS, WIDTHS, BATCHES = (1, 2, 3), (32, 128), (20, 100)
ACTIVATIONS = {"relu": jax.nn.relu, "tanh": jnp.tanh, "gelu": jax.nn.gelu}
START = {"lr": 0.01, "momentum": 0.9, "decay": 1e-4}
CONSTRAINTS = {"lr": ft.NonNegative(), "momentum": ft.Box(0.0, 0.999), "decay": ft.NonNegative()}
REPORTS = 10
WINDOWS = 30
SAMPLE = 1000  # validation examples in a window's update
SELDOM = 8
EARLY = 5
METHODS = {"Optuna alone": "alone", "with gradients": "gradients", "tuned seldom": "seldom"}


def network(activation, params, x):
    return mlp(params, x, lambda x: lax.switch(activation, list(ACTIVATIONS.values()), x))


def mean_loss(activation, params, batch):
    return cross_entropy(network(activation, params, batch[0]), batch[1])


def loss(activation, params, hparams, batch):
    penalty = sum(jnp.sum(layer["w"] ** 2) for layer in params)
    return mean_loss(activation, params, batch) + hparams["decay"] * penalty


def error(activation, state, hparams, batch):
    return mean_loss(activation, state.params, batch)


def optimizer(hparams):
    return optax.sgd(hparams["lr"], hparams["momentum"])


def dynamics_of(activation):
    return ft.Training(jax.tree_util.Partial(loss, activation), optimizer)


@jax.jit
def train(activation, state, hparams, window, validation):
    """Train over a window; return the state and the validation error."""
    dynamics = dynamics_of(activation)

    def step(state, indices):
        batch = jax.tree.map(lambda leaf: leaf[indices], window.data)
        return dynamics.step(state, hparams, batch), None

    state, _ = lax.scan(step, state, window.indices)
    return state, mean_loss(activation, state.params, validation)


@jax.jit
def accuracy(activation, params, test):
    return 100 * jnp.mean(jnp.argmax(network(activation, params, test[0]), 1) == test[1])


def _arrays(hparams: dict[str, float]) -> dict[str, Any]:
    return {name: jnp.asarray(value, jnp.float32) for name, value in hparams.items()}


class Bench:
    """A task, and a trial of either method."""

    def __init__(self, name: str):
        if name == "digits":
            x, y = digits_arrays(seed=0)
            parts, examples = ((x, y, 0, 900), (x, y, 900, 1200), (x, y, 1200, len(y))), 60_000
        else:
            x, y, x_test, y_test = mnist_arrays()
            parts = ((x, y, 0, 50_000), (x, y, 50_000, 55_000), (x_test, y_test, 0, 10_000))
            examples = 120_000
        self.train, self.validation, self.test = (
            jax.device_put((x[a:b], y[a:b])) for x, y, a, b in parts
        )
        self.examples = examples
        x, y = self.validation
        starts = range(0, len(y), SAMPLE)
        self.samples = [(x[i : i + SAMPLE], y[i : i + SAMPLE]) for i in starts]

    def start(self, seed: int, depth: int, width: int, batch_size: int):
        """Return the initial weights and the minibatches."""
        rng = np.random.default_rng([seed, 1])
        sizes = (self.train[0].shape[1], *[width] * depth, 10)
        params = [  # by NumPy, which compiles nothing
            {
                "w": (rng.normal(size=(a, b)) * (2 / a) ** 0.5).astype(np.float32),
                "b": np.zeros(b, np.float32),
            }
            for a, b in itertools.pairwise(sizes)
        ]
        n, steps = len(self.train[1]), self.examples // batch_size
        epochs = np.concatenate([rng.permutation(n) for _ in range(-(-self.examples // n))])
        indices = epochs[: self.examples].astype(np.int32).reshape(steps, batch_size)
        return jax.device_put(params), ft.Minibatches(self.train, indices)

    def propose(self, trial: Any, seed: int):
        """Return the activation, initial weights and minibatches of a trial."""
        depth = trial.suggest_categorical("depth", DEPTHS)
        width = trial.suggest_categorical("width", WIDTHS)
        batch_size = trial.suggest_categorical("batch_size", BATCHES)
        chosen = trial.suggest_categorical("activation", list(ACTIVATIONS))
        activation = jnp.asarray(list(ACTIVATIONS).index(chosen), jnp.int32)
        return activation, *self.start(seed, depth, width, batch_size)

    def alone(self, trial: Any, seed: int, stop: Any) -> tuple[float, Any, Any]:
        """Return the validation error, the activation and the trained weights."""
        hparams = {
            "lr": trial.suggest_float("lr", 1e-4, 1.0, log=True),
            "momentum": trial.suggest_float("momentum", 0.0, 0.99),
            "decay": trial.suggest_float("decay", 1e-7, 1e-2, log=True),
        }
        return self.plain(trial, seed, stop, _arrays(hparams))

    def seldom(self, trial: Any, seed: int, stop: Any) -> tuple[float, Any, Any]:
        """Return the same; every few trials tune, the others use what was tuned."""
        if trial.number % SELDOM == 0:
            return self.gradients(trial, seed, stop)
        return self.plain(trial, seed, stop, fo.warm_start(trial, _arrays(START)))

    def plain(self, trial: Any, seed: int, stop: Any, hparams: Any) -> tuple[float, Any, Any]:
        """Train with constant hyperparameters."""
        activation, params, batches = self.propose(trial, seed)
        state = jax.jit(dynamics_of(activation).init)(params, hparams)
        value = np.inf
        for report, window in enumerate(ft.windows(batches, batches.steps // REPORTS), 1):
            state, value = train(activation, state, hparams, window, self.validation)
            value = float(value)
            if not np.isfinite(value):
                raise optuna.TrialPruned("diverged")
            trial.report(value, report * WINDOWS // REPORTS)
            if trial.should_prune() or stop():
                raise optuna.TrialPruned
        return value, activation, state.params

    def gradients(self, trial: Any, seed: int, stop: Any) -> tuple[float, Any, Any]:
        """Return the same; the continuous hyperparameters are tuned on the way."""
        activation, params, batches = self.propose(trial, seed)
        tuner = ft.RealTime(
            dynamics_of(activation),
            jax.tree_util.Partial(error, activation),
            constraints=CONSTRAINTS,
        )
        with fo.prune_nonfinite(trial):
            result = tuner.run(
                batches,
                self.samples,
                params=params,
                hparams=fo.warm_start(trial, _arrays(START)),
                window=batches.steps // WINDOWS,
                callbacks=[fo.Pruning(trial, every=WINDOWS // REPORTS)],
                stop=lambda run: "the time is over" if stop() else None,
            )
        if result.stopped == "the time is over":
            raise optuna.TrialPruned(result.stopped)
        params = result.state.train.params
        value = float(jax.jit(mean_loss)(activation, params, self.validation))
        return fo.keep(trial, result, value), activation, params

    def study(self, method: str, seed: int, seconds: float) -> dict[str, Any]:
        """Return the best trial within the time."""
        tested: dict[int, float] = {}
        curve: list[tuple[float, int, float]] = []  # seconds, trial, validation error
        paused = 0.0
        began = time.perf_counter()

        def over():
            return time.perf_counter() - began - paused > seconds

        def objective(trial):
            nonlocal paused
            value, activation, params = getattr(self, METHODS[method])(trial, seed, over)
            now = time.perf_counter()
            curve.append((now - began - paused, trial.number, value))
            tested[trial.number] = float(accuracy(activation, params, self.test))
            paused += time.perf_counter() - now  # the test accuracy is beside the clock
            return value

        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
        stop = lambda study, trial: study.stop() if over() else None  # noqa: E731
        study.optimize(objective, callbacks=[stop])
        done = [t for t in study.trials if t.state.name == "COMPLETE"]
        if not done:
            raise SystemExit(
                f"{method}: no trial was complete in {seconds:g} s; give more --seconds."
            )
        best = study.best_trial
        return {
            "validation_error": best.value,
            "test_accuracy": tested[best.number],
            "trials": len(study.trials),
            "complete": len(done),
            "early": min((v for _, k, v in curve if k < EARLY), default=float("nan")),
            "curve": curve,
            "best": best.params | best.user_attrs,
        }

    def compile(self) -> None:
        """Compile the programs of the whole space, for all methods."""
        for depth, width, batch in itertools.product(DEPTHS, WIDTHS, BATCHES):
            choice = {"depth": depth, "width": width, "batch_size": batch, "activation": "relu"}
            fixed = optuna.trial.FixedTrial(choice | START)
            for method in ("alone", "gradients"):
                run = functools.partial(getattr(self, method), fixed, 0, lambda: True)
                with contextlib.suppress(optuna.TrialPruned):
                    run()


def compare(name: str, clocks: list[str], seeds: int, seconds: float) -> dict[str, Any]:
    results: dict[str, Any] = {}
    bench = Bench(name)
    for clock in clocks:
        if clock == "warm":
            jax.clear_caches()
            bench.compile()
        for seed, method in itertools.product(range(seeds), METHODS):
            if clock == "cold":
                jax.clear_caches()
            found = bench.study(method, seed, seconds)
            results.setdefault(clock, {}).setdefault(method, []).append(found)
            print(
                f"{name} {clock} seed {seed} {method:<15} validation {found['validation_error']:.4f}  "
                f"test {found['test_accuracy']:.2f}  {found['complete']} of {found['trials']} trials  "
                f"{found['best']}",
                flush=True,
            )
    return results


def show(results: dict[str, Any]) -> None:
    early = f"validation error after {EARLY} trials"
    heads = "data", "clock", "method", "validation error", "test accuracy", "trials (complete)"
    table = Table(*heads, early)
    for name, clocks in results.items():
        for clock, methods in clocks.items():
            for method, found in methods.items():
                mean = {
                    what: statistics.mean(f[what] for f in found)
                    for what in ("validation_error", "test_accuracy", "trials", "complete", "early")
                }
                spread = {
                    what: statistics.pstdev(f[what] for f in found)
                    for what in ("validation_error", "test_accuracy")
                }
                table.add(
                    name,
                    clock,
                    method,
                    f"{mean['validation_error']:.4f} ± {spread['validation_error']:.4f}",
                    f"{mean['test_accuracy']:.2f} ± {spread['test_accuracy']:.2f}",
                    f"{mean['trials']:.0f} ({mean['complete']:.0f})",
                    mean["early"],
                )


def main() -> None:
    parser = command_line(__doc__)
    everything = ["digits", "mnist"] if "FORETUNE_DATA" in os.environ else ["digits"]
    parser.add_argument("--tasks", nargs="+", default=everything, choices=["digits", "mnist"])
    parser.add_argument("--clocks", nargs="+", default=["cold", "warm"], choices=["cold", "warm"])
    parser.add_argument("--seconds", type=float, default=60, help="for each study")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    results = {
        name: compare(name, arguments.clocks, arguments.seeds, arguments.seconds)
        for name in arguments.tasks
    }
    show(results)
    record(arguments.out, results, packages=["optuna"])


if __name__ == "__main__":
    main()

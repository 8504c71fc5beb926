"""Twenty hyperparameters and the time of 60 trainings: `rehearse` beside Optuna's searches.

    python -m benchmarks.many [--tasks digits ...] [--seeds 3] [--cost 60] [--out FILE]

AdamW under a warm-up and a cosine to 0. Tuned are the peak rate, 8 factors along the schedule, a
factor of the rate for each leaf, the scale of the initial weights of each layer, both betas, the
decay, label smoothing and input noise: 20 in a network of two layers, 23 in one of three. Every
method may spend as much as `--cost` trainings. The searches (random, TPE, TPE with Hyperband's
pruning at T/9 and T/3) try four fifths of it, the first trial being the start; the four best are
then compared in several draws. What each method found is judged by four trainings of its own: loss and
accuracy on test data. Beside it the best default, by accuracy (`realtime_quality.defaults`).
"""

import concurrent.futures
import functools
import multiprocessing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

import foretune as ft
from benchmarks.harness import Table, command_line, record
from benchmarks.realtime_quality import Bench, defaults, schedule
from benchmarks.realtime_tasks import TASKS
from benchmarks.tasks import cross_entropy

KNOTS, MOST = 8, 1.5
FINALISTS, JUDGED = 4, 4
RUNGS = (9, 3, 1)
SEARCHES = ("random", "TPE", "Hyperband")


class Many(Bench):
    """A task with many hyperparameters."""

    def __init__(self, name: str):
        super().__init__(name)
        self.test = jax.device_put(self.task.parts[2])
        weights = self.task.init(jax.random.key(0))
        self.start = {
            "lr": jnp.array(1e-3),
            "knots": jnp.zeros(KNOTS),
            "rates": jax.tree.map(lambda _: jnp.zeros(()), weights),
            "scales": [jnp.zeros(()) for _ in jax.tree.leaves(weights) if _.ndim > 1],
            "b1": jnp.array(0.9),
            "b2": jnp.array(0.999),
            "decay": jnp.array(1e-4),
            "smoothing": jnp.array(0.01),
        }
        around = ft.Box(-MOST, MOST)
        self.constraints = {
            "lr": ft.Log(),
            "knots": around,
            "rates": around,
            "scales": around,
            "b1": ft.Box(0.0, 0.99),
            "b2": ft.Box(0.9, 0.9999),
            "decay": ft.NonNegative(),
            "smoothing": ft.Box(0.0, 0.3),
        }
        if not jnp.issubdtype(self.test[0].dtype, jnp.integer):  # letters have no noise
            self.start["noise"] = jnp.array(0.01)
            self.constraints["noise"] = ft.Box(0.0, 1.0)
        self.rungs, self.judge = jax.jit(self._rungs), jax.jit(self._judge)

    def training(self, steps: int, key: Any) -> ft.Problem:
        """Return the training of so many steps, with all hyperparameters."""
        of_start, of_batches, of_noise = jax.random.split(key, 3)
        task = self.task

        def loss(params, h, batch, *, key):
            x, y = batch
            if "noise" in h:
                x = x + h["noise"] * jax.random.normal(key, x.shape)
            logits = task.apply(params, x)
            right = cross_entropy(logits, y)
            even = -jnp.mean(jax.nn.log_softmax(logits))
            return (1 - h["smoothing"]) * right + h["smoothing"] * even

        def optimizer(h):
            base = schedule(h["lr"], steps)

            def rate(t):
                place = jnp.clip(t / steps * (KNOTS - 1), 0, KNOTS - 1)
                return base(t) * jnp.exp(jnp.interp(place, jnp.arange(float(KNOTS)), h["knots"]))

            def by_leaf(updates, _=None):
                return jax.tree.map(lambda u, r: jnp.exp(r) * u, updates, h["rates"])

            return optax.chain(
                optax.adamw(rate, h["b1"], h["b2"], eps_root=1e-8, weight_decay=h["decay"]),
                optax.stateless(by_leaf),
            )

        batches = ft.Minibatches.shuffled(
            self.train, batch_size=task.batch_size, steps=steps, key=of_batches
        )
        return ft.Problem(
            ft.Training(loss, optimizer, key=of_noise),
            lambda state, h, batch: cross_entropy(task.apply(state.params, batch[0]), batch[1]),
            jax.tree_util.Partial(scaled, task.init(of_start)),
            batches,
            self.validation,
        )

    def _rungs(self, h: Any, key: Any) -> Any:
        """Return the validation losses at each rung of one training."""
        problem: Any = self.training(self.task.steps, key)
        state = problem.dynamics.init(problem.init(h), h)
        data, indices = problem.batches.data, problem.batches.indices
        values, begun = [], 0

        def step(state, rows):
            batch = jax.tree.map(lambda leaf: leaf[rows], data)
            return problem.dynamics.step(state, h, batch), None

        for rung in RUNGS:
            state, _ = lax.scan(step, state, indices[begun : self.task.steps // rung])
            begun = self.task.steps // rung
            values.append(problem.objective(state, h, self.validation))
        return jnp.stack(values)

    def _judge(self, h: Any, key: Any) -> Any:
        """Return test loss and accuracy of one training."""
        state: Any = self.training(self.task.steps, key).response(h)[1]
        loss = cross_entropy(self.task.apply(state.params, self.test[0]), self.test[1])
        return jnp.stack([loss, self.accuracy(state.params)])

    def judged(self, h: Any, seed: int) -> list[float]:
        """Return test loss and accuracy, the mean over several trainings."""
        keys = [jax.random.fold_in(jax.random.key(1000 + seed), i) for i in range(JUDGED)]
        return np.mean([self.judge(h, key) for key in keys], axis=0).tolist()

    def rehearse(self, cost: float, seed: int) -> tuple[Any, float]:
        """Return what `rehearse` finds, and its cost."""
        result = ft.rehearse(
            self.training, self.start, steps=self.task.steps, cost=cost,
            constraints=self.constraints, key=jax.random.key(seed),
        )  # fmt: skip
        return result.hparams, sum(trial["cost"] for trial in result.history)

    def search(self, name: str, cost: float, seed: int) -> tuple[Any, float]:
        """Return what a search finds, and its cost."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        sampler = optuna.samplers.RandomSampler if name == "random" else optuna.samplers.TPESampler
        pruner: Any = optuna.pruners.NopPruner()
        if name == "Hyperband":
            pruner = optuna.pruners.HyperbandPruner(1, 9, 3)
        study = optuna.create_study(sampler=sampler(seed=seed), pruner=pruner)
        study.enqueue_trial(encoded(self.start))
        spent, found, key = 0.0, [], jax.random.key(seed)
        while spent < 0.8 * cost:
            trial = study.ask()
            h = self.proposed(trial)
            values = np.nan_to_num(np.asarray(self.rungs(h, key)), nan=99.0, posinf=99.0)
            rungs, rung = RUNGS if name == "Hyperband" else RUNGS[-1:], RUNGS[-1]
            for rung, value in zip(rungs, values[-len(rungs) :], strict=True):
                trial.report(float(value), 9 // rung)
                if rung > 1 and trial.should_prune():
                    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                    break
            else:
                study.tell(trial, float(values[-1]))
                found.append((float(values[-1]), h))
            spent += 1 / rung
        found = sorted(found, key=lambda pair: pair[0])[:FINALISTS]
        draws = max(1, round((cost - spent) / FINALISTS))
        keys = [jax.random.fold_in(key, i) for i in range(draws)]
        means = [np.mean([self.rungs(h, k)[-1] for k in keys]) for _, h in found]
        return found[int(np.nanargmin(means))][1], spent + draws * len(found)

    def proposed(self, trial: Any) -> Any:
        """Return a trial's hyperparameters."""
        log = {"lr": (1e-5, 1.0), "decay": (1e-6, 1.0), "1-b2": (1e-4, 0.1)}
        linear = {"b1": (0.0, 0.99), "smoothing": (0.0, 0.3), "noise": (0.0, 1.0)}
        linear = {name: ends for name, ends in linear.items() if name in self.start}
        h = {name: trial.suggest_float(name, *ends, log=True) for name, ends in log.items()}
        h |= {name: trial.suggest_float(name, *ends) for name, ends in linear.items()}
        h["b2"] = 1 - h.pop("1-b2")
        h = {name: jnp.array(x) for name, x in h.items()}
        for name in ("knots", "rates", "scales"):
            flat, shape = ravel_pytree(self.start[name])
            values = [trial.suggest_float(f"{name} {i}", -MOST, MOST) for i in range(len(flat))]
            h[name] = shape(jnp.array(values))
        return h


def scaled(weights: Any, h: Any) -> Any:
    """Return the initial weights, those of each layer times a factor."""
    leaves, structure = jax.tree.flatten(weights)
    factors = iter(h["scales"])
    leaves = [jnp.exp(next(factors)) * leaf if leaf.ndim > 1 else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, leaves)


def encoded(h: Any) -> dict[str, float]:
    """Return the start as a point of the search space."""
    point = {
        name: float(h[name]) for name in h if name in ("lr", "decay", "b1", "smoothing", "noise")
    }
    point["1-b2"] = 1 - float(h["b2"])
    for name in ("knots", "rates", "scales"):
        flat, _ = ravel_pytree(h[name])
        point |= {f"{name} {i}": float(x) for i, x in enumerate(flat)}
    return point


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=["digits"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cost", type=float, default=60.0)
    parser.add_argument("--processes", type=int, default=1, help="tasks and seeds side by side")
    arguments = parser.parse_args()
    results: dict[str, Any] = {name: {} for name in arguments.tasks}
    table = Table("task", "method", "seed", "test loss", "test accuracy, %", "cost")
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(arguments.processes, mp_context=spawn) as pool:
        cells = {
            pool.submit(cell, name, seed, arguments.cost): (name, seed)
            for name in arguments.tasks
            for seed in range(arguments.seeds)
        }
        for done in concurrent.futures.as_completed(cells):
            name, seed = cells[done]
            results[name][seed] = done.result()
            for method, (loss, accuracy, cost) in done.result().items():
                table.add(name, method, seed, loss or "", accuracy, cost)
            record(arguments.out, results, packages=("optuna",))


def cell(name: str, seed: int, cost: float) -> dict[str, tuple[float | None, float, float]]:
    """Return test loss, accuracy and cost of each method, on a task."""
    bench = Many(name)
    optimizers = defaults(bench.task.steps)
    untuned = {label: bench.untuned(optimizers[label], seed) for label in optimizers}
    label = max(untuned, key=lambda label: untuned[label])
    found: dict[str, Any] = {f"best default, {label}": (None, untuned[label], 1.0)}
    for method in (*SEARCHES, "rehearse"):
        search = bench.rehearse if method == "rehearse" else functools.partial(bench.search, method)
        hparams, spent = search(cost, seed)
        found[method] = (*bench.judged(hparams, seed), spent)
    return found


if __name__ == "__main__":
    main()

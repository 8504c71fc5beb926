"""Are learnt schedules of the learning rate level with hand-tried cosines, on trainings never seen?

    python -m benchmarks.learnt_schedules [--tasks mnist text] [--steps 30] [--out FILE.json]

Trainings of 300 minibatches of 50: MNIST (images halved to 14 x 14), network 196-64-64-10, AdamW; and a
byte-level language model (eight bytes to the next, 64 units) of speeches, SGD with momentum. Learnt are
the constants of a warm-up and cosine (peak, length of the warm-up, final rate) or the rates of 15
blocks, from a rate three times below the middle one of three cosines. "4 runs": the mean error of
four starts, with new orders of the minibatches at each outer step. "1 run": one start and one order.

Schedules are tuned on validation data. The table is over `--fresh` starts and orders that no tuning has
seen, the same for each schedule: validation error, error and accuracy on test data, and how far the
test error is above that of the cosine with the lowest validation error, run by run; each with the
standard error of its mean. The cost is in trainings: hypergradients times what one costs, measured on
one run. The peaks were chosen on validation data, so that three times higher and lower are worse.
`text` needs FORETUNE_DATA/text.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

import foretune as ft
from benchmarks.harness import Table, command_line, record, time_in_turns
from benchmarks.tasks import cross_entropy, layers, mlp, mnist_arrays

T, BLOCKS, BATCH = 300, 15, 50
TUNING, ORDERS = jax.random.key(1), jax.random.key(2)
FRESH = jax.random.key(3), jax.random.key(4)  # starts, orders


class Task(NamedTuple):
    """What is trained, the peaks of the cosines tried by hand, and the data."""

    init: Callable[[Any], Any]
    logits: Callable[[Any, Any], Any]
    optimizer: Callable[[Any], optax.GradientTransformation]
    peaks: tuple[float, float, float]
    train: Any
    validation: Any
    test: Any


def mnist() -> Task:
    """5,000, 5,000 and 10,000 images of MNIST, the last ones its test set."""
    x, y, x_test, y_test = mnist_arrays()
    x, y = np.concatenate([x[:10_000], x_test]), np.concatenate([y[:10_000], y_test])
    x = x.reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(-1, 196)
    x, y = (map(jnp.asarray, np.split(array, (5_000, 10_000))) for array in (x, y))
    adamw = functools.partial(optax.adamw, eps_root=1e-12)
    init = lambda key: layers(key, 196, 64, 64, 10)  # noqa: E731
    return Task(init, mlp, adamw, (3e-3, 1e-2, 3e-2), *zip(x, y, strict=True))


def text(context: int = 8, width: int = 16) -> Task:
    """The next byte of speeches: of 1930 to 1974 to train on, since 1975 to validate and test."""
    folder = Path(os.environ["FORETUNE_DATA"]) / "text"
    target = np.load(folder / "target-modern-speeches.npz")
    texts = (
        np.load(folder / "sources.npz")["speeches-1930-1974"],
        target["validation"],
        target["test"],
    )

    def windows(text, n):
        rows = np.lib.stride_tricks.sliding_window_view(text, context + 1)
        rows = rows[np.linspace(0, len(rows) - 1, n).astype(int)].astype(np.int32)
        return jnp.asarray(rows[:, :-1]), jnp.asarray(rows[:, -1])

    def init(key):
        keys = jax.random.split(key)
        embedding = jax.random.normal(keys[0], (256, width))
        return embedding, layers(keys[1], context * width, 64, 256)

    def logits(params, x):
        return mlp(params[1], params[0][x].reshape(len(x), -1))

    momentum = functools.partial(optax.sgd, momentum=0.9)
    parts = map(windows, texts, (100_000, 4_000, 10_000))
    return Task(init, logits, momentum, (0.03, 0.1, 0.3), *parts)


TASKS = {"mnist": mnist, "text": text}


def cosine(h, t):
    """Linear up to the peak over a share of the steps, then a cosine down to a share of the peak."""
    start = h["warmup"] * T
    up = jnp.minimum(1.0, (t + 1) / start)
    down = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip((t - start) / (T - start), 0.0, 1.0)))
    return h["peak"] * up * (h["final"] + (1 - h["final"]) * down)


def blocks(h, t):
    """One rate for each of 15 blocks."""
    return h["lr"][t // (T // BLOCKS)]


CONSTRAINTS = {
    cosine: {"peak": ft.Log(), "warmup": ft.Logit(0.0, 1.0), "final": ft.Logit(0.0, 1.0)},
    blocks: {"lr": ft.Log()},
}


def cosine_of(peak: float, final: float = 0.0) -> dict[str, Any]:
    """Return the constants of a cosine with a tenth of warm-up."""
    return {"peak": jnp.array(peak), "warmup": jnp.array(0.1), "final": jnp.array(final)}


def trainings(task: Task, schedule: Any, starts: Any, orders: Any, runs: int) -> ft.Mean:
    """Return the mean of several trainings, each with its own start and order of minibatches."""

    def loss(params, hparams, batch):
        return cross_entropy(task.logits(params, batch[0]), batch[1])

    def error(state, hparams, batch):
        return loss(state.params, hparams, batch)

    dynamics = ft.Training(loss, lambda h: task.optimizer(functools.partial(schedule, h)))
    shuffled = functools.partial(ft.Minibatches.shuffled, batch_size=BATCH, steps=T)
    keys = zip(jax.random.split(starts, runs), jax.random.split(orders, runs), strict=True)
    return ft.Mean(
        [
            ft.Problem(dynamics, error, task.init(a), shuffled(task.train, key=b), task.validation)
            for a, b in keys
        ]
    )


def measured(task: Task, problem: ft.Mean, hparams: Any) -> dict[str, np.ndarray]:
    """Return the errors and the accuracy of each run."""
    _, state = problem.response(hparams)
    test = problem.replace(validation=[task.test] * problem.count)
    guesses = jax.vmap(lambda p: jnp.argmax(task.logits(p, task.test[0]), -1))(state.params)
    return {
        "validation": np.asarray(problem.values(state, hparams)),
        "test": np.asarray(test.values(state, hparams)),
        "accuracy %": 100 * np.asarray(jnp.mean(guesses == task.test[1], -1)),
    }


def compared(task: Task, steps: int, fresh: int) -> dict[str, Any]:
    """Print and return a row for each schedule, the hand-tried ones first."""
    constants, rates = cosine_of(task.peaks[0], 0.01), {"lr": jnp.full(BLOCKS, task.peaks[0])}
    adam, cocob = optax.adam(0.1), optax.contrib.cocob(alpha=10.0)
    ways = {  # schedule, start, runs, outer optimizer
        "cosine's constants, 4 runs": (cosine, constants, 4, cocob),
        "15 rates, 4 runs, adam(0.1)": (blocks, rates, 4, adam),
        "15 rates, 4 runs, COCOB": (blocks, rates, 4, cocob),
        "cosine's constants, 1 run": (cosine, constants, 1, cocob),
        "15 rates, 1 run, adam(0.1)": (blocks, rates, 1, adam),
    }
    unseen = {schedule: trainings(task, schedule, *FRESH, fresh) for schedule in CONSTRAINTS}
    tried = [measured(task, unseen[cosine], cosine_of(peak)) for peak in task.peaks]
    best = min(tried, key=lambda runs: np.mean(runs["validation"]))
    rows: dict[str, Any] = {}
    table = Table("schedule", *best, "above the best", "trainings")

    def add(name, runs, cost, **more):
        runs = runs | {"above the best": runs["test"] - best["test"]}
        mean = {k: (float(v.mean()), float(v.std(ddof=1) / fresh**0.5)) for k, v in runs.items()}
        runs = {k: v.tolist() for k, v in runs.items()}
        rows[name] = {"mean, standard error": mean, "trainings": cost, **more, "runs": runs}
        table.add(name, *(f"{m:.4f} ({e:.4f})" for m, e in mean.values()), cost)

    for peak, runs in zip(task.peaks, tried, strict=True):
        add(f"hand-tried cosine {peak:g}", runs, 1)
    one, engine = trainings(task, blocks, TUNING, ORDERS, 1), ft.Reverse()
    programs = {"gradient": lambda: engine(one, rates), "training": lambda: one.response(rates)}
    ratio = time_in_turns(programs, 3)[1]("gradient", "training")
    for name, (schedule, start, n, optimizer) in ways.items():
        draw = lambda key, s=schedule, n=n: trainings(task, s, TUNING, key, n)  # noqa: E731
        result = ft.minimize(
            draw if n > 1 else draw(ORDERS),
            start,
            steps=steps,
            optimizer=optimizer,
            constraints=CONSTRAINTS[schedule],
            key=ORDERS if n > 1 else None,
        )
        add(
            name,
            measured(task, unseen[schedule], result.hparams),
            ratio * n * (steps + 1),
            hparams={name: np.asarray(leaf).tolist() for name, leaf in result.hparams.items()},
            history=[float(row["value"]) for row in result.history],
            rejected=sum(bool(row["rejected"]) for row in result.history),
        )
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--steps", type=int, default=30, help="outer steps of each descent")
    parser.add_argument("--fresh", type=int, default=10, help="starts and orders of the table")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for name in arguments.tasks:
        print(f"\n{name}\n")
        results[name] = compared(TASKS[name](), arguments.steps, arguments.fresh)
        jax.clear_caches()
    record(arguments.out, results)


if __name__ == "__main__":
    main()

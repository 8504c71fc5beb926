"""Outer steps per second of MAML, by `minimize` and by a `lax.scan` written by hand.

    python -m benchmarks.meta [--cases sinusoids glyphs] [--steps N] [--rounds 2] [--out FILE.json]
    python -m benchmarks.meta --long 70000 [--out FILE.json]

sinusoids    25 tasks of ten points, 5 inner steps, a network 1-40-40-1.
glyphs       16 tasks of five letters, one image of each (14 x 14), 5 inner steps, a network
             196-64-64-5; it needs `glyphs/background.npz` in the folder `FORETUNE_DATA`.

Adam outside. All draw tasks of the same distribution and make the same number of steps from the same
weights: 10,000 on sinusoids and 3,000 on glyphs, unless `--steps` says otherwise. `minimize` stores
what the program by hand stores, `Reverse("everything", unroll=5)`; beside it its default and first
order. Programs come one after another in each round, and a ratio is taken between neighbours. Seconds
are of the processor, so that other programs on the machine do not count; on a GPU, of the clock.
The errors are those on 1,000 fresh tasks after 1, 5 and 10 inner steps, with standard errors; `--long
N` is one run of N steps by `minimize` on sinusoids, nothing beside it.
"""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import foretune as ft
from benchmarks.harness import Table, command_line, record

INNER, OUTER_RATE = 5, 1e-3
SHOWN = 1, INNER, 10  # inner steps after which the error is shown
ENGINES = {
    "minimize": ft.Reverse("everything", unroll=INNER),
    "minimize, Reverse()": ft.Reverse(),
    "minimize, first order": ft.Reverse(first_order=True),
}
Weights = list[tuple[jax.Array, jax.Array]]
Pair = tuple[jax.Array, jax.Array]


class Case(NamedTuple):
    """Tasks of one kind, and what learns them."""

    data: Any
    sample: Callable[[Any, jax.Array], tuple[Pair, Pair]]  # data, key -> support and query
    loss: Callable[[Weights, Any, Pair], jax.Array]
    sizes: tuple[int, ...]  # of the network
    tasks: int
    rate: float  # of the inner steps
    steps: int  # outer ones


def clock() -> float:
    """Return the time, in seconds."""
    return time.process_time() if jax.default_backend() == "cpu" else time.perf_counter()


def start(sizes: tuple[int, ...]) -> Weights:
    """Return random weights of the network."""
    keys = jax.random.split(jax.random.key(0), len(sizes) - 1)
    return [
        (jax.random.normal(k, (a, b)) / a**0.5, jnp.zeros(b))
        for k, a, b in zip(keys, sizes, sizes[1:], strict=False)
    ]


def network(weights: Weights, x: jax.Array) -> jax.Array:
    for w, b in weights[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = weights[-1]
    return x @ w + b


def squared(weights: Weights, _: Any, points: Pair) -> jax.Array:
    """Return the mean squared error of the network."""
    return jnp.mean((network(weights, points[0]) - points[1]) ** 2)


def sinusoid(_: Any, key: jax.Array) -> tuple[Pair, Pair]:
    """Return ten points to learn from, and ten others."""
    amplitude_key, phase_key, x_key = jax.random.split(key, 3)
    amplitude = jax.random.uniform(amplitude_key, minval=0.1, maxval=5.0)
    phase = jax.random.uniform(phase_key, maxval=jnp.pi)
    x = jax.random.uniform(x_key, (2, 10, 1), minval=-5.0, maxval=5.0)
    y = amplitude * jnp.sin(x + phase)
    return (x[0], y[0]), (x[1], y[1])


def entropy(weights: Weights, _: Any, images: Pair) -> jax.Array:
    """Return the mean cross-entropy of the network."""
    x, y = images
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(network(weights, x), y))


def letters(images: jax.Array, key: jax.Array) -> tuple[Pair, Pair]:
    """Return one image of each of five letters, and five others of each."""
    class_key, image_key = jax.random.split(key)
    classes = jax.random.choice(class_key, len(images), (5,), replace=False)
    of_class = jax.vmap(lambda k: jax.random.permutation(k, images.shape[1])[:6])
    x = images[classes[:, None], of_class(jax.random.split(image_key, 5))]
    y = jnp.arange(5)
    return (x[:, 0], y), (x[:, 1:].reshape(25, -1), jnp.repeat(y, 5))


def glyphs() -> jax.Array:
    """Return the images by class, each of 14 x 14 numbers."""
    x = np.load(Path(os.environ["FORETUNE_DATA"], "glyphs", "background.npz"))["x"]
    small = x.reshape(*x.shape[:2], 14, 2, 14, 2).mean((3, 5)) / 255
    return jnp.asarray(small.reshape(*x.shape[:2], -1), jnp.float32)


CASES = {
    "sinusoids": lambda: Case((), sinusoid, squared, (1, 40, 40, 1), 25, 0.01, 10_000),
    "glyphs": lambda: Case(glyphs(), letters, entropy, (196, 64, 64, 5), 16, 0.1, 3000),
}


def tasks_of(case: Case, steps: int = INNER) -> Callable[[jax.Array], ft.Problem]:
    """Return the draw of a random task as a problem."""
    training = ft.Training(case.loss, optax.sgd(case.rate))

    def task(key: jax.Array) -> ft.Problem:
        support, query = case.sample(case.data, key)
        return ft.Problem(
            training,
            lambda state, weights, points: case.loss(state.params, weights, points),
            init=lambda weights: weights,
            batches=ft.FullBatch(support, steps),
            validation=query,
        )

    return task


def by_minimize(case: Case, engine: Any, steps: int) -> Callable[[], Weights]:
    """Return MAML as the documentation has it."""
    draw, weights = ft.Mean.of_draws(tasks_of(case), case.tasks), start(case.sizes)
    options: Any = dict(key=jax.random.key(1), optimizer=optax.adam(OUTER_RATE))
    return lambda: ft.minimize(draw, weights, steps=steps, engine=engine, **options).hparams


def by_hand(case: Case, steps: int) -> Callable[[], Weights]:
    """Return MAML as one program without the library."""
    adam = optax.adam(OUTER_RATE)

    def error(weights, data, key):
        support, query = case.sample(data, key)
        adapted = weights
        for _ in range(INNER):
            gradient = jax.grad(case.loss)(adapted, None, support)
            adapted = jax.tree.map(lambda w, g: w - case.rate * g, adapted, gradient)
        return case.loss(adapted, None, query)

    def mean_error(weights, data, key):
        keys = jax.random.split(key, case.tasks)
        return jnp.mean(jax.vmap(error, (None, None, 0))(weights, data, keys))

    @jax.jit
    def learn(weights, data, keys):
        def step(carry, key):
            weights, state = carry
            updates, state = adam.update(jax.grad(mean_error)(weights, data, key), state)
            return (optax.apply_updates(weights, updates), state), None

        return lax.scan(step, (weights, adam.init(weights)), keys)[0][0]

    given = start(case.sizes), case.data, jax.random.split(jax.random.key(1), steps)
    return lambda: learn(*given)


def errors(case: Case, weights: Weights) -> dict[str, list[float]]:
    """Return the mean error on fresh tasks after some inner steps, and its standard error."""
    keys = jax.random.split(jax.random.key(2), 1000)
    found = {}
    for steps in SHOWN:
        task = tasks_of(case, steps)
        each = lax.map(lambda key, task=task: task(key).response(weights)[0], keys, batch_size=50)
        found[f"{steps} steps"] = [float(each.mean()), float(each.std() / len(keys) ** 0.5)]
    return found


def beside_by_hand(name: str, steps: int | None, rounds: int) -> list[dict[str, Any]]:
    """Return steps per second and errors by `minimize`, beside those of the loop by hand."""
    case = CASES[name]()
    steps = steps or case.steps
    programs = {"by hand": by_hand(case, steps)}
    programs |= {name: by_minimize(case, engine, steps) for name, engine in ENGINES.items()}
    found: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(1 + rounds):  # of which the first compiles
        for kind, program in programs.items():
            began = clock()
            found[kind] = jax.block_until_ready(program())
            seconds[kind].append(clock() - began)

    def row(kind: str) -> dict[str, Any]:
        first, *others = seconds[kind]
        taken = statistics.median(others)
        pairs = zip(seconds["by hand"][1:], others, strict=True)
        shares = [hand / own for hand, own in pairs]
        of_by_hand = {"of_by_hand": statistics.median(shares), "shares": shares}
        timing = {"per_second": steps / taken, "first_call": first - taken}
        return {"case": name, "name": kind, "steps": steps} | timing | of_by_hand

    return [row(kind) | {"errors": errors(case, found[kind])} for kind in programs]


def long_run(steps: int) -> list[dict[str, Any]]:
    """Return the errors after one run by `minimize`."""
    case = CASES["sinusoids"]()
    began = clock()
    weights = by_minimize(case, ft.Reverse(), steps)()
    rate = steps / (clock() - began)
    row = {"case": "sinusoids", "name": "minimize", "steps": steps, "per_second": rate}
    return [row | {"errors": errors(case, weights)}]


def main() -> None:
    """Run the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--steps", type=int, help="outer steps")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--long", type=int, help="the steps of one run by minimize")
    arguments = parser.parse_args()
    heads = [f"error, {n} steps" for n in SHOWN]
    table = Table("", "", "outer steps", "steps a second", "of by hand", *heads)
    results = []
    for case in ["sinusoids"] if arguments.long else arguments.cases:
        if arguments.long:
            rows = long_run(arguments.long)
        else:
            rows = beside_by_hand(case, arguments.steps, arguments.rounds)
        for row in rows:
            shown = [f"{mean:.3f} ± {error:.3f}" for mean, error in row["errors"].values()]
            speed = row["steps"], row["per_second"], row.get("of_by_hand", "")
            table.add(row["case"], row["name"], *speed, *shown)
        results += rows
        record(arguments.out, results)


if __name__ == "__main__":
    main()

"""Outer steps per second of MAML on sinusoids, by `minimize` and by a `lax.scan` written by hand.

    python -m benchmarks.meta [--steps 2000] [--rounds 3] [--out FILE.json]
    python -m benchmarks.meta --long 70000 [--out FILE.json]

25 tasks of ten points, 5 inner steps, a network 1-40-40-1, Adam outside. Both draw tasks of the same
distribution and make the same number of steps from the same weights. Seconds are of the processor, so
that other programs on the machine do not count. The errors are those on 1,000
fresh tasks after 1, 5 and 10 inner steps, with standard errors; `--long N` is one run of N steps by
`minimize`, nothing beside it.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax

import foretune as ft
from benchmarks.harness import Table, command_line, record

TASKS, INNER, RATE, OUTER_RATE = 25, 5, 0.01, 1e-3
SHOWN = 1, INNER, 10  # inner steps after which the error is shown
Weights = list[tuple[jax.Array, jax.Array]]
Points = tuple[jax.Array, jax.Array]


def start(key: jax.Array) -> Weights:
    """Return random weights of the network."""
    sizes = (1, 40, 40, 1)
    keys = jax.random.split(key, 3)
    return [
        (jax.random.normal(k, (a, b)) / a**0.5, jnp.zeros(b))
        for k, a, b in zip(keys, sizes, sizes[1:], strict=False)
    ]


def loss(weights: Weights, _: Any, points: Points) -> jax.Array:
    """Return the mean squared error of the network."""
    x, y = points
    for w, b in weights[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = weights[-1]
    return jnp.mean((x @ w + b - y) ** 2)


def sinusoid(key: jax.Array) -> tuple[Points, Points]:
    """Return ten points to learn from, and ten others."""
    amplitude_key, phase_key, x_key = jax.random.split(key, 3)
    amplitude = jax.random.uniform(amplitude_key, minval=0.1, maxval=5.0)
    phase = jax.random.uniform(phase_key, maxval=jnp.pi)
    x = jax.random.uniform(x_key, (2, 10, 1), minval=-5.0, maxval=5.0)
    y = amplitude * jnp.sin(x + phase)
    return (x[0], y[0]), (x[1], y[1])


TRAINING = ft.Training(loss, optax.sgd(RATE))


def task(key: jax.Array, steps: int = INNER) -> ft.Problem:
    """Return a random task as a problem."""
    support, query = sinusoid(key)
    return ft.Problem(
        TRAINING,
        lambda state, weights, points: loss(state.params, weights, points),
        init=lambda weights: weights,
        batches=ft.FullBatch(support, steps),
        validation=query,
    )


META = ft.Mean.of_draws(task, TASKS)


def by_minimize(engine: Any, steps: int) -> Any:
    """Return the result of MAML as the documentation has it."""
    return ft.minimize(
        META,
        start(jax.random.key(0)),
        key=jax.random.key(1),
        steps=steps,
        engine=engine,
        optimizer=optax.adam(OUTER_RATE),
    )


@jax.jit
def by_hand(weights: Weights, keys: jax.Array) -> Weights:
    """Return the weights after a step of MAML for each key."""
    adam = optax.adam(OUTER_RATE)

    def error(weights, key):
        support, query = sinusoid(key)
        adapted = weights
        for _ in range(INNER):
            gradient = jax.grad(loss)(adapted, None, support)
            adapted = jax.tree.map(lambda w, g: w - RATE * g, adapted, gradient)
        return loss(adapted, None, query)

    def mean_error(weights, key):
        return jnp.mean(jax.vmap(error, (None, 0))(weights, jax.random.split(key, TASKS)))

    def step(carry, key):
        weights, state = carry
        updates, state = adam.update(jax.grad(mean_error)(weights, key), state)
        return (optax.apply_updates(weights, updates), state), None

    (learnt, _), _ = lax.scan(step, (weights, adam.init(weights)), keys)
    return cast(Weights, learnt)


def errors(weights: Weights) -> dict[str, list[float]]:
    """Return the mean error on fresh tasks after some inner steps, and its standard error."""
    keys = jax.random.split(jax.random.key(2), 1000)
    found = {}
    for steps in SHOWN:
        each = jax.vmap(lambda key, n=steps: task(key, n).response(weights)[0])(keys)
        found[f"{steps} steps"] = [float(each.mean()), float(each.std() / len(keys) ** 0.5)]
    return found


def beside_by_hand(steps: int, rounds: int) -> list[dict[str, Any]]:
    """Return steps per second and errors by `minimize`, beside those of the loop by hand."""
    keys = jax.random.split(jax.random.key(1), steps)
    engines = {
        "minimize": ft.Reverse(),
        "minimize, first order": ft.Reverse(first_order=True),
    }
    found: dict[str, Any] = {}

    programs: dict[str, Callable[[], Weights]] = {
        "by hand": lambda: by_hand(start(jax.random.key(0)), keys)
    } | {
        name: lambda engine=engine: by_minimize(engine, steps).hparams
        for name, engine in engines.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(1 + rounds):  # of which the first compiles
        for name, program in programs.items():
            began = time.process_time()
            found[name] = jax.block_until_ready(program())
            seconds[name].append(time.process_time() - began)

    def row(name: str) -> dict[str, Any]:
        taken = statistics.median(seconds[name][1:])
        pairs = zip(seconds["by hand"][1:], seconds[name][1:], strict=True)
        share = statistics.median(hand / own for hand, own in pairs)
        return {"name": name, "steps": steps, "per_second": steps / taken, "of_by_hand": share}

    return [row(name) | {"errors": errors(found[name])} for name in programs]


def long_run(steps: int) -> list[dict[str, Any]]:
    """Return the errors after one run by `minimize`."""
    began = time.process_time()
    result = by_minimize(ft.Reverse(), steps)
    rate = steps / (time.process_time() - began)
    found = errors(result.hparams)
    return [{"name": "minimize", "steps": steps, "per_second": rate, "errors": found}]


def main() -> None:
    """Run the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", type=int, help="the steps of one run by minimize")
    arguments = parser.parse_args()
    if arguments.long:
        rows = long_run(arguments.long)
    else:
        rows = beside_by_hand(arguments.steps, arguments.rounds)
    heads = [f"error, {n} steps" for n in SHOWN]
    table = Table("", "outer steps", "steps a second", "of by hand", *heads)
    for row in rows:
        shown = [f"{mean:.3f} ± {error:.3f}" for mean, error in row["errors"].values()]
        table.add(row["name"], row["steps"], row["per_second"], row.get("of_by_hand", ""), *shown)
    record(arguments.out, rows)


if __name__ == "__main__":
    main()

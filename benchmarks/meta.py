"""Outer steps per second of MAML on sinusoids, by `minimize` and by a `lax.scan` written by hand.

    python -m benchmarks.meta [--steps 2000] [--rounds 3] [--long 0] [--out FILE.json]

25 tasks of ten points, 5 inner steps, a network 1-40-40-1, Adam outside. Both draw tasks of the same
distribution and make the same number of steps from the same weights. The errors are those on 1,000
fresh tasks after 1 and 5 inner steps; `--long N` adds a run of N steps by `minimize`.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax

import foretune as ft
from benchmarks.harness import Table, command_line, record, time_in_turns

TASKS, INNER, RATE, OUTER_RATE = 25, 5, 0.01, 1e-3
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


def errors(weights: Weights) -> list[float]:
    """Return the mean error on fresh tasks after 1 and 5 inner steps."""
    keys = jax.random.split(jax.random.key(2), 1000)
    return [
        float(jnp.mean(jax.vmap(lambda key, n=n: task(key, n).response(weights)[0])(keys)))
        for n in (1, INNER)
    ]


def main() -> None:
    """Run the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", type=int, default=0, help="steps of one more run by minimize")
    arguments = parser.parse_args()
    keys = jax.random.split(jax.random.key(1), arguments.steps)
    engines = {
        "minimize": ft.Reverse(),
        "minimize, everything stored": ft.Reverse("everything"),
        "minimize, first order": ft.Reverse(first_order=True),
    }
    found: dict[str, Any] = {}

    def runs(name, engine):
        def run():
            found[name] = by_minimize(engine, arguments.steps)
            return found[name].hparams

        return run

    programs = {"by hand": lambda: by_hand(start(jax.random.key(0)), keys)}
    programs |= {name: runs(name, engine) for name, engine in engines.items()}
    seconds, ratio = time_in_turns(programs, arguments.rounds)
    table = Table("", "outer steps", "steps a second", "of by hand", "1 step", "5 steps")
    results = []

    def add(name, steps, second, share, weights):
        one, five = errors(weights)
        rate = steps / second
        table.add(name, steps, rate, share, one, five)
        results.append(
            {"name": name, "steps": steps, "per_second": rate, "of_by_hand": share,
             "error_1": one, "error_5": five}
        )  # fmt: skip

    add("by hand", arguments.steps, seconds["by hand"], 1.0, programs["by hand"]())
    for name, result in found.items():
        made = len(result.history)  # fewer than asked for where nothing more is gained
        share = ratio("by hand", name) * made / arguments.steps
        add(name, made, seconds[name], share, result.hparams)
    if arguments.long:
        result = by_minimize(ft.Reverse(), arguments.long)
        results.append(
            {"name": "long", "steps": len(result.history), "errors": errors(result.hparams)}
        )
        table.add("long", len(result.history), "", "", *results[-1]["errors"])
    record(arguments.out, results)


if __name__ == "__main__":
    main()

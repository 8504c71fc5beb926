"""Is `Auto`'s choice the fastest? Ten problems; every candidate is measured.

    python -m benchmarks.auto [--rounds 3] [--only NAME ...] [--out FILE.json]

For each problem, without a budget and with one of about twelve states: all candidates that fit are
timed, and the chosen one is compared with the fastest of them. Programs take turns; candidates that a
first call shows to be three times as slow as the fastest so far are not timed further.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft
from benchmarks.harness import Table, command_line, record, time_in_turns, timed
from benchmarks.tasks import cross_entropy, layers, mlp, random_arrays
from foretune._engines.memory import program_bytes, show_bytes
from foretune._problem.arguments import flatten
from foretune._problem.problem import validated

Case = tuple[ft.Problem, dict[str, Any]]


def batches(arrays, size: int, steps: int) -> ft.Minibatches:
    return ft.Minibatches.shuffled(arrays, batch_size=size, steps=steps, key=jax.random.key(1))


def problem(loss, optimizer, error, init, steps, validation, **options) -> ft.Problem:
    return ft.Problem(
        ft.Training(loss, optimizer, **options),
        lambda state, h, batch: error(state.params, batch),
        init,
        steps,
        validation,
    )


def cleaning() -> Case:
    """A weight for each of 2000 examples of a softmax regression."""
    x, y = random_arrays(2000, 256)

    def loss(w, h, batch):
        each = optax.softmax_cross_entropy_with_integer_labels(batch[0] @ w.T, batch[1])
        return jnp.mean(h["weight"] * each)

    def error(w, batch):
        return cross_entropy(batch[0] @ w.T, batch[1])

    steps = ft.FullBatch((x, y), steps=100)
    start = jnp.zeros((10, 256))
    hparams = {"weight": jnp.full(2000, 0.5)}
    return problem(loss, optax.sgd(0.1), error, start, steps, (x[:500], y[:500])), hparams


def _network(hparams, optimizer, *, sizes=(784, 200, 200, 10), batch=100, steps=150) -> Case:
    x, y = random_arrays(1000, sizes[0], classes=sizes[-1])

    def error(params, batch):
        return cross_entropy(mlp(params, batch[0]), batch[1])

    def loss(params, h, batch):
        return error(params, batch)

    return problem(
        loss,
        optimizer,
        error,
        layers(jax.random.key(0), *sizes),
        batches((x, y), batch, steps),
        (x[:200], y[:200]),
    ), hparams


def rates() -> Case:
    """Learning rate and momentum of a network."""
    hparams = {"lr": jnp.array(0.05), "momentum": jnp.array(0.9)}
    return _network(hparams, lambda h: optax.sgd(h["lr"], h["momentum"]))


def schedule() -> Case:
    """A learning rate for each of 12 parts of the training."""
    return _network(
        {"lr": jnp.full(12, 0.05)},
        lambda h: optax.sgd(lambda t: h["lr"][jnp.asarray(t) * 12 // 150]),
    )


def adam() -> Case:
    """Learning rate and both decays of Adam."""
    hparams = {"lr": jnp.array(1e-3), "b1": jnp.array(0.9), "b2": jnp.array(0.99)}
    return _network(hparams, lambda h: optax.adam(h["lr"], h["b1"], h["b2"], eps_root=1e-8))


def large() -> Case:
    """The learning rate of a network of 1.3 million weights."""
    sizes = (512, 800, 800, 300, 10)
    return _network({"lr": jnp.array(0.05)}, lambda h: optax.sgd(h["lr"]), sizes=sizes, steps=30)


def convolution() -> Case:
    """A weight decay for each layer of a convolutional network."""
    x, y = random_arrays(400, 16, 16, 1)
    keys = jax.random.split(jax.random.key(0), 3)
    init = [
        jax.random.normal(keys[0], (3, 3, 1, 8)) / 3,
        jax.random.normal(keys[1], (3, 3, 8, 16)) / 8,
        jax.random.normal(keys[2], (256, 10)) / 16,
    ]

    def network(params, x):
        for w in params[:-1]:
            x = jax.lax.conv_general_dilated(
                x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x)
        return x.reshape(len(x), -1) @ params[-1]

    def error(params, batch):
        return cross_entropy(network(params, batch[0]), batch[1])

    def loss(params, h, batch):
        penalty = sum(d * jnp.sum(w**2) for d, w in zip(h["decay"], params, strict=True))
        return error(params, batch) + penalty

    hparams = {"decay": jnp.full(3, 1e-3)}
    steps = batches((x, y), 64, 40)
    return problem(loss, optax.sgd(0.05, 0.9), error, init, steps, (x[:100], y[:100])), hparams


def scalar() -> Case:
    """The step size of a gradient descent in one dimension, 5000 steps."""

    def loss(w, h, x):
        return (w - x) ** 2 + 0.1 * jnp.cos(w)

    return problem(
        loss,
        lambda h: optax.sgd(h["lr"]),
        lambda w, x: (w - x) ** 2,
        jnp.array(0.0),
        ft.FullBatch(jnp.array(1.0), steps=5000),
        jnp.array(1.5),
    ), {"lr": jnp.array(1e-3)}


def ridge() -> Case:
    """A penalty for each of 100 features of a linear regression."""
    x, _ = random_arrays(300, 100)
    y = x @ np.linspace(-1, 1, 100).astype(np.float32)

    def error(w, batch):
        return jnp.mean((batch[0] @ w - batch[1]) ** 2)

    def loss(w, h, batch):
        return error(w, batch) + jnp.sum(jnp.exp(h["penalty"]) * w**2)

    hparams = {"penalty": jnp.full(100, -3.0)}
    steps = ft.FullBatch((x[:200], y[:200]), steps=400)
    return problem(loss, optax.sgd(0.02), error, jnp.zeros(100), steps, (x[200:], y[200:])), hparams


def recurrent() -> Case:
    """Learning rate and weight decay of a recurrent network over sequences of 20."""
    x, y = random_arrays(400, 20, 16)
    keys = jax.random.split(jax.random.key(0), 3)
    init = {
        "in": jax.random.normal(keys[0], (16, 48)) / 4,
        "to": jax.random.normal(keys[1], (48, 48)) / 7,
        "out": jax.random.normal(keys[2], (48, 10)) / 7,
    }

    def error(params, batch):
        def cell(state, x):
            return jnp.tanh(x @ params["in"] + state @ params["to"]), None

        state, _ = jax.lax.scan(cell, jnp.zeros((len(batch[0]), 48)), jnp.swapaxes(batch[0], 0, 1))
        return cross_entropy(state @ params["out"], batch[1])

    def loss(params, h, batch):
        return error(params, batch) + h["decay"] * sum(jnp.sum(w**2) for w in params.values())

    hparams = {"lr": jnp.array(0.05), "decay": jnp.array(1e-3)}
    steps = batches((x, y), 32, 60)
    return problem(
        loss, lambda h: optax.sgd(h["lr"]), error, init, steps, (x[:50], y[:50])
    ), hparams


def start() -> Case:
    """The initial weights of a network, 7,300 of them."""
    x, y = random_arrays(500, 64)

    def error(params, batch):
        return cross_entropy(mlp(params, batch[0]), batch[1])

    made = problem(
        lambda params, h, batch: error(params, batch),
        optax.sgd(0.1),
        error,
        lambda h: h["layers"],
        batches((x, y), 50, 60),
        (x[:100], y[:100]),
    )
    return made, {"layers": layers(jax.random.key(0), 64, 64, 40, 10)}


CASES: dict[str, Callable[[], Case]] = {
    "cleaning": cleaning, "rates": rates, "schedule": schedule, "adam": adam, "large": large,
    "convolution": convolution, "scalar": scalar, "ridge": ridge, "recurrent": recurrent,
    "start": start,
}  # fmt: skip


def measure(case: Case, memory: int | None, rounds: int) -> dict[str, Any]:
    """Time the candidates that fit, and the choice."""
    problem, hparams = case
    began = time.perf_counter()
    choice = ft.Auto(memory).explain(problem, hparams)
    chosen = next(c.name for c in choice.candidates if c.engine == choice.engine)
    took = time.perf_counter() - began
    arrays, _ = validated(problem, hparams)
    programs, sizes, best = {}, {}, float("inf")
    for candidate in choice.candidates:
        name, program = candidate.name, candidate.engine.lower(problem, hparams).compile()
        sizes[name] = program_bytes(program)
        if sizes[name] > choice.limit:
            continue
        own, _ = flatten(candidate.engine)
        jax.block_until_ready(program(own, arrays))
        seconds = timed(functools.partial(program, own, arrays), budget=1e-9)[1]
        best = min(best, seconds)
        if name == chosen or seconds < 3 * best:
            programs[name] = functools.partial(program, arrays)
    seconds, ratio = time_in_turns(programs, rounds)
    fastest = min(seconds, key=lambda name: seconds[name])
    return {
        "chosen": chosen,
        "fastest": fastest,
        "chosen / fastest": ratio(chosen, fastest),
        "limit": None if memory is None else memory,
        "bytes": sizes[chosen],
        "within": sizes[chosen] <= choice.limit,
        "choosing_seconds": took,
        "seconds": dict(sorted(seconds.items(), key=lambda item: item[1])),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=list(CASES), help="these problems alone")
    arguments = parser.parse_args()

    results: dict[str, dict[str, Any]] = {}
    table = Table("problem", "chosen", "its time over that of", "the fastest", "memory", "limit")
    for name in arguments.only or CASES:
        case = CASES[name]()
        state = sum(a.nbytes for a in jax.tree.leaves(case[0].response(case[1])) if a.ndim)
        smallest = program_bytes(ft.Reverse(store=1).lower(*case).compile())
        for kind, memory in {"free": None, "tight": smallest + 12 * state}.items():
            row = results[f"{name}, {kind}"] = measure(case, memory, arguments.rounds)
            used = show_bytes(row["bytes"]) + ("" if row["within"] else " EXCEEDED")
            limit = "" if memory is None else show_bytes(memory)
            table.add(
                name, row["chosen"], row["chosen / fastest"], row["fastest"], used, limit
            )  # fmt: skip
            record(arguments.out, results)
    for kind in ("free", "tight"):
        rows = [row for name, row in results.items() if name.endswith(kind)]
        good = sum(row["chosen / fastest"] <= 1.1 for row in rows)
        kept = sum(row["within"] for row in rows)
        print(f"{kind}: within 10 % of the fastest on {good} of {len(rows)}, in budget on {kept}")


if __name__ == "__main__":
    main()

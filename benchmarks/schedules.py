"""What reverse mode stores, and what that costs: time and memory of `Reverse(store=...)`.

    python -m benchmarks.schedules [--steps 400] [--rounds 3] [--long 100000] [--out FILE.json]

A network 784-200-200-10 (199,210 weights), batches of 100, SGD with momentum; the hypergradient of
learning rate and momentum. Memory is the compiler's own figure for temporary arrays, in states (weights
and momentum); time is in plain training runs, measured in turns. `--long T` runs T steps once with
`store="segments"` and reads the peak of the whole process, or on a GPU that of its allocator.
"""

import functools
import resource
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft
from benchmarks.harness import Table, command_line, record, temporary_bytes, time_in_turns
from benchmarks.tasks import cross_entropy, layers, mlp, random_arrays

SIZES = (784, 200, 200, 10)


def make(steps: int) -> tuple[ft.Problem, dict[str, jax.Array]]:
    x, y = random_arrays(2000, SIZES[0])

    def loss(params, hparams, batch):
        return cross_entropy(mlp(params, batch[0]), batch[1])

    indices = np.random.default_rng(0).integers(0, 2000, (steps, 100))
    problem = ft.Problem(
        ft.Training(loss, lambda h: optax.sgd(h["lr"], h["momentum"])),
        lambda state, h, batch: loss(state.params, h, batch),
        layers(jax.random.key(0), *SIZES),
        ft.Minibatches((x, y), indices),
        (x[:500], y[:500]),
    )
    return problem, {"lr": jnp.array(0.05), "momentum": jnp.array(0.8)}


def peak_bytes() -> int:
    """The most memory that was in use: on the device where it tells, else of this process."""
    stats = jax.devices()[0].memory_stats() or {}
    process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return stats.get("peak_bytes_in_use", process)


def long_run(steps: int) -> dict[str, float]:
    problem, hparams = make(steps)
    engine = ft.Reverse(store="segments")
    temporary = temporary_bytes(engine.lower(problem, hparams))
    began = time.perf_counter()
    value, grad, _ = jax.block_until_ready(engine(problem, hparams))
    row = {
        "steps": steps,
        "seconds_with_compilation": time.perf_counter() - began,
        "temporary_bytes": temporary,
        "peak_bytes": peak_bytes(),
        "value": float(value),
        **{f"d_{name}": float(g) for name, g in grad.items()},
    }
    print(f"T = {steps:,}, store='segments': peak {row['peak_bytes'] / 2**30:.2f} GiB", row)
    return row


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", type=int, help="run this number of steps once, in little memory")
    arguments = parser.parse_args()
    far = long_run(arguments.long) if arguments.long else None  # first: peaks do not fall

    problem, hparams = make(arguments.steps)
    state = 2 * 4 * sum(leaf.size for leaf in jax.tree.leaves(problem.init))
    stores = ("everything", "states", "segments", 50, 20, 10, 5)
    engines: dict[str, Any] = {
        **{f"Reverse(store={store!r})": ft.Reverse(store=store) for store in stores},
        "Truncated(50)": ft.Truncated(50),
        "Forward()": ft.Forward(),
    }
    programs: dict[str, Callable[[], Any]] = {
        name: functools.partial(engine, problem, hparams) for name, engine in engines.items()
    }
    programs["plain"] = lambda: problem.response(hparams)
    seconds, ratio = time_in_turns(programs, arguments.rounds)
    exact = engines["Reverse(store='everything')"](problem, hparams).grad
    rows, table = {}, Table("engine", "states", "training runs", "relative difference")
    for name, engine in engines.items():
        grad = engine(problem, hparams).grad
        row = rows[name] = {
            "states": temporary_bytes(engine.lower(problem, hparams)) / state,
            "training_runs": ratio(name, "plain"),
            "seconds": seconds[name],
            "relative_difference": {n: float(grad[n] / exact[n] - 1) for n in grad},
        }
        difference = max(map(abs, row["relative_difference"].values()))
        table.add(name, row["states"], row["training_runs"], difference)
    record(arguments.out, {"steps": arguments.steps, "engines": rows, "long": far})


if __name__ == "__main__":
    main()

"""What reverse mode stores, and what that costs: time and memory of `Reverse(store=...)`.

    python -m benchmarks.schedules [--steps 400] [--rounds 3] [--long 100000] [--out FILE.json]

A network 784-200-200-10 (199,210 weights), batches of 100, SGD with momentum; the hypergradient of
learning rate and momentum. Memory is the compiler's own figure for temporary arrays, in states (weights
and momentum); time is in plain training runs, measured in turns. `--long T` runs T steps once with
`store="segments"` and reads the peak of the whole process, or on a GPU that of its allocator.
"""

import argparse
import functools
import itertools
import resource
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft
from benchmarks.harness import record, time_in_turns

SIZES = (784, 200, 200, 10)


def make(steps: int) -> tuple[ft.Problem, dict[str, jax.Array]]:
    keys = iter(jax.random.split(jax.random.key(0), 8))
    x = jax.random.normal(next(keys), (2000, SIZES[0]))
    y = jax.random.randint(next(keys), (2000,), 0, SIZES[-1])
    params = [
        {"w": jax.random.normal(next(keys), (a, b)) * (2 / a) ** 0.5, "b": jnp.zeros(b)}
        for a, b in itertools.pairwise(SIZES)
    ]

    def loss(params, hparams, batch):
        z, labels = batch
        for layer in params[:-1]:
            z = jax.nn.relu(z @ layer["w"] + layer["b"])
        logits = z @ params[-1]["w"] + params[-1]["b"]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    indices = np.random.default_rng(0).integers(0, 2000, (steps, 100))
    problem = ft.Problem(
        ft.Training(loss, lambda h: optax.sgd(h["lr"], h["momentum"])),
        lambda state, h, batch: loss(state.params, h, batch),
        params,
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
    memory: Any = engine.lower(problem, hparams).compile().memory_analysis()
    began = time.perf_counter()
    value, grad, _ = jax.block_until_ready(engine(problem, hparams))
    row = {
        "steps": steps,
        "seconds_with_compilation": time.perf_counter() - began,
        "temporary_bytes": memory.temp_size_in_bytes,
        "peak_bytes": peak_bytes(),
        "value": float(value),
        **{f"d_{name}": float(g) for name, g in grad.items()},
    }
    print(f"T = {steps:,}, store='segments': peak {row['peak_bytes'] / 2**30:.2f} GiB", row)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--long", type=int, help="run this number of steps once, within little memory"
    )
    parser.add_argument("--out", help="write the results to this JSON file")
    arguments = parser.parse_args()
    far = long_run(arguments.long) if arguments.long else None  # first: peaks do not fall

    problem, hparams = make(arguments.steps)
    state = 2 * 4 * sum(leaf.size for leaf in jax.tree.leaves(problem.init))
    engines = {
        **{
            f"Reverse(store={store!r})": ft.Reverse(store=store)
            for store in ("everything", "states", "segments", 50, 20, 10, 5)
        },
        **(
            {}
            if jax.default_backend() == "cpu"
            else {"Reverse(store='host')": ft.Reverse(store="host")}
        ),
        "Truncated(50)": ft.Truncated(50),
        "Forward()": ft.Forward(),
    }
    programs: dict[str, Callable[[], Any]] = {
        name: functools.partial(engine, problem, hparams) for name, engine in engines.items()
    }
    programs["plain"] = lambda: problem.response(hparams)
    seconds, ratio = time_in_turns(programs, arguments.rounds)
    exact = engines["Reverse(store='everything')"](problem, hparams).grad
    rows = {}
    for name, engine in engines.items():
        analysis = engine.lower(problem, hparams).compile().memory_analysis()
        grad = engine(problem, hparams).grad
        rows[name] = {
            "states": analysis.temp_size_in_bytes / state,
            "training_runs": ratio(name, "plain"),
            "seconds": seconds[name],
            "relative_difference": {n: float(grad[n] / exact[n] - 1) for n in grad},
        }
        print(
            f"{name:<30} {rows[name]['states']:8.1f} states {rows[name]['training_runs']:6.2f} runs"
            f"   {max(map(abs, rows[name]['relative_difference'].values())):.1e}"
        )
    if arguments.out:
        record(arguments.out, {"steps": arguments.steps, "engines": rows, "long": far})


if __name__ == "__main__":
    main()

"""The outer loop's own cost, as ratios within one run.

    python -m benchmarks.outer [--rounds 5] [--out benchmarks/results/outer-cpu.json]

(a) Projection of a million example weights onto `CappedSimplex`, in Adam steps on the same vector.
(b) `minimize` beside a bare loop of the same hypergradients, Adam steps and projections, on data
    hyper-cleaning of the digits (900 weights, T = 300, 10 outer steps), with and without a
    checkpoint at each step.
"""

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft
from benchmarks.harness import record, time_in_turns
from benchmarks.tasks import digits_cleaning


def projection() -> dict[str, Callable[[], Any]]:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.uniform(-0.2, 1.2, 10**6), jnp.float32)
    optimizer = optax.adam(1e-3)
    state = optimizer.init(x)
    step = jax.jit(lambda g, s, x: optax.apply_updates(x, optimizer.update(g, s, x)[0]))
    project = jax.jit(ft.CappedSimplex(2e5).project)
    return {"adam": lambda: step(x, state, x), "project": lambda: project(x)}


def outer_loop(steps: int = 10) -> dict[str, Callable[[], Any]]:
    problem, hparams, constraints, _ = digits_cleaning(T=300)
    engine, optimizer = ft.Reverse(), optax.adam(0.01)

    @jax.jit
    def update(hparams, opt_state, grad):
        updates, opt_state = optimizer.update(grad, opt_state, hparams)
        moved: Any = optax.apply_updates(hparams, updates)
        return {"weight": constraints["weight"].project(moved["weight"])}, opt_state

    def bare():
        h, opt_state = hparams, optimizer.init(hparams)
        for _ in range(steps):
            _, grad, _ = engine(problem, h)
            h, opt_state = update(h, opt_state, grad)
        return engine(problem, h)

    def minimize(**options):
        return ft.minimize(
            problem, hparams, steps=steps, optimizer=optimizer, constraints=constraints, **options
        ).hparams

    def saved():
        with tempfile.TemporaryDirectory() as folder:
            return minimize(callbacks=[ft.Checkpoint(folder)])

    return {"bare": bare, "minimize": minimize, "with checkpoints": saved}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each program")
    parser.add_argument("--out", help="write the results to this JSON file")
    arguments = parser.parse_args()
    seconds_a, ratio_a = time_in_turns(projection(), 10 * arguments.rounds)
    seconds_b, ratio_b = time_in_turns(outer_loop(), arguments.rounds)
    results = {
        "projection of 10^6 weights / Adam step (target: well under 20)": ratio_a(
            "project", "adam"
        ),
        "minimize / bare loop (target: 1.03)": ratio_b("minimize", "bare"),
        "minimize with a checkpoint each step / bare loop": ratio_b("with checkpoints", "bare"),
    }
    for name, number in results.items():
        print(f"{name}: {number:.3f}")
    if arguments.out:
        record(arguments.out, results | {"seconds": seconds_a | seconds_b})


if __name__ == "__main__":
    main()

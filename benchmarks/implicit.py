"""Gradients at a minimum: time, memory and error by the number of inner steps.

    python -m benchmarks.implicit [--steps 25 50 100 200] [--out FILE.json]

A penalty for each of 200 features of a logistic regression on 300 rows, as in
`examples/penalties_implicit.py`; penalties of 0.03, Nesterov's gradient descent. `Implicit` needs the
minimum alone, `Reverse` the whole way there. The error is the distance to the gradient through 5,000
steps, of its length. Memory is what the compiler plans beyond the data. Seconds are of the processor,
so that other programs on the machine do not count: the least of three.
"""

import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft
from benchmarks.harness import Table, command_line, record, temporary_bytes

FEATURES, USEFUL, EXACT = 200, 20, 5000


def rows(rng: np.random.Generator, truth: np.ndarray, count: int) -> tuple[jax.Array, jax.Array]:
    """Return features, and labels that are drawn by the true weights."""
    x = rng.normal(size=(count, FEATURES))
    y = rng.random(count) < 1 / (1 + np.exp(-x @ truth))
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


def likelihood(w: jax.Array, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return the mean negative log likelihood."""
    return jnp.mean(optax.sigmoid_binary_cross_entropy(batch[0] @ w, batch[1]))


def problem(steps: int) -> ft.Problem:
    """Return the training of some steps."""
    rng = np.random.default_rng(0)
    truth = np.zeros(FEATURES)
    truth[:USEFUL] = rng.normal(0, 0.7, USEFUL)
    train, validation = rows(rng, truth, 300), rows(rng, truth, 1000)
    return ft.Problem(
        ft.Training(
            lambda w, h, batch: likelihood(w, batch) + jnp.sum(h["penalty"] * w**2),
            optax.sgd(0.5, 0.9, nesterov=True),
        ),
        objective=lambda state, h, batch: likelihood(state.params, batch),
        init=jnp.zeros(FEATURES),
        batches=ft.FullBatch(train, steps),
        validation=validation,
    )


def main() -> None:
    """Run the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[25, 50, 100, 200])
    arguments = parser.parse_args()
    hparams = {"penalty": jnp.full(FEATURES, 0.03)}
    exact = ft.Reverse("segments")(problem(EXACT), hparams).grad["penalty"]
    engines: dict[str, Any] = {
        "Implicit()": ft.Implicit(),
        "Reverse()": ft.Reverse(),
    }
    table = Table("steps", "engine", "milliseconds", "KiB", "error")
    results = []
    warnings.simplefilter("ignore")  # of trainings that are too short
    for steps in arguments.steps:
        for name, engine in engines.items():
            at = problem(steps)
            gradient = jax.jit(lambda h, engine=engine, at=at: engine(at, h).grad["penalty"])
            found, seconds = gradient(hparams), []
            for _ in range(3):
                began = time.process_time()
                found = jax.block_until_ready(gradient(hparams))
                seconds.append(time.process_time() - began)
            error = float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))
            memory = temporary_bytes(gradient.lower(hparams))
            table.add(steps, name, 1000 * min(seconds), memory // 1024, error)
            results.append(
                {
                    "steps": steps,
                    "engine": name,
                    "seconds": min(seconds),
                    "bytes": memory,
                    "error": error,
                }
            )
    record(arguments.out, results)


if __name__ == "__main__":
    main()

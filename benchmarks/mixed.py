"""Is it worth it to differentiate a step's gradient forward, inside the adjoint (mixed mode)?

    python -m benchmarks.mixed [--steps 20] [--rounds 3] [--out FILE.json]

The adjoint of a step needs, for a row v, the derivative of <v, grad_w L(w, lambda)> in w and lambda.
Reverse over reverse is what an engine does: it transposes the gradient's own program. Forward over
reverse uses the symmetry of the Hessian: it is the derivative of grad_{w, lambda} L along v, which
keeps nothing of the inner backward pass (MixFlow-MG; Kemaev et al., ICML 2025). Here the second stands
in a dynamics of its own, so that both go through the same engines.

Seconds are medians of rounds in turns; memory is the compiler's figure for temporary arrays.
"""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft
from benchmarks.harness import record, time_in_turns

HPARAMS = {"lr": 0.02, "momentum": 0.8, "decay": 1e-4}
ENGINES = {"states": ft.Reverse(), "everything": ft.Reverse(store="everything")}


class Descent(eqx.Module):
    """Gradient descent with momentum."""

    loss: Callable[..., Any]
    gradient: Callable[..., Any]

    def init(self, params, hparams):
        """Return s_0."""
        return params, jax.tree.map(jnp.zeros_like, params)

    def step(self, state, hparams, batch):
        """Return s_t."""
        w, v = state
        g = self.gradient(self.loss, w, hparams, batch)
        v = jax.tree.map(lambda v, g: hparams["momentum"] * v + g, v, g)
        return jax.tree.map(lambda w, v: w - hparams["lr"] * v, w, v), v


def reverse(loss, w, hparams, batch):
    """grad_w L."""
    return jax.grad(loss)(w, hparams, batch)


def mixed(loss, w, hparams, batch):
    """grad_w L, with the row v pulled back as d/de grad_{w, lambda} L(w + e v) at e = 0."""

    @jax.custom_vjp
    def grad(w, hparams, batch):
        return jax.grad(loss)(w, hparams, batch)

    def pull(residuals, v):
        w, hparams, batch = residuals
        both = jax.grad(loss, argnums=(0, 1))
        _, rows = jax.jvp(lambda w: both(w, hparams, batch), (w,), (v,))
        return *rows, None

    grad.defvjp(lambda *given: (grad(*given), given), pull)
    return grad(w, hparams, batch)


def perceptron(sizes):
    """Return initial weights and the network."""
    params = [
        jax.random.normal(jax.random.key(i), (a, b)) * a**-0.5
        for i, (a, b) in enumerate(itertools.pairwise(sizes))
    ]

    def network(params, x):
        for w in params[:-1]:
            x = jnp.tanh(x @ w)
        return x @ params[-1]

    return params, network, (sizes[0],)


def transformer(layers, width, tokens):
    """Return initial weights and the network."""
    shapes = {"q": (1, 1), "k": (1, 1), "v": (1, 1), "o": (1, 1), "up": (1, 4), "down": (4, 1)}
    keys = iter(jax.random.split(jax.random.key(0), layers * len(shapes) + 1))
    blocks = [
        {
            name: 0.05 * jax.random.normal(next(keys), (a * width, b * width))
            for name, (a, b) in shapes.items()
        }
        for _ in range(layers)
    ]
    params = {"blocks": blocks, "head": 0.05 * jax.random.normal(next(keys), (width, 10))}

    def network(params, x):
        for block in params["blocks"]:
            y = jax.nn.standardize(x)
            scores = jnp.einsum("bnd,bmd->bnm", y @ block["q"], y @ block["k"]) * width**-0.5
            x = x + jax.nn.softmax(scores) @ (y @ block["v"]) @ block["o"]
            x = x + jax.nn.gelu(jax.nn.standardize(x) @ block["up"]) @ block["down"]
        return x.mean(1) @ params["head"]

    return params, network, (tokens, width)


PROBLEMS = {
    "12 layers of 128, batches of 500": (perceptron([64, *[128] * 12, 10]), 500),
    "3 layers of 200, batches of 100": (perceptron([784, 200, 200, 10]), 100),
    "transformer, 4 layers of 32, 32 tokens, batches of 32": (transformer(4, 32, 32), 32),
}


def make(gradient, problem, batch, steps):
    params, network, shape = problem
    x = jax.random.normal(jax.random.key(1), (2 * batch, *shape))
    y = jax.random.randint(jax.random.key(2), (2 * batch,), 0, 10)

    def loss(params, hparams, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            network(params, batch[0]), batch[1]
        )
        squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        return jnp.mean(losses) + hparams["decay"] * squares

    indices = np.random.default_rng(0).integers(0, 2 * batch, (steps, batch))
    return ft.Problem(
        Descent(loss, gradient),
        lambda state, h, batch: loss(state[0], {"decay": 0.0}, batch),
        params,
        ft.Minibatches((x, y), indices),
        (x, y),
    )


def measure(name, steps, rounds):
    """Return seconds and bytes of each way, and how far the hypergradients differ."""
    problem, batch = PROBLEMS[name]
    hparams = {key: jnp.array(value) for key, value in HPARAMS.items()}
    programs, memory, grads = {}, {}, {}
    for way, gradient in {"reverse": reverse, "mixed": mixed}.items():
        case = make(gradient, problem, batch, steps)
        for store, engine in ENGINES.items():
            analysis: Any = engine.lower(case, hparams).compile().memory_analysis()
            memory[f"{way}, {store}"] = analysis.temp_size_in_bytes
            programs[f"{way}, {store}"] = lambda engine=engine, case=case: engine(case, hparams)
            grads[f"{way}, {store}"] = np.array([*engine(case, hparams).grad.values()])
    seconds, ratio = time_in_turns(programs, rounds)
    exact = grads["reverse, states"]
    rows = {
        key: {
            "seconds": seconds[key],
            "of_reverse_states": ratio(key, "reverse, states"),
            "temporary_bytes": memory[key],
            "difference": float(np.linalg.norm(grads[key] - exact) / np.linalg.norm(exact)),
        }
        for key in programs
    }
    print(f"\n{name}, T = {steps}")
    for key, row in rows.items():
        size = f"{row['temporary_bytes'] / 2**20:8.0f} MiB"
        print(f"  {key:<22} {row['seconds']:7.3f} s {row['of_reverse_states']:6.2f} {size}")
    return rows


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="write the results to this JSON file")
    arguments = parser.parse_args()
    results = {"steps": arguments.steps}
    for name in PROBLEMS:
        results[name] = measure(name, arguments.steps, arguments.rounds)
        if arguments.out:
            record(arguments.out, results)


if __name__ == "__main__":
    main()

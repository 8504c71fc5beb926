"""A learning rate for each step of a small transformer, found by one gradient for all of them.

The transformer learns to add numbers of two digits, written as text. Its 100 learning rates are
hyperparameters: reverse mode gives the gradient of the validation error in all of them at the cost of
a few trainings. Beside it, the best constant rate of a grid.

    pip install .
    python examples/transformer_schedule.py [--steps 100] [--iterations 30]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft

# %% Options
parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--iterations", type=int, default=30)
arguments = parser.parse_args()

# %% The data
WIDTH, HEADS, LENGTH, SYMBOLS = 32, 2, 8, 13  # digits, +, =, and padding


def sums(count: int, seed: int) -> np.ndarray:
    """Rows such as 4 7 + 1 5 = 6 2, as numbers of symbols."""
    rng = np.random.default_rng(seed)
    a, b = rng.integers(10, 50, (2, count))
    texts = [f"{x}+{y}={x + y}" for x, y in zip(a, b, strict=True)]
    return np.array([["0123456789+=".index(c) for c in text] for text in texts], np.int32)


train, held_out, test = sums(2000, 0), sums(500, 1), sums(500, 2)


# %% The transformer
def make_params(key: jax.Array) -> dict[str, jax.Array]:
    keys = iter(jax.random.split(key, 8))

    def matrix(a, b):
        return jax.random.normal(next(keys), (a, b)) / a**0.5

    return {
        "symbols": matrix(SYMBOLS, WIDTH) * SYMBOLS**0.5 / 4,
        "places": matrix(LENGTH, WIDTH),
        "qkv": matrix(WIDTH, 3 * WIDTH),
        "mix": matrix(WIDTH, WIDTH),
        "up": matrix(WIDTH, 4 * WIDTH),
        "down": matrix(4 * WIDTH, WIDTH),
        "out": matrix(WIDTH, SYMBOLS),
    }


def normal(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def transformer(params, text):
    """Return the logits of the next symbol at each place."""
    n = text.shape[1]
    x = params["symbols"][text] + params["places"][:n]
    q, k, v = (
        part.reshape(*part.shape[:2], HEADS, -1)
        for part in jnp.split(normal(x) @ params["qkv"], 3, axis=-1)
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((n, n), bool)), scores, -1e9)
    seen = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    x = x + seen.reshape(x.shape) @ params["mix"]
    x = x + jax.nn.gelu(normal(x) @ params["up"]) @ params["down"]
    return normal(x) @ params["out"]


def cross_entropy(params, text):
    """The loss of the two digits of the sum."""
    logits = transformer(params, text[:, :-1])[:, 5:]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 6:]))


# %% The training
def loss(params, hparams, text):
    return cross_entropy(params, text)


def error(state, hparams, text):
    return cross_entropy(state.params, text)


problem = ft.Problem(
    dynamics=ft.Training(loss, lambda h: optax.adam(lambda t: h["lr"][t], eps_root=1e-8)),
    objective=error,
    init=make_params(jax.random.key(0)),
    batches=ft.Minibatches.shuffled(
        train, batch_size=64, steps=arguments.steps, key=jax.random.key(1)
    ),
    validation=held_out,
)


# %% Constant rates
def constant(rate):
    return {"lr": jnp.full(arguments.steps, rate)}


grid = {rate: float(problem.response(constant(rate))[0]) for rate in (0.001, 0.003, 0.01, 0.03)}
best = min(grid, key=lambda rate: grid[rate] if np.isfinite(grid[rate]) else np.inf)

# %% The schedule
result = ft.minimize(
    problem,
    constant(best),
    steps=arguments.iterations,
    engine=ft.Reverse(),
    optimizer=optax.adam(0.1),
    constraints=ft.Log(),
    callbacks=[ft.Progress()],
)

# %% The test
constant_state = problem.response(constant(best))[1]
print("constant rates:", {rate: round(value, 3) for rate, value in grid.items()})
learnt = np.asarray(result.best.hparams["lr"])
print("learnt schedule:", learnt[:: max(1, len(learnt) // 10)].round(3))
print(f"test loss, best constant rate: {cross_entropy(constant_state.params, test):.3f}")
tuned = problem.response(result.best.hparams)[1]
print(f"test loss, learnt schedule: {cross_entropy(tuned.params, test):.3f}")

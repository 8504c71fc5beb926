"""Problems whose responses go from smooth to jagged, each with a way to draw starts.

`starts` draws hyperparameters over two decades around a problem's own. Sizes are small: a hypergradient
takes some hundredths of a second on two CPU cores.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft
from benchmarks.tasks import digits_arrays


class Response(NamedTuple):
    """A problem, hyperparameters to start from, and their constraints."""

    problem: ft.Problem
    hparams: dict[str, Any]
    constraints: dict[str, Any]


def _cross_entropy(logits, labels):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def _network(key, sizes, scale=1.0):
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        scale * jax.random.normal(k, (a, b)) / a**0.5
        for k, a, b in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def _forward(params, x, activation):
    for w in params[:-1]:
        x = activation(x @ w)
    return x @ params[-1]


def _on_digits(
    optimizer, hparams, *, activation, sizes, T, batch, seed=0, scale=1.0, constraints=None
) -> Response:
    x, y = digits_arrays(seed)
    keys = jax.random.split(jax.random.key(seed), 2)

    def error(params, batch):
        return _cross_entropy(_forward(params, batch[0], activation), batch[1])

    def loss(params, hparams, batch):
        penalty = hparams.get("decay", 0.0) * sum(jnp.sum(w**2) for w in params)
        return error(params, batch) + penalty

    problem = ft.Problem(
        ft.Training(loss, optimizer),
        lambda state, hparams, batch: error(state.params, batch),
        _network(keys[0], sizes, scale),
        ft.Minibatches.shuffled((x[:900], y[:900]), batch_size=batch, steps=T, key=keys[1]),
        (x[900:1300], y[900:1300]),
    )
    return Response(problem, hparams, constraints or {})


def softmax() -> Response:
    """Rate, momentum and decay of softmax regression: smooth."""
    return _on_digits(
        lambda h: optax.sgd(h["lr"], h["momentum"]),
        {"lr": jnp.array(0.1), "momentum": jnp.array(0.5), "decay": jnp.array(1e-3)},
        activation=jnp.tanh, sizes=[64, 10], T=200, batch=50,
        constraints={"momentum": ft.Box(0.0, 0.99)},
    )  # fmt: skip


def tanh_network() -> Response:
    """Rate, momentum and decay of a tanh network: smooth while the rate is low."""
    return _on_digits(
        lambda h: optax.sgd(h["lr"], h["momentum"]),
        {"lr": jnp.array(0.1), "momentum": jnp.array(0.5), "decay": jnp.array(1e-3)},
        activation=jnp.tanh, sizes=[64, 64, 64, 10], T=200, batch=50,
        constraints={"momentum": ft.Box(0.0, 0.99)},
    )  # fmt: skip


def block_rates() -> Response:
    """Fifteen rates of AdamW, each for 20 steps, of a network with rectified units, unconstrained."""
    return _on_digits(
        lambda h: optax.adamw(lambda t: h["lr"][jnp.minimum(jnp.asarray(t) // 20, 14)], eps_root=1e-12),
        {"lr": jnp.full(15, 0.01)},
        activation=jax.nn.relu, sizes=[64, 64, 64, 10], T=300, batch=50,
    )  # fmt: skip


def edge_of_stability() -> Response:
    """Rate and momentum of full-batch gradient descent on a tanh network, near where it diverges."""
    return _on_digits(
        lambda h: optax.sgd(h["lr"], h["momentum"]),
        {"lr": jnp.array(1.0), "momentum": jnp.array(0.5)},
        activation=jnp.tanh, sizes=[64, 32, 10], T=200, batch=900, scale=1.5,
    )  # fmt: skip


def recurrent() -> Response:
    """Rate and decay of a recurrent network that remembers a sign over 30 steps: jagged."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 30)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int32)
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "in": jax.random.normal(keys[0], (1, 16)),
        "state": 1.2 * jax.random.normal(keys[1], (16, 16)) / 4,
        "out": jax.random.normal(keys[2], (16, 2)) / 4,
    }

    def error(params, batch):
        def step(s, x):
            return jnp.tanh(x[:, None] @ params["in"] + s @ params["state"]), None

        s, _ = jax.lax.scan(step, jnp.zeros((len(batch[0]), 16)), batch[0].T)
        return _cross_entropy(s @ params["out"], batch[1])

    def loss(params, hparams, batch):
        return error(params, batch) + hparams["decay"] * jnp.sum(params["state"] ** 2)

    problem = ft.Problem(
        ft.Training(loss, lambda h: optax.sgd(h["lr"], 0.9)),
        lambda state, hparams, batch: error(state.params, batch),
        params,
        ft.Minibatches.shuffled((x[:400], y[:400]), batch_size=50, steps=300, key=keys[3]),
        (x[400:], y[400:]),
    )
    return Response(problem, {"lr": jnp.array(0.1), "decay": jnp.array(1e-4)}, {})


RESPONSES: dict[str, Callable[[], Response]] = {
    "softmax": softmax,
    "tanh network": tanh_network,
    "AdamW, 15 block rates": block_rates,
    "edge of stability": edge_of_stability,
    "recurrent": recurrent,
}


def starts(hparams: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the hyperparameters times factors between a tenth and ten, momenta below 1."""
    rng = np.random.default_rng(0)

    def drawn(name, leaf):
        leaf = leaf * 10 ** rng.uniform(-1, 1)
        return jnp.minimum(leaf, 0.95) if name == "momentum" else leaf

    return [{name: drawn(name, leaf) for name, leaf in hparams.items()} for _ in range(count)]

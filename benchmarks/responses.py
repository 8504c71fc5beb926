"""Problems whose responses go from smooth to chaotic, each with a way to draw starts.

`starts` draws hyperparameters over two decades around a problem's own. Sizes are small: a hypergradient
takes some hundredths of a second on two CPU cores. `LARGE` has transformers for one large GPU.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft
from benchmarks import transformer
from benchmarks.tasks import digits_arrays


class Response(NamedTuple):
    """A problem, hyperparameters to start from, their constraints, and trainings to run at once."""

    problem: ft.Problem
    hparams: dict[str, Any]
    constraints: dict[str, Any]
    chunk: int | None = None  # all of them


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


def _classified(
    optimizer, hparams, model, params, *, T, batch, key, constraints=None, dropout=None
) -> Response:
    """Return a classifier of the digits; with a key of its own for `dropout`, the model gets one."""
    x, y = digits_arrays(0)

    def error(params, batch, **key):
        return _cross_entropy(model(params, batch[0], **key), batch[1])

    def loss(params, hparams, batch, **key):
        squares = sum(jnp.sum(w**2) for w in jax.tree.leaves(params))
        return error(params, batch, **key) + hparams.get("decay", 0.0) * squares

    problem = ft.Problem(
        ft.Training(loss, optimizer, key=dropout),
        lambda state, hparams, batch: error(state.params, batch),
        params,
        ft.Minibatches.shuffled((x[:900], y[:900]), batch_size=batch, steps=T, key=key),
        (x[900:1300], y[900:1300]),
    )
    return Response(problem, hparams, constraints or {})


def _on_digits(
    optimizer, hparams, *, activation, sizes, T, batch, scale=1.0, constraints=None
) -> Response:
    keys = jax.random.split(jax.random.key(0), 2)
    return _classified(
        optimizer, hparams, lambda params, x: _forward(params, x, activation),
        _network(keys[0], sizes, scale), T=T, batch=batch, key=keys[1], constraints=constraints,
    )  # fmt: skip


def _block(rates, steps, t):
    """Return the rate of the block of `steps` steps that t lies in."""
    return rates[jnp.minimum(jnp.asarray(t) // steps, len(rates) - 1)]


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
        lambda h: optax.adamw(lambda t: _block(h["lr"], 20, t), eps_root=1e-12),
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


def recurrent(steps: int = 300) -> Response:
    """Rate and decay of a recurrent network that remembers a sign over 30 steps: chaotic."""
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
        ft.Minibatches.shuffled((x[:400], y[:400]), batch_size=50, steps=steps, key=keys[3]),
        (x[400:], y[400:]),
    )
    return Response(problem, {"lr": jnp.array(0.1), "decay": jnp.array(1e-4)}, {})


def relu_network() -> Response:
    """Ten rates of SGD, momentum and decay of a network with rectified units."""
    return _on_digits(
        lambda h: optax.sgd(lambda t: _block(h["lr"], 20, t), h["momentum"]),
        {"lr": jnp.full(10, 0.1), "momentum": jnp.array(0.9), "decay": jnp.array(1e-3)},
        activation=jax.nn.relu, sizes=[64, 64, 64, 10], T=200, batch=50,
        constraints={"lr": ft.Log(), "momentum": ft.Box(0.0, 0.99), "decay": ft.Log()},
    )  # fmt: skip


def dropout_network() -> Response:
    """Ten rates of AdamW and a decay of a network with rectified units, a fifth of them dropped."""
    keys = jax.random.split(jax.random.key(0), 3)

    def model(params, x, key=None):
        for i, w in enumerate(params[:-1]):
            x = jax.nn.relu(x @ w)
            if key is not None:
                x *= jax.random.bernoulli(jax.random.fold_in(key, i), 0.8, x.shape) / 0.8
        return x @ params[-1]

    return _classified(
        lambda h: optax.adamw(lambda t: _block(h["lr"], 20, t), eps_root=1e-12),
        {"lr": jnp.full(10, 0.01), "decay": jnp.array(1e-4)}, model,
        _network(keys[0], [64, 64, 64, 10]), T=200, batch=50, key=keys[1], dropout=keys[2],
        constraints={"lr": ft.Log(), "decay": ft.Log()},
    )  # fmt: skip


def convolutions() -> Response:
    """Rate, momentum and decay of two convolutions with batch norm (of the batch's own statistics)."""
    keys = jax.random.split(jax.random.key(0), 2)

    def convolved(x, w):  # 3 x 3, as one product: quick under `vmap` over w, too
        n = x.shape[1]
        x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        shifts = [x[:, i : i + n, j : j + n] for i in range(3) for j in range(3)]
        return jnp.concatenate(shifts, -1) @ w

    def model(params, x):
        x = x.reshape(-1, 8, 8, 1)
        for w in params[:-1]:
            x = jax.nn.relu(jax.nn.standardize(convolved(x, w), (0, 1, 2)))
            x = x.reshape(-1, x.shape[1] // 2, 2, x.shape[2] // 2, 2, x.shape[3]).mean((2, 4))
        return x.reshape(len(x), -1) @ params[-1]

    shapes = zip(jax.random.split(keys[0], 3), ([9, 8], [72, 16], [64, 10]), strict=True)
    params = [_network(key, shape)[0] for key, shape in shapes]
    return _classified(
        lambda h: optax.sgd(h["lr"], h["momentum"]),
        {"lr": jnp.array(0.1), "momentum": jnp.array(0.9), "decay": jnp.array(1e-3)},
        model, params, T=100, batch=50, key=keys[1],
        constraints={"lr": ft.Log(), "momentum": ft.Box(0.0, 0.99), "decay": ft.Log()},
    )  # fmt: skip


RESPONSES: dict[str, Callable[[], Response]] = {
    "softmax": softmax,
    "tanh network": tanh_network,
    "AdamW, 15 block rates": block_rates,
    "edge of stability": edge_of_stability,
    "recurrent": recurrent,
}
MORE: dict[str, Callable[[], Response]] = {
    "ReLU, 10 block rates": relu_network,
    "convolutions": convolutions,
    "recurrent, 500 steps": partial(recurrent, 500),
    "dropout": dropout_network,
}


def _transformers(size: Any, roots: dict[bool, tuple[float, ...]]):
    """Return variants: with warm-up or without, each with values of `eps_root`, in two precisions."""

    def make(**options):
        return Response(*transformer.language_problem(**size, **options), chunk=1)

    return {
        f"transformer{', warm-up' * warmup}, {precision}, eps_root {eps_root:g}": partial(
            make, warmup=warmup, dtype=jnp.dtype(precision), eps_root=eps_root
        )
        for warmup, values in roots.items()
        for eps_root in values
        for precision in ("float32", "bfloat16")
    }


ALL = RESPONSES | MORE | _transformers(transformer.SMALL, {False: (1e-12,), True: (1e-8,)})
LARGE = _transformers(transformer.LARGE, {False: (1e-12, 1e-16), True: (1e-8, 1e-6)})


def starts(hparams: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the hyperparameters times factors between a tenth and ten, momenta below 1."""
    rng = np.random.default_rng(0)

    def drawn(name, leaf):
        leaf = leaf * 10 ** rng.uniform(-1, 1)
        return jnp.minimum(leaf, 0.95) if name == "momentum" else leaf

    return [{name: drawn(name, leaf) for name, leaf in hparams.items()} for _ in range(count)]

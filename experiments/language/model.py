"""A byte-level transformer whose training draws its text from a mixture of sources.

The mixture p is a hyperparameter that the training *samples* by: each window of text comes from source
k with probability p_k. A draw has no derivative, its probability has:

    loss = mean_i  p_{k_i} / stop(p_{k_i}) * loss_i,    k_i ~ p

Its value is the plain mean over windows that were drawn by p. Its derivative in p_k is that of
sum_k p_k E[loss of source k], the expected loss, estimated from the windows that were drawn.

As a function of p such a training jumps where one window takes the place of another, which no gradient
of one training tells. Windows that are drawn evenly, each with the weight p_k over the even one, do not
change with p; value and gradient at the even mixture are the same (`weighted`).
"""

import math
import operator
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft

from .attention import attention
from .text import Text

KNOTS = 6
"""Factors of the rate, evenly spread over the training, that the schedule is learnt by."""
WARM = 0.1
"""The share of the steps in which the rate rises."""
CONSTANTS = {"decay": 0.1, "b1": 0.9, "b2": 0.99}
"""Of AdamW, before they are learnt."""
CONSTRAINTS = {
    "sources": ft.Log(),
    "rate": ft.Log(),
    "decay": ft.Log(),
    "b1": ft.Logit(0.0, 1.0),
    "b2": ft.Logit(0.0, 1.0),
}
DRAWS = 2**30
"""Draws are whole numbers below this."""
BESIDE = 8
"""Trainings that run side by side: a small network alone leaves a GPU idle."""


class Size(NamedTuple):
    """The network and its training."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int

    def times(self, factor: int) -> "Size":
        """Return a training `factor` times as long of a network as many times as wide."""
        return self._replace(
            width=factor * self.width, heads=factor * self.heads, steps=factor * self.steps
        )


def initial(
    key: Any, layers: int, width: int, context: int, vocabulary: int = 256
) -> dict[str, Any]:
    """Return the weights: matrices with a leading axis of layers, and embeddings."""
    keys = jax.random.split(key, 6)

    def matrices(key, a, b, scale=1.0):
        return scale * jax.random.normal(key, (layers, a, b)) / a**0.5

    last = (2 * layers) ** -0.5  # of what is added to the stream
    return {
        "embed": 0.02 * jax.random.normal(keys[0], (vocabulary, width)),
        "position": 0.02 * jax.random.normal(keys[1], (context, width)),
        "layers": {
            "qkv": matrices(keys[2], width, 3 * width),
            "out": matrices(keys[3], width, width, last),
            "up": matrices(keys[4], width, 4 * width),
            "down": matrices(keys[5], 4 * width, width, last),
            "norms": jnp.ones((layers, 2, width)),
        },
        "norm": jnp.ones(width),
    }


def logits(params: dict[str, Any], tokens: Any, heads: int) -> Any:
    """Return the logits of the token after each, with the embeddings as the head."""
    return hidden(params, tokens, heads) @ params["embed"].T


def hidden(params: dict[str, Any], tokens: Any, heads: int, light: bool = False) -> Any:
    """Return what the head is given: layer norm first, learned positions.

    Where it is `light`, of each layer only matrix products are kept for derivatives.
    """
    embed = params["embed"]
    if len(embed) <= 256:
        # the transpose of a gather adds in an order, and so to a result, that varies on a GPU
        x = jax.nn.one_hot(tokens, len(embed), dtype=embed.dtype) @ embed
    else:
        x = embed[tokens]
    x = x + params["position"]

    def layer(x, w):
        qkv = _normed(x, w["norms"][0]) @ w["qkv"]
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], heads, -1), 3, -1)
        mixed = attention(q, k, v)
        x = x + mixed.reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(_normed(x, w["norms"][1]) @ w["up"]) @ w["down"], None

    if light:
        products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        layer = jax.checkpoint(layer, policy=products, prevent_cse=False)
    x, _ = jax.lax.scan(layer, x, params["layers"])
    return _normed(x, params["norm"])


def _normed(x, gain):
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * gain


def losses(params: dict[str, Any], windows: Any, heads: int) -> Any:
    """Return the cross entropy, in nats a byte, of each window."""
    tokens = windows.astype(jnp.int32)
    out = logits(params, tokens[:, :-1], heads)
    out = out.astype(np.promote_types(out.dtype, np.float32))
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(out, tokens[:, 1:]), 1)


def spread(text: np.ndarray, context: int, count: int) -> np.ndarray:
    """Return windows from all over a text."""
    count = min(count, (len(text) - 1) // context)
    starts = np.linspace(0, len(text) - context - 1, count).astype(int)
    return text[starts[:, None] + np.arange(context + 1)]


class Sources(NamedTuple):
    """The sources on the device."""

    bytes: Any
    first: Any
    length: Any

    def windows(self, source: Any, draws: Any, context: int) -> Any:
        """Return a window of each of these sources, that begins where its draw says."""
        starts = self.first[source] + draws % (self.length[source] - context)
        return self.bytes[starts[:, None] + jnp.arange(context + 1)]


def drawn(share: Any, draws: Any) -> Any:
    """Return the sources of a batch: as often as their share, up to one more or less in a batch."""
    n = len(draws)
    at = (jnp.arange(n) + draws / DRAWS) / n
    return jnp.minimum(jnp.searchsorted(jnp.cumsum(share), at, side="right"), len(share) - 1)


def schedule(rate: Any, t: Any, steps: int) -> Any:
    """Return the rate at step t: a rise, then a cosine, times what goes through the knots."""
    t = jnp.asarray(t)
    plain = jnp.minimum(1.0, (t + 1) / (WARM * steps)) * (1 + jnp.cos(jnp.pi * t / steps)) / 2
    knots = jnp.linspace(0, steps, KNOTS)
    return plain * jnp.exp(jnp.interp(t, knots, jnp.log(jnp.broadcast_to(rate, (KNOTS,)))))


def adamw(rate: Any, h: Any) -> Any:
    """Return AdamW with a rate or a schedule, and the constants that are learnt."""
    return optax.adamw(rate, b1=h["b1"], b2=h["b2"], eps_root=1e-8, weight_decay=h["decay"])


class Language:
    """The training of one size on one text: the problem, and what its outcome is worth."""

    def __init__(self, text: Text, size: Size, validation: int, test: int, beside: int = BESIDE):
        self.text, self.size, self.beside = text, size, beside
        self.sources = Sources(*map(jnp.asarray, (text.bytes, text.first, text.length)))
        self.validation = jnp.asarray(spread(text.validation, size.context, validation))
        self._test = {text.target: spread(text.test, size.context, test)} | {
            name: spread(text.bytes[i : i + n], size.context, test // 4)
            for name, i, n in zip(text.names, text.first, text.length, strict=True)
        }

    def loss(self, params: Any, hparams: Any, batch: Any, evenly: bool = False) -> Any:
        """Return the mean loss of windows drawn by the mixture, or evenly and weighted by it."""
        sources, draws = batch
        share = hparams["sources"] / jnp.sum(hparams["sources"])
        by = jnp.full_like(share, 1 / len(share)) if evenly else jax.lax.stop_gradient(share)
        k = drawn(by, draws[0])
        weight = share[k] / by[k]
        windows = sources.windows(k, draws[1], self.size.context)
        return jnp.mean(weight * losses(params, windows, self.size.heads))

    def optimizer(self, h: Any) -> Any:
        """Return AdamW with these rates and constants."""
        return adamw(partial(schedule, h["rate"], steps=self.size.steps), h)

    def error(self, state: Any, hparams: Any, windows: Any) -> Any:
        """Return the loss on validation windows of the target."""
        return jnp.mean(losses(state.params, windows, self.size.heads))

    @cached_property
    def dynamics(self) -> ft.Training:
        """The training."""
        return ft.Training(self.loss, self.optimizer)

    @cached_property
    def weighted(self) -> ft.Training:
        """The training on windows that are drawn evenly and weighted."""
        return ft.Training(partial(self.loss, evenly=True), self.optimizer)

    def batches(self, key: Any) -> ft.Minibatches:
        """Return the draws of a training."""
        shape = (self.size.steps, 2, self.size.batch)
        draws = jax.random.randint(key, shape, 0, DRAWS)
        return ft.Minibatches(self.sources, draws, gather=_with_sources)

    def params(self, key: Any) -> Any:
        """Return initial weights."""
        return initial(key, self.size.layers, self.size.width, self.size.context)

    def problem(self, seed: Any, trial: Any = 0) -> ft.Problem:
        """Return the problem, with a start and draws of its own for each seed and trial."""
        start, draws = jax.random.split(jax.random.fold_in(jax.random.key(seed), trial))
        return ft.Problem(
            self.dynamics, self.error, self.params(start), self.batches(draws), self.validation
        )

    def train(self, points: list[dict], seed: int, trials: Any) -> tuple[np.ndarray, Iterator[Any]]:
        """Train with each of these hyperparameters in its trial; return validation losses and weights.

        `beside` run at a time, the last ones filled up, so that there is one program for all.
        """
        values, weights = [], []
        for i in range(0, len(points), self.beside):
            rows = np.minimum(np.arange(i, i + self.beside), len(points) - 1)
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(points[k] for k in rows))
            value, params = self._trained(seed, np.asarray(trials)[rows], stacked)
            count = min(self.beside, len(points) - i)
            values.append(np.asarray(value, float)[:count])
            weights += [(params, k) for k in range(count)]
        found = np.concatenate(values)
        one = (jax.tree.map(operator.itemgetter(k), params) for params, k in weights)
        return np.where(np.isfinite(found), found, math.inf), one

    @cached_property
    def _trained(self):
        def one(seed, trial, hparams):
            value, state = self.problem(seed, trial).response(hparams)
            return value, state.params

        return jax.jit(jax.vmap(one, (None, 0, 0)))

    def start(self, rate: float, mixture: Any = None) -> dict[str, Any]:
        """Return hyperparameters: the mixture (or the even one), and a cosine from this peak rate."""
        count = len(self.text.names)
        shares = np.full(count, 1 / count) if mixture is None else np.asarray(mixture, float)
        found = {"sources": count * shares, "rate": np.full(KNOTS, rate), **CONSTANTS}
        return {name: jnp.asarray(value, jnp.float32) for name, value in found.items()}

    def measure(self, params: Any) -> dict[str, float]:
        """Return the loss on the target's test windows, and on each source's."""
        return {name: float(self._mean(params, rows)) for name, rows in self._test.items()}

    @cached_property
    def _mean(self):
        heads, chunk = self.size.heads, 128
        one = jax.jit(lambda params, rows: jnp.sum(losses(params, rows, heads)))

        def mean(params, rows):
            parts = np.array_split(rows, range(chunk, len(rows), chunk))
            return sum(one(params, part) for part in parts) / len(rows)

        return mean


def _with_sources(sources: Sources, draws: Any) -> tuple[Sources, Any]:
    return sources, draws

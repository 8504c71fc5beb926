"""The network of the speech experiment, its data on the device, and its training.

Eleven frames of 123 features go through four layers of 2000 rectified units to two heads: phone states
(E_P, cross-entropy) and phonetic embeddings (E_S, half the mean squared error). Training minimises
E_P + rho E_S by gradient descent with momentum, learning rate eta and momentum mu.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from foretune import Minibatches, Training

from .embeddings import context_embeddings
from .speech.corpus import Corpus

AROUND = 5  # frames on each side of the target
CHUNK = 10_000  # frames at a time, where accuracy is measured


class Speech(NamedTuple):
    """What training reads, on the device once."""

    frames: Float[Array, "n width"]
    bounds: Int[Array, "n 2"]
    states: Int[Array, " n"]
    kind: Int[Array, " n"]
    table: Float[Array, "kinds size"]
    rows: Int[Array, " train"]
    """The frames to train on."""

    def examples(self, i: Int[Array, " batch"]) -> tuple[Array, Array, Array]:
        """Return frames with their neighbours, side by side, their states and their embeddings."""
        around = i[:, None] + jnp.arange(-AROUND, AROUND + 1)
        low, high = self.bounds[i, 0], self.bounds[i, 1]
        x = self.frames[jnp.clip(around, low[:, None], high[:, None])]
        return x.reshape(len(i), -1), self.states[i], self.table[self.kind[i]]


def on_device(corpus: Corpus) -> Speech:
    """Return the corpus and its embeddings as arrays on the device."""
    table, kind = context_embeddings(corpus)
    arrays = (corpus.frames, corpus.bounds(), corpus.states, kind, table, corpus.rows("train"))
    return Speech(*map(jnp.asarray, arrays))


def make_params(
    key: Array, width: int, layers: int, classes: int, size: int, inputs: int
) -> PyTree:
    """Return Glorot's initial weights."""
    glorot = jax.nn.initializers.glorot_uniform()
    keys = iter(jax.random.split(key, layers + 2))

    def layer(a, b):
        return {"w": glorot(next(keys), (a, b)), "b": jnp.zeros(b)}

    return {
        "hidden": [layer(inputs if k == 0 else width, width) for k in range(layers)],
        "states": layer(width, classes),
        "embedding": layer(width, size),
    }


def hidden(params: PyTree, x: Array) -> Array:
    """Return the shared representation."""
    for layer in params["hidden"]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x


def scores(params: PyTree, x: Array) -> Array:
    """Return a score for each state."""
    return hidden(params, x) @ params["states"]["w"] + params["states"]["b"]


def primary(params: PyTree, x: Array, states: Array) -> Array:
    """E_P, the cross-entropy of the states."""
    losses = optax.softmax_cross_entropy_with_integer_labels(scores(params, x), states)
    return jnp.mean(losses)


def loss(params: PyTree, hparams: PyTree, batch: tuple[Array, Array, Array]) -> Array:
    """E_P + rho E_S."""
    x, states, targets = batch
    z = hidden(params, x)
    logits, embedding = (z @ params[h]["w"] + params[h]["b"] for h in ("states", "embedding"))
    first = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, states))
    return first + hparams["rho"] * 0.5 * jnp.mean((embedding - targets) ** 2)


def error(state: Any, hparams: PyTree, sample: tuple[Speech, Array]) -> Array:
    """E_val: the cross-entropy of a sample of validation frames."""
    speech, i = sample
    x, states, _ = speech.examples(i)
    return primary(state.params, x, states)


dynamics = Training(loss, lambda h: optax.sgd(h["eta"], h["mu"]))


def drawn(size: int, data: tuple[Speech, Array], step: Int[Array, ""]) -> tuple[Array, ...]:
    """Return the minibatch of a step: frames drawn with a key of their own."""
    speech, key = data
    at = jax.random.randint(jax.random.fold_in(key, step), (size,), 0, len(speech.rows))
    return speech.examples(speech.rows[at])


@functools.cache
def drawing(size: int) -> Any:
    """Return the function that draws minibatches of this size, always the same one."""
    return functools.partial(drawn, size)


def minibatches(speech: Speech, key: Array, size: int, steps: int) -> Minibatches:
    """Return the minibatches of n steps: their numbers, and how to draw each."""
    return Minibatches((speech, key), jnp.arange(steps, dtype=jnp.int32), gather=drawing(size))


@functools.partial(jax.jit, donate_argnums=0)
def train(state: Any, hparams: PyTree, window: Minibatches) -> tuple[Any, Array]:
    """Train over a window at constant hyperparameters; return the state and the mean loss."""

    def step(state, x):
        state = dynamics.step(state, hparams, window.batch(x))
        return state, state.loss

    state, losses = lax.scan(step, state, window.xs)
    return state, jnp.mean(losses)


def accuracy(params: PyTree, speech: Speech, rows: np.ndarray) -> float:
    """Return the share of these frames whose state has the highest score."""
    padded = np.full(-(-len(rows) // CHUNK) * CHUNK, -1, np.int32)
    padded[: len(rows)] = rows
    right = _right(params, speech, jnp.asarray(padded.reshape(-1, CHUNK)))
    return float(right) / len(rows)


@jax.jit
def _right(params: PyTree, speech: Speech, chunks: Int[Array, "k chunk"]) -> Array:
    def count(i):
        x, states, _ = speech.examples(jnp.maximum(i, 0))
        return jnp.sum((jnp.argmax(scores(params, x), axis=1) == states) & (i >= 0))

    return jnp.sum(lax.map(count, chunks))

"""Images, labels and step sizes, learnt so that a network trained on them alone does well.

    s_0 drawn anew,  s_t = s_{t-1} - r_t grad J(s_{t-1}; images, labels),  E = real images' loss at s_T

The hyperparameters are the images, the logits of their labels and the logarithms of r_1 .. r_T
(Wang et al., Dataset Distillation, 2018, with labels as in Bohdal et al., 2020). T grows in stages,
each from where the one before ended; the last rates are then repeated.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

import foretune as ft

from ..networks import convolutional, cross_entropy, dense, linear, pooled

CLASSES = 10
MOMENTUM = 0.9
Rows = tuple[Float[Array, "n 28 28 1"], Int[Array, " n"]]
Judge = Callable[[PyTree, Rows, Array], np.ndarray]  # hyperparameters, images, keys -> accuracies


class Architecture(NamedTuple):
    """A network: how its weights are drawn, and what it makes of images."""

    draw: Callable[[Array], PyTree]
    logits: Callable[[PyTree, Float[Array, "n 28 28 1"]], Float[Array, "n 10"]]


def convolutional_network(width: int, *, norm: bool = True, layers: int = 3) -> Architecture:
    """Return layers of convolution, instance norm (or none) and pooling, and a linear head."""
    identity = (lambda x: x) if not norm else None

    def draw(key):
        layers_key, head_key = jax.random.split(key)
        weights = convolutional(layers_key, [width] * layers)
        side = 28 // 2**layers
        return weights | {"head": dense(head_key, side * side * width, CLASSES)}

    def logits(weights, x):
        return linear(weights["head"], pooled(weights, x, identity))

    return Architecture(draw, logits)


def perceptron(width: int) -> Architecture:
    """Return two hidden layers."""

    def draw(key):
        sizes = [784, width, width, CLASSES]
        keys = jax.random.split(key, 3)
        return [dense(k, a, b) for k, a, b in zip(keys, sizes, sizes[1:], strict=False)]

    def logits(weights, x):
        x = x.reshape(len(x), -1)
        for layer in weights[:-1]:
            x = jax.nn.relu(jnp.sqrt(2) * linear(layer, x))
        return linear(weights[-1], x)

    return Architecture(draw, logits)


def start(images: np.ndarray, labels: np.ndarray, steps: int, rate: float) -> PyTree:
    """Return real images, logits of their labels and rates, to begin with."""
    return {
        "images": jnp.asarray(images),
        "labels": 4 * jax.nn.one_hot(labels, CLASSES),
        "log": jnp.full(steps, np.log(rate), float),
    }


def longer(hparams: PyTree, steps: int) -> PyTree:
    """Return hyperparameters of more steps: the mean of the last rates goes on."""
    more = steps - len(hparams["log"])
    last = jnp.mean(hparams["log"][-5:])
    return hparams | {"log": jnp.append(hparams["log"], jnp.full(more, last))}


def descent(hparams: PyTree) -> optax.GradientTransformation:
    """Return gradient descent with a rate for each step."""
    return optax.sgd(lambda t: jnp.exp(hparams["log"][t]), MOMENTUM)


def training_of(network: Architecture) -> ft.Training:
    """Return the training on the learnt images; it has no other data."""

    def loss(weights, hparams, _):
        return cross_entropy(
            network.logits(weights, hparams["images"]), jax.nn.softmax(hparams["labels"])
        )

    return ft.Training(loss, descent)


class Stage(NamedTuple):
    """Some outer steps through trainings of one length."""

    inner: int
    outer: int


def distilled(
    network: Architecture,
    real: Rows,
    hparams: PyTree,
    stage: Stage,
    key: Array,
    *,
    draws: int,
    batch: int,
    rate: float,
    folder: Path | None = None,
) -> tuple[PyTree, list[float]]:
    """Return what is learnt in a stage, and the errors on the way."""
    x, y = map(jnp.asarray, real)
    training = training_of(network)

    def error(state, hparams, rows):
        return cross_entropy(network.logits(state.params, x[rows] / jnp.float32(255)), y[rows])

    def draw(key):
        weights_key, rows_key = jax.random.split(key)
        rows = jax.random.randint(rows_key, (batch,), 0, len(x))
        batches = ft.FullBatch(None, stage.inner)
        return ft.Problem(training, error, network.draw(weights_key), batches, rows)

    schedule = optax.cosine_decay_schedule(rate, stage.outer)
    result = ft.minimize(
        ft.Mean.of_draws(draw, draws) if draws > 1 else draw,
        hparams,
        key=key,
        steps=stage.outer,
        engine=ft.Reverse("states" if stage.inner <= 50 else "segments"),
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule)),
        callbacks=[] if folder is None else [ft.Checkpoint(folder, every=max(1, stage.outer // 4))],
    )
    return result.hparams, [record["value"] for record in result.history]


def judge(network: Architecture, steps: int) -> Judge:
    """Return the accuracies on images of networks from fresh weights, one for each key, as a function.

    It is compiled once for all hyperparameters, and for all sets of as many images.
    """
    training = training_of(network)

    @jax.jit
    def accuracy(hparams, images, key):
        problem = ft.Problem(
            training, lambda s, h, _: s.loss + 0 * jnp.sum(h["images"]), network.draw(key),
            ft.FullBatch(None, steps),
        )  # fmt: skip
        weights = problem.response(hparams)[1].params
        x, y = images
        parts = x.reshape(10, -1, *x.shape[1:])
        guess = lax.map(
            lambda x: jnp.argmax(network.logits(weights, x / jnp.float32(255)), 1), parts
        )
        return jnp.mean(guess.reshape(-1) == y)

    return lambda hparams, images, keys: np.array([accuracy(hparams, images, k) for k in keys])


def best_rate(judged: Callable[[PyTree], np.ndarray], hparams: PyTree, steps: int) -> PyTree:
    """Return hyperparameters with the one rate, of nine, that does best."""
    rates = [10.0 ** (-k / 2) for k in range(1, 10)]
    tried = [hparams | {"log": jnp.full(steps, np.log(rate), float)} for rate in rates]
    return max(tried, key=lambda h: float(np.mean(judged(h))))


def chosen(
    data: tuple[np.ndarray, np.ndarray], each: int, kind: str, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return real images, `each` of a class: at random, or those nearest to the class's mean."""
    images, labels = data
    rng = np.random.default_rng(seed)
    rows = []
    for c in range(CLASSES):
        of_class = np.flatnonzero(labels == c)
        if kind == "random":
            rows += rng.choice(of_class, each, replace=False).tolist()
        else:
            x = images[of_class].reshape(len(of_class), -1).astype(np.float32)
            distance = np.sum((x - x.mean(0)) ** 2, 1)
            rows += of_class[np.argsort(distance, kind="stable")[:each]].tolist()
    return images[rows].astype(np.float32) / 255, labels[rows]

"""What few-shot methods are compared with: nothing in them is bilevel."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, PyTree

from ..networks import cross_entropy, linear, strided
from .methods import Accuracy, Budget, class_means, nearest_mean, network, outer, share_right
from .tasks import Images, Pair, Size, sampled

HEAD_STEPS = 100
HEADS = [(rate, decay) for rate in (0.01, 0.1) for decay in (0.0, 0.001, 0.01)]
COSINE = [0.0, 1.0]


def descended(
    loss: Callable[[PyTree, Array], Float[Array, ""]], start: PyTree, budget: Budget, key: Array
) -> PyTree:
    """Return the weights after as many steps as the other methods make, by the same optimizer."""
    optimizer = outer(budget)

    def step(carry, step_key):
        weights, state = carry
        gradient = jax.grad(loss)(weights, step_key)
        updates, state = optimizer.update(gradient, state, weights)
        return (optax.apply_updates(weights, updates), state), None

    @jax.jit
    def run(weights, key):
        keys = jax.random.split(key, budget.steps)
        return lax.scan(step, (weights, optimizer.init(weights)), keys)[0][0]

    return run(start, key)


class Prototypes:
    """Prototypical networks: the class whose mean of features is nearest."""

    def __init__(self, key: Array, size: Size, widths: tuple[int, ...]):
        layers = network(key, size, widths)
        del layers["head"]
        self.start = {"layers": layers, "log": {"scale": jnp.log(jnp.array(1 / 64))}}
        self.classes = jnp.arange(size.ways)

    def logits(self, learnt: PyTree, support: Pair, x: Array) -> Float[Array, "n k"]:
        """Return minus the squared distances to the class means, scaled."""
        means = class_means(strided(learnt["layers"], support[0]), support[1], self.classes)
        head = nearest_mean(means, jnp.exp(learnt["log"]["scale"]))
        return linear(head, strided(learnt["layers"], x))

    def accuracy(self, learnt: PyTree, support: Pair, query: Pair) -> Array:
        """Return the share of the query that is right."""
        return share_right(self.logits(learnt, support, query[0]), query[1])

    def learn(self, images: Images, size: Size, budget: Budget, key: Array, **_: Any) -> PyTree:
        """Return what is learnt from tasks that are drawn anew at each step."""
        images = jnp.asarray(images)

        def loss(learnt, key):
            def of_task(key):
                support, query = sampled(key, images, size)
                return cross_entropy(self.logits(learnt, support, query[0]), query[1])

            return jnp.mean(jax.vmap(of_task)(jax.random.split(key, budget.tasks)))

        return descended(loss, self.start, budget, key)


def pretrained(
    key: Array, images: Images, widths: tuple[int, ...], budget: Budget, count: int
) -> PyTree:
    """Return layers of a network that tells all the classes, learnt from minibatches of images."""
    images = jnp.asarray(images)
    start_key, run_key = jax.random.split(key)
    weights = network(start_key, Size(len(images), 1, 1), widths)

    def loss(weights, key):
        class_key, image_key = jax.random.split(key)
        y = jax.random.randint(class_key, (count,), 0, len(images))
        i = jax.random.randint(image_key, (count,), 0, images.shape[1])
        x = images[y, i, ..., None] / jnp.float32(255)
        return cross_entropy(linear(weights["head"], strided(weights, x)), y)

    learnt = descended(loss, weights, budget, run_key)
    return {name: part for name, part in learnt.items() if name != "head"}


def by_nearest_mean(size: Size) -> Accuracy:
    """Return the accuracy of the nearest class mean, by distance or by angle."""

    def accuracy(learnt, support, query):
        layers, cosine = learnt
        features = [strided(layers, x) for x in (support[0], query[0])]
        lengths = [jnp.linalg.norm(x, axis=1, keepdims=True) for x in features]
        features = [x / n**cosine for x, n in zip(features, lengths, strict=True)]
        means = class_means(features[0], support[1], jnp.arange(size.ways))
        return share_right(linear(nearest_mean(means, 1.0), features[1]), query[1])

    return accuracy


def by_own_head(size: Size) -> Accuracy:
    """Return the accuracy of softmax regression on the features."""

    def accuracy(learnt, support, query):
        layers, (rate, decay) = learnt
        x, y = strided(layers, support[0]), support[1]
        optimizer = optax.sgd(rate, 0.9)

        def loss(head):
            return cross_entropy(linear(head, x), y) + decay * jnp.sum(head["w"] ** 2)

        def step(carry, _):
            head, state = carry
            updates, state = optimizer.update(jax.grad(loss)(head), state)
            return (optax.apply_updates(head, updates), state), None

        head = {"w": jnp.zeros((x.shape[1], size.ways)), "b": jnp.zeros(size.ways)}
        (head, _), _ = lax.scan(step, (head, optimizer.init(head)), length=HEAD_STEPS)
        return share_right(linear(cast(Any, head), strided(layers, query[0])), query[1])

    return accuracy

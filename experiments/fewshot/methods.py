"""What few-shot methods learn, each from thousands of random tasks of the same size.

By hypergradients, the training on a task's support being the inner problem and the query its error:

- MAML: the initial weights of all layers, and a rate for each layer (Finn et al., ICML 2017; rates as
  in Li et al., Meta-SGD, 2017); with or without the second derivatives.
- MAML from class means: the same, but the head starts where class means would have it (Triantafillou
  et al., ICLR 2020), so that any number of classes will do and no class is the first.
- representation: the network is learnt, and a head of each task's own is trained to its end on features
  computed once (Franceschi et al., ICML 2018); also the head's rate and its penalty.

Beside them: prototypical networks (Snell et al., 2017), and a network trained to tell all the classes,
whose features get a head of their own, or the nearest class mean. All have the same layers and the same
outer optimizer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import Partial
from jaxtyping import Array, Float, PyTree

import foretune as ft

from ..networks import convolutional, cross_entropy, dense, linear, strided
from .tasks import Images, Pair, Size, sampled

Logits = Float[Array, "n k"]
Accuracy = Callable[[PyTree, Pair, Pair], Array]  # learnt, support, query -> share that is right


class Budget(NamedTuple):
    """How long each method learns."""

    steps: int
    tasks: int  # of a step
    rate: float
    widths: tuple[int, ...]


def outer(budget: Budget) -> optax.GradientTransformation:
    """Return the outer optimizer, the same for all; numbers that stand for logarithms move faster."""

    def adam(factor):
        return optax.adam(optax.cosine_decay_schedule(factor * budget.rate, budget.steps))

    def labels(tree):
        return {
            name: jax.tree.map(lambda _, n=name: "log" if n == "log" else "plain", part)
            for name, part in tree.items()
        }

    return optax.chain(
        optax.clip_by_global_norm(10.0),
        optax.partition({"plain": adam(1.0), "log": adam(10.0)}, labels),
    )


def network(key: Array, size: Size, widths: tuple[int, ...], side: int = 28) -> dict[str, Any]:
    """Return random weights of the layers and of a head."""
    layers_key, head_key = jax.random.split(key)
    for _ in widths:
        side = -(-side // 2)
    weights = convolutional(layers_key, widths)
    return weights | {"head": dense(head_key, side * side * widths[-1], size.ways)}


def class_means(x: Float[Array, "n d"], y: Array, classes: Array) -> Float[Array, "ways d"]:
    """Return the mean of the rows of each class."""
    of_class = (y == classes[:, None]).astype(x.dtype)
    return of_class @ x / jnp.sum(of_class, 1, keepdims=True)


def nearest_mean(means: Float[Array, "ways d"], scale: Array | float) -> dict[str, Array]:
    """Return the head whose logits are minus the squared distance to each mean, times a scale."""
    return {"w": 2 * scale * means.T, "b": -scale * jnp.sum(means**2, 1)}


class Bilevel(NamedTuple):
    """A method whose training on a task is an inner problem."""

    problem: Callable[[Pair, Pair], ft.Problem]  # support, query -> the problem
    start: PyTree
    logits: Callable[[ft.TrainState, PyTree, Array], Logits]
    engine: ft.Reverse

    def accuracy(self, hparams: PyTree, support: Pair, query: Pair) -> Array:
        """Return the share of the query that is right after the training on the support."""
        _, state = self.problem(support, query).response(hparams)
        return share_right(self.logits(state, hparams, query[0]), query[1])

    def learn(
        self, images: Images, size: Size, budget: Budget, key: Array, **options: Any
    ) -> PyTree:
        """Return what is learnt from tasks that are drawn anew at each step."""
        images = jnp.asarray(images)

        def draw(key):
            return self.problem(*sampled(key, images, size))

        result = ft.minimize(
            ft.Mean.of_draws(draw, budget.tasks),
            self.start,
            key=key,
            steps=budget.steps,
            engine=self.engine,
            optimizer=outer(budget),
            **options,
        )
        return result.hparams


def share_right(logits: Logits, y: Array) -> Array:
    """Return the accuracy."""
    return jnp.mean(jnp.argmax(logits, 1) == y)


def layer_rates(hparams: PyTree) -> optax.GradientTransformation:
    """Gradient descent with a rate for each layer."""

    def update(gradients, _):
        scaled = {}
        for name, part in gradients.items():
            rate = jnp.exp(hparams["log"][name])
            scaled[name] = jax.tree.map(lambda g, rate=rate: -rate * g, part)
        return scaled

    return optax.stateless(update)


def loss_on_support(weights: PyTree, hparams: PyTree, batch: Pair) -> Float[Array, ""]:
    """Return the inner loss of MAML."""
    x, y = batch
    return cross_entropy(linear(weights["head"], strided(weights, x)), y)


def loss_on_query(state: ft.TrainState, hparams: PyTree, batch: Pair) -> Float[Array, ""]:
    """Return the error of MAML."""
    return loss_on_support(state.params, hparams, batch)


def learnt_weights(hparams: PyTree) -> PyTree:
    """Return s_0 of MAML."""
    return hparams["start"]


def head_at_means(support: Pair, classes: Array, hparams: PyTree) -> PyTree:
    """Return the learnt layers, with the head at the means of the support's features."""
    layers = hparams["start"]
    means = class_means(strided(layers, support[0]), support[1], classes)
    return layers | {"head": nearest_mean(means, jnp.exp(hparams["log"]["scale"]))}


ADAPTING = ft.Training(loss_on_support, layer_rates)


def maml(
    key: Array, size: Size, widths: tuple[int, ...], steps: int, *, means: bool, exact: bool = True
) -> Bilevel:
    """Return MAML, with its head learnt, or at the class means."""
    weights = network(key, size, widths)
    rates = {name: jnp.log(jnp.array(0.1)) for name in weights}
    if means:
        del weights["head"]
        rates |= {"scale": jnp.log(jnp.array(1 / 64))}

    def problem(support, query):
        at_means = Partial(head_at_means, support, jnp.arange(size.ways))
        init = at_means if means else learnt_weights
        return ft.Problem(ADAPTING, loss_on_query, init, ft.FullBatch(support, steps), query)

    def logits(state, hparams, x):
        return linear(state.params["head"], strided(state.params, x))

    engine = ft.Reverse("states" if steps <= 50 else "segments", first_order=not exact)
    return Bilevel(problem, {"start": weights, "log": rates}, logits, engine)


def features_once(support: Pair, classes: Array, hparams: PyTree) -> tuple[PyTree, PyTree]:
    """Return a head of zeros, and the features of the support as the model's state."""
    x = strided(hparams["layers"], support[0])
    return {"w": jnp.zeros((x.shape[1], len(classes))), "b": jnp.zeros(len(classes))}, x


def loss_of_head(
    head: PyTree, hparams: PyTree, y: Array, features: Array
) -> tuple[Float[Array, ""], Array]:
    """Return the inner loss of a head, and the features as they were."""
    decay = jnp.exp(hparams["log"]["decay"])
    loss = cross_entropy(linear(head, features), y) + decay * jnp.sum(head["w"] ** 2)
    return loss, features


def loss_of_features(state: ft.TrainState, hparams: PyTree, batch: Pair) -> Float[Array, ""]:
    """Return the error of a head on learnt features."""
    x, y = batch
    return cross_entropy(linear(state.params, strided(hparams["layers"], x)), y)


TO_ITS_END = ft.Training(
    loss_of_head, lambda h: optax.sgd(jnp.exp(h["log"]["rate"]), 0.9), has_state=True
)


def representation(key: Array, size: Size, widths: tuple[int, ...], steps: int) -> Bilevel:
    """Return the learnt network with a head that is trained on each task."""
    layers = network(key, size, widths)
    del layers["head"]
    logs = {"rate": jnp.log(jnp.array(0.01)), "decay": jnp.log(jnp.array(0.001))}

    def problem(support, query):
        start = Partial(features_once, support, jnp.arange(size.ways))
        batches = ft.FullBatch(support[1], steps)
        return ft.Problem(TO_ITS_END, loss_of_features, start, batches, query)

    def logits(state, hparams, x):
        return linear(state.params, strided(hparams["layers"], x))

    return Bilevel(problem, {"layers": layers, "log": logs}, logits, ft.Reverse())

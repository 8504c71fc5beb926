"""The models of the applications: how they start, what they answer, and how they are trained.

A model is trained by full-batch steps on  loss(theta) + 1/2 sum_g l2_g ||theta_g||^2,  with one
regulariser for each group g of its parameters. Models are Equinox modules with their arrays as leaves,
so that fitting again on data of the same shape compiles nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

from ._features import Features, Plain, Rows

HIDDEN = 128


class Linear(eqx.Module):
    """Softmax regression on principal components, of the inputs or of a kernel as well.

    In principal components the Hessian is nearly diagonal and below 1/2 E[z_j^2] + l2, so steps
    divided by it converge in tens of iterations, whatever the scale of the columns.
    """

    moments: Float[Array, " width"]
    """E[z_j^2]"""
    blocks: Int[Array, " width"]
    """The regulariser of each component."""
    groups: int = eqx.field(static=True)

    def init(self, key: jax.Array, width: int, classes: int) -> PyTree:
        """Return zero weights."""
        return {"w": jnp.zeros((classes, width)), "b": jnp.zeros(classes)}

    def apply(self, params: PyTree, z: Float[Array, "n width"]) -> Float[Array, "n classes"]:
        """Return the class scores."""
        return z @ params["w"].T + params["b"]

    def penalty(self, params: PyTree, l2: Float[Array, " groups"]) -> Float[Array, ""]:
        """Return the regulariser."""
        return jnp.sum(0.5 * l2[self.blocks] * params["w"] ** 2)

    def optimizer(self, l2: Float[Array, " groups"]) -> optax.GradientTransformation:
        """Return preconditioned gradient descent with momentum."""
        curvature = 0.5 * self.moments + l2[self.blocks]

        def precondition(gradient, params=None):
            return {"w": gradient["w"] / curvature, "b": gradient["b"] / 0.5}

        return optax.chain(optax.stateless(precondition), optax.sgd(0.5, momentum=0.8))


class Network(eqx.Module):
    """Any model given by `init(key, width, classes) -> params` and `apply(params, x) -> scores`."""

    init: Callable[..., PyTree] = eqx.field(static=True)
    apply: Callable[..., Array] = eqx.field(static=True)
    groups: int = eqx.field(static=True, default=1)

    def penalty(self, params: PyTree, l2: Float[Array, " groups"]) -> Float[Array, ""]:
        """Return the regulariser on all parameters."""
        leaves = jax.tree.leaves(eqx.filter(params, eqx.is_inexact_array))
        return 0.5 * l2[0] * sum((jnp.sum(leaf**2) for leaf in leaves), jnp.zeros(()))

    def optimizer(self, l2: Float[Array, " groups"]) -> optax.GradientTransformation:
        """Return Adam, with a root that stays differentiable where a gradient is 0."""
        return optax.adam(0.01, eps_root=1e-8)


Model = Linear | Network
Own = tuple[Callable[..., PyTree], Callable[..., Array]]
"""A model of the user's: `init(key, width, classes) -> params` and `apply(params, x) -> scores`."""
NAMES = ("kernel", "softmax", "mlp")


def prepared(
    name: str | Own, rows: Rows, random_state: int
) -> tuple[Features | Plain, np.ndarray, Model]:
    """Return what prepares the inputs of a model, the inputs of these rows, and the model."""
    if not isinstance(name, str):
        plain = Plain()
        return plain, plain.transform(rows), Network(*name)
    features = Features(name == "kernel", random_state).fit(rows)
    z = features.transform(rows)
    if name == "mlp":
        return features, z, Network(_mlp_init, _mlp_apply)
    blocks = features.blocks
    squares = jnp.mean(jnp.asarray(z) ** 2, axis=0)
    return features, z, Linear(squares, jnp.asarray(blocks), int(blocks.max()) + 1)


class Trained(NamedTuple):
    """A model with its parameters, for rows as they are."""

    features: Features | Plain
    model: Model
    params: PyTree

    def predict_proba(self, rows: Rows) -> np.ndarray:
        """Return the probability of each class."""
        scores = self.model.apply(self.params, jnp.asarray(self.features.transform(rows)))
        p = np.asarray(jax.nn.softmax(scores), np.float64)
        return p / p.sum(axis=1, keepdims=True)


def _mlp_init(key: jax.Array, width: int, classes: int) -> PyTree:
    first, second = jax.random.split(key)
    scale = np.sqrt(2.0)  # inputs have mean squared length 1
    return {
        "w1": scale * jax.random.normal(first, (width, HIDDEN)),
        "b1": jnp.zeros(HIDDEN),
        "w2": jax.random.normal(second, (HIDDEN, classes)) * np.sqrt(1 / HIDDEN),
        "b2": jnp.zeros(classes),
    }


def _mlp_apply(params: PyTree, x: Array) -> Array:
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]

"""The outer step: from hyperparameters to the next ones, by way of their unconstrained variable.

    u_{k+1} = u_k + optimizer(grad f(lambda_k)),    lambda_{k+1} = P(u_{k+1})

with P the projection onto the constraints (or, for `Log` and `Logit`, with u the transformed variable).
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, PyTree

from .._constraints.base import from_unconstrained, project, scales, scales_with, to_unconstrained


def select(condition: Bool[Array, ""], yes: PyTree, no: PyTree) -> PyTree:
    """Return one of two trees, arrays by the condition; all else they have in common."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b) if eqx.is_array(b) else b, yes, no)


def times(share: Array, tree: PyTree) -> PyTree:
    """Return a tree times a number, in the types of its leaves."""
    return jax.tree.map(lambda leaf: leaf * share.astype(leaf.dtype), tree)


class Outer(eqx.Module):
    """The outer step: gradient in the unconstrained variable, Optax update, projection."""

    optimizer: optax.GradientTransformation
    constraints: PyTree
    in_units: bool = False  # whether the optimizer sees u / c, with c the scales at the start

    def init(self, hparams: PyTree) -> PyTree:
        """Return the optimizer's state, which holds for the unconstrained variable."""
        u = to_unconstrained(self.constraints, hparams)
        if not self.in_units:
            return self.optimizer.init(u)
        c = scales(self.constraints, u)
        return c, self.optimizer.init(jax.tree.map(jnp.divide, u, c))

    def update(
        self, hparams: PyTree, opt_state: PyTree, value: PyTree, grad: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Return the next hyperparameters and optimizer state."""
        updates, opt_state = self.direction(hparams, opt_state, value, grad)
        return self.moved(hparams, updates), opt_state

    def direction(
        self, hparams: PyTree, opt_state: PyTree, value: PyTree, grad: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Return the optimizer's update of the unconstrained variable, and its state."""
        u = to_unconstrained(self.constraints, hparams)
        _, pull = jax.vjp(functools.partial(from_unconstrained, self.constraints), u)
        (direction,) = pull(grad)  # grad f(lambda) dlambda/du
        optimizer = optax.with_extra_args_support(self.optimizer)
        c = None
        if self.in_units:
            c, opt_state = opt_state
            u = jax.tree.map(jnp.divide, u, c)
            direction = jax.tree.map(jnp.multiply, direction, c)
        scale = functools.partial(scales_with, self.constraints)
        extra = {"value": sum(jax.tree.leaves(value)), "grad": direction, "scale": scale}
        with jax.numpy_dtype_promotion("standard"):  # Adam multiplies floats by a count
            updates, opt_state = optimizer.update(direction, opt_state, u, **extra)
        if c is None:
            return updates, opt_state
        return jax.tree.map(jnp.multiply, updates, c), (c, opt_state)

    def moved(self, hparams: PyTree, updates: PyTree) -> PyTree:
        """Return the hyperparameters after an update of their unconstrained variable."""
        u = optax.apply_updates(to_unconstrained(self.constraints, hparams), updates)
        return project(self.constraints, from_unconstrained(self.constraints, u))

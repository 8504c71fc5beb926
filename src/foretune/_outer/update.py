"""The outer step: from hyperparameters to the next ones, by way of their unconstrained variable.

    u_{k+1} = u_k + optimizer(grad f(lambda_k)),    lambda_{k+1} = P(u_{k+1})

with P the projection onto the constraints (or, for `Log` and `Logit`, with u the transformed variable).
"""

import functools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from .._constraints.base import apply_constraints, check_starts, sizes
from .._problem.arguments import filtered
from .._problem.checks import named_leaves


class Outer(eqx.Module):
    """The outer step: gradient in the unconstrained variable, Optax update, projection."""

    optimizer: optax.GradientTransformation
    constraints: PyTree
    in_units: bool = False  # whether the optimizer sees u / c, with c the scales at the start

    def init(self, hparams: PyTree) -> PyTree:
        """Return the optimizer's state, which holds for the unconstrained variable."""
        u = self.unconstrained(hparams)
        if not self.in_units:
            return self.optimizer.init(u)
        c = sizes(self.constraints, u)
        return c, self.optimizer.init(jax.tree.map(jnp.divide, u, c))

    def unconstrained(self, hparams: PyTree) -> PyTree:
        """Return the unconstrained variable u."""
        return apply_constraints(self.constraints, "to_search", hparams)

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
        u = self.unconstrained(hparams)
        inverse = functools.partial(apply_constraints, self.constraints, "from_search")
        _, pull = jax.vjp(inverse, u)  # du = grad f(lambda) dlambda/du
        (direction,) = pull(grad)
        optimizer = optax.with_extra_args_support(self.optimizer)
        c = None
        if self.in_units:
            c, opt_state = opt_state
            u = jax.tree.map(jnp.divide, u, c)
            direction = jax.tree.map(jnp.multiply, direction, c)
        with jax.numpy_dtype_promotion("standard"):  # Adam multiplies floats by a count
            updates, opt_state = optimizer.update(
                direction,
                opt_state,
                u,
                value=sum(jax.tree.leaves(value)),
                grad=direction,
                reach=functools.partial(apply_constraints, self.constraints, "reach"),
            )
        if c is None:
            return updates, opt_state
        return jax.tree.map(jnp.multiply, updates, c), (c, opt_state)

    def moved(self, hparams: PyTree, updates: PyTree) -> PyTree:
        """Return the hyperparameters after an update of their unconstrained variable."""
        u = optax.apply_updates(self.unconstrained(hparams), updates)
        there = apply_constraints(self.constraints, "from_search", u)
        return apply_constraints(self.constraints, "project", there)


@filtered
def _project(constraints: PyTree, hparams: PyTree) -> PyTree:
    return apply_constraints(constraints, "project", hparams)


def feasible(constraints: PyTree, hparams: PyTree) -> PyTree:
    """Return the projection of a start onto its constraints, with a warning where it moves."""
    check_starts(constraints, hparams)
    inside = _project(constraints, hparams)
    for (path, given), moved in zip(
        named_leaves(hparams, "hparams").items(), jax.tree.leaves(inside), strict=True
    ):
        distance = float(jnp.linalg.norm(jnp.ravel(given - moved)))
        if distance > 1e-5 * max(1.0, float(jnp.linalg.norm(jnp.ravel(given)))):
            warnings.warn(
                f"{path} starts outside its constraint, at a distance of {distance:.3g}; it is "
                "projected onto it.",
                stacklevel=4,
            )
    return inside

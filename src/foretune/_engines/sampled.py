"""Forward mode along random directions: an unbiased estimate for many hyperparameters.

For a random vector v with independent entries of mean 0 and variance 1,

    E[(grad f . v) v] = grad f,

and grad f . v costs one tangent, whatever the number m of hyperparameters. The mean over n directions
has, for entries of +1 and -1, the variance

    Var[g_i] = (|grad f|^2 - (grad f)_i^2) / n,

so that the error of the whole vector is about sqrt(m / n) of its length: n must grow with m for the
same precision. Its use is in descents, where the mean over many steps counts.

Time: about that of 1 + 2n training runs. Memory: n + 1 states, whatever T and m are.
Reference: Baydin et al., Gradients without Backpropagation, 2022.
"""

import functools
import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from .._problem.arguments import Output, Structure, unflatten
from .._problem.checks import check_count
from .._problem.problem import Problem, validated
from .._problem.system import System, make_system
from .base import AbstractEngine, Solution, check_options
from .nonfinite import REVERSE, guard_finite, is_finite
from .products import directional, unstack


class Estimate(NamedTuple):
    """An estimated hypergradient, with the standard error of each entry."""

    value: PyTree[Float[Array, ""]]
    grad: PyTree[Float[Array, "..."]]
    state: PyTree
    standard_error: PyTree[Float[Array, "..."]]


class Sampled(AbstractEngine):
    """An unbiased estimate of the hypergradient from random directions, in forward mode.

    Use it for many hyperparameters of a training so long or so large that reverse mode does not fit
    even with `Reverse(store=...)`. Its standard error is about sqrt(m / directions) of the
    gradient's length: with as many directions as hyperparameters, `Forward` is exact at the same cost.

    Args:
        directions: how many, n.
        seed: of the directions. They also depend on the hyperparameters' values, so that each step of
            a descent draws others; the same call gives the same estimate.
        check_finite: what happens to a result that is not finite: see `foretune.AbstractEngine`.

    `estimate(problem, hparams)` also returns the standard error of each entry.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> problem = ft.Problem(
    ...     dynamics=ft.Training(lambda w, h, x: jnp.sum((w - h["target"]) ** 2), optax.sgd(0.25)),
    ...     objective=lambda state, h, x: jnp.sum(state.params ** 2), init=jnp.zeros(3),
    ...     batches=ft.FullBatch(jnp.array(0.0), steps=9), validation=jnp.array(0.0))
    >>> hparams = {"target": jnp.array([1.0, 2.0, 3.0])}
    >>> value, grad, state, error = ft.Sampled(64).estimate(problem, hparams)
    >>> exact = ft.Reverse()(problem, hparams).grad["target"]
    >>> bool(jnp.all(jnp.abs(grad["target"] - exact) < 4 * error["target"]))
    True
    """

    directions: int
    seed: int
    check_finite: bool | None

    def __init__(self, directions: int = 8, *, seed: int = 0, check_finite: bool | None = None):
        self.directions, self.seed, self.check_finite = directions, seed, check_finite
        check_options(self)
        check_count(self.directions, f"Sampled(directions={self.directions})")
        if not isinstance(seed, numbers.Integral):
            raise TypeError(f"Sampled(seed={seed!r:.60}): give a whole number.")

    @property
    def other_mode(self) -> str:
        """`Reverse`."""
        return REVERSE

    def solve(self, system: System, hparams: PyTree) -> Solution:
        """Return the errors, the mean over the directions, and s_T."""
        errors, samples, s_T = self.samples(system, hparams)
        _, unravel = ravel_pytree(hparams)
        return Solution(errors, jax.vmap(unravel)(samples.mean(axis=1)), s_T)

    def estimate(self, problem: Problem, hparams: PyTree) -> Estimate:
        """Return value, gradient and final state, and the gradient's standard error by entry.

        Needs two directions or more. Inside `jax.jit`, `check_finite` holds as for a call.
        """
        if self.directions < 2:
            raise ValueError(
                "Sampled(directions=1).estimate: a standard error needs two directions or more."
            )
        arrays, structure = validated(problem, hparams)
        value, grad, state, error = _estimate(self, structure, arrays)
        result = Estimate(value, grad, state.tree(), error)
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(grad)):
            return guard_finite(result) if self.check_finite else result
        if self.check_finite is not False and not is_finite((value, grad)):
            self(problem, hparams)  # raises, and says where it began
        return result

    def samples(self, system: System, hparams: PyTree) -> tuple:
        """Return the errors, (grad E . v) v for each error and direction, and s_T."""
        flat, unravel = ravel_pytree(hparams)
        n, m = self.directions, flat.size
        bits = lax.bitcast_convert_type(flat.astype(jnp.float32), jnp.uint32)
        mixed = jnp.sum(bits * (2 * jnp.arange(m, dtype=jnp.uint32) + 1))
        key = jax.random.fold_in(jax.random.key(self.seed), mixed)
        V = jax.random.rademacher(key, (n, m), flat.dtype)
        errors, slopes, s_T = directional(system, hparams, unstack(jax.vmap(unravel)(V)))
        return errors, slopes.astype(flat.dtype)[:, :, None] * V[None], s_T


@functools.partial(jax.jit, static_argnums=(0, 1))
def _estimate(
    engine: Sampled, structure: Structure, arrays: list[Array]
) -> tuple[PyTree, PyTree, Output, PyTree]:
    problem, hparams = unflatten(structure, arrays)
    system = make_system(problem, hparams)
    errors, samples, s_T = engine.samples(system, hparams)
    _, unravel = ravel_pytree(hparams)
    mean, spread = jnp.mean(samples, axis=1), jnp.std(samples, axis=1, ddof=1)
    rows = (mean, spread / jnp.sqrt(engine.directions))
    grad, error = (system.gradient(jax.vmap(unravel)(r)) for r in rows)
    return system.value(errors), grad, Output(system.restore(s_T)), error

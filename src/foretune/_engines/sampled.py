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

import abc
import functools
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Key, PyTree

from .._problem.arguments import Compiled, Output, Structure, unflatten
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


class Samples(NamedTuple):
    """What a random engine computes inside the trace: K errors, and their gradients as means."""

    errors: tuple[Float[Array, ""], ...]
    mean: Float[Array, "K m"]
    standard_error: Float[Array, "K m"]
    s_T: PyTree
    report: Any = None


class RandomEngine(AbstractEngine):
    """An engine whose gradient is a mean over random samples, and comes with its standard error."""

    @abc.abstractmethod
    def sample(self, problem: Problem, system: System, hparams: PyTree) -> Samples:
        """Return the errors and their estimated gradients: a pure function, to be traced."""

    def check_samples(self) -> None:
        """Raise where the samples are too few for a standard error."""

    def solve(self, system: System, hparams: PyTree) -> Solution:
        """Not used: `solve_problem` is."""
        raise NotImplementedError

    def solve_problem(self, problem: Problem, system: System, hparams: PyTree) -> Solution:
        """Return the errors, the means, and s_T."""
        samples = self.sample(problem, system, hparams)
        _, unravel = ravel_pytree(hparams)
        return Solution(
            samples.errors, jax.vmap(unravel)(samples.mean), samples.s_T, samples.report
        )

    def estimate(self, problem: Problem, hparams: PyTree) -> Estimate:
        """Return value, gradient and final state, and the gradient's standard error by entry.

        Needs two samples or more. Inside `jax.jit`, `check_finite` holds as for a call.
        """
        self.check_samples()
        arrays, structure = validated(problem, hparams, smooth=self.differentiates)
        value, grad, state, error, report = _estimate(self, structure, arrays)
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(grad)):
            result = Estimate(value, self.guard(grad, report), state.tree(), error)
            return guard_finite(result) if self.check_finite else result
        self.review(report)
        if self.check_finite is not False and not is_finite((value, grad)):
            self(problem, hparams)  # raises, and says where it began
        return Estimate(value, grad, state.tree(), error)


class Sampled(RandomEngine):
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

    def check_samples(self) -> None:
        """Raise for one direction."""
        if self.directions < 2:
            raise ValueError(
                "Sampled(directions=1).estimate: a standard error needs two directions or more."
            )

    def sample(self, problem: Problem, system: System, hparams: PyTree) -> Samples:
        """Return the errors and the means over the directions of (grad E . v) v."""
        flat, unravel = ravel_pytree(hparams)
        n, m = self.directions, flat.size
        V = jax.random.rademacher(mixed_key(jax.random.key(self.seed), flat), (n, m), flat.dtype)
        errors, slopes, s_T = directional(system, hparams, unstack(jax.vmap(unravel)(V)))
        samples = slopes.astype(flat.dtype)[:, :, None] * V[None]
        error = jnp.std(samples, axis=1, ddof=1) / jnp.sqrt(n) if n > 1 else samples[:, 0]
        return Samples(errors, jnp.mean(samples, axis=1), error, s_T)


def mixed_key(key: Key[Array, ""], flat: Float[Array, " m"]) -> Key[Array, ""]:
    """Return a key that depends on the numbers: each step of a descent draws others."""
    bits = lax.bitcast_convert_type(flat.astype(jnp.float32), jnp.uint32)
    odd = 2 * jnp.arange(flat.size, dtype=jnp.uint32) + 1
    return jax.random.fold_in(key, jnp.sum(bits * odd))


@functools.partial(Compiled, static=2)
def _estimate(
    engine: RandomEngine, structure: Structure, arrays: list[Array]
) -> tuple[PyTree, PyTree, Output, PyTree, Any]:
    problem, hparams = unflatten(structure, arrays)
    system = make_system(problem, hparams)
    errors, mean, error, s_T, report = engine.sample(problem, system, hparams)
    _, unravel = ravel_pytree(hparams)
    grad, error = (system.gradient(jax.vmap(unravel)(rows)) for rows in (mean, error))
    return system.value(errors), grad, Output(system.restore(s_T)), error, report

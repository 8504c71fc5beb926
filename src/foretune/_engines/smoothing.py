"""Engines for chaotic responses: the gradient of the response averaged over a neighbourhood.

What a descent needs there is the slope of the average over a neighbourhood of radius r, with c the
natural scale of each hyperparameter,

    f_r(lambda) = E_u f(lambda + r c u),

by the mean of exact gradients at random points, or by differences of values,

    g = mean_j grad f(lambda + r c u_j),    h_i = sum_j (f_j+ - f_j-) d_ji / sum_j d_ji^2

with f_j+ and f_j- the values at lambda +- r c u_j, and d_j the difference of the two points. Where f is
smooth, g has the smaller variance; where it is chaotic, h has. `Smoothed` uses both, each leaf weighted
by the inverse of the estimated variances; `Evolution` uses h alone and needs no derivative.

References: Metz et al., Understanding and Correcting Pathologies in the Training of Learned Optimizers,
ICML 2019; Salimans et al., Evolution Strategies, 2017.
"""

import math
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from .._constraints.base import check_constraints, moved
from .._problem.checks import as_arrays, check_count, check_key, describe
from .._problem.problem import Problem
from .._problem.system import System
from .._problem.warn import warn
from .base import Solution, TracedEngine
from .nonfinite import NonFiniteError, is_finite, when_checked
from .reverse import Reverse


def balanced_signs(key: Key[Array, ""], n: int, m: int) -> Int[Array, "n m"]:
    """Return n rows of m random signs, the columns as little alike as n allows.

    They are rows of a Hadamard matrix of order N >= m, H_ij = (-1)^(number of bits in i & j), with rows
    and columns in random order and random signs of the columns. Columns of N rows are orthogonal.
    """
    order = 1 << (m - 1).bit_length()
    rows = min(n, order)

    def block(key):
        keys = jax.random.split(key, 3)
        i = jax.random.permutation(keys[0], order)[:rows].astype(jnp.uint32)
        j = jax.random.permutation(keys[1], order)[:m].astype(jnp.uint32)
        odd = lax.population_count(i[:, None] & j[None, :]) & jnp.uint32(1)
        signs = jax.random.rademacher(keys[2], (m,), jnp.int32)
        return (1 - 2 * odd.astype(jnp.int32)) * signs[None]

    blocks = jax.vmap(block)(jax.random.split(key, -(-n // rows)))
    return blocks.reshape(-1, m)[:n]


def as_key(key: Any) -> Any:
    """Return a random key as it is, and that of a number."""
    number = isinstance(key, int | np.integer) and not isinstance(key, bool)
    return jax.random.key(int(key)) if number else key


class Sampling(NamedTuple):
    """What became of the points."""

    stuck: Bool[Array, " m"]  # hyperparameters that their constraints do not let move
    diverged: Int[Array, ""]  # pairs in which a training is not finite
    middle: Bool[Array, ""]  # whether the training between them is


class Neighbourhood(TracedEngine):
    """What `Smoothed` and `Evolution` share: points in pairs around the hyperparameters."""

    radius: eqx.AbstractVar[Any]
    samples: eqx.AbstractVar[Any]
    key: eqx.AbstractVar[Any]
    constraints: eqx.AbstractVar[PyTree]

    def __check_init__(self):
        name, radius, samples = type(self).__name__, self.radius, self.samples
        number = isinstance(radius, int | float | np.number) and not isinstance(radius, bool)
        if not number or not 0 < radius < math.inf:
            raise ValueError(f"{name}(radius={radius!r:.60}): give a positive number, say 0.1.")
        check_count(samples, f"{name}(samples={samples!r:.60})")
        check_key(self.key, f"the key of the points, {name}(key=...),")

    def within(self, constraints: PyTree) -> "Neighbourhood":
        """Return the engine with its points inside constraints, unless it has some already."""
        if self.constraints is not None:
            return self
        none = lambda node: node is None  # noqa: E731
        return eqx.tree_at(lambda engine: engine.constraints, self, constraints, is_leaf=none)

    def points(self, hparams: PyTree, uniform: bool) -> tuple[PyTree, Float[Array, "n m"]]:
        """Return n points, followed by the n opposite ones, and the differences between them."""
        flat, unravel = ravel_pytree(hparams)
        # The key depends on the numbers: each step of a descent draws other points.
        bits = lax.bitcast_convert_type(flat.astype(jnp.float32), jnp.uint32)
        odd = 2 * jnp.arange(flat.size, dtype=jnp.uint32) + 1
        key = jax.random.fold_in(self.key, jnp.sum(bits * odd))
        U = balanced_signs(key, self.samples, flat.size).astype(flat.dtype)
        if uniform:
            U = U * jax.random.uniform(jax.random.fold_in(key, 1), U.shape, flat.dtype)
        constraints = check_constraints(self.constraints, hparams)
        both = jnp.concatenate([U, -U])
        points = jax.vmap(lambda u: moved(constraints, hparams, unravel(self.radius * u)))(both)
        rows = jax.vmap(lambda h: ravel_pytree(h)[0])(points)
        return points, rows[: self.samples] - rows[self.samples :]

    def solution(
        self, system: System, hparams: PyTree, mean: Array, d: Array, used: Array
    ) -> Solution:
        """Return the errors in the middle, with the gradients of K rows."""
        s_T = system.run(hparams)
        rows, errors = jax.vmap(ravel_pytree(hparams)[1])(mean), system.errors(s_T, hparams)
        report = Sampling(jnp.all(d == 0, 0), jnp.sum(~used), is_finite(errors))
        return Solution(errors, rows, s_T, report)

    def review(self, report: Sampling) -> None:
        """Warn of trainings that diverged, raise where a constraint leaves no room."""
        name, stuck, diverged, middle = type(self).__name__, *jax.device_get(report)
        if stuck.any():
            raise ValueError(
                f"{name}(radius={self.radius:g}): {int(stuck.sum())} of {stuck.size} hyperparameters "
                "cannot be moved inside their constraints, or not by so little in their type. Give "
                "constraints that leave room, or a larger radius."
            )
        if not middle:  # the radius is not to blame
            return
        message = (
            f"{name}(radius={self.radius:g}): in {int(diverged)} of {self.samples} pairs of points "
            "a training is not finite. Take a smaller radius, or constraints."
        )
        if diverged == self.samples and when_checked() is not False:
            raise NonFiniteError(message)
        if 0 < diverged < self.samples:
            warn(f"{message} These pairs are left out.", RuntimeWarning)


class Evolution(Neighbourhood):
    """The slope of the response over a neighbourhood, from values alone: 2 `samples` + 1 trainings.

    Use it where exact gradients mislead, and for responses without a derivative, an accuracy say. With
    fewer samples than hyperparameters, m, its standard error is up to sqrt(m / samples) of the
    gradient's length. Powers of 2 above m are best: no two hyperparameters move alike then.

    Args:
        radius: of the neighbourhood, relative to each hyperparameter (in log(x) under `Log`).
        samples: pairs of trainings, at opposite points.
        key: a random key, or a number, of the points; each step of a descent draws others.
        constraints: where the points may be, as in `minimize`, which gives its own.
        chunk: how many trainings run side by side; all by default. Fewer take less memory.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> problem = ft.Problem(
    ...     ft.Training(lambda w, h, _: (w - 1) ** 2, lambda h: optax.sgd(h["lr"])),
    ...     lambda state, h, _: (state.params - 1) ** 2, jnp.array(0.0), ft.FullBatch(None, steps=1))
    >>> value, grad, state = ft.Evolution(0.1, samples=1)(problem, {"lr": jnp.array(0.25)})
    >>> print(f"{grad['lr']:.3f}")  # f = (1 - 2 lr)^2
    -2.000
    """

    radius: Any = 0.1
    samples: Any = 8
    key: Any = eqx.field(default=0, converter=as_key)
    constraints: PyTree = eqx.field(default=None, converter=as_arrays, kw_only=True)
    chunk: Any = eqx.field(default=None, kw_only=True)
    differentiates: ClassVar[bool] = False  # an accuracy will do

    def __check_init__(self):
        if self.chunk is not None:
            check_count(self.chunk, f"Evolution(chunk={self.chunk})")

    def solve(self, problem: Problem, system: System, hparams: PyTree) -> Solution:
        points, d = self.points(hparams, uniform=False)
        n = self.chunk or 2 * self.samples
        values = lax.map(lambda h: jnp.stack(system.errors(system.run(h), h)), points, batch_size=n)
        values = values.reshape(2, self.samples, -1)
        used = jnp.isfinite(values).all((0, 2))
        mean, _ = _averaged(_slopes(values, d, used), used)
        return self.solution(system, hparams, mean, d, used)


class Smoothed(Neighbourhood):
    """The gradient of the response averaged over a neighbourhood, from exact gradients and values.

    Use it where exact gradients mislead and the hyperparameters are too many for `Evolution`. Costs
    2 `samples` hypergradients and a training.

    Args:
        engine: what computes the gradients at the points.
        samples: pairs of opposite points, two or more.
        radius, key, constraints: as in `Evolution`.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> problem = ft.Problem(
    ...     ft.Training(lambda w, h, _: (w - 1) ** 2, lambda h: optax.sgd(h["lr"])),
    ...     lambda state, h, _: (state.params - 1) ** 2, jnp.array(0.0), ft.FullBatch(None, steps=1))
    >>> value, grad, state = ft.Smoothed(ft.Reverse(), 0.1, samples=4)(problem, {"lr": jnp.array(0.25)})
    >>> print(f"{grad['lr']:.3f}")  # f = (1 - 2 lr)^2
    -2.000
    """

    engine: Any = eqx.field(default=None, converter=lambda e: Reverse() if e is None else e)
    radius: Any = 0.1
    samples: Any = 4
    key: Any = eqx.field(default=0, converter=as_key)
    constraints: PyTree = eqx.field(default=None, converter=as_arrays, kw_only=True)

    def __check_init__(self):
        if not isinstance(self.engine, TracedEngine):
            needed = "one that is a single program, as in `Smoothed(Reverse(), radius=0.1)`"
            raise TypeError(f"Smoothed's engine is {describe(self.engine)}; give {needed}.")
        if self.samples == 1:
            raise ValueError("Smoothed(samples=1): variances need two samples or more.")

    def solve(self, problem: Problem, system: System, hparams: PyTree) -> Solution:
        points, d = self.points(hparams, uniform=True)

        def at(h):
            solution = self.engine.solve(problem, system, h)
            rows = jax.vmap(lambda row: ravel_pytree(row)[0])(solution.rows)
            return jnp.stack(solution.errors), rows.astype(d.dtype)

        values, rows = lax.map(at, points)  # one after another: each holds what its engine needs
        values = values.reshape(2, self.samples, -1)
        rows = rows.reshape(2, self.samples, *rows.shape[1:]).mean(0)
        finite = jnp.isfinite(values).all((0, 2))
        gradients = _averaged(rows, finite & jnp.isfinite(rows).all((1, 2)))
        slopes = _averaged(_slopes(values, d, finite), finite)
        sizes = [leaf.size for leaf in jax.tree.leaves(hparams)]
        leaf = np.repeat(np.arange(len(sizes)), sizes)
        return self.solution(system, hparams, _combined(gradients, slopes, leaf), d, finite)


def _slopes(
    values: Float[Array, "2 n K"], d: Float[Array, "n m"], used: Array
) -> Float[Array, "n K m"]:
    """Return samples whose mean over those used is h.

    With more pairs than hyperparameters h is the least-squares solution of d_j h = f_j+ - f_j-, and its
    samples are h plus what each residual would change of it.
    """
    n, m = d.shape
    d = jnp.where(used[:, None], d, 0)
    change = jnp.where(used[:, None], (values[0] - values[1]).astype(d.dtype), 0)
    count = jnp.maximum(jnp.sum(used), 1).astype(d.dtype)
    square = jnp.sum(d**2, 0, keepdims=True) / count
    if n <= m:
        return change[:, :, None] * (d / jnp.where(square == 0, 1, square))[:, None, :]
    size = jnp.where(square == 0, 1, jnp.sqrt(square))  # of each column: they differ by far
    inverse = jnp.linalg.pinv(d / size)
    h = inverse @ change
    residuals = (change - (d / size) @ h) * count * jnp.sqrt(count / jnp.maximum(count - m, 1))
    samples = h.T[None] + residuals[:, :, None] * inverse.T[:, None, :]
    return samples / size[None]


def _averaged(
    samples: Float[Array, "n K m"], used: Array
) -> tuple[Float[Array, "K m"], Float[Array, "K m"]]:
    """Return the mean of the samples that are used, and its standard error; NaN where none is."""
    n = jnp.sum(used).astype(samples.dtype)
    finite = jnp.where(used[:, None, None], samples, 0)
    mean = jnp.sum(finite, 0) / n
    squares = jnp.sum(jnp.where(used[:, None, None], (finite - mean[None]) ** 2, 0), 0)
    error = jnp.sqrt(squares / jnp.maximum(n - 1, 1) / n)
    return mean, jnp.where(n > 1, error, jnp.inf)


def _combined(
    first: tuple[Array, Array], second: tuple[Array, Array], leaf: np.ndarray
) -> Float[Array, "K m"]:
    """Return two estimates, with standard errors, as one; `leaf` is the leaf's number of each entry.

    Each leaf's weights are the inverse of its mean variances.
    """

    def variance(error):
        sums = jax.ops.segment_sum((error**2).T, leaf, leaf[-1] + 1)
        means = sums / jnp.asarray(np.bincount(leaf), error.dtype)[:, None]
        # The least that rounding leaves, so that two exact estimates have a mean.
        return jnp.where(jnp.isnan(means), jnp.inf, means)[leaf].T + 1e-30

    (a, error_a), (b, error_b) = first, second
    v, w = variance(error_a), variance(error_b)
    share = jnp.where(jnp.isinf(v), 0.0, jnp.where(jnp.isinf(w), 1.0, w / (v + w)))
    return jnp.where(share > 0, share * a, 0) + jnp.where(share < 1, (1 - share) * b, 0)

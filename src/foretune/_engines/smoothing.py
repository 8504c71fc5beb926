"""Engines for rough responses: the gradient of the response averaged over a neighbourhood.

Over many steps of training the response f(lambda) may be jagged: smooth at a scale at which nobody
moves, with slopes that have nothing to do with those over a step of tuning. What a descent needs is the
slope of the average over a neighbourhood of radius r,

    f_r(lambda) = E_u f(lambda + r c u),    c the natural size of each hyperparameter,

and there are two ways to it: the mean of exact gradients at random points, and differences of values,

    g = mean_j grad f(lambda + r c u_j),    h_i = sum_j (f_j+ - f_j-) d_ji / sum_j d_ji^2

with f_j+ and f_j- the values at lambda + r c u_j and lambda - r c u_j, and d_j the difference of the
two points. Where f is smooth, g has by far the smaller variance: one sample has all m entries. Where f
is jagged, single gradients are huge, and h, which sees values alone, is the better one. `Smoothed` uses
both at the same points, each leaf weighted by the inverse of the estimated variances; `Evolution` uses
h alone and needs no derivative.

References: Metz et al., Understanding and Correcting Pathologies in the Training of Learned Optimizers,
ICML 2019; Salimans et al., Evolution Strategies, 2017.
"""

import copy
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, PyTree

from .._constraints.base import check_constraints, moved
from .._problem.arguments import flatten, unflatten
from .._problem.checks import check_count, describe
from .._problem.problem import Problem
from .._problem.system import System
from .auto import Auto
from .base import AbstractEngine
from .nonfinite import NonFiniteError
from .reverse import Reverse
from .sampled import RandomEngine, Samples, mixed_key


class Space:
    """Where hyperparameters may be: constraints as a constant that can be hashed."""

    def __init__(self, constraints: Any = None):
        arrays, self.structure = flatten(constraints)
        self.arrays = [np.asarray(array) for array in arrays]

    @property
    def constraints(self) -> Any:
        """The constraints."""
        return unflatten(self.structure, self.arrays)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Space) or self.structure != other.structure:
            return False
        return all(map(np.array_equal, self.arrays, other.arrays))

    def __hash__(self) -> int:
        return hash(self.structure)

    def __repr__(self) -> str:
        return repr(self.constraints)


def balanced_signs(key: Any, n: int, m: int) -> Int[Array, "n m"]:
    """Return n rows of m random signs, the columns as little alike as n allows.

    They are rows of a Hadamard matrix of order N >= m, H_ij = (-1)^(number of bits in i & j), with rows
    and columns in random order and random signs of the columns. Columns of N rows are orthogonal.
    Independent signs are not: with a few rows two columns may agree in all, and a least-squares slope
    cannot tell their hyperparameters apart.
    """
    order = 1 << (m - 1).bit_length()
    rows = min(n, order)

    def block(key):
        keys = jax.random.split(key, 3)
        i = jax.random.permutation(keys[0], order)[:rows].astype(jnp.uint32)
        j = jax.random.permutation(keys[1], order)[:m].astype(jnp.uint32)
        odd = lax.population_count(i[:, None] & j[None, :]) & jnp.uint32(1)
        return (1 - 2 * odd.astype(jnp.int32)) * jax.random.rademacher(keys[2], (m,), jnp.int32)[
            None
        ]

    blocks = jax.vmap(block)(jax.random.split(key, -(-n // rows)))
    return blocks.reshape(-1, m)[:n]


class _Rough(RandomEngine):
    """What `Smoothed` and `Evolution` share: points in pairs around the hyperparameters."""

    radius: float
    samples: int
    seed: tuple[int, ...]
    space: Space

    def within(self, constraints: Any) -> "AbstractEngine":
        """Return the engine with its points inside constraints, unless it has some already."""
        if self.space != Space():
            return self
        inside = copy.copy(self)
        object.__setattr__(inside, "space", Space(constraints))  # a module is frozen
        return inside

    def check_samples(self) -> None:
        """Raise for one sample."""
        if self.samples < 2:
            name = type(self).__name__
            raise ValueError(
                f"{name}(samples=1).estimate: a standard error needs two samples or more."
            )

    def points(
        self, hparams: PyTree, uniform: bool
    ) -> tuple[PyTree, Float[Array, "n m"], Float[Array, " m"]]:
        """Return n pairs of points, with axes of 2 and n, and the differences between them."""
        flat, unravel = ravel_pytree(hparams)
        key = mixed_key(jax.random.wrap_key_data(jnp.array(self.seed, jnp.uint32)), flat)
        U = balanced_signs(key, self.samples, flat.size).astype(flat.dtype)
        if uniform:
            U = U * jax.random.uniform(jax.random.fold_in(key, 1), U.shape, flat.dtype)
        constraints = check_constraints(self.space.constraints, hparams)

        def at(u):
            return moved(constraints, hparams, unravel(self.radius * u))

        both = jax.vmap(jax.vmap(at))(jnp.stack([U, -U]))
        rows = jax.vmap(jax.vmap(lambda h: ravel_pytree(h)[0]))(both)
        return both, rows[0] - rows[1], flat

    def review(self, report: Any) -> None:
        """Warn of trainings that diverged, raise where a constraint leaves no room."""
        name, (stuck, diverged) = type(self).__name__, jax.device_get(report)
        if stuck.any():
            raise ValueError(
                f"{name}(radius={self.radius:g}): {int(stuck.sum())} of {stuck.size} hyperparameters "
                "cannot be moved inside their constraints, or not by so little in their type. Give "
                "constraints that leave room, or a larger radius."
            )
        if diverged == self.samples:
            raise NonFiniteError(
                f"{name}(radius={self.radius:g}): in each of {self.samples} pairs of points a training "
                "is not finite. Take a smaller radius, or constraints that keep the points inside."
            )
        if diverged:
            warnings.warn(
                f"{name}(radius={self.radius:g}): in {int(diverged)} of {self.samples} pairs of points "
                "a training is not finite. They are left out of the estimate; take a smaller radius.",
                RuntimeWarning,
                stacklevel=4,
            )


class Evolution(_Rough):
    """The slope of the response over a neighbourhood, from values alone: 2 `samples` + 1 trainings.

    Use it where exact gradients mislead, and for responses that have no derivative, an accuracy say.
    With fewer samples than hyperparameters, m, its standard error is up to sqrt(m / samples) of the
    gradient's length: it is for few of them. Powers of 2 above m are the best numbers of samples: then
    no two hyperparameters move alike.

    Args:
        radius: of the neighbourhood, relative to each hyperparameter (in log(x) under `Log`).
        samples: pairs of trainings, at opposite points.
        key: a random key, or a number, of the points. They also depend on the hyperparameters' values,
            so that each step of a descent draws others; the same call gives the same estimate.
        constraints: where the points may be, as in `minimize`, which gives its own.
        chunk: how many trainings run side by side; all by default. Fewer take less memory.
        check_finite: what happens to a result that is not finite: see `foretune.AbstractEngine`.

    `estimate(problem, hparams)` also returns the standard error of each entry.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> problem = ft.Problem(
    ...     dynamics=ft.Training(lambda w, h, x: (w - x) ** 2, lambda h: optax.sgd(h["lr"])),
    ...     objective=lambda state, h, x: (state.params - x) ** 2,
    ...     init=jnp.array(0.0), batches=ft.FullBatch(jnp.array(1.0), steps=1),
    ...     validation=jnp.array(1.0))
    >>> value, grad, state = ft.Evolution(0.1, samples=1)(problem, {"lr": jnp.array(0.25)})
    >>> print(f"{grad['lr']:.3f}")  # f = (1 - 2 lr)^2
    -2.000
    """

    radius: float
    samples: int
    seed: tuple[int, ...]
    space: Space
    chunk: int | None
    check_finite: bool | None

    def __init__(
        self,
        radius: Any = 0.1,
        samples: Any = 8,
        key: Any = 0,
        *,
        constraints: Any = None,
        chunk: Any = None,
        check_finite: bool | None = None,
    ):
        self.radius, self.samples, self.seed = _checked("Evolution", radius, samples, key)
        self.space, self.chunk, self.check_finite = Space(constraints), chunk, check_finite
        if chunk is not None:
            check_count(chunk, f"Evolution(chunk={chunk})")

    @property
    def differentiates(self) -> bool:
        """False: an accuracy will do."""
        return False

    def sample(self, problem: Problem, system: System, hparams: PyTree) -> Samples:
        """Return the errors, and the differences of values over those of points."""
        both, d, _ = self.points(hparams, uniform=False)

        def errors_at(h):
            return jnp.stack(system.errors(system.run(h), h))

        points = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), both)
        values = lax.map(errors_at, points, batch_size=self.chunk or 2 * self.samples)
        values = values.reshape(2, self.samples, -1)
        used = jnp.isfinite(values).all((0, 2))
        mean, error = _averaged(_slopes(values, d, used), used)
        s_T = system.run(hparams)
        report = jnp.all(d == 0, 0), jnp.sum(~used)
        return Samples(system.errors(s_T, hparams), mean, error, s_T, report)


class Smoothed(_Rough):
    """The gradient of the response averaged over a neighbourhood, from exact gradients and values.

    Use it where exact gradients mislead and the hyperparameters are too many for `Evolution`. Costs
    2 `samples` hypergradients and a training.

    Args:
        engine: what computes the gradients at the points.
        radius: of the neighbourhood, relative to each hyperparameter (in log(x) under `Log`).
        samples: pairs of opposite points.
        key: a random key, or a number, of the points. They also depend on the hyperparameters' values,
            so that each step of a descent draws others; the same call gives the same estimate.
        values: whether the differences of the values at the points count, too, each leaf's weight the
            inverse of its variance (default). Needs two samples; without, the mean of the gradients.
        constraints: where the points may be, as in `minimize`, which gives its own.
        check_finite: what happens to a result that is not finite: see `foretune.AbstractEngine`.

    `estimate(problem, hparams)` also returns the standard error of each entry.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> problem = ft.Problem(
    ...     dynamics=ft.Training(lambda w, h, x: (w - x) ** 2, lambda h: optax.sgd(h["lr"])),
    ...     objective=lambda state, h, x: (state.params - x) ** 2,
    ...     init=jnp.array(0.0), batches=ft.FullBatch(jnp.array(1.0), steps=1),
    ...     validation=jnp.array(1.0))
    >>> value, grad, state = ft.Smoothed(ft.Reverse(), 0.1, samples=4)(problem, {"lr": jnp.array(0.25)})
    >>> print(f"{grad['lr']:.3f}")  # f = (1 - 2 lr)^2
    -2.000
    """

    engine: AbstractEngine
    radius: float
    samples: int
    seed: tuple[int, ...]
    values: bool
    space: Space
    check_finite: bool | None

    def __init__(
        self,
        engine: Any = None,
        radius: Any = 0.1,
        samples: Any = 4,
        key: Any = 0,
        *,
        values: bool = True,
        constraints: Any = None,
        check_finite: bool | None = None,
    ):
        engine = Reverse() if engine is None else engine
        if not isinstance(engine, AbstractEngine) or isinstance(engine, Auto):
            raise TypeError(
                f"Smoothed's engine is {describe(engine)}; give one that computes gradients itself, "
                "`foretune.Smoothed(foretune.Reverse(), radius=0.1)`."
            )
        self.engine = engine
        self.radius, self.samples, self.seed = _checked("Smoothed", radius, samples, key)
        self.values, self.space = values, Space(constraints)
        self.check_finite = check_finite
        if values and samples < 2:
            raise ValueError(
                "Smoothed(samples=1): variances need two samples or more; `values=False` takes the "
                "mean of the gradients."
            )

    def sample(self, problem: Problem, system: System, hparams: PyTree) -> Samples:
        """Return the errors, and the weighted mean of gradients and of differences of values."""
        both, d, flat = self.points(hparams, uniform=True)
        points = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), both)

        def at(h):
            solution = self.engine.solve_problem(problem, system, h)
            rows = jax.vmap(lambda row: ravel_pytree(row)[0])(solution.rows)
            return jnp.stack(solution.errors), rows.astype(flat.dtype)

        values, rows = lax.map(at, points)  # one after another: each holds what its engine needs
        values = values.reshape(2, self.samples, -1)
        rows = rows.reshape(2, self.samples, *rows.shape[1:]).mean(0)
        finite = jnp.isfinite(values).all((0, 2))
        smooth = finite & jnp.isfinite(rows).all((1, 2))
        mean, error = _averaged(rows, smooth)
        used = smooth
        if self.values:
            used = finite
            slopes = _averaged(_slopes(values, d, finite), finite)
            mean, error = _combined((mean, error), slopes, _leaves_of(hparams))
        s_T = system.run(hparams)
        report = jnp.all(d == 0, 0), jnp.sum(~used)
        return Samples(system.errors(s_T, hparams), mean, error, s_T, report)


def _slopes(
    values: Float[Array, "2 n K"], d: Float[Array, "n m"], used: Array
) -> Float[Array, "n K m"]:
    """Return samples whose mean over those used is h.

    With more pairs than hyperparameters it is the least-squares solution of d_j h = f_j+ - f_j-, which
    is exact where f is linear; its samples are h plus what each residual would change of it.
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
    kept = jnp.where(used[:, None, None], samples, 0)
    mean = jnp.sum(kept, 0) / n
    squares = jnp.sum(jnp.where(used[:, None, None], (kept - mean[None]) ** 2, 0), 0)
    error = jnp.sqrt(squares / jnp.maximum(n - 1, 1) / n)
    return mean, jnp.where(n > 1, error, jnp.inf)


def _combined(
    first: tuple[Array, Array], second: tuple[Array, Array], leaf: np.ndarray
) -> tuple[Float[Array, "K m"], Float[Array, "K m"]]:
    """Return two estimates as one, each leaf's weights the inverse of its mean variances.

    Args:
        first: an estimate, and its standard error.
        second: another one.
        leaf: for each entry, the number of the leaf that it belongs to.
    """

    def variance(error):
        sums = jax.ops.segment_sum((error**2).T, leaf, leaf[-1] + 1)
        means = sums / jnp.asarray(np.bincount(leaf), error.dtype)[:, None]
        # The least that rounding leaves, so that two exact estimates have a mean.
        return jnp.where(jnp.isnan(means), jnp.inf, means)[leaf].T + 1e-30

    (a, error_a), (b, error_b) = first, second
    v, w = variance(error_a), variance(error_b)
    share = jnp.where(jnp.isinf(v), 0.0, jnp.where(jnp.isinf(w), 1.0, w / (v + w)))
    mean = jnp.where(share > 0, share * a, 0) + jnp.where(share < 1, (1 - share) * b, 0)
    square = jnp.where(share > 0, share * error_a, 0) ** 2
    square += jnp.where(share < 1, (1 - share) * error_b, 0) ** 2
    return mean, jnp.sqrt(square)


def _leaves_of(hparams: PyTree) -> np.ndarray:
    """Return, for each entry, the number of the leaf that it belongs to."""
    sizes = [leaf.size for leaf in jax.tree.leaves(hparams)]
    return np.repeat(np.arange(len(sizes)), sizes)


def _checked(name: str, radius: Any, samples: Any, key: Any) -> tuple[float, int, tuple[int, ...]]:
    """Return radius, samples and the key's numbers, or raise."""
    number = isinstance(radius, int | float | np.floating | np.integer)
    if not number or isinstance(radius, bool) or not 0 < radius < math.inf:
        raise ValueError(
            f"{name}(radius={radius!r:.60}): give a positive number, 0.1 for a tenth of each "
            "hyperparameter."
        )
    check_count(samples, f"{name}(samples={samples!r:.60})")
    return float(radius), int(samples), seed_of(key, f"{name}(key=...)")


def seed_of(key: Any, name: str) -> tuple[int, ...]:
    """Return the numbers of a random key, or of the key of a number."""
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        key = jax.random.key(int(key))
    try:
        data = np.asarray(jax.random.key_data(key))
    except TypeError:
        data = np.zeros((0, 0))
    if data.ndim != 1:
        raise TypeError(f"{name} is {describe(key)}; give a random key, `jax.random.key(0)`.")
    return tuple(map(int, data))

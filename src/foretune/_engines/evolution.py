"""For chaotic responses: the slope of the response averaged over a neighbourhood.

Over many steps of training the response f(lambda) may be chaotic, with slopes that have nothing to do
with those over a step of tuning. What a descent needs is the slope over a neighbourhood of radius r,
with c the natural scale of each hyperparameter: the least-squares solution h of

    d_j h = f(lambda + r c u_j) - f(lambda - r c u_j),    d_j = 2 r c u_j,    j = 1 .. n

for random signs u_j, which is exact where f is linear; with fewer pairs than hyperparameters, the mean
of h_i = (f_j+ - f_j-) / d_ji. No derivative is needed.
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
from .._problem.arguments import flatten, unflatten
from .._problem.checks import check_count, check_key
from .._problem.problem import Problem
from .._problem.system import System
from .._problem.warn import warn
from .base import Solution, TracedEngine
from .nonfinite import NonFiniteError, is_finite, when_checked


class Space:
    """Where hyperparameters may be: constraints as a constant that can be hashed."""

    def __init__(self, constraints: PyTree = None):
        arrays, self.structure = flatten(constraints)
        self.arrays = [np.asarray(array) for array in arrays]

    @property
    def tree(self) -> PyTree:
        return unflatten(self.structure, self.arrays)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Space) or self.structure != other.structure:
            return False
        return all(map(np.array_equal, self.arrays, other.arrays))

    def __hash__(self) -> int:
        return hash(self.structure)

    def __repr__(self) -> str:
        return repr(self.tree)


def balanced_signs(key: Key[Array, ""], n: int, m: int) -> Int[Array, "n m"]:
    """Return n rows of m random signs, the columns as little alike as n allows.

    They are rows of a Hadamard matrix of order N >= m, H_ij = (-1)^(number of bits in i & j), with rows
    and columns in random order and random signs of the columns. Columns of N rows are orthogonal, where
    independent signs may agree in all of a few rows.
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


class Sampling(NamedTuple):
    """What became of the points."""

    stuck: Bool[Array, " m"]  # hyperparameters that their constraints do not let move
    diverged: Int[Array, ""]  # pairs in which a training is not finite
    middle: Bool[Array, ""]  # whether the training between them is


def _seed(key: Any) -> tuple[int, int]:
    """Return a random key, or a number for one, as constants of a program."""
    with jax.ensure_compile_time_eval():  # inside `jit` too
        if isinstance(key, int | np.integer) and not isinstance(key, bool):
            key = jax.random.key(int(key))
        check_key(key, "the key of the points (key=...)")
        data = np.asarray(jax.random.key_data(key))
        if data.size != 2:  # of another generator
            data = np.asarray(jax.random.bits(key, (2,)))
    return int(data[0]), int(data[1])


class Evolution(TracedEngine):
    """The slope of the response over a neighbourhood, from values alone: 2 `samples` + 1 trainings.

    Use it where exact gradients mislead, and for responses that have no derivative, an accuracy say.
    With fewer samples than hyperparameters, m, its standard error is up to sqrt(m / samples) of the
    gradient's length. Powers of 2 above m are best: then no two hyperparameters move alike.

    Args:
        radius: of the neighbourhood, relative to each hyperparameter (in log(x) under `Log`).
        samples: pairs of trainings, at opposite points.
        key: a random key, or a number, of the points. They also depend on the hyperparameters' values,
            so that each step of a descent draws others; the same call gives the same estimate.
        constraints: where the points may be, as in `minimize`, which gives its own.
        chunk: how many trainings run side by side; all by default. Fewer take less memory.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> problem = ft.Problem(
    ...     ft.Training(lambda w, h, x: (w - x) ** 2, lambda h: optax.sgd(h["lr"])),
    ...     lambda state, h, x: (state.params - x) ** 2, init=jnp.array(0.0),
    ...     batches=ft.FullBatch(jnp.array(1.0), steps=1), validation=jnp.array(1.0))
    >>> value, grad, state = ft.Evolution(0.1, samples=1)(problem, {"lr": jnp.array(0.25)})
    >>> print(f"{grad['lr']:.3f}")  # f = (1 - 2 lr)^2
    -2.000
    """

    radius: Any = 0.1
    samples: Any = 8
    key: Any = eqx.field(default=0, converter=_seed)
    constraints: Any = eqx.field(default=None, converter=Space, kw_only=True)
    chunk: Any = eqx.field(default=None, kw_only=True)
    differentiates: ClassVar[bool] = False  # an accuracy will do

    def __check_init__(self):
        radius, samples = self.radius, self.samples
        number = isinstance(radius, int | float | np.floating | np.integer)
        if not number or isinstance(radius, bool) or not 0 < radius < math.inf:
            raise ValueError(
                f"Evolution(radius={radius!r:.60}): give a positive number, 0.1 for a tenth."
            )
        check_count(samples, f"Evolution(samples={samples!r:.60})")
        if self.chunk is not None:
            check_count(self.chunk, f"Evolution(chunk={self.chunk})")

    def within(self, constraints: PyTree) -> "Evolution":
        """Return the engine with its points inside constraints, unless it has some already."""
        if self.constraints != Space():
            return self
        return eqx.tree_at(lambda engine: engine.constraints, self, Space(constraints))

    def solve(self, problem: Problem, system: System, hparams: PyTree) -> Solution:
        points, d = self._points(hparams)

        def errors_at(h):
            return jnp.stack(system.errors(system.run(h), h))

        values = lax.map(errors_at, points, batch_size=self.chunk or 2 * self.samples)
        values = values.reshape(2, self.samples, -1)
        used = jnp.isfinite(values).all((0, 2))
        rows = jax.vmap(ravel_pytree(hparams)[1])(_slopes(values, d, used))
        s_T = system.run(hparams)
        errors = system.errors(s_T, hparams)
        report = Sampling(jnp.all(d == 0, 0), jnp.sum(~used), is_finite(errors))
        return Solution(errors, rows, s_T, report)

    def _points(self, hparams: PyTree) -> tuple[PyTree, Float[Array, "n m"]]:
        """Return n points, followed by the n opposite ones, and the differences between them."""
        flat, unravel = ravel_pytree(hparams)
        # The key depends on the numbers: each step of a descent draws other points.
        bits = lax.bitcast_convert_type(flat.astype(jnp.float32), jnp.uint32)
        odd = 2 * jnp.arange(flat.size, dtype=jnp.uint32) + 1
        seed = jax.random.wrap_key_data(jnp.array(self.key, jnp.uint32))
        key = jax.random.fold_in(seed, jnp.sum(bits * odd))
        U = balanced_signs(key, self.samples, flat.size).astype(flat.dtype)
        constraints = check_constraints(self.constraints.tree, hparams)

        def at(u):
            return moved(constraints, hparams, unravel(self.radius * u))

        points = jax.vmap(at)(jnp.concatenate([U, -U]))
        rows = jax.vmap(lambda h: ravel_pytree(h)[0])(points)
        return points, rows[: self.samples] - rows[self.samples :]

    def review(self, report: Sampling) -> None:
        """Warn of trainings that diverged, raise where a constraint leaves no room."""
        stuck, diverged, middle = jax.device_get(report)
        if stuck.any():
            raise ValueError(
                f"Evolution(radius={self.radius:g}): {int(stuck.sum())} of {stuck.size} "
                "hyperparameters cannot be moved inside their constraints, or not by so little in "
                "their type. Give constraints that leave room, or a larger radius."
            )
        if not middle:  # the radius is not to blame
            return
        if diverged and (diverged < self.samples or when_checked() is not False):
            message = (
                f"Evolution(radius={self.radius:g}): in {int(diverged)} of {self.samples} pairs of "
                "points a training is not finite. Take a smaller radius, or constraints."
            )
            if diverged == self.samples:
                raise NonFiniteError(message)
            message += " These pairs are left out."
            warn(message, RuntimeWarning)


def _slopes(
    values: Float[Array, "2 n K"], d: Float[Array, "n m"], used: Bool[Array, " n"]
) -> Float[Array, "K m"]:
    """Return h of each error, from the pairs that are used; NaN where none is."""
    n, m = d.shape
    d = jnp.where(used[:, None], d, 0)
    change = jnp.where(used[:, None], (values[0] - values[1]).astype(d.dtype), 0)
    square = jnp.sum(d**2, 0) / jnp.sum(used).astype(d.dtype)
    size = jnp.where(square == 0, 1, jnp.sqrt(square))  # of each column: they differ by far
    scaled = d / size[None]
    if n > m:
        h = jnp.linalg.pinv(jnp.where(used[:, None], scaled, 0)) @ change
    else:
        h = scaled.T @ change / jnp.sum(used).astype(d.dtype)
    return jnp.where(jnp.any(used), h.T / size[None], jnp.nan)

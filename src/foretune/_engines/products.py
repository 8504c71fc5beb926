"""Products with Jacobians that more than one engine needs."""

import functools
import operator
import re
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from .._problem.system import System

_UNDIFFERENTIABLE = re.compile("(reverse|forward)-mode (autodiff|differentiation)", re.IGNORECASE)
_FEW = {"cpu": 8}  # columns that are unstacked; on other devices two


def has_no_mode(error: Exception) -> bool:
    """Return whether the error says that a step cannot be differentiated in the mode tried."""
    return bool(_UNDIFFERENTIABLE.search(str(error)))


class Unstacked(NamedTuple):
    """Columns that are not stacked on a leading axis."""

    columns: tuple[PyTree, ...]


def pushforward(
    f: Callable[..., PyTree], primals: tuple, tangents: tuple, chunk: int | None = None
) -> tuple:
    """Return f(*primals), computed once, and its derivative along each of the tangents.

    Tangents have None for leaves that are not floating-point; they are stacked on a leading axis, or
    `Unstacked`, as is what is returned. With `chunk`, that many stacked ones are in work at a time.
    """
    moving, fixed = eqx.partition(primals, eqx.is_inexact_array)

    def split(moving):
        return eqx.partition(f(*eqx.combine(moving, fixed)), eqx.is_inexact_array)

    def column(tangent):
        out, d_out, rest = jax.jvp(split, (moving,), (tangent,), has_aux=True)
        return eqx.combine(out, rest), d_out

    separate = isinstance(tangents[0], Unstacked)
    if chunk is None and not separate:
        return jax.vmap(column, out_axes=(None, 0))(tangents)
    out, linear, rest = jax.linearize(split, moving, has_aux=True)
    if separate:
        columns = zip(*(tangent.columns for tangent in tangents), strict=True)
        return eqx.combine(out, rest), Unstacked(tuple(map(linear, columns)))
    return eqx.combine(out, rest), lax.map(linear, tangents, batch_size=chunk)


def unstack(columns: PyTree[Float[Array, "c ..."]]) -> PyTree:
    """Return a few stacked columns as single ones, by which to multiply is faster than by a stack.

    Many stay as they are, since the program grows with each.
    """
    leaves = jax.tree.leaves(columns)
    if not leaves or (c := leaves[0].shape[0]) > _FEW.get(jax.default_backend(), 2):
        return columns
    return Unstacked(tuple(jax.tree.map(operator.itemgetter(i), columns) for i in range(c)))


def stack_columns(columns: PyTree) -> PyTree[Float[Array, "c ..."]]:
    """Return what `unstack` was given."""
    if not isinstance(columns, Unstacked):
        return columns
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *columns.columns)


def pull_rows(pull: Callable[..., PyTree], rows: PyTree[Float[Array, "K ..."]]) -> PyTree:
    """Return the transposed product of each of K rows; a single row needs no batch axis."""
    if any(row.shape[0] > 1 for row in jax.tree.leaves(rows)):
        return jax.vmap(pull)(rows)
    product = pull(jax.tree.map(lambda row: row[0], rows))
    return jax.tree.map(lambda leaf: leaf[None], product)


def error_gradients(
    system: System, s_T: PyTree, hparams: PyTree
) -> tuple[tuple[Float[Array, ""], ...], PyTree, PyTree]:
    """Return E(s_T, lambda), dE/ds and dE/dlambda, the last two with a leading axis of K errors."""
    errors, pull = eqx.filter_vjp(system.errors, s_T, hparams)
    ones = tuple(jnp.eye(len(errors), dtype=E.dtype)[k] for k, E in enumerate(errors))
    return errors, *pull_rows(pull, ones)


def inner_products(rows: PyTree, columns: PyTree) -> Float[Array, "K c"]:
    """Return the matrix of inner products of K rows and c columns, at full precision."""

    def leaf(row, column):
        row, column = row.reshape(row.shape[0], -1), column.reshape(column.shape[0], -1)
        return jnp.einsum("kn,cn->kc", row, column, precision=lax.Precision.HIGHEST)

    return functools.reduce(jnp.add, jax.tree.leaves(jax.tree.map(leaf, rows, columns)))


def directional(
    system: System, hparams: PyTree, directions: PyTree
) -> tuple[tuple[Float[Array, ""], ...], Float[Array, "K c"], PyTree]:
    """Return the errors, their derivatives along each of c directions in lambda, and s_T."""
    s, Z = pushforward(system.initial, (hparams,), (directions,))

    def step(carry, x):
        s, Z = carry  # Z_t <- A_t Z_{t-1} + B_t, beside s_t <- Phi_t(s_{t-1}, lambda)
        phi = lambda s, h: system.step(s, h, x)  # noqa: E731
        return pushforward(phi, (s, hparams), (Z, directions)), None

    (s_T, Z_T), _ = lax.scan(step, (s, Z), system.xs, length=system.steps)
    errors, alpha, explicit = error_gradients(system, s_T, hparams)
    columns = stack_columns(Z_T), stack_columns(directions)
    return errors, inner_products((alpha, explicit), columns), s_T

"""Forward mode: the derivative of the state carried along the training (Forward-HG).

With A_t = dPhi_t/ds_{t-1}, B_t = dPhi_t/dlambda and Z_t = ds_t/dlambda,

    Z_0 = ds_0/dlambda,    Z_t = A_t Z_{t-1} + B_t,
    grad f = grad E(s_T) Z_T + dE/dlambda.

The columns of Z are tangents of one step, which is computed once. A_t and B_t are never formed. With
`chunk=c`, c + 1 states are in memory, and ceil(m / c) passes go over the training.
Reference: Franceschi et al., ICML 2017, Algorithm 2.
"""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._problem.checks import check_count, check_mesh
from .._problem.problem import Problem
from .._problem.system import System
from .base import Solution, TracedEngine
from .memory import free_bytes, show_bytes, tree_bytes
from .nonfinite import REVERSE
from .products import directional, unstack


class Forward(TracedEngine):
    """The exact hypergradient by forward mode: for few hyperparameters and long trainings.

    Costs about 1 + 2m training runs for m hyperparameters, and the memory of m + 1 states, whatever
    the number of steps. `chunk` bounds the columns of Z in work at once, on all devices together. With
    `mesh=foretune.mesh(tangents=8)`, say, each device carries its share of the columns.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> problem = ft.Problem(
    ...     ft.Training(lambda w, h, _: (w - 1) ** 2, lambda h: optax.sgd(h["lr"])),
    ...     lambda state, h, _: (state.params - 1) ** 2, jnp.array(0.0), ft.FullBatch(None, steps=1))
    >>> value, grad, state = ft.Forward()(problem, {"lr": jnp.array(0.25)})
    >>> float(value), float(grad["lr"]), float(state.params)  # f = (1 - 2 lr)^2
    (0.25, -2.0, 0.5)
    """

    other_mode: ClassVar[str | None] = REVERSE
    chunk: Any = None  # a number
    mesh: Any = eqx.field(default=None, kw_only=True)  # a mesh

    def __check_init__(self):
        if self.chunk is not None:
            check_count(self.chunk, f"Forward(chunk={self.chunk})")
        if self.mesh is not None:
            check_mesh(self.mesh, "Forward(mesh=...)", "tangents")

    def solve(self, problem: Problem, system: System, hparams: PyTree) -> Solution:
        flat, unravel = ravel_pytree(hparams)
        m = flat.size
        c = min(self.chunk or m, m)
        devices = 1 if self.mesh is None else self.mesh.shape["tangents"]
        c = -(-c // devices) * devices  # beyond m, one_hot gives columns of zeros
        _check_room(system, hparams, c)

        def placed(array, *spec):  # split over axes of the mesh, or gathered
            if self.mesh is None:
                return array
            sharding = NamedSharding(self.mesh, PartitionSpec(*spec))
            return lax.with_sharding_constraint(array, sharding)

        def columns(start):
            """Return the errors and s_T, and columns start .. start + c of grad E Z."""
            directions = jax.nn.one_hot(start + jnp.arange(c), m, dtype=flat.dtype)
            columns = jax.vmap(unravel)(placed(directions, "tangents"))
            columns = unstack(columns) if self.mesh is None else columns
            errors, rows, s_T = directional(system, hparams, columns)
            return (errors, s_T), placed(rows)

        (errors, s_T), rows = columns(0)
        if c < m:  # the same errors and s_T again, more columns
            more = lax.map(lambda start: columns(start)[1], jnp.arange(c, m, c))
            more = jnp.moveaxis(more, 0, 1).reshape(len(errors), -1)
            rows = jnp.concatenate([rows, more], axis=1)
        rows = jax.vmap(unravel)(rows[:, :m].astype(flat.dtype))
        return Solution(errors, rows, s_T)


def _check_room(system: System, hparams: PyTree, c: int) -> None:
    """Raise where c columns of Z, with the directions they belong to, exceed all the memory."""
    column = jax.eval_shape(system.initial, hparams), hparams
    floats = eqx.filter(column, lambda leaf: jnp.issubdtype(leaf.dtype, jnp.inexact))
    needed = c * tree_bytes(floats)
    on_host = jax.default_backend() == "cpu"  # there devices may share one memory
    free = free_bytes() * (jax.process_count() if on_host else jax.device_count())
    if needed > free:
        most = int(free * c // (2 * needed))  # leaves room for what else there is
        chunk = f"`Forward(chunk={most})`, which takes several passes, or " if most else ""
        raise MemoryError(
            f"Forward holds {c} columns of Z at once, each as large as the state with its direction: "
            f"{show_bytes(needed)}, where {show_bytes(free)} are free. Use {chunk}`Reverse()`."
        )

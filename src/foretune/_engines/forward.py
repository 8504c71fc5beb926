"""Forward mode: the derivative of the state carried along the training (Forward-HG).

With A_t = dPhi_t/ds_{t-1}, B_t = dPhi_t/dlambda and Z_t = ds_t/dlambda,

    Z_0 = ds_0/dlambda,    Z_t = A_t Z_{t-1} + B_t,
    grad f = grad E(s_T) Z_T + dE/dlambda.

The columns of Z are tangents of one and the same step: the step itself is computed once,
however many there are. A_t and B_t are never formed.

Time: about that of 1 + 2m training runs for m hyperparameters. Memory: m + 1 states, whatever T
is; with `chunk=c`, c + 1 states and ceil(m / c) passes over the training.
Reference: Franceschi et al., ICML 2017, Algorithm 2.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from .._problem.checks import check_count, check_mesh
from .._problem.problem import Problem
from .._problem.system import System
from .base import Solution, TracedEngine, check_not_problem
from .memory import free_bytes, show_bytes
from .nonfinite import REVERSE
from .products import directional, unstack


class Forward(TracedEngine):
    """The exact hypergradient by forward mode: for few hyperparameters and long trainings.

    Costs about 1 + 2m training runs for m hyperparameters, and memory that does not grow with the
    number of steps. `chunk` bounds the columns of Z that are held at once (default: all m);
    each chunk is one pass over the training. With `mesh`, as of `foretune.mesh(tangents=8)`, each
    device on that axis carries its share of the columns, and nothing is exchanged until the end;
    `chunk` then counts the columns of all devices together.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> problem = ft.Problem(
    ...     ft.Training(lambda w, h, x: (w - x) ** 2, lambda h: optax.sgd(h["lr"])),
    ...     lambda state, h, x: (state.params - x) ** 2, init=jnp.array(0.0),
    ...     batches=ft.FullBatch(jnp.array(1.0), steps=1), validation=jnp.array(1.0))
    >>> value, grad, state = ft.Forward()(problem, {"lr": jnp.array(0.25)})
    >>> float(value), float(grad["lr"]), float(state.params)  # f = (1 - 2 lr)^2
    (0.25, -2.0, 0.5)
    """

    chunk: Any = None  # a number
    mesh: Any = eqx.field(default=None, kw_only=True)  # a mesh

    def __check_init__(self):
        check_not_problem("Forward", self.chunk)
        if self.chunk is not None:
            check_count(self.chunk, f"Forward(chunk={self.chunk})")
        if self.mesh is not None:
            check_mesh(self.mesh, "Forward(mesh=...)", "tangents")

    @property
    def other_mode(self) -> str:
        return REVERSE

    def solve(self, problem: Problem, system: System, hparams: PyTree) -> Solution:
        flat, unravel = ravel_pytree(hparams)
        m = flat.size
        c = min(self.chunk or m, m)
        devices = 1 if self.mesh is None else self.mesh.shape["tangents"]
        c = -(-c // devices) * devices  # beyond m, one_hot gives columns of zeros
        _check_room(system, hparams, c)

        def columns(start):
            """Return the errors and s_T, and columns start .. start + c of grad E Z."""
            directions = jax.nn.one_hot(start + jnp.arange(c), m, dtype=flat.dtype)
            directions = self._placed(directions, "tangents")
            columns = jax.vmap(unravel)(directions)
            columns = unstack(columns) if self.mesh is None else columns
            errors, rows, s_T = directional(system, hparams, columns)
            return (errors, s_T), self._placed(rows)

        (errors, s_T), rows = columns(0)
        if c < m:  # the same errors and s_T again, more columns
            _, more = lax.scan(
                lambda _, start: (None, columns(start)[1]), None, jnp.arange(c, m, c)
            )
            rows = jnp.concatenate(
                [rows, jnp.moveaxis(more, 0, 1).reshape(len(errors), -1)], axis=1
            )
        rows = jax.vmap(unravel)(rows[:, :m].astype(flat.dtype))
        return Solution(errors, rows, s_T)

    def _placed(self, array: Array, *spec: str) -> Array:
        """Split the array over axes of the mesh, or gather it."""
        if self.mesh is None:
            return array
        return lax.with_sharding_constraint(array, NamedSharding(self.mesh, PartitionSpec(*spec)))


def _check_room(system: System, hparams: PyTree, c: int) -> None:
    """Raise where c columns of Z, with the directions they belong to, exceed all the memory."""

    def bytes_of(tree):
        floats = eqx.filter(tree, lambda leaf: jnp.issubdtype(leaf.dtype, jnp.inexact))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(floats))

    state, direction = bytes_of(jax.eval_shape(system.initial, hparams)), bytes_of(hparams)
    on_host = jax.default_backend() == "cpu"  # there devices may share one memory
    free = free_bytes() * (jax.process_count() if on_host else jax.device_count())
    if c * (state + direction) <= free:
        return
    most = int(free // (2 * (state + direction)))  # leaves room for what else there is
    chunk = f"`Forward(chunk={most})`, which takes several passes, or " if most else ""
    raise MemoryError(
        f"Forward holds {c} columns of Z at once, each as large as the state ({show_bytes(state)}) "
        f"with its direction ({show_bytes(direction)}): {show_bytes(c * (state + direction))}, where "
        f"{show_bytes(free)} are free. Use {chunk}`Reverse()`, whose memory does not grow with the "
        "number of hyperparameters."
    )

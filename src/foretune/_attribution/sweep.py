"""The adjoints of many errors through one training.

With alpha_T^k = grad E_k(s_T), A_t = dPhi_t/ds_{t-1} and w the weights of the examples,

    alpha_{t-1}^k = alpha_t^k A_t,    dE_k/dw = sum_t alpha_t^k dPhi_t/dw.

The training is run once and its states are stored; then the adjoints of a chunk of errors go back
through each step together. Step t sees the weights of its B examples alone: alpha_t dPhi_t/dw is B
numbers for each error, which are added in their places among all n.
"""

import functools
import math
import operator
from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree

from .._engines.memory import free_bytes, program_bytes, show_bytes, tree_bytes
from .._engines.products import pull_rows
from .._engines.reverse import Reverse
from .._engines.schedules import Adjoint
from .._problem.arguments import Compiled, Structure, filtered
from .._problem.problem import Problem, opened
from .._problem.system import System, make_system
from .queries import Queries
from .weighted import Numbered, Seen, Weighted

MOST = 64  # errors in work together, where memory allows


def weighted_system(problem: Problem, weights: dict[str, Array]) -> System:
    """Return the system, whose steps see the weights of their own examples alone."""
    system = make_system(problem, weights)
    dynamics, batches = problem.dynamics, problem.batches
    if not isinstance(dynamics, Weighted) or not isinstance(batches, Numbered):
        return system
    name = dynamics.name

    def seen(weights, x):
        return {name: Seen(weights[name][batches.numbers(x)])}

    def add(g, alpha_B, x):
        return {name: g[name].at[:, batches.numbers(x)].add(alpha_B[name].weights)}

    return system._replace(seen=seen, add=add)


def _train(engine: Reverse, structure: Structure, arrays: list[Array]) -> tuple[PyTree, PyTree]:
    problem, weights = opened(structure, arrays)
    loop = engine.loop(weighted_system(problem, weights), weights)
    return engine.schedule.forward(loop, loop.system.initial(weights))


def _pull(
    engine: Reverse, structure: Structure, arrays: list[Array], stored: PyTree, adjoint: Adjoint
) -> Float[Array, "c n"]:
    problem, weights = opened(structure, arrays)
    loop = engine.loop(weighted_system(problem, weights), weights)
    alpha_0, g = engine.schedule.backward(loop, stored, adjoint)
    _, pull_initial = eqx.filter_vjp(loop.system.initial, weights)
    (g_initial,) = pull_rows(pull_initial, alpha_0)
    (scores,) = jax.tree.leaves(jax.tree.map(operator.add, g, g_initial))
    return scores


forward = Compiled(_train, 2)
"""(engine, structure, arrays) -> s_T, and what `backward` needs: plain training."""
backward = Compiled(_pull, 2)
"""(engine, structure, arrays, stored, adjoint) -> the scores of a chunk of errors."""


@filtered
def ends(
    problem: Problem, weights: PyTree, s_T: PyTree, queries: Queries
) -> tuple[Float[Array, " c"], Adjoint]:
    """Return the errors of a chunk, and their adjoints at the end: alpha_T and dE/dw."""
    system = make_system(problem, weights)

    def end(objective, validation):
        def error(s, w):
            return queries.error(objective, system.restore(s), w, validation)

        E, pull = eqx.filter_vjp(error, s_T, weights)
        return E, Adjoint(*pull(jnp.ones_like(E)))

    return queries.each(end)


def placed(rows: PyTree, mesh: Mesh | None) -> PyTree:
    """Return arrays with a leading axis of queries over the devices of a mesh's axis `queries`."""
    return rows if mesh is None else jax.device_put(rows, _sharding(mesh))


def _devices(mesh: Mesh | None) -> int:
    return 1 if mesh is None else mesh.shape["queries"]


def _sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec("queries"))


def fitting(
    engine: Reverse,
    structure: Structure,
    arrays: list[Array],
    most: int,
    memory: int | None,
    mesh: Mesh | None,
) -> int:
    """Return how many errors go back together, about `most` at most, or raise where not one can."""
    free = free_bytes() + tree_bytes(arrays)
    limit = min(free, math.inf if memory is None else memory)
    s_T, stored = forward.lower(engine, structure, arrays).out_info  # traced once, by `forward` too
    _, weights = opened(structure, arrays)

    def rows(tree, c):
        floats = eqx.filter(tree, lambda leaf: jnp.issubdtype(leaf.dtype, jnp.inexact))
        sharding = None if mesh is None else _sharding(mesh)
        shape = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
        return jax.tree.map(lambda leaf: shape((c, *leaf.shape), leaf.dtype), floats)

    devices = _devices(mesh)
    each, needed = -(-most // devices), 0
    while each:
        chunk = each * devices
        adjoint = Adjoint(rows(s_T, chunk), rows(weights, chunk))
        program = backward.lower(engine, structure, arrays, stored, adjoint).compile()
        needed = program_bytes(program)
        if needed <= limit:
            return chunk
        each //= 2
    raise MemoryError(
        f"one query at a time needs {show_bytes(needed)}, more than the {show_bytes(limit)} that are "
        f"{'free' if limit == free else 'allowed'}. Allow more, `attribute(memory=...)`, or store less "
        f'than {show_bytes(tree_bytes(stored))}, `engine=foretune.Reverse(store="segments")`.'
    )


def sweep(
    engine: Reverse,
    program: tuple[list[Array], Structure],
    queries: Queries,
    missing: np.ndarray,
    chunk: int | None,
    memory: int | None,
    mesh: Mesh | None,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Train, then yield the numbers, errors and scores of each chunk of the missing queries."""
    if not len(missing):
        return
    arrays, structure = program
    problem, weights = opened(structure, arrays)
    most = min(len(missing), chunk or MOST * _devices(mesh))
    c = fitting(engine, structure, arrays, most, memory, mesh)
    s_T, stored = forward(engine, structure, arrays)
    for rows in np.split(missing, range(c, len(missing), c)):
        filled = np.append(rows, np.repeat(rows[-1], c - len(rows)))  # for one program
        asked = queries.chosen(filled)
        if asked.stacked:
            asked = asked.of(placed(asked.validation, mesh))
        E, adjoint = ends(problem, weights, s_T, asked)
        found = backward(engine, structure, arrays, stored, placed(adjoint, mesh))
        yield rows, np.asarray(E)[: len(rows)], np.asarray(found)[: len(rows)]

"""Queries: the errors that are attributed, validation examples or objectives."""

from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from .._problem.checks import (
    as_arrays,
    check_data,
    check_leading_axis,
    check_objective,
    describe_tree,
)
from .._problem.problem import Problem


def is_functions(queries: Any) -> bool:
    """Return whether queries are objectives, not examples."""
    return isinstance(queries, list | tuple) and bool(queries) and all(map(callable, queries))


def as_queries(problem: Problem, queries: Any) -> tuple[Any, int]:
    """Return the queries, stacked examples or a list of objectives, and how many there are."""
    if is_functions(queries):
        for objective in queries:
            check_objective(objective)
        return list(queries), len(queries)
    if callable(queries):
        raise TypeError("queries is a function: give a list of objectives, `[f]`.")
    if isinstance(problem.objective, dict):
        raise ValueError(
            "the problem has an objective for each of "
            f"{sorted(problem.objective, key=str)}: which is the error of a query? Give the objectives "
            "as queries, `queries=[f, ...]`, or `problem.replace(objective=f)`."
        )
    check_data(queries, "queries")
    queries = as_arrays(queries, "queries")
    K = check_leading_axis(queries, "queries", "the queries")
    if K == 0:
        raise ValueError("queries holds no example: its leading axis has the length 0.")
    if not _alike(queries, problem.validation):
        raise ValueError(
            f"the queries are\n{describe_tree(queries, 'queries')}\nbut the problem's error is of\n"
            f"{describe_tree(problem.validation, 'validation')}\nGive queries like the validation "
            "examples: the same pytree, and the same shapes behind the leading axis."
        )
    return queries, K


def _alike(queries: PyTree, validation: PyTree) -> bool:
    """Return whether queries are like validation examples, where there are some."""
    leaves, kind = jax.tree.flatten(validation)
    if not leaves or not all(np.ndim(leaf) for leaf in leaves):
        return True
    if kind != jax.tree.structure(queries):
        return False
    pairs = zip(leaves, jax.tree.leaves(queries), strict=True)
    return all(np.shape(a)[1:] == np.shape(b)[1:] for a, b in pairs)


def with_query(problem: Problem, queries: Any, k: int) -> Problem:
    """Return the problem with one query's error as its own."""
    if is_functions(queries):
        return problem.replace(objective=queries[k])
    return problem.replace(validation=jax.tree.map(lambda leaf: leaf[k : k + 1], queries))


def chosen(queries: Any, rows: np.ndarray) -> Any:
    """Return some of the queries."""
    if is_functions(queries):
        return [queries[k] for k in rows]
    return jax.tree.map(lambda leaf: leaf[rows], queries)


def as_batch(example: PyTree) -> PyTree:
    """Return one example as a batch of one."""
    return jax.tree.map(lambda leaf: leaf[None], example)

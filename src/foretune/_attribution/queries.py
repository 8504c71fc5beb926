"""Queries: the errors that are attributed, validation examples or objectives."""

from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._problem.checks import (
    as_arrays,
    check_data,
    check_leading_axis,
    check_objective,
    describe,
    describe_tree,
)
from .._problem.definition import Objective
from .._problem.problem import Problem

T = TypeVar("T")


class Queries(eqx.Module):
    """K errors: an objective on each of K examples, or K objectives on the same data."""

    objectives: tuple[Objective, ...]
    validation: PyTree
    stacked: bool = eqx.field(static=True)  # `validation` has an axis of K, for the only objective
    fixed: Callable[[PyTree], PyTree] | None = None  # weights -> the objectives' hyperparameters

    @property
    def count(self) -> int:
        """K."""
        return len(jax.tree.leaves(self.validation)[0]) if self.stacked else len(self.objectives)

    def at(self, weights: PyTree) -> PyTree:
        """Return the hyperparameters of the objectives."""
        return weights if self.fixed is None else self.fixed(weights)

    def each(self, f: Callable[[Objective, PyTree], T]) -> T:
        """Return f of each query's objective and validation data, stacked."""
        if self.stacked:
            (objective,) = self.objectives
            of_one = lambda x: f(objective, jax.tree.map(lambda leaf: leaf[None], x))  # noqa: E731
            return jax.vmap(of_one)(self.validation)
        rows = [f(objective, self.validation) for objective in self.objectives]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)

    def chosen(self, rows: np.ndarray) -> "Queries":
        """Return some of them."""
        if self.stacked:
            return self.of(jax.tree.map(lambda leaf: leaf[rows], self.validation))
        objectives = tuple(self.objectives[k] for k in rows)
        return Queries(objectives, self.validation, False, self.fixed)

    def of(self, validation: PyTree) -> "Queries":
        """Return the same objectives on other validation data."""
        return Queries(self.objectives, validation, self.stacked, self.fixed)

    def mean(self, state: PyTree, hparams: PyTree, validation: PyTree) -> Float[Array, ""]:
        """Return the mean error: an objective, whatever the validation data."""
        return jnp.mean(self.each(lambda f, data: self.error(f, state, hparams, data)))

    def error(
        self, objective: Objective, state: PyTree, hparams: PyTree, validation: PyTree
    ) -> Float[Array, ""]:
        """Return the error of a query."""
        value = objective(state, self.at(hparams), validation)
        if getattr(value, "shape", None) != ():
            raise ValueError(f"the error of a query is one scalar, not {describe(value)}.")
        return value


def as_queries(problem: Problem, queries: PyTree) -> Queries:
    """Return the queries that a user gives, stacked examples or a list of objectives, or raise."""
    if isinstance(queries, list | tuple) and queries and all(map(callable, queries)):
        for objective in queries:
            check_objective(objective)
        return Queries(tuple(queries), problem.validation, False)
    if callable(queries):
        raise TypeError("queries is a function: give a list of objectives, `[f]`.")
    if isinstance(problem.objective, dict):
        names = sorted(problem.objective, key=str)
        raise ValueError(f"the problem has objectives for {names}: give `queries=[f, ...]`.")
    check_data(queries, "queries")
    if not jax.tree.leaves(queries):
        none = f"queries is {describe(queries)} and holds no example"
        raise ValueError(f"{none}: give examples with a leading axis, or a list of objectives.")
    queries = as_arrays(queries, "queries")
    if check_leading_axis(queries, "queries", "the queries") == 0:
        raise ValueError("queries holds no example: its leading axis has the length 0.")
    if not _alike(queries, problem.validation):
        raise ValueError(
            f"the queries are\n{describe_tree(queries, 'queries')}\nbut the problem's error is of\n"
            f"{describe_tree(problem.validation, 'validation')}\nGive queries like the validation data."
        )
    return Queries((problem.objective,), queries, True)


def _alike(queries: PyTree, validation: PyTree) -> bool:
    """Return whether queries are like validation examples, where there are some."""
    leaves, kind = jax.tree.flatten(validation)
    if not leaves or not all(np.ndim(leaf) for leaf in leaves):
        return True
    if kind != jax.tree.structure(queries):
        return False
    pairs = zip(leaves, jax.tree.leaves(queries), strict=True)
    return all(np.shape(a)[1:] == np.shape(b)[1:] for a, b in pairs)

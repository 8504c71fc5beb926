"""The median over folds of their hypergradients, in place of the mean.

With folds i = 1 .. k, each with a copy lambda_i of the hyperparameters, one adjoint has them all:

    d/dlambda_i  1/k sum_j E_j(s_T^j(lambda_j), lambda_j) = g_i / k

The mean of the g_i is the gradient of the mean error, exactly. But where one training in eight is on
the edge of chaos, its g_i is a thousand times as long as the others', and of no use; the mean is then
that one. The median of each entry is not moved by it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._problem.folds import CrossValidated
from .._problem.problem import Problem
from .._problem.system import System, make_system
from .base import AbstractEngine, Solution
from .reverse import Reverse


class FoldMedian(AbstractEngine):
    engine: Any
    check_finite: bool | None

    def __init__(self, engine: Any = None, *, check_finite: bool | None = None):
        self.engine = Reverse() if engine is None else engine
        self.check_finite = check_finite

    def solve(self, system, hparams):
        raise NotImplementedError

    def solve_problem(self, problem: Problem, system: System, hparams: PyTree) -> Solution:
        k = problem.folds
        copies = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (k, *leaf.shape)), hparams)
        apart = problem.apart()
        found = self.engine.solve_problem(apart, make_system(apart, copies), copies)
        rows = jax.tree.map(lambda leaf: k * jnp.median(leaf, axis=1), found.rows)
        return found._replace(rows=rows, report=k_rows(found.rows, k))


def k_rows(rows, k):
    return jax.tree.map(lambda leaf: k * leaf, rows)

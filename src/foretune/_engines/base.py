"""What all engines share: how one is called and what it returns.

An engine is a callable `engine(problem, hparams) -> Hypergradient(value, grad, state)`. It
compiles once for given structures and shapes; new values, new data and new problems with the
same functions reuse the program.
"""

import abc
from typing import NamedTuple

import equinox as eqx
import jax
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from .._problem import Problem, System
from .._validate import validated
from .nonfinite import check_finite, guard_finite


class Hypergradient(NamedTuple):
    """What an engine returns; it unpacks in this order."""

    value: PyTree[Float[Array, ""]]
    """The error f(lambda), or a dict of errors where the objective is a dict."""
    grad: PyTree[Float[Array, "..."]]
    """The gradient of f, with the structure of the hyperparameters."""
    state: PyTree
    """The final state s_T."""


class Solution(NamedTuple):
    """What an engine computes inside the trace, for all K errors at once."""

    errors: tuple[Float[Array, ""], ...]
    rows: PyTree[Float[Array, "K ..."]]  # the K gradients, stacked
    s_T: PyTree


class AbstractEngine(eqx.Module):
    """A way to compute a hypergradient.

    `check_finite` says what happens to a value or gradient that is not finite. `None` (default):
    a call outside `jax.jit` raises `NonFiniteError`, which names the hyperparameter and the step
    and state leaf where it began; a call inside `jit` checks nothing and costs nothing. `True`:
    inside `jit` too, by a runtime check that names the hyperparameter. `False`: never.
    """

    check_finite: eqx.AbstractVar[bool | None]

    @abc.abstractmethod
    def solve(self, system: System, hparams: PyTree) -> Solution:
        """Return the errors, their gradients and s_T: a pure function, to be traced."""

    def __call__(self, problem: Problem, hparams: PyTree) -> Hypergradient:
        """Return the error at `hparams`, its gradient and the final state."""
        hparams = validated(problem, hparams)
        result = _compute(self, problem, hparams)
        traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(result))
        if traced and self.check_finite:
            return guard_finite(result)
        if not traced and self.check_finite is not False:
            check_finite(problem, hparams, result)
        return result

    def lower(self, problem: Problem, hparams: PyTree) -> jax.stages.Lowered:
        """Return the program that a call runs, for its memory and cost analysis."""
        lower = _compute.lower  # pyright: ignore[reportFunctionMemberAccess]
        return lower(self, problem, validated(problem, hparams)).lowered


@eqx.filter_jit
def _compute(engine: AbstractEngine, problem: Problem, hparams: PyTree) -> Hypergradient:
    system = problem.system(hparams)
    errors, rows, s_T = engine.solve(system, hparams)
    return Hypergradient(problem.value(errors), problem.gradient(rows), system.restore(s_T))

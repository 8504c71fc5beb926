"""What all engines share: how one is called and what it returns.

An engine is a callable `engine(problem, hparams) -> Hypergradient(value, grad, state)`. It
compiles once for given structures and shapes; new values, new data and new problems with the
same functions reuse the program.
"""

import abc
import copy
import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, PyTree

from .._problem.arguments import Compiled, Output, Structure, unflatten
from .._problem.checks import describe
from .._problem.problem import Problem, validated
from .._problem.system import System, make_system
from .nonfinite import NonFiniteError, explain, guard_finite, is_finite


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
    report: Any = None  # what `review` gets to see


class AbstractEngine(eqx.Module):
    """A way to compute a hypergradient: `engine(problem, hparams) -> value, grad, state`.

    Every engine has the option `check_finite`, which says what happens to a value or gradient that
    is not finite. `None` (default): a call outside `jax.jit` raises `NonFiniteError`, which names the
    hyperparameter, the step and state leaf where it began, and the remedy; a call inside `jit` checks
    nothing and costs nothing. `True`: inside `jit` too, by a runtime check that names the
    hyperparameter. `False`: never. The page "Which engine?" of the documentation has more, under
    "When a result is not finite".
    """

    check_finite: eqx.AbstractVar[bool | None]

    @property
    def other_mode(self) -> str | None:
        """The engine of the other mode, which may be finite where this one is not."""
        return None

    @abc.abstractmethod
    def solve(self, system: System, hparams: PyTree) -> Solution:
        """Return the errors, their gradients and s_T: a pure function, to be traced."""

    def solve_problem(self, problem: Problem, system: System, hparams: PyTree) -> Solution:
        """Do the same where an engine needs more of the problem than its system."""
        return self.solve(system, hparams)

    @property
    def differentiates(self) -> bool:
        """Whether it needs a response that has a derivative."""
        return True

    def unchecked(self) -> "AbstractEngine":
        """Return the engine with `check_finite=False`."""
        engine = copy.copy(self)
        object.__setattr__(engine, "check_finite", False)  # a module is frozen
        return engine

    def within(self, constraints: PyTree) -> "AbstractEngine":
        """Return the engine for hyperparameters under constraints, where these concern it."""
        return self

    def review(self, report: Any) -> None:
        """Warn or raise, outside of a trace, where the engine's report asks for it."""

    def guard(self, grad: PyTree, report: Any) -> PyTree:
        """Return the gradient with the same as runtime checks, inside a trace."""
        return grad

    def __call__(self, problem: Problem, hparams: PyTree) -> Hypergradient:
        """Return the error at `hparams`, its gradient and the final state."""
        arrays, structure = validated(problem, hparams, smooth=self.differentiates)
        traced = any(isinstance(array, Tracer) for array in arrays)
        flagged = self.check_finite is not False and not traced
        try:
            value, grad, state, report, finite = compute(self, structure, flagged, arrays)
        except (ValueError, RuntimeError) as error:
            _advise(error)
            raise
        # Inside `jit` results are tracers, also where all the arguments are constants.
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(grad)):
            result = Hypergradient(value, self.guard(grad, report), state.tree())
            return guard_finite(result) if self.check_finite else result
        result = Hypergradient(value, grad, state.tree())
        self.review(report)
        if flagged and not finite:
            problem, hparams = unflatten(structure, arrays)
            raise NonFiniteError(explain(problem, hparams, result, self.other_mode))
        return result

    def lower(self, problem: Problem, hparams: PyTree) -> jax.stages.Lowered:
        """Return the program that a call runs, for its memory and cost analysis."""
        arrays, structure = validated(problem, hparams, smooth=self.differentiates)
        return compute.lower(self, structure, False, arrays)


def check_engine(engine: Any) -> None:
    """Raise unless it is an engine or None."""
    if engine is not None and not isinstance(engine, AbstractEngine):
        raise TypeError(f"engine must be an engine, `foretune.Reverse()` say; got {engine!r:.100}.")


def check_options(engine: Any) -> None:
    """Raise where a problem was given to the class instead of to an engine."""
    for name, option in vars(engine).items():
        if not isinstance(option, int | float | str | Mesh | None):
            engine_name = type(engine).__name__
            raise TypeError(
                f"{engine_name}({name}={describe(option)}): the problem goes to the engine, not to "
                f"its class: `{engine_name}()(problem, hparams)`."
            )
        if name == "check_finite" and not isinstance(option, bool | None):
            raise TypeError(
                f"{type(engine).__name__}(check_finite={option!r}): give None, True or False."
            )


def _advise(error: Exception) -> None:
    if "Reverse-mode differentiation" in str(error):
        error.add_note(
            "foretune: a step holds a loop of unknown length (a line search, say), which has no "
            "reverse mode. Use `foretune.Forward()`."
        )
    if "RESOURCE_EXHAUSTED" in str(error):
        error.add_note(
            "foretune: out of memory. Reverse mode holds T states, forward mode m + 1 of them, or "
            "c + 1 with `foretune.Forward(chunk=c)`."
        )


@functools.partial(Compiled, static=3)
def compute(
    engine: AbstractEngine, structure: Structure, flagged: bool, arrays: list[Array]
) -> tuple[PyTree, PyTree, Output, Any, Bool[Array, ""] | None]:
    """Return value, gradient and s_T, and where `flagged` whether the first two are finite."""
    problem, hparams = unflatten(structure, arrays)
    system = make_system(problem, hparams)
    errors, rows, s_T, report = engine.solve_problem(problem, system, hparams)
    value, grad = system.value(errors), system.gradient(rows)
    finite = is_finite((value, grad)) if flagged else None
    return value, grad, Output(system.restore(s_T)), report, finite

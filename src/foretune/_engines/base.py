"""What all engines share: how one is called and what it returns.

Most engines are `TracedEngine`s: one program, made of one method `solve`, compiled once for given
structures and shapes; new values, new data, new draws and new problems with the same functions reuse
it. Those that run a loop on the host have `__call__` alone.
"""

import abc
import functools
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, PyTree

from .._problem.arguments import Compiled, Output, Structure, flatten, unflatten
from .._problem.definition import Definition
from .._problem.draws import Drawn, as_problem
from .._problem.problem import Problem, ProblemLike, opened, validated
from .._problem.system import System, make_system
from .nonfinite import NonFiniteError, explain, guard_finite, is_finite, when_checked


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

    A value or gradient that is not finite raises `NonFiniteError`; `foretune.check_finite` says when.
    """

    other_mode: ClassVar[str | None] = None  # the engine that may be finite where this one is not
    differentiates: ClassVar[bool] = True  # whether it needs a response that has a derivative

    def __new__(cls, *options: Any, **_: Any):
        """Raise where a problem is given to the class instead of to an engine."""
        if options and isinstance(options[0], Definition):
            needed = {"Truncated": "steps", "ReverseOnDisk": "folder"}.get(cls.__name__, "")
            call = f"`{cls.__name__}({needed})(problem, hparams)`"
            raise TypeError(f"the problem goes to the engine, not to its class: {call}.")
        return super().__new__(cls)

    @abc.abstractmethod
    def __call__(
        self, problem: ProblemLike, hparams: PyTree, *, key: Array | None = None
    ) -> Hypergradient:
        """Return the error at `hparams`, its gradient and the final state.

        Args:
            problem: the problem, or a function `draw(key)` that returns it.
            hparams: the hyperparameters.
            key: of the draw.
        """

    @abc.abstractmethod
    def lower(self, problem: Problem | Drawn, hparams: PyTree) -> jax.stages.Lowered:
        """Return the program that a call runs, for its memory and cost analysis."""

    def within(self, constraints: PyTree) -> "AbstractEngine":
        """Return the engine for hyperparameters under constraints, where these concern it."""
        return self


class TracedEngine(AbstractEngine):
    """An engine that is one program: it implements `solve`."""

    @abc.abstractmethod
    def solve(self, problem: Problem, system: System, hparams: PyTree) -> Solution:
        """Return the errors, their gradients and s_T: a pure function, to be traced."""

    def review(self, report: Any) -> None:
        """Warn or raise, outside of a trace, where the engine's report asks for it."""

    def guard(self, grad: PyTree, report: Any) -> PyTree:
        """Return the gradient with the same as runtime checks, inside a trace."""
        return grad

    def __call__(
        self, problem: ProblemLike, hparams: PyTree, *, key: Array | None = None
    ) -> Hypergradient:
        arrays, structure = validated(as_problem(problem, key), hparams, smooth=self.differentiates)
        own, engine = flatten(self)
        traced = any(isinstance(array, Tracer) for array in arrays)
        flagged = when_checked() is not False and not traced
        try:
            value, grad, state, report, finite = compute(engine, structure, flagged, own, arrays)
        except (ValueError, RuntimeError) as error:
            _advise(error)
            raise
        # Inside `jit` results are tracers, also where all the arguments are constants.
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(grad)):
            result = Hypergradient(value, self.guard(grad, report), state.tree())
            return guard_finite(result) if when_checked() else result
        result = Hypergradient(value, grad, state.tree())
        self.review(report)
        if flagged and not finite:
            raise NonFiniteError(explain(*opened(structure, arrays), result, self.other_mode))
        return result

    def lower(self, problem: Problem | Drawn, hparams: PyTree) -> jax.stages.Lowered:
        arrays, structure = validated(problem, hparams, smooth=self.differentiates)
        own, engine = flatten(self)
        return compute.lower(engine, structure, False, own, arrays)


def check_engine(engine: object) -> None:
    if engine is not None and not isinstance(engine, AbstractEngine):
        raise TypeError(f"engine must be an engine, `foretune.Reverse()` say; got {engine!r:.100}.")


def _advise(error: Exception) -> None:
    if "Reverse-mode differentiation" in str(error):
        loop = "a step holds a loop of unknown length (a line search, say), without a reverse mode"
        error.add_note(f"foretune: {loop}. Use `foretune.Forward()`.")
    if "RESOURCE_EXHAUSTED" in str(error):
        states = "Reverse mode holds T states, forward mode m + 1, or c + 1 with `chunk=c`"
        error.add_note(f"foretune: out of memory. {states}.")


@functools.partial(Compiled, static=3)
def compute(
    kind: Structure, structure: Structure, flagged: bool, own: list[Array], arrays: list[Array]
) -> tuple[PyTree, PyTree, Output, Any, Bool[Array, ""] | None]:
    """Return value, gradient and s_T, and where `flagged` whether the first two are finite."""
    engine: TracedEngine = unflatten(kind, own)
    problem, hparams = opened(structure, arrays)
    system = make_system(problem, hparams)
    errors, rows, s_T, report = engine.solve(problem, system, hparams)
    value, grad = system.value(errors), system.gradient(rows)
    finite = is_finite((value, grad)) if flagged else None
    return value, grad, Output(system.restore(s_T)), report, finite

"""The update of a window as a compiled program: its arguments and their checks.

Windows are padded to the longest so far, and the loop runs to the true length, in one program.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int, PyTree

from .._problem.arguments import Compiled, Recent, Structure, flatten, unflatten
from .._problem.batches import FullBatch, Minibatches
from .._problem.checks import (
    as_arrays,
    check_data,
    check_leading_axis,
    check_some_number,
    describe,
    describe_tree,
    named_leaves,
)
from .._problem.problem import Problem, validated
from .._problem.system import make_system
from .outcome import finish
from .state import RealTimeState, TunerSettings, carried, check_not_donated, check_state
from .steps import Steps, begin

Updated = tuple[RealTimeState, dict[str, PyTree], Bool[Array, ""]]  # state, log, if it is a fault


class UpdateProgram:
    """The updates of a tuner with these settings."""

    def __init__(self, settings: TunerSettings):
        self.settings = settings
        self._arrays, self._structure = flatten(settings)
        self._checked = Recent()  # the structures and shapes that have passed the checks
        self._longest = Recent()  # window so far, by structure and shape

    def __call__(
        self, state: RealTimeState, window: PyTree, validation: PyTree, donate: bool
    ) -> Updated:
        """Begin an update; return, without waiting, the next state, the log, and if it is a fault."""
        if not isinstance(state, RealTimeState):
            raise TypeError(f"`update` takes a state of `init` or `update`, got {describe(state)}.")
        window, validation = as_arrays(window, "window"), as_arrays(validation, "validation")
        if is_traced((state, window, validation)):
            everything = tuple(named_leaves(state.hparams, "hparams"))
            check_state(self.settings, state)
            problem = self.settings.problem(state.train, window, validation, everything)
            validated(problem, state.hparams)
            return _update(self.settings, state, problem, jnp.array(problem.steps))
        arguments = self._arguments(state, window, validation)
        new, log, fault = (_donating if donate else _keeping)(*arguments)
        return unflatten(arguments[2], new), log, fault

    def lower(
        self, state: RealTimeState, window: PyTree, validation: PyTree, donate: bool
    ) -> jax.stages.Lowered:
        """Return the program, for its memory and cost analysis."""
        program = _donating if donate else _keeping
        return program.lower(*self._arguments(state, *as_arrays((window, validation))))

    def _arguments(self, state: RealTimeState, window: PyTree, validation: PyTree) -> tuple:
        """Return the arguments of the program, after the checks that new shapes need."""
        check_not_donated(state)
        donated, state_structure = flatten(state)
        check_data(window, "window")
        padded, steps = self._padded(window)
        others, structure = flatten((padded, validation))
        shapes = tuple((array.shape, array.dtype) for array in (*donated, *others))
        key = state_structure, structure, shapes
        if key not in self._checked:
            check_data(validation, "validation")
            check_state(self.settings, state)
            problem = self.settings.problem(state.train, window, validation, carried(state))
            validated(problem, state.hparams)
            self._checked[key] = True
        return self._structure, structure, state_structure, donated, self._arrays, others, steps

    def _padded(self, window: PyTree) -> tuple[PyTree, Int[np.ndarray, ""]]:
        """Return the window padded to the longest like it so far, and its true length."""
        if isinstance(window, FullBatch):
            return FullBatch(window.data, 1), np.asarray(window.steps, np.int32)
        xs = window.indices if isinstance(window, Minibatches) else window
        steps = check_leading_axis(xs, "window", "the minibatches") if jax.tree.leaves(xs) else 0
        if steps == 0:
            remedy = "Leave it out. Where steps need no data, give `FullBatch(None, steps=...)`."
            raise ValueError(f"the window is empty:\n{describe_tree(xs, 'window')}\n{remedy}")
        leaves, structure = flatten(xs)
        key = structure, tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves)
        if key not in self._longest:
            check_some_number(xs, "window")
        length = self._longest[key] = max(self._longest.get(key, 0), steps)
        if length > steps:
            xs = jax.tree.map(functools.partial(_pad, length), xs)
            window = window.at(xs) if isinstance(window, Minibatches) else xs
        return window, np.asarray(steps, np.int32)


def is_traced(tree: PyTree) -> bool:
    """Return whether a leaf is part of a program that is being traced."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def _pad(length: int, x: Array | np.ndarray) -> Array | np.ndarray:
    more = (length - len(x), *x.shape[1:])
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.concatenate([x, jnp.broadcast_to(x[:1], more)])
    if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1:  # it stays where it is
        return jax.device_put(jnp.concatenate([x, jnp.zeros(more, x.dtype)]), x.sharding)
    x = np.asarray(x)  # by NumPy, which compiles nothing
    return np.concatenate([x, np.zeros(more, x.dtype)])


def _update(
    settings: TunerSettings, state: RealTimeState, problem: Problem, count: Int[Array, ""]
) -> Updated:
    steps = Steps(settings, problem, make_system(problem, state.hparams), state)
    end = steps.run(begin(settings, state), count)
    return finish(steps, end, end.done - 1)


def _program(
    settings_structure: Structure,
    structure: Structure,
    state_structure: Structure,
    donated: list[Array],
    settings_arrays: list[Array],
    others: list[Array],
    count: Int[Array, ""],
) -> tuple[list[Array], dict[str, PyTree], Bool[Array, ""]]:
    settings = unflatten(settings_structure, settings_arrays)
    state = unflatten(state_structure, donated)
    problem = settings.problem(state.train, *unflatten(structure, others))
    new, log, fault = _update(settings, state, problem, count)
    return flatten(new)[0], log, fault


_donating = Compiled(_program, 3, donate_argnums=0)
_keeping = Compiled(_program, 3)

"""The update of a window as a compiled program: its arguments, their checks, and its faults.

Windows are padded to the longest so far, and the loop runs to the true length: a shorter window runs
in the same program.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int, PyTree

from .._constraints.base import check_constraints, feasible
from .._engines.nonfinite import NonFiniteError
from .._engines.products import pushforward
from .._outer.update import Outer
from .._problem.arguments import Compiled, Structure, copied, flatten, unflatten
from .._problem.batches import FullBatch, Minibatches
from .._problem.checks import (
    as_arrays,
    check_data,
    check_hparams,
    check_leading_axis,
    check_some_number,
    describe,
    describe_tree,
    named_leaves,
)
from .._problem.problem import Problem, validated
from .._problem.sharding import TANGENTS
from .._problem.system import make_system
from .._problem.training import Training, TrainState
from .._problem.validation import noting
from .nonfinite import check_start, explain_fault
from .outcome import finish
from .window import RealTimeState, TunerSettings, Window, begin, column_norms, directions_of


class Updates:
    """The updates of a tuner with these settings."""

    def __init__(self, settings: TunerSettings, donate: bool):
        self.settings, self.donate = settings, donate
        self._arrays, self._structure = flatten(settings)
        self._checked: set[tuple] = set()  # the structures and shapes that have passed the checks
        self._longest: dict[tuple, int] = {}  # window so far, by structure and shape

    def init(self, params: PyTree, hparams: PyTree) -> RealTimeState:
        """Return the state before the first window; `NonFiniteError` where it is not finite.

        `params` are the initial parameters, which are copied, or a function of the hyperparameters.
        """
        settings, hparams = self.settings, check_hparams(hparams)
        constraints = check_constraints(settings.constraints, hparams)
        if not _is_traced(hparams):
            check_start((), hparams)
            hparams = feasible(constraints, hparams)
        problem = Problem(settings.dynamics, settings.objective, params, FullBatch(None, 1))
        with noting("init(params, hparams) of the dynamics", hparams=hparams):
            system = make_system(problem, hparams, whole=True)
            s_0, Z = pushforward(system.initial, (hparams,), (directions_of(hparams)[0],))
        train, none, nothing = system.restore(s_0), jnp.zeros((), jnp.int32), jnp.full((), -jnp.inf)
        if not _is_traced((train, hparams)):
            check_start(train, hparams)
        state = RealTimeState(
            train=train,
            hparams=hparams,
            Z=Z,
            opt_state=Outer(settings.optimizer, constraints).init(hparams),
            window=none,
            first=nothing,
            highest=nothing,
            skipped_last=jnp.array(False),
            dropped=none,
            alive=none,
        )
        state = copied(as_arrays(state))  # a weak type would compile a second time
        return state if settings.mesh is None else _placed(state, settings.mesh)

    def dispatch(
        self, state: RealTimeState, window: PyTree, validation: PyTree, *, donate: bool = True
    ) -> tuple[RealTimeState, dict[str, PyTree], Bool[Array, ""]]:
        """Begin an update; return, without waiting, the next state, the log, and if it is a fault."""
        if not isinstance(state, RealTimeState):
            raise TypeError(
                f"`update` takes the state that `init` or `update` returned, got {describe(state)}."
            )
        window, validation = as_arrays(window, "window"), as_arrays(validation, "validation")
        if _is_traced((state, window, validation)):
            everything = tuple(named_leaves(state.hparams, "hparams"))
            check_state(self.settings, state)
            problem = self.settings.problem(state.train, window, validation, everything)
            validated(problem, state.hparams)
            return _run_window(self.settings, state, problem, jnp.array(problem.steps))
        arguments = self._flat(state, window, validation)
        new, log, fault = (_donating if donate else _keeping)(*arguments)
        return unflatten(arguments[2], new), log, fault

    def lower(self, state: RealTimeState, window: PyTree, validation: PyTree) -> jax.stages.Lowered:
        """Return the program of an update, for its memory and cost analysis."""
        program = _donating if self.donate else _keeping
        return program.lower(*self._flat(state, *as_arrays((window, validation))))

    def problem(self, state: RealTimeState, window: PyTree, validation: PyTree) -> Problem:
        """Return the training over a window as a problem of its own, from this state on."""
        names = list(named_leaves(state.hparams, "hparams"))
        if state.window == 0:  # then Z says what the initial state depends on
            flat, unravel = ravel_pytree(state.hparams)
            norms = jax.tree.leaves(unravel(column_norms(state.Z).astype(flat.dtype)))
            names = [name for name, norm in zip(names, norms, strict=True) if jnp.any(norm != 0)]
        return self.settings.problem(state.train, window, validation, tuple(names))

    def fault(self, state: RealTimeState, window: PyTree, validation: PyTree) -> NonFiniteError:
        """Return the error for a window that failed, from the state before it."""
        problem = self.settings.problem(state.train, window, validation)
        why = explain_fault(problem, state.train, state.hparams, int(state.window))
        error = NonFiniteError(why)
        error.state = state
        return error

    def _flat(self, state: RealTimeState, window: PyTree, validation: PyTree) -> tuple:
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
            validated(self.problem(state, window, validation), state.hparams)
            self._checked.add(key)
        return self._structure, structure, state_structure, donated, self._arrays, others, steps

    def _padded(self, window: PyTree) -> tuple[PyTree, Int[np.ndarray, ""]]:
        """Return the window padded to the longest like it so far, and its true length."""
        if isinstance(window, FullBatch):
            return FullBatch(window.data, 1), np.asarray(window.steps, np.int32)
        xs = window.indices if isinstance(window, Minibatches) else window
        steps = check_leading_axis(xs, "window", "the minibatches") if jax.tree.leaves(xs) else 0
        if steps == 0:
            raise ValueError(
                f"the window is empty:\n{describe_tree(xs, 'window')}\nLeave it out. Where steps need "
                "no data, give `FullBatch(None, steps=...)`."
            )
        leaves, structure = flatten(xs)
        key = structure, tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves)
        if key not in self._longest:
            check_some_number(xs, "window")
        length = self._longest[key] = max(self._longest.get(key, 0), steps)
        if length > steps:
            xs = jax.tree.map(functools.partial(_pad, length), xs)
            window = window.at(xs) if isinstance(window, Minibatches) else xs
        return window, np.asarray(steps, np.int32)


def _pad(length: int, x: Array | np.ndarray) -> Array | np.ndarray:
    more = (length - len(x), *x.shape[1:])
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.concatenate([x, jnp.broadcast_to(x[:1], more)])
    if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1:  # it stays where it is
        return jax.device_put(jnp.concatenate([x, jnp.zeros(more, x.dtype)]), x.sharding)
    x = np.asarray(x)  # by NumPy, which compiles nothing
    return np.concatenate([x, np.zeros(more, x.dtype)])


def _run_window(
    tuner: TunerSettings, state: RealTimeState, problem: Problem, count: Int[Array, ""]
) -> tuple[RealTimeState, dict[str, PyTree], Bool[Array, ""]]:
    window = Window(tuner, problem, make_system(problem, state.hparams, whole=True), state)
    end = window.run(begin(tuner, state), count)
    return finish(window, end, end.steps - 1)


def _program(
    settings_structure: Structure,
    structure: Structure,
    state_structure: Structure,
    donated: list[Array],
    settings_arrays: list[Array],
    others: list[Array],
    count: Int[Array, ""],
) -> tuple[list[Array], dict[str, PyTree], Bool[Array, ""]]:
    tuner = unflatten(settings_structure, settings_arrays)
    state = unflatten(state_structure, donated)
    problem = tuner.problem(state.train, *unflatten(structure, others))
    new, log, fault = _run_window(tuner, state, problem, count)
    return flatten(new)[0], log, fault


_donating = Compiled(_program, 3, donate_argnums=0)
_keeping = Compiled(_program, 3)


def check_state(settings: TunerSettings, state: RealTimeState) -> None:
    """Raise where a state is not one of this tuner: its optimizers' states, and the columns of Z."""
    outer = Outer(settings.optimizer, check_constraints(settings.constraints, state.hparams))
    expected = {"opt_state": jax.eval_shape(outer.init, state.hparams)}
    dynamics, train = settings.dynamics, state.train
    if isinstance(dynamics, Training) and isinstance(train, TrainState):
        begun = (train.params, train.model_state) if dynamics.has_state else train.params
        expected["train"] = eqx.filter_eval_shape(dynamics.init, begun, state.hparams)
    if state.Z is not None:
        m = sum(leaf.size for leaf in jax.tree.leaves(state.hparams))
        moving = eqx.filter(train, eqx.is_inexact_array)
        expected["Z"] = jax.tree.map(lambda s: jax.ShapeDtypeStruct((m, *s.shape), s.dtype), moving)
    for name, tree in expected.items():
        now, old = (shapes_of(part, f"state.{name}") for part in (getattr(state, name), tree))
        if path := differing(now, old):
            raise ValueError(
                f"this state does not fit this tuner: {path} is {now.get(path, 'absent')}, it should "
                f"be {old.get(path, 'absent')}. Begin with `init` of this one."
            )


def shapes_of(tree: PyTree, name: str) -> dict[str, str]:
    """Return what the leaves are, by path."""
    return {path: describe(leaf) for path, leaf in named_leaves(tree, name).items()}


def differing(expected: dict[str, str], found: dict[str, str]) -> str | None:
    """Return the first path at which two results of `shapes_of` differ."""
    paths = (path for path in expected | found if expected.get(path) != found.get(path))
    return next(paths, None)


def check_not_donated(tree: PyTree) -> None:
    """Raise where an `update` has reused the memory of a state."""
    arrays = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    if any(not isinstance(array, Tracer) and array.is_deleted() for array in arrays):
        raise ValueError(
            "this state was given to an `update` that reused its memory (`donate=True`). Continue "
            "from the state that it returned, or leave `donate` out."
        )


def _placed(state: RealTimeState, mesh: Mesh) -> RealTimeState:
    """Return the state on a mesh, with the columns of Z split over `tangents`, if it has that axis."""
    m, size = sum(leaf.size for leaf in jax.tree.leaves(state.hparams)), mesh.shape.get(TANGENTS, 1)
    if m % size:
        raise ValueError(
            f"RealTime(mesh=...): the {m} columns of Z, one for each hyperparameter, cannot be split "
            f"evenly over the {size} devices of the mesh's axis 'tangents'."
        )

    def put(leaf):  # what its user has placed on the mesh stays there
        placed = getattr(leaf, "sharding", None)
        if not eqx.is_array(leaf) or (isinstance(placed, NamedSharding) and placed.mesh == mesh):
            return leaf
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))

    others = jax.tree.map(put, state._replace(Z=None))
    columns = PartitionSpec(TANGENTS) if TANGENTS in mesh.shape else PartitionSpec()
    return others._replace(Z=jax.device_put(state.Z, NamedSharding(mesh, columns)))


def _is_traced(tree: PyTree) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))

"""Real-time tuning: forward mode carried along the training itself (RTHO).

After every window (hyper-batch) of Delta minibatches, the partial hypergradient

    grad f_t = grad E(s_t) Z_t + dE/dlambda,    Z_t = A_t Z_{t-1} + B_t,

moves the hyperparameters, and the training continues with the new ones from where it is. The partial
hypergradient is that of a constant lambda: exact in the first window, an estimate after an update,
the better the slower lambda moves. So between windows Z is discounted, Z <- gamma Z, and forgets what
earlier hyperparameters did over about 1 / (1 - gamma) windows. The paper's method is gamma = 1.

A window in which training diverges is undone: the training state returns to where the window began,
Z to 0, and the hyperparameters back off in the direction that the derivative of the loss says. A
single minibatch with a loss far above all before it is passed over, as no hyperparameter is at fault.

Time: about that of 1 + 2m training runs for m hyperparameters, however many updates. Memory: Z, m
states, and one more state to return to, whatever the number of steps.
Reference: Franceschi et al., ICML 2017, Section 3.3 and Algorithm 2.
"""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from .._constraints.base import check_constraints, feasible
from .._engines.nonfinite import NonFiniteError, explain_window
from .._engines.products import pushforward
from .._files.digests import on_host
from .._outer.checks import check_optimizer
from .._outer.run import Result
from .._outer.update import Outer
from .._problem.arguments import Compiled, Structure, copied, flatten, unflatten
from .._problem.batches import FullBatch
from .._problem.checks import (
    as_arrays,
    check_count,
    check_hparams,
    check_mesh,
    describe,
    named_leaves,
)
from .._problem.equality import reused
from .._problem.problem import Problem, validated
from .._problem.sharding import place_state
from .._problem.system import make_system
from .._problem.training import Training, TrainState
from .._problem.validation import noting
from .horizon import begun, rates_of
from .relative_adam import relative_adam
from .stream import (
    Misfit,
    Shapes,
    check_data,
    differences,
    padded,
    remember,
    run_stream,
    shapes_of,
)
from .tangents import tangents_of
from .warn import warn_of_dropped
from .window import (
    RealTimeState,
    TunerSettings,
    column_norms,
    directions_of,
    not_finite,
    number,
    run_window,
)

DEFAULT_OPTIMIZER = relative_adam()


class RealTime:
    """Tunes hyperparameters while the model trains, one update per window of minibatches.

    Args:
        dynamics: `Training`, or any other dynamics.
        objective: the error `E(state, hparams, validation) -> scalar`, or a dict of them by
            top-level hyperparameter name, each of which gets the whole `validation`.
        optimizer: the outer Optax optimizer; `relative_adam()` by default, which needs no tuning.
        constraints: as in `minimize`; give at least `{"lr": NonNegative()}` and, for a momentum,
            `Box(0.0, 0.999)`.
        discount: gamma in (0, 1], the share of Z that a window takes over from the one before. With 1
            the hypergradient is exact as long as the hyperparameters stay as they are.
        rollback: undo a window that takes the validation error to more than this many times what it
            was before, or in which the training loss spikes: a quarter above the highest that a window
            has begun with, and above what it was on the same minibatch before the window. A single
            minibatch whose loss is over ten times that highest, also before the window, is an outlier
            and passed over (of two in a row the second counts). None: neither of them; a loss that is
            not finite is then an error.
        reset: set Z to 0 at the beginning of every `reset` windows.
        z_cap: after each window, scale the columns of Z down to this norm.
        clip: scale the hypergradient down to this norm.
        chunk: columns of Z in work at a time, where there are many hyperparameters.
        tangents: what Z is computed from, cheaper than the training, which stays as it is: a share of
            the minibatch's rows, `0.25` say (others at each step, evenly spread; for a loss that is a
            mean over them), a floating-point type for the loss, `jnp.bfloat16` say (with `Training`),
            or both, `(0.25, jnp.bfloat16)`.
        horizon: the length of the run in minibatches, where it is known. It then ends like one with a
            good schedule: hyperparameters are tuned in its first quarter, after that learning rates
            decay linearly to 0, at the cost of plain training. Where a rate comes down to a third while
            tuned, training starts again; the state at the end is that with the lowest validation
            error. Without it, tuning never ends: for a stream.
        rates: the names of the learning rates, where they have no usual one ("lr",
            "learning_rate", "step_size", "eta").
        donate: reuse the memory of the state given to `update`, which is then deleted: it saves one
            state, Z included. `run` does so with its own states in any case.
        mesh: `foretune.mesh(data=..., tangents=...)`: `init` places the state on it, the columns of Z
            split over `tangents`, all else on every device. Place batches by `foretune.shard`.

    The defaults were chosen over the tasks of `benchmarks/realtime_quality.py`;
    `RealTime.paper(...)` has the paper's setting. Where updates can be trusted is what
    `foretune.Bias` measures.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> tuner = ft.RealTime(
    ...     ft.Training(lambda w, h, x: jnp.mean((w - x) ** 2), lambda h: optax.sgd(h["lr"])),
    ...     objective=lambda state, h, x: jnp.mean((state.params - x) ** 2),
    ...     constraints={"lr": ft.NonNegative()})
    >>> state = tuner.init(jnp.array(0.0), {"lr": jnp.array(0.0)})  # a null start
    >>> for _ in range(30):
    ...     state, log = tuner.update(state, jnp.ones((5, 2)), jnp.ones(2))
    >>> float(log["value"]) < 1e-3, float(state.hparams["lr"]) > 0.01
    (True, True)
    """

    def __init__(
        self,
        dynamics: Any,
        objective: Any,
        optimizer: Any = None,
        *,
        constraints: Any = None,
        discount: Any = 0.9,
        rollback: Any = 1.5,
        reset: Any = None,
        z_cap: Any = None,
        clip: Any = None,
        chunk: Any = None,
        tangents: Any = None,
        horizon: Any = None,
        rates: Any = None,
        donate: Any = False,
        mesh: Any = None,
    ):
        check_optimizer(optimizer)
        # The same checks and wrapping as for a problem that is never run.
        problem = Problem(dynamics, objective, None, FullBatch(None, steps=1))
        discount = number(
            "discount", discount, lambda gamma: 0 < gamma <= 1, "it must lie in (0, 1]"
        )
        if rollback is not None:
            rollback = number("rollback", rollback, lambda r: r > 1, "a factor over 1, or None")
        if z_cap is not None:
            z_cap = number("z_cap", z_cap, lambda norm: norm > 0, "a norm over 0, or None")
        if clip is not None:
            clip = number("clip", clip, lambda norm: norm > 0, "a norm over 0, or None")
        for name, count in {"reset": reset, "chunk": chunk, "horizon": horizon}.items():
            if count is not None:
                check_count(count, f"RealTime({name}={count!r})")
        if rates is not None and not (
            isinstance(rates, tuple | list) and rates and all(isinstance(r, str) for r in rates)
        ):
            raise TypeError(
                f"RealTime(rates={rates!r:.60}): names of learning rates, `('lr',)` say."
            )
        if rates is not None and horizon is None:
            raise ValueError("RealTime(rates=...) says what decays towards `horizon`: give both.")
        if not isinstance(donate, bool):
            raise TypeError(f"RealTime(donate={donate!r:.60}): True or False.")
        dtype, share = tangents_of(tangents)
        if dtype is not None and not problem.dynamics.offers("in_precision"):
            raise TypeError(
                f"RealTime(tangents={dtype}) needs a dynamics with the method `in_precision`, as "
                f"`foretune.Training` has; the dynamics is {describe(dynamics)}."
            )
        if mesh is not None:
            check_mesh(mesh, "RealTime(mesh=...)")
        optimizer = DEFAULT_OPTIMIZER if optimizer is None else optimizer
        if clip is not None:
            optimizer = optax.chain(optax.clip_by_global_norm(clip), optimizer)
        self.settings = TunerSettings(
            problem.dynamics,
            problem.objective,
            reused(optimizer),
            dict(constraints) if isinstance(constraints, Mapping) else constraints,
            discount,
            rollback,
            None if reset is None else int(reset),
            z_cap,
            None if chunk is None else int(chunk),
            dtype,
            share,
            mesh,
            None if horizon is None else int(horizon),
            None if rates is None else tuple(rates),
        )
        self._arrays, self._structure = flatten(self.settings)
        self.donate = donate
        self._checked: dict[Any, None] = {}  # the structures and shapes that have passed the checks
        self._shapes = Shapes()

    @classmethod
    def paper(cls, dynamics: Any, objective: Any, *, constraints: Any = None) -> "RealTime":
        """Return the paper's setting: Adam(0.005) on the hyperparameters, Z never forgotten.

        >>> import foretune as ft, jax.numpy as jnp, optax
        >>> tuner = ft.RealTime.paper(
        ...     ft.Training(lambda w, h, x: (w - x) ** 2, lambda h: optax.sgd(h["lr"])),
        ...     objective=lambda state, h, x: (state.params - x) ** 2)
        >>> tuner.settings.discount, tuner.settings.rollback
        (1.0, None)
        """
        adam = optax.adam(0.005)
        return cls(dynamics, objective, adam, constraints=constraints, discount=1.0, rollback=None)

    def init(self, params: PyTree, hparams: PyTree) -> RealTimeState:
        """Return the state before the first window.

        `params` are the initial parameters, or a function of the hyperparameters that returns them.
        They are copied: `update` does not touch yours.

        Raises:
            NonFiniteError: where a hyperparameter or a parameter is NaN or infinite.
        """
        settings, hparams = self.settings, check_hparams(hparams)
        constraints = check_constraints(settings.constraints, hparams)
        if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(hparams)):
            _check_start((), hparams)
            hparams = feasible(constraints, hparams)
        problem = Problem(settings.dynamics, settings.objective, params, FullBatch(None, 1))
        with noting("init(params, hparams) of the dynamics", hparams=hparams):
            system = make_system(problem, hparams, whole=True)
            s_0, Z = pushforward(system.initial, (hparams,), (directions_of(hparams)[0],))
        nothing = jnp.full((), -jnp.inf)
        opt_state = Outer(settings.optimizer, constraints).init(hparams)
        window = jnp.zeros((), jnp.int32)
        train, none = system.restore(s_0), jnp.zeros((), jnp.int32)
        nothing_yet = window, nothing, nothing, jnp.array(False), none, none
        if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((train, hparams))):
            _check_start(train, hparams)
        course = None
        if settings.horizon is not None:
            rates_of(hparams, settings.rates)  # raises where there is none
            course = begun(train, hparams)
        state = RealTimeState(train, hparams, Z, opt_state, *nothing_yet, course)
        state = copied(as_arrays(state))  # a weak type would compile a second time
        self._shapes.note(state=state)
        return state if settings.mesh is None else place_state(state, settings.mesh)

    def update(
        self, state: Any, window: PyTree, validation: PyTree
    ) -> tuple[RealTimeState, dict[str, Any]]:
        """Train over one window of minibatches, then update the hyperparameters.

        Args:
            state: the state, from `init` or the last update. With `donate` its memory is reused.
            window: minibatches stacked on a leading axis, as `windows` makes them, or `Minibatches`,
                or `FullBatch`. A window shorter than one before it runs in the same program.
            validation: what the objective gets as its third argument.

        Returns:
            The new state, and the log, a dict: `value` and `hypergradient` after the window at the
            `hparams` it ran with, the norm of Z by hyperparameter `z_norm`, the mean training
            `loss` (None for a dynamics that reports none), whether the window was `undone`, how many
            of its minibatches were passed over as `outliers`, and whether a derivative was `dropped`:
            one that is not finite where the training itself is counts as 0, and there is a warning,
            also inside `jit` (`nonfinite` has, for each leaf, the first minibatch after which, or -1).

        Raises:
            NonFiniteError: where something is not finite, with the window and the leaf. The state
                before the window is its attribute `state`, to continue from (its Z begins at 0 again).
        """
        new, log, fault = self.dispatch(state, window, validation, donate=self.donate)
        if not isinstance(fault, Tracer) and fault:
            raise self.fault(new, window, validation)
        warn_of_dropped(new, log, stacklevel=2)
        return new, log

    def run(
        self,
        train_stream: Any,
        validation_stream: Any,
        *,
        params: PyTree,
        hparams: PyTree,
        steps: Any = None,
        window: Any = 10,
        callbacks: Any = (),
        stop: Any = None,
        evaluate: Any = None,
        score: Any = None,
    ) -> Result:
        """Tune over a stream of minibatches, until it ends.

        Args:
            train_stream: any iterable of minibatches of one shape, of any length, or `Minibatches`.
                The next window is read, and sent to the device, while the current one runs.
            validation_stream: an iterable of validation batches, one for each window. It is gone
                through again where it can be (a list, a loader); where it cannot (a generator), the
                run ends with it. `itertools.repeat(batch)` gives the same each time.
            params: the initial parameters, as for `init`.
            hparams: the initial hyperparameters.
            steps: the number of updates, hence of windows; until the stream ends by default.
            window: the number of minibatches in a window.
            callbacks: as in `minimize`; with `Checkpoint` the run resumes.
            stop: stopping rules, as in `minimize`, and `foretune.Vanished("lr")`.
            evaluate: `evaluate(state.train, hparams) -> dict` of further scalars.
            score: what `best` is lowest in, as a function of a record; by default its `value`.

        Returns:
            A `Result`; its `state` is the tuner's state, with the trained weights in `state.train`.
            `history` has a record for each window: `step` (from 1), `value`, `gradient_norm`,
            `loss`, `hparams` (those it ran with), `z_norm`, `undone`, `outliers`, `dropped`,
            with a horizon whether it was `tuned` and training `restarted`, and what `evaluate` adds.

        Where ten windows in a row are undone, a `RuntimeWarning` says so. Ctrl-C, or SIGTERM, ends the
        run after the current window. `NonFiniteError` has the `run` until then and the `state` before
        the window.

        >>> import foretune as ft, itertools, jax.numpy as jnp, numpy as np, optax
        >>> tuner = ft.RealTime(
        ...     ft.Training(lambda w, h, x: jnp.mean((w - x) ** 2), lambda h: optax.sgd(h["lr"])),
        ...     objective=lambda state, h, x: jnp.mean((state.params - x) ** 2),
        ...     constraints={"lr": ft.NonNegative()})
        >>> stream = (np.ones(4, np.float32) for _ in range(205))
        >>> result = tuner.run(stream, itertools.repeat(np.ones(4, np.float32)), window=10,
        ...                    params=jnp.array(0.0), hparams={"lr": jnp.array(0.001)})
        >>> len(result.history), result.stopped
        (21, 'the training stream ended')
        """
        return run_stream(
            self,
            train_stream,
            validation_stream,
            params=params,
            hparams=hparams,
            steps=steps,
            window=window,
            callbacks=callbacks,
            stop=stop,
            evaluate=evaluate,
            score=score,
        )

    def dispatch(
        self, state: Any, window: PyTree, validation: PyTree, *, donate: bool = True
    ) -> tuple[RealTimeState, dict[str, Any], Any]:
        """Begin an update without waiting for it; the third result says whether it failed.

        The state's memory is reused, unless `donate` is False.
        """
        if not isinstance(state, RealTimeState):
            raise TypeError(
                "`update` takes the state that `init` or the last `update` returned, got "
                f"{describe(state)}."
            )
        window, validation = as_arrays(window, "window"), as_arrays(validation, "validation")
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((state, window, validation))):
            everything = tuple(named_leaves(state.hparams, "hparams"))
            with self._shapes.explaining(state=state, window=window, validation=validation):
                check_state(self.settings, state)
                problem = self.settings.problem(state.train, window, validation, everything)
                validated(problem, state.hparams)
            return run_window(self.settings, state, problem, jnp.array(problem.steps))
        arguments = self._flat(state, window, validation)
        new, log, fault = (_donating if donate else _keeping)(*arguments)
        return unflatten(arguments[2], new), log, fault

    def lower(self, state: RealTimeState, window: PyTree, validation: PyTree) -> jax.stages.Lowered:
        """Return the program of an update, for its memory and cost analysis."""
        return (_donating if self.donate else _keeping).lower(
            *self._flat(state, *as_arrays((window, validation)))
        )

    def problem(self, state: RealTimeState, window: PyTree, validation: PyTree) -> Problem:
        """Return the training over a window as a problem of its own, from this state on."""
        names = named_leaves(state.hparams, "hparams")
        if state.window == 0:  # then Z says what the initial state depends on
            flat, unravel = ravel_pytree(state.hparams)
            norms = jax.tree.leaves(unravel(column_norms(state.Z).astype(flat.dtype)))
            moved = zip(names, norms, strict=True)
            names = [name for name, norm in moved if jnp.any(norm != 0)]
        return self.settings.problem(state.train, window, validation, tuple(names))

    def fault(self, state: RealTimeState, window: PyTree, validation: PyTree) -> NonFiniteError:
        """Return the error for a window that failed, from the state before it."""
        problem = self.settings.problem(state.train, window, validation)
        begun = _not_finite(state.train, state.hparams, "state.train")
        error = NonFiniteError(
            f"not finite: what window {int(state.window)} (counted from 0) begins with. {begun}"
            if begun
            else explain_window(problem, state.hparams, int(state.window))
        )
        error.state = state
        return error

    def _flat(self, state: RealTimeState, window: PyTree, validation: PyTree) -> tuple[Any, ...]:
        """Return the arguments of the program, after the checks that new shapes need."""
        donated, state_structure = _flat_state(state)
        check_data(window, "window")
        longer, steps = padded(self._structure, window)
        others, structure = flatten((longer, validation))
        shapes = tuple((array.shape, array.dtype) for array in (*donated, *others))
        key = state_structure, structure, shapes
        if key not in self._checked:
            check_data(validation, "validation")
            with self._shapes.explaining(state=state, window=window, validation=validation):
                check_state(self.settings, state)
                validated(self.problem(state, window, validation), state.hparams)
            remember(self._checked, key, None)
        return self._structure, structure, state_structure, donated, self._arrays, others, steps


def _program(
    settings_structure: Structure,
    structure: Structure,
    state_structure: Structure,
    donated: list[Array],
    settings_arrays: list[Array],
    others: list[Array],
    count: Any,
) -> tuple[list[Array], dict[str, Any], Array]:
    tuner = unflatten(settings_structure, settings_arrays)
    state = unflatten(state_structure, donated)
    window, validation = unflatten(structure, others)
    problem = tuner.problem(state.train, window, validation)
    new, log, fault = run_window(tuner, state, problem, count)
    return flatten(new)[0], log, fault


_donating = Compiled(_program, 3, donate_argnums=0)
_keeping = Compiled(_program, 3)


def _not_finite(train: PyTree, hparams: PyTree, name: str) -> str | None:
    """Return which leaf of a start is not finite, or None."""
    for path, where in not_finite(train, hparams, name).items():
        if wrong := int(jnp.sum(where)):
            leaf = (named_leaves(hparams, "hparams") | named_leaves(train, name))[path]
            values, at = on_host((leaf, where))
            shown = ", ".join(map(str, np.unique(values[at]).tolist()))
            return f"{path} ({describe(leaf)}) is {shown} in {wrong} of {where.size} entries."
    return None


def _check_start(train: PyTree, hparams: PyTree) -> None:
    """Raise where the initial parameters or hyperparameters are not finite."""
    name = "" if isinstance(train, TrainState) else "params"  # their paths: `params['w']` in both
    if found := _not_finite(train, hparams, name):
        raise NonFiniteError(
            f"not finite: {found.removeprefix('.')} A run cannot start from there: every window "
            "would be undone."
        )


def check_state(settings: TunerSettings, state: RealTimeState) -> None:
    """Raise where a state is not one of this tuner: its optimizers' states, and the columns of Z."""
    outer = Outer(settings.optimizer, check_constraints(settings.constraints, state.hparams))
    expected = {"opt_state": jax.eval_shape(outer.init, state.hparams)}
    if isinstance(settings.dynamics, Training) and isinstance(state.train, TrainState):
        params, _, model_state, _ = state.train
        begun = (params, model_state) if settings.dynamics.has_state else params
        expected["train"] = eqx.filter_eval_shape(settings.dynamics.init, begun, state.hparams)
    if state.Z is not None:
        m = sum(leaf.size for leaf in jax.tree.leaves(state.hparams))
        moving = eqx.filter(state.train, eqx.is_inexact_array)
        expected["Z"] = jax.tree.map(lambda s: jax.ShapeDtypeStruct((m, *s.shape), s.dtype), moving)
    for name, tree in expected.items():
        given = shapes_of(getattr(state, name), f"state.{name}")
        if lines := differences(given, shapes_of(tree, f"state.{name}"), "it should be"):
            raise Misfit(
                f"this state does not fit this tuner:\n{lines}\nIt is that of a tuner with another "
                "optimizer, other hyperparameters or other parameters. Begin with `init` of this one."
            )


def _flat_state(state: RealTimeState) -> tuple[list[Any], Structure]:
    arrays, structure = flatten(state)
    if any(isinstance(array, jax.Array) and array.is_deleted() for array in arrays):
        raise ValueError(
            "this state has been given to an `update` that reused its memory (`donate=True`). Continue "
            "from the state that it returned, or leave `donate` out."
        )
    return arrays, structure

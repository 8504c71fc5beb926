"""Real-time tuning as an optimizer, for a training loop that is there already.

The loop continues to call `update` once for each minibatch; every few steps the hyperparameters move.
It is `RealTime` with its window spread over calls.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, PyTree

from .._engines.nonfinite import NonFiniteError
from .._engines.products import stack_columns, unstack
from .._problem.arguments import Rest, copied, flatten
from .._problem.checks import (
    as_arrays,
    check_count,
    check_flag,
    check_key,
    check_numbers,
    check_signature,
    describe,
    named_leaves,
)
from .._problem.problem import validated
from .._problem.system import make_system
from .._problem.training import Training
from .constants import check_callable, constraints_of, start_of
from .stream import Shapes, check_data, readable, remember
from .tuner import RealTime, check_state
from .warn import Dropped, tell
from .window import Progressing, RealTimeState, begin, finish, if_tuning, make_step

SAY = -2  # that a derivative was dropped
RUNS = 8  # of one optimizer at the same time, whose calls are remembered


class TunedState(NamedTuple):
    """Where a tuned training is: `params`, `hparams` and the `log` of their last update.

    Its leaves are arrays, so that it can pass through `jax.jit`, whatever the parameters hold.
    """

    log: dict[str, Any]
    """The log of the last window, as of `RealTime.update`, and whether it was `dropped`; NaN before."""
    anchor: RealTimeState
    """The arrays of the tuner's state at the beginning of the window, without its Z."""
    window: Progressing
    """The window under way."""
    frozen: PyTree
    """The parameters that are not trained; None without `trainable`."""
    rest: Rest
    """What the tuner's state holds besides arrays."""

    @property
    def params(self) -> PyTree:
        """The current parameters, those that are not trained included."""
        return _whole(self._train().params, self.frozen)

    @property
    def model_state(self) -> PyTree:
        """The current model state, with `has_state`."""
        return self._train().model_state

    @property
    def hparams(self) -> PyTree:
        """The current hyperparameters, by name."""
        return self.anchor.hparams

    def begun(self) -> RealTimeState:
        """Return the whole state of the tuner at the beginning of the window, without its Z."""
        return eqx.combine(self.anchor, self.rest.tree)

    def _train(self) -> Any:
        return eqx.combine(self.window.s, self.rest.tree.train)


class Tuned(NamedTuple):
    """A pair of pure functions, like an Optax optimizer."""

    init: Callable[[PyTree], TunedState]
    """`init(params) -> state`"""
    update: Callable[[TunedState, PyTree, PyTree], tuple[TunedState, Array]]
    """`update(state, batch, validation) -> (state, loss)`"""


def tuned(
    optimizer: Any,
    loss: Any,
    error: Any = None,
    *,
    every: Any = 10,
    horizon: Any = None,
    constraints: Any = None,
    loss_hparams: Any = None,
    has_state: Any = False,
    key: Any = None,
    trainable: Any = None,
    donate: Any = False,
    options: Any = None,
    **hparams: Any,
) -> Tuned:
    """Return an optimizer that tunes its own constants on validation data, as it trains.

    Args:
        optimizer: a function of the constants to be tuned that returns an Optax optimizer:
            `optax.sgd`, `optax.adamw`, `functools.partial(optax.adam, eps_root=1e-8)`.
        loss: your loss, `loss(params, batch)`.
        error: the validation error, `error(params, validation)`; the loss by default.
        every: the minibatches between two updates of the constants.
        horizon: the number of minibatches you will train for, if you know it: constants are tuned in
            its first quarter, then learning rates decay linearly to 0, as in `RealTime`. With it,
            this takes the place of an optimizer with a schedule.
        constraints: a dict of constraints by name, as in `RealTime`; None for any number. The usual
            names need none: Optax's, and `lr`, `wd`, `beta1` and the like. Learning rates, decays and
            epsilons are non-negative, momenta and averages in [0, 1). Other names need one.
        loss_hparams: constants of the loss to be tuned as well, a dict with their initial values. The
            loss is then called with a dict of their current ones, `loss(params, hparams, batch)`.
        has_state: whether the loss takes and returns a model state (batch statistics and the like):
            `loss(params, batch, model_state) -> (loss, model_state)`. Then there are
            `init((params, model_state))`, `error(params, validation, model_state)` and
            `state.model_state`.
        key: a random key, for dropout say. The loss is then called with a `key=` of each step.
        trainable: which parameters are trained, as a prefix of them with True and False, or a function
            from the parameters to it. The others stay as they are, and have no Z.
        donate: reuse the memory of the state given to `update`, which is then deleted: it saves one
            training state, and its copying. For a big model, where no earlier state is needed.
        options: further options of `RealTime`.
        **hparams: the constants to be tuned, with their initial values.

    `update` returns the new state and the loss of the minibatch. It is compiled, and pure: inside your
    own `jax.jit` it has less overhead. It does not wait for the device. The parameters may be
    any pytree, an Equinox model for instance. A window whose loss diverges is undone. One in which
    something else is not finite, the data for instance, is dropped, and training continues from
    where the window began; there is a `NonFiniteError`, at the latest `every` calls later, whose
    `state` is the one to continue from. Inside `jit` there is no error, only `state.log["dropped"]`.
    Where only a derivative is not finite, training continues, and a warning says so, inside `jit` too.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> loss = lambda w, x: jnp.mean((w - x) ** 2)
    >>> optimizer = ft.tuned(optax.sgd, loss, learning_rate=1e-4, momentum=0.5)
    >>> state = optimizer.init(jnp.array(0.0))
    >>> for step in range(300):
    ...     state, value = optimizer.update(state, jnp.ones(4), jnp.ones(4))
    >>> round(float(state.params), 2), float(state.hparams["learning_rate"]) > 1e-3
    (1.0, True)

    A constant of the loss beside one of the optimizer, and a parameter that stays as it is:

    >>> def penalised(p, h, x):
    ...     return loss(p["w"] + p["b"], x) + h["l2"] * p["w"] ** 2
    >>> optimizer = ft.tuned(
    ...     optax.sgd, penalised, lambda p, x: loss(p["w"] + p["b"], x),
    ...     learning_rate=0.1, loss_hparams={"l2": 0.1}, trainable={"w": True, "b": False})
    >>> state = optimizer.init({"w": jnp.array(0.0), "b": jnp.array(2.0)})
    >>> for step in range(50):
    ...     state, value = optimizer.update(state, jnp.ones(4), jnp.ones(4))
    >>> float(state.params["b"]), sorted(state.hparams), float(state.hparams["l2"]) < 0.1
    (2.0, ['l2', 'learning_rate'], True)
    """
    check_count(every, f"tuned(every={every!r})")
    check_flag(has_state, "tuned(has_state=...)")
    check_flag(donate, "tuned(donate=...)")
    if key is not None:
        check_key(key, "tuned(key=...)")
    if trainable is not None:
        _check_trainable(trainable, function=True)
    dicts = {"constraints": constraints, "options": options, "loss_hparams": loss_hparams}
    for name, given in dicts.items():
        if not (given is None or isinstance(given, Mapping)):
            raise TypeError(f"tuned({name}=...) must be a dict, got {describe(given)}.")
    for name in {"donate", "horizon"} & set(options or ()):
        raise TypeError(f"tuned(options={{{name!r}: ...}}): give `tuned({name}=...)`.")
    of_loss = loss_hparams or {}
    # How the two are called, which depends on what there is.
    carried = ", model_state" if has_state else ""
    form = "loss(params{}, batch{}{})".format(
        ", hparams" if of_loss else "", carried, ", key=..." if key is not None else ""
    )
    check_callable(loss, form)
    check_signature(loss, form, () if key is None else ("key",))
    if error is None and form != "loss(params, batch)":
        raise TypeError(
            f"tuned needs an `error(params, validation{carried})` here: a loss with `loss_hparams`, "
            "`has_state` or `key` is not what a model is judged by. Write it as for a test, without "
            "dropout, smoothing or new batch statistics."
        )
    error = loss if error is None else error
    check_callable(error, f"error(params, validation{carried})")
    check_signature(error, f"error(params, validation{carried})")
    start = start_of(optimizer, hparams, of_loss)

    def inner_loss(params, h, data, *model_state, **key):
        batch, frozen = _parted(data, trainable)
        own = ({name: h[name] for name in of_loss},) if of_loss else ()
        return loss(_whole(params, frozen), *own, batch, *model_state, **key)

    def objective(state, h, data):
        validation, frozen = _parted(data, trainable)
        model_state = (state.model_state,) if has_state else ()
        return error(_whole(state.params, frozen), validation, *model_state)

    def inner_optimizer(h):
        return optimizer(**{name: h[name] for name in hparams})

    tuner = RealTime(
        Training(inner_loss, inner_optimizer, has_state=has_state, key=key),
        objective,
        constraints=constraints_of(start, constraints or {}),
        horizon=horizon,
        **(options or {}),
    )
    settings = tuner.settings
    few = unstack if settings.chunk is None and settings.mesh is None else lambda Z: Z

    def beginning(state: RealTimeState) -> tuple[RealTimeState, Progressing]:
        """Return the arrays of a state without its Z, and the window that begins there."""
        window = begin(settings, state)
        anchor = eqx.filter(state._replace(Z=None), eqx.is_array)
        return anchor, window._replace(Z=few(window.Z))

    def init(params: PyTree) -> TunedState:
        if has_state and not (isinstance(params, tuple) and len(params) == 2):
            raise TypeError(
                "tuned(has_state=True) starts from a pair, `init((params, model_state))`; got "
                f"{describe(params)}."
            )
        weights, model_state = params if has_state else (params, None)
        weights, frozen = _divided(weights, trainable)
        state = tuner.init((weights, model_state) if has_state else weights, start)
        shapes.note(state=state._replace(Z=None))
        nan = jnp.full((), jnp.nan, jnp.result_type(float))
        log = {
            "value": nan,
            "hypergradient": jax.tree.map(lambda h: jnp.full_like(h, jnp.nan), state.hparams),
            "hparams": state.hparams,
            "z_norm": dict.fromkeys(start, nan),
            "undone": jnp.array(False),
            "outliers": jnp.zeros((), jnp.int32),
            "dropped": jnp.array(False),
            "tuned": jnp.array(True),
            "restarted": jnp.array(False),
        }
        # No two leaves share memory, so that the state can be donated.
        rest = Rest(state._replace(Z=None))
        return copied(TunedState(log, *beginning(state), frozen, rest))

    shapes = Shapes()
    checked: dict[Any, None] = {}
    unseen = _Unseen(every)

    def check(state: TunedState, batch: PyTree, validation: PyTree) -> None:
        if set(state.hparams) != set(start):
            raise ValueError(
                f"this state is of another optimizer: it has the constants {sorted(state.hparams)}, "
                f"this one tunes {sorted(start)}. Begin with `init` of this one."
            )
        if (state.frozen is None) != (trainable is None):
            raise ValueError(
                "this state is of another optimizer: one of the two has `trainable`, the other has "
                "not. Begin with `init` of this one."
            )
        anchor = state.begun()

        def fit(frozen):
            problem = settings.problem(anchor.train, *given(batch, validation, frozen))
            validated(problem, state.hparams)

        with shapes.explaining(state=anchor, batch=batch, validation=validation):
            check_state(settings, anchor)
            jax.eval_shape(fit, state.frozen)  # which would be copied else

    def given(batch: PyTree, validation: PyTree, frozen: PyTree) -> tuple[PyTree, PyTree]:
        """Return the window of one minibatch, and the validation data, with what is not trained."""
        if trainable is not None:
            batch, validation = _Beside(batch, frozen), _Beside(validation, frozen)
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], batch), validation

    def update(state: Any, batch: PyTree, validation: PyTree) -> tuple[TunedState, Array]:
        if not isinstance(state, TunedState):
            raise TypeError(
                f"`update` takes the state that `init` or `update` returned, got {describe(state)}."
            )
        window = state.anchor.window
        if donate and not isinstance(window, Tracer) and window.is_deleted():
            raise ValueError(
                "this state has been given to an `update` that reused its memory (`donate=True`). "
                "Continue from the state that it returned, or leave `donate` out."
            )
        data = {"batch": batch, "validation": validation}
        batch, validation = jax.tree.map(readable, (batch, validation))
        arrays, structure = flatten((batch, validation))
        shape = jax.tree.structure(state), structure, tuple((x.shape, x.dtype) for x in arrays)
        if shape not in checked:
            for name, tree in data.items():
                check_data(tree, name)
                check_numbers(jax.tree.map(readable, tree), name)
            check(state, batch, validation)
            remember(checked, shape, None)
        after, value, (lost, told) = program(state[:2], state[2:], batch, validation)
        after = after._replace(frozen=state.frozen)  # which has not been through the program
        if isinstance(lost, Tracer):
            tell(after.begun().train, told)
            return after, value
        call = _Call(lost, told, batch, validation)
        if (failed := unseen.look(state, after, call)) is not None:
            window, _, batch, validation = failed
            begun = after.begun()._replace(window=window)
            error = tuner.fault(begun, *given(batch, validation, state.frozen))
            error.state = after
            raise error
        return after, value

    def program(
        first: tuple, others: tuple, batch: PyTree, validation: PyTree
    ) -> tuple[TunedState, Array, tuple[Array, Dropped]]:
        state = TunedState(*first, *others)
        anchor = state.begun()
        problem = settings.problem(anchor.train, *given(batch, validation, state.frozen))
        system = make_system(problem, anchor.hparams, whole=True)

        def step(derive: bool) -> Progressing:
            return make_step(settings, problem, system, anchor, derive)(state.window, 0)

        window = if_tuning(settings, anchor, lambda: step(True), lambda: step(False))

        def tune():
            end = window._replace(Z=stack_columns(window.Z))
            new, log, fault = finish(settings, anchor, problem, system, end, 0, every)
            told = Dropped.of(new, log)
            log = log | {"dropped": fault | log["dropped"]}
            log = {name: jax.tree.map(_as, log[name], state.log[name]) for name in state.log}
            return log, *beginning(new), fault, told

        def wait():
            told = Dropped(jnp.array(False), anchor.window, window.nonfinite)
            return state.log, state.anchor, window, jnp.array(False), told

        over = (window.steps == every) | ~window.calm
        log, new, following, fault, told = lax.cond(over, tune, wait)
        lost = jnp.where(fault, anchor.window, jnp.where(told.first, SAY, -1))
        return TunedState(log, new, following, None, state.rest), window.loss, (lost, told)

    # Not the window: its old arrays are needed until a minibatch has proved no outlier, so that to
    # write over them takes longer than to write beside them.
    program = jax.jit(program, donate_argnums=(0,) if donate else ())
    return Tuned(init, update)


class _Call(NamedTuple):
    """A call of `update` and how it ended, which the host need not know yet."""

    lost: Any  # the number of the window that was dropped, -1, or SAY
    told: Dropped  # what is said where a derivative was
    batch: PyTree
    validation: PyTree


class _Unseen:
    """The calls whose end has not been looked at: to look at the last one would be to wait for it.

    Calls that belong together, each with the state that the one before it returned, form a run.
    """

    def __init__(self, most: int):
        self.most = most  # calls of a run; then the first of them is waited for
        self.runs: dict[int, tuple[Any, deque[_Call]]] = {}

    def look(self, before: TunedState, after: TunedState, call: _Call) -> _Call | None:
        """Return a call of this run that has ended in a dropped window, if there is one."""
        _, calls = self.runs.pop(id(before.log["dropped"]), (None, deque()))
        calls.append(call)
        failed = None
        while failed is None and calls and (len(calls) > self.most or calls[0].lost.is_ready()):
            first = calls.popleft()
            failed = first if (lost := int(first.lost)) >= 0 else None
            if lost == SAY:
                tell(after.begun().train, first.told, stacklevel=3)
        if len(self.runs) >= RUNS:  # the oldest has been given up
            del self.runs[next(iter(self.runs))]
        token = after.log["dropped"]  # kept, so that no other array gets its id
        self.runs[id(token)] = token, calls
        return failed


def _check_trainable(trainable: Any, *, function: bool) -> None:
    """Raise unless it is a pytree of True and False, or a `function`."""
    leaves = named_leaves(trainable, "trainable")
    wrong = {path: leaf for path, leaf in leaves.items() if not isinstance(leaf, bool | np.bool_)}
    if not leaves or (wrong and not (function and callable(trainable))):
        path, leaf = next(iter(wrong.items()), ("trainable", trainable))
        raise TypeError(
            f"tuned(trainable=...) is a prefix of the parameters with True and False, or a function "
            f"from the parameters to it; {path} is {describe(leaf)}."
        )


def _divided(params: PyTree, trainable: Any) -> tuple[PyTree, PyTree]:
    """Return the parameters that are trained, with None for the others, and the others."""
    if trainable is None:
        return params, None
    params, flags = as_arrays(params, "params"), trainable
    if not all(isinstance(leaf, bool | np.bool_) for leaf in jax.tree.leaves(trainable)):
        flags = trainable(params)  # an Equinox model of flags can be called too
        _check_trainable(flags, function=False)
    try:
        stays = jax.tree.map(
            lambda flag, part: jax.tree.map(lambda x: eqx.is_inexact_array(x) and not flag, part),
            flags,
            params,
        )
    except ValueError as problem:
        raise ValueError(
            f"tuned(trainable=...) is no prefix of the parameters: {problem!s:.300}"
        ) from None
    frozen, trained = eqx.partition(params, stays)
    for path, leaf in named_leaves(frozen, "params").items():
        if not isinstance(leaf, Tracer) and not jnp.all(jnp.isfinite(leaf)):
            raise NonFiniteError(f"not finite: {path} ({describe(leaf)}), which is not trained.")
    if not any(map(eqx.is_inexact_array, jax.tree.leaves(trained))):
        raise ValueError(
            "tuned(trainable=...) leaves nothing to train: no floating-point array has a True."
        )
    return trained, frozen


class _Beside(NamedTuple):
    """A batch, and beside it the parameters that are not trained: so they are no state."""

    data: PyTree
    frozen: PyTree


def _whole(params: PyTree, frozen: PyTree) -> PyTree:
    return params if frozen is None else eqx.combine(params, frozen)


def _parted(data: PyTree, trainable: Any) -> tuple[PyTree, PyTree]:
    """Return the data, and the parameters that are not trained, if there are any beside them."""
    return (data, None) if trainable is None else data


def _as(new: Array, old: Array) -> Array:
    return new.astype(old.dtype)

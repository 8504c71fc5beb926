"""Real-time tuning as an optimizer, for a training loop that is there already.

The loop continues to call `update` once for each minibatch; every few steps the hyperparameters move.
It is `RealTime` with its window spread over calls.
"""

import inspect
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, PyTree

from .._problem.arguments import copied, flatten
from .._problem.checks import check_count, check_numbers, check_signature, describe
from .._problem.problem import validated
from .._problem.system import make_system
from .._problem.training import Training
from .constants import constant, constraints_of
from .stream import Shapes, check_data, readable, remember
from .tuner import RealTime, check_state
from .window import Progressing, RealTimeState, begin, finish, make_step

RUNS = 8  # of one optimizer at the same time, whose calls are remembered


class TunedState(NamedTuple):
    """Where a tuned training is: `params`, `hparams` and the `log` of their last update."""

    log: dict[str, Any]
    """The log of the last window, as of `RealTime.update`, and whether it was `dropped`; NaN before."""
    anchor: RealTimeState
    """The tuner's state at the beginning of the window, without its Z."""
    window: Progressing
    """The window under way."""

    @property
    def params(self) -> PyTree:
        """The current parameters."""
        return eqx.combine(self.window.s, self.anchor.train).params

    @property
    def hparams(self) -> PyTree:
        """The current hyperparameters, by name."""
        return self.anchor.hparams


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
    constraints: Any = None,
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
        constraints: a dict of constraints by name, as in `RealTime`; None for any number. The usual
            names need none: Optax's, and `lr`, `wd`, `beta1` and the like. Learning rates, decays and
            epsilons are non-negative, momenta and averages in [0, 1). Other names need one.
        options: further options of `RealTime`.
        **hparams: the constants to be tuned, with their initial values.

    `update` returns the new state and the loss of the minibatch. It is compiled, and pure: inside your
    own `jax.jit` it has less overhead (`equinox.filter_jit` where the parameters hold more than arrays,
    as an Equinox model holds its activation). It does not wait for the device. The parameters may be
    any pytree, an Equinox model for instance. A window whose loss diverges is undone. One in which
    something else is not finite, the data for instance, is dropped, and training continues from
    where the window began; there is a `NonFiniteError`, at the latest `every` calls later, whose
    `state` is the one to continue from. Inside `jit` there is no error, only `state.log["dropped"]`.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> loss = lambda w, x: jnp.mean((w - x) ** 2)
    >>> optimizer = ft.tuned(optax.sgd, loss, learning_rate=1e-4, momentum=0.5)
    >>> state = optimizer.init(jnp.array(0.0))
    >>> for step in range(300):
    ...     state, value = optimizer.update(state, jnp.ones(4), jnp.ones(4))
    >>> round(float(state.params), 2), float(state.hparams["learning_rate"]) > 1e-3
    (1.0, True)
    """
    check_count(every, f"tuned(every={every!r})")
    error = loss if error is None else error
    _check_callable(loss, "loss(params, batch)")
    check_signature(loss, "loss(params, batch)")
    _check_callable(error, "error(params, validation)")
    check_signature(error, "error(params, validation)")
    for name, given in {"constraints": constraints, "options": options}.items():
        if not (given is None or isinstance(given, Mapping)):
            raise TypeError(f"tuned({name}=...) must be a dict, got {describe(given)}.")
    if not hparams:
        raise ValueError("tuned has nothing to tune: give constants, `learning_rate=0.1` say.")
    if isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            "tuned makes the optimizer itself, from the constants to be tuned: give `optax.sgd`, not "
            "`optax.sgd(0.1)`."
        )
    _check_callable(optimizer, "optimizer(learning_rate=...)")
    called = getattr(optimizer, "__name__", "optimizer")
    instead = f"Keep it in the optimizer: `functools.partial({called}, ...)`."
    start = {name: constant(name, value, instead) for name, value in hparams.items()}
    try:
        inspect.signature(optimizer).bind(**start)
    except TypeError as problem:
        raise TypeError(
            f"`{called}` cannot be called with {', '.join(start)} alone: {problem}. What is not to be "
            f"tuned is given before, `functools.partial({called}, ...)`."
        ) from None
    except ValueError:  # a builtin, which has no signature
        pass
    tuner = RealTime(
        Training(lambda params, h, batch: loss(params, batch), lambda h: optimizer(**h)),
        lambda state, h, validation: error(state.params, validation),
        constraints=constraints_of(start, constraints or {}),
        **(options or {}),
    )
    settings = tuner.settings

    def init(params: PyTree) -> TunedState:
        state = tuner.init(params, start)
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
        }
        # No two leaves share memory, so that the state can be donated.
        return copied(TunedState(log, state._replace(Z=None), begin(settings, state)))

    shapes = Shapes()
    checked: dict[Any, None] = {}
    unseen = _Unseen(every)

    def check(state: TunedState, batch: PyTree, validation: PyTree) -> None:
        if set(state.hparams) != set(start):
            raise ValueError(
                f"this state is of another optimizer: it has the constants {sorted(state.hparams)}, "
                f"this one tunes {sorted(start)}. Begin with `init` of this one."
            )
        with shapes.explaining(state=state.anchor, batch=batch, validation=validation):
            check_state(settings, state.anchor)
            problem = settings.problem(state.anchor.train, _window_of_one(batch), validation)
            validated(problem, state.hparams)

    def update(state: Any, batch: PyTree, validation: PyTree) -> tuple[TunedState, Array]:
        if not isinstance(state, TunedState):
            raise TypeError(
                f"`update` takes the state that `init` or `update` returned, got {describe(state)}."
            )
        given = {"batch": batch, "validation": validation}
        batch, validation = jax.tree.map(readable, (batch, validation))
        arrays, structure = flatten((batch, validation))
        key = jax.tree.structure(state), structure, tuple((x.shape, x.dtype) for x in arrays)
        if key not in checked:
            for name, data in given.items():
                check_data(data, name)
                check_numbers(jax.tree.map(readable, data), name)
            check(state, batch, validation)
            remember(checked, key, None)
        after, value, dropped = program(state, batch, validation)
        if isinstance(dropped, Tracer):
            return after, value
        call = _Call(dropped, batch, validation)
        if (failed := unseen.look(state, after, call)) is not None:
            window, batch, validation = failed
            error = tuner.fault(
                after.anchor._replace(window=window), _window_of_one(batch), validation
            )
            error.state = after
            raise error
        return after, value

    @eqx.filter_jit
    def program(
        state: TunedState, batch: PyTree, validation: PyTree
    ) -> tuple[TunedState, Array, Array]:
        anchor = state.anchor
        problem = settings.problem(anchor.train, _window_of_one(batch), validation)
        system = make_system(problem, anchor.hparams, whole=True)
        window = make_step(settings, problem, system, anchor)(state.window, 0)

        def tune():
            new, log, fault = finish(settings, anchor, problem, system, window, 0)
            log = log | {"dropped": fault}
            log = {name: jax.tree.map(_as, log[name], state.log[name]) for name in state.log}
            new_window = begin(settings, new)
            return log, eqx.filter(new._replace(Z=None), eqx.is_array), new_window, fault

        def wait():
            return state.log, eqx.filter(anchor, eqx.is_array), window, jnp.array(False)

        over = (window.steps == every) | ~window.calm
        log, new, window_after, fault = lax.cond(over, tune, wait)
        dropped = jnp.where(fault, anchor.window, -1)
        return TunedState(log, eqx.combine(new, anchor), window_after), window.loss, dropped

    return Tuned(init, update)


class _Call(NamedTuple):
    """A call of `update` and how it ended, which the host need not know yet."""

    dropped: Any  # the number of the window that was dropped, or -1
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
        while failed is None and calls and (len(calls) > self.most or calls[0].dropped.is_ready()):
            first = calls.popleft()
            failed = first if int(first.dropped) >= 0 else None
        if len(self.runs) >= RUNS:  # the oldest has been given up
            del self.runs[next(iter(self.runs))]
        token = after.log["dropped"]  # kept, so that no other array gets its id
        self.runs[id(token)] = token, calls
        return failed


def _check_callable(function: Any, form: str) -> None:
    if not callable(function):
        raise TypeError(f"tuned needs a function `{form}`, got {describe(function)}.")


def _window_of_one(batch: PyTree) -> PyTree:
    """Return the minibatch as a window of one."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], batch)


def _as(new: Array, old: Array) -> Array:
    return new.astype(old.dtype)

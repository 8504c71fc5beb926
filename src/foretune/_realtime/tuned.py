"""Real-time tuning as an optimizer: `RealTime`, with a window spread over calls, a minibatch each."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Key, PyTree, UInt32

from .._engines.nonfinite import first_nonfinite
from .._problem.arguments import Recent, Rest, copied, flatten
from .._problem.checks import check_count, check_data, check_key, check_numbers, describe
from .._problem.problem import validated
from .._problem.system import make_system
from .._problem.training import Training, TrainState
from .constants import check_loss_and_error, constraints_of, initial_constants
from .faults import Dropped, names_of, tell
from .outcome import finish
from .state import RealTimeState, check_not_donated, check_state
from .steps import Steps, WindowState, begin
from .tuner import RealTime


class TunedState(NamedTuple):
    """Where a tuned training is: `params`, `model_state`, `hparams`, the `log` of the last update.

    Its leaves are arrays, so that it can pass through `jax.jit`, whatever the parameters hold.
    """

    log: dict[str, PyTree]  # of the last window, as of `RealTime.update`; NaN before
    anchor: RealTimeState  # the arrays of the state when the window began, without its Z
    window: WindowState
    rest: Rest  # what the tuner's state holds besides arrays

    @property
    def params(self) -> PyTree:
        return self._train().params

    @property
    def model_state(self) -> PyTree:
        return self._train().model_state

    @property
    def hparams(self) -> PyTree:
        return self.anchor.hparams

    def begun(self) -> RealTimeState:
        """Return the whole state of the tuner at the beginning of the window, without its Z."""
        return eqx.combine(self.anchor, self.rest.tree)

    def _train(self) -> TrainState:
        return eqx.combine(self.window.s, self.rest.tree.train)


def tuned(
    optimizer: Callable[..., optax.GradientTransformation],
    loss: Callable[..., Array],
    error: Callable[..., Array] | None = None,
    *,
    every: int = 10,
    constraints: Mapping[str, PyTree] | None = None,
    loss_hparams: Mapping[str, object] | None = None,
    has_state: bool = False,
    key: Key[Array, ""] | UInt32[Array, "..."] | None = None,
    donate: bool = False,
    **hparams: object,
) -> "Tuned":
    """Return an optimizer that tunes its own constants on validation data, as it trains.

    Args:
        optimizer: a function of the constants to be tuned that returns an Optax optimizer:
            `optax.sgd`, `optax.adamw`, `functools.partial(optax.adam, eps_root=1e-8)`.
        loss: your loss, `loss(params, batch)`.
        error: the validation error, `error(params, validation)`; the loss by default.
        every: the minibatches between two updates of the constants.
        constraints: a dict of constraints by name; None for any number. The names of Optax, and `lr`,
            `wd`, `beta1` and the like, need none: learning rates, decays and epsilons are
            non-negative, momenta and averages in [0, 1).
        loss_hparams: constants of the loss to be tuned as well, a dict with their initial values. The
            loss is then called with a dict of their current ones, `loss(params, hparams, batch)`.
        has_state: whether the loss takes and returns a model state (batch statistics and the like):
            `loss(params, batch, model_state) -> (loss, model_state)`, `init((params, model_state))`,
            `error(params, validation, model_state)` and `state.model_state`.
        key: a random key, for dropout say. The loss is then called with a `key=` of each step.
        donate: reuse the memory of the state given to `update`, which is then deleted.
        **hparams: the constants to be tuned, with their initial values.

    `init(params)` returns the first state, `update(state, batch, validation)` the next one and the
    loss of the minibatch. It is compiled and pure, and does not wait for the device; inside your own
    `jax.jit` it has less overhead. A window whose loss diverges is rolled back. One in which something
    else is not finite, the data for instance, is left out, and a derivative that is not finite counts
    as 0: both with a warning, at the latest `every` calls later, and with `state.log["dropped"]`.

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
    if key is not None:
        check_key(key, "tuned(key=...)")
    of_loss = dict(loss_hparams or {})
    check_loss_and_error(loss, error, bool(of_loss), has_state, key is not None)
    judged = loss if error is None else error
    start = initial_constants(optimizer, hparams, of_loss)

    def inner_loss(params, h, batch, *model_state, **key):
        own = ({name: h[name] for name in of_loss},) if of_loss else ()
        return loss(params, *own, batch, *model_state, **key)

    def objective(state, h, validation):
        model_state = (state.model_state,) if has_state else ()
        return judged(state.params, validation, *model_state)

    def inner_optimizer(h):
        return optimizer(**{name: h[name] for name in hparams})

    dynamics = Training(inner_loss, inner_optimizer, has_state=has_state, key=key)
    tuner = RealTime(dynamics, objective, constraints=constraints_of(start, constraints or {}))
    return Tuned(tuner, start, every, donate)


class Tuned:
    """An optimizer that tunes its own constants: `init` and `update`, which are pure functions."""

    def __init__(self, tuner: RealTime, start: dict[str, Array], every: int, donate: bool):
        self._tuner, self._start, self._every, self._donate = tuner, start, every, donate
        self._calls = deque()  # on the device still: what there is to say, and the data
        self._checked = Recent()  # names of leaves, by structures and shapes that passed the checks
        # Not the window, whose old arrays are needed until a minibatch has proved no outlier.
        self._program = jax.jit(self._step, donate_argnums=(0,) if donate else ())

    def init(self, params: PyTree) -> TunedState:
        """Return the state before the first minibatch; `params` is a pair with `has_state`."""
        paired = isinstance(params, tuple) and len(params) == 2
        if cast(Training, self._tuner.settings.dynamics).has_state and not paired:
            raise TypeError(f"has_state needs init((params, model_state)), got {describe(params)}.")
        state = self._tuner.init(params, self._start)
        nan = jnp.full((), jnp.nan, jnp.result_type(float))
        log = {
            "value": nan,
            "hypergradient": jax.tree.map(lambda h: jnp.full_like(h, jnp.nan), state.hparams),
            "hparams": state.hparams,
            "z_norm": dict.fromkeys(self._start, nan),
            "rolled_back": jnp.array(False),
            "skipped": jnp.zeros((), jnp.int32),
            "dropped": jnp.array(False),
        }
        # No two leaves share memory, so that the state can be donated.
        rest = Rest(state._replace(Z=None))
        return copied(TunedState(log, *self._begun(state), rest))

    def update(
        self, state: TunedState, batch: PyTree, validation: PyTree
    ) -> tuple[TunedState, Float[Array, ""]]:
        """Train on a minibatch, and update the constants where it is time; return the loss too."""
        if not isinstance(state, TunedState):
            raise TypeError(f"`update` takes a state of `init` or `update`, got {describe(state)}.")
        if self._donate:
            check_not_donated(state.anchor.window)
        data, names = self._as_data(state, {"batch": batch, "validation": validation})
        after, value, dropped = self._program(state[:2], state[2:], data)
        if isinstance(dropped.news, Tracer):
            tell(names, dropped)
            return after, value
        calls = self._calls
        calls.append((names, dropped, data))
        while calls and (len(calls) > self._every or calls[0][1].news.is_ready()):
            names, dropped, data = calls.popleft()
            if dropped.news:
                fault = first_nonfinite(jax.device_get(data), "data") if dropped.failed else None
                tell(names, dropped, f" (here {fault[0]})" if fault else "")
        return after, value

    def _as_data(
        self, state: TunedState, given: dict[str, PyTree]
    ) -> tuple[dict[str, PyTree], list[str]]:
        """Return the data as arrays, and the leaves' names, after the checks that new shapes need."""
        data = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.asanyarray(x), given)
        leaves, structure = flatten(data)
        key = jax.tree.structure(state), structure, tuple((x.shape, x.dtype) for x in leaves)
        if key in self._checked:
            return data, self._checked[key]
        for name, tree in given.items():
            check_data(tree, name)
            check_numbers(data[name], name)
        if set(state.hparams) != set(self._start):
            why = f"it has {sorted(state.hparams)}, this one tunes {sorted(self._start)}"
            raise ValueError(f"this state is of another optimizer: {why}. Begin anew with `init`.")
        anchor, settings = state.begun(), self._tuner.settings
        check_state(settings, anchor)
        validated(settings.problem(anchor.train, *_window_of(data)), state.hparams)
        names = self._checked[key] = names_of(anchor.train)
        return data, names

    def _begun(self, state: RealTimeState) -> tuple[RealTimeState, WindowState]:
        """Return the arrays of a state without its Z, and the window that begins there."""
        anchor = eqx.filter(state._replace(Z=None), eqx.is_array)
        return anchor, begin(self._tuner.settings, state)

    def _step(
        self, first: tuple, others: tuple, data: dict[str, PyTree]
    ) -> tuple[TunedState, Float[Array, ""], Dropped]:
        """Return the state after a minibatch, its loss, and what there is to say of its window."""
        state, settings = TunedState(*first, *others), self._tuner.settings
        anchor = state.begun()
        problem = settings.problem(anchor.train, *_window_of(data))
        steps = Steps(settings, problem, make_system(problem, anchor.hparams), anchor)
        now = steps.step(state.window, 0)
        assert now.loss is not None  # a training has one

        def tune():
            new, log, failed = finish(steps, now, 0)
            first = log["dropped"] & (new.dropped == 1)
            dropped = Dropped(first | failed, anchor.window, log["nonfinite"], failed)
            log = log | {"dropped": failed | log["dropped"]}
            log = {
                name: jax.tree.map(lambda now, old: now.astype(old.dtype), log[name], old)
                for name, old in state.log.items()
            }
            return log, *self._begun(new), dropped

        def wait():
            no = jnp.array(False)
            return state.log, state.anchor, now, Dropped(no, anchor.window, now.nonfinite, no)

        over = (now.done == self._every) | now.spiked
        log, new, following, dropped = lax.cond(over, tune, wait)
        return TunedState(log, new, following, state.rest), now.loss, dropped


def _window_of(data: dict[str, PyTree]) -> tuple[PyTree, PyTree]:
    """Return the window of one minibatch, and the validation data."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], data["batch"]), data["validation"]

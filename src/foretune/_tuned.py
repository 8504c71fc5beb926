"""Real-time tuning as an optimizer, for a training loop that is there already.

The loop goes on calling `update` once for each minibatch; every few steps the hyperparameters move.
It is `RealTime` with its window spread over calls.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from ._constraints import Box, NonNegative
from ._dynamics import Training
from ._realtime import Progressing, RealTime, RealTimeState, begin, finish, make_step
from ._validate import check_count, check_signature

USUAL = {
    "learning_rate": NonNegative(),
    "weight_decay": NonNegative(),
    "momentum": Box(0.0, 0.999),
    "decay": Box(0.0, 0.9999),
    "b1": Box(0.0, 0.999),
    "b2": Box(0.0, 0.9999),
}


class TunedState(NamedTuple):
    """Where a tuned training is: `params`, `hparams` and the `log` of their last update."""

    log: dict[str, Any]
    """The log of the last update of the hyperparameters, as of `RealTime.update`; NaN before."""
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
    optimizer: Callable[..., Any],
    loss: Callable[[PyTree, PyTree], Float[Array, ""]],
    error: Callable[[PyTree, PyTree], Float[Array, ""]] | None = None,
    *,
    every: int = 10,
    constraints: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    **hparams: Any,
) -> Tuned:
    """Return an optimizer that tunes its own constants on validation data, as it trains.

    Args:
        optimizer: a function of the constants to be tuned that returns an Optax optimizer:
            `optax.sgd`, `optax.adamw`, `functools.partial(optax.adam, eps_root=1e-8)`.
        loss: your loss, `loss(params, batch)`.
        error: the validation error, `error(params, validation)`; the loss by default.
        every: the minibatches between two updates of the constants.
        constraints: as in `RealTime`; learning rates and decays are non-negative and momenta in [0, 1)
            without it.
        options: further options of `RealTime`.
        **hparams: the constants to be tuned, with their initial values.

    `update` is compiled, and pure: it may also be called inside your own `jax.jit`. The parameters may
    be any pytree, an Equinox model for instance. A window whose loss diverges is undone, one whose
    data is not finite is dropped: the parameters are then those from before it.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> loss = lambda w, x: jnp.mean((w - x) ** 2)
    >>> optimizer = ft.tuned(optax.sgd, loss, learning_rate=1e-4, momentum=0.5)
    >>> state = optimizer.init(jnp.array(0.0))
    >>> for step in range(300):
    ...     state, value = optimizer.update(state, jnp.ones(4), jnp.ones(4))
    >>> round(float(state.params), 2), float(state.hparams["learning_rate"]) > 1e-3
    (1.0, True)
    """
    check_count(every, f"tuned(every={every})")
    check_signature(loss, "loss(params, batch)")
    error = loss if error is None else error
    check_signature(error, "error(params, validation)")
    if not hparams:
        raise ValueError("tuned has nothing to tune: give constants, `learning_rate=0.1` say.")
    start = {name: jnp.asarray(value, float) for name, value in hparams.items()}
    usual = {name: USUAL[name] for name in hparams if name in USUAL}
    tuner = RealTime(
        Training(lambda params, h, batch: loss(params, batch), lambda h: optimizer(**h)),
        lambda state, h, validation: error(state.params, validation),
        constraints=usual | (constraints or {}),
        **(options or {}),
    )
    settings = tuner.settings

    def init(params: PyTree) -> TunedState:
        state = tuner.init(params, start)
        nan = jnp.full((), jnp.nan, jnp.result_type(float))
        by_name = dict.fromkeys(start, nan)
        log = {"value": nan, "hypergradient": by_name, "hparams": state.hparams, "z_norm": by_name}
        return TunedState(
            log | {"undone": jnp.array(False)}, state._replace(Z=None), begin(settings, state)
        )

    @eqx.filter_jit
    def update(state: TunedState, batch: PyTree, validation: PyTree) -> tuple[TunedState, Array]:
        anchor = state.anchor
        piece = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], batch)
        problem = settings.problem(anchor.train, piece, validation)
        system = problem.system(anchor.hparams)
        window = make_step(settings, problem, system, anchor.hparams)(state.window, 0)

        def tune():
            new, log, _ = finish(settings, anchor, problem, system, window, 0)
            log = {name: jax.tree.map(_as, log[name], state.log[name]) for name in state.log}
            return log, eqx.filter(new._replace(Z=None), eqx.is_array), begin(settings, new)

        def wait():
            return state.log, eqx.filter(anchor, eqx.is_array), window

        log, new, window_after = lax.cond((window.steps == every) | ~window.calm, tune, wait)
        return TunedState(log, eqx.combine(new, anchor), window_after), window.loss

    return Tuned(init, update)


def _as(new: Array, old: Array) -> Array:
    return new.astype(old.dtype)

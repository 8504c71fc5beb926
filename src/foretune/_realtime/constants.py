"""The constants that `tuned` tunes: where they start, and the usual sets by name.

The names are those of the real arguments of Optax's optimizers, and common short forms. What means
different things in different places (`alpha`), or may be any number (`f_min`), is left out.
"""

import inspect
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from .._constraints.base import AbstractConstraint
from .._constraints.sets import Box, NonNegative
from .._problem.checks import check_signature, describe

_NAMES: list[tuple[AbstractConstraint, str]] = [
    # learning rates, and what multiplies a step
    (NonNegative(), "learning_rate lr step_size stepsize eta"),
    (NonNegative(), "adam_learning_rate adam_lr muon_lr max_learning_rate max_lr min_lr"),
    (NonNegative(), "max_step_size min_step_size estim_lr0 estim_lr_coef s_init"),
    (NonNegative(), "scale scaling scale_factor global_scale trust_coefficient optimism"),
    # weights of penalties
    (NonNegative(), "weight_decay wd weight_decay_rate adam_weight_decay l1 l2 penalty"),
    # averages of gradients forget, averages of their squares forget more slowly
    (Box(0.0, 0.999), "momentum mom mu b1 beta1 beta_1 beta adam_b1"),
    (Box(0.0, 0.9999), "b2 beta2 beta_2 nu adam_b2 betas decay rho decay_rate"),
    (Box(0.0, 0.99999), "b3 beta3 beta_3"),
    # what keeps a denominator from 0, and where accumulators begin
    (NonNegative(), "eps epsilon eps_root adam_eps adam_eps_root reps_rel"),
    (NonNegative(), "initial_accumulator_value initial_scale min_norm min_scale"),
    # clipping and noise
    (NonNegative(), "clip clipping clip_norm clip_threshold clipping_threshold threshold"),
    (NonNegative(), "max_norm max_delta l2_norm_clip consistent_rms weight_lr_power"),
    (NonNegative(), "noise noise_scale noise_multiplier"),
    # factors of shrinking and growing
    (Box(0.0, 1.0), "slow_step_size eta_minus factor"),
    (Box(1.0, np.inf), "eta_plus"),
    # of losses; at 1 nothing is left of the activations, or of the labels
    (Box(0.0, 0.9), "dropout dropout_rate drop_rate smoothing label_smoothing"),
]
USUAL = {name: usual for usual, names in _NAMES for name in names.split()}


def check_loss_and_error(
    loss: object, error: object, of_loss: bool, has_state: bool, has_key: bool
) -> None:
    """Raise unless loss and error can be called as the options of `tuned` say."""
    carried, key = ", model_state" * has_state, ", key=..." * has_key
    form = f"loss(params{', hparams' * of_loss}, batch{carried}{key})"
    check_signature(loss, form, ("key",) * has_key)
    if error is not None:
        check_signature(error, f"error(params, validation{carried})")
    elif form != "loss(params, batch)":
        raise TypeError(
            f"tuned needs an `error(params, validation{carried})` beside a loss with `loss_hparams`, "
            "`has_state` or `key`: write it as for a test, without dropout or smoothing."
        )


def initial_constants(
    optimizer: Callable[..., optax.GradientTransformation],
    hparams: Mapping[str, object],
    of_loss: Mapping[str, object],
) -> dict[str, Array]:
    """Return the initial constants of optimizer and loss as arrays, or raise."""
    if not hparams and not of_loss:
        raise ValueError("tuned has nothing to tune: give constants, `learning_rate=0.1` say.")
    if isinstance(optimizer, optax.GradientTransformation):
        raise TypeError("tuned makes the optimizer itself: give `optax.sgd`, not `optax.sgd(0.1)`.")
    if not callable(optimizer):
        raise TypeError(f"tuned needs `optimizer(learning_rate=...)`, got {describe(optimizer)}.")
    if both := sorted(set(hparams) & set(of_loss)):
        raise ValueError(f"tuned: one name for two constants, {both[0]}. Rename one.")
    called = getattr(optimizer, "__name__", "optimizer")
    instead = f"Keep it in the optimizer: `functools.partial({called}, ...)`."
    start = {name: _constant(name, value, instead) for name, value in hparams.items()}
    try:
        inspect.signature(optimizer).bind(**start)
    except TypeError as problem:
        how = f"Give what is not to be tuned by `functools.partial({called}, ...)`."
        alone = f"with {', '.join(start) or 'no constant'} alone: {problem}"
        raise TypeError(f"`{called}` cannot be called {alone}. {how}") from None
    except ValueError:  # a builtin, which has no signature
        pass
    instead = "Keep it in the loss: `functools.partial(loss, ...)`."
    return start | {name: _constant(name, value, instead) for name, value in of_loss.items()}


def constraints_of(start: Mapping[str, Array], given: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Return the constraint of each constant, the given one or the usual one, or raise."""
    unknown = [name for name in start if name not in given and name not in USUAL]
    if unknown:
        entries = ", ".join(f'"{name}": ft.Box(0.0, 1.0)' for name in unknown)
        what = f"tuned knows no usual set for {', '.join(unknown)}: give one, say"
        raise ValueError(f"{what} `constraints={{{entries}}}`, or None for any number.")
    usual = {name: USUAL[name] for name in start if name not in given}
    for name, where in usual.items():
        value = start[name]
        if not isinstance(value, Tracer) and not where.contains(value):
            outside = f"tuned({name}={np.asarray(value)}) starts outside {where}"
            other = f'give `constraints={{"{name}": ...}}`'
            raise ValueError(f"{outside}, the usual set of this name. For another {other}.")
    return usual | dict(given)


def _constant(name: str, value: object, instead: str) -> Float[Array, "..."]:
    """Return a constant to be tuned as an array, or raise and say where it goes instead."""
    numeric = isinstance(value, float | int | np.ndarray | np.generic | jax.Array)
    kind = getattr(value, "dtype", np.result_type(type(value))) if numeric else np.dtype(bool)
    if not any(jnp.issubdtype(kind, wanted) for wanted in (jnp.floating, jnp.integer)):
        raise TypeError(f"tuned({name}={value!r:.40}) is no number to tune. {instead}")
    array = jnp.asarray(value, float)
    if not isinstance(array, Tracer) and (array.size == 0 or not np.all(np.isfinite(array))):
        raise ValueError(f"tuned({name}={value!r:.40}): a constant starts at a finite number.")
    return array

"""Dropout that can be differentiated in its rate: multiplicative Gaussian noise.

    y = x (1 + sigma eps),    eps ~ N(0, 1),    sigma^2 = rate / (1 - rate)

Dropout with division by 1 - rate has the same mean and variance, but whether a unit is dropped has no
derivative in the rate. Here the response is smooth in it for given keys. At rate 0 the square root has
an infinite derivative, so a little noise remains: sigma^2 = rate / (1 - rate) + 0.001.
References: Srivastava et al., JMLR 2014, Section 10; Kingma, Salimans and Welling, NeurIPS 2015.
"""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from .checks import check_flag, check_key, describe

LEAST = 1e-3  # variance at rate 0; a sample's derivative there has a deviation of 1 / (2 sigma)


def dropout(x: Any, rate: Any, *, key: Any, inference: object = False) -> Float[Array, "..."]:
    """Return x with multiplicative noise: dropout whose rate can be tuned, as it has a derivative.

    It is `x * (1 + sigma * eps)` with normal eps and `sigma**2 = rate / (1 - rate)`, which has the mean
    and the variance of dropout. A rate that is an array gets 0.001 more variance, so that a descent may
    begin at 0. Keep it in its range by `foretune.Box(0.0, 0.9)`.

    Args:
        x: what to disturb, in floating point.
        rate: in [0, 1): one number, or an array that broadcasts to the shape of x.
        key: a random key, the one that `Training(..., key=...)` gives to the loss, or split from it.
        inference: return x as it is.

    >>> import foretune as ft, jax, jax.numpy as jnp
    >>> def noise(rate):
    ...     return jnp.var(ft.dropout(jnp.ones(1000), rate, key=jax.random.key(0)))
    >>> bool(noise(0.2) > 0.2), bool(jax.grad(noise)(jnp.array(0.2)) > 0)  # 0.2 / (1 - 0.2) = 0.25
    (True, True)
    """
    number = any(isinstance(x, kind) for kind in (float, np.ndarray, np.generic, jax.Array))
    if not number or not jnp.issubdtype(getattr(x, "dtype", float), jnp.floating):
        raise TypeError(f"dropout: x must be floating-point, got {describe(x)}: give an array.")
    if not np.size(x):
        raise ValueError(f"dropout: x is {describe(x)}: it holds no number.")
    check_flag(inference, "dropout: inference")
    _check_rate(rate, np.shape(x))
    if inference:
        return x
    check_key(key, "the key of dropout")
    x, least = jnp.asarray(x), 0.0 if isinstance(rate, int | float) else LEAST
    rate = jnp.broadcast_to(jnp.asarray(rate, x.dtype), x.shape)
    sigma = jnp.sqrt(rate / (1 - rate) + least)
    return x * (1 + sigma * jax.random.normal(key, x.shape, x.dtype))


def _check_rate(rate: Any, shape: tuple[int, ...]) -> None:
    """Raise for a rate of another shape, and for one that is known and not in [0, 1)."""
    numbers = rate if isinstance(rate, Tracer) else np.asarray(rate)
    fits = False
    with contextlib.suppress(ValueError):
        fits = np.broadcast_shapes(numbers.shape, shape) == shape
    if not fits:
        needed = f"one number, or an array that broadcasts to the shape of x, {shape}"
        raise ValueError(f"dropout: the rate is {describe(numbers)}: give {needed}.")
    if isinstance(rate, Tracer):
        return
    real = np.issubdtype(numbers.dtype, np.floating) or np.issubdtype(numbers.dtype, np.integer)
    if not real or not np.all((numbers >= 0) & (numbers < 1)):
        how = "Where it is tuned, constrain it by `foretune.Box(0.0, 0.9)`."
        raise ValueError(f"dropout: the rate must lie in [0, 1), got {rate!r:.60}. {how}")

"""An outer optimizer whose steps are relative to the hyperparameters: nothing to tune.

    r_i = |lambda_i| + o_i   (at most the way to its upper bound),
    o_i = UNIT * |f| / |df/dlambda_i|   at the first gradient that is not 0,
    lambda_i <- lambda_i - step_size * r_i * Adam(r_i df/dlambda_i).

Far from 0 a step changes an entry by a factor; near 0 by a share of o_i, the change that would take
away the share UNIT of the error if it were linear.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

MOST = 10.0
UNIT = 0.1  # the share of the error that sets the scale of a hyperparameter near 0
FARTHEST = 100.0  # the largest unit, in starting values (1 for a start at 0)


class RelativeState(NamedTuple):
    """The units o, 0 until known, and Adam's moments of the scaled gradient."""

    unit: PyTree
    adam: optax.OptState


def relative_adam(step_size: float | int = 0.1) -> optax.GradientTransformationExtraArgs:
    """Adam with steps relative to each hyperparameter's own size: the default of `RealTime`.

    Args:
        step_size: the relative change of an entry in one step, about.

    It needs the error as `value` and the hyperparameters as `params`, as all drivers give them. Do
    not combine it with `Log`, which makes steps relative by itself.

    >>> import foretune as ft, jax.numpy as jnp
    >>> optimizer = ft.relative_adam(0.1)
    >>> lr = jnp.array(0.5)
    >>> state = optimizer.init(lr)
    >>> step, state = optimizer.update(jnp.array(2.0), state, lr, value=jnp.array(1.0))
    >>> print(f"{step:.3f}")  # 10 % of 0.5 + 0.1 * 1.0 / 2.0
    -0.055
    """
    if not 0 < step_size < math.inf:
        raise ValueError(f"relative_adam(step_size={step_size!r:.60}): a number above 0.")
    adam = optax.scale_by_adam(eps=1e-30)

    def init(params: PyTree) -> RelativeState:
        return RelativeState(jax.tree.map(jnp.zeros_like, params), adam.init(params))

    def update(
        updates: PyTree,
        state: RelativeState,
        params: PyTree = None,
        *,
        value: Float[Array, ""] | None = None,
        scale: Callable[[PyTree, PyTree], PyTree] | None = None,
        **extra: object,
    ) -> tuple[PyTree, RelativeState]:
        if params is None or value is None:
            raise ValueError("relative_adam needs `params` and `value` in its update.")

        def first_unit(o, g, h):
            natural = UNIT * jnp.abs(value) / jnp.where(g == 0, 1, jnp.abs(g))
            most = jnp.where(h == 0, 1.0, FARTHEST * jnp.abs(h))
            first = jnp.minimum(natural, most).astype(o.dtype)
            return jnp.where((o == 0) & (g != 0), first, o)

        o = jax.tree.map(first_unit, state.unit, updates, params)
        own = scale or (lambda u, o: jax.tree.map(lambda u, o: jnp.abs(u) + o, u, o))
        r = own(params, o)
        with jax.numpy_dtype_promotion("standard"):  # Adam multiplies floats by a count
            direction, moments = adam.update(jax.tree.map(jnp.multiply, r, updates), state.adam)
        # Adam's direction is about 1; beyond MOST the moments have underflowed.
        steps = jax.tree.map(lambda r, d: -step_size * r * jnp.clip(d, -MOST, MOST), r, direction)
        return steps, RelativeState(o, moments)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]

"""Which steps are accepted: a descent that ends no higher than it began.

A step is accepted when the error after it is finite, no higher than at the start, and either no higher
than the highest of the last five that were accepted, or above the lowest so far by at most a tenth of
what has been gained (good optimizers swing about a minimum).
Otherwise the step is rejected: the next one begins where it began, a quarter as long,

    u_{k+1} = u_a + q d_a,    q <- q / 4  when rejected,  q <- min(2 q, 1)  when accepted,

with u_a the last variable that was accepted, d_a the optimizer's update there. While q < 1 only the
last of the five counts. A second time in a row, the optimizer begins anew at u_a: what it remembers
(momentum) may lead uphill, however short the step.
Reference: Grippo, Lampariello and Lucidi, A Nonmonotone Line Search Technique, 1986.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._engines.nonfinite import is_finite
from .update import select

REMEMBERED = 5  # errors that a new one is compared with
SHORTER, LONGER = 0.25, 2.0
ROUNDING = 1e-5  # of the error: not a rise
GAINED = 0.1  # of what has been gained: not a rise
RESTART = 2  # times in a row that a step is rejected, and the optimizer begins anew


class Accepted(NamedTuple):
    """The last evaluation that was accepted, and how the descent continues from it."""

    hparams: PyTree
    grad: PyTree
    direction: PyTree  # d_a, in the unconstrained variable
    values: Float[Array, " 5"]  # the last accepted errors, the newest first; -inf before them
    first: Float[Array, ""]
    lowest: Float[Array, ""]
    share: Float[Array, ""]  # q
    tries: Int[Array, ""]  # how often in a row a step from here was rejected


def none_accepted(hparams: PyTree, unconstrained: PyTree) -> Accepted:
    """Return the state before the first evaluation."""
    none = jnp.array(jnp.inf, float)
    return Accepted(
        jax.tree.map(jnp.copy, hparams),
        jax.tree.map(jnp.zeros_like, hparams),
        jax.tree.map(jnp.zeros_like, unconstrained),
        jnp.full(REMEMBERED, -jnp.inf, float),
        none,
        none,
        jnp.ones(()),
        jnp.zeros((), jnp.int32),
    )


def is_accepted(accepted: Accepted, value: PyTree, grad: PyTree) -> Bool[Array, ""]:
    """Return whether the step to an evaluation is accepted; of several errors, if all are finite."""
    finite = is_finite((value, grad))
    if len(jax.tree.leaves(value)) > 1:
        return finite
    error = jax.tree.leaves(value)[0].astype(accepted.values.dtype)
    known = jnp.isfinite(accepted.values)
    highest = jnp.max(accepted.values)
    most = jnp.maximum(highest, accepted.lowest + GAINED * (accepted.first - accepted.lowest))
    slack = ROUNDING * jnp.abs(highest)
    return finite & (~jnp.any(known) | (error <= jnp.minimum(most, accepted.first) + slack))


def next_accepted(
    accepts: Bool[Array, ""],
    accepted: Accepted,
    hparams: PyTree,
    grad: PyTree,
    direction: PyTree,
    value: PyTree,
) -> Accepted:
    """Return where the descent continues from: here, if accepted, or from before, and shorter."""
    dtype = accepted.values.dtype
    error = jnp.sum(jnp.array([x.astype(dtype) for x in jax.tree.leaves(value)]))
    longer = jnp.minimum(LONGER * accepted.share, 1.0)
    alone = jnp.full_like(accepted.values, -jnp.inf).at[0]
    shifted = jnp.roll(accepted.values, 1).at[0].set(error)
    here = Accepted(
        hparams,
        grad,
        direction,
        jnp.where(longer < 1, alone.set(error), shifted),
        jnp.where(jnp.isinf(accepted.first), error, accepted.first),
        jnp.minimum(accepted.lowest, error),
        longer,
        jnp.zeros_like(accepted.tries),
    )
    before = accepted._replace(
        values=alone.set(accepted.values[0]),
        share=SHORTER * accepted.share,
        tries=accepted.tries + 1,
    )
    return select(accepts, here, before)

"""Steps that are taken back: a descent that ends no higher than it began.

An optimizer that is too fast for the response, or a gradient that misleads, raises the error instead of
lowering it. A step is held when the error after it is finite, no higher than at the start, and either
no higher than the highest of the last five that were held, or above the lowest so far by no more than a
tenth of what has been gained (good optimizers rise for a while, and swing about a minimum); with
minibatches that are new at each step, all this up to as much as these five differ. Otherwise it is
taken back: the next one begins where it began, in the same direction, a quarter as long,

    u_{k+1} = u_a + q d_a,    q <- q / 4  when taken back,  q <- min(2 q, 1)  when held,

with u_a the last variable that was held, d_a the optimizer's update there. While q < 1 only the last of
the five counts. A second time in a row, the optimizer begins anew at u_a: what it remembers (momentum)
may lead uphill, however short the step.
Reference: Grippo, Lampariello and Lucidi, A Nonmonotone Line Search Technique, 1986.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._engines.nonfinite import is_finite

REMEMBERED = 5  # errors that a new one is compared with
SHORTER, LONGER = 0.25, 2.0
ROUNDING = 1e-5  # of the error: not a rise
GAINED = 0.1  # of what has been gained: not a rise
RESTART = 2  # times in a row that a step is taken back, and the optimizer begins anew


class Held(NamedTuple):
    """The last evaluation that was held, and how the descent continues from it."""

    hparams: PyTree
    grad: PyTree
    direction: PyTree  # d_a, in the unconstrained variable
    values: Float[Array, " 5"]  # the last errors that were held, the newest first; -inf before them
    first: Float[Array, ""]
    lowest: Float[Array, ""]
    share: Float[Array, ""]  # q
    tries: Int[Array, ""]  # how often in a row a step from here was taken back


def nothing_held(hparams: PyTree, search: PyTree) -> Held:
    """Return the state before the first evaluation."""
    none = jnp.array(jnp.inf)
    return Held(
        jax.tree.map(jnp.copy, hparams),
        jax.tree.map(jnp.zeros_like, hparams),
        jax.tree.map(jnp.zeros_like, search),
        jnp.full(REMEMBERED, -jnp.inf),
        none,
        none,
        jnp.ones(()),
        jnp.zeros((), jnp.int32),
    )


def is_held(
    held: Held, value: PyTree, grad: PyTree, *, comparable: bool, noisy: bool
) -> Bool[Array, ""]:
    """Return whether the step to an evaluation is held.

    Errors are not `comparable` where a training continues from the one before, nor is there one to
    compare where each hyperparameter has its own: there only what is not finite is taken back.
    """
    finite = is_finite((value, grad))
    if not comparable or len(jax.tree.leaves(value)) > 1:
        return finite
    error = jax.tree.leaves(value)[0].astype(held.values.dtype)
    known = jnp.isfinite(held.values)
    highest = jnp.max(held.values)
    most = jnp.maximum(highest, held.lowest + GAINED * (held.first - held.lowest))
    slack = ROUNDING * jnp.abs(highest)
    if noisy:  # of two values nothing is known of the noise
        least = jnp.min(jnp.where(known, held.values, jnp.inf))
        slack += jnp.where(jnp.sum(known) < 3, jnp.abs(highest), highest - least)
    return finite & (~jnp.any(known) | (error <= jnp.minimum(most, held.first) + slack))


def next_held(
    holds: Any, held: Held, hparams: PyTree, grad: PyTree, direction: PyTree, value: PyTree
) -> Held:
    """Return where the descent continues from: here, if it `holds`, or from before, and shorter."""
    error = jnp.sum(jnp.array([x.astype(held.values.dtype) for x in jax.tree.leaves(value)]))
    longer = jnp.minimum(LONGER * held.share, 1.0)
    alone = jnp.full_like(held.values, -jnp.inf).at[0]
    values = jnp.where(longer < 1, alone.set(error), jnp.roll(held.values, 1).at[0].set(error))
    first = jnp.where(jnp.isinf(held.first), error, held.first)
    here = Held(
        hparams, grad, direction, values, first, jnp.minimum(held.lowest, error), longer,
        jnp.zeros_like(held.tries),
    )  # fmt: skip
    before = held._replace(
        values=alone.set(held.values[0]), share=SHORTER * held.share, tries=held.tries + 1
    )
    return chosen(holds, here, before)


def chosen(holds: Any, yes: PyTree, no: PyTree) -> PyTree:
    """Return one of two pytrees."""
    return jax.tree.map(lambda a, b: jnp.where(holds, a, b), yes, no)

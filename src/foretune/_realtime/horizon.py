"""A tuned run that knows how long it will be: tune first, then decay.

Over a window of a few minibatches a lower learning rate always looks better than it is: it takes away
noise at once, and what it costs in progress shows only later. So a rate that is tuned to the end falls
too early, and none is ever held high and then annealed, which is what good schedules do. Early in a
training, where progress outweighs noise, the two agree. Hence, over a horizon of T minibatches,

    t < T/4:   lambda is tuned, as ever;
    t >= T/4:  lambda stays, and rates are multiplied by (1 - t/T) / (3/4), down to 0 at T,

and the second part costs no more than plain training. Where a rate comes down to a third while it is
tuned, the weights that it began with are worse than fresh ones: training starts again, from the initial
state with the hyperparameters found. At T the state is that of the window, of the second part, with the
lowest validation error.
"""

import re
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._problem.checks import named_leaves
from .constants import RATES

TUNED = 0.25  # the share of the horizon in which hyperparameters are tuned
FALLEN = 3.0  # a rate that was this many times higher has spoilt the weights


class Course(NamedTuple):
    """How far a run with a horizon has come."""

    steps: Int[Array, ""]
    """The number of minibatches, those of undone windows included."""
    kept: PyTree
    """The initial training state while tuning, then that with the lowest validation error."""
    lowest: Float[Array, ""]
    """That error; infinite while tuning."""
    peak: PyTree[Float[Array, "..."]]
    """The highest hyperparameters that this start has run with, in windows that were not undone."""


def rates_of(hparams: PyTree, given: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the paths of the learning rates, by the names given or by the usual ones."""
    names = RATES.split() if given is None else given
    paths = list(named_leaves(hparams, "hparams"))
    found = tuple(path for path in paths if set(names) & set(re.findall(r"[\w-]+", path)))
    if not found:
        which = f"rates={given!r}" if given else "horizon"
        raise ValueError(
            f"RealTime({which}) multiplies learning rates by a decay, but none of the hyperparameters "
            f"{', '.join(paths)} is called {' or '.join(names)}. Name yours: `rates=('name',)`."
        )
    return found


def begun(train: PyTree, hparams: PyTree) -> Course:
    """Return the course before the first minibatch."""
    zero = jnp.zeros((), jnp.int32)
    peak = jax.tree.map(lambda h: jnp.full_like(h, -jnp.inf), hparams)
    return Course(zero, eqx.filter(train, eqx.is_array), jnp.full((), jnp.inf), peak)


def is_tuning(course: Course, horizon: int) -> Bool[Array, ""]:
    """Return whether hyperparameters are still tuned."""
    return course.steps < int(TUNED * horizon)


def decayed(hparams: PyTree, rates: tuple[str, ...], t: Any, horizon: int) -> PyTree:
    """Return the hyperparameters of step t, its rates decayed."""
    factor = jnp.clip((1 - jnp.asarray(t, float) / horizon) / (1 - TUNED), 0.0, 1.0)
    leaves, treedef = jax.tree.flatten(hparams)
    paths = named_leaves(hparams, "hparams")
    scaled = [
        leaf * factor.astype(leaf.dtype) if path in rates else leaf
        for path, leaf in zip(paths, leaves, strict=True)
    ]
    return treedef.unflatten(scaled)


def moved_on(
    course: Course,
    horizon: int,
    given: tuple[str, ...] | None,
    ran: PyTree,
    hparams: PyTree,
    s: PyTree,
    count: Any,
    value: Any,
    good: Bool[Array, ""],
) -> tuple[Course, PyTree, Bool[Array, ""]]:
    """Return the course after a window, the training state to continue from, and whether it is a start.

    Args:
        course: the course before it.
        horizon: in minibatches.
        given: the names of the rates.
        ran: the hyperparameters that the window ran with.
        hparams: those after it.
        s: the training state after it, arrays only.
        count: its minibatches.
        value: the validation error after it.
        good: whether it counts: it was neither undone nor dropped.
    """
    tuned, steps = is_tuning(course, horizon), course.steps + count
    select = lambda yes, a, b: jax.tree.map(lambda a, b: jnp.where(yes, a, b), a, b)  # noqa: E731
    peak = select(good, jax.tree.map(jnp.maximum, course.peak, ran), course.peak)
    paths, rates = list(named_leaves(hparams, "hparams")), rates_of(hparams, given)
    pairs = zip(paths, jax.tree.leaves(peak), jax.tree.leaves(hparams), strict=True)
    fallen = [jnp.any(high > FALLEN * now) for path, high, now in pairs if path in rates]
    again = tuned & good & jnp.any(jnp.array(fallen))
    s, peak = select(again, course.kept, s), select(again, hparams, peak)
    ends = tuned & (steps >= int(TUNED * horizon))
    better = ~tuned & good & (value < course.lowest)
    kept = select(better | ends, s, course.kept)
    lowest = jnp.where(better, value, course.lowest).astype(course.lowest.dtype)
    s = select(~tuned & (steps >= horizon) & jnp.isfinite(lowest), kept, s)
    return Course(steps.astype(jnp.int32), kept, lowest, peak), s, again

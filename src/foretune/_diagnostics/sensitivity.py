"""Why a response is chaotic: how training multiplies a small change, v_t = A_t ... A_1 v_0."""

import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, PyTree

from .._engines.products import has_no_mode, pushforward
from .._problem.arguments import filtered
from .._problem.problem import Problem
from .._problem.system import make_system


class Sensitivity(NamedTuple):
    """How a small change of the weights grows in training."""

    norms: Float[np.ndarray, " T"]  # |v_t| / |v_0| after each step
    factor: float  # from the smallest to the largest after it
    first: int  # the steps, counted from 1, in which four fifths of that happen (in its logarithm)
    last: int

    def __str__(self) -> str:
        if self.factor < 2:
            return "a small change of the weights does not grow in training"
        where = f"most of it in steps {self.first} to {self.last} of {len(self.norms)}"
        return f"a small change of the weights grows {self.factor:.2g} times, {where}"


def sensitivity_of(problem: Problem, hparams: PyTree, key: Array) -> Sensitivity | None:
    """Return the sensitivity to a change of the weights, or None where a step has no forward mode."""
    try:
        logs = np.asarray(_log_norms(problem, hparams, key), np.float64)
    except (TypeError, ValueError, NotImplementedError) as error:
        if not has_no_mode(error):
            raise
        return None
    grown = np.concatenate([[0.0], np.minimum(np.nan_to_num(logs, nan=np.inf), 700.0)])
    top = int(grown.argmax())
    low = int(grown[: top + 1].argmin())
    rising = grown[low : top + 1] - grown[low]
    first = low + int(np.flatnonzero(rising <= 0.1 * rising[-1])[-1]) + 1
    last = max(low + int(np.flatnonzero(rising >= 0.9 * rising[-1])[0]), 1)
    return Sensitivity(np.exp(grown[1:]), math.exp(min(rising[-1], 700.0)), min(first, last), last)


@filtered
def _log_norms(problem: Problem, hparams: PyTree, key: Array) -> Float[Array, " T"]:
    system = make_system(problem, hparams)
    s_0 = system.initial(hparams)
    moving = eqx.filter(s_0, eqx.is_inexact_array)
    chosen = _weights(moving)
    random, treedef = jax.tree.flatten(optax.tree.random_like(key, moving))
    v = [x if weight else jnp.zeros_like(x) for x, weight in zip(random, chosen, strict=True)]

    def normed(v):
        size = jnp.maximum(optax.tree.norm([x.astype(jnp.float32) for x in v]), 1e-30)
        return [x / size.astype(x.dtype) for x in v], jnp.log(size)

    def step(carry, x):
        s, v, log = carry  # the change is exp(log) v, with |v| = 1
        stacked = treedef.unflatten([leaf[None] for leaf in v])
        s, out = pushforward(lambda s: system.step(s, hparams, x), (s,), (stacked,))
        v = [leaf[0] for leaf in jax.tree.leaves(out)]
        of_weights = normed([x for x, weight in zip(v, chosen, strict=True) if weight])[1]
        v, more = normed(v)
        return (s, v, log + more), log + of_weights

    start = s_0, normed(v)[0], jnp.zeros((), jnp.float32)
    return lax.scan(step, start, system.xs, length=system.steps)[1]


def _weights(state: PyTree) -> list[bool]:
    """Return which leaves of a state are weights, `params`: all of them where none is."""
    paths = [path for path, _ in jax.tree.leaves_with_path(state)]
    fields = [[k.name for k in path if isinstance(k, jax.tree_util.GetAttrKey)] for path in paths]
    marked = [names[:1] == ["params"] for names in fields]
    return marked if any(marked) else [True] * len(marked)

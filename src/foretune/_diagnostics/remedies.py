"""What may make a chaotic response smooth: changes of a training that can be tried without its author.

warm-up, lower rate    w_t = w_{t-1} + a_t (w'_t - w_{t-1}), with w'_t what the step gives
eps_root               Adam's second moment v_t raised, so that v_hat_t + e is in its root
"""

from collections.abc import Iterator
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from .._problem.dynamics import Wrapper
from .._problem.mean import Mean
from .._problem.problem import Problem
from .._problem.training import TrainState
from .sensitivity import Sensitivity

GROWS = 2.0  # from this growth of a small change on the training is to blame
EARLY = 0.25  # of the steps: where growth calls for a warm-up
WARM_UP = 0.1  # of the steps
EPS_ROOTS = (1e-8, 1e-6)
LOWER = (0.5, 0.1)  # times the rate
FEWEST = 10  # steps that have room for a warm-up


class Remedy(NamedTuple):
    """A change of the training: its name, how to make it, and the problem with it."""

    name: str
    how: str
    problem: Problem


class Damped(Wrapper):
    """A training whose updates are multiplied by a factor, and rise to it over a warm-up."""

    factor: float = eqx.field(static=True)
    warm_up: int = eqx.field(static=True)

    def step(self, state: TrainState, hparams: PyTree, batch: PyTree) -> TrainState:
        """Return s_t with its weights part of the way."""
        new = self.dynamics.step(state, hparams, batch)
        part = self.factor * jnp.minimum(1.0, (state.step + 1) / self.warm_up)

        def between(old, new):
            if not eqx.is_inexact_array(new):
                return new
            return old + part.astype(new.dtype) * (new - old)

        return new._replace(params=jax.tree.map(between, state.params, new.params))


class Floored(Wrapper):
    """A training with Adam whose `eps_root` is larger by some number."""

    eps_root: float = eqx.field(static=True)

    def step(self, state: TrainState, hparams: PyTree, batch: PyTree) -> TrainState:
        """Return s_t, the second moments raised while it is computed.

        v_t = b2 v_{t-1} + (1 - b2) g^2 and v_hat_t = v_t / (1 - b2^t): with v_{t-1} larger by
        r = e (1 - b2^t) / b2 the root is of v_hat_t + e. The moments that are kept are the plain ones.
        """
        plain = self.dynamics.step(state, hparams, batch)
        one = self.dynamics.step(_raised(state, 1.0), hparams, batch)
        above, below = (jax.tree.leaves(_adam(s)[0].nu)[0].ravel()[0] for s in (one, plain))
        b2, count = above - below, _adam(state)[0].count + 1
        r = jax.lax.stop_gradient(self.eps_root * (1 - b2**count) / b2)
        new = self.dynamics.step(_raised(state, r), hparams, batch)
        return _with_nu(new, [adam.nu for adam in _adam(plain)])


def _is_adam(node: object) -> bool:
    return isinstance(node, optax.ScaleByAdamState)


def _adam(state: TrainState) -> list[optax.ScaleByAdamState]:
    return [n for n in jax.tree.leaves(state.opt_state, is_leaf=_is_adam) if _is_adam(n)]


def _with_nu(state: TrainState, nus: list[PyTree]) -> TrainState:
    remaining = iter(nus)
    replaced = jax.tree.map(
        lambda node: node._replace(nu=next(remaining)) if _is_adam(node) else node,
        state.opt_state,
        is_leaf=_is_adam,
    )
    return state._replace(opt_state=replaced)


def _raised(state: TrainState, by: float | Array) -> TrainState:
    nus = [jax.tree.map(lambda x: x + jnp.asarray(by, x.dtype), adam.nu) for adam in _adam(state)]
    return _with_nu(state, nus)


def remedies(
    problem: Problem, hparams: PyTree, sensitivity: Sensitivity | None
) -> Iterator[Remedy]:
    """Yield the changes that the sensitivity, where it is known, speaks for, and that can be tried."""
    dynamics, T = problem.dynamics, problem.steps
    state = eqx.filter_eval_shape(problem.start, hparams)
    chaotic = sensitivity is None or sensitivity.factor > GROWS
    if isinstance(problem, Mean) or not isinstance(state, TrainState) or not chaotic:
        return
    if T >= FEWEST and (sensitivity is None or sensitivity.first <= EARLY * T):
        n = max(2, round(WARM_UP * T))
        warm = problem.replace(dynamics=Damped(dynamics, 1.0, n))
        yield Remedy("warm-up", f"updates that rise over the first {n} of {T} steps", warm)
    if _adam(state):
        for eps_root in EPS_ROOTS:
            floored = problem.replace(dynamics=Floored(dynamics, eps_root))
            yield Remedy(f"eps_root + {eps_root:g}", "a larger eps_root of Adam", floored)
    for factor in LOWER:
        lower = problem.replace(dynamics=Damped(dynamics, factor, 1))
        yield Remedy("lower rate", f"updates {factor:g} times as long at every step", lower)

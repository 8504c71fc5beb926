"""What may make a rough response smooth: changes of a training that can be tried without its author.

warm-up, lower rate    w_t = w_{t-1} + a_t (w'_t - w_{t-1}), with w'_t what the step gives
eps_root               Adam's second moment v_t raised, so that v_hat_t + e is in its root
larger batches         the indices of two steps in one
fewer steps            the batches before the growth, half of them at most
full precision         the loss in float32, products of matrices at the highest precision
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from .._problem.batches import FullBatch, Minibatches, Stacked
from .._problem.dynamics import Wrapper
from .._problem.mean import Mean
from .._problem.problem import Problem
from .._problem.training import TrainState
from .sensitivity import Growth

GROWS = 2.0  # from this growth on the training is to blame
EARLY = 0.25  # of the steps: where growth calls for a warm-up
WARM_UP = 0.1  # of the steps
EPS_ROOTS = (1e-8, 1e-6)
LOWER = (0.5, 0.1)  # times the rate
FEWEST = 5  # steps, from twice as many on fewer are tried

_highest = functools.partial(jax.default_matmul_precision, "highest")


class Remedy(NamedTuple):
    """A change of the training: its name, how to make it, and the problem with it."""

    name: str
    how: str
    problem: Problem
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


class Damped(Wrapper):
    """A training whose updates are multiplied by a factor, and rise to it over a warm-up."""

    factor: float = eqx.field(static=True)
    warm_up: int = eqx.field(static=True)

    def step(self, state: Any, hparams: Any, batch: Any) -> Any:
        """Return s_t with its weights part of the way."""
        new = super().step(state, hparams, batch)
        part = self.factor * jnp.minimum(1.0, (state.step + 1) / self.warm_up)

        def between(old, new):
            if not eqx.is_inexact_array(new):
                return new
            return old + part.astype(new.dtype) * (new - old)

        return new._replace(params=jax.tree.map(between, state.params, new.params))


class Floored(Wrapper):
    """A training with Adam whose `eps_root` is larger by some number."""

    eps_root: float = eqx.field(static=True)

    def step(self, state: Any, hparams: Any, batch: Any) -> Any:
        """Return s_t, the second moments raised while it is computed.

        v_t = b2 v_{t-1} + (1 - b2) g^2 and v_hat_t = v_t / (1 - b2^t): with v_{t-1} larger by
        r = e (1 - b2^t) / b2 the root is of v_hat_t + e. The moments that are kept are the plain ones.
        """
        plain = super().step(state, hparams, batch)
        one = super().step(_raised(state, 1.0), hparams, batch)
        b2, count = _difference(one, plain), _adam(state)[0].count + 1
        r = jax.lax.stop_gradient(self.eps_root * (1 - b2**count) / b2)
        new = super().step(_raised(state, r), hparams, batch)
        nus = [adam.nu for adam in _adam(plain)]
        return _with_nu(new, nus)


def _is_adam(node: Any) -> bool:
    return isinstance(node, optax.ScaleByAdamState)


def _adam(state: Any) -> list[Any]:
    return [n for n in jax.tree.leaves(state.opt_state, is_leaf=_is_adam) if _is_adam(n)]


def _with_nu(state: Any, nus: list[PyTree]) -> Any:
    remaining = iter(nus)
    replaced = jax.tree.map(
        lambda node: node._replace(nu=next(remaining)) if _is_adam(node) else node,
        state.opt_state,
        is_leaf=_is_adam,
    )
    return state._replace(opt_state=replaced)


def _raised(state: Any, by: Any) -> Any:
    nus = [jax.tree.map(lambda x: x + jnp.asarray(by, x.dtype), adam.nu) for adam in _adam(state)]
    return _with_nu(state, nus)


def _difference(one: Any, plain: Any) -> Any:
    """Return b2: by how much a second moment grows where the one before grows by 1."""
    a, b = (jax.tree.leaves(_adam(state)[0].nu)[0].ravel()[0] for state in (one, plain))
    return jax.lax.stop_gradient(a - b)


def remedies(
    problem: Problem, hparams: PyTree, growth: Growth | None, noisy: bool, low: str | None
) -> Iterator[Remedy]:
    """Yield the changes that what was seen speaks for, and that can be tried.

    Args:
        problem: the problem.
        hparams: its hyperparameters.
        growth: of small changes, where known.
        noisy: whether the order of the batches moves the error more than a step of tuning.
        low: the type below single precision that steps compute in, if any.
    """
    dynamics, T = problem.dynamics, problem.steps
    if isinstance(problem, Mean):
        return
    state = eqx.filter_eval_shape(problem.start, hparams)
    grows = growth is None or growth.factor > GROWS
    if low and (precise := dynamics.in_precision(jnp.float32)) is not None:
        full = problem.replace(dynamics=precise)
        yield Remedy("full precision", f"the loss in float32, not {low}", full, _highest)
    elif jax.default_backend() != "cpu":
        yield Remedy("full precision", 'jax.default_matmul_precision("highest")', problem, _highest)
    if isinstance(state, TrainState) and grows:
        if T >= 2 * FEWEST and (growth is None or growth.first <= EARLY * T):
            n = max(2, round(WARM_UP * T))
            warm = problem.replace(dynamics=Damped(dynamics, 1.0, n))
            yield Remedy("warm-up", f"updates that rise over the first {n} of {T} steps", warm)
        if len(_adam(state)):
            for eps_root in EPS_ROOTS:
                floored = problem.replace(dynamics=Floored(dynamics, eps_root))
                yield Remedy(f"eps_root + {eps_root:g}", "a larger eps_root of Adam", floored)
        for factor in LOWER:
            lower = problem.replace(dynamics=Damped(dynamics, factor, 1))
            yield Remedy("lower rate", f"updates {factor:g} times as long at every step", lower)
    if isinstance(problem.batches, Minibatches) and noisy and problem.batches.indices.ndim == 2:
        n = problem.batches.indices.shape[1]
        yield Remedy("larger batches", f"batches of {2 * n}, not {n}", _larger(problem))
    if T >= 2 * FEWEST and grows:
        n = T // 2 if growth is None else min(T // 2, max(growth.first - 1, FEWEST))
        yield Remedy("fewer steps", f"{n} steps, not {T}", _shorter(problem, n))


def _larger(problem: Problem) -> Problem:
    indices = problem.batches.indices
    other = jnp.roll(indices, problem.steps // 2, 0)
    return problem.replace(batches=problem.batches.at(jnp.concatenate([indices, other], 1)))


def _shorter(problem: Problem, n: int) -> Problem:
    batches = problem.batches
    if isinstance(batches, Minibatches):
        return problem.replace(batches=batches.at(batches.indices[:n]))
    if isinstance(batches, FullBatch):
        return problem.replace(batches=FullBatch(batches.data, n))
    assert isinstance(batches, Stacked)
    return problem.replace(batches=jax.tree.map(lambda leaf: leaf[:n], batches.xs))

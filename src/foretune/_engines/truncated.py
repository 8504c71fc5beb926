"""Truncated reverse mode: the adjoint over the last k steps alone.

With the last k steps, t = T - k + 1 .. T,

    g_k = dE/dlambda + sum_{t > T-k} alpha_t B_t,

which leaves out the influence of the hyperparameters on s_{T-k}. Exactly that is its error:

    grad f - g_k = alpha_{T-k} ds_{T-k}/dlambda.

It is small where the training forgets: near a minimum, with steps that contract by a factor rho in
every direction, |alpha_{T-k}| <= rho^k |alpha_T|. On a stretch where the training does not
contract (few steps, a small learning rate, momentum near 1) it need not be small, and may have the
wrong sign.

Time: a training run, and k steps more than once. Memory: k states, whatever T is.
Reference: Shaban et al., Truncated Back-propagation for Bilevel Optimization, AISTATS 2019.
"""

import jax
from jaxtyping import PyTree

from .._problem.checks import check_count
from .._problem.system import System
from .base import AbstractEngine, Solution, check_options
from .nonfinite import FORWARD
from .products import error_gradients
from .reverse import Reverse
from .schedules import Adjoint, advance


class Truncated(AbstractEngine):
    """An approximate hypergradient: reverse mode over the last `steps` steps alone.

    Use it where reverse mode's memory or time over all T steps is too much, the hyperparameters are
    too many for `Forward`, and the training has settled: its error is the influence that the
    hyperparameters had through the state before the last `steps` steps. Exact memory savings,
    without that error, are `Reverse(store=...)`. With `steps` of T or more it is `Reverse`.

    Args:
        steps: k, the steps to go back over.
        check_finite: what happens to a result that is not finite: see `foretune.AbstractEngine`.
        unroll: as in `Reverse`.
        store: as in `Reverse`, for the k steps.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> problem = ft.Problem(
    ...     dynamics=ft.Training(lambda w, h, x: (w - h["target"]) ** 2, optax.sgd(0.25)),
    ...     objective=lambda state, h, x: state.params, init=jnp.array(0.0),
    ...     batches=ft.FullBatch(jnp.array(0.0), steps=10), validation=jnp.array(0.0))
    >>> hparams = {"target": jnp.array(1.0)}  # s_T = (1 - 2^-T) target
    >>> float(ft.Reverse()(problem, hparams).grad["target"])
    0.9990234375
    >>> float(ft.Truncated(3)(problem, hparams).grad["target"])  # 1 - 2^-3
    0.875
    """

    steps: int
    check_finite: bool | None
    unroll: int
    store: str | int

    def __init__(
        self,
        steps: int,
        *,
        check_finite: bool | None = None,
        unroll: int = 1,
        store: str | int = "states",
    ):
        self.steps, self.check_finite, self.unroll, self.store = steps, check_finite, unroll, store
        check_options(self)
        check_count(self.steps, f"Truncated(steps={self.steps})")
        Reverse(unroll=self.unroll, store=self.store)  # the same checks

    @property
    def other_mode(self) -> str:
        """`Forward`."""
        return FORWARD

    def solve(self, system: System, hparams: PyTree) -> Solution:
        """Return the errors, g_k and s_T."""
        whole = Reverse(unroll=self.unroll, store=self.store)
        if self.steps >= system.steps:
            return whole.solve(system, hparams)
        before = system.steps - self.steps
        s = advance(system, hparams, system.initial(hparams), 0, before, self.unroll)
        last = system._replace(
            xs=jax.tree.map(lambda leaf: leaf[before:], system.xs), steps=self.steps
        )
        s_T, memory = whole.schedule.forward(last, hparams, s)
        errors, alpha_T, g = error_gradients(system, s_T, hparams)
        _, g = whole.schedule.backward(last, hparams, memory, Adjoint(alpha_T, g))
        return Solution(errors, g, s_T)

"""Reverse mode: the adjoint of the training (Reverse-HG).

With A_t = dPhi_t/ds_{t-1}, B_t = dPhi_t/dlambda and row vectors alpha_t,

    alpha_T = grad E(s_T),    alpha_{t-1} = alpha_t A_t,
    grad f  = dE/dlambda + sum_{t=1..T} alpha_t B_t + alpha_0 ds_0/dlambda.

The states s_0 .. s_{T-1} are stored on the way forward; on the way back each step is recomputed
from its stored state to give alpha_t A_t and alpha_t B_t in one transposed product.

Time: that of a few training runs, whatever the number of hyperparameters. Memory: T states.
Reference: Franceschi et al., ICML 2017, Algorithm 1, with the term of the first step, the
dependence of s_0 on lambda and the direct dependence of E on lambda, which it leaves out.
"""

import equinox as eqx
import jax
from jax import lax
from jaxtyping import PyTree

from .._problem import System
from .._validate import check_count
from .base import AbstractEngine, Solution, check_options
from .products import error_gradients, pull_rows


class Reverse(AbstractEngine):
    """The exact hypergradient by reverse mode: for many hyperparameters.

    Costs the time of a few training runs for any number of hyperparameters, and the memory of T
    states. When T states do not fit, or hyperparameters are few, use `Forward`. `check_finite`: see
    `AbstractEngine`; by default a result that is not finite raises `NonFiniteError`, except inside
    `jax.jit`. `unroll` puts that many steps into one turn of the loops: the same result, longer
    compilation, and less overhead where a step is so small that starting its kernels takes the time.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> problem = ft.Problem(
    ...     dynamics=ft.Training(lambda w, h, x: (w - x) ** 2, lambda h: optax.sgd(h["lr"])),
    ...     objective=lambda state, h, x: (state.params - x) ** 2,
    ...     init=jnp.array(0.0), batches=ft.FullBatch(jnp.array(1.0), steps=1),
    ...     validation=jnp.array(1.0))
    >>> value, grad, state = ft.Reverse()(problem, {"lr": jnp.array(0.25)})
    >>> float(value), float(grad["lr"]), float(state.params)  # f = (1 - 2 lr)^2
    (0.25, -2.0, 0.5)
    """

    check_finite: bool | None = None
    unroll: int = 1

    def __check_init__(self):
        check_options(self)
        check_count(self.unroll, f"Reverse(unroll={self.unroll})")

    def solve(self, system: System, hparams: PyTree) -> Solution:
        """Return the errors, their gradients and s_T."""
        s_0, pull_initial = eqx.filter_vjp(system.initial, hparams)
        s_T, states = record(system, hparams, s_0, self.unroll)
        errors, alpha_T, g = error_gradients(system, s_T, hparams)
        alpha_0, g = sweep(system, hparams, states, alpha_T, g, self.unroll)
        (g_initial,) = pull_rows(pull_initial, alpha_0)
        return Solution(errors, jax.tree.map(lambda a, b: a + b, g, g_initial), s_T)


def record(system: System, hparams: PyTree, s_0: PyTree, unroll: int = 1) -> tuple[PyTree, PyTree]:
    """Return s_T and the stacked states s_0 .. s_{T-1}."""

    def step(s, x):
        return system.step(s, hparams, x), s  # s_t <- Phi_t(s_{t-1}, lambda), keep s_{t-1}

    return lax.scan(step, s_0, system.xs, length=system.steps, unroll=unroll)


def sweep(
    system: System, hparams: PyTree, states: PyTree, alpha: PyTree, g: PyTree, unroll: int = 1
) -> tuple[PyTree, PyTree]:
    """Return alpha_0 and g after the steps T .. 1, from alpha_T and g = dE/dlambda."""

    def adjoint_step(carry, stored):
        alpha, g = carry
        s, x = stored
        _, pull = eqx.filter_vjp(lambda s, h: system.step(s, h, x), s, hparams)
        alpha_A, alpha_B = pull_rows(pull, alpha)
        return (alpha_A, jax.tree.map(lambda a, b: a + b, g, alpha_B)), None

    carry, _ = lax.scan(adjoint_step, (alpha, g), (states, system.xs), reverse=True, unroll=unroll)
    return carry

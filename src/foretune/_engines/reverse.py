"""Reverse mode: the adjoint of the training (Reverse-HG).

With A_t = dPhi_t/ds_{t-1}, B_t = dPhi_t/dlambda and row vectors alpha_t,

    alpha_T = grad E(s_T),    alpha_{t-1} = alpha_t A_t,
    grad f  = dE/dlambda + sum_{t=1..T} alpha_t B_t + alpha_0 ds_0/dlambda.

The states s_0 .. s_{T-1} are stored on the way forward, or some of them (`schedules.py`); on the way
back each step is computed again to give alpha_t A_t and alpha_t B_t in one transposed product.
Reference: Franceschi et al., ICML 2017, Algorithm 1, with the term of the first step, the
dependence of s_0 on lambda and the direct dependence of E on lambda, which it leaves out.
"""

import operator
from typing import Any, ClassVar

import equinox as eqx
import jax
from jaxtyping import PyTree

from .._problem.checks import check_count, check_flag
from .._problem.problem import Problem
from .._problem.system import System, make_system
from .base import Solution, TracedEngine
from .nonfinite import FORWARD
from .products import error_gradients, pull_rows
from .schedules import Adjoint, Binomial, Everything, Gradients, Loop, Schedule, States
from .segments import Segments

STORES = dict(everything=Everything, gradients=Gradients, states=States, segments=Segments)


class Reverse(TracedEngine):
    """The exact hypergradient by reverse mode: for many hyperparameters.

    Costs the time of a few trainings, whatever the number of hyperparameters, and what it stores.

    Args:
        store: what is stored on the way forward; the rest is computed again. All give the same result.
            "states" (default): the T states, each step computed once more.
            "gradients": also the gradients of `Training`'s loss, so that only the optimizer's part of a
            step is computed again.
            "everything": also what is inside the steps; nothing is computed again.
            "segments": about 2 sqrt(T) states, and gradients with half of them; each step computed
            once more. Where updates cost little beside gradients, these are kept in place of states.
            A number c: at most c states, and as few steps computed again as c allow.
        transpose: how the adjoint passes through the gradient of `Training`'s loss: by "forward" mode
            over the gradient (default), which stores little inside a step, since the Hessian is
            symmetric; or by "reverse" mode. Give that where the loss has a `jax.custom_jvp` that is not
            the derivative of any function; a loss with a `jax.custom_vjp` always gets it.
        unroll: steps in one turn of the loops: longer compilation, less overhead of small steps.
        first_order: leave out the Hessian of `Training`'s loss, so that A_t is the optimizer's alone:
            cheaper steps, and an approximation (first-order MAML, where initial weights are learnt).

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> problem = ft.Problem(
    ...     ft.Training(lambda w, h, _: (w - 1) ** 2, lambda h: optax.sgd(h["lr"])),
    ...     lambda state, h, _: (state.params - 1) ** 2, jnp.array(0.0), ft.FullBatch(None, steps=1))
    >>> value, grad, state = ft.Reverse()(problem, {"lr": jnp.array(0.25)})
    >>> float(value), float(grad["lr"]), float(state.params)  # f = (1 - 2 lr)^2
    (0.25, -2.0, 0.5)
    >>> ft.Reverse(store=3)(problem, {"lr": jnp.array(0.25)}).value
    Array(0.25, dtype=float32)
    """

    other_mode: ClassVar[str | None] = FORWARD
    store: Any = "states"  # a name or a number
    transpose: str = eqx.field(default="forward", kw_only=True)
    unroll: int = eqx.field(default=1, kw_only=True)
    first_order: bool = eqx.field(default=False, kw_only=True)

    def __check_init__(self):
        check_count(self.unroll, f"Reverse(unroll={self.unroll})")
        check_flag(self.first_order, "Reverse's first_order")
        if self.store not in tuple(STORES) and not (type(self.store) is int and self.store >= 1):
            names = "a number of states, 1 or more, or one of " + ", ".join(map(repr, STORES))
            raise ValueError(f"Reverse(store={self.store!r}): give {names}.")
        if self.transpose not in ("forward", "reverse"):
            raise ValueError(f"Reverse(transpose={self.transpose!r}): give 'forward' or 'reverse'.")

    @property
    def schedule(self) -> Schedule:
        return STORES[self.store]() if self.store in STORES else Binomial(self.store)

    def loop(self, system: System, hparams: PyTree) -> Loop:
        """Return the steps as `transpose` and `unroll` ask for them."""
        if self.transpose == "reverse":
            system = system._replace(transposable=system.step)
        return Loop(system, hparams, self.unroll)

    def solve(self, problem: Problem, system: System, hparams: PyTree) -> Solution:
        if self.first_order:
            plain = eqx.tree_at(lambda p: p.dynamics, problem, problem.dynamics.first_order())
            system = make_system(plain, hparams)
        schedule, loop = self.schedule, self.loop(system, hparams)
        s_0, pull_initial = eqx.filter_vjp(system.initial, hparams)
        s_T, stored = schedule.forward(loop, s_0)
        errors, alpha_T, g = error_gradients(system, s_T, hparams)
        alpha_0, g = schedule.backward(loop, stored, Adjoint(alpha_T, g))
        (g_initial,) = pull_rows(pull_initial, alpha_0)
        return Solution(errors, jax.tree.map(operator.add, g, g_initial), s_T)

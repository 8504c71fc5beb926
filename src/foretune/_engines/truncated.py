"""Truncated reverse mode: the adjoint over the last k steps alone.

With the last k steps, t = T - k + 1 .. T,

    g_k = dE/dlambda + sum_{t > T-k} alpha_t B_t,

which lacks alpha_{T-k} ds_{T-k}/dlambda. That is small where the training forgets: near a minimum, with
steps that contract by a factor rho, |alpha_{T-k}| <= rho^k |alpha_T|. Elsewhere even the sign may be
wrong. So a call warns where the older half of the k steps has more than a fifth of the sum of both
halves' lengths; each half has a copy of the hyperparameters, so that one adjoint gives both.
Reference: Shaban et al., Truncated Back-propagation for Bilevel Optimization, AISTATS 2019.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._problem.checks import check_count, named_leaves
from .._problem.problem import Problem
from .._problem.system import System
from .._problem.warn import warn
from .base import Solution, TracedEngine
from .nonfinite import FORWARD
from .products import error_gradients
from .reverse import Reverse
from .schedules import Adjoint, Loop, take

TOLERATED = 0.2  # the older half's share


class Truncated(TracedEngine):
    """An approximate hypergradient: reverse mode over the last `steps` steps alone.

    Use it where reverse mode over all T steps takes too long, and the training has settled: it leaves
    out the influence through the state before the last `steps` steps. `Reverse(store=...)` saves memory
    and is exact. A call outside of `jax.jit` warns where the older half still has much of the gradient.

    Args:
        steps: k, the steps to go back over.
        store: as in `Reverse`, for the k steps.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> problem = ft.Problem(
    ...     dynamics=ft.Training(lambda w, h, x: (w - h["target"]) ** 2, optax.sgd(0.25)),
    ...     objective=lambda state, h, x: state.params, init=jnp.array(0.0),
    ...     batches=ft.FullBatch(jnp.array(0.0), steps=10), validation=jnp.array(0.0))
    >>> hparams = {"target": jnp.array(1.0)}  # s_T = (1 - 2^-T) target
    >>> float(ft.Reverse()(problem, hparams).grad["target"])
    0.9990234375
    >>> float(ft.Truncated(6)(problem, hparams).grad["target"])  # 1 - 2^-6
    0.984375
    """

    other_mode: ClassVar[str | None] = FORWARD
    steps: Any  # a number
    reverse: Reverse

    def __init__(self, steps: Any, *, store: Any = "states"):
        check_count(steps, f"Truncated(steps={steps})")
        self.steps, self.reverse = steps, Reverse(store)

    def solve(self, problem: Problem, system: System, hparams: PyTree) -> Solution:
        """Return the errors, g_k and s_T, and the lengths of both halves' parts."""
        if self.steps >= system.steps:
            return self.reverse.solve(problem, system, hparams)
        before = system.steps - self.steps
        s = Loop(system, hparams).advance(system.initial(hparams), 0, before)

        def of_half(step):
            return lambda s, copies, entry: step(s, take(copies, entry[0]), entry[1])

        halves = jnp.arange(self.steps) * 2 // self.steps
        last = system._replace(
            step=of_half(system.step),
            transposable=of_half(system.transposable),
            xs=(halves, jax.tree.map(lambda leaf: leaf[before:], system.xs)),
            steps=self.steps,
        )
        copies = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), hparams)
        schedule, loop = self.reverse.schedule, Loop(last, copies)
        s_T, stored = schedule.forward(loop, s)
        errors, alpha_T, explicit = error_gradients(system, s_T, hparams)
        zeros = jax.tree.map(lambda row: jnp.stack([0 * row, 0 * row], 1), explicit)
        _, parts = schedule.backward(loop, stored, Adjoint(alpha_T, zeros))
        rows = jax.tree.map(lambda row, part: row + jnp.sum(part, 1), explicit, parts)
        return Solution(errors, rows, s_T, jax.tree.map(_lengths, parts))

    def review(self, report: PyTree[Float[Array, " 2"]] | None) -> None:
        lengths = named_leaves(report, "hparams").items()
        shares = {name: float(part[0]) / max(float(part.sum()), 1e-300) for name, part in lengths}
        much = [(share, name) for name, share in shares.items() if share > TOLERATED]
        if much and self.steps > 1:
            parts = [f"{share:.0%} of the gradient of {name}" for share, name in much]
            more = f" and of {len(parts) - 3} more" if len(parts) > 3 else ""
            warn(
                f"Truncated({self.steps}): the older half of these steps still has "
                f"{', '.join(parts[:3])}{more}; those left out would have about as much. Take more "
                "steps, or `Reverse(store=...)`, which is exact in as little memory.",
                RuntimeWarning,
            )


def _lengths(part: Array) -> Float[Array, " 2"]:
    flat = part.reshape(*part.shape[:2], -1).astype(np.promote_types(part.dtype, np.float32))
    return jnp.sqrt(jnp.sum(flat**2, (0, 2)))

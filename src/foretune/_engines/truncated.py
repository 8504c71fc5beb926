"""Truncated reverse mode: the adjoint over the last k steps alone.

With the last k steps, t = T - k + 1 .. T,

    g_k = dE/dlambda + sum_{t > T-k} alpha_t B_t,

which leaves out the influence of the hyperparameters on s_{T-k}. Exactly that is its error:

    grad f - g_k = alpha_{T-k} ds_{T-k}/dlambda.

It is small where the training forgets: near a minimum, with steps that contract by a factor rho in
every direction, |alpha_{T-k}| <= rho^k |alpha_T|. On a stretch where the training does not
contract (few steps, a small learning rate, momentum near 1) it need not be small, and may have the
wrong sign.

How fast the terms alpha_t B_t get smaller towards the past says how much is left out: they are summed
in a few pieces of the k steps, and extrapolated. Each piece has a copy of the hyperparameters, so that
one adjoint gives them all.

Time: a training run, and k steps more than once. Memory: k states, whatever T is.
Reference: Shaban et al., Truncated Back-propagation for Bilevel Optimization, AISTATS 2019.
"""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._problem.checks import check_count, named_leaves
from .._problem.problem import Problem, validated
from .._problem.system import System
from .base import AbstractEngine, Solution, check_options, compute
from .nonfinite import FORWARD
from .products import error_gradients
from .reverse import Reverse
from .schedules import Adjoint, advance

PIECES = 8
TOLERATED = 0.2  # of the gradient


class LeftOut(NamedTuple):
    """What `Truncated` keeps of a hypergradient, by step, and leaves out."""

    steps: int
    """The k last steps, which are kept."""
    of: int
    """T."""
    kept: dict[str, np.ndarray]
    """By leaf, the length of the part of each piece of the kept steps, the oldest first."""
    fraction: dict[str, float]
    """By leaf, the part of the gradient that the other steps would have, extrapolated."""

    def __str__(self) -> str:
        lines = [f"the last {self.steps} of {self.of} steps: part of the gradient, oldest first"]
        for leaf, parts in self.kept.items():
            shown = " ".join(f"{part:.2g}" for part in parts)
            lines.append(
                f"{leaf}: {shown}; the others, about {self.fraction[leaf]:.0%} of the whole"
            )
        return "\n".join(lines)


class Truncated(AbstractEngine):
    """An approximate hypergradient: reverse mode over the last `steps` steps alone.

    Use it where reverse mode's memory or time over all T steps is too much, the hyperparameters are
    too many for `Forward`, and the training has settled: its error is the influence that the
    hyperparameters had through the state before the last `steps` steps. Exact memory savings,
    without that error, are `Reverse(store=...)`. With `steps` of T or more it is `Reverse`. A call
    outside of `jax.jit` warns where the trend of the kept steps says that over a fifth is left out;
    `left_out(problem, hparams)` has the figures.

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

    def left_out(self, problem: Problem, hparams: PyTree) -> LeftOut:
        """Return how the kept gradient is made up, and about how much of it is missing."""
        arrays, structure = validated(problem, hparams)
        *_, report, _ = compute(self, structure, False, arrays)
        if report is None:
            names, T = named_leaves(hparams, "hparams"), problem.steps
            return LeftOut(T, T, {name: np.array([]) for name in names}, dict.fromkeys(names, 0.0))
        return self._left_out(report)

    def solve(self, system: System, hparams: PyTree) -> Solution:
        """Return the errors, g_k and s_T."""
        whole = Reverse(unroll=self.unroll, store=self.store)
        if self.steps >= system.steps:
            return whole.solve(system, hparams)
        before, n = system.steps - self.steps, min(PIECES, self.steps)
        s = advance(system, hparams, system.initial(hparams), 0, before, self.unroll)

        def of_piece(step):
            def by_copy(s, copies, entry):
                piece, x = entry
                return step(s, jax.tree.map(lambda leaf: leaf[piece], copies), x)

            return by_copy

        xs = jax.tree.map(lambda leaf: leaf[before:], system.xs)
        pieces = jnp.arange(self.steps) * n // self.steps
        last = system._replace(
            step=of_piece(system.step),
            transposable=of_piece(system.transposable),
            xs=(pieces, xs),
            steps=self.steps,
        )
        copies = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (n, *leaf.shape)), hparams)
        s_T, memory = whole.schedule.forward(last, copies, s)
        errors, alpha_T, explicit = error_gradients(system, s_T, hparams)
        nothing = jax.tree.map(
            lambda row: jnp.zeros((row.shape[0], n, *row.shape[1:]), row.dtype), explicit
        )
        _, parts = whole.schedule.backward(last, copies, memory, Adjoint(alpha_T, nothing))
        rows = jax.tree.map(lambda row, part: row + jnp.sum(part, 1), explicit, parts)
        return Solution(errors, rows, s_T, Parts(system.steps, jax.tree.map(_lengths, parts)))

    def review(self, report: Any) -> None:
        """Warn where much is left out."""
        if report is None:
            return
        found = self._left_out(report)
        much = {name: part for name, part in found.fraction.items() if part > TOLERATED}
        if much:
            parts = [
                f"{min(part, 0.99):.0%} of the gradient of {name}" for name, part in much.items()
            ]
            more = f" and of {len(parts) - 3} more" if len(parts) > 3 else ""
            warnings.warn(
                f"Truncated({self.steps}) leaves out the first {found.of - self.steps} of {found.of} "
                f"steps, by the trend of the others about {', '.join(parts[:3])}{more}. Take more "
                "steps, or `Reverse(store=...)`, which is exact in as little memory; "
                f"`Truncated({self.steps}).left_out(problem, hparams)` has the parts by step.",
                RuntimeWarning,
                stacklevel=3,
            )

    def _left_out(self, report: "Parts") -> LeftOut:
        kept = {
            name: np.asarray(part, np.float64)
            for name, part in named_leaves(report.kept, "hparams").items()
        }
        T = int(report.steps)
        halves = 2 * (T - self.steps) / self.steps  # half windows that are left out
        fraction = {name: _fraction(parts, halves) for name, parts in kept.items()}
        return LeftOut(self.steps, T, kept, fraction)


class Parts(NamedTuple):
    """The lengths of the parts of the gradient, as they leave the program."""

    steps: Any  # T
    kept: PyTree  # the hyperparameters' structure, with an axis of pieces


def _lengths(part: Any) -> Any:
    flat = part.reshape(*part.shape[:2], -1).astype(np.promote_types(part.dtype, np.float32))
    return jnp.sqrt(jnp.sum(flat**2, (0, 2)))


def _fraction(parts: np.ndarray, halves: float) -> float:
    """Return the part that is left out, if what is older shrinks as the older half does."""
    middle = len(parts) // 2
    if len(parts) < 2 or not np.isfinite(parts).all() or not parts.any():
        return 0.0
    old, new = parts[:middle].sum() / middle, parts[middle:].sum() / (len(parts) - middle)
    rate = min(old / new, 1.0) if new > 0 else 1.0  # of half a window
    # old rate + old rate^2 + ... of as many half windows as are left out
    left = old * (halves if rate > 1 - 1e-6 else rate * (1 - rate**halves) / (1 - rate))
    return float(left / (left + old + new))

"""A mean of the folds' hypergradients in which those that explode hardly count.

Where each fold i = 1 .. k has a copy lambda_i of the hyperparameters, one adjoint has all k gradients:

    d/dlambda_i  1/k sum_j E_j(s_T^j(lambda_j), lambda_j) = g_i / k.

Their mean is the gradient of the mean error, but one fold's may be a thousand times as long as others.
The best mean weighs each by the inverse of its second moment, which a long one's square estimates:

    g = sum_i w_i g_i / sum_i w_i,    w_i = 1 / max(1, |g_i|^2 / q^2),

with q the length of the second shortest, or with more than eleven folds of that at the lower quarter.
Lengths are of leaves in units of the middle one's. `Forward` takes k times as many tangents.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._problem.checks import describe
from .._problem.mean import Mean, is_per_fold, per_fold
from .._problem.problem import Problem
from .._problem.system import System, make_system
from .base import Solution, TracedEngine
from .forward import Forward
from .reverse import Reverse
from .truncated import Truncated

INNER = (Reverse, Forward, Truncated)


class RobustMean(TracedEngine):
    """The hypergradient of a `Mean` as a mean in which long ones count less.

    Use it with three folds or more, of which some amplify small changes. A fold whose gradient is r
    times as long as the second shortest counts 1 / r^2. It is not the gradient of the mean error.

    Args:
        engine: of each fold's gradient: `Reverse()` (default), `Forward()` or `Truncated(k)`.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> starts = jnp.array([0.0, 0.1, 0.2, 0.3, 50.0])
    >>> def problem_of_fold(k):
    ...     return ft.Problem(
    ...         ft.Training(lambda w, h, x: (w - 1) ** 2, lambda h: optax.sgd(h["lr"])),
    ...         lambda state, h, x: (state.params - 1) ** 2, init=starts[k],
    ...         batches=ft.FullBatch(jnp.array(0.0), steps=3), validation=jnp.array(0.0))
    >>> problem, hparams = ft.Mean([problem_of_fold(k) for k in range(5)]), {"lr": jnp.array(0.1)}
    >>> round(float(ft.Reverse()(problem, hparams).grad["lr"]), 1)  # that of the last fold, by five
    -1890.5
    >>> round(float(ft.RobustMean()(problem, hparams).grad["lr"]), 1)
    -2.7
    """

    engine: TracedEngine

    def __init__(self, engine: Any = None):
        if engine is not None and not isinstance(engine, INNER):
            raise TypeError(
                f"RobustMean(engine={describe(engine)}): give `Reverse()`, `Forward()` or "
                "`Truncated(k)`, then the problem: `RobustMean(Reverse())(problem, hparams)`."
            )
        self.engine = Reverse() if engine is None else engine

    @property
    def other_mode(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.engine.other_mode

    def review(self, report: Any) -> None:
        self.engine.review(report)

    def solve(self, problem: Problem, system: System, hparams: PyTree) -> Solution:
        if not isinstance(problem, Mean):
            given = describe(problem)
            raise TypeError(f"RobustMean takes a `foretune.Mean` or `Mean.of_draws`; got {given}.")
        k = problem.count
        copies = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (k, *leaf.shape)), hparams)
        copies = per_fold(copies)
        found = self.engine.solve(problem, make_system(problem, copies), copies)
        weights = jax.vmap(fold_weights)(found.rows)  # the K errors have weights of their own

        def mean(parts):
            shape = weights.shape + (1,) * (parts.array.ndim - 2)
            w = weights.reshape(shape).astype(parts.array.dtype)
            return jnp.sum(k * parts.array * w, axis=1)

        return found._replace(rows=jax.tree.map(mean, found.rows, is_leaf=is_per_fold))


def fold_weights(gradients: PyTree[Float[Array, "folds ..."]]) -> Float[Array, " folds"]:
    """Return the weight of each fold, by the lengths of its gradients."""
    logs = jnp.stack([_log_length(leaf) for leaf in jax.tree.leaves(gradients)])
    middle = jnp.sort(logs)[:, logs.shape[1] // 2, None]
    telling = ~jnp.isneginf(middle)  # a leaf of zeros does not
    relative = jnp.where(telling, logs - middle, -jnp.inf)
    lengths = jax.scipy.special.logsumexp(2 * relative, axis=0)  # their squares' logarithms
    k = len(lengths)
    usual = jnp.sort(lengths)[min(k - 1, max(1, k // 4 - 1))]
    longer = jnp.where(jnp.isneginf(usual), 0.0, jnp.maximum(lengths - usual, 0.0))
    return jax.nn.softmax(-longer)


def _log_length(leaf: Float[Array, "folds ..."]) -> Float[Array, " folds"]:
    """Return the logarithm of each fold's length, whose square may not be a number any more."""
    flat = jnp.abs(leaf.astype(np.promote_types(leaf.dtype, np.float32)).reshape(len(leaf), -1))
    return jax.scipy.special.logsumexp(2 * jnp.log(flat), axis=1) / 2

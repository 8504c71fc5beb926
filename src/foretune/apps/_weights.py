"""Cleaning by one weight for each example under an L1 budget (Franceschi et al., ICML 2017).

Inner problem: theta after T steps of gradient descent on (1/n) sum_i lambda_i loss_i(theta), over the
given labels alone. Outer problem: lambda minimises the mean loss of the checked labels over

    { 0 <= lambda_i <= 1, sum_i lambda_i <= R },

by the exact hypergradient in reverse mode and a projected Adam. Weights below 1e-3 mark suspects.
Stopping matters: after many hyper-iterations right labels are pruned too.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from .._constraints.sets import CappedSimplex
from .._outer.minimize import minimize
from .._outer.run import Result
from .._problem.batches import FullBatch
from .._problem.problem import Problem
from .._problem.training import Training

SUSPECT_BELOW = 1e-3
OPTIMIZER = optax.adam(0.005)


class _Losses(eqx.Module):
    model: Any

    def losses(self, params, batch):
        scores = self.model.apply(params, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch[1])


class _Loss(_Losses):
    def __call__(self, params, hparams, batch):
        return jnp.mean(hparams["weight"] * batch[2] * self.losses(params, batch))


class _Error(_Losses):
    def __call__(self, state, hparams, batch):
        return jnp.mean(self.losses(state.params, batch))


def tune_weights(
    model: Any,
    z: Float[Array, "n width"],
    given: Array,
    z_checked: Float[Array, "checks width"],
    checked: Array,
    classes: int,
    *,
    budget: float,
    steps: int,
    hyper_steps: int,
    engine: Any,
    key: Any,
    callbacks: Any,
    sample_weight: Any = 1.0,
) -> tuple[np.ndarray, np.ndarray, Result]:
    """Return the weights, the probabilities by the last inner model, and the descent."""
    n = z.shape[0]
    problem = Problem(
        dynamics=Training(_Loss(model), model.plain_optimizer(share=budget / n)),
        objective=_Error(model),
        init=model.init(key, z.shape[1], classes),
        batches=FullBatch((z, given, jnp.broadcast_to(jnp.asarray(sample_weight), n)), steps=steps),
        validation=(z_checked, checked),
    )
    result = minimize(
        problem,
        {"weight": jnp.full(n, budget / n)},
        steps=hyper_steps,
        engine=engine,
        optimizer=OPTIMIZER,
        constraints={"weight": CappedSimplex(budget)},
        callbacks=callbacks,
        take_back=False,
    )
    probabilities = jax.nn.softmax(model.apply(result.state.params, z))
    weights = np.asarray(result.hparams["weight"], np.float64)
    return weights, np.asarray(probabilities, np.float64), result

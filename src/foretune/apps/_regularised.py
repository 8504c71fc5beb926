"""Maximum a posteriori by T steps of Adam, its regularisers tuned on trusted rows held out.

    theta = argmin  loss(theta) + sum_g e^{h_g} |theta_g - start_g|^2

is solved for several folds of the trusted rows at once, each leaving one out. With enough trusted rows
the hyperparameters h descend, by the exact hypergradient through those T steps, on the negative log
likelihood of the rows left out; with fewer they stay where they start. What the likelihood is, a
subclass of `Likelihood` says: `_label_model.py` and `_value_model.py`.
"""

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from .._constraints.sets import Box
from .._outer.callbacks import Callback
from .._outer.minimize import minimize
from .._outer.run import Result
from .._problem.batches import FullBatch
from .._problem.problem import Problem
from .._problem.training import Training

FEW_TRUSTED = 20
"""With fewer trusted rows the hyperparameters stay where they start."""
FOLDS = 5
Hparams = dict[str, Array]
Rows = TypeVar("Rows")


class Likelihood(eqx.Module, Generic[Rows]):
    """A model of how observed labels come about; `rows.train` has the folds' trusted rows."""

    def start(self, rows: Rows) -> PyTree:
        """Return where the parameters start, and what they are drawn to."""
        raise NotImplementedError

    def observed_loss(self, params: PyTree, hparams: Hparams, rows: Rows) -> Float[Array, ""]:
        """Return the mean negative log likelihood of the observed labels."""
        raise NotImplementedError

    def trusted_losses(
        self, params: PyTree, hparams: Hparams, rows: Rows
    ) -> Float[Array, " trusted"]:
        """Return the negative log likelihood of each trusted row, as the training sees it."""
        raise NotImplementedError

    def held_out_losses(
        self, params: PyTree, hparams: Hparams, rows: Rows
    ) -> Float[Array, " trusted"]:
        """Return the same for rows held out."""
        return self.trusted_losses(params, hparams, rows)

    def prior(self, hparams: Hparams) -> Array:
        """Return the penalty of the hyperparameters, as of rows held out."""
        return jnp.zeros(())


class _Loss(eqx.Module):
    model: Likelihood

    def __call__(self, params, hparams, rows):
        start = self.model.start(rows)

        def fold(params, train):
            value = self.model.observed_loss(params, hparams, rows)
            if rows.train.shape[1]:
                losses = self.model.trusted_losses(params, hparams, rows)
                value = value + jnp.sum(train * losses) / jnp.sum(train)
            away = {name: jnp.sum((params[name] - start[name]) ** 2) for name in params}
            return value + sum(jnp.exp(hparams[name]) * away[name] for name in params)

        return jnp.sum(jax.vmap(fold)(params, rows.train))


class _Error(eqx.Module):
    model: Likelihood

    def __call__(self, state, hparams, rows):
        losses = jax.vmap(lambda params: self.model.held_out_losses(params, hparams, rows))
        held = jnp.sum((1 - rows.train) * losses(state.params)) + self.model.prior(hparams)
        return held / rows.train.shape[1]


class Fitting(NamedTuple):
    """How a likelihood is fitted: Adam's rate and steps, and those of the hyperparameters."""

    rate: float
    steps: int
    hyper_rate: float
    hyper_steps: int


def problem_of(model: Likelihood, rows: PyTree, fitting: Fitting) -> Problem:
    """Return the bilevel problem, all folds side by side."""
    return Problem(
        dynamics=Training(_Loss(model), optax.adam(fitting.rate, eps_root=1e-8)),
        objective=_Error(model),
        init=jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (len(rows.train), *leaf.shape)), model.start(rows)
        ),
        batches=FullBatch(rows, steps=fitting.steps),
        validation=rows,
    )


def tune(
    model: Likelihood,
    rows: PyTree,
    hparams: Hparams,
    fitting: Fitting,
    within: dict[str, Box],
    callbacks: Sequence[Callback],
) -> Result:
    """Let the hyperparameters descend on the trusted rows held out."""
    return minimize(
        problem_of(model, rows, fitting),
        hparams,
        steps=fitting.hyper_steps,
        optimizer=optax.adam(fitting.hyper_rate),
        constraints=within,
        callbacks=list(callbacks),
    )


def fit(model: Likelihood, rows: PyTree, hparams: Hparams, fitting: Fitting) -> PyTree:
    """Return the parameters of each fold."""
    return problem_of(model, rows, fitting).response(hparams)[1].params


def left_out(fold: np.ndarray) -> np.ndarray:
    """Return, for each fold, the mask of the rows outside of it."""
    return fold[None] != np.arange(FOLDS)[:, None]


def some(n: int, most: int, rng: np.random.Generator) -> np.ndarray:
    """Return all of n rows, or `most` of them, drawn at random."""
    return rng.permutation(n)[:most] if n > most else np.arange(n)

"""Cleaning by a model of how labels go wrong, its matrix learnt by hypergradients.

    p(observed label = j | x) = sum_k p_theta(k | x) N_kj,      N = softmax of the rows of a matrix

Inner problem, for each of J folds: theta minimises the mean of -log p over the observed labels (through
N) and the trusted labels (directly) outside the fold, plus 1/2 l2 ||theta||^2, by T full-batch steps.
Outer problem: the hyperparameters N and l2 minimise, over the labels inside the folds,

    E = mean over trusted labels of -log p_theta(y | x) + mean over observed labels of -log p(y | x),

by the exact hypergradient of the whole training. An example's weight is then the probability that
its label is right, from the fold's model, which did not see it:

    w_i = p(y_i | x_i) N_{y_i y_i} / sum_k p(k | x_i) N_{k y_i}.

N starts at the confusion between the observed labels and a model of the trusted ones. It
serves the response: as a statement about the noise it leans to more noise than there is where
trusted labels are few. The J trainings run as one program.
"""

from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

from .._constraints.sets import Box
from .._engines.base import AbstractEngine
from .._outer.callbacks import Callback
from .._outer.minimize import minimize
from .._outer.run import Result
from .._problem.batches import FullBatch
from .._problem.problem import Problem
from .._problem.training import Training
from ._models import Model

START_RIGHT = 0.8
"""The start supposes four labels of five to be right."""
START_L2 = 1e-4
RATE = 0.15
"""Of Adam: its steps are of logits and logarithms, scale-free quantities."""


class Descent(NamedTuple):
    """Steps of each training and of the hyperparameters, and what else `minimize` takes."""

    steps: int
    hyper_steps: int
    engine: AbstractEngine | None
    callbacks: Sequence[Callback]
    rate: float = RATE


class Data(NamedTuple):
    """Inputs of observed and trusted examples in one array, their labels, and the folds' members."""

    z: Float[Array, "rows width"]
    observed: Int[Array, " n"]
    trusted: Int[Array, " c"]
    train: Float[Array, "folds rows"]
    weight: Float[Array, " rows"] | None = None
    """How much each row counts, 1 on the mean; None: all the same."""

    @classmethod
    def of(
        cls,
        z: np.ndarray,
        observed: np.ndarray,
        trusted: np.ndarray,
        fold: np.ndarray,
        weight: np.ndarray | None,
    ) -> "Data":
        """Return the data, from the fold of each row."""
        train = (fold[None] != np.arange(fold.max() + 1)[:, None]).astype(np.float32)
        z_, observed_, trusted_, train_ = map(jnp.asarray, (z, observed, trusted, train))
        weight_ = None if weight is None else mean_one(weight)
        return cls(z_, observed_, trusted_, train_, weight_)

    def counted(self, folds: Float[Array, "folds rows"]) -> Float[Array, "folds rows"]:
        """Return the members of folds by their weight."""
        return folds if self.weight is None else folds * self.weight

    def sample(self, most: int, rng: np.random.Generator) -> "Data":
        """Return `most` of the observed examples, drawn at random, and all trusted ones."""
        n = self.observed.shape[0]
        if n <= most:
            return self
        some = np.sort(rng.permutation(n)[:most])
        rows = np.concatenate([some, np.arange(n, self.z.shape[0])])
        weight = None if self.weight is None else self.weight[rows]
        return Data(self.z[rows], self.observed[some], self.trusted, self.train[:, rows], weight)


def mean_one(weight: np.ndarray) -> Array:
    """Return weights scaled to a mean of 1."""
    return jnp.asarray(weight / weight.mean(), jnp.float32)


def make_folds(labels: np.ndarray, folds: int, rng: np.random.Generator) -> np.ndarray:
    """Return a fold for each example, each fold with its share of every label."""
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    fold = np.empty(len(labels), int)
    fold[order] = np.arange(len(labels)) % folds
    return fold


def start_matrix(classes: int) -> Float[Array, "classes classes"]:
    """Return the matrix in which `START_RIGHT` of the labels are right, and all confusions alike."""
    wrong = (1 - START_RIGHT) / (classes - 1)
    return jnp.where(jnp.eye(classes) > 0, START_RIGHT, wrong)


class _Part(eqx.Module):
    """A function of the problem: a module, so that equal ones share their compiled program."""

    model: Model

    def losses(self, params, hparams, batch):
        """Return -log p of each label, by each fold's model: an array of folds x rows."""
        n = batch.observed.shape[0]
        log_p = jax.nn.log_softmax(jax.vmap(self.model.apply, (0, None))(params, batch.z))
        trusted = jnp.take_along_axis(log_p[:, n:], batch.trusted[None, :, None], axis=2)[..., 0]
        if not n:
            return -trusted
        log_noise = jax.nn.log_softmax(hparams["noise"], axis=1)
        observed = jax.nn.logsumexp(log_p[:, :n] + log_noise.T[batch.observed], axis=2)
        return -jnp.concatenate([observed, trusted], axis=1)


class _Loss(_Part):
    def __call__(self, params, hparams, batch):
        penalties = jax.vmap(self.model.penalty, (0, None))(params, jnp.exp(hparams["l2"]))
        total = jnp.sum(batch.counted(batch.train) * self.losses(params, hparams, batch))
        return total / batch.z.shape[0] + jnp.sum(penalties)


class _Error(_Part):
    def __call__(self, state, hparams, batch):
        n, c = batch.observed.shape[0], batch.trusted.shape[0]
        held = batch.counted(1 - batch.train) * self.losses(state.params, hparams, batch)
        return jnp.sum(held[:, :n]) / max(n, 1) + jnp.sum(held[:, n:]) / max(c, 1)


class _Optimizer(_Part):
    def __call__(self, hparams):
        return self.model.optimizer(jnp.exp(hparams["l2"]))


def noise_problem(model: Model, data: Data, classes: int, steps: int, key: jax.Array) -> Problem:
    """Return the bilevel problem."""
    folds = data.train.shape[0]
    params = model.init(key, data.z.shape[1], classes)
    return Problem(
        dynamics=Training(_Loss(model), _Optimizer(model)),
        objective=_Error(model),
        init=jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (folds, *leaf.shape)), params),
        batches=FullBatch(data, steps=steps),
        validation=data,
    )


class Tuned(NamedTuple):
    """What the descent gives."""

    probabilities: np.ndarray
    """Of each class, for each example, the trusted ones last, by a model that has not seen it."""
    noise: np.ndarray
    l2: np.ndarray
    result: Result


def tune(
    model: Model,
    data: Data,
    classes: int,
    descent: Descent,
    key: jax.Array,
    tuned_on: Data | None = None,
) -> Tuned:
    """Learn the noise matrix and the regularisers; return them and the unseen probabilities.

    They are learnt on `tuned_on`, some of the rows of `data`, where that is given.
    """
    tuned_on = data if tuned_on is None else tuned_on
    problem = noise_problem(model, tuned_on, classes, descent.steps, key)
    hparams = {
        "noise": jnp.log(start_noise(model, tuned_on, classes, descent.steps, key)),
        "l2": jnp.full(model.groups, jnp.log(START_L2)),
    }
    result = minimize(
        problem,
        hparams,
        steps=descent.hyper_steps,
        engine=descent.engine,
        optimizer=optax.adam(descent.rate),
        constraints={"l2": Box(np.log(1e-9), np.log(10.0))},
        callbacks=list(descent.callbacks),
    )
    hparams = result.best.hparams
    if tuned_on is not data:
        # a regulariser stands beside a mean over rows: of more rows it has a smaller share
        share = np.log(tuned_on.z.shape[0] / data.z.shape[0])
        hparams = {**hparams, "l2": hparams["l2"] + share}
        problem = noise_problem(model, data, classes, descent.steps, key)
    _, state = problem.response(hparams)
    scores = jax.vmap(model.apply, (0, None))(state.params, data.z)
    unseen = jnp.argmin(data.train, axis=0)
    return Tuned(
        np.asarray(jax.nn.softmax(scores[unseen, jnp.arange(len(unseen))]), np.float64),
        np.asarray(jax.nn.softmax(hparams["noise"], axis=1), np.float64),
        np.asarray(jnp.exp(hparams["l2"])),
        result,
    )


def start_noise(
    model: Model, data: Data, classes: int, steps: int, key: jax.Array
) -> Float[Array, "classes classes"]:
    """Return where N starts: the observed labels beside a model of the trusted ones.

    N_kj is the mean of p(k | x) over rows with the observed label j, in shares of row k. A model of
    few rows is often wrong, so this has more noise than there is, but the right confusions in it; the
    mean with a matrix in which four labels of five are right keeps every entry above 0. Without trusted
    labels it is that matrix alone.
    """
    plain = start_matrix(classes)
    n, c = data.observed.shape[0], data.trusted.shape[0]
    if not c:
        return plain
    labels = jnp.concatenate([data.observed, data.trusted])
    use = np.arange(n + c) >= n
    params = train_plain(model, data.z, labels, use, classes, steps, key)
    p = jax.nn.softmax(model.apply(params, data.z[:n]))
    counts = jax.nn.one_hot(data.observed, classes)
    if data.weight is not None:
        counts = counts * data.weight[:n, None]
    joint = p.T @ counts
    return (plain + joint / jnp.sum(joint, axis=1, keepdims=True)) / 2


def true_label(probabilities: np.ndarray, noise: np.ndarray, observed: np.ndarray) -> np.ndarray:
    """Return p(true label | x, observed label): p_k N_kj / sum_k p_k N_kj, j the observed label."""
    joint = probabilities * noise.T[observed]
    return joint / joint.sum(axis=1, keepdims=True)


def train_plain(
    model: Model,
    z: np.ndarray | Array,
    labels: np.ndarray | Array,
    use: np.ndarray,
    classes: int,
    steps: int,
    key: jax.Array,
    l2: np.ndarray | None = None,
) -> PyTree:
    """Return the parameters after training on the labels to `use`, a mask or weights, as trusted."""
    l2 = np.full(model.groups, START_L2) if l2 is None else l2
    nobody, everybody = jnp.zeros(0, int), jnp.ones((1, len(use)))
    weight = mean_one(np.asarray(use, np.float64))
    data = Data(jnp.asarray(z), nobody, jnp.asarray(labels), everybody, weight)
    problem = noise_problem(model, data, classes, steps, key)
    _, state = problem.response({"l2": jnp.log(l2)})
    return jax.tree.map(lambda leaf: leaf[0], state.params)

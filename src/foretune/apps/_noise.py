"""Cleaning by a model of how labels go wrong, its matrix learnt by hypergradients.

    p(given label = j | x) = sum_k p_theta(k | x) N_kj,      N = softmax of the rows of a matrix

Inner problem, for each of J folds: theta minimises the mean of -log p over the given labels (through
N) and the checked labels (directly) outside the fold, plus 1/2 l2 ||theta||^2, by T full-batch steps.
Outer problem: the hyperparameters N and l2 minimise, over the labels inside the folds,

    E = mean over checked labels of -log p_theta(y | x)  +  mean over given labels of -log p(y | x),

by the exact hypergradient of the whole training. An example's weight is then the probability that
its label is right, from the fold's model, which did not see it:

    w_i = p(y_i | x_i) N_{y_i y_i} / sum_k p(k | x_i) N_{k y_i}.

N starts at the confusion between the given labels and a model of the checked ones (`start_noise`). It
serves the response: as a statement about the noise it leans to more noise than there is where
checked labels are few. The J trainings run as one program.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree
from scipy.optimize import brentq
from scipy.special import expit, logit

from .._constraints.sets import Box
from .._outer.minimize import minimize
from .._outer.run import Result
from .._problem.batches import FullBatch
from .._problem.problem import Problem
from .._problem.training import Training

START_RIGHT = 0.8
"""The start supposes four labels of five to be right."""
START_L2 = 1e-4
RATE = 0.15
"""Of Adam: its steps are of logits and logarithms, scale-free quantities."""


class Data(NamedTuple):
    """Inputs of given and checked examples in one array, their labels, and the folds' members."""

    z: Float[Array, "rows width"]
    given: Array
    checked: Array
    train: Float[Array, "folds rows"]
    weight: Float[Array, " rows"] | None = None
    """How much each row counts, 1 on the mean; None: all the same."""

    def counted(self, folds: Any) -> Any:
        """Return the members of folds by their weight."""
        return folds if self.weight is None else folds * self.weight


def mean_one(weight: np.ndarray | None) -> Array | None:
    """Return weights scaled to a mean of 1."""
    return None if weight is None else jnp.asarray(weight / weight.mean(), jnp.float32)


def some_rows(data: Data, most: int, rng: np.random.Generator) -> Data:
    """Return the data with `most` of the given examples, drawn at random, and all checked ones."""
    n = data.given.shape[0]
    if n <= most:
        return data
    given = np.sort(rng.permutation(n)[:most])
    rows = np.concatenate([given, np.arange(n, data.z.shape[0])])
    weight = None if data.weight is None else data.weight[rows]
    return Data(data.z[rows], data.given[given], data.checked, data.train[:, rows], weight)


class Tuned(NamedTuple):
    """What the descent gives."""

    probabilities: np.ndarray
    """Of each class, for each given example, by the fold's model that has not seen it."""
    checked_probabilities: np.ndarray
    """The same for the checked ones."""
    noise: np.ndarray
    l2: np.ndarray
    result: Result


def make_folds(labels: np.ndarray, folds: int, rng: np.random.Generator) -> np.ndarray:
    """Return a fold for each example, each fold with its share of every label."""
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    fold = np.empty(len(labels), int)
    fold[order] = np.arange(len(labels)) % folds
    return fold


class _Part(eqx.Module):
    """A function of the problem: a module, so that equal ones share their compiled program."""

    model: Any

    def surprise(self, params, hparams, batch):
        """Return -log p of each label, by each fold's model: an array of folds x rows."""
        n = batch.given.shape[0]
        log_p = jax.nn.log_softmax(jax.vmap(self.model.apply, (0, None))(params, batch.z))
        log_noise = jax.nn.log_softmax(hparams["noise"], axis=1)
        given = jax.nn.logsumexp(log_p[:, :n] + log_noise.T[batch.given], axis=2)
        checked = jnp.take_along_axis(log_p[:, n:], batch.checked[None, :, None], axis=2)[..., 0]
        return -jnp.concatenate([given, checked], axis=1)


class _Loss(_Part):
    def __call__(self, params, hparams, batch):
        penalties = jax.vmap(self.model.penalty, (0, None))(params, jnp.exp(hparams["l2"]))
        surprise = jnp.sum(batch.counted(batch.train) * self.surprise(params, hparams, batch))
        return surprise / batch.z.shape[0] + jnp.sum(penalties)


class _Error(_Part):
    def __call__(self, state, hparams, batch):
        n, checks = batch.given.shape[0], batch.checked.shape[0]
        held = batch.counted(1 - batch.train) * self.surprise(state.params, hparams, batch)
        value = jnp.sum(held[:, :n]) / n
        return value + jnp.sum(held[:, n:]) / checks if checks else value


class _Optimizer(_Part):
    def __call__(self, hparams):
        return self.model.optimizer(jnp.exp(hparams["l2"]))


def cleaning_problem(model: Any, data: Data, classes: int, steps: int, key: Any) -> Problem:
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


def tune(
    model: Any,
    data: Data,
    classes: int,
    *,
    steps: int,
    hyper_steps: int,
    engine: Any,
    key: Any,
    callbacks: Any,
    rate: float = RATE,
    tuned_on: Data | None = None,
) -> Tuned:
    """Learn the noise matrix and the regularisers; return them and the unseen probabilities.

    They are learnt on `tuned_on`, some of the rows of `data`, where that is given.
    """
    tuned_on = data if tuned_on is None else tuned_on
    problem = cleaning_problem(model, tuned_on, classes, steps, key)
    hparams = {
        "noise": jnp.log(start_noise(model, tuned_on, classes, steps, key)),
        "l2": jnp.full(model.groups, jnp.log(START_L2)),
    }
    result = minimize(
        problem,
        hparams,
        steps=hyper_steps,
        engine=engine,
        optimizer=optax.adam(rate),
        constraints={"l2": Box(np.log(1e-9), np.log(10.0))},
        callbacks=callbacks,
        take_back=False,
    )
    hparams = result.best.hparams
    if tuned_on is not data:
        # a regulariser stands beside a mean over rows: of more rows it has a smaller share
        share = np.log(tuned_on.z.shape[0] / data.z.shape[0])
        hparams = {**hparams, "l2": hparams["l2"] + share}
        problem = cleaning_problem(model, data, classes, steps, key)
    _, state = problem.response(hparams)
    scores = jax.vmap(model.apply, (0, None))(state.params, data.z)
    n = data.given.shape[0]
    unseen = jnp.argmin(data.train, axis=0)
    probabilities = jax.nn.softmax(scores[unseen, jnp.arange(len(unseen))])
    probabilities = np.asarray(probabilities, np.float64)
    return Tuned(
        probabilities[:n],
        probabilities[n:],
        np.asarray(jax.nn.softmax(hparams["noise"], axis=1), np.float64),
        np.asarray(jnp.exp(hparams["l2"])),
        result,
    )


def start_noise(model: Any, data: Data, classes: int, steps: int, key: Any) -> Array:
    """Return where N starts: the given labels beside a model of the checked ones.

    N_kj is the mean of p(k | x) over rows with the given label j, in shares of each row k. A model of
    few rows is often wrong, so this has more noise than there is, but the right confusions in it; the
    mean with a matrix in which four labels of five are right keeps every entry above 0. Without checked
    labels it is that matrix alone.
    """
    wrong = (1 - START_RIGHT) / (classes - 1)
    plain = jnp.where(jnp.eye(classes) > 0, START_RIGHT, wrong)
    n, checks = data.given.shape[0], data.checked.shape[0]
    if not checks:
        return plain
    labels = jnp.concatenate([data.given, data.checked])
    l2 = np.full(model.groups, START_L2)
    use = np.arange(n + checks) >= n
    params = train_plain(model, data.z, labels, use, l2, classes, steps, key)
    p = jax.nn.softmax(model.apply(params, data.z[:n]))
    counts = jax.nn.one_hot(data.given, classes)
    if data.weight is not None:
        counts = counts * data.weight[:n, None]
    joint = p.T @ counts
    return (plain + joint / jnp.sum(joint, axis=1, keepdims=True)) / 2


def true_label(probabilities: np.ndarray, noise: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Return p(true label | x, given label): p_k N_kj / sum_k p_k N_kj, j the given label."""
    joint = probabilities * noise.T[given]
    return joint / joint.sum(axis=1, keepdims=True)


def fit_budget(right: np.ndarray, budget: float) -> np.ndarray:
    """Return the weights with all log-odds lowered by the same amount, so that they sum to `budget`.

    Weights that sum to less are left as they are.
    """
    if right.sum() <= budget:
        return right
    log_odds = logit(np.clip(right, np.finfo(float).tiny, 1 - np.finfo(float).eps))
    shift = brentq(lambda shift: expit(log_odds + shift).sum() - budget, -1000.0, 0.0)
    return expit(log_odds + shift)


class _Plain(eqx.Module):
    model: Any

    def __call__(self, params, hparams, batch):
        z, labels, use = batch
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels(
            self.model.apply(params, z), labels
        )
        mean = jnp.sum(use * cross_entropy) / jnp.sum(use)
        return mean + self.model.penalty(params, jnp.exp(hparams["l2"]))


class _Value(eqx.Module):
    loss: _Plain

    def __call__(self, state, hparams, batch):
        return self.loss(state.params, hparams, batch)


def train_plain(
    model: Any,
    z: Any,
    labels: Any,
    use: np.ndarray,
    l2: np.ndarray,
    classes: int,
    steps: int,
    key: Any,
) -> PyTree:
    """Return the parameters after training on the labels to `use`, a mask."""
    data = (jnp.asarray(z), jnp.asarray(labels), jnp.asarray(use, jnp.float32))
    problem = Problem(
        dynamics=Training(_Plain(model), _Optimizer(model)),
        objective=_Value(_Plain(model)),
        init=model.init(key, z.shape[1], classes),
        batches=FullBatch(data, steps=steps),
        validation=data,
    )
    return problem.response({"l2": jnp.log(l2)})[1].params

"""The kernel model: softmax regression through a matrix of label noise, learnt by hypergradients.

    p(observed label = j | x) = sum_k p_theta(k | x) N_kj,      N = softmax of the rows of a matrix

Inner problem, for each of J folds: theta minimises the mean of -log p over the observed labels (through
N) and the trusted labels (directly) outside the fold, plus 1/2 sum_g l2_g ||theta_g||^2, by T steps on
all rows. Its inputs are principal components of the rows and of a kernel, each a group g. Outer
problem: the hyperparameters N and l2 minimise, over the labels inside the folds,

    E = mean over trusted labels of -log p_theta(y | x) + mean over observed labels of -log p(y | x),

by the exact hypergradient of the whole training. N starts at the confusion between the observed labels
and a model of the trusted ones. It serves the response: as a statement about the noise it leans to more
noise than there is where trusted labels are few. The J trainings run as one program; models are Equinox
modules with their arrays as leaves, so that fitting again on data of the same shape compiles nothing.
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
from .._outer.callbacks import Callback
from .._outer.minimize import minimize
from .._outer.run import Result
from .._problem.batches import FullBatch
from .._problem.problem import Problem
from .._problem.training import Training, TrainState
from ._features import Rows, kernel_components

START_RIGHT = 0.8
"""The start supposes four labels of five to be right."""
GROUPS, START_L2 = 2, 1e-4
"""Regularisers: one of the inputs' components, one of the kernel's."""
STEPS, HYPER_STEPS, RATE = 30, 15, 0.3
"""Of each training; of the hyperparameters, and of Adam: its steps are of logits and logarithms."""
L2 = Box(np.log(1e-9), np.log(10.0))
"""Where the logarithms of the regularisers may be."""
MOST_TUNED = 1_000
"""Observed rows that the hyperparameters descend on: with 3,000 as many wrong labels are found."""
Hparams = dict[str, Array]


class Linear(eqx.Module):
    """Softmax regression on principal components, of the inputs and of a kernel.

    In principal components the Hessian is nearly diagonal and below 1/2 E[z_j^2] + l2, so steps
    divided by it converge in tens of iterations, whatever the scale of the columns.
    """

    moments: Float[Array, " width"]
    """E[z_j^2]"""
    blocks: Int[Array, " width"]
    """The regulariser of each component."""

    def apply(self, params: PyTree, z: Float[Array, "n width"]) -> Float[Array, "n classes"]:
        """Return the class scores."""
        return z @ params["w"].T + params["b"]

    def losses(self, params: PyTree, hparams: Hparams, data: "Data") -> Float[Array, "folds rows"]:
        """Return -log p of each label, by each fold's model."""
        n = data.observed.shape[0]
        log_p = jax.nn.log_softmax(jax.vmap(self.apply, (0, None))(params, data.z))
        trusted = jnp.take_along_axis(log_p[:, n:], data.trusted[None, :, None], axis=2)[..., 0]
        if not n:
            return -trusted
        log_noise = jax.nn.log_softmax(hparams["noise"], axis=1)
        observed = jax.nn.logsumexp(log_p[:, :n] + log_noise.T[data.observed], axis=2)
        return -jnp.concatenate([observed, trusted], axis=1)

    def loss(self, params: PyTree, hparams: Hparams, data: "Data") -> Float[Array, ""]:
        """Return the inner loss, the sum over folds."""
        penalty = 0.5 * jnp.exp(hparams["l2"])[self.blocks] * params["w"] ** 2
        total = jnp.sum(data.weight[None] * data.train * self.losses(params, hparams, data))
        return total / data.z.shape[0] + jnp.sum(penalty)

    def error(self, state: TrainState, hparams: Hparams, data: "Data") -> Float[Array, ""]:
        """Return E."""
        n, c = data.observed.shape[0], data.trusted.shape[0]
        held = data.weight[None] * (1 - data.train) * self.losses(state.params, hparams, data)
        return jnp.sum(held[:, :n]) / max(n, 1) + jnp.sum(held[:, n:]) / max(c, 1)

    def optimizer(self, hparams: Hparams) -> optax.GradientTransformation:
        """Return preconditioned gradient descent with momentum."""
        curvature = 0.5 * self.moments + jnp.exp(hparams["l2"])[self.blocks]

        def precondition(gradient, params=None):
            return {"w": gradient["w"] / curvature, "b": gradient["b"] / 0.5}

        return optax.chain(optax.stateless(precondition), optax.sgd(0.5, momentum=0.8))


def kernel_model(rows: Rows, seed: int) -> tuple[np.ndarray, Linear]:
    """Return the inputs of these rows, and the model."""
    z, blocks = kernel_components(rows, seed)
    squares = jnp.mean(jnp.asarray(z) ** 2, axis=0)
    return z, Linear(squares, jnp.asarray(blocks))


class Data(NamedTuple):
    """Inputs of observed and trusted examples in one array, their labels, and the folds' members."""

    z: Float[Array, "rows width"]
    observed: Int[Array, " n"]
    trusted: Int[Array, " c"]
    train: Float[Array, "folds rows"]
    weight: Float[Array, " rows"]
    """How much each row counts, 1 on the mean."""

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
        counts = np.ones(len(z)) if weight is None else weight / weight.mean()
        parts = (z, observed, trusted, train, counts.astype(np.float32))
        return cls(*map(jnp.asarray, parts))

    def sample(self, most: int, rng: np.random.Generator) -> "Data":
        """Return `most` of the observed examples, drawn at random, and all trusted ones."""
        n = self.observed.shape[0]
        if n <= most:
            return self
        some = np.sort(rng.permutation(n)[:most])
        rows = np.concatenate([some, np.arange(n, self.z.shape[0])])
        z, train, weight = self.z[rows], self.train[:, rows], self.weight[rows]
        return Data(z, self.observed[some], self.trusted, train, weight)


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


def noise_problem(model: Linear, data: Data, classes: int, steps: int = STEPS) -> Problem:
    """Return the bilevel problem; all weights start at 0."""
    folds, width = data.train.shape[0], data.z.shape[1]
    return Problem(
        dynamics=Training(model.loss, model.optimizer),
        objective=model.error,
        init={"w": jnp.zeros((folds, classes, width)), "b": jnp.zeros((folds, classes))},
        batches=FullBatch(data, steps=steps),
        validation=data,
    )


def tune(
    model: Linear, data: Data, tuned_on: Data, classes: int, callbacks: Sequence[Callback]
) -> tuple[np.ndarray, Hparams]:
    """Learn the hyperparameters; return each row's probabilities by a model without it, and them.

    They are learnt on `tuned_on`, some of the rows of `data`, or all.
    """
    hparams = {
        "noise": jnp.log(start_noise(model, tuned_on, classes)),
        "l2": jnp.full(GROUPS, jnp.log(START_L2)),
    }
    problem, intervals = noise_problem(model, tuned_on, classes), {"l2": L2}
    hparams = descend(problem, hparams, HYPER_STEPS, RATE, intervals, callbacks).best.hparams
    # A regulariser stands beside a mean over rows: of more rows it has a smaller share.
    share = np.log(tuned_on.z.shape[0] / data.z.shape[0])
    hparams = {**hparams, "l2": hparams["l2"] + share}
    _, state = noise_problem(model, data, classes).response(hparams)
    scores = jax.vmap(model.apply, (0, None))(state.params, data.z)
    unseen = jnp.argmin(data.train, axis=0)
    p = jax.nn.softmax(scores[unseen, jnp.arange(len(unseen))])
    return np.asarray(p, np.float64), hparams


def descend(
    problem: Problem,
    hparams: Hparams,
    steps: int,
    rate: float,
    constraints: dict[str, Box],
    callbacks: Sequence[Callback],
) -> Result:
    """Return the result of Adam on hyperparameters, or raise `KeyboardInterrupt` where interrupted."""
    adam, callbacks = optax.adam(rate), list(callbacks)
    result = minimize(
        problem, hparams, steps=steps, optimizer=adam, constraints=constraints, callbacks=callbacks
    )
    if result.stopped == "interrupted":
        raise KeyboardInterrupt
    return result


def start_noise(model: Linear, data: Data, classes: int) -> Float[Array, "classes classes"]:
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
    trusted = Data(data.z[n:], jnp.zeros(0, int), data.trusted, jnp.ones((1, c)), jnp.ones(c))
    start = {"l2": jnp.full(GROUPS, jnp.log(START_L2))}
    _, state = noise_problem(model, trusted, classes).response(start)
    p = jax.nn.softmax(jax.vmap(model.apply, (0, None))(state.params, data.z[:n])[0])
    joint = p.T @ (jax.nn.one_hot(data.observed, classes) * data.weight[:n, None])
    return (plain + joint / jnp.sum(joint, axis=1, keepdims=True)) / 2

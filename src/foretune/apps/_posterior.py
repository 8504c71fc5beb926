"""From class probabilities by any classifiers to the probability that a given label is right.

C classifiers give each row x probabilities q_c(k | x), trained without the row. They are pooled,

    p(k | x) = softmax_k( sum_c e^{a_c} log q_c(k | x) + (W l(x))_k + b_k ),   l = mean_c log q_c,

and seen through a matrix of how labels go wrong: p(given = j | x) = sum_k p(k | x) N_kj. The parameters
theta = (a, W, b, log N) minimise

    mean over given labels of -log p(given | x)  +  mean over checked labels of -log p(true | x)
    + sum_g l2_g ||theta_g - start_g||^2,

by T steps of Adam; a checked row whose given label is known as well adds -log N. The regularisers l2
are hyperparameters: they descend, by the exact hypergradient through those T steps, on checked labels
held out in folds. So few checked rows change little, and many do what they show. Without checked rows
the regularisers stay where they start, and W is 0.

Rows that are hard get wrong labels more often than a matrix can say, and where N is nearly the identity
its small entries are mere noise. So alternatives to the given label y are weighed by its pattern alone,

    s_k = p(k | x) R_ky,   R_ky = (N_ky + 0.1) / mean of such off-diagonal entries,   R_yy = 1:

where N says nothing, R is 1, and s is p. The matrix as it stands, s_k = p(k | x) N_ky, trusts the given
label more. How far it is believed follows from the share of the disagreements between labels and pool
that N accounts for: log s is a mean of the two. A label's weight is s_y against its best alternative's,
s_y / (s_y + max_{k != y} s_k).
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from .._outer.minimize import minimize
from .._outer.run import Result
from .._outer.sets import Box
from .._problem.batches import FullBatch
from .._problem.problem import Problem
from .._problem.training import Training
from ._noise import START_RIGHT, make_folds

FLOOR = 1e-3
"""No class has a lower probability: a classifier's 0 says no more than that it has seen none."""
STEPS, HYPER_STEPS, FOLDS = 150, 15, 5
MOST_TUNED, MOST_FITTED = 1_000, 20_000
"""Rows with given labels that the regularisers, and the final parameters, are fitted on."""
FEW_CHECKED = 20
"""With fewer checked rows the regularisers stay where they start."""
PATTERN = 0.1
"""What is added to N before its pattern is taken."""
LOW, HIGH, MOST = 0.2, 0.6, 0.5
"""The matrix counts from this share of the disagreements on, in full from that, at most by so much."""


class Rows(NamedTuple):
    """Rows with a given label, and checked ones; the given label of a checked row, or -1."""

    given_q: Float[Array, "C n K"]
    given: Array
    checked_q: Float[Array, "C c K"]
    checked: Array
    known: Array
    train: Float[Array, "folds c"]


class Judgement(NamedTuple):
    """What is held of each given label."""

    right: np.ndarray
    """The probability that it is right."""
    likely: np.ndarray
    """The most probable label."""
    noise: np.ndarray
    """N."""
    pool: np.ndarray
    """The classifiers' weights e^a."""
    regularisers: dict[str, float]
    result: Result | None
    """The descent of the regularisers, where there were enough checked rows for one."""


class _Part(eqx.Module):
    def log_p(self, params, q):
        pooled = jnp.tensordot(jnp.exp(params["a"]), q, 1) + jnp.mean(q, 0) @ params["W"].T
        return jax.nn.log_softmax(pooled + params["b"])

    def checked_surprise(self, params, rows):
        log_p = self.log_p(params, rows.checked_q)
        return -jnp.take_along_axis(log_p, rows.checked[:, None], axis=1)[:, 0]


class _Loss(_Part):
    def __call__(self, params, hparams, rows):
        start = start_params(*rows.given_q.shape[::2])

        def fold(params, train):
            log_noise = jax.nn.log_softmax(params["noise"])
            seen = self.log_p(params, rows.given_q) + log_noise.T[rows.given]
            value = -jnp.mean(jax.nn.logsumexp(seen, axis=1))
            if rows.checked.shape[0]:
                both = -log_noise[rows.checked, rows.known] * (rows.known >= 0)
                surprise = self.checked_surprise(params, rows) + both
                value = value + jnp.sum(train * surprise) / jnp.sum(train)
            away = {name: jnp.sum((params[name] - start[name]) ** 2) for name in params}
            return value + sum(jnp.exp(hparams[name]) * away[name] for name in params)

        return jnp.sum(jax.vmap(fold)(params, rows.train))


class _Error(_Part):
    def __call__(self, state, hparams, rows):
        held = jax.vmap(lambda params: self.checked_surprise(params, rows))(state.params)
        return jnp.sum((1 - rows.train) * held) / rows.checked.shape[0]


def start_params(classifiers: int, classes: int) -> PyTree:
    """Return the plain pool, and a matrix in which four labels of five are right."""
    wrong = (1 - START_RIGHT) / (classes - 1)
    return {
        "a": jnp.full(classifiers, -np.log(classifiers), jnp.float32),
        "W": jnp.zeros((classes, classes)),
        "b": jnp.zeros(classes),
        "noise": jnp.log(jnp.where(jnp.eye(classes) > 0, START_RIGHT, wrong)),
    }


def _problem(rows: Rows, steps: int = STEPS) -> Problem:
    folds = rows.train.shape[0]
    params = start_params(*rows.given_q.shape[::2])
    return Problem(
        dynamics=Training(_Loss(), optax.adam(0.1, eps_root=1e-8)),
        objective=_Error(),
        init=jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (folds, *leaf.shape)), params),
        batches=FullBatch(rows, steps=steps),
        validation=rows,
    )


def judge(
    given_q: np.ndarray,
    given: np.ndarray,
    checked_q: np.ndarray,
    checked: np.ndarray,
    known: np.ndarray,
    *,
    seed: int,
    callbacks: Any = (),
) -> Judgement:
    """Return what C classifiers, given arrays of (C, rows, classes), say of the given labels.

    `known` has the given labels of checked rows, -1 where there is none.
    """
    logs = [np.log(_floored(q)).astype(np.float32) for q in (given_q, checked_q)]
    given, checked, known = (np.asarray(labels, np.int32) for labels in (given, checked, known))
    (C, n, K), c = logs[0].shape, len(checked)
    rng = np.random.default_rng(seed)
    result, hparams = None, _start_regularisers(n, c)
    if C == 1 and c == 0:  # nothing to pool, and nothing to learn it from
        p, noise, pool = np.exp(logs[0][0]), np.eye(K), np.ones(1)
        return _weighed(p, noise, pool, given, {}, None)

    def rows(most: int, train: np.ndarray) -> Rows:
        some = rng.permutation(n)[:most] if n > most else np.arange(n)
        parts = (logs[0][:, some], given[some], logs[1], checked, known, train.astype(np.float32))
        return Rows(*map(jnp.asarray, parts))

    if c >= FEW_CHECKED:
        fold = make_folds(checked, FOLDS, rng)
        result = minimize(
            _problem(rows(MOST_TUNED, fold[None] != np.arange(FOLDS)[:, None])),
            hparams,
            steps=HYPER_STEPS,
            optimizer=optax.adam(0.15),
            constraints={name: Box(np.log(1e-7), np.log(1e4)) for name in hparams},
            callbacks=callbacks,
        )
        hparams = result.best.hparams
    _, state = _problem(rows(MOST_FITTED, np.ones((1, c)))).response(hparams)
    params = jax.tree.map(lambda leaf: leaf[0], state.params)
    p = np.exp(np.asarray(_Part().log_p(params, jnp.asarray(logs[0])), np.float64))
    noise = np.asarray(jax.nn.softmax(params["noise"]), np.float64)
    pool = np.exp(np.asarray(params["a"], np.float64))
    regularisers = {name: float(np.exp(value)) for name, value in hparams.items()}
    return _weighed(p, noise, pool, given, regularisers, result)


def _start_regularisers(n: int, c: int) -> dict[str, Array]:
    """Return the logarithms that the regularisers start with; without checked rows W stays at 0."""
    scale = {"a": 0.1 / n, "b": 1 / n, "noise": 1 / n, "W": 1e4}
    if c:
        scale |= {"b": 3 / c, "W": 30 / c}
    return {name: jnp.asarray(np.log(value), jnp.float32) for name, value in scale.items()}


def _weighed(p, noise, pool, given, regularisers, result) -> Judgement:
    """Weigh each given label against its alternatives."""
    n, K = p.shape
    off = ~np.eye(K, dtype=bool)
    pattern = noise + PATTERN
    pattern = np.where(off, pattern / pattern[off].mean(), 1.0)
    disagree = np.mean(p.argmax(1) != given)
    share = np.mean(1 - np.diag(noise)[given]) / max(disagree, 1 / n)
    belief = MOST * np.clip((share - LOW) / (HIGH - LOW), 0.0, 1.0)
    tiny = np.finfo(np.float32).tiny
    log_noise = np.log(np.maximum(noise, tiny))
    log_s = (
        np.log(np.maximum(p, tiny)) + (belief * log_noise + (1 - belief) * np.log(pattern)).T[given]
    )
    mine = log_s[np.arange(n), given]
    others = np.where(np.arange(K) == given[:, None], -np.inf, log_s)
    right = 1 / (1 + np.exp(np.clip(others.max(1) - mine, -700, 700)))
    return Judgement(right, log_s.argmax(1), noise, pool, regularisers, result)


def _floored(q: np.ndarray) -> np.ndarray:
    q = np.maximum(np.asarray(q, np.float64), FLOOR)
    return q / q.sum(axis=-1, keepdims=True)

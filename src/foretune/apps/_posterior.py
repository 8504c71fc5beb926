"""From class probabilities by any classifiers to the probability that a given label is right.

C classifiers give each row x probabilities q_c(k | x), trained without the row. They are pooled,

    p(k | x) = softmax_k( sum_c e^{a_c} log q_c(k | x) + (W l(x))_k + b_k ),   l = mean_c log q_c,

and seen through a matrix of how labels go wrong: p(given = j | x) = sum_k p(k | x) N_kj. The parameters
theta = (a, W, b, log N) minimise

    g mean over given labels of -log p(given | x)  +  mean over checked labels of -log p(true | x)
    + sum_g l2_g ||theta_g - start_g||^2,

by T steps of Adam; a checked row whose given label y is known as well adds -log N. The weight g of the
given labels and the regularisers l2 are hyperparameters: they descend, by the exact hypergradient
through those T steps, on checked labels held out in folds,

    mean of -log s_true / sum_k s_k,   s_k = p(k | x) N_ky^belief,

where `belief`, in [0, 1], is one more (1 where only the matrix decides, 0 where labels go wrong in
other ways; it is 0 where y is not known). A normal prior around their start keeps them there while
checked rows are few: so few change little, and many do what they show. A label's weight is then
s_y / sum_k s_k.

Without checked rows the hyperparameters stay where they start, and W is 0. Rows that are hard get wrong
labels more often than a matrix can say, and where N is nearly the identity its small entries are mere
noise. So alternatives to the given label are weighed by its pattern alone,

    s_k = p(k | x) R_ky,   R_ky = (N_ky + 0.3) / mean of such off-diagonal entries,   R_yy = 1:

where N says nothing, R is 1, and s is p. The matrix as it stands, s_k = p(k | x) N_ky, trusts the given
label more. How far it is believed follows from the share of the disagreements between labels and pool
that N accounts for: log s is a mean of the two. A label's weight is s_y against its best alternative's,
s_y / (s_y + max_{k != y} s_k). The same holds for checked rows whose given labels are not known: they
say what the classes look like, not how labels go wrong, so that the share is still that of the fit
without them.

Classifiers may then be trained again without the suspects, and judge once more (`twice`).
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree
from scipy.special import expit, logit

from .._constraints.sets import Box
from .._outer.minimize import minimize
from .._outer.run import Result
from .._problem.batches import FullBatch
from .._problem.problem import Problem
from .._problem.training import Training
from ._noise import START_RIGHT, make_folds

FLOOR = 1e-3
"""No class has a lower probability: a classifier's 0 says no more than that it has seen none."""
STEPS, HYPER_STEPS, FOLDS = 100, 10, 5
MOST_TUNED, MOST_FITTED = 500, 20_000
"""Rows with given labels that the regularisers, and the final parameters, are fitted on."""
RATE, START_BELIEF, SPREAD = 0.4, 0.5, 1.5
"""Of the outer descent: Adam's rate, where the belief starts, and the prior's standard deviation."""
MOST_HEARD = 1000
"""Given labels count as no more rows than this at first, or three times the checked ones."""
FEW_CHECKED = 20
"""With fewer checked rows the regularisers stay where they start."""
PATTERN = 0.3
"""What is added to N before its pattern is taken."""
SHARES, BELIEFS = (0.25, 0.4, 0.8), (0.0, 0.25, 0.5)
"""How far the matrix counts, by the share of the disagreements that it accounts for."""
SECOND = (0.4, 0.8)
"""The shares from which on a second look counts, and counts alone."""


class Rows(NamedTuple):
    """Rows with a given label, and checked ones; the given label of a checked row, or -1."""

    given_q: Float[Array, "C n K"]
    given: Array
    weight: Float[Array, " n"]
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
    probabilities: np.ndarray
    """p(k | x), in which the given label has no part."""
    noise: np.ndarray
    """N."""
    pool: np.ndarray
    """The classifiers' weights e^a."""
    regularisers: dict[str, float]
    result: Result | None
    """The descent of the regularisers, where there were enough checked rows for one."""
    claims: np.ndarray | None = None
    """Then, of each checked row held out: the probability that its given label (where none is known,
    the most probable one) is right, and whether it is."""
    share: float = 0.0
    """Of the disagreements between labels and pool, what the matrix accounts for."""


class _Part(eqx.Module):
    def log_p(self, params, q):
        pooled = jnp.tensordot(jnp.exp(params["a"]), q, 1) + jnp.mean(q, 0) @ params["W"].T
        return jax.nn.log_softmax(pooled + params["b"])

    def checked_posterior(self, params, hparams, rows):
        log_s = self.log_p(params, rows.checked_q)
        if "belief" not in hparams:
            return log_s
        seen = hparams["belief"] * jax.nn.log_softmax(params["noise"]).T[rows.known]
        return jax.nn.log_softmax(log_s + jnp.where(rows.known[:, None] >= 0, seen, 0.0))


class _Loss(_Part):
    def __call__(self, params, hparams, rows):
        weight = jnp.exp(hparams["given"])
        start = start_params(*rows.given_q.shape[::2])

        def fold(params, train):
            log_noise = jax.nn.log_softmax(params["noise"])
            seen = self.log_p(params, rows.given_q) + log_noise.T[rows.given]
            value = -weight * jnp.mean(rows.weight * jax.nn.logsumexp(seen, axis=1))
            if rows.checked.shape[0]:
                both = -log_noise[rows.checked, rows.known] * (rows.known >= 0)
                surprise = _surprise(self.log_p(params, rows.checked_q), rows) + both
                value = value + jnp.sum(train * surprise) / jnp.sum(train)
            away = {name: jnp.sum((params[name] - start[name]) ** 2) for name in params}
            return value + sum(jnp.exp(hparams[name]) * away[name] for name in params)

        return jnp.sum(jax.vmap(fold)(params, rows.train))


class _Error(_Part):
    start: dict[str, Array]

    def __call__(self, state, hparams, rows):
        posterior = jax.vmap(lambda params: self.checked_posterior(params, hparams, rows))
        held = jax.vmap(_surprise, (0, None))(posterior(state.params), rows)
        away = sum(jnp.square(hparams[name] - self.start[name]) for name in hparams)
        held = jnp.sum((1 - rows.train) * held) + away / (2 * SPREAD**2)
        return held / rows.checked.shape[0]


def _surprise(log_p, rows):
    return -jnp.take_along_axis(log_p, rows.checked[:, None], axis=1)[:, 0]


def start_params(classifiers: int, classes: int) -> PyTree:
    """Return the plain pool, and a matrix in which four labels of five are right."""
    wrong = (1 - START_RIGHT) / (classes - 1)
    return {
        "a": jnp.full(classifiers, -np.log(classifiers), jnp.float32),
        "W": jnp.zeros((classes, classes)),
        "b": jnp.zeros(classes),
        "noise": jnp.log(jnp.where(jnp.eye(classes) > 0, START_RIGHT, wrong)),
    }


def _problem(rows: Rows, hparams: dict[str, Array], steps: int = STEPS) -> Problem:
    folds = rows.train.shape[0]
    params = start_params(*rows.given_q.shape[::2])
    return Problem(
        dynamics=Training(_Loss(), optax.adam(0.1, eps_root=1e-8)),
        objective=_Error(hparams),
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
    weight: np.ndarray | None = None,
) -> Judgement:
    """Return what C classifiers, given arrays of (C, rows, classes), say of the given labels.

    `known` has the given labels of checked rows, -1 where there is none; `weight` says how much each
    given label counts, by default all the same.
    """
    logs = [np.log(_floored(q)).astype(np.float32) for q in (given_q, checked_q)]
    given, checked, known = (np.asarray(labels, np.int32) for labels in (given, checked, known))
    (C, n, K), c = logs[0].shape, len(checked)
    counts = np.ones(n) if weight is None else weight / weight.mean()
    rng = np.random.default_rng(seed)
    result, claims, hparams = None, None, _start_regularisers(int((counts > 0).sum()), c)
    if C == 1 and c == 0:  # nothing to pool, and nothing to learn it from
        p, noise, pool = np.exp(logs[0][0]), np.eye(K), np.ones(1)
        return _weighed(p, noise, pool, given, 0.0, {}, None)

    def rows(most: int, train: np.ndarray) -> Rows:
        some = rng.permutation(n)[:most] if n > most else np.arange(n)
        parts = (logs[0][:, some], given[some], counts[some].astype(np.float32))
        more = (logs[1], checked, known, train.astype(np.float32))
        return Rows(*map(jnp.asarray, parts + more))

    train = np.ones((1, c), bool)
    if c >= FEW_CHECKED:
        if np.mean(known >= 0) > 0.5:
            hparams["belief"] = jnp.asarray(START_BELIEF)
        fold = make_folds(checked, FOLDS, rng)
        train = np.concatenate([train, fold[None] != np.arange(FOLDS)[:, None]])
        result = minimize(
            _problem(rows(MOST_TUNED, train[1:]), hparams),
            hparams,
            steps=HYPER_STEPS,
            optimizer=optax.adam(RATE),
            constraints={name: _interval(name, n / c) for name in hparams},
            callbacks=callbacks,
        )
        hparams = result.best.hparams
    fitted = rows(MOST_FITTED, train)  # by all checked rows, and without each fold of them
    _, state = _problem(fitted, hparams).response(hparams)
    if result is not None:
        claims = _claims(state.params, fitted, hparams)
    params = jax.tree.map(lambda leaf: leaf[0], state.params)
    p = np.exp(np.asarray(_Part().log_p(params, jnp.asarray(logs[0])), np.float64))
    noise = np.asarray(jax.nn.softmax(params["noise"]), np.float64)
    pool = np.exp(np.asarray(params["a"], np.float64))
    belief = hparams.pop("belief", None) if result else None
    regularisers = {name: float(np.exp(value)) for name, value in hparams.items()}
    fit = (p, noise)
    if c and belief is None:
        nobody = (checked_q[:, :0], checked[:0], known[:0])
        alone = judge(given_q, given, *nobody, seed=seed, weight=weight)
        fit = (alone.probabilities, alone.noise)
    share = _share(*fit, given, counts)
    judged = _weighed(p, noise, pool, given, share, regularisers, result, belief)
    return judged._replace(claims=claims, share=share)


def twice(first: Judgement, second: Judgement, given: np.ndarray) -> Judgement:
    """Return the mean, in log-odds, of two looks at the given labels.

    The second is by classifiers that were trained without the suspects of the first. Where labels go
    wrong by class, these have a clearer view. Where hard rows get wrong labels they have not: with the
    wrong labels they were denied the right ones of such rows. So the second look counts as far as its
    matrix accounts for the disagreements between the labels and the pool.
    """
    part = float(np.interp(second.share, SECOND, (0.0, 1.0)))
    most = 1 - np.finfo(float).eps
    log_odds = [logit(np.clip(look.right, 1 - most, most)) for look in (first, second)]
    right = expit((1 - part) * log_odds[0] + part * log_odds[1])
    more, less = (second, first) if part >= 0.5 else (first, second)
    other = np.where(more.right < 0.5, more.likely, less.likely)
    likely = np.where(right < 0.5, other, given)
    return more._replace(right=right, likely=likely, probabilities=first.probabilities)


def _claims(params: PyTree, rows: Rows, hparams: dict[str, Array]) -> np.ndarray:
    posterior = jax.vmap(lambda params: _Part().checked_posterior(params, hparams, rows))
    held = np.asarray(posterior(params))[np.argmin(rows.train, 0), np.arange(len(rows.known))]
    label = np.where(rows.known >= 0, rows.known, held.argmax(1))
    claimed = np.exp(held[np.arange(len(label)), label])
    return np.stack([claimed, label == np.asarray(rows.checked)], axis=1)


def _interval(name: str, most: float) -> Box:
    if name == "belief":
        return Box(0.0, 1.0)
    return Box(np.log(1e-7), np.log(most if name == "given" else 1e4))


def _start_regularisers(n: int, c: int) -> dict[str, Array]:
    """Return the logarithms that g and the regularisers start with; without checked rows W stays 0.

    Beside a mean over n rows they are normal priors, which fade as rows are added: without checked ones
    of standard deviation 0.7 for the classifiers' weights (around equal ones) and the noise, 0.2 for b:
    noisy labels alone can hardly tell a rare class from one whose labels go wrong.
    """
    scale = {"given": 1.0, "a": 1 / n, "b": 10 / n, "noise": 1 / n, "W": 1e4}
    if c:
        scale |= {
            "given": min(max(3.0, MOST_HEARD / c), n / c),
            "a": 1 / c,
            "b": 3 / c,
            "noise": 1 / c,
            "W": 300 / c,
        }
    return {name: jnp.asarray(np.log(value), jnp.float32) for name, value in scale.items()}


def _share(p, noise, given, weight) -> float:
    """Return the share of the disagreements between labels and pool that the matrix accounts for."""
    disagree = np.mean(weight * (p.argmax(1) != given))
    return float(np.mean(weight * (1 - np.diag(noise)[given])) / max(disagree, 1 / len(given)))


def _weighed(p, noise, pool, given, share, regularisers, result, belief=None) -> Judgement:
    """Weigh each given label against its alternatives."""
    n, K = p.shape
    tiny = np.finfo(np.float32).tiny
    log_noise = np.log(np.maximum(noise, tiny))
    if belief is not None:
        log_s = np.log(np.maximum(p, tiny)) + float(belief) * log_noise.T[given]
        s = np.exp(log_s - log_s.max(1, keepdims=True))
        right = s[np.arange(n), given] / s.sum(1)
        return Judgement(right, log_s.argmax(1), p, noise, pool, regularisers, result)
    off = ~np.eye(K, dtype=bool)
    pattern = noise + PATTERN
    pattern = np.where(off, pattern / pattern[off].mean(), 1.0)
    belief = float(np.interp(share, SHARES, BELIEFS))
    log_s = (
        np.log(np.maximum(p, tiny)) + (belief * log_noise + (1 - belief) * np.log(pattern)).T[given]
    )
    mine = log_s[np.arange(n), given]
    others = np.where(np.arange(K) == given[:, None], -np.inf, log_s)
    right = 1 / (1 + np.exp(np.clip(others.max(1) - mine, -700, 700)))
    return Judgement(right, log_s.argmax(1), p, noise, pool, regularisers, result)


def _floored(q: np.ndarray) -> np.ndarray:
    q = np.maximum(np.asarray(q, np.float64), FLOOR)
    return q / q.sum(axis=-1, keepdims=True)

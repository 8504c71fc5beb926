"""From class probabilities by any classifiers to the probability that an observed label is right.

C classifiers give each row x probabilities q_c(k | x), trained without the row. They are combined,

    p(k | x) = softmax_k( sum_c e^{a_c} log q_c(k | x) + (W l(x))_k + b_k ),   l = mean_c log q_c,

and seen through a matrix of how labels go wrong: p(observed = j | x) = sum_k p(k | x) N_kj. The
parameters theta = (a, W, b, log N) minimise

    g mean over observed labels of -log p(observed | x)  +  mean over trusted labels of -log p(true | x)
    + sum_g l2_g ||theta_g - start_g||^2,

by T steps of Adam; a trusted row whose observed label y is known as well adds -log N. The weight g of
observed labels and the regularisers l2 are hyperparameters: with enough trusted rows they descend, by
the exact hypergradient through those T steps, on trusted labels held out,

    mean of -log s_true / sum_k s_k,   s_k = p(k | x) N_ky^belief,

where `belief`, in [0, 1], is one more (0 where y is not known). A normal prior around their start keeps
them there while trusted rows are few. A label's weight is then s_y / sum_k s_k.

Without trusted rows the hyperparameters stay where they start, and W is 0. Hard rows get wrong labels
more often than a matrix can say, and where N is nearly the identity its small entries are mere noise.
So alternatives to the observed label are weighed by its pattern alone,

    s_k = p(k | x) R_ky,   R_ky = (N_ky + 0.3) / mean of such off-diagonal entries,   R_yy = 1:

where N says nothing, s is p. The matrix as it stands, s_k = p(k | x) N_ky, trusts the observed label
more. How far it is believed follows from the share of the disagreements between labels and ensemble
that N accounts for: log s is a mean of the two. A label's weight is s_y / (s_y + max_{k != y} s_k). The
same holds for trusted rows whose observed labels are not known: they do not show how labels go wrong,
so that the share is that of the fit without them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree
from scipy.special import expit, logit

from .._constraints.sets import Box
from .._outer.callbacks import Callback
from .._outer.run import Result
from .._problem.batches import FullBatch
from .._problem.problem import Problem
from .._problem.training import Training
from ._noise import Hparams, descend, make_folds, start_matrix

FEW_TRUSTED, FOLDS = 20, 5
"""With fewer trusted rows the hyperparameters stay where they start; the folds of trusted rows."""
FLOOR = 1e-3
"""No class has a lower probability: a classifier's 0 means only that it has seen none."""
RATE, STEPS, HYPER_RATE, HYPER_STEPS = 0.1, 100, 0.4, 10
"""Of Adam on the parameters, and on the hyperparameters."""
MOST_TUNED, MOST_FITTED = 500, 20_000
"""Rows with observed labels that the regularisers, and the final parameters, are fitted on."""
START_BELIEF, SPREAD = 0.5, 1.5
"""Where the belief starts, and the standard deviation of the prior of the hyperparameters."""
MOST_HEARD = 1000
"""Observed labels count as at most this many rows at first, or three times the trusted ones."""
PATTERN = 0.3
"""What is added to N before its pattern is taken."""
SHARES, BELIEFS = (0.25, 0.4, 0.8), (0.0, 0.25, 0.5)
"""How far the matrix counts, by the share of the disagreements that it accounts for."""
SECOND = (0.4, 0.8)
"""The shares from which on a second look counts, and counts alone."""


class LabelRows(NamedTuple):
    """Rows with an observed label, and trusted ones; the observed label of a trusted row, or -1."""

    q: Float[Array, "C n K"]
    observed: Int[Array, " n"]
    weight: Float[Array, " n"]
    trusted_q: Float[Array, "C c K"]
    trusted: Int[Array, " c"]
    known: Int[Array, " c"]
    train: Float[Array, "folds c"]


class LabelJudgement(NamedTuple):
    """What is held of each observed label."""

    right: np.ndarray
    """The probability that it is right."""
    likely: np.ndarray
    """The most probable label."""
    probabilities: np.ndarray
    """p(k | x), in which the observed label has no part."""
    noise: np.ndarray
    """N."""
    ensemble: np.ndarray
    """The classifiers' weights e^a."""
    result: Result | None = None
    """The descent of the hyperparameters, where there were enough trusted rows for one."""
    reliability: np.ndarray | None = None
    """Then, of each trusted row held out: the probability that its observed label (where none is known,
    the most probable one) is right, and whether it is."""
    share: float = 0.0
    """Of the disagreements between labels and ensemble, what the matrix accounts for."""


def start(rows: LabelRows) -> PyTree:
    """Return equal weights, and a matrix in which four labels of five are right."""
    classifiers, _, classes = rows.q.shape
    return {
        "a": jnp.full(classifiers, -np.log(classifiers), jnp.float32),
        "W": jnp.zeros((classes, classes)),
        "b": jnp.zeros(classes),
        "noise": jnp.log(start_matrix(classes)),
    }


def log_p(params: PyTree, q: Float[Array, "C n K"]) -> Float[Array, "n K"]:
    """Return log p(k | x)."""
    combined = jnp.tensordot(jnp.exp(params["a"]), q, 1) + jnp.mean(q, 0) @ params["W"].T
    return jax.nn.log_softmax(combined + params["b"])


def posterior(params: PyTree, hparams: Hparams, rows: LabelRows) -> Float[Array, "c K"]:
    """Return the logarithm of p(true label | x, observed label) of the trusted rows."""
    log_s = log_p(params, rows.trusted_q)
    if "belief" not in hparams:
        return log_s
    seen = hparams["belief"] * jax.nn.log_softmax(params["noise"]).T[rows.known]
    return jax.nn.log_softmax(log_s + jnp.where(rows.known[:, None] >= 0, seen, 0.0))


def _of_true(log_p: Float[Array, "c K"], rows: LabelRows) -> Float[Array, " c"]:
    return jnp.take_along_axis(log_p, rows.trusted[:, None], axis=1)[:, 0]


def loss(params: PyTree, hparams: Hparams, rows: LabelRows) -> Float[Array, ""]:
    """Return the inner loss of all folds of the trusted rows, which are trained side by side."""
    around = start(rows)

    def fold(params, train):
        log_noise = jax.nn.log_softmax(params["noise"])
        seen = jax.nn.logsumexp(log_p(params, rows.q) + log_noise.T[rows.observed], axis=1)
        value = -jnp.exp(hparams["observed"]) * jnp.mean(rows.weight * seen)
        if rows.train.shape[1]:
            both = log_noise[rows.trusted, rows.known] * (rows.known >= 0)
            losses = -_of_true(log_p(params, rows.trusted_q), rows) - both
            value = value + jnp.sum(train * losses) / jnp.sum(train)
        away = {name: jnp.sum((params[name] - around[name]) ** 2) for name in params}
        return value + sum(jnp.exp(hparams[name]) * away[name] for name in params)

    return jnp.sum(jax.vmap(fold)(params, rows.train))


class HeldOutError(eqx.Module):
    """The mean over trusted rows held out, and the prior of the hyperparameters."""

    start: Hparams

    def __call__(self, state, hparams, rows):
        log_s = jax.vmap(lambda params: _of_true(posterior(params, hparams, rows), rows))
        away = sum(jnp.square(hparams[name] - self.start[name]) for name in hparams)
        held = away / (2 * SPREAD**2) - jnp.sum((1 - rows.train) * log_s(state.params))
        return held / rows.train.shape[1]


def problem_of(hparams: Hparams, rows: LabelRows, steps: int = STEPS) -> Problem:
    """Return the bilevel problem; the prior is around these hyperparameters."""
    folds = len(rows.train)
    return Problem(
        dynamics=Training(loss, optax.adam(RATE, eps_root=1e-8)),
        objective=HeldOutError(hparams),
        init=jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (folds, *leaf.shape)), start(rows)),
        batches=FullBatch(rows, steps=steps),
        validation=rows,
    )


def judge(
    q: np.ndarray,
    observed: np.ndarray,
    trusted_q: np.ndarray,
    trusted: np.ndarray,
    known: np.ndarray,
    *,
    seed: int,
    callbacks: Sequence[Callback] = (),
    weight: np.ndarray | None = None,
) -> LabelJudgement:
    """Judge the observed labels by C classifiers, given arrays of (C, rows, classes).

    `known` has the observed labels of trusted rows, -1 where there is none; `weight` is how much each
    observed label counts, by default all the same.
    """
    log_q, log_trusted_q = (np.log(_floored(part)).astype(np.float32) for part in (q, trusted_q))
    observed, trusted, known = (np.asarray(part, np.int32) for part in (observed, trusted, known))
    (C, n, K), c = log_q.shape, len(trusted)
    counts = np.ones(n) if weight is None else weight / weight.mean()
    if C == 1 and c == 0:  # nothing to combine, and nothing to learn it from
        return weighed(np.exp(log_q[0]), np.eye(K), observed, 0.0)._replace(ensemble=np.ones(1))
    rng = np.random.default_rng(seed)

    def rows(most: int, train: np.ndarray) -> LabelRows:
        i = rng.permutation(n)[:most] if n > most else np.arange(n)
        parts = (log_q[:, i], observed[i], counts[i].astype(np.float32))
        more = (log_trusted_q, trusted, known, train.astype(np.float32))
        return LabelRows(*map(jnp.asarray, parts + more))

    prior = start_hparams(int((counts > 0).sum()), c)
    result, train = None, np.ones((1, c), bool)
    if c >= FEW_TRUSTED and np.mean(known >= 0) > 0.5:
        prior["belief"] = jnp.asarray(START_BELIEF)
    hparams = prior
    if c >= FEW_TRUSTED:
        fold = make_folds(trusted, FOLDS, rng)
        train = np.concatenate([train, fold[None] != np.arange(FOLDS)[:, None]])
        problem = problem_of(prior, rows(MOST_TUNED, train[1:]))
        intervals = {name: _interval(name, n / c) for name in prior}
        result = descend(problem, prior, HYPER_STEPS, HYPER_RATE, intervals, callbacks)
        hparams = result.best.hparams
    fitted = rows(MOST_FITTED, train)  # by all trusted rows, and without each fold of them
    folds = problem_of(prior, fitted).response(hparams)[1].params
    params = jax.tree.map(lambda leaf: leaf[0], folds)
    p = np.exp(np.asarray(log_p(params, jnp.asarray(log_q)), np.float64))
    noise = np.asarray(jax.nn.softmax(params["noise"]), np.float64)
    belief, alone = hparams.get("belief"), (p, noise)
    if c and belief is None:
        nobody = (trusted_q[:, :0], trusted[:0], known[:0])
        without = judge(q, observed, *nobody, seed=seed, weight=weight)
        alone = (without.probabilities, without.noise)
    share = accounted(*alone, observed, counts)
    return weighed(p, noise, observed, share, None if belief is None else float(belief))._replace(
        ensemble=np.exp(np.asarray(params["a"], np.float64)),
        result=result,
        reliability=None if result is None else _reliability(folds, fitted, hparams),
        share=share,
    )


def twice(first: LabelJudgement, second: LabelJudgement, observed: np.ndarray) -> LabelJudgement:
    """Return the mean, in log-odds, of two looks at the observed labels.

    The second is by classifiers that were trained without the suspects of the first. Where labels go
    wrong by class, these have a clearer view. Where hard rows get wrong labels they have not: with the
    wrong labels they were denied the right ones of such rows. So the second look counts as far as its
    matrix accounts for the disagreements between the labels and the ensemble.
    """
    part = float(np.interp(second.share, SECOND, (0.0, 1.0)))
    most = 1 - np.finfo(float).eps
    log_odds = [logit(np.clip(look.right, 1 - most, most)) for look in (first, second)]
    right = expit((1 - part) * log_odds[0] + part * log_odds[1])
    more, less = (second, first) if part >= 0.5 else (first, second)
    other = np.where(more.right < 0.5, more.likely, less.likely)
    likely = np.where(right < 0.5, other, observed)
    return more._replace(right=right, likely=likely, probabilities=first.probabilities)


def _reliability(folds: PyTree, rows: LabelRows, hparams: Hparams) -> np.ndarray:
    log_s = np.asarray(jax.vmap(lambda params: posterior(params, hparams, rows))(folds))
    held = log_s[np.argmin(rows.train, 0), np.arange(len(rows.known))]
    label = np.where(rows.known >= 0, rows.known, held.argmax(1))
    probability = np.exp(held[np.arange(len(label)), label])
    return np.stack([probability, label == np.asarray(rows.trusted)], axis=1)


def _interval(name: str, most: float) -> Box:
    if name == "belief":
        return Box(0.0, 1.0)
    return Box(np.log(1e-7), np.log(most if name == "observed" else 1e4))


def start_hparams(n: int, c: int) -> Hparams:
    """Return the logarithms that g and the regularisers start with; without trusted rows W stays 0.

    Beside a mean over n rows they are normal priors, which fade as rows are added: without trusted ones
    of standard deviation 0.7 for the classifiers' weights (around equal ones) and the noise, 0.2 for b:
    noisy labels alone can hardly tell a rare class from one whose labels go wrong.
    """
    scale = {"observed": 1.0, "a": 1 / n, "b": 10 / n, "noise": 1 / n, "W": 1e4}
    if c:
        heard = min(max(3.0, MOST_HEARD / c), n / c)
        scale = {"observed": heard, "a": 1 / c, "b": 3 / c, "noise": 1 / c, "W": 300 / c}
    return {name: jnp.asarray(np.log(value), jnp.float32) for name, value in scale.items()}


def accounted(p: np.ndarray, noise: np.ndarray, observed: np.ndarray, weight: np.ndarray) -> float:
    """Return the share of the disagreements of labels and ensemble that the matrix accounts for."""
    disagree = np.mean(weight * (p.argmax(1) != observed))
    expected = np.mean(weight * (1 - np.diag(noise)[observed]))
    return float(expected / max(disagree, 1 / len(observed)))


def weighed(
    p: np.ndarray,
    noise: np.ndarray,
    observed: np.ndarray,
    share: float,
    belief: float | None = None,
) -> LabelJudgement:
    """Weigh each observed label against its alternatives, by a belief that was tuned or the share."""
    tiny = np.finfo(np.float32).tiny
    log_p, log_noise = np.log(np.maximum(p, tiny)), np.log(np.maximum(noise, tiny))
    every = np.arange(len(p))
    if belief is not None:
        log_s = log_p + belief * log_noise.T[observed]
        s = np.exp(log_s - log_s.max(1, keepdims=True))
        right = s[every, observed] / s.sum(1)
    else:
        off = ~np.eye(len(noise), dtype=bool)
        pattern = noise + PATTERN
        pattern = np.where(off, pattern / pattern[off].mean(), 1.0)
        belief = float(np.interp(share, SHARES, BELIEFS))
        log_s = log_p + (belief * log_noise + (1 - belief) * np.log(pattern)).T[observed]
        others = np.where(np.arange(len(noise)) == observed[:, None], -np.inf, log_s)
        right = expit(log_s[every, observed] - others.max(1))
    return LabelJudgement(right, log_s.argmax(1), p, noise, np.zeros(0))


def _floored(q: np.ndarray) -> np.ndarray:
    q = np.maximum(np.asarray(q, np.float64), FLOOR)
    return q / q.sum(axis=-1, keepdims=True)

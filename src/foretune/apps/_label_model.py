"""From class probabilities by any classifiers to the probability that an observed label is right.

C classifiers give each row x probabilities q_c(k | x), trained without the row. They are combined,

    p(k | x) = softmax_k( sum_c e^{a_c} log q_c(k | x) + b_k ),

and seen through a matrix of how labels go wrong: p(observed = j | x) = sum_k p(k | x) N_kj. The
parameters (a, b, N) maximise the likelihood of the observed labels, and of the verified ones,
log p(true | x) + log N_true,observed, times a prior:

    mean of a ~ normal(-log C, 0.5),   a - its mean ~ normal(0, s),   b ~ normal(0, 0.3),
    row k of N ~ Dirichlet(20 n_k), in which n_k has 0.8 at k.

At the prior's centre p is the plain (geometric) average of the classifiers. How far the exponents may
leave it, s, is the value under which labels of the other half of the rows are more likely: where there
is no evidence for other weights, they stay equal.

A label is weighed against its best alternative,

    right = s_y / (s_y + max_{k != y} s_k),   s_k = p(k | x) N_ky^belief.

With belief 1 this is Bayes' rule for labels that go wrong by class alone. Where it is hard rows that
get wrong labels, belief 0 is right: the observed label tells nothing that x does not. What is between,
0.35, did best on development data. Verified rows whose observed label is known tell how far to believe
it, and correct the log-odds of `right` by a line, both under a prior.

Suspects are as many of the lowest weights as make the expected F1 greatest,

    F1(m) = 2 sum over the first m of (1 - right) / (m + sum over all of (1 - right)),

but in no class more than the labels with which the plain average of the classifiers disagrees.
"""

from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.optimize import minimize
from scipy.special import expit, log_softmax

TINY = 1e-12
FLOOR = 1e-3
"""No class has a lower probability: a classifier's 0 means only that it has seen none."""
SPREADS = (0.1, 1.0)
"""The standard deviations s that are tried."""
RIGHT, STRENGTH, MEAN_SPREAD, BIAS_SPREAD = 0.8, 20.0, 0.5, 0.3
"""Of the prior."""
BELIEF, BELIEF_SPREAD, LINE_SPREAD = 0.35, 0.2, 0.5
"""The belief, and what verified rows may change: the belief, and the line's height and log slope."""
FEW, FOLDS = 20, 5
"""Fewer verified rows than this change neither; the folds in which they are judged unseen."""
RARE = 3
"""A class of fewer rows is not judged."""
MOST_ROWS, MOST_ENTRIES = 20_000, 2_000_000
"""Rows, and rows times classes, that the parameters are fitted on."""
STEPS, MANY = 60, 50
"""Of L-BFGS; a quarter of them with more classes than this, whose models have equal weights."""


class Parameters(NamedTuple):
    """What is fitted: a, b and log N."""

    a: np.ndarray
    b: np.ndarray
    log_noise: np.ndarray

    def p(self, log_q: np.ndarray) -> np.ndarray:
        """Return p(k | x), above 0."""
        score = np.tensordot(np.exp(self.a), log_q, 1) + self.b
        score -= score.max(1, keepdims=True)
        p = np.exp(score, out=score)
        p += TINY
        p /= p.sum(1, keepdims=True)
        return p

    @classmethod
    def of(cls, flat: np.ndarray, classifiers: int) -> "Parameters":
        """Return parameters from one array."""
        a, rest = np.split(flat, [classifiers])
        classes = round((np.sqrt(1 + 4 * len(rest)) - 1) / 2)  # b and a square matrix
        return cls(a, rest[:classes], log_softmax(rest[classes:].reshape(classes, -1), axis=1))


class Figure(NamedTuple):
    """An estimate, and the interval in which the truth is with a probability of about 95 %."""

    value: float
    low: float
    high: float


class LabelJudgement(NamedTuple):
    """What is held of each observed label."""

    right: np.ndarray
    """The probability that it is right."""
    suspects: np.ndarray
    likely: np.ndarray
    """The most probable label of a suspect, the observed one of others."""
    probabilities: np.ndarray
    """p(k | x), in which the observed label has no part."""
    noise: np.ndarray
    """N."""
    ensemble: np.ndarray
    """The classifiers' exponents e^a."""
    noise_rate: Figure
    unflagged: Figure | None
    """How many more are wrong; None without verified rows."""
    reliability: np.ndarray | None
    """Of each verified row, judged unseen: the probability that its observed label is right, and
    whether it is."""


class Calibration(NamedTuple):
    """How labels are weighed; what verified rows tell of it, and how they fare when judged unseen."""

    belief: float = BELIEF
    height: float = 0.0
    slope: float = 1.0
    unseen: np.ndarray = np.zeros(0)
    """The probability that the observed label of each verified row is right."""
    wrong: np.ndarray = np.zeros(0, bool)

    def right(self, log_p: np.ndarray, log_noise: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return the probability that labels are right, from log N_ky of each row."""
        score, i = log_p + self.belief * log_noise, np.arange(len(y))
        own = score[i, y]
        score[i, y] = -np.inf
        return expit(self.height + self.slope * (own - score.max(1)))


def judge(q: np.ndarray, observed: np.ndarray, true: np.ndarray, seed: int) -> LabelJudgement:
    """Judge the observed labels by C classifiers, whose probabilities have shape (C, rows, classes).

    `true` is -1 for rows that are not verified; `observed` is -1 for verified rows without, which come
    last: nothing is returned of them.
    """
    q, rng = np.maximum(np.asarray(q, np.float64), FLOOR), np.random.default_rng(seed)
    log_q = np.log(q / q.sum(axis=-1, keepdims=True))
    spread = _best_spread(log_q, observed, true, rng)
    parameters = fit(log_q, observed, true, spread, rng)
    known = Calibration()
    if np.sum((true >= 0) & (observed >= 0)) >= FEW:
        known = _calibrated(log_q, observed, true, spread, rng)
    n = np.sum(observed >= 0)
    y, true, log_q = observed[:n], true[:n], log_q[:, :n]
    log_p, log_noise = np.log(parameters.p(log_q)), parameters.log_noise.T[y]
    right = known.right(log_p, log_noise, y)
    judged = true < 0
    rare = judged & (np.bincount(y)[y] < RARE)
    right[rare] = right[judged & ~rare].mean() if (judged & ~rare).any() else RIGHT
    right[~judged] = (y == true)[~judged]
    suspects, some = right < 0.5, np.flatnonzero(judged & ~rare)
    suspects[judged] = False
    suspects[some[most_suspicious(right[some], y[some], log_q.mean(0)[some].argmax(1))]] = True
    other = log_p + known.belief * log_noise
    other[np.arange(n), y] = -np.inf
    p = np.where(judged[:, None], np.exp(log_p), np.eye(log_p.shape[1])[true])
    rate, unflagged = _figures(right, suspects, judged, known)
    if not len(known.unseen):
        ends = [Calibration(belief).right(log_p, log_noise, y) for belief in (1.0, 0.0)]
        means = [rate.value, *(float(1 - end[judged].mean()) for end in ends)]
        rate = Figure(rate.value, min(means), max(means))
    return LabelJudgement(
        right=right,
        suspects=suspects,
        likely=np.where(judged, np.where(suspects, other.argmax(1), y), true),
        probabilities=p,
        noise=np.exp(parameters.log_noise),
        ensemble=np.exp(parameters.a),
        noise_rate=rate,
        unflagged=unflagged,
        reliability=np.stack([known.unseen, ~known.wrong], 1) if len(known.unseen) else None,
    )


def most_suspicious(right: np.ndarray, y: np.ndarray, plain: np.ndarray) -> np.ndarray:
    """Return the rows of the greatest expected F1, in no class more than disagree with `plain`."""
    order = np.argsort(right, kind="stable")
    hits = np.cumsum(1 - right[order])
    if not len(hits) or hits[-1] <= 0:
        return order[:0]
    order = order[: np.argmax(2 * hits / (np.arange(1, len(y) + 1) + hits[-1])) + 1]
    most = np.bincount(y[plain != y], minlength=y.max() + 1)
    place = np.zeros(len(order), int)  # among the suspects of the class
    for label in np.unique(y[order]):
        mine = y[order] == label
        place[mine] = np.arange(mine.sum())
    return order[place < most[y[order]]]


def fit(
    log_q: np.ndarray,
    observed: np.ndarray,
    true: np.ndarray,
    spread: float,
    rng: np.random.Generator,
) -> Parameters:
    """Return the parameters of greatest posterior probability, by L-BFGS."""
    C, _, K = log_q.shape
    seen = np.flatnonzero((true < 0) & (observed >= 0))
    most = min(MOST_ROWS, max(MOST_ENTRIES // K, 1000))
    if len(seen) > most:
        seen = np.sort(rng.permutation(seen)[:most])
    verified = np.flatnonzero(true >= 0)
    both = verified[observed[verified] >= 0]
    L, y, L_true = log_q[:, seen], observed[seen], log_q[:, verified]
    labels = np.eye(K)[true[verified]]
    by_label = sparse.csr_matrix((np.ones(len(y)), (y, np.arange(len(y)))), (K, len(y)))
    centre = np.where(np.eye(K) > 0, RIGHT, (1 - RIGHT) / max(K - 1, 1))
    counts = STRENGTH * centre
    np.add.at(counts, (true[both], observed[both]), 1.0)

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        now = Parameters.of(flat, C)
        weights = np.exp(now.a)
        p, p_true = now.p(L), now.p(L_true)
        r = p * np.exp(now.log_noise).T[y]
        total = r.sum(1)
        r /= total[:, None]  # p(true label | x, observed)
        value = -np.log(total).sum() - np.log((p_true * labels).sum(1)).sum()
        d, d_true = p - r, p_true - labels
        d_a = weights * (np.tensordot(L, d, 2) + np.tensordot(L_true, d_true, 2))
        d_b = d.sum(0) + d_true.sum(0)
        mean, away = now.a.mean() + np.log(C), now.a - now.a.mean()
        value += mean**2 / (2 * MEAN_SPREAD**2) + (away**2).sum() / (2 * spread**2)
        value += (now.b**2).sum() / (2 * BIAS_SPREAD**2) - (counts * now.log_noise).sum()
        d_a += mean / C / MEAN_SPREAD**2 + away / spread**2
        d_b += now.b / BIAS_SPREAD**2
        expected = counts + (by_label @ r).T
        d_noise = np.exp(now.log_noise) * expected.sum(1, keepdims=True) - expected
        return float(value), np.concatenate([d_a, d_b, d_noise.ravel()])

    start = np.concatenate([np.full(C, -np.log(C)), np.zeros(K), np.log(centre).ravel()])
    steps = STEPS if K <= MANY else STEPS // 4
    found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": steps})
    return Parameters.of(found.x, C)


def _best_spread(
    log_q: np.ndarray, observed: np.ndarray, true: np.ndarray, rng: np.random.Generator
) -> float:
    """Return the spread of the exponents under which labels of the other half are most likely."""
    if len(log_q) == 1 or log_q.shape[2] > MANY:
        return SPREADS[0]
    half = rng.permutation(len(observed)) % 2 == 0

    def likelihood(spread: float) -> float:
        total = 0.0
        for use in (half, ~half):
            now = fit(log_q[:, use], observed[use], true[use], spread, np.random.default_rng(0))
            rest = ~use & (observed >= 0) & (true < 0)
            joint = now.p(log_q[:, rest]) * np.exp(now.log_noise).T[observed[rest]]
            total += np.log(joint.sum(1)).sum()
        return total

    return max(SPREADS, key=likelihood)


def _calibrated(
    log_q: np.ndarray,
    observed: np.ndarray,
    true: np.ndarray,
    spread: float,
    rng: np.random.Generator,
) -> Calibration:
    """Judge verified rows by parameters that were fitted without knowing them, and learn from it."""
    rows = np.flatnonzero((true >= 0) & (observed >= 0))
    y, wrong = observed[rows], observed[rows] != true[rows]
    fold = rng.permutation(len(rows)) % FOLDS
    log_p = np.empty((len(rows), log_q.shape[2]))
    log_noise = np.empty_like(log_p)
    for k in range(FOLDS):
        hidden = true.copy()
        hidden[rows[fold == k]] = -1
        now = fit(log_q, observed, hidden, spread, rng)
        log_p[fold == k] = np.log(now.p(log_q[:, rows[fold == k]]))
        log_noise[fold == k] = now.log_noise.T[y[fold == k]]

    def loss(v: np.ndarray) -> float:
        p = Calibration(v[0], v[1], np.exp(v[2])).right(log_p, log_noise, y)
        fits = -np.log(np.maximum(np.where(wrong, 1 - p, p), 1e-12)).sum()
        belief, line = (v[0] - BELIEF) / BELIEF_SPREAD, v[1:] / LINE_SPREAD
        return float(fits + (belief**2 + line @ line) / 2)

    bounds = [(0.0, 1.0), (None, None), (-2.0, 2.0)]
    v = minimize(loss, [BELIEF, 0.0, 0.0], method="L-BFGS-B", bounds=bounds).x
    found = Calibration(float(v[0]), float(v[1]), float(np.exp(v[2])))
    return found._replace(unseen=found.right(log_p, log_noise, y), wrong=wrong)


def _figures(
    right: np.ndarray, suspects: np.ndarray, judged: np.ndarray, known: Calibration
) -> tuple[Figure, Figure | None]:
    """Return the share of wrong labels, and the number of those that are no suspects.

    Probabilities are corrected by what verified rows show of them, mean of wrong - (1 - right), whose
    standard error (with one row more, that is wrong) makes the interval. This takes verified rows to
    be drawn at random.
    """
    n, c = int(judged.sum()), len(known.unseen)
    known_wrong, doubt = (right < 0.5)[~judged].sum(), (1 - right)[judged]
    if not c:
        return Figure(float((doubt.sum() + known_wrong) / len(right)), 0.0, 1.0), None
    threshold = right[suspects & judged].max(initial=0.0)
    found = []
    for among, counts in ((doubt, True), (doubt[~suspects[judged]], known.unseen > threshold)):
        error = (known.wrong - (1 - known.unseen)) * counts
        value = max(among.sum() + n * error.mean(), 0.0)
        width = 1.96 * n * np.sqrt((np.sum((error - error.mean()) ** 2) + 1) / (c + 1) / c)
        found.append(np.clip([value, value - width, value + width], 0, n))
    rate = (found[0] + known_wrong) / len(right)
    return Figure(*map(float, rate)), Figure(*map(float, found[1]))

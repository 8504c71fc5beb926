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

A label is weighed against the others, by s_k = p(k | x) N_ky^belief, scaled to a sum of 1:

    right = s_y + split (1 - s_y - max_{k != y} s_k).

Belief 1 and split 0 are Bayes' rule for labels that go wrong by class, or by chance. Belief 0 and split
1/2 are for hard rows that get the likeliest other label. Which it is follows from a second fit, in
which N' has one rate e for all that is off its diagonal:

    c = expit(250 G / (n + 500) - 1.25),         u = min(1, 5 e),
    belief = 0.175 + 1/2 (c + (1 - c) u),       split = (1 - u) (1 - c/2) / 2.

Where noise is by class, N makes labels of the other half of n rows likelier than N' does, by G. Where
it is by chance, e is its rate; by instance e is 0, for p(k | x) is as uncertain as the labels are. N
becomes c N + (1 - c) N'. The constants did best on development data. Verified rows with an observed
label change the belief, and correct the log-odds of `right` by a line, both under a prior.

Suspects are as many of the lowest weights as make the expected F1 greatest,

    F1(m) = 2 sum over the first m of (1 - right) / (m + sum over all of (1 - right)),

but in no class more than the labels with which the plain average of the classifiers disagrees.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.optimize import minimize
from scipy.special import expit, log_softmax, softmax

TINY = 1e-12
FLOOR = 1e-3
"""No class has a lower probability: a classifier's 0 means only that it has seen none."""
SPREADS = (0.1, 1.0)
"""The standard deviations s that are tried."""
RIGHT, STRENGTH, MEAN_SPREAD, BIAS_SPREAD = 0.8, 20.0, 0.5, 0.3
"""Of the prior."""
BELIEF_SPREAD, LINE_SPREAD = 0.2, 0.5
"""What verified rows may change: the belief, and the line's height and log slope."""
FEW, FOLDS, RARE = 20, 5, 3
"""Fewer verified rows change nothing; the folds that judge them; a class of fewer is not judged."""
MOST_ROWS, MOST_ENTRIES = 20_000, 2_000_000
"""Rows, and rows times classes, that the parameters are fitted on."""
STEPS, MANY = 60, 50
"""Of L-BFGS; a quarter of them with more classes than this, of which nothing is tried on halves."""


class Parameters(NamedTuple):
    """What is fitted: a, b and log N."""

    a: np.ndarray
    b: np.ndarray
    log_noise: np.ndarray

    def p(self, log_q: np.ndarray) -> np.ndarray:
        """Return p(k | x), above 0."""
        p = softmax(np.tensordot(np.exp(self.a), log_q, 1) + self.b, axis=1) + TINY
        return p / p.sum(1, keepdims=True)

    @classmethod
    def of(cls, flat: np.ndarray, classifiers: int, classes: int) -> "Parameters":
        """Return parameters from one array; of N it has all entries, or one for the diagonal."""
        a, b, noise = np.split(flat, [classifiers, classifiers + classes])
        square = noise * np.eye(classes) if len(noise) == 1 else noise.reshape(classes, -1)
        return cls(a, b, log_softmax(square, axis=1))


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

    belief: float
    split: float
    height: float = 0.0
    slope: float = 1.0
    unseen: np.ndarray = np.zeros(0)
    """The probability that the observed label of each verified row is right."""
    wrong: np.ndarray = np.zeros(0, bool)

    def right(self, log_p: np.ndarray, log_noise: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return the probability that labels are right, from log N_ky of each row."""
        s, i = softmax(log_p + self.belief * log_noise, axis=1), np.arange(len(y))
        own = s[i, y]
        s[i, y] = 0
        rest = s.sum(1) - (best := s.max(1))
        odds = np.log(own + self.split * rest) - np.log(best + (1 - self.split) * rest)
        return expit(self.height + self.slope * odds)


def judge(q: np.ndarray, observed: np.ndarray, true: np.ndarray, seed: int) -> LabelJudgement:
    """Judge the observed labels by C classifiers, whose probabilities have shape (C, rows, classes).

    `true` is -1 for rows that are not verified; `observed` is -1 for verified rows without, which come
    last: nothing is returned of them.
    """
    q, rng = np.maximum(np.asarray(q, np.float64), FLOOR), np.random.default_rng(seed)
    log_q = np.log(q / q.sum(axis=-1, keepdims=True))
    spread, gain = _best_spread(log_q, observed, true, rng)
    parameters, alike = (fit(log_q, observed, true, spread, tied) for tied in (False, True))
    c, tied = expit(250 * gain - 1.25), np.exp(alike.log_noise)
    u = min(5 * (1 - tied[0, 0]), 1.0)
    known = Calibration(0.175 + 0.5 * (c + (1 - c) * u), 0.5 * (1 - u) * (1 - c / 2))

    def noise(now: Parameters) -> np.ndarray:
        return np.log(c * np.exp(now.log_noise) + (1 - c) * tied + TINY)

    if np.sum((true >= 0) & (observed >= 0)) >= FEW:
        known = _calibrated(log_q, observed, true, spread, rng, known, noise)
    n = np.sum(observed >= 0)
    y, true, log_q = observed[:n], true[:n], log_q[:, :n]
    log_p, log_noise = np.log(parameters.p(log_q)), noise(parameters).T[y]
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
        ends = [known._replace(belief=end).right(log_p, log_noise, y) for end in (1.0, 0.0)]
        means = [rate.value, *(float(1 - end[judged].mean()) for end in ends)]
        rate = Figure(rate.value, min(means), max(means))
    return LabelJudgement(
        right=right,
        suspects=suspects,
        likely=np.where(judged, np.where(suspects, other.argmax(1), y), true),
        probabilities=p,
        noise=np.exp(noise(parameters)),
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
    log_q: np.ndarray, observed: np.ndarray, true: np.ndarray, spread: float, tied: bool = False
) -> Parameters:
    """Return the parameters of greatest posterior probability, by L-BFGS; `tied` is for N'."""
    C, _, K = log_q.shape
    seen = np.flatnonzero((true < 0) & (observed >= 0))
    most = min(MOST_ROWS, max(MOST_ENTRIES // K, 1000))
    if len(seen) > most:
        seen = np.sort(np.random.default_rng(0).permutation(seen)[:most])
    verified = np.flatnonzero(true >= 0)
    both = verified[observed[verified] >= 0]
    L, y, L_true = log_q[:, seen], observed[seen], log_q[:, verified]
    labels = np.eye(K)[true[verified]]
    by_label = sparse.csr_matrix((np.ones(len(y)), (y, np.arange(len(y)))), (K, len(y)))
    centre = np.where(np.eye(K) > 0, RIGHT, (1 - RIGHT) / max(K - 1, 1))
    counts = STRENGTH * centre / (K if tied else 1)
    np.add.at(counts, (true[both], observed[both]), 1.0)

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        now = Parameters.of(flat, C, K)
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
        entries = [d_noise.trace()] if tied else d_noise.ravel()
        return float(value), np.concatenate([d_a, d_b, entries])

    entries = [np.log(centre[0, 0] / centre[0, 1])] if tied else np.log(centre).ravel()
    start = np.concatenate([np.full(C, -np.log(C)), np.zeros(K), entries])
    steps = STEPS if K <= MANY else STEPS // 4
    found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": steps})
    return Parameters.of(found.x, C, K)


def _best_spread(
    log_q: np.ndarray, observed: np.ndarray, true: np.ndarray, rng: np.random.Generator
) -> tuple[float, float]:
    """Return the spread under which labels of the other half are most likely, and G / (n + 500)."""
    if log_q.shape[2] > MANY:
        return SPREADS[0], 0.0
    order = rng.permutation(len(observed))
    halves = [np.flatnonzero((order % 2 == k) & (order < 2 * MOST_ROWS)) for k in (0, 1)]
    unseen = [half[(observed[half] >= 0) & (true[half] < 0)] for half in halves]

    def likelihood(spread: float, tied: bool = False) -> float:
        total = 0.0
        for use, rest in zip(halves, unseen[::-1], strict=True):
            now = fit(log_q[:, use], observed[use], true[use], spread, tied)
            joint = now.p(log_q[:, rest]) * np.exp(now.log_noise).T[observed[rest]]
            total += np.log(joint.sum(1)).sum()
        return total

    best, spread = max((likelihood(s), s) for s in SPREADS[: len(log_q)])
    return spread, (best - likelihood(spread, True)) / (sum(map(len, unseen)) + 500)


def _calibrated(
    log_q: np.ndarray,
    observed: np.ndarray,
    true: np.ndarray,
    spread: float,
    rng: np.random.Generator,
    start: Calibration,
    noise: Callable[[Parameters], np.ndarray],
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
        now = fit(log_q, observed, hidden, spread)
        log_p[fold == k] = np.log(now.p(log_q[:, rows[fold == k]]))
        log_noise[fold == k] = noise(now).T[y[fold == k]]

    def calibration(v: np.ndarray) -> Calibration:
        return Calibration(float(v[0]), start.split, float(v[1]), float(np.exp(v[2])))

    def loss(v: np.ndarray) -> float:
        p = calibration(v).right(log_p, log_noise, y)
        fits = -np.log(np.maximum(np.where(wrong, 1 - p, p), 1e-12)).sum()
        belief, line = (v[0] - start.belief) / BELIEF_SPREAD, v[1:] / LINE_SPREAD
        return float(fits + (belief**2 + line @ line) / 2)

    bounds = [(0.0, 1.0), (None, None), (-2.0, 2.0)]
    found = calibration(minimize(loss, [start.belief, 0, 0], method="L-BFGS-B", bounds=bounds).x)
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

"""Classifiers that learn how classes relate, and one that does not, to compare with.

Two methods learn a kernel between the K outputs, a positive semidefinite matrix L, together with the
linear functions f = X W. With Y the one-hot labels and both X and Y centred, which is each class's
intercept, both solve, jointly convex in W and L,

    min_{L psd, W}  |Y - X W|^2 / (2 lambda)  +  tr(L^+ W'W) / 2  +  sum_st |L_st|^p / p.

For a given L the minimum is at W = X' C L, where C solves a Sylvester equation, with Kx = X X':

    Kx C L + lambda C = Y,    value of the first two terms = <C, Y> / 2.                        (1)

For p = 2 this is the problem of Dinuzzo, Ong, Gehler and Pillonetto, *Learning Output Kernels with
Block Coordinate Descent*, ICML 2011. They alternate over C and L; `output_kernel` alternates over W and
L, where each block has a closed form that keeps L positive semidefinite, and the minimum is the same.

For p = 2k / (2k - 1) it is that of Jawanpuria, Lapin, Hein and Schiele, *Efficient Output Kernel
Learning for Multiple Tasks*, NIPS 2015, with the squared loss. The constraint on L can be dropped: the
dual is unconstrained, and its solution gives L as an odd entrywise power of a Gram matrix, which is
positive semidefinite. `p_norm` minimizes the negative dual. At p = 2 it repeats `output_kernel` by
another road. A weight on the last term would add nothing: scaling L turns it into another lambda.

All work in the eigenbasis of Kx (the singular vectors of X), where Kx = diag(d) and Y stands for its
coordinates; what of Y lies outside is in no function's reach. Rows are scaled to a mean squared length
of one, so that the grids suit any data. One SVD, O(n^2 d); then O(n K^2 + K^3) a sweep or evaluation.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

Scores = Callable[[np.ndarray], np.ndarray]
"""Maps rows (n, d) to class scores (n, K)."""

SWEEPS = 100
EVALUATIONS = 500


class Baseline(NamedTuple):
    """A classifier with one hyperparameter: `fit(x, y, classes, value)` returns its scores."""

    name: str
    grid: tuple[float, ...]
    """Values to choose from, from the strongest regularisation to the weakest."""
    fit: Callable[[np.ndarray, np.ndarray, int, float], Scores]


class Span(NamedTuple):
    """Centred and scaled rows X = U diag(s) V', reduced to the directions that they span."""

    U: np.ndarray
    s: np.ndarray
    V: np.ndarray
    mean: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray) -> "Span":
        """Decompose the rows of x."""
        x = np.asarray(x, np.float64)
        mean = x.mean(axis=0)
        U, s, Vt = np.linalg.svd(x - mean, full_matrices=False)
        keep = s > max(x.shape) * np.finfo(np.float64).eps * s[0]
        scale = np.linalg.norm(s) / np.sqrt(len(x)) or 1.0
        return cls(U[:, keep], s[keep] / scale, Vt[keep].T / scale, mean)

    @property
    def rows(self) -> np.ndarray:
        """The rows' coordinates, (n, rank): inner products and distances are theirs."""
        return self.U * self.s

    def coordinates(self, x: np.ndarray) -> np.ndarray:
        """Return other rows' coordinates; what is orthogonal to the span is dropped."""
        return (x - self.mean) @ self.V


def sylvester(d: np.ndarray, Y: np.ndarray, L: np.ndarray, lam: float) -> np.ndarray:
    """Return C with diag(d) C L + lam C = Y, equation (1)."""
    l, Q = np.linalg.eigh(L)
    return (Y @ Q / (np.outer(d, np.maximum(l, 0)) + lam)) @ Q.T


def output_kernel(
    d: np.ndarray, Y: np.ndarray, lam: float, sweeps: int = SWEEPS, tolerance: float = 1e-5
) -> tuple[np.ndarray, np.ndarray]:
    """Return C and L of the problem with p = 2, by block coordinate descent from L = I.

    For a given L, C is that of (1). For a given W, with W'W = L rho L and rho = C' Kx C,

        min_L  tr(L^+ W'W) / 2 + |L|^2 / 2     is at     L^3 = W'W / 2.

    It ends where L = rho / 2, which is where the gradient in L of the whole vanishes.
    """
    L = np.eye(Y.shape[1])
    C = sylvester(d, Y, L, lam)
    for _ in range(sweeps):
        rho = (C.T * d) @ C
        if np.linalg.norm(L - rho / 2) <= tolerance * np.linalg.norm(L):
            break
        m, Q = np.linalg.eigh(L @ rho @ L / 2)
        L = (Q * np.cbrt(np.maximum(m, 0))) @ Q.T
        C = sylvester(d, Y, L, lam)
    return C, L


def p_norm(d: np.ndarray, Y: np.ndarray, lam: float, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return C and L of the problem with p = 2k / (2k - 1), from its dual.

    With rho = C' Kx C and L = (rho / 2)^(2k-1) entry by entry, the negative dual and its gradient are

        lam |C|^2 / 2 + sum_st (rho_st / 2)^(2k) / (2k) - <C, Y>,      lam C + Kx C L - Y.
    """
    # A multiple of the identity, L = theta I, gives the start: C = Y / root^2. The optimizer moves
    # root C, in which the Hessian at that L is the identity: tens of evaluations, not hundreds.
    theta, weight, step = 1.0, d * np.sum(Y * Y, axis=1) / Y.shape[1], 1 / (4 * k - 1)
    for _ in range(SWEEPS):
        half = np.sum(weight / (d * theta + lam) ** 2) / 2
        theta = theta ** (1 - step) * half ** ((2 * k - 1) * step)
    root = np.sqrt(d * theta + lam)[:, None]

    def kernel(C):
        half = (C.T * d) @ C / 2
        return half, half ** (2 * k - 1)

    def negative_dual(flat):
        C = flat.reshape(Y.shape) / root
        half, L = kernel(C)
        value = lam / 2 * np.sum(C * C) + np.sum(half * L) / (2 * k) - np.sum(C * Y)
        return value, ((lam * C + d[:, None] * (C @ L) - Y) / root).ravel()

    found = minimize(
        negative_dual,
        (Y / root).ravel(),
        jac=True,
        method="L-BFGS-B",
        options={"maxfun": EVALUATIONS, "ftol": 1e-12, "gtol": 1e-9},
    )
    C = found.x.reshape(Y.shape) / root
    return C, kernel(C)[1]


def _fit_kernel(
    solve: Callable[..., tuple[np.ndarray, np.ndarray]],
    x: np.ndarray,
    y: np.ndarray,
    classes: int,
    lam: float,
) -> Scores:
    span = Span.of(x)
    Y = np.eye(classes)[y]
    intercept = Y.mean(axis=0)
    C, L = solve(span.s**2, span.U.T @ (Y - intercept), lam)
    W = span.s[:, None] * (C @ L)
    return lambda new: span.coordinates(new) @ W + intercept


def _fit_logistic(x: np.ndarray, y: np.ndarray, classes: int, value: float) -> Scores:
    span = Span.of(x)  # exact, as the penalty |W|^2 does not see rotations, and small
    model = LogisticRegression(C=value, tol=1e-6, max_iter=10_000).fit(span.rows, y)

    def scores(new: np.ndarray) -> np.ndarray:
        result = np.full((len(new), classes), -np.inf)  # for classes without a row
        result[:, model.classes_] = model.predict_log_proba(span.coordinates(new))
        return result

    return scores


def _grid(first: float, last: float, number: int) -> tuple[float, ...]:
    return tuple(float(value) for value in np.geomspace(first, last, number))


LAMBDAS = _grid(10.0, 10**-1.5, 11)
BASELINES: tuple[Baseline, ...] = (
    Baseline("OKL (Dinuzzo et al.)", LAMBDAS, partial(_fit_kernel, output_kernel)),
    Baseline("p-norm, p = 2", LAMBDAS, partial(_fit_kernel, partial(p_norm, k=1))),
    Baseline("p-norm, p = 4/3", LAMBDAS, partial(_fit_kernel, partial(p_norm, k=2))),
    Baseline("logistic regression", _grid(1e-2, 1e4, 13), _fit_logistic),
)


def validated(
    baseline: Baseline,
    x: np.ndarray,
    y: np.ndarray,
    classes: int,
    folds: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[Scores, float]:
    """Return the scores of the baseline fitted on all rows, and the value that was chosen for it.

    A fold is a pair of training and validation rows. The chosen value has the best mean validation
    accuracy; of several, it is the first of the grid, the strongest regularisation.
    """
    with threadpool_limits(1):  # matrices are small: threads that wait for each other cost more
        span = Span.of(x)
        z = span.rows  # once for all fits: each sees n columns instead of d

        def accuracy(value: float) -> float:
            right = []
            for train, held in folds:
                scores = baseline.fit(z[train], y[train], classes, value)
                right.append(np.mean(np.argmax(scores(z[held]), axis=1) == y[held]))
            return round(float(np.mean(right)), 9)  # so that ties are ties

        value = max(baseline.grid, key=accuracy)
        scores = baseline.fit(z, y, classes, value)
    return lambda new: scores(span.coordinates(new)), value

import numpy as np
import pytest
from scipy.linalg import solve_sylvester
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from experiments.multitask.baselines import (
    BASELINES,
    Baseline,
    Span,
    output_kernel,
    p_norm,
    sylvester,
    validated,
)

LAMBDAS = (0.05, 1.0, 5.0)


@pytest.fixture
def data():
    """Rows (40, 60) around 5 centres, of which two are near each other; 30 more; all labels."""
    random = np.random.default_rng(0)
    centres = random.normal(size=(5, 60))
    centres[1] = centres[0] + 0.7 * random.normal(size=60)
    y = np.tile(np.arange(5), 14)
    x = centres[y] + random.normal(size=(70, 60))
    return x[:40], y[:40], x[40:], y[40:]


@pytest.fixture
def problem(data):
    """Kernel matrix and centred targets, and both in the kernel's eigenbasis."""
    x, y, _, _ = data
    span = Span.of(x)
    Y = np.eye(5)[y] - np.mean(np.eye(5)[y], axis=0)
    return span.rows @ span.rows.T, Y, span.s**2, span.U.T @ Y, span.U


def objective(Kx, Y, C, L, lam, p):
    """The problem as it is stated, at W = X' C L."""
    fit = np.sum((Y - Kx @ C @ L) ** 2) / (2 * lam)
    return fit + np.sum((C.T @ Kx @ C) * L) / 2 + np.sum(np.abs(L) ** p) / p


def test_span_keeps_inner_products(data):
    x, _, new, _ = data
    span = Span.of(x)
    centred, scale = x - x.mean(0), np.mean(np.sum((x - x.mean(0)) ** 2, axis=1))
    np.testing.assert_allclose(span.rows @ span.rows.T, centred @ centred.T / scale, atol=1e-12)
    np.testing.assert_allclose(span.coordinates(x), span.rows, atol=1e-12)
    cross = (new - x.mean(0)) @ centred.T / scale
    np.testing.assert_allclose(span.coordinates(new) @ span.rows.T, cross, atol=1e-12)
    assert span.rows.shape == (40, 39)


def test_sylvester_equation(problem):
    Kx, Y, d, Yt, U = problem
    A = np.random.default_rng(1).normal(size=(5, 3))
    L, lam = A @ A.T, 0.3
    C = sylvester(d, Yt, L, lam)
    np.testing.assert_allclose(d[:, None] * C @ L + lam * C, Yt, atol=1e-12)
    outside = (Y - U @ Yt) / lam
    # Kx C L + lam C = Y by another solver, with L made invertible
    L = L + 0.1 * np.eye(5)
    other = solve_sylvester(Kx, lam * np.linalg.inv(L), Y @ np.linalg.inv(L))
    np.testing.assert_allclose(U @ sylvester(d, Yt, L, lam) + outside, other, atol=1e-10)


def test_identity_kernel_is_ridge_regression(problem):
    Kx, Y, d, Yt, U = problem
    C = U @ sylvester(d, Yt, np.eye(5), 0.3)
    ridge = Kx @ np.linalg.solve(Kx + 0.3 * np.eye(40), Y)
    np.testing.assert_allclose(Kx @ C, ridge, atol=1e-10)


@pytest.mark.parametrize("lam", LAMBDAS)
def test_output_kernel_descends_to_a_stationary_point(problem, lam):
    Kx, Y, d, Yt, U = problem
    values = []
    for sweeps in range(12):
        C, L = output_kernel(d, Yt, lam, sweeps=sweeps)
        values.append(objective(Kx, Y, U @ C, L, lam, 2))
    assert np.all(np.diff(values) <= 1e-12 * values[0])
    C, L = output_kernel(d, Yt, lam, sweeps=1000, tolerance=1e-9)
    assert objective(Kx, Y, U @ C, L, lam, 2) <= values[-1] * (1 + 1e-12)
    np.testing.assert_allclose(L, (C.T * d) @ C / 2, atol=float(1e-8 * np.linalg.norm(L)))
    np.testing.assert_allclose(d[:, None] * C @ L + lam * C, Yt, atol=1e-9)


@pytest.mark.parametrize("lam", LAMBDAS)
@pytest.mark.parametrize("k", [1, 2])
def test_p_norm_closes_the_duality_gap(problem, k, lam):
    Kx, Y, d, Yt, U = problem
    p = 2 * k / (2 * k - 1)
    C, L = p_norm(d, Yt, lam, k)
    assert np.linalg.norm(d[:, None] * C @ L + lam * C - Yt) < 1e-4 * np.linalg.norm(Yt)
    half = (C.T * d) @ C / 2
    outside = np.sum((Y - U @ Yt) ** 2) / (2 * lam)
    dual = np.sum(C * Yt) - lam / 2 * np.sum(C * C) - np.sum(half ** (2 * k)) / (2 * k) + outside
    primal = objective(Kx, Y, U @ C, L, lam, p)
    assert -1e-10 * primal <= primal - dual < 1e-6 * primal


@pytest.mark.parametrize("lam", LAMBDAS)
def test_kernels_are_symmetric_and_positive_semidefinite(problem, lam):
    _, _, d, Yt, _ = problem
    for solve in (output_kernel, lambda *a: p_norm(*a, k=1), lambda *a: p_norm(*a, k=2)):
        L = solve(d, Yt, lam)[1]
        np.testing.assert_allclose(L, L.T, atol=1e-12)
        eigenvalues = np.linalg.eigvalsh(L)
        assert eigenvalues[0] > -1e-10 * eigenvalues[-1]
        assert eigenvalues[-1] > 0


def test_p_norm_at_2_is_the_output_kernel(problem):
    _, _, d, Yt, _ = problem
    for lam in LAMBDAS:
        C, L = output_kernel(d, Yt, lam, sweeps=1000, tolerance=1e-8)
        C2, L2 = p_norm(d, Yt, lam, k=1)
        np.testing.assert_allclose(L2, L, atol=float(1e-4 * np.linalg.norm(L)))
        np.testing.assert_allclose(C2 @ L2, C @ L, atol=float(1e-4 * np.linalg.norm(C @ L)))


@pytest.mark.parametrize("p", [2.0, 4 / 3])
def test_no_other_kernel_is_better(problem, p):
    Kx, Y, d, Yt, U = problem
    C, L = p_norm(d, Yt, 1.0, 1 if p == 2 else 2)
    best = objective(Kx, Y, U @ C, L, 1.0, p)
    random = np.random.default_rng(2)
    for size in (0.01, 0.1, 1.0):
        A = np.linalg.cholesky(L + 1e-9 * np.eye(5)) + size * random.normal(size=(20, 5, 5))
        for other in A @ A.swapaxes(1, 2):
            W = sylvester(d, Yt, other, 1.0)
            assert objective(Kx, Y, U @ W, other, 1.0, p) >= best * (1 - 1e-6)


def test_strong_regularisation_compares_class_means(problem):
    """As lambda grows C tends to Y / lambda, and near classes, 0 and 1, are the most related."""
    Kx, Y, d, Yt, _ = problem
    limit = Y.T @ Kx @ Y / (2 * 100.0**2)
    kernels = (
        output_kernel(d, Yt, 100.0)[1],
        p_norm(d, Yt, 100.0, 1)[1],
        p_norm(d, Yt, 100.0, 2)[1],
    )
    for L, expected in zip(kernels, (limit, limit, limit**3), strict=True):
        np.testing.assert_allclose(L, expected, atol=float(1e-3 * np.linalg.norm(expected)))
        assert L[np.triu_indices(5, 1)].argmax() == 0


def test_logistic_regression_is_that_of_all_columns(data):
    x, y, new, _ = data
    scale = np.sqrt(np.mean(np.sum((x - x.mean(0)) ** 2, axis=1)))
    whole = LogisticRegression(C=0.5, tol=1e-8, max_iter=1000).fit(x / scale, y)
    scores = BASELINES[-1].fit(x, y, 5, 0.5)(new)
    np.testing.assert_allclose(scores, whole.predict_log_proba(new / scale), atol=1e-4)


@pytest.mark.parametrize("baseline", BASELINES, ids=lambda b: b.name)
def test_a_class_without_rows_is_not_chosen(data, baseline):
    x, y, new, _ = data
    scores = baseline.fit(x[y != 3], y[y != 3], 5, baseline.grid[5])(new)
    assert scores.shape == (30, 5)
    assert 3 not in scores.argmax(axis=1)


@pytest.mark.parametrize("baseline", BASELINES, ids=lambda b: b.name)
def test_scores_do_not_depend_on_shift_scale_and_rotation(data, baseline):
    x, y, new, _ = data
    R, _ = np.linalg.qr(np.random.default_rng(3).normal(size=(60, 60)))
    value = baseline.grid[5]
    scores = baseline.fit(x, y, 5, value)(new)
    moved = baseline.fit(3 * x @ R + 7, y, 5, value)(3 * new @ R + 7)
    np.testing.assert_allclose(moved, scores, atol=1e-4)


def right_share(share):
    """A baseline whose value is the share of rows that it gets right, by its first column."""

    def fit(x, y, classes, value):
        def scores(new):
            wrong = np.arange(len(new)) >= share(value, len(y)) * len(new)
            return np.eye(classes)[wrong.astype(int)]

        return scores

    return Baseline("made up", (8.0, 4.0, 2.0, 1.0), fit)


def test_validated_takes_the_best_mean_and_of_ties_the_strongest():
    x, y = np.random.default_rng(0).normal(size=(30, 3)), np.zeros(30, int)
    folds = [(np.arange(10), np.arange(10, 30)), (np.arange(10, 30), np.arange(10))]
    best = {(8.0, 10): 1.0, (4.0, 10): 0.8, (2.0, 10): 0.6, (1.0, 10): 0.7}
    best |= {(8.0, 20): 0.3, (4.0, 20): 0.6, (2.0, 20): 0.8, (1.0, 20): 0.6, (4.0, 30): 0.5}
    scores, value = validated(right_share(lambda v, n: best[v, n]), x, y, 2, folds)
    assert value == 4.0  # ties with 2: means 0.65, 0.7, 0.7, 0.65
    assert np.sum(scores(x[:20]).argmax(1) == 0) == 10  # fitted on all 30 rows
    best[8.0, 30] = 0.1
    assert validated(right_share(lambda v, n: best[v, n]), x, y, 2, folds[:1])[1] == 8.0


@pytest.mark.parametrize("baseline", BASELINES, ids=lambda b: b.name)
def test_digits_with_few_labels(baseline):
    x, y = (np.asarray(part) for part in load_digits(return_X_y=True))
    order = np.random.default_rng(0).permutation(len(y))
    rows = np.concatenate([order[y[order] == c][:10] for c in range(10)])
    rest = np.setdiff1d(np.arange(len(y)), rows)
    position = np.arange(100) % 10
    folds = [(np.flatnonzero(position % 2 == f), np.flatnonzero(position % 2 != f)) for f in (0, 1)]
    scores, value = validated(baseline, x[rows], y[rows], 10, folds)
    assert value in baseline.grid
    assert np.mean(scores(x[rest]).argmax(1) == y[rest]) > 0.85

"""Trainings without parts of the examples: do scores predict their errors?"""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import foretune as ft
from benchmarks.retraining import spearman, validate


@pytest.mark.second_tier
def test_validation_of_a_convex_problem():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)).astype(np.float32), rng.normal(size=40).astype(np.float32)
    problem = ft.Problem(
        ft.Training(lambda w, h, batch: jnp.mean((batch[0] @ w - batch[1]) ** 2), optax.sgd(0.1)),
        objective=lambda state, h, batch: jnp.mean((batch[0] @ state.params - batch[1]) ** 2),
        init=jnp.zeros(3),
        batches=ft.FullBatch((x, y), steps=60),
    )
    queries = rng.normal(size=(4, 3)).astype(np.float32), np.ones(4, np.float32)
    found = ft.attribute(problem, {}, queries)
    validation = validate(found, problem, {}, queries, subsets=20, drop=0.1, chunk=8)
    assert validation.actual.shape == validation.predicted.shape == (4, 20)
    assert validation.mean > 0.9
    assert 0 < validation.standard_error < 0.1
    assert "4 queries, 20 subsets" in str(validation)
    assert validation.of(-found.scores).mean == pytest.approx(-validation.mean)


def test_rank_correlations():
    a, b = np.random.default_rng(0).normal(size=(2, 3, 12)).round(1)
    expected = [stats.spearmanr(x, y)[0] for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(spearman(a, b), expected)
    assert spearman(np.ones((1, 4)), b[:1, :4]) == 0

"""Attribution: exact derivatives of many errors in the weights of the training examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import foretune as ft

from .trainings import (
    CASES,
    INDICES,
    INIT,
    QUERIES,
    RNG,
    K,
    N,
    X,
    Y,
    error,
    of_query,
    plain,
    problem_of,
    refused,
    ridge,
    same,
)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=() if name == "batch norm" else pytest.mark.second_tier)
        for name in CASES
    ],
)
def test_scores_are_those_of_weights_written_out(case, x64):
    dynamics, explicit, losses, objective, init = CASES[case]
    problem = problem_of(dynamics, objective, init)
    hparams = {"lr": jnp.array(0.05)}
    if case == "penalty":
        hparams["decay"] = jnp.array(0.1)
    found = ft.attribute(problem, hparams, QUERIES, losses=losses)
    assert found.scores.shape == (K, N)
    numbered = ft.Minibatches((X, Y, np.arange(N)), INDICES)
    written = problem_of(explicit, objective, init, numbered)
    point = {**hparams, "weight": jnp.ones(N)}
    direction = jnp.asarray(RNG.normal(size=N))
    step = 1e-5
    for k in range(K):
        value, grad, _ = ft.Reverse()(of_query(written, k), point)
        np.testing.assert_allclose(found.errors[k], value, rtol=1e-10)
        np.testing.assert_allclose(found.scores[k], grad["weight"], rtol=1e-7, atol=1e-10)
        ends = [
            of_query(written, k).response({**point, "weight": 1 + sign * step * direction})[0]
            for sign in (1, -1)
        ]
        measured = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(found.scores[k] @ direction, measured, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {"chunk": 2},
        {"store": "segments"},
        pytest.param({"store": 3}, marks=pytest.mark.second_tier),
    ],
)
def test_chunks_and_stores_give_the_same(options, found):
    problem, hparams = plain()
    engine = ft.Reverse(store=options.get("store", "states"))
    chunk = options.get("chunk")
    same(ft.attribute(problem, hparams, QUERIES, engine=engine, chunk=chunk), found)


def test_objectives_are_queries(found):
    problem, hparams = plain()
    objectives = [
        lambda state, h, validation, k=k: error(
            state, h, jax.tree.map(lambda leaf: leaf[k : k + 1], validation)
        )
        for k in range(K)
    ]
    same(ft.attribute(problem, hparams, objectives, chunk=2), found)
    both = problem.replace(objective={"lr": error})
    first = ft.Attribution(found.scores[:1], found.errors[:1])
    same(ft.attribute(both, hparams, objectives[:1]), first)


def test_weights_that_the_problem_has(found):
    numbered = ft.Minibatches((X, Y, np.arange(N)), INDICES)
    written = problem_of(CASES["momentum"][1], batches=numbered)
    hparams = {"lr": jnp.array(0.05), "weight": jnp.ones(N)}
    same(ft.attribute(written, hparams, QUERIES), found)
    with pytest.raises(ValueError, match=r"hparams\['weight'\] holds weights already"):
        ft.attribute(written, hparams, QUERIES, groups=np.zeros(N, int))


def test_weights_that_are_not_named_are_noted():
    numbered = ft.Minibatches((X, Y, np.arange(N)), INDICES)
    problem = problem_of(CASES["momentum"][1], batches=numbered)
    hparams = {"lr": jnp.array(0.05), "weight": jnp.ones(N)}
    with pytest.warns(UserWarning, match=r"hparams\['weight'\] has an entry for each of the 12"):
        ft.attribute(problem, hparams, QUERIES, weights="wieght")


def test_a_group_has_the_sum_of_its_scores(found):
    problem, hparams = plain()
    groups = np.arange(N) % 5
    grouped = ft.attribute(problem, hparams, QUERIES, groups=groups)
    sums = found.scores @ (groups[:, None] == np.arange(5))
    same(grouped, ft.Attribution(sums, found.errors))


@pytest.mark.second_tier
def test_a_start_that_depends_on_the_hyperparameters():
    def start(hparams):
        return {"a": jnp.asarray(INIT["a"], jnp.float32), "b": hparams["b"]}

    hparams = {"lr": jnp.array(0.05), "b": jnp.asarray(INIT["b"], jnp.float32)}
    a = ft.attribute(problem_of(CASES["momentum"][0], init=start), hparams, QUERIES)
    same(a, ft.attribute(*plain(), QUERIES))


def test_rows_made_by_a_function(found):
    batches = ft.Minibatches((X, Y), INDICES, gather=lambda data, i: (data[0][i], data[1][i]))
    problem, hparams = plain(batches=batches)
    same(ft.attribute(problem, hparams, QUERIES), found)


def test_leaving_one_out_of_a_convex_problem():
    problem, (qx, qy), losses, x, y = ridge()
    found = ft.attribute(problem, {}, (qx, qy), losses=losses)
    n = len(y)

    def trained(keep):
        return np.linalg.solve(
            x.T @ (keep[:, None] * x) / n + 0.1 * np.eye(3), x.T @ (keep * y) / n
        )

    def errors(w):
        return (qx @ w - qy) ** 2

    before = errors(trained(np.ones(n)))
    np.testing.assert_allclose(found.errors, before, rtol=1e-3)
    left_out = [errors(trained(np.arange(n) != i)) - before for i in range(n)]
    predicted = [found.change([i]) for i in range(n)]
    assert np.corrcoef(np.ravel(predicted), np.ravel(left_out))[0, 1] > 0.99


def test_helpful_and_harmful_examples(found):
    assert found.top(2).shape == found.bottom(2).shape == (K, 2)
    for k in range(K):
        assert found.scores[k, found.top(1)[k, 0]] == found.scores[k].min()
        assert found.scores[k, found.bottom(1)[k, 0]] == found.scores[k].max()
    mask = np.arange(N) < 3
    np.testing.assert_array_equal(found.change(mask), found.change([0, 1, 2]))
    with pytest.raises(ValueError, match=r"Attribution.top\(0\)"):
        found.top(0)
    for wrong in ([N], [-1], [], [0.0], [[0]], ["a"]):
        with pytest.raises(ValueError, match="give numbers of examples, from 0 to 11, or a mask"):
            found.change(np.asarray(wrong))
    with pytest.raises(ValueError, match="left out once"):
        found.change([1, 1])
    with pytest.raises(ValueError, match="a mask of all 12"):
        found.change(mask[:3])


def test_a_file_of_it(found, tmp_path):
    path = tmp_path / "found.npz"
    found.save(path)
    loaded = ft.Attribution.load(path)
    np.testing.assert_array_equal(loaded.scores, found.scores)
    np.testing.assert_array_equal(loaded.errors, found.errors)
    found._replace(share=0.5).save(path)
    assert ft.Attribution.load(path).share == 0.5
    found._replace(errors=found.errors[:1]).save(path)
    with pytest.raises(
        ValueError, match=r"is no attribution.*scores float32\[3,12\], errors float32\[1\]"
    ):
        ft.Attribution.load(path)
    path.write_bytes(b"no numbers")
    with pytest.raises(ValueError, match="is no attribution"):
        ft.Attribution.load(path)


def test_scores_at_other_weights(found, x64):
    """Weights of a half are half the rate, for gradient descent; a half of a half counts twice."""
    problem, hparams = plain()
    half = ft.attribute(problem, hparams, QUERIES, share=0.5)
    slow = ft.attribute(problem, {"lr": hparams["lr"] / 2}, QUERIES)
    same(half, ft.Attribution(2 * slow.scores, slow.errors))
    refused(ValueError, r"share=0.0\)", share=0.0)
    numbered = ft.Minibatches((X, Y, np.arange(N)), INDICES)
    written = problem_of(CASES["momentum"][1], batches=numbered)
    own = {**hparams, "weight": jnp.ones(N)}
    refused(ValueError, "holds weights already", problem=written, hparams=own, share=0.5)

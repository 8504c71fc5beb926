"""The mean of the folds' hypergradients in which long ones count less."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft
from foretune._engines.robust import fold_weights

from ..problems import assert_trees_close

FOLDS, STEPS = 5, 6
HPARAMS = {"lr": 0.05, "scale": (1.0, 2.0)}


def later(value):
    return pytest.param(value, marks=pytest.mark.second_tier)


def loss(params, hparams, x):
    return jnp.mean((jnp.tanh(x @ params) - hparams["scale"][0]) ** 2) * hparams["scale"][1]


def error(state, hparams, x):
    return jnp.mean((x @ state.params - 1) ** 2) + hparams["scale"][0] ** 2


def rate_error(state, hparams, x):
    return jnp.mean((x @ state.params) ** 2) * hparams["lr"]


def problem_of_fold(k, far=1.0, **options):
    rng = np.random.default_rng(k)
    x = jnp.asarray(rng.normal(size=(STEPS, 4, 3)))
    start = jnp.asarray(rng.normal(size=3))
    training = ft.Training(loss, lambda h: optax.sgd(h["lr"], 0.5))
    settings = {"objective": error, "batches": x, "init": start, **options}
    return ft.Problem(training, validation=x[0] * (far if k == 2 else 1.0), **settings)


def mean(problem_of):
    return ft.Mean([problem_of(k) for k in range(FOLDS)])


def hyper():
    return jax.tree.map(jnp.asarray, HPARAMS)


def robust_mean(gradients):
    """The formula in numpy, of a list of gradients."""
    columns = [np.stack(column) for column in zip(*map(jax.tree.leaves, gradients), strict=True)]
    lengths = [np.linalg.norm(c.reshape(len(c), -1), axis=1) for c in columns]
    squares = sum((length / np.sort(length)[len(length) // 2]) ** 2 for length in lengths)
    weights = 1 / np.maximum(1, squares / np.sort(squares)[1])
    means = [np.tensordot(weights / weights.sum(), c, 1) for c in columns]
    return jax.tree.unflatten(jax.tree.structure(gradients[0]), means)


def of_each(problems, hparams, engine):
    results = [engine(problem, hparams) for problem in problems]
    value = sum(r.value for r in results) / len(results)
    return value, robust_mean([r.grad for r in results])


@pytest.mark.second_tier
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "engine",
    [
        ft.Reverse(),
        later(ft.Reverse(store=2)),
        ft.Forward(),
        later(ft.Truncated(4)),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore:Truncated")
def test_is_the_weighted_mean_of_the_folds_own(engine):
    problem = mean(problem_of_fold)
    found = ft.RobustMean(engine)(problem, hyper())
    value, grad = of_each(map(problem_of_fold, range(FOLDS)), hyper(), engine)
    assert_trees_close(found.grad, grad, rtol=1e-10)
    assert_trees_close(found.value, value, rtol=1e-12)
    assert_trees_close(found.state, ft.Reverse()(problem, hyper()).state, rtol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.second_tier
def test_of_objectives_by_name_and_of_a_mean_over_the_steps():
    def of_fold(k):
        return problem_of_fold(k, objective={"lr": rate_error, "scale": error}, trajectory=True)

    found = ft.RobustMean()(mean(of_fold), hyper())
    # an error's weights are by its gradient in all hyperparameters, its own or not
    for name, objective in {"lr": rate_error, "scale": error}.items():
        alone = [problem_of_fold(k, objective=objective, trajectory=True) for k in range(FOLDS)]
        expected = of_each(alone, hyper(), ft.Reverse())[1]
        assert_trees_close(found.grad[name], expected[name], rtol=1e-10)


@pytest.mark.second_tier
def test_one_fold_does_not_move_it():
    near, far = (mean(lambda k, far=far: problem_of_fold(k, far)) for far in (1.0, 1e3))
    lengths = [
        float(optax.tree.norm(engine(problem, hyper()).grad))
        for engine in (ft.Reverse(), ft.RobustMean())
        for problem in (near, far)
    ]
    assert lengths[1] > 100 * lengths[0]
    assert lengths[3] < 5 * lengths[2]


@pytest.mark.second_tier
def test_inside_a_program():
    problem = mean(problem_of_fold)
    engine = ft.RobustMean(ft.Reverse("segments"))
    inside = jax.jit(lambda h: engine(problem, h))(hyper())
    assert_trees_close(inside.grad, engine(problem, hyper()).grad, rtol=1e-5)


@pytest.mark.second_tier
@pytest.mark.usefixtures("x64")
def test_units_do_not_count():
    def rescaled(k):
        problem = problem_of_fold(k)
        of = lambda h: {"lr": h["lr"] / 1e3, "scale": h["scale"]}  # noqa: E731
        training = ft.Training(
            lambda w, h, x: loss(w, of(h), x), lambda h: optax.sgd(h["lr"] / 1e3, 0.5)
        )
        return problem.replace(dynamics=training, objective=lambda s, h, x: error(s, of(h), x))

    plain = ft.RobustMean()(mean(problem_of_fold), hyper()).grad
    h = hyper() | {"lr": hyper()["lr"] * 1e3}
    found = ft.RobustMean()(mean(rescaled), h).grad
    assert_trees_close(found | {"lr": found["lr"] * 1e3}, plain, rtol=1e-10)


@pytest.mark.second_tier
def test_folds_that_agree_and_leaves_of_zeros():
    def idle(state, hparams, x):
        return error(state, hparams, x) + 0 * jnp.sum(hparams["idle"])

    same = mean(lambda k: problem_of_fold(0, objective=idle))
    h = hyper() | {"idle": jnp.ones(2)}
    assert_trees_close(ft.RobustMean()(same, h).grad, ft.Reverse()(same, h).grad, rtol=1e-5)
    assert fold_weights({"a": jnp.zeros((4, 2))}).tolist() == [0.25] * 4


@pytest.mark.second_tier
def test_weights():
    even = fold_weights({"a": jnp.array([1.0, 0.9, 1.0, 1.0]), "b": jnp.full((4, 2), 3.0)})
    np.testing.assert_allclose(even, 0.25, rtol=0.02)
    far = fold_weights({"a": jnp.array([1e6, 2e6, 1e30, -1e31, 1e32])})
    np.testing.assert_allclose(far, [0.5, 0.5, 0, 0, 0], atol=1e-6)
    tiny = fold_weights({"a": jnp.array([[1.0, 1], [2, 2], [1e20, 0]]) * 1e-30})
    np.testing.assert_allclose(tiny, [0.5, 0.5, 0], atol=1e-6)
    at_its_own_minimum = fold_weights({"a": jnp.array([0.0, 1, 1, 1, 1, 1, 1, 1])})
    np.testing.assert_allclose(at_its_own_minimum, 1 / 8, rtol=1e-5)
    several = fold_weights({"a": jnp.r_[1.0:17.0]})  # the fourth of sixteen counts fully
    np.testing.assert_allclose(several[4] / several[3], (4 / 5) ** 2, rtol=1e-5)
    assert fold_weights({"a": jnp.ones(1)}).tolist() == [1.0]


def test_is_not_finite_where_a_fold_is_not():
    problem = mean(lambda k: problem_of_fold(k, far=jnp.nan))
    with pytest.raises(ft.NonFiniteError, match="hparams"):
        ft.RobustMean()(problem, hyper())


def test_what_it_takes():
    with pytest.raises(TypeError, match=r"foretune.Mean.*of_draws.*got .*Problem"):
        ft.RobustMean()(problem_of_fold(0), hyper())
    with pytest.raises(TypeError, match=r"give `Reverse\(\)`, `Forward\(\)` or `Truncated\(k\)`"):
        ft.RobustMean(ft.Auto())

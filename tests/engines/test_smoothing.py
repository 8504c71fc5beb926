"""Engines for chaotic responses: slopes over a neighbourhood."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft
from foretune._engines.smoothing import balanced_signs

from ..problems import regression


class Keep(ft.Dynamics):
    """A training of one step whose state is the hyperparameters: f is the objective itself."""

    def init(self, params, hparams):
        return params

    def step(self, state, hparams, batch):
        return jax.tree.map(lambda s, h: 0 * s + h, state, hparams)


def response(f, hparams):
    init = jax.tree.map(jnp.zeros_like, hparams)
    return ft.Problem(Keep(), lambda s, h, _: f(s), init, ft.FullBatch(None, steps=1))


def chaotic(h):
    """x^2 + a tooth of 0.001 at every 0.0001: its derivative is anything between -60 and 60."""
    return jnp.sum(h["x"] ** 2) + 0.001 * jnp.sum(jnp.sin(60000 * h["x"]))


ENGINES = {
    "evolution": ft.Evolution(0.1, 16),
    "smoothed reverse": ft.Smoothed(ft.Reverse(), 0.1, 16),
    "smoothed forward": ft.Smoothed(ft.Forward(), 0.1, 16),
}


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.usefixtures("x64")
@pytest.mark.second_tier
def test_the_slope_over_a_neighbourhood_of_a_chaotic_response(engine):
    hparams = {"x": jnp.array([1.0, -2.0])}
    problem = response(chaotic, hparams)
    exact = ft.Reverse()(problem, hparams).grad["x"]
    assert np.max(np.abs(exact - 2 * hparams["x"])) > 10
    value, grad, state = engine(problem, hparams)
    assert value == chaotic(hparams)
    np.testing.assert_array_equal(state["x"], hparams["x"])
    np.testing.assert_allclose(grad["x"], 2 * hparams["x"], atol=0.2)


@pytest.mark.usefixtures("x64")
def test_a_leaf_takes_what_is_better_for_it():
    def mixed(h):
        return chaotic({"x": h["x"]}) + jnp.sum(jnp.cos(h["many"]))

    hparams = {"x": jnp.array([1.0]), "many": jnp.linspace(0.1, 3.0, 40)}
    problem = response(mixed, hparams)
    grad = ft.Smoothed(ft.Reverse(), 0.05, 12)(problem, hparams).grad
    # Gradients give all forty entries of the smooth leaf at once, values the chaotic one.
    np.testing.assert_allclose(grad["many"], -jnp.sin(hparams["many"]), atol=0.05)
    np.testing.assert_allclose(grad["x"], 2.0, atol=5)  # the exact one is up to 60 off


@pytest.mark.parametrize("engine", [ft.Evolution(1e-3, 16), ft.Smoothed(radius=1e-3)], ids=str)
@pytest.mark.usefixtures("x64")
def test_where_the_response_is_smooth_they_are_the_gradient(engine):
    problem, hparams = regression(steps=20, dtype=np.float64)
    exact, grad = ft.Reverse()(problem, hparams).grad, engine(problem, hparams).grad
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-3), grad, exact)


@pytest.mark.usefixtures("x64")
def test_pairs_fewer_than_hyperparameters_are_right_on_average():
    hparams = {"x": jnp.array([1.0, 2.0, 3.0, -1.0])}
    problem = response(lambda h: jnp.sum(h["x"] ** 2), hparams)
    points = ({"x": hparams["x"] + 1e-5 * i} for i in range(150))  # each draws other points
    grads = np.array([ft.Evolution(0.1, 2)(problem, point).grad["x"] for point in points])
    spread = grads.std(0, ddof=1) / np.sqrt(len(grads))
    assert np.all(np.abs(grads.mean(0) - 2 * hparams["x"]) < 4 * spread)


@pytest.mark.second_tier
def test_points_stay_inside_the_constraints():
    def outside(h):
        inside = (h["momentum"] <= 1) & (h["lr"] > 0) & (jnp.abs(jnp.sum(h["mix"]) - 1) < 1e-5)
        return jnp.where(inside, h["momentum"] + h["lr"] + jnp.sum(h["mix"] ** 2), jnp.nan)

    hparams = {"momentum": jnp.array(0.99), "lr": jnp.array(0.1), "mix": jnp.array([0.2, 0.8])}
    constraints = {"momentum": ft.Box(0, 1), "lr": ft.Log(), "mix": ft.Simplex()}
    problem = response(outside, hparams)
    for engine in (ft.Evolution(0.5, 8), ft.Smoothed(ft.Forward(), 0.5, 8)):
        with pytest.raises(ft.NonFiniteError, match="in 8 of 8 pairs"):  # momentum above 1
            engine(problem, hparams)
        inside = engine.within(constraints)
        grad = inside(problem, hparams).grad
        np.testing.assert_allclose(grad["lr"], 1.0, atol=0.1)
    result = ft.minimize(
        problem,
        hparams,
        steps=2,
        engine=ft.Evolution(0.5, 8),
        constraints=constraints,
        optimizer=optax.sgd(0.01),
    )
    assert result.value < result.history[0]["value"]


def test_an_entry_at_a_bound_or_at_0_is_moved():
    hparams = {"x": jnp.array([0.0, 1.0, 0.5])}
    problem = response(lambda h: jnp.sum(h["x"] * jnp.array([1.0, 2.0, 3.0])), hparams)
    grad = ft.Evolution(0.1, 8, constraints=ft.Box(0, 1))(problem, hparams).grad["x"]
    np.testing.assert_allclose(grad, [1.0, 2.0, 3.0], rtol=1e-3)


def test_an_accuracy_will_do():
    hparams = {"x": jnp.array(1.0)}
    problem = response(lambda h: jnp.floor(100 * h["x"]) / 100, hparams)
    with pytest.raises(ValueError, match="does not depend"):
        ft.Reverse()(problem, hparams)
    np.testing.assert_allclose(ft.Evolution(0.1, 4)(problem, hparams).grad["x"], 1.0, rtol=0.1)
    assert ft.minimize(problem, hparams, steps=2, engine=ft.Evolution(0.1, 4)).value < 1.0


def test_all_trainings_that_diverge_are_an_error():
    hparams = {"x": jnp.array(1.0)}
    problem = response(lambda h: jnp.where(h["x"] == 1.0, 1.0, jnp.inf), hparams)
    with pytest.raises(ft.NonFiniteError):
        ft.Evolution(0.1, 4)(problem, hparams)


def test_pairs_with_a_training_that_diverges_are_left_out():
    hparams = {"x": jnp.array(1.0)}
    problem = response(lambda h: jnp.where(h["x"] > 1.05, jnp.inf, 3 * h["x"]), hparams)
    with pytest.warns(RuntimeWarning, match=r"in \d of 8 pairs .* are left out") as caught:
        grad = ft.Smoothed(ft.Forward(), 0.1, 8)(problem, hparams).grad["x"]
    assert [warning.filename for warning in caught] == [__file__]
    np.testing.assert_allclose(grad, 3.0, rtol=1e-4)


@pytest.mark.second_tier
def test_inside_jit_in_chunks_and_with_several_objectives():
    problem, hparams = regression(steps=5)
    problem = problem.replace(
        objective={
            "lr": problem.objective,
            "decay": lambda s, h, v: 2 * jnp.sum(s.params["w"] ** 2),
        }
    )
    exact = ft.Reverse()(problem, hparams).grad
    for engine in (ft.Evolution(0.01, 6), ft.Evolution(0.01, 6, chunk=5), ft.Smoothed(radius=0.01)):
        grad = jax.jit(lambda h, engine=engine: engine(problem, h).grad)(hparams)
        jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=0.05), grad, exact)


def test_each_step_of_a_descent_draws_other_points():
    hparams = {"x": jnp.arange(1.0, 9.0)}
    problem = response(lambda h: jnp.sum(h["x"]), hparams)
    engine = ft.Evolution(0.1, 2)
    first = engine(problem, hparams).grad["x"]
    np.testing.assert_array_equal(first, engine(problem, hparams).grad["x"])
    then = engine(problem, {"x": hparams["x"] + 0.001}).grad["x"]
    assert np.max(np.abs(first - then)) > 0.1
    other = ft.Evolution(0.1, 2, jax.random.key(1))(problem, hparams).grad["x"]
    assert np.max(np.abs(first - other)) > 0.1


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: ft.Evolution(0.0), ValueError, r"Evolution\(radius=0.0\): give a positive number"),
        (lambda: ft.Evolution(-1), ValueError, "positive"),
        (lambda: ft.Evolution(float("nan")), ValueError, "positive"),
        (lambda: ft.Evolution("wide"), ValueError, "positive"),
        (lambda: ft.Evolution(0.1, 0), ValueError, "samples=0"),
        (lambda: ft.Evolution(0.1, 2.5), ValueError, "samples=2.5"),
        (lambda: ft.Evolution(0.1, 2, "key"), TypeError, r"key=...\), must be one random key"),
        (lambda: ft.Evolution(0.1, 2, chunk=0), ValueError, "chunk=0"),
        (lambda: ft.Smoothed(0.1), TypeError, "Smoothed's engine is .* a single program"),
        (lambda: ft.Smoothed(ft.Auto()), TypeError, "a single program"),
        (lambda: ft.Smoothed(ft.Reverse(), 0), ValueError, "radius=0"),
        (lambda: ft.Smoothed(samples=1), ValueError, "two samples"),
    ],
)  # fmt: skip
def test_bad_arguments(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_constraints_that_leave_no_room():
    hparams = {"x": jnp.array(0.5)}
    problem = response(lambda h: h["x"], hparams)
    with pytest.raises(ValueError, match=r"1 of 1 hyperparameters cannot be moved inside"):
        ft.Evolution(0.1, 2, constraints=ft.Box(0.5, 0.5))(problem, hparams)


@pytest.mark.parametrize(("n", "m"), [(8, 3), (4, 1), (7, 5), (3, 40)])
def test_signs_are_balanced(n, m):
    order = 1 << (m - 1).bit_length()
    keys = jax.random.split(jax.random.key(0), 200)
    drawn = np.asarray(jax.jit(jax.vmap(lambda key: balanced_signs(key, n, m)))(keys))
    for signs in drawn[:20]:
        assert signs.shape == (n, m)
        assert set(np.unique(signs)) <= {-1, 1}
        if n % order == 0:
            np.testing.assert_array_equal(signs.T @ signs, n * np.eye(m))
        if n >= m:
            assert np.linalg.matrix_rank(signs) == m
        elif n <= order:
            assert np.linalg.matrix_rank(signs) > n // 2
    assert np.abs(drawn.mean((0, 1))).max() < 0.4


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("key", range(2))
def test_a_linear_response_is_found_exactly(key):
    slope = jnp.array([1.0, -20.0, 0.3])
    hparams = {"x": jnp.array([1.0, 2.0, -3.0])}
    problem = response(lambda h: jnp.sum(slope * h["x"]), hparams)
    grad = ft.Evolution(0.1, 8, key)(problem, hparams).grad["x"]
    np.testing.assert_allclose(grad, slope, rtol=1e-9)

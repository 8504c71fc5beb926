"""Batches, objectives and trajectories."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft

from .problems import assert_trees_close, regression, squared_error, squares


@pytest.mark.usefixtures("x64")
def test_three_ways_to_give_the_same_batches():
    problem, hparams = regression(steps=6, dtype=np.float64)
    x, y = problem.batches.data
    indices = np.random.default_rng(0).integers(0, len(y), (6, 4))
    given = [
        ft.Minibatches((x, y), indices),
        (x[indices], y[indices]),
        (np.asarray(x)[indices], np.asarray(y)[indices]),
    ]
    problems = [regression(steps=6, dtype=np.float64, batches=batches)[0] for batches in given]
    results = [engine(p, hparams) for p in problems for engine in (ft.Reverse(), ft.Forward())]
    for result in results[1:]:
        assert_trees_close(result.grad, results[0].grad, 1e-12)
    everything = np.tile(np.arange(len(y)), (6, 1))
    full = regression(steps=6, dtype=np.float64, batches=ft.Minibatches((x, y), everything))[0]
    assert_trees_close(
        ft.Reverse()(full, hparams).grad, ft.Reverse()(problem, hparams).grad, rtol=1e-12
    )


def test_shuffled_minibatches_visit_every_example_once_an_epoch():
    batches = ft.Minibatches.shuffled(
        np.arange(30.0), batch_size=7, steps=11, key=jax.random.key(0)
    )
    assert batches.indices.shape == (11, 7)
    epochs = np.asarray(batches.indices[:8]).reshape(2, 28)
    assert all(len(set(epoch)) == 28 for epoch in epochs)
    assert not np.array_equal(epochs[0], epochs[1])


@pytest.mark.usefixtures("x64")
def test_trajectory_is_the_mean_of_the_responses():
    hparams = regression(dtype=np.float64)[1]
    at = [regression(steps=t, dtype=np.float64)[0] for t in range(1, 6)]
    results = [ft.Reverse()(problem, hparams) for problem in at]
    mean = {name: sum(r.grad[name] for r in results) / 5 for name in hparams}
    whole, _ = regression(steps=5, dtype=np.float64, trajectory=True)
    for engine in (ft.Reverse(), ft.Forward(), ft.Forward(chunk=1)):
        value, grad, state = engine(whole, hparams)
        assert_trees_close(grad, mean, 1e-11)
        np.testing.assert_allclose(value, sum(r.value for r in results) / 5, rtol=1e-12)
        assert_trees_close(state, results[-1].state, 1e-12)  # the user's state, nothing added


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("trajectory", [False, True])
def test_each_hyperparameter_follows_its_own_error(trajectory):
    def training_error(state, hparams, batch):
        return squares(state.params, (batch[0][:5], batch[1][:5]))

    def direct(state, hparams, batch):
        return training_error(state, hparams, batch) * jnp.exp(hparams["decay"])

    errors = {"lr": training_error, "decay": direct}
    options = {"dtype": np.float64, "trajectory": trajectory}
    problem, hparams = regression(objective=errors, **options)
    expected = {
        name: ft.Reverse()(regression(objective=E, **options)[0], hparams)
        for name, E in errors.items()
    }
    for engine in (ft.Reverse(), ft.Forward(), ft.Forward(chunk=1)):
        value, grad, _ = engine(problem, hparams)
        for name in errors:
            np.testing.assert_allclose(value[name], expected[name].value, rtol=1e-12)
            np.testing.assert_allclose(grad[name], expected[name].grad[name], rtol=1e-11)
    ft.check_hypergradient(problem, hparams, verbose=False)


@pytest.mark.usefixtures("x64")
def test_an_objective_by_name_may_own_a_subtree():
    problem, _ = regression(
        optimizer=lambda h: optax.sgd(h["optimizer"]["lr"], h["optimizer"]["momentum"]),
        objective={"optimizer": squared_error, "decay": squared_error},
        dtype=np.float64,
    )
    hparams = {
        "optimizer": {"lr": np.array(0.1), "momentum": np.array(0.5)},
        "decay": np.array(0.02),
    }
    single, same = regression(dtype=np.float64)
    expected = ft.Reverse()(single, same).grad
    value, grad, _ = ft.Reverse()(problem, hparams)
    assert set(value) == {"optimizer", "decay"}
    np.testing.assert_allclose(grad["optimizer"]["lr"], expected["lr"], rtol=1e-12)
    np.testing.assert_allclose(grad["decay"], expected["decay"], rtol=1e-12)


@pytest.mark.usefixtures("x64")
def test_response_is_the_training_run():
    problem, hparams = regression(dtype=np.float64)
    state = problem.start(hparams)
    for _ in range(problem.steps):
        state = problem.dynamics.step(state, hparams, problem.batches.data)
    value, final = problem.response(hparams)
    assert_trees_close(final, state, 1e-12)
    np.testing.assert_allclose(value, squared_error(state, hparams, problem.validation), rtol=1e-12)
    assert int(final.step) == problem.steps


@pytest.mark.usefixtures("x64")
def test_schedule_by_step_and_by_block():
    steps = 12
    rates = 0.1 * np.linspace(1, 0.5, steps)

    def by_step(h):
        return optax.sgd(lambda t: h["lr"][t])

    def by_block(h):
        return optax.sgd(lambda t: h["lr"][t // 4])

    decay = np.array(0.02)
    each, _ = regression(steps=steps, optimizer=by_step, dtype=np.float64)
    grad = ft.Reverse()(each, {"lr": np.repeat(rates[:3], 4), "decay": decay}).grad["lr"]
    block, _ = regression(steps=steps, optimizer=by_block, dtype=np.float64)
    for engine in (ft.Reverse(), ft.Forward()):
        blocks = engine(block, {"lr": rates[:3], "decay": decay}).grad["lr"]
        np.testing.assert_allclose(blocks, grad.reshape(3, 4).sum(1), rtol=1e-11)

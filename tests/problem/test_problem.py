"""Batches, objectives and trajectories."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft

from ..problems import assert_trees_close, regression, squared_error, squares


@pytest.mark.usefixtures("x64")
@pytest.mark.second_tier
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
    results = [ft.Reverse()(p, hparams) for p in problems]
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
@pytest.mark.second_tier
def test_trajectory_is_the_mean_of_the_responses():
    hparams = regression(dtype=np.float64)[1]
    at = [regression(steps=t, dtype=np.float64)[0] for t in range(1, 4)]
    results = [ft.Reverse()(problem, hparams) for problem in at]
    mean = {name: sum(r.grad[name] for r in results) / 3 for name in hparams}
    whole, _ = regression(steps=3, dtype=np.float64, trajectory=True)
    for engine in (ft.Reverse(), ft.Forward()):
        value, grad, state = engine(whole, hparams)
        assert_trees_close(grad, mean, 1e-11)
        np.testing.assert_allclose(value, sum(r.value for r in results) / 3, rtol=1e-12)
        assert_trees_close(state, results[-1].state, 1e-12)  # the user's state, nothing added


@pytest.mark.usefixtures("x64")
def test_each_hyperparameter_follows_its_own_error():
    def training_error(state, hparams, batch):
        return squares(state.params, (batch[0][:5], batch[1][:5]))

    def direct(state, hparams, batch):
        return training_error(state, hparams, batch) * jnp.exp(hparams["decay"])

    errors = {"lr": training_error, "decay": direct}
    options = {"dtype": np.float64, "trajectory": True}
    problem, hparams = regression(objective=errors, **options)
    expected = {
        name: ft.Reverse()(regression(objective=E, **options)[0], hparams)
        for name, E in errors.items()
    }
    for engine in (ft.Reverse(), ft.Forward()):
        value, grad, _ = engine(problem, hparams)
        for name in errors:
            np.testing.assert_allclose(value[name], expected[name].value, rtol=1e-12)
            np.testing.assert_allclose(grad[name], expected[name].grad[name], rtol=1e-11)


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


class TestGather:
    """Minibatches that are made of the data, here windows of a signal."""

    @staticmethod
    def context(data, i):
        around = jnp.clip(i[:, None] + jnp.arange(-1, 2)[None], 0, len(data["signal"]) - 1)
        return data["signal"][around], data["signal"][i] * data["gain"]

    @staticmethod
    def loss(params, hparams, batch):
        x, y = batch
        return jnp.mean((x @ params - y) ** 2) + hparams["decay"] * jnp.sum(params**2)

    @pytest.fixture
    def made(self):
        rng = np.random.default_rng(0)
        data = {"signal": jnp.asarray(rng.normal(size=20), jnp.float32), "gain": jnp.array(2.0)}
        indices = jnp.asarray(rng.integers(0, 20, (7, 4)))
        return ft.Minibatches(data, indices, gather=self.context)

    def problem(self, batches):
        return ft.Problem(
            ft.Training(self.loss, lambda h: optax.sgd(h["lr"], 0.5)),
            lambda state, h, batch: self.loss(state.params, {"decay": 0.0}, batch),
            jnp.zeros(3),
            batches,
            (jnp.eye(3), jnp.ones(3)),
        )

    def test_the_same_as_batches_made_beforehand(self, made):
        hparams = {"lr": jnp.array(0.1), "decay": jnp.array(0.05)}
        batches = [made.batch(i) for i in made.indices]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
        one, two = (ft.Reverse()(self.problem(b), hparams) for b in (made, stacked))
        np.testing.assert_allclose(one.value, two.value, rtol=1e-6)
        for name in hparams:
            np.testing.assert_allclose(one.grad[name], two.grad[name], rtol=1e-5)

    @pytest.mark.second_tier
    def test_windows_keep_it(self, made):
        pieces = list(ft.windows(made, 3))
        assert [piece.steps for piece in pieces] == [3, 3, 1]
        assert all(piece.gather is made.gather for piece in pieces)
        tuner = ft.RealTime(
            self.problem(made).dynamics,
            self.problem(made).objective,
            optax.sgd(0.0),
            rollback=None,
        )
        hparams = {"lr": jnp.array(0.1), "decay": jnp.array(0.05)}
        result = tuner.run(
            made,
            [(jnp.eye(3), jnp.ones(3))],
            params=jnp.zeros(3),
            hparams=hparams,
            window=3,
        )
        value, state = self.problem(made).response(hparams)
        np.testing.assert_allclose(result.state.train.params, state.params, rtol=1e-5)
        np.testing.assert_allclose(result.value, value, rtol=1e-5)
        before = state = tuner.init(jnp.zeros(3), hparams)
        for piece in pieces:
            state, log = tuner.update(state, piece, (jnp.eye(3), jnp.ones(3)))
        problem = tuner.problem(before, made, (jnp.eye(3), jnp.ones(3)))
        exact = ft.Forward()(problem, log["hparams"]).grad
        assert exact.keys() == hparams.keys()

    @pytest.mark.second_tier
    def test_folds_share_the_data(self, made):
        hparams = {"lr": jnp.array(0.1), "decay": jnp.array(0.05)}
        folds = ft.Mean([self.problem(b) for b in (made, made.at(made.indices[::-1]))])
        each = [ft.Reverse()(self.problem(b), hparams) for b in (made, made.at(made.indices[::-1]))]
        both = ft.Reverse()(folds, hparams)
        np.testing.assert_allclose(both.value, np.mean([e.value for e in each]), rtol=1e-6)
        for name in hparams:
            np.testing.assert_allclose(
                both.grad[name], np.mean([e.grad[name] for e in each]), rtol=1e-5
            )

    def test_bad_ones(self, made):
        with pytest.raises(TypeError, match=r"`gather\(data, indices\)` must be a function"):
            ft.Minibatches(made.data, made.indices, gather=3)
        with pytest.raises(TypeError, match="integer array"):
            ft.Minibatches(made.data, made.indices / 2, gather=self.context)


def test_a_partial_function_is_a_start_by_a_function():
    def start(scale, hparams):
        return scale * hparams["start"]

    scale = jnp.arange(3.0)
    grads = [
        ft.Forward()(
            ft.Problem(
                ft.Training(lambda w, h, x: jnp.sum((w - 1) ** 2), optax.sgd(0.1)),
                lambda state, h, x: jnp.sum(state.params**2),
                init,
                ft.FullBatch(None, steps=2),
            ),
            {"start": jnp.array(0.5)},
        ).grad
        for init in (lambda h: start(scale, h), jax.tree_util.Partial(start, scale))
    ]
    assert_trees_close(grads[1], grads[0], 1e-6)

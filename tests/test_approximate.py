"""Engines that approximate, and say by how much."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft

from .problems import assert_trees_close, penalised, regression


@pytest.mark.usefixtures("x64")
class TestTruncated:
    @pytest.mark.parametrize("steps", [1, 3, 11, 12, 50])
    @pytest.mark.parametrize("store", ["states", "segments", 2])
    def test_what_is_left_out_is_the_influence_through_the_state_before(self, steps, store):
        """grad f - g_k = alpha_{T-k} ds_{T-k}/dlambda, by forward mode up to there."""
        T = 12
        problem, hparams = regression(steps=T, dtype=np.float64)
        exact = ft.Reverse()(problem, hparams)
        found = ft.Truncated(steps, store=store)(problem, hparams)
        assert_trees_close(found.value, exact.value, 1e-14)
        assert_trees_close(found.state, exact.state, 1e-14)
        if steps >= T:
            assert_trees_close(found.grad, exact.grad, 1e-12)
            return
        x = problem.batches.data
        first = problem.replace(batches=ft.FullBatch(x, steps=T - steps))
        last = problem.replace(batches=ft.FullBatch(x, steps=steps))

        def through_the_state(h):
            _, middle = first.response(h)
            fixed = jax.tree.map(jax.lax.stop_gradient, hparams)
            return last.continued(middle).response(fixed)[0]

        missing = jax.jacfwd(through_the_state)(hparams)
        whole = jax.tree.map(lambda a, b: a + b, found.grad, missing)
        assert_trees_close(whole, exact.grad, 1e-9)

    def test_the_error_falls_with_the_steps_where_training_contracts(self):
        problem, hparams = regression(steps=200, dtype=np.float64)
        exact = ft.Reverse()(problem, hparams).grad["decay"]
        errors = [abs(ft.Truncated(k)(problem, hparams).grad["decay"] - exact) for k in (5, 20, 80)]
        assert errors[0] > 10 * errors[1] > 100 * errors[2]

    def test_minibatches_are_the_last_ones(self):
        x, y = regression(dtype=np.float64)[0].batches.data
        indices = np.random.default_rng(0).integers(0, len(y), (9, 4))
        problem, hparams = regression(dtype=np.float64, batches=ft.Minibatches((x, y), indices))
        middle = problem.replace(batches=ft.Minibatches((x, y), indices[:5])).response(hparams)[1]
        rest = problem.replace(batches=ft.Minibatches((x, y), indices[5:])).continued(middle)
        expected = ft.Reverse()(rest, hparams).grad
        assert_trees_close(ft.Truncated(4)(problem, hparams).grad, expected, 1e-12)

    def test_in_minimize_and_bad_options(self):
        problem, hparams = regression(steps=20, dtype=np.float64)
        result = ft.minimize(
            problem, hparams, engine=ft.Truncated(5), optimizer=optax.adam(0.01), steps=3
        )
        assert result.history[-1]["value"] < result.history[0]["value"]
        with pytest.raises(ValueError, match="steps=0"):
            ft.Truncated(0)
        with pytest.raises(ValueError, match="store='all'"):
            ft.Truncated(3, store="all")


class TestSampled:
    def problem(self, m=12):
        def loss(params, hparams, batch):
            return penalised(params, {"decay": jnp.mean(hparams["decay"])}, batch) + jnp.sum(
                hparams["decay"] * jnp.sin(jnp.arange(m) + params["b"])
            )

        problem, _ = regression(steps=6, dynamics=ft.Training(loss, optax.sgd(0.1)))
        return problem, {"decay": jnp.linspace(0.01, 0.1, m)}

    def test_unbiased_with_the_variance_of_the_formula(self):
        problem, hparams = self.problem()
        exact = np.asarray(ft.Reverse()(problem, hparams).grad["decay"])
        found, standard_error = ft.Sampled(2000).estimate(problem, hparams)[1::2]
        expected = np.sqrt((np.sum(exact**2) - exact**2) / 2000)
        assert np.all(np.abs(found["decay"] - exact) < 4 * expected)
        np.testing.assert_allclose(standard_error["decay"], expected, rtol=0.1)

    def test_an_estimate_is_what_the_engine_returns_and_its_error(self):
        problem, hparams = self.problem()
        estimate = ft.Sampled(20).estimate(problem, hparams)
        value, grad, state = ft.Sampled(20)(problem, hparams)
        np.testing.assert_allclose(estimate.grad["decay"], grad["decay"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(estimate.value, value, rtol=1e-6)
        assert_trees_close(estimate.state.params, state.params, 1e-6)

    def test_the_same_call_gives_the_same_and_other_values_other_directions(self):
        problem, hparams = self.problem()
        engine = ft.Sampled(2)
        one, two = (engine(problem, hparams).grad["decay"] for _ in range(2))
        np.testing.assert_array_equal(one, two)
        moved = {"decay": hparams["decay"] + 1e-4}
        signs = [np.sign(engine(problem, h).grad["decay"]) for h in (hparams, moved)]
        assert not np.array_equal(*signs)

    def test_a_descent(self):
        problem, hparams = self.problem()
        result = ft.minimize(
            problem, hparams, engine=ft.Sampled(4), optimizer=optax.sgd(0.005), steps=15
        )
        assert result.history[-1]["value"] < result.history[0]["value"]

    def test_memory_does_not_grow_with_the_hyperparameters(self):
        sizes = []
        for m in (20, 200):
            problem, hparams = self.problem(m)
            analysis = ft.Sampled(4).lower(problem, hparams).compile().memory_analysis()
            sizes.append(analysis.temp_size_in_bytes)
        assert sizes[1] < 10 * 200 * 4 * 4 + sizes[0]

    def test_bad_options(self):
        problem, hparams = self.problem()
        with pytest.raises(ValueError, match="directions=0"):
            ft.Sampled(0)
        with pytest.raises(ValueError, match="two directions"):
            ft.Sampled(1).estimate(problem, hparams)

"""Engines that approximate, and say by how much."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft
from foretune._problem.dynamics import Continued

from ..problems import assert_trees_close, regression


def continued(problem, state):
    """Return the problem from a state on."""
    return problem.replace(dynamics=Continued(problem.dynamics), init=state)


@pytest.mark.filterwarnings("ignore:Truncated:RuntimeWarning")  # much is left out, on purpose
@pytest.mark.usefixtures("x64")
class TestTruncated:
    @pytest.mark.parametrize(
        ("steps", "store"),
        [*((steps, "states") for steps in (1, 3, 11, 50)), (5, "segments"), (5, 2)],
    )
    @pytest.mark.second_tier
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
            return continued(last, middle).response(fixed)[0]

        missing = jax.jacfwd(through_the_state)(hparams)
        whole = jax.tree.map(lambda a, b: a + b, found.grad, missing)
        assert_trees_close(whole, exact.grad, 1e-9)

    @pytest.mark.second_tier
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
        rest = problem.replace(batches=ft.Minibatches((x, y), indices[5:]))
        rest = continued(rest, middle)
        expected = ft.Reverse()(rest, hparams).grad
        assert_trees_close(ft.Truncated(4)(problem, hparams).grad, expected, 1e-12)

    def test_bad_options(self):
        with pytest.raises(ValueError, match="steps=0"):
            ft.Truncated(0)
        with pytest.raises(ValueError, match="store='all'"):
            ft.Truncated(3, store="all")


def contracting(factor, steps):
    """s <- factor s + (1 - factor) target: the part of step t in the gradient is factor^(T - t)."""

    def loss(w, hparams, batch):
        return (1 - factor) / 2 * (w - hparams["target"]) ** 2

    problem = ft.Problem(
        ft.Training(loss, optax.sgd(1.0)),
        lambda state, hparams, _: state.params,
        jnp.array(0.0),
        ft.FullBatch(None, steps=steps),
    )
    return problem, {"target": jnp.array(1.0)}


class TestWarning:
    def test_says_what_share_the_older_half_has(self):
        problem, hparams = contracting(0.99, 40)
        # of six steps, the older three have 0.99^3 / (1 + 0.99^3) of the sum
        pattern = r"49% of the gradient of hparams\['target'\]"
        with pytest.warns(RuntimeWarning, match=pattern) as caught:
            ft.Truncated(6)(problem, hparams)
        assert [warning.filename for warning in caught] == [__file__]

    def test_is_not_given_where_the_training_forgets_or_nothing_is_left_out(self):
        ft.Truncated(8)(*contracting(0.5, 40))
        ft.Truncated(40)(*contracting(0.99, 40))

    def test_is_given_by_robust_mean_too(self):
        problem, hparams = contracting(0.99, 40)
        with pytest.warns(RuntimeWarning, match=r"Truncated\(6\)"):
            ft.RobustMean(ft.Truncated(6))(ft.Mean([problem] * 3), hparams)


def run_to_the_end(program, *arguments):
    jax.block_until_ready(program(*arguments))
    jax.effects_barrier()  # what the program has said is said by now


@pytest.mark.usefixtures("x64")
class TestImplicit:
    def ridge(self, steps=3000, optimizer=None, **options):
        optimizer = optimizer or optax.sgd(0.1, 0.5)
        problem, hparams = regression(steps=steps, dtype=np.float64, optimizer=optimizer, **options)
        return problem, {"decay": hparams["decay"]}

    def exact(self, problem, decay):
        """The derivative of the error at the minimum itself, by solving for it."""
        (x, y), (u, v) = problem.batches.data, problem.validation
        n, d = x.shape
        ones = jnp.column_stack([x, jnp.ones(n)])

        def error(decay):
            ridge = decay * n * jnp.diag(jnp.append(jnp.ones(d), 0.0))
            w = jnp.linalg.solve(ones.T @ ones + ridge, ones.T @ y)
            return jnp.mean((u @ w[:d] + w[d] - v) ** 2)

        return jax.grad(error)(decay)

    def test_the_derivative_of_the_minimum(self):
        problem, hparams = self.ridge()
        engine = ft.Implicit(tolerance=1e-10)
        found = engine(problem, hparams).grad["decay"]
        np.testing.assert_allclose(found, self.exact(problem, hparams["decay"]), rtol=1e-6)
        reverse = ft.Reverse(store=10)(problem, hparams).grad["decay"]
        np.testing.assert_allclose(found, reverse, rtol=1e-6)

    def test_minibatches_end_at_the_loss_of_all_data(self):
        x, y = regression(dtype=np.float64)[0].batches.data
        indices = np.tile(np.arange(len(y)), (3000, 1))
        problem, hparams = self.ridge(batches=ft.Minibatches((x, y), indices))
        whole, _ = self.ridge()
        found = ft.Implicit(tolerance=1e-10)(problem, hparams).grad["decay"]
        np.testing.assert_allclose(found, self.exact(whole, hparams["decay"]), rtol=1e-6)

    @pytest.mark.second_tier
    def test_several_objectives_and_many_hyperparameters(self):
        def loss(params, hparams, batch):
            residual = batch[0] @ params["w"] + params["b"] - batch[1]
            return jnp.mean(hparams["weight"] * residual**2) + hparams["decay"] * jnp.sum(
                params["w"] ** 2
            )

        problem, _ = regression(
            steps=4000, dtype=np.float64, dynamics=ft.Training(loss, optax.sgd(0.1, 0.5))
        )
        squared = problem.objective
        problem = problem.replace(
            objective={
                "weight": squared,
                "decay": lambda s, h, b: squared(s, h, b) ** 2 + h["decay"],
            }
        )
        hparams = {"weight": jnp.linspace(0.5, 1.5, 20), "decay": jnp.array(0.05)}
        found = ft.Implicit(tolerance=1e-11)(problem, hparams).grad
        assert_trees_close(found, ft.Reverse(store=20)(problem, hparams).grad, 1e-6, 1e-9)

    def test_a_fixed_point_that_is_no_training(self):
        mixing = jnp.array([[0.5, 0.3, 0.0], [0.0, 0.4, 0.6], [0.2, -0.5, 0.1]])

        class Average(ft.Dynamics):
            """s = 0.5 s + 0.5 cos(a M s), with a count of the steps."""

            def init(self, params, hparams):
                return params, jnp.array(0)

            def step(self, state, hparams, batch):
                s, count = state
                return 0.5 * s + 0.5 * jnp.cos(hparams["a"] * (mixing @ s)), count + 1

        problem = ft.Problem(
            Average(),
            lambda state, h, v: jnp.sum(state[0] ** 2),
            jnp.ones(3),
            ft.FullBatch(jnp.zeros(1), steps=100),
            jnp.zeros(1),
        )
        hparams = {"a": jnp.array(0.8)}
        found = ft.Implicit(tolerance=1e-12)(problem, hparams).grad
        assert_trees_close(found, ft.Forward()(problem, hparams).grad, 1e-9)
        short = problem.replace(batches=ft.FullBatch(jnp.zeros(1), steps=2))
        with pytest.warns(UserWarning, match=r"last gradient \(or step\).*of the first"):
            ft.Implicit()(short, hparams)

    def test_weights_that_are_not_trained_are_no_part_of_the_minimum(self):
        labels = {"w": "descend", "b": "stay"}
        optimizers = {"descend": optax.sgd(0.1, 0.5), "stay": optax.set_to_zero()}
        problem, hparams = self.ridge(500, optax.multi_transform(optimizers, labels))
        found = ft.Implicit(tolerance=1e-10)(problem, hparams).grad
        assert_trees_close(found, ft.Reverse()(problem, hparams).grad, 1e-6)

    def test_a_training_that_has_not_converged_is_said(self):
        problem, hparams = self.ridge(steps=5)
        pattern = r"has not converged.*% of the length of the first"
        with pytest.warns(UserWarning, match=pattern) as caught:
            ft.Implicit()(problem, hparams)
        assert [warning.filename for warning in caught] == [__file__]

    def test_a_system_that_is_not_solved_is_said(self):
        problem, hparams = self.ridge()
        with pytest.warns(UserWarning, match=r"relative residual of .* after 1 iterations"):
            ft.Implicit(iterations=1, tolerance=1e-8)(problem, hparams)

    def test_negative_curvature_is_an_error(self):
        with pytest.raises(ValueError, match="negative curvature"):
            ft.Implicit()(self.saddle(), {"a": jnp.array(0.5)})

    @pytest.mark.second_tier
    def test_a_breakdown_is_told_from_an_error_that_is_not_finite(self):
        def loss(params, hparams, batch):  # a saddle at which both directions matter
            return hparams["a"] * params[0] ** 2 - 0.5 * params[1] ** 2

        def problem(objective):
            return ft.Problem(
                ft.Training(loss, optax.sgd(0.1)),
                lambda state, h, v: objective(state.params),
                jnp.array([1.0, 0.0]),
                ft.FullBatch(jnp.zeros(1), steps=200),
                jnp.zeros(1),
            )

        hparams = {"a": jnp.array(0.5)}  # p H p = 0 in the first direction p
        with pytest.raises(ValueError, match=r"negative curvature.*broke down.*of the first"):
            ft.Implicit()(problem(jnp.sum), hparams)
        with pytest.raises(ft.NonFiniteError):
            ft.Implicit()(problem(lambda w: jnp.sqrt(w[1])), hparams)

    def test_what_it_cannot_see_is_refused(self):
        problem, hparams = regression(steps=3000, dtype=np.float64)  # lr is the optimizer's
        with pytest.raises(ValueError, match=r"hparams\['lr'\] has no influence on the minimum"):
            ft.Implicit()(problem, hparams)
        problem, hparams = self.ridge(steps=3, trajectory=True)
        with pytest.raises(ValueError, match="trajectory"):
            ft.Implicit()(problem, hparams)
        x, y = self.ridge()[0].batches.data
        stacked = (jnp.stack([x] * 3), jnp.stack([y] * 3))
        problem, hparams = self.ridge(batches=stacked)
        with pytest.raises(TypeError, match="all the data as one batch"):
            ft.Implicit()(problem, hparams)

    def test_what_it_cannot_see_is_refused_inside_jit(self):
        problem, hparams = regression(steps=5, dtype=np.float64)  # lr is the optimizer's
        with pytest.raises(ValueError, match=r"hparams\['lr'\] has no influence on the minimum"):
            jax.jit(lambda h: ft.Implicit()(problem, h).grad)(hparams)

    def test_what_is_only_in_the_start_is_refused(self):
        def init(hparams):
            return {"w": jnp.full(3, hparams["start"]), "b": jnp.zeros(())}

        problem, hparams = self.ridge(steps=5, init=init)
        with pytest.raises(ValueError, match=r"Implicit: hparams\['start'\] has no influence"):
            ft.Implicit()(problem, hparams | {"start": jnp.array(0.5)})

    def test_a_derivative_that_is_truly_zero_is_no_fault(self):
        def loss(params, hparams, batch):  # ends at (1 / (1 + a), 0), which no b changes
            a, b = hparams["a"], hparams["b"]
            return (params[0] - 1) ** 2 + a * params[0] ** 2 + b * params[1] ** 2

        problem = ft.Problem(
            ft.Training(loss, optax.sgd(0.2)),
            lambda state, h, v: state.params[0] + jnp.sin(state.params[1]),
            jnp.array([1.0, 0.0]),
            ft.FullBatch(jnp.zeros(1), steps=100),
        )
        hparams = {"a": jnp.array(1.0), "b": jnp.array(2.0)}
        engine = ft.Implicit()
        for found in (engine(problem, hparams), jax.jit(lambda h: engine(problem, h))(hparams)):
            np.testing.assert_allclose(found.grad["a"], -0.25, rtol=1e-4)
            assert found.grad["b"] == 0

    def saddle(self):
        def loss(params, hparams, batch):
            return hparams["a"] * params[0] ** 2 - 0.01 * params[1] ** 2

        return ft.Problem(
            ft.Training(loss, optax.sgd(0.1)),
            lambda state, h, v: jnp.sum(state.params) + h["a"],
            jnp.array([1.0, 0.0]),
            ft.FullBatch(jnp.zeros(1), steps=200),
            jnp.zeros(1),
        )

    def test_negative_curvature_is_an_error_inside_jit(self):
        problem, hparams = self.saddle(), {"a": jnp.array(0.5)}
        with pytest.raises(Exception, match="negative curvature"):
            jax.block_until_ready(jax.jit(lambda h: ft.Implicit()(problem, h).grad)(hparams))

    def test_a_training_that_has_not_converged_is_said_inside_jit(self):
        problem, hparams = self.ridge(steps=5)
        with pytest.warns(UserWarning, match=r"has not converged.*% of the length of the first"):
            run_to_the_end(jax.jit(lambda h: ft.Implicit()(problem, h).grad), hparams)


@pytest.mark.usefixtures("x64")
@pytest.mark.promotes("a hand-written loop, as users write it")
class TestFirstOrder:
    """`Reverse(first_order=True)`: the gradient of a step has no derivative in the weights."""

    x, y = np.random.default_rng(0).normal(size=(2, 2, 8, 3))  # support and query

    @staticmethod
    def loss(params, x, y):
        return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)

    def problem(self, steps=4, weighted=False):
        def inner(params, hparams, batch):
            penalty = hparams["decay"] * jnp.sum(params["b"] ** 2) if weighted else 0.0
            return self.loss(params, *batch) + penalty

        return ft.Problem(
            ft.Training(inner, lambda h: optax.sgd(h["lr"], 0.5)),
            lambda state, h, batch: self.loss(state.params, *batch),
            lambda h: h["start"],
            ft.FullBatch((self.x[0], self.y[0]), steps=steps),
            (self.x[1], self.y[1]),
        )

    def start(self):
        a, b = np.random.default_rng(1).normal(size=(2, 3, 3)) / 2
        return {"start": {"a": jnp.array(a), "b": jnp.array(b)}, "lr": jnp.array(0.1)}

    def by_hand(self, hparams, steps=4, weighted=False):
        """First-order MAML: gradients at weights that count as constants."""
        params = hparams["start"]
        trace = jax.tree.map(jnp.zeros_like, params)
        for _ in range(steps):
            here = jax.lax.stop_gradient(params)
            g = jax.grad(self.loss)(here, self.x[0], self.y[0])
            if weighted:
                g["b"] = g["b"] + 2 * hparams["decay"] * here["b"]
            trace = jax.tree.map(lambda m, g: 0.5 * m + g, trace, g)
            params = jax.tree.map(lambda w, m: w - hparams["lr"] * m, params, trace)
        return self.loss(params, self.x[1], self.y[1])

    @pytest.mark.parametrize("store", ["states", "everything", "gradients", "segments", 2])
    def test_it_is_first_order_maml(self, store):
        hparams = self.start()
        expected = jax.grad(self.by_hand)(hparams)
        found = ft.Reverse(store, first_order=True)(self.problem(), hparams)
        assert_trees_close(found.value, self.by_hand(hparams), 1e-12)
        assert_trees_close(found.grad, expected, 1e-12)
        exact = ft.Reverse()(self.problem(), hparams)
        assert not np.allclose(exact.grad["start"]["a"], found.grad["start"]["a"], rtol=0.01)

    def test_hyperparameters_of_the_loss_keep_their_part(self):
        hparams = self.start() | {"decay": jnp.array(0.1)}
        expected = jax.grad(self.by_hand)(hparams, weighted=True)
        found = ft.Reverse(first_order=True)(self.problem(weighted=True), hparams)
        assert_trees_close(found.grad, expected, 1e-12)
        assert found.grad["decay"] != 0

    def test_of_a_mean_over_tasks(self):
        problem, hparams = self.problem(), self.start()
        found = ft.Reverse(first_order=True)(ft.Mean([problem, problem]), hparams)
        assert_trees_close(found.grad, jax.grad(self.by_hand)(hparams), 1e-12)

    def test_other_dynamics_are_refused(self):
        class Still(ft.Dynamics):
            def init(self, params, hparams):
                return params

            def step(self, state, hparams, batch):
                return hparams["a"] * state

        problem = ft.Problem(Still(), lambda s, h, _: s, jnp.array(1.0), ft.FullBatch(None, 2))
        with pytest.raises(TypeError, match="Still has no `first_order`"):
            ft.Reverse(first_order=True)(problem, {"a": jnp.array(0.5)})

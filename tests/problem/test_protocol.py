"""One protocol for dynamics: what engines, folds and tuners ask of one, however it is written."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft
from foretune._problem.dynamics import Wrapper, as_dynamics

from ..problems import assert_trees_close, penalised, regression, squared_error

SGD = optax.sgd(0.1, 0.5)


class Halved(ft.Training):
    """Overrides `step` alone, by way of the inherited one."""

    def step(self, state, hparams, batch):
        state = super().step(state, hparams, batch)
        return state._replace(params=jax.tree.map(lambda w: w / 2, state.params))


class Reported(ft.Training):
    """Overrides `step_and_loss` alone."""

    def step_and_loss(self, state, hparams, batch):
        state, loss = super().step_and_loss(state, hparams, batch)
        halved = jax.tree.map(lambda w: w / 2, state.params)
        return state._replace(params=halved), loss


def by_hand(problem, hparams):
    """Return the error of a training in which each step halves the weights, in a Python loop."""
    plain = ft.Training(penalised, SGD)
    state = plain.init(problem.init, hparams)
    for _ in range(problem.steps):
        state = plain.step(state, hparams, problem.batches.data)
        state = state._replace(params=jax.tree.map(lambda w: w / 2, state.params))
    return squared_error(state, hparams, problem.validation)


@pytest.mark.parametrize("kind", [Halved, Reported])
@pytest.mark.parametrize("engine", [ft.Reverse(), ft.Forward()])
@pytest.mark.second_tier
def test_an_overridden_step_counts_in_every_engine(kind, engine):
    problem, _ = regression(4, dynamics=kind(penalised, SGD))
    hparams = {"decay": jnp.array(0.1)}
    value, grad = jax.value_and_grad(lambda h: by_hand(problem, h))(hparams)
    found = engine(problem, hparams)
    np.testing.assert_allclose(found.value, value, rtol=1e-5)
    np.testing.assert_allclose(found.grad["decay"], grad["decay"], rtol=1e-4)


@pytest.mark.parametrize("kind", [Halved, Reported])
def test_an_overridden_step_counts_in_real_time(kind):
    problem, _ = regression(3, dynamics=kind(penalised, SGD))
    hparams = {"decay": jnp.array(0.1)}
    tuner = ft.RealTime(problem.dynamics, squared_error, optax.sgd(0.0), rollback=None)
    state = tuner.init(problem.init, hparams)
    _, log = tuner.update(state, problem.batches, problem.validation)
    np.testing.assert_allclose(log["value"], by_hand(problem, hparams), rtol=1e-5)
    assert (log["loss"] is None) == (kind is Halved)


@dataclasses.dataclass
class Ridge:
    """Gradient descent on a ridge regression: a dataclass, which has no hash."""

    rate: float

    def init(self, params, hparams):
        return ft.TrainState(params, (), None, jnp.array(0))

    def gradient(self, state, hparams, batch):
        return jax.grad(penalised)(state.params, hparams, batch)

    def step(self, state, hparams, batch):
        down = self.gradient(state, hparams, batch)
        moved = jax.tree.map(lambda w, g: w - self.rate * g, state.params, down)
        return state._replace(params=moved)


def test_a_dataclass_keeps_its_gradient_and_its_program():
    ridge = Ridge(0.1)
    problem, _ = regression(300, dynamics=ridge)
    hparams = {"decay": jnp.array(0.1)}
    exact, implicit = ft.Reverse()(problem, hparams), ft.Implicit()(problem, hparams)
    np.testing.assert_allclose(implicit.grad["decay"], exact.grad["decay"], rtol=1e-3)
    compiled = []

    def listen(event, duration, fun_name="", **_):
        if "backend_compile" in event and "compute" in fun_name:
            compiled.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    again, _ = regression(300, dynamics=ridge)
    ft.Reverse()(again, hparams)
    jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled


def test_what_a_dynamics_offers():
    training = ft.Training(penalised, SGD)
    assert training.offers("gradient")
    assert training.offers("in_precision")
    assert training.reports_loss
    ridge = as_dynamics(Ridge(0.1))
    assert ridge.offers("gradient")
    assert not ridge.offers("in_precision")
    assert not ridge.reports_loss
    low = as_dynamics(Wrapper(training)).in_precision(jnp.bfloat16)
    assert low.offers("gradient")
    assert low.reports_loss


def ridge_folds(rows=20):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, 3)), jnp.float32)
    y = x @ jnp.array([1.0, 2.0, 3.0]) + jnp.asarray(rng.normal(size=rows), jnp.float32)
    fold = jnp.arange(rows) % 2
    uses = [(fold == k).astype(float) for k in range(2)]

    def loss(w, h, batch):
        x, y, use = batch
        return jnp.sum(use * (x @ w - y) ** 2) / jnp.sum(use) + h["decay"] * jnp.sum(w**2)

    def error(state, h, batch):
        x, y, use = batch
        return jnp.sum(use * (x @ state.params - y) ** 2) / jnp.sum(use)

    training = ft.Training(loss, optax.sgd(0.1))

    def problem_of_fold(k):
        batches = ft.FullBatch((x, y, 1 - uses[k]), steps=300)
        return ft.Problem(training, error, jnp.zeros(3), batches, (x, y, uses[k]))

    return ft.CrossValidated(problem_of_fold, folds=2)


@pytest.mark.parametrize("solver", ["cg", "neumann"])
@pytest.mark.second_tier
def test_implicit_takes_folds(solver):
    folds, hparams = ridge_folds(), {"decay": jnp.array(0.5)}
    exact = ft.Reverse()(folds, hparams).grad["decay"]
    found = ft.Implicit(solver, iterations=300)(folds, hparams).grad["decay"]
    np.testing.assert_allclose(found, exact, rtol=1e-3)


def test_implicit_with_a_warm_start():
    problem, _ = regression(200, dynamics=ft.Training(penalised, SGD))
    result = ft.minimize(
        problem, {"decay": 0.1}, steps=2, engine=ft.Implicit(stationarity=10.0), warm_start=True
    )
    assert len(result.history) == 3


def test_folds_stay_folds():
    folds = ridge_folds()
    start = [jnp.ones(3)] * 2
    for other in (
        folds.replace(init=start),
        folds.continued(folds.start({"decay": jnp.array(0.1)})),
    ):
        assert isinstance(other, ft.CrossValidated)
        assert other.folds == 2
        value, state = other.response({"decay": jnp.array(0.1)})
        np.testing.assert_allclose(
            other.fold_values(state, {"decay": jnp.array(0.1)}).mean(), value, rtol=1e-6
        )


def frozen_problem(steps, optimizer=None, label=None):
    """Return a problem with a large matrix in its model state, or among its parameters, that stays."""
    frozen = jnp.ones((64, 64))

    def loss(params, hparams, batch, model_state):
        hidden = jnp.tanh(batch @ (model_state if label is None else params["frozen"]))
        value = jnp.mean((hidden @ params["w"] / 64) ** 2) + hparams["decay"] * jnp.sum(
            params["w"] ** 2
        )
        return value, model_state

    params = {"w": jnp.ones(64)} | ({} if label is None else {"frozen": frozen})
    return ft.Problem(
        ft.Training(loss, optimizer or optax.sgd(0.1), has_state=True),
        lambda state, h, x: jnp.sum(state.params["w"] ** 2) + jnp.sum(state.model_state[0]),
        (params, frozen),
        ft.FullBatch(jnp.ones((4, 64)), steps=steps),
        jnp.ones(()),
    )


@pytest.mark.parametrize("where", ["model state", "parameters"])
def test_what_no_step_changes_is_not_stored(where):
    optimizer = label = None
    if where == "parameters":
        label = {"w": "trained", "frozen": "frozen"}
        optimizer = optax.partition(
            {"trained": optax.sgd(0.1), "frozen": optax.set_to_zero()}, label
        )
    problem, hparams = frozen_problem(100, optimizer, label), {"decay": jnp.array(0.1)}
    memory = ft.Reverse().lower(problem, hparams).compile().memory_analysis()
    matrix = 64 * 64 * 4
    assert memory.temp_size_in_bytes < 20 * matrix  # not 100 of them
    reverse, forward = ft.Reverse()(problem, hparams), ft.Forward()(problem, hparams)
    assert_trees_close(reverse.grad, forward.grad, 1e-5)
    np.testing.assert_array_equal(reverse.state.model_state, np.ones((64, 64)))


def test_a_start_that_depends_on_hyperparameters_is_state_though_no_step_changes_it():
    class Still(ft.Dynamics, eqx.Module):
        def init(self, params, hparams):
            return params

        def step(self, state, hparams, batch):
            return state

    problem = ft.Problem(
        Still(), lambda s, h, _: s["a"] ** 2 + s["b"], lambda h: {"a": h["a"], "b": jnp.array(1.0)},
        ft.FullBatch(None, steps=3),
    )  # fmt: skip
    for engine in (ft.Reverse(), ft.Forward()):
        assert float(engine(problem, {"a": 3.0}).grad["a"]) == 6.0

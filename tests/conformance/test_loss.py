"""`TrainState.loss`: that of the last step's minibatch, at the weights before the step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft

from ..conftest import setting
from ..problems import assert_trees_close
from .optimizers import ALIASES, OTHERS
from .test_optimizers import penalised, problem_and_hparams, validation_error

pytestmark = pytest.mark.promotes("optimizers of Optax multiply floats by counts")
later = functools.partial(pytest.param, marks=pytest.mark.second_tier)
ROWS = ALIASES | OTHERS


@pytest.fixture(autouse=True)
def quick_compilation():
    with setting(jax_disable_most_optimizations=True):
        yield


def losses_of(problem, hparams):
    """Return the losses in the states, and those computed from states and minibatches by hand."""
    dynamics, state = problem.dynamics, problem.start(hparams)
    assert float(state.loss) == 0.0
    step, found, expected = jax.jit(dynamics.step), [], []
    for t in range(problem.steps):
        batch = problem.batches.batch(jax.tree.map(lambda leaf, t=t: leaf[t], problem.batches.xs))
        model_state = () if state.model_state is None else (state.model_state,)
        value = dynamics.loss(state.params, hparams, batch, *model_state)
        expected.append(value[0] if model_state else value)
        state = step(state, hparams, batch)
        found.append(state.loss)
    return found, expected


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("variant", ["minibatches", later("has_state")])
@pytest.mark.parametrize("name", ["sgd", later("adam"), later("polyak_sgd"), later("sam")])
def test_it_is_the_loss_before_the_step(name, variant):
    problem, hparams = problem_and_hparams(ROWS[name], variant)
    found, expected = losses_of(problem, hparams)
    assert all(loss.dtype == np.float64 for loss in found)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("kind", ["bfloat16 loss", later("bfloat16 weights")])
def test_of_low_precision_it_is_a_float32(kind):
    problem, hparams = problem_and_hparams(ROWS["sgd"], "minibatches")
    if kind == "bfloat16 loss":
        problem = problem.replace(dynamics=problem.dynamics.in_precision(jnp.bfloat16))
    else:
        low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), problem.init)
        problem = problem.replace(init=low)
    found, expected = losses_of(problem, jax.tree.map(jnp.asarray, hparams))
    assert all(loss.dtype == np.float32 for loss in found)
    np.testing.assert_allclose(found, np.asarray(expected, np.float32), rtol=2e-2)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["sgd", later("adam")])
def test_it_may_be_the_objective(name):
    """Its derivative is that of the loss at s_{T-1}, plus the loss's own."""
    problem, hparams = problem_and_hparams(ROWS[name], "plain")
    batch, T = problem.batches.data, problem.steps

    def before_last(state, h, _):
        return penalised(state.params, h, batch)

    shorter = problem.replace(objective=before_last, batches=ft.FullBatch(batch, steps=T - 1))
    expected = ft.Forward()(shorter, hparams)
    reported = problem.replace(objective=lambda state, h, _: state.loss)
    for engine in (ft.Reverse(), ft.Reverse("gradients"), ft.Reverse("segments"), ft.Forward()):
        found = engine(reported, hparams)
        np.testing.assert_allclose(found.value, expected.value, rtol=1e-12)
        assert_trees_close(found.grad, expected.grad, 1e-9, 1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.second_tier
def test_every_engine_returns_it():
    problem, hparams = problem_and_hparams(ROWS["sgd"], "minibatches")
    found, _ = losses_of(problem, hparams)
    for engine in (ft.Reverse(), ft.Reverse("gradients"), ft.Reverse(2), ft.Forward()):
        np.testing.assert_allclose(engine(problem, hparams).state.loss, found[-1], rtol=1e-12)
    mean = ft.Mean([problem, problem.replace(init={"w": 2 * problem.init["w"]})])
    assert ft.Reverse()(mean, hparams).state.loss.shape == (2,)


def test_an_optimizer_that_is_no_function_of_them():
    training = ft.Training(penalised, optax.sgd(0.1))
    state = training.init({"w": jnp.ones((3, 2))}, {})
    batch = jnp.ones((4, 3)), jnp.ones((4, 2))
    state = training.step(state, {}, batch)
    np.testing.assert_allclose(state.loss, penalised({"w": jnp.ones((3, 2))}, {}, batch))
    assert validation_error(state, {}, {"validation": batch}) < state.loss

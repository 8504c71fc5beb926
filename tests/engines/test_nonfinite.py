"""Results that are not finite: reported with the leaf, the step and the remedy."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft
from foretune._engines import nonfinite
from foretune._engines.nonfinite import when_checked

from ..problems import penalised, regression, squared_error

ENGINES = [ft.Reverse(), ft.Forward()]


def with_dead_feature(optimizer):
    """Return a regression one of whose inputs is always 0, so that its gradient is exactly 0."""
    x, y = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32), np.ones(20, np.float32)
    x[:, 1] = 0
    return regression(batches=ft.FullBatch((x, y), steps=8), validation=(x, y), optimizer=optimizer)


@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam,
        pytest.param(optax.adamw, marks=pytest.mark.second_tier),
        pytest.param(optax.nadam, marks=pytest.mark.second_tier),
    ],
)
def test_adam_at_a_zero_gradient_names_the_remedy(engine, optimizer):
    problem, hparams = with_dead_feature(lambda h: optimizer(h["lr"]))
    with pytest.raises(ft.NonFiniteError) as error:
        engine(problem, hparams)
    message = str(error.value)
    assert "the gradient of hparams['lr'] (1 of 1 entries)" in message
    assert "First at step 1 of 8: the derivative of state.params['w'] (float32[3])" in message
    assert "state.opt_state[0].nu['w']" in message
    assert "eps_root=1e-8" in message
    problem, hparams = with_dead_feature(lambda h: optimizer(h["lr"], eps_root=1e-8))
    assert np.isfinite(engine(problem, hparams).grad["lr"])


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_the_first_bad_step_is_found(engine):
    """A root whose argument is exactly 0 at step 5 alone, where its derivative is infinite."""

    def loss(params, hparams, batch):
        x, y, gap = batch
        return penalised(params, hparams, (x, y)) + jnp.sqrt(gap * params["b"] ** 2) * hparams["c"]

    problem, hparams = regression(
        dynamics=ft.Training(loss, lambda h: optax.sgd(h["lr"])),
        batches=(*_repeated(8), np.array([1, 1, 1, 1, 0, 1, 1, 1], np.float32)),
        init={"w": np.zeros(3, np.float32), "b": np.ones((), np.float32)},
    )
    with pytest.raises(ft.NonFiniteError, match=r"at step 5 of 8.*state.params\['b'\]"):
        engine(problem, hparams | {"c": jnp.array(0.1)})


def _repeated(steps):
    x, y = regression()[0].batches.data
    return np.repeat(x[None], steps, 0), np.repeat(y[None], steps, 0)


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_training_that_diverges(engine):
    problem, hparams = regression(steps=200)
    pattern = (
        r"step \d+ of 200, in the training itself: state.* It had grown to .* smaller learning rate"
    )
    with pytest.raises(ft.NonFiniteError, match=pattern):
        engine(problem, hparams | {"lr": jnp.array(50.0)})


def test_a_gradient_of_the_loss_that_is_not_finite():
    """The norm of a vector of zeros: a smaller learning rate would not help."""

    def loss(params, hparams, batch):
        return penalised(params, hparams, batch) + jnp.sqrt(jnp.sum(params["w"] ** 2))

    problem, hparams = regression(dynamics=ft.Training(loss, lambda h: optax.sgd(h["lr"])))
    with pytest.raises(ft.NonFiniteError, match=r"step 1 of 10, in the training itself") as error:
        ft.Forward()(problem, hparams)
    assert "learning rate" not in str(error.value)
    assert "a norm or a log at exactly 0" in str(error.value)


def test_a_hyperparameter_that_is_not_finite():
    problem, hparams = regression()
    with pytest.raises(ft.NonFiniteError, match=r"hparams\['lr'\] itself is not finite"):
        ft.Reverse()(problem, hparams | {"lr": jnp.array(jnp.nan)})


def test_a_derivative_that_explodes():
    """The state stays bounded while its derivative grows at each step (a chaotic map)."""

    class Logistic(ft.Dynamics):
        def init(self, params, hparams):
            return params

        def step(self, state, hparams, batch):
            return hparams["r"] * state * (1 - state)

    problem = ft.Problem(
        Logistic(), lambda s, h, b: s, np.array(0.3, np.float32), ft.FullBatch(None, steps=900)
    )
    with pytest.raises(ft.NonFiniteError, match=r"It had grown to .* unstable"):
        ft.Forward()(problem, {"r": jnp.array(3.9)})


def test_a_fault_of_the_adjoint_alone():
    """The dropped branch of `where`: 0 x infinity in reverse mode, nothing in forward mode."""

    def error(state, hparams, batch):
        b = state.params["b"] * 0.0
        return squared_error(state, hparams, batch) + jnp.where(b > 0, jnp.sqrt(b), 0.0)

    problem, hparams = regression(objective=error)
    with pytest.raises(ft.NonFiniteError, match="begins in the gradient of the objective"):
        ft.Reverse()(problem, hparams)


@pytest.mark.parametrize(
    ("optimizer", "engine", "remedy"),
    [
        (lambda h: optax.contrib.adopt(h["lr"]), ft.Forward(), "reverse"),
        (lambda h: optax.contrib.dadapt_adamw(h["lr"]), ft.Forward(), "reverse"),
        (lambda h: optax.radam(h["lr"], eps_root=1e-8), ft.Reverse(), "forward"),
    ],
    ids=["adopt", "dadapt", "radam"],
)
@pytest.mark.second_tier
def test_where_the_other_mode_is_finite_it_is_the_remedy(optimizer, engine, remedy):
    problem, hparams = regression(optimizer=optimizer)
    with pytest.raises(ft.NonFiniteError) as error:
        engine(problem, hparams)
    assert f"`{remedy.capitalize()}()`" in str(error.value)
    other = {"reverse": ft.Reverse(), "forward": ft.Forward()}[remedy]
    assert np.isfinite(other(problem, hparams).grad["lr"])


@jax.custom_vjp
def root(x):  # has no forward mode
    return jnp.sqrt(x)


root.defvjp(lambda x: (jnp.sqrt(x), x), lambda x, g: (g * 0.5 / jnp.sqrt(x),))


def searched(x):  # a loop of unknown length has no reverse mode
    return jnp.sqrt(jax.lax.while_loop(lambda x: x > 10, lambda x: x / 2, x))


@pytest.mark.parametrize(
    ("engine", "f", "pattern"),
    [
        (ft.Reverse(), root, r"The training is finite, its derivative is not"),
        (ft.Forward(), searched, r"at step 3 of 4: the derivative of state .*jnp.where"),
    ],
    ids=["reverse", "forward"],
)
def test_a_step_that_the_other_mode_cannot_differentiate(engine, f, pattern):
    class Rooted(ft.Dynamics):
        def init(self, params, hparams):
            return params

        def step(self, state, hparams, batch):
            return state * hparams["a"] + f(state * batch) * 0

    batches = np.array([1, 1, 0, 1], np.float32)
    problem = ft.Problem(Rooted(), lambda s, h, b: s, np.ones((), np.float32), batches)
    with pytest.raises(ft.NonFiniteError, match=pattern):
        engine(problem, {"a": jnp.array(0.9)})


def test_the_explanation_takes_one_training():
    calls = []

    def loss(params, hparams, batch):
        jax.debug.callback(lambda: calls.append(1))
        return penalised(params, hparams, batch)

    problem, hparams = with_dead_feature(lambda h: optax.adam(h["lr"]))
    problem = problem.replace(dynamics=ft.Training(loss, lambda h: optax.adam(h["lr"])))
    with ft.check_finite(False):
        result = ft.Reverse()(problem, hparams)
    jax.effects_barrier()
    calls.clear()
    assert "First at step 1 of 8" in nonfinite.explain(problem, hparams, result, "Forward()")
    jax.effects_barrier()
    assert len(calls) == 8


def test_a_value_that_is_not_finite():
    problem, hparams = regression(
        objective={
            "lr": squared_error,
            "decay": lambda s, h, b: squared_error(s, h, b) + jnp.log(h["decay"] * 0.0),
        }
    )
    pattern = r"not finite: value\['decay'\](?s:.*)the objective is not, at the last state"
    with pytest.raises(ft.NonFiniteError, match=pattern):
        ft.Forward()(problem, hparams)


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_checks_can_be_asked_for_or_dropped(engine):
    problem, hparams = with_dead_feature(lambda h: optax.adam(h["lr"]))
    with ft.check_finite(False):
        assert np.isnan(engine(problem, hparams).grad["lr"])
    silent = jax.jit(lambda h: engine(problem, h).grad)(hparams)
    assert np.isnan(silent["lr"])
    with (
        ft.check_finite(True),
        pytest.raises(Exception, match=r"the gradient of hparams\['\w+'\] is not finite"),
    ):
        jax.block_until_ready(jax.jit(lambda h: engine(problem, h).grad)(hparams))


def test_a_setting_holds_inside_its_block_and_its_thread():
    assert when_checked() is None
    with ft.check_finite(False):
        with ft.check_finite(True):
            assert when_checked() is True
        assert when_checked() is False
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(when_checked).result() is None
        with pytest.raises(KeyError), ft.check_finite(None):
            raise KeyError
        assert when_checked() is False
    assert when_checked() is None


def test_nothing_is_added_to_a_jitted_program():
    problem, hparams = regression()
    text = jax.jit(lambda h: ft.Reverse()(problem, h).grad).lower(hparams).as_text()
    assert "is_finite" not in text

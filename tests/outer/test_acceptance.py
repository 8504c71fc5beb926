"""Steps that raise the error are rejected."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft

from ..problems import assert_trees_close, regression


class Keep(ft.Dynamics):
    """A state that stays what it is at first: the hyperparameters."""

    def init(self, params, hparams):
        return hparams

    def step(self, state, hparams, batch):
        return state


def response(f, init):
    return ft.Problem(Keep(), lambda s, h, _: f(s), init, ft.FullBatch(None, steps=1))


def bowl(h):
    return jnp.sum(h["x"] ** 2)


START = {"x": jnp.array([1.0, -2.0])}


@pytest.mark.parametrize(
    "rate", [0.9, 1e30, *(pytest.param(r, marks=pytest.mark.second_tier) for r in (0.1, 3.0, 1e3))]
)
@pytest.mark.parametrize("name", ["sgd", "adam", "momentum"])
@pytest.mark.promotes("Adam multiplies floats by counts")
@pytest.mark.filterwarnings("ignore:the error or the hypergradient")
def test_it_ends_no_higher_than_it_began(rate, name):
    make = {"sgd": optax.sgd, "adam": optax.adam, "momentum": lambda r: optax.sgd(r, 0.9)}[name]
    result = ft.minimize(response(bowl, START), START, steps=12, optimizer=make(rate))
    first = result.history[0]["value"]
    assert float(result.value) <= 1.00001 * first
    np.testing.assert_allclose(
        result.value, bowl(result.hparams), rtol=1e-6
    )  # they belong together
    np.testing.assert_array_equal(result.state["x"], result.hparams["x"])
    accepted = [record["value"] for record in result.history if not record["rejected"]]
    assert max(accepted) <= 1.00001 * first
    if rate == 3.0 and name == "sgd":
        assert any(record["rejected"] for record in result.history)
        assert result.value < 0.1 * first  # shortened, and on


@pytest.mark.usefixtures("x64")
@pytest.mark.promotes("Adam multiplies floats by counts")
def test_where_all_steps_are_accepted_it_is_the_optimizer_alone():
    problem, hparams = regression(steps=5, dtype=np.float64)
    optimizer = optax.adam(0.003)
    result = ft.minimize(problem, hparams, steps=6, optimizer=optimizer)
    assert not any(record["rejected"] for record in result.history)
    state = optimizer.init(hparams)
    for record in result.history[:-1]:
        value, grad, _ = ft.Reverse()(problem, hparams)
        np.testing.assert_allclose(record["value"], value, rtol=1e-12)
        updates, state = optimizer.update(grad, state)
        hparams = optax.apply_updates(hparams, updates)
    assert_trees_close(result.hparams, hparams, 1e-12)


def test_a_step_that_is_not_finite_is_rejected_with_a_warning():
    problem, hparams = regression(steps=100)
    with pytest.warns(RuntimeWarning, match=r"at step \d+ of minimize is not finite, with hparams"):
        result = ft.minimize(problem, hparams, steps=12, optimizer=optax.sgd(-100.0))
    assert np.isfinite(result.value)
    assert float(result.value) <= result.history[0]["value"]
    assert any(record["rejected"] for record in result.history)


def test_a_start_that_is_not_finite_is_an_error():
    problem = response(lambda h: jnp.log(jnp.sum(h["x"])), START)
    with pytest.raises(ft.NonFiniteError, match="objective"):
        ft.minimize(problem, START, steps=3, optimizer=optax.sgd(0.1))


@pytest.mark.promotes("Adam multiplies floats by counts")
@pytest.mark.second_tier
def test_it_resumes_to_the_same(tmp_path):
    options = {"optimizer": optax.sgd(1.0)}
    problem = response(lambda h: jnp.sum(h["x"] ** 4), START)
    whole = ft.minimize(problem, START, steps=9, **options)
    assert any(record["rejected"] for record in whole.history)
    for steps in range(1, 10):
        result = ft.minimize(
            problem, START, steps=steps, callbacks=[ft.Checkpoint(tmp_path)], **options
        )
    assert result.history == whole.history
    np.testing.assert_array_equal(result.hparams["x"], whole.hparams["x"])


def test_the_default_moves_in_units_of_the_start():
    problem = response(
        lambda h: (1e4 * h["small"] - 2) ** 2 + (h["one"] - 2) ** 2,
        {"small": jnp.array(0.0), "one": jnp.array(0.0)},
    )
    start = {"small": jnp.array(1e-4), "one": jnp.array(1.0)}
    result = ft.minimize(problem, start, steps=30)
    np.testing.assert_allclose(1e4 * result.hparams["small"], result.hparams["one"], rtol=1e-3)
    assert result.value < 0.5 * result.history[0]["value"]

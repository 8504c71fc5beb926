"""Steps that raise the error are taken back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft

from ..engines.test_smoothing import response
from ..problems import regression


def bowl(h):
    return jnp.sum(h["x"] ** 2)


START = {"x": jnp.array([1.0, -2.0])}


@pytest.mark.parametrize("rate", [0.1, 0.9, 3.0, 1e3, 1e30])
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
    held = [record["value"] for record in result.history if not record["taken_back"]]
    assert max(held) <= 1.00001 * first
    if rate == 3.0 and name == "sgd":
        assert any(record["taken_back"] for record in result.history)
        assert result.value < 0.1 * first  # shortened, and on


@pytest.mark.promotes("Adam multiplies floats by counts")
def test_where_nothing_is_taken_back_nothing_changes():
    problem, hparams = regression(steps=5)
    options = {"steps": 6, "optimizer": optax.adam(0.003)}
    on, off = (ft.minimize(problem, hparams, take_back=t, **options) for t in (True, False))
    for a, b in zip(on.history, off.history, strict=True):
        assert a.pop("taken_back") is False
        np.testing.assert_allclose(list(a.values()), list(b.values()), rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), on.hparams, off.hparams)


def test_a_step_that_is_not_finite_is_taken_back_and_said():
    problem, hparams = regression(steps=100)
    with pytest.warns(RuntimeWarning, match=r"at step \d+ of minimize is not finite, with hparams"):
        result = ft.minimize(problem, hparams, steps=12, optimizer=optax.sgd(-100.0))
    assert np.isfinite(result.value)
    assert float(result.value) <= result.history[0]["value"]
    assert any(record["taken_back"] for record in result.history)


def test_a_start_that_is_not_finite_is_an_error():
    problem = response(lambda h: jnp.log(jnp.sum(h["x"])), START)
    with pytest.raises(ft.NonFiniteError, match="objective"):
        ft.minimize(problem, START, steps=3, optimizer=optax.sgd(0.1))


def test_each_descent_has_its_own():
    starts = {"x": jnp.array([[1.0, -2.0], [0.5, 0.5]])}
    problem = response(lambda h: jnp.sum(h["x"] ** 4), START)
    options = {"steps": 8, "optimizer": optax.sgd(0.3)}
    together = ft.minimize(problem, starts, batched=True, **options)
    for i in range(2):
        alone = ft.minimize(problem, {"x": starts["x"][i]}, **options)
        np.testing.assert_allclose(together.hparams["x"][i], alone.hparams["x"], rtol=1e-5)
        np.testing.assert_allclose(together.value[i], alone.value, rtol=1e-5)
        taken = [record["taken_back"] for record in alone.history]
        assert [record["taken_back"][i] for record in together.history] == taken
    assert any(taken[0] for taken in (record["taken_back"] for record in together.history))


def test_the_noise_of_new_batches_is_no_rise():
    x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)

    def batches(step):
        return ft.FullBatch(x[step % 8 * 8 : step % 8 * 8 + 8], steps=1)

    problem = ft.Problem(
        ft.Training(lambda w, h, x: jnp.sum((w - h["x"]) ** 2), optax.sgd(0.5)),
        lambda s, h, v: jnp.sum((s.params - 1) ** 2), jnp.zeros(3), batches(0),
    )  # fmt: skip
    noisy = problem.replace(
        dynamics=ft.Training(lambda w, h, x: jnp.sum((w - h["x"] - x.mean(0)) ** 2), optax.sgd(0.5))
    )
    result = ft.minimize(
        noisy, {"x": jnp.zeros(3)}, steps=20, optimizer=optax.sgd(0.02), batches=batches
    )
    assert sum(record["taken_back"] for record in result.history) <= 2
    assert result.history[-1]["value"] < result.history[0]["value"]


@pytest.mark.promotes("Adam multiplies floats by counts")
@pytest.mark.second_tier
def test_it_resumes_to_the_same(tmp_path):
    options = {"optimizer": optax.sgd(1.0)}
    problem = response(lambda h: jnp.sum(h["x"] ** 4), START)
    whole = ft.minimize(problem, START, steps=9, **options)
    assert any(record["taken_back"] for record in whole.history)
    for steps in range(1, 10):
        result = ft.minimize(
            problem, START, steps=steps, callbacks=[ft.Checkpoint(tmp_path)], **options
        )
    assert result.history == whole.history
    np.testing.assert_array_equal(result.hparams["x"], whole.hparams["x"])
    with pytest.raises(ValueError, match="take_back: True there, False here"):
        ft.minimize(
            problem, START, steps=9, take_back=False, callbacks=[ft.Checkpoint(tmp_path)], **options
        )


def test_the_default_moves_in_units_of_the_start():
    problem = response(
        lambda h: (1e4 * h["small"] - 2) ** 2 + (h["one"] - 2) ** 2,
        {"small": jnp.array(0.0), "one": jnp.array(0.0)},
    )
    start = {"small": jnp.array(1e-4), "one": jnp.array(1.0)}
    result = ft.minimize(problem, start, steps=30)
    np.testing.assert_allclose(1e4 * result.hparams["small"], result.hparams["one"], rtol=1e-3)
    assert result.value < 0.5 * result.history[0]["value"]


def test_it_is_a_flag():
    with pytest.raises(TypeError, match="take_back"):
        ft.minimize(response(bowl, START), START, steps=1, take_back="yes")

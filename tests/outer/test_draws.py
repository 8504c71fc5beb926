"""`minimize` on problems that are drawn anew at each step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft

from ..compilations import compilations
from ..problems import momentum, penalised, regression, squared_error, squares

STEPS, INNER, ROWS, WIDTH = 100, 5, 12, 3
TRUE = np.random.default_rng(0).normal(size=(4, WIDTH))  # tasks


def task(key):
    """Return data, validation and a start, all drawn."""
    which, inputs, noise, start = jax.random.split(key, 4)
    w = jnp.asarray(TRUE)[jax.random.randint(which, (), 0, len(TRUE))]
    x = jax.random.normal(inputs, (2, ROWS, WIDTH))
    y = x @ w + 0.1 * jax.random.normal(noise, (2, ROWS))
    params = {"w": 0.1 * jax.random.normal(start, (WIDTH,)), "b": jnp.zeros(())}
    return (x[0], y[0]), (x[1], y[1]), params


def draw(key):
    data, validation, params = task(key)
    return ft.Problem(
        ft.Training(penalised, momentum), squared_error, init=params,
        batches=ft.FullBatch(data, steps=INNER), validation=validation,
    )  # fmt: skip


def by_hand(hparams, key, optimizer):
    """The same by `jax.grad`, without the library."""

    def error(hparams, key):
        data, validation, params = task(key)
        training = momentum(hparams)
        state = training.init(params)
        for _ in range(INNER):
            updates, state = training.update(jax.grad(penalised)(params, hparams, data), state)
            params = optax.apply_updates(params, updates)
        return squares(params, validation)

    state, values = optimizer.init(hparams), []
    step = jax.jit(jax.value_and_grad(error))
    for k in range(STEPS):
        value, grad = step(hparams, jax.random.fold_in(key, k))
        updates, state = optimizer.update(grad, state)
        hparams = optax.apply_updates(hparams, updates)
        values.append(float(value))
    return hparams, values


@pytest.mark.second_tier
@pytest.mark.usefixtures("x64")
@pytest.mark.promotes("a hand-written loop, as users write it")
def test_tasks_drawn_anew_at_each_of_100_steps():
    """One compilation in all, and the same numbers as a loop by hand."""
    hparams = {"lr": jnp.array(0.05), "decay": jnp.array(0.02)}
    key, optimizer = jax.random.key(7), optax.sgd(1e-4)
    with compilations("compute", "_next", "<lambda>") as compiled:
        result = ft.minimize(draw, hparams, steps=STEPS, key=key, optimizer=optimizer)
    assert [name for name in compiled if name == "jit(compute)"] == ["jit(compute)"]
    assert not any(record["rejected"] for record in result.history)
    expected, values = by_hand(hparams, key, optimizer)
    found = [record["value"] for record in result.history]
    assert len(set(found)) == STEPS + 1  # another task each time
    np.testing.assert_allclose(found[:STEPS], values, rtol=1e-12)
    for name in hparams:
        np.testing.assert_allclose(result.hparams[name], expected[name], rtol=1e-12)
        assert result.hparams[name] != hparams[name]


def reshuffled():
    problem, hparams = regression()
    batches = ft.Minibatches.shuffled(
        problem.batches.data, batch_size=6, steps=8, key=jax.random.key(0)
    )
    problem = problem.replace(batches=batches)
    return lambda key: problem.replace(batches=batches.reshuffled(key)), hparams


@pytest.mark.second_tier
def test_new_minibatches_at_each_step_are_those_of_the_key(tmp_path):
    fresh, hparams = reshuffled()
    options = {"optimizer": optax.sgd(0.0), "key": jax.random.key(3)}
    whole = ft.minimize(fresh, hparams, steps=4, **options)
    values = [record["value"] for record in whole.history]
    assert len(set(values)) == 5
    for step, value in enumerate(values):
        problem = fresh(jax.random.fold_in(options["key"], step))
        np.testing.assert_allclose(value, problem.response(hparams)[0], rtol=1e-6)
    for steps in (2, 4):  # and of a resumed run
        callbacks = [ft.Checkpoint(tmp_path)]
        resumed = ft.minimize(fresh, hparams, steps=steps, callbacks=callbacks, **options)
    assert resumed.history == whole.history
    other = options | {"key": jax.random.key(4)}
    assert ft.minimize(fresh, hparams, steps=1, **other).history[0]["value"] != values[0]
    with pytest.raises(ValueError, match="the key: other numbers"):
        ft.minimize(fresh, hparams, steps=5, callbacks=[ft.Checkpoint(tmp_path)], **other)


def test_the_noise_of_draws_is_no_rise():
    def noisy(key):
        shift = 0.3 * jax.random.normal(key, (3,))
        return ft.Problem(
            ft.Training(follows, optax.sgd(0.5)), distance, jnp.zeros(3), ft.FullBatch(shift, 1)
        )

    result = ft.minimize(
        noisy, {"x": jnp.zeros(3)}, steps=20, optimizer=optax.sgd(0.02), key=jax.random.key(0)
    )
    assert sum(record["rejected"] for record in result.history) <= 2
    assert result.history[-1]["value"] < result.history[0]["value"]


def follows(w, h, x):
    return jnp.sum((w - h["x"] - x) ** 2)


def distance(state, h, v):
    return jnp.sum((state.params - 1) ** 2)

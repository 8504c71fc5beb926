"""Real-time tuning is exact where it must be."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft

from ..problems import assert_trees_close, penalised, squared_error, squares
from .tuners import EXACT, STILL, Decay, adam, data, joined, sgd, start, tuner

pytestmark = pytest.mark.promotes("Adam and relative_adam multiply floats by counts")

OTHERS = [(sgd, False), (adam, False), (sgd, True)]


@pytest.mark.parametrize(
    ("optimizer", "x64_on"),
    [(adam, True), *(pytest.param(*cell, marks=pytest.mark.second_tier) for cell in OTHERS)],
)
def test_the_first_window_is_forward_mode(optimizer, x64_on, request):
    if x64_on:
        request.getfixturevalue("x64")
    dtype, rtol = (np.float64, 1e-12) if x64_on else (np.float32, 1e-6)
    (window, *_), validation = data(dtype=dtype)
    params, hparams = start(dtype)
    realtime = tuner(optimizer)  # with its default options
    state, log = realtime.update(realtime.init(params, hparams), window, validation)
    problem = ft.Problem(
        ft.Training(penalised, optimizer), squared_error, params, window, validation
    )
    value, grad, train = ft.Forward()(problem, hparams)
    assert_trees_close(log["value"], value, rtol)
    assert_trees_close(log["hypergradient"], grad, rtol)
    assert_trees_close(state.train, train, rtol)
    assert_trees_close(log["hparams"], hparams, 0)


@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_without_updates_the_hypergradient_stays_exact_over_windows(optimizer, x64):
    windows, validation = data(dtype=np.float64)
    params, hparams = start(np.float64)
    realtime = tuner(optimizer, **EXACT)
    state = realtime.init(params, hparams)
    for window in windows:
        state, log = realtime.update(state, window, validation)
    problem = ft.Problem(
        ft.Training(penalised, optimizer), squared_error, params, joined(windows), validation
    )
    _value, grad, train = ft.Reverse()(problem, hparams)
    assert_trees_close(log["hypergradient"], grad, 1e-10)
    assert_trees_close(state.train, train, 1e-12)


@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_with_a_hyper_learning_rate_of_0_it_is_plain_training(optimizer):
    windows, validation = data(windows=5)
    params, hparams = start()
    realtime = tuner(optimizer)
    state = realtime.init(params, hparams)
    for window in windows:
        state, log = realtime.update(state, window, validation)
    plain = optimizer(hparams)
    opt_state = plain.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(penalised)(params, hparams, batch)
        updates, opt_state = plain.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for i in range(20):
        batch = jax.tree.map(lambda leaf: leaf[i], joined(windows))
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(loss)
    assert_trees_close(state.train.params, params, 1e-6)
    assert_trees_close(state.train.opt_state, opt_state, 1e-6, 1e-7)
    assert_trees_close(log["loss"], np.mean(losses[-4:]), 1e-6)
    assert int(state.train.step) == 20
    assert int(state.window) == 5


def test_the_null_start_moves_by_the_product_of_the_gradients(x64):
    (window, *_), validation = data(dtype=np.float64)
    params, hparams = start(np.float64, lr=0.0, momentum=0.0, decay=0.0)
    realtime = ft.RealTime(
        ft.Training(penalised, sgd),
        squared_error,
        constraints={
            "lr": ft.NonNegative(),
            "momentum": ft.Box(0.0, 0.999),
            "decay": ft.NonNegative(),
        },
    )
    state, log = realtime.update(realtime.init(params, hparams), window, validation)
    gradient = jax.grad(squares)
    total = jax.tree.map(
        lambda *g: sum(g),
        *(gradient(params, jax.tree.map(lambda leaf: leaf[i], window)) for i in range(4)),
    )
    products = jax.tree.map(lambda a, b: jnp.sum(a * b), gradient(params, validation), total)
    expected = -sum(jax.tree.leaves(products))
    assert_trees_close(log["hypergradient"]["lr"], expected, 1e-12)
    assert expected < 0
    assert state.hparams["lr"] > 0


@pytest.mark.second_tier
def test_from_the_null_start_it_learns():
    windows, validation = data(windows=60)
    params, hparams = start(lr=0.0, momentum=0.0, decay=0.0)
    constraints = {
        "lr": ft.NonNegative(),
        "momentum": ft.Box(0.0, 0.999),
        "decay": ft.NonNegative(),
    }
    realtime = tuner(outer=None, constraints=constraints)
    state = realtime.init(params, hparams)
    values = []
    for window in windows:
        state, log = realtime.update(state, window, validation)
        values.append(float(log["value"]))
        assert log["hparams"]["lr"] >= 0
        assert 0 <= log["hparams"]["momentum"] < 1
        assert log["hparams"]["decay"] >= 0
    assert values[-1] < 0.01 * values[0]


def test_several_objectives():
    windows, validation = data()
    params, hparams = start()
    objective = {
        "lr": lambda state, h, batches: squares(state.params, batches[0]),
        "momentum": lambda state, h, batches: squares(state.params, batches[0]),
        "decay": lambda state, h, batches: squares(state.params, batches[1]),
    }
    both = (jax.tree.map(lambda leaf: leaf[0], windows[1]), validation)
    realtime = tuner(objective=objective, **EXACT)
    _, log = realtime.update(realtime.init(params, hparams), windows[0], both)
    problem = ft.Problem(ft.Training(penalised, sgd), objective, params, windows[0], both)
    _value, grad, _ = ft.Forward()(problem, hparams)
    assert_trees_close(log["hypergradient"], grad, 1e-5)
    assert set(log["value"]) == set(objective)


@pytest.mark.parametrize("chunk", [1, 2, 5])
@pytest.mark.second_tier
def test_rates_per_layer_and_blocks_of_a_schedule_in_chunks(chunk, x64):
    windows, validation = data(dtype=np.float64)
    params, _ = start(np.float64)
    hparams = {"w": jnp.array([0.01, 0.02, 0.03]), "b": jnp.array(0.05)}

    def optimizer(h):
        block = optax.sgd(lambda t: h["w"][t // 4], 0.5)  # one rate for each window
        return optax.partition({"w": block, "b": optax.sgd(h["b"])}, {"w": "w", "b": "b"})

    dynamics = ft.Training(lambda params, h, batch: squares(params, batch), optimizer)
    realtime = ft.RealTime(dynamics, squared_error, STILL, chunk=chunk, **EXACT)
    state = realtime.init(params, hparams)
    for window in windows:
        state, log = realtime.update(state, window, validation)
    problem = ft.Problem(dynamics, squared_error, params, joined(windows), validation)
    assert_trees_close(log["hypergradient"], ft.Forward()(problem, hparams).grad, 1e-10)
    assert log["z_norm"]["w"].shape == ()


def test_hyperparameters_of_the_initial_state_are_carried(x64):
    windows, validation = data(dtype=np.float64)
    _params, _ = start(np.float64)
    hparams = {"scale": jnp.array(0.3)}

    def init(h):
        return {"w": h["scale"] * jnp.ones(3), "b": jnp.zeros(())}

    dynamics = ft.Training(lambda params, h, batch: squares(params, batch), optax.sgd(0.01))
    realtime = ft.RealTime(dynamics, squared_error, STILL, **EXACT)
    state = realtime.init(init, hparams)
    for window in windows:
        state, log = realtime.update(state, window, validation)
    problem = ft.Problem(dynamics, squared_error, init, joined(windows), validation)
    assert_trees_close(log["hypergradient"], ft.Forward()(problem, hparams).grad, 1e-10)


def test_a_dynamics_that_is_no_training_has_no_loss():
    realtime = ft.RealTime(Decay(), lambda state, h, target: (state - target) ** 2, STILL)
    state = realtime.init(jnp.array(1.0), {"rate": jnp.array(0.5)})
    state, log = realtime.update(state, np.ones(3, np.float32), jnp.array(2.0))
    # s = r^3 + r^2 + r + 1, so ds/dr = 3 r^2 + 2 r + 1
    assert log["loss"] is None
    assert float(state.train) == 1.875
    assert np.isclose(log["hypergradient"]["rate"], 2 * (1.875 - 2) * 2.75)


@pytest.mark.second_tier
def test_batch_statistics_and_keys_are_replayed():
    def loss(params, hparams, batch, model_state, key):
        x, y = batch
        mean = 0.9 * model_state + 0.1 * jnp.mean(x, 0)
        keep = jax.random.bernoulli(key, 0.8, x.shape)
        return squares(params, ((x - mean) * keep, y)), mean

    windows, validation = data()
    params, hparams = start()
    hparams = {"lr": hparams["lr"], "momentum": hparams["momentum"]}
    dynamics = ft.Training(loss, sgd, has_state=True, key=jax.random.key(3))
    realtime = ft.RealTime(dynamics, squared_error, STILL, **EXACT)
    begun = (params, np.zeros(3, np.float32))
    state = realtime.init(begun, hparams)
    for window in windows:
        state, log = realtime.update(state, window, validation)
    problem = ft.Problem(dynamics, squared_error, begun, joined(windows), validation)
    _, grad, train = ft.Forward()(problem, hparams)
    assert_trees_close(log["hypergradient"], grad, 1e-4)
    assert_trees_close(state.train.model_state, train.model_state, 1e-6)


def test_a_discount_forgets_earlier_windows():
    windows, validation = data()
    logs = {}
    for discount in (1.0, 0.5):
        realtime = tuner(**(EXACT | {"discount": discount}))
        state, logs[discount] = realtime.init(*start()), []
        for window in windows:
            state, log = realtime.update(state, window, validation)
            logs[discount].append(log)
    assert_trees_close(logs[0.5][0]["hypergradient"], logs[1.0][0]["hypergradient"], 1e-6)
    assert logs[0.5][2]["z_norm"]["lr"] < logs[1.0][2]["z_norm"]["lr"]


def test_the_paper_setting():
    windows, validation = data()
    params, hparams = start()
    realtime = ft.RealTime.paper(ft.Training(penalised, sgd), squared_error)
    state, log = realtime.update(realtime.init(params, hparams), windows[0], validation)
    signs = jax.tree.map(jnp.sign, log["hypergradient"])
    expected = jax.tree.map(lambda h, s: h - 0.005 * s, hparams, signs)  # Adam's first step
    assert_trees_close(state.hparams, expected, 1e-3)


@pytest.mark.second_tier
def test_hyperparameters_of_two_precisions(x64):
    windows, validation = data()
    params, hparams = start()
    hparams["decay"] = jnp.asarray(0.01, np.float64)
    realtime = tuner(outer=None)
    state = realtime.init(params, hparams)
    for window in windows:
        state, _ = realtime.update(state, window, validation)
    assert state.hparams["decay"].dtype == np.float64
    assert state.hparams["lr"].dtype == np.float32

"""Real-time tuning: exact where it must be, robust where it should be."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft
from foretune._realtime.tuner import _flat_state

from ..problems import assert_trees_close, penalised, squared_error, squares

STILL = optax.sgd(0.0)  # the hyperparameters stay where they are
EXACT = {"discount": 1.0, "rollback": None}


def sgd(h):
    return optax.sgd(h["lr"], h["momentum"])


def adam(h):
    return optax.adam(h["lr"], b1=h["momentum"], eps_root=1e-8)


def data(windows=3, delta=4, n=8, d=3, dtype=np.float32, seed=0):
    """Return windows of minibatches of a linear regression, and a validation batch."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(windows, delta, n, d)).astype(dtype)
    y = (x @ np.arange(1, d + 1) + 0.1 * rng.normal(size=x.shape[:-1])).astype(dtype)
    validation = rng.normal(size=(20, d)).astype(dtype)
    return list(zip(x, y, strict=True)), (validation, (validation @ np.arange(1, d + 1)))


def start(dtype=np.float32, d=3, **hparams):
    given = {"lr": 0.02, "momentum": 0.5, "decay": 0.01} | hparams
    params = {"w": np.full(d, 0.1, dtype), "b": np.zeros((), dtype)}
    return params, {name: jnp.asarray(value, dtype) for name, value in given.items()}


def tuner(optimizer=sgd, outer=STILL, objective=squared_error, **options):
    return ft.RealTime(ft.Training(penalised, optimizer), objective, outer, **options)


def joined(windows):
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *windows)


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("x64_on", [False, True])
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


@pytest.mark.parametrize("kind", ["stacked", "minibatches", "full"])
def test_a_shorter_window_runs_in_the_same_program(kind):
    traces = []

    def loss(params, hparams, batch):
        traces.append(1)
        return penalised(params, hparams, batch)

    x, y = joined(data()[0])
    rng = np.random.default_rng(1)
    indices = rng.integers(0, 8, (12, 5))
    x, y = x[0], y[0]

    def window(a, b):
        if kind == "stacked":
            return (x[indices[a:b]], y[indices[a:b]])
        if kind == "minibatches":
            return ft.Minibatches((x, y), indices[a:b])
        return ft.FullBatch((x, y), steps=b - a)

    _, validation = data()
    params, hparams = start()
    realtime = ft.RealTime(ft.Training(loss, sgd), squared_error, STILL, **EXACT)
    state = realtime.init(params, hparams)
    state, _ = realtime.update(state, window(0, 5), validation)
    realtime.update(realtime.init(params, hparams), window(0, 4), validation)  # its checks
    before = len(traces)
    programs = realtime._program._cache_size()
    for a, b in ((5, 9), (9, 12)):
        state, log = realtime.update(state, window(a, b), validation)
    # A new length is looked at once, abstractly; nothing is compiled for it.
    assert realtime._program._cache_size() <= programs + 1
    assert len(traces) - before <= 12
    whole = window(0, 12)
    problem = ft.Problem(ft.Training(penalised, sgd), squared_error, params, whole, validation)
    _, grad, train = ft.Forward()(problem, hparams)
    assert_trees_close(log["hypergradient"], grad, 1e-5)
    assert_trees_close(state.train.params, train.params, 1e-6)


def test_it_compiles_once(caplog):
    windows, validation = data(windows=6)
    params, hparams = start()
    realtime = tuner(outer=None)
    state = realtime.init(params, hparams)
    state, _ = realtime.update(state, windows[0], validation)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for window in windows[1:-1]:
            state, _ = realtime.update(state, window, validation)
        short = jax.tree.map(lambda leaf: leaf[:2], windows[-1])
        realtime.update(state, short, validation)
    assert not [r for r in caplog.records if "_program" in r.getMessage() and "ompil" in r.message]


def test_memory_does_not_grow_with_the_number_of_steps():
    d, m = 20_000, 3

    def loss(params, hparams, batch):
        penalty = hparams["decay"] * jnp.sum(params["w"] ** 2)
        return jnp.mean((batch @ params["w"]) ** 2) + penalty

    def temporary(steps):
        realtime = ft.RealTime(
            ft.Training(loss, sgd),
            lambda state, h, x: jnp.mean((x @ state.params["w"]) ** 2),
            STILL,
        )
        _, hparams = start()
        state = realtime.init({"w": jnp.ones(d)}, hparams)
        window = ft.FullBatch(jnp.ones((2, d)), steps=steps)
        program = realtime.lower(state, window, jnp.ones((2, d))).compile()
        return program.memory_analysis().temp_size_in_bytes

    state = 2 * d * 4  # weights and momentum
    assert temporary(10) == temporary(10_000)
    assert temporary(10) < state * (m + 6)


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


class Decay:
    """A dynamics that is no training."""

    def init(self, params, hparams):
        return params

    def step(self, state, hparams, batch):
        return state * hparams["rate"] + batch


def test_bfloat16_tangents_need_a_training():
    with pytest.raises(TypeError, match="in_precision"):
        ft.RealTime(Decay(), lambda state, h, batch: state, tangents=jnp.bfloat16)


def test_a_dynamics_that_is_no_training_has_no_loss():
    realtime = ft.RealTime(Decay(), lambda state, h, target: (state - target) ** 2, STILL)
    state = realtime.init(jnp.array(1.0), {"rate": jnp.array(0.5)})
    state, log = realtime.update(state, np.ones(3, np.float32), jnp.array(2.0))
    # s = r^3 + r^2 + r + 1, so ds/dr = 3 r^2 + 2 r + 1
    assert log["loss"] is None
    assert float(state.train) == 1.875
    assert np.isclose(log["hypergradient"]["rate"], 2 * (1.875 - 2) * 2.75)


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


def test_a_diverging_window_is_undone():
    windows, validation = data(windows=40)
    params, hparams = start(lr=50.0)
    constraints = {
        "lr": ft.NonNegative(),
        "momentum": ft.Box(0.0, 0.999),
        "decay": ft.NonNegative(),
    }
    realtime = tuner(outer=None, constraints=constraints)
    state = realtime.init(params, hparams)
    state, log = realtime.update(state, windows[0], validation)
    assert log["undone"]
    assert_trees_close(state.train.params, params, 0)
    assert int(state.train.step) == 0
    assert np.isclose(state.hparams["lr"], 25.0)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(state.Z))
    for window in windows[1:]:
        state, log = realtime.update(state, window, validation)
    assert not log["undone"]
    assert log["value"] < 0.1


def test_without_rollback_divergence_is_an_error_and_the_state_is_kept():
    windows, validation = data()
    params, hparams = start(lr=1e30)
    realtime = tuner(**EXACT)
    with pytest.raises(ft.NonFiniteError, match=r"window 0.*diverges") as caught:
        realtime.update(realtime.init(params, hparams), windows[0], validation)
    assert_trees_close(caught.value.state.train.params, params, 0)


def test_nan_in_a_batch_names_window_minibatch_and_leaf():
    windows, validation = data()
    params, hparams = start()
    windows[1][0][2, 5, 0] = np.nan
    realtime = tuner()
    state, _ = realtime.update(realtime.init(params, hparams), windows[0], validation)
    weights = jax.device_get(state.train.params)
    message = r"window 1, minibatch 2 of 4 .*batch\[0\] \(float32\[8,3\]\) .* 1 of 24 entries"
    with pytest.raises(ft.NonFiniteError, match=message) as caught:
        realtime.update(state, windows[1], validation)
    kept = caught.value.state
    assert_trees_close(kept.train.params, weights, 0)
    state, log = realtime.update(kept, windows[2], validation)  # and it goes on
    assert np.isfinite(log["value"])
    assert int(state.window) == 2


def test_nan_in_the_validation_data_is_named():
    windows, (x, y) = data()
    params, hparams = start()
    x[3] = np.inf
    realtime = tuner()
    with pytest.raises(ft.NonFiniteError, match=r"validation data of window 0.*validation\[0\]"):
        realtime.update(realtime.init(params, hparams), windows[0], (x, y))


def test_a_derivative_that_is_not_finite_is_no_divergence():
    (x, y), validation = data(windows=1)[0][0], data()[1]
    x[..., 1] = 0.0  # a constant pixel: its gradient is exactly 0
    params, hparams = start(decay=0.0)
    params["w"][1] = 0.0
    realtime = tuner(lambda h: optax.adam(h["lr"], b1=h["momentum"]))
    with pytest.raises(ft.NonFiniteError, match="eps_root"):
        realtime.update(realtime.init(params, hparams), (x, y), validation)


def test_discount_reset_cap_and_clip():
    windows, validation = data()
    params, hparams = start()

    def run(outer=STILL, **options):
        realtime = tuner(outer=outer, **(EXACT | options))
        state, logs = realtime.init(params, hparams), []
        for window in windows:
            state, log = realtime.update(state, window, validation)
            logs.append(log)
        return state, logs

    _state, logs = run()
    _, discounted = run(discount=0.5)
    _, again = run(reset=2)
    capped_state, _ = run(z_cap=1e-3)
    assert_trees_close(discounted[0]["hypergradient"], logs[0]["hypergradient"], 1e-6)
    assert discounted[2]["z_norm"]["lr"] < logs[2]["z_norm"]["lr"]
    assert_trees_close(again[1]["hypergradient"], logs[1]["hypergradient"], 1e-6)
    fresh = tuner(**EXACT)
    second = fresh.update(fresh.init(params, hparams), windows[0], validation)[0]
    second, _ = fresh.update(second, windows[1], validation)
    alone = fresh.init(second.train.params, hparams)
    alone = alone._replace(train=jax.tree.map(jnp.copy, second.train))
    assert_trees_close(
        again[2]["hypergradient"],
        fresh.update(alone, windows[2], validation)[1]["hypergradient"],
        1e-4,
    )
    columns = jax.vmap(optax.tree.norm)(capped_state.Z)
    assert np.all(columns <= 1.001e-3)
    moved, _ = run(optax.sgd(1.0), clip=1e-6)
    changes = jax.tree.map(lambda a, b: float(abs(a - b)), moved.hparams, hparams)
    assert 0 < max(changes.values()) < 1e-5


def test_bfloat16_tangents_leave_the_training_as_it_is():
    windows, validation = data(d=16, n=32)
    params, hparams = start(d=16)
    exact, rough = tuner(**EXACT), tuner(tangents=jnp.bfloat16, **EXACT)
    states = [exact.init(params, hparams), rough.init(params, hparams)]
    for window in windows:
        states[0], log = exact.update(states[0], window, validation)
        states[1], low = rough.update(states[1], window, validation)
    assert_trees_close(states[1].train.params, states[0].train.params, 1e-6)
    assert jax.tree.leaves(states[1].Z)[0].dtype == jnp.float32
    a, b = (np.array(jax.tree.leaves(x["hypergradient"])) for x in (log, low))
    assert a @ b > 0.99 * np.linalg.norm(a) * np.linalg.norm(b)
    assert np.any(a != b)


def test_a_state_can_be_used_once_and_the_parameters_stay():
    windows, validation = data()
    params, hparams = jax.tree.map(jnp.asarray, start())
    realtime = tuner()
    state = realtime.init(params, hparams)
    realtime.update(state, windows[0], validation)
    with pytest.raises(ValueError, match="given to `update` before"):
        realtime.update(state, windows[1], validation)
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves((params, hparams)))
    keeping = tuner(donate=False)
    state = keeping.init(params, hparams)
    for _ in range(2):
        keeping.update(state, windows[0], validation)


def test_inside_jit_and_vmap():
    windows, validation = data()
    params, hparams = start()
    realtime = tuner(outer=None)
    outside = realtime.update(realtime.init(params, hparams), windows[0], validation)
    inside = jax.jit(realtime.update)(realtime.init(params, hparams), windows[0], validation)
    assert_trees_close(inside, outside, 1e-5, 1e-7)
    several = jax.tree.map(lambda h: jnp.stack([h, 2 * h]), hparams)

    def first(hparams):
        return realtime.update(realtime.init(params, hparams), windows[0], validation)[1]

    logs = jax.vmap(first)(several)
    first_log = jax.tree.map(lambda leaf: leaf[0], logs)
    assert_trees_close(first_log["hypergradient"], outside[1]["hypergradient"], 1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"discount": 0.0}, r"discount=0\.0"),
        ({"discount": 1.5}, r"\(0, 1\]"),
        ({"rollback": 0.5}, "rollback"),
        ({"z_cap": 0.0}, "z_cap"),
        ({"clip": -1.0}, "clip"),
        ({"reset": 0}, "reset"),
        ({"chunk": 0}, "chunk"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        tuner(**options)


def test_bad_input_is_refused_before_compilation():
    windows, validation = data()
    params, hparams = start()
    realtime = tuner()
    state = realtime.init(params, hparams | {"unused": jnp.array(1.0)})
    with pytest.raises(ValueError, match="does not depend on hparams\\['unused'\\]"):
        realtime.update(state, windows[0], validation)
    with pytest.raises(TypeError, match="hyperparameters are float arrays"):
        realtime.init(params, {"lr": 0.1})
    with pytest.raises(TypeError, match="update takes the state"):
        _flat_state(params)
    with pytest.raises(ValueError, match="leading axes"):
        realtime.update(
            realtime.init(params, hparams), (windows[0][0], windows[0][1][:2]), validation
        )
    with pytest.raises(ValueError, match="constraints\\['rate'\\] names no hyperparameter"):
        tuner(constraints={"rate": ft.NonNegative()}).init(params, hparams)


def test_the_paper_setting():
    windows, validation = data()
    params, hparams = start()
    realtime = ft.RealTime.paper(ft.Training(penalised, sgd), squared_error)
    state, log = realtime.update(realtime.init(params, hparams), windows[0], validation)
    signs = jax.tree.map(jnp.sign, log["hypergradient"])
    expected = jax.tree.map(lambda h, s: h - 0.005 * s, hparams, signs)  # Adam's first step
    assert_trees_close(state.hparams, expected, 1e-3)


def test_divergence_in_the_last_step_is_undone_too():
    windows, validation = data(delta=1, windows=3)
    params, hparams = start(lr=1e25)
    realtime = tuner(outer=None, constraints={"lr": ft.NonNegative()})
    state, log = realtime.update(realtime.init(params, hparams), windows[0], validation)
    assert log["undone"]
    assert np.isclose(state.hparams["lr"], 5e24)
    assert_trees_close(state.train.params, params, 0)


def test_windows_whose_leaves_differ_in_length_are_refused():
    (window, *_), validation = data()
    params, hparams = start()
    realtime = tuner()
    state, _ = realtime.update(realtime.init(params, hparams), window, validation)
    with pytest.raises(ValueError, match="leading axes"):
        realtime.update(state, (window[0][:3], window[1][:2]), validation)


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


class TestRelativeAdam:
    def test_a_vanishing_gradient_does_not_explode(self):
        optimizer = ft.relative_adam(0.1)
        h = jnp.array(0.5)
        step, _ = optimizer.update(jnp.array(1e-24), optimizer.init(h), h, value=jnp.array(1.0))
        assert abs(step) <= 1.0 * (0.5 + 50)

    def test_steps_are_relative_whatever_the_scale(self):
        optimizer = ft.relative_adam(0.1)
        for scale in (1e-6, 1.0, 1e6):
            h = jnp.array(scale)
            state = optimizer.init(h)
            g = jnp.array(3.0 / scale)  # f is a function of h / scale
            step, _ = optimizer.update(g, state, h, value=jnp.array(1.0))
            assert np.isclose(step / scale, -0.1 * (1 + 0.1 / 3))

    def test_it_waits_for_a_gradient_and_then_leaves_0(self):
        optimizer = ft.relative_adam(0.1)
        h = jnp.zeros(2)
        state = optimizer.init(h)
        step, state = optimizer.update(jnp.zeros(2), state, h, value=jnp.array(1.0))
        assert not np.any(step)
        step, _ = optimizer.update(jnp.array([-2.0, 0.0]), state, h, value=jnp.array(1.0))
        assert step[0] > 0
        assert step[1] == 0

    def test_a_box_is_approached_but_not_reached(self):
        box = ft.Box(0.0, 1.0)
        u = jnp.array(0.9)
        reach = box.reach(u, jnp.array(0.5))
        assert np.isclose(reach, 0.1)
        assert box.reach(jnp.array(1.0), jnp.array(0.0)) > 0

    def test_in_minimize(self):
        problem = ft.Problem(
            ft.Training(lambda w, h, x: (w - x) ** 2 + h["decay"] * w**2, optax.sgd(0.2)),
            lambda state, h, x: (state.params - 0.8) ** 2,
            jnp.array(0.0),
            ft.FullBatch(jnp.array(1.0), steps=50),
        )
        result = ft.minimize(
            problem,
            {"decay": jnp.array(0.0)},
            steps=80,
            optimizer=ft.relative_adam(),
            constraints={"decay": ft.NonNegative()},
        )
        assert abs(float(result.best.hparams["decay"]) - 0.25) < 0.03


class TestBias:
    def test_the_first_windows_without_updates_are_unbiased(self):
        windows, validation = data()
        params, hparams = start()
        realtime = tuner(donate=False, **EXACT)
        before = realtime.init(params, hparams)
        state = before
        for window in windows:
            state, log = realtime.update(state, window, validation)
        report = ft.hypergradient_bias(realtime, before, windows, validation, log)
        assert report.cosine > 0.9999
        assert report.by_leaf == {"decay": 1.0, "lr": 1.0, "momentum": 1.0}
        reverse = ft.hypergradient_bias(
            realtime, before, windows, validation, log, engine=ft.Reverse()
        )
        assert_trees_close(reverse.exact, report.exact, 1e-4)

    def test_the_callback_reports_at_chosen_windows(self):
        windows, validation = data(windows=12)
        params, hparams = start()
        bias = ft.Bias(every=4, windows=2)
        result = tuner(outer=optax.adam(0.005)).run(
            zip(*joined(windows), strict=True),
            [validation],
            params=params,
            hparams=hparams,
            window=4,
            callbacks=[bias],
        )
        assert list(bias.reports) == [4, 8, 12]
        assert all(-1 <= report.cosine <= 1 for report in bias.reports.values())
        assert [r["step"] for r in result.history if "bias_cosine" in r] == [4, 8, 12]

    def test_it_is_for_real_time(self):
        problem = ft.Problem(
            ft.Training(lambda w, h, x: (w - x) ** 2, lambda h: optax.sgd(h["lr"])),
            lambda state, h, x: state.params**2,
            jnp.array(1.0),
            ft.FullBatch(jnp.array(0.0), steps=2),
        )
        with pytest.raises(TypeError, match="RealTime"):
            ft.minimize(problem, {"lr": jnp.array(0.1)}, steps=1, callbacks=[ft.Bias()])


class TestTuned:
    def loss(self, params, batch):
        return squares(params, batch)

    def batches(self, count):
        x, y = joined(data(windows=count // 4)[0])
        return list(zip(x, y, strict=True))

    def test_it_is_real_time_tuning_spread_over_calls(self):
        _, validation = data()
        params, _ = start()
        optimizer = ft.tuned(optax.sgd, self.loss, every=4, learning_rate=0.01, momentum=0.5)
        state = optimizer.init(params)
        losses = []
        for batch in self.batches(12):
            state, loss = optimizer.update(state, batch, validation)
            losses.append(float(loss))
        realtime = ft.RealTime(
            ft.Training(lambda p, h, b: squares(p, b), lambda h: optax.sgd(**h)),
            squared_error,
            constraints={"learning_rate": ft.NonNegative(), "momentum": ft.Box(0.0, 0.999)},
        )
        other = realtime.init(
            params, {"learning_rate": jnp.array(0.01), "momentum": jnp.array(0.5)}
        )
        for window in data()[0]:
            other, log = realtime.update(other, window, validation)
        assert_trees_close(state.params, other.train.params, 1e-5)
        assert_trees_close(state.hparams, other.hparams, 1e-5)
        assert_trees_close(state.log["hypergradient"], log["hypergradient"], 1e-4)
        assert np.isclose(np.mean(losses[-4:]), log["loss"])

    def test_parameters_move_at_every_call_and_constants_every_few(self):
        _, validation = data()
        params, _ = start()
        optimizer = ft.tuned(optax.sgd, self.loss, every=3, learning_rate=0.01)
        state = optimizer.init(params)
        rates = []
        for batch in self.batches(8):
            before = state.params["w"]
            state, _ = optimizer.update(state, batch, validation)
            assert np.all(state.params["w"] != before)
            rates.append(float(state.hparams["learning_rate"]))
        assert len(set(rates)) == 3
        assert rates[0] == rates[1] == np.float32(0.01)

    def test_a_diverging_window_ends_early(self):
        _, validation = data()
        params, _ = start()
        optimizer = ft.tuned(optax.sgd, self.loss, every=50, learning_rate=20.0)
        state = optimizer.init(params)
        for batch in self.batches(40):
            state, _ = optimizer.update(state, batch, validation)
        assert float(state.hparams["learning_rate"]) < 1.0
        assert np.all(np.isfinite(state.params["w"]))

    def test_an_equinox_model_with_adamw(self):
        import equinox as eqx

        model = eqx.nn.MLP(3, "scalar", 8, 1, key=jax.random.key(0))

        def loss(model, batch):
            return jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)

        adamw = functools.partial(optax.adamw, eps_root=1e-8)
        optimizer = ft.tuned(adamw, loss, learning_rate=1e-3, b1=0.9, weight_decay=1e-3)
        state = optimizer.init(model)
        _, validation = data()
        first = loss(model, validation)
        for batch in self.batches(60):
            state, _value = optimizer.update(state, batch, validation)
        assert loss(state.params, validation) < first
        assert set(state.hparams) == {"learning_rate", "b1", "weight_decay"}

    def test_a_constant_for_each_layer(self):
        def per_layer(rates):
            groups = {"w": optax.sgd(rates[0]), "b": optax.sgd(rates[1])}
            return optax.partition(groups, {"w": "w", "b": "b"})

        constraints = {"rates": ft.NonNegative()}
        start_at = np.array([0.01, 0.0], np.float32)
        optimizer = ft.tuned(per_layer, self.loss, every=2, constraints=constraints, rates=start_at)
        state = optimizer.init(start()[0])
        for batch in self.batches(8):
            state, _ = optimizer.update(state, batch, data()[1])
        assert state.log["hypergradient"]["rates"].shape == (2,)
        assert np.all(state.hparams["rates"] > start_at)

    def test_what_is_not_finite_is_an_error_and_the_state_goes_on(self):
        _, validation = data()
        params, _ = start()
        optimizer = ft.tuned(optax.sgd, self.loss, every=4, learning_rate=0.01)
        state = optimizer.init(params)
        x, y = self.batches(8)[0]
        with pytest.raises(ft.NonFiniteError, match=r"batch\[0\]") as caught:
            optimizer.update(state, (x * np.nan, y), validation)
        state, loss = optimizer.update(caught.value.state, (x, y), validation)
        assert np.isfinite(loss)
        adam = ft.tuned(optax.adam, self.loss, every=2, learning_rate=0.01)
        state = adam.init(params)
        x[:, 1] = 0.0
        state, _ = adam.update(state, (x, y), validation)
        with pytest.raises(ft.NonFiniteError, match="eps_root"):
            adam.update(state, (x, y), validation)

    def test_inside_jit_with_a_donated_state_it_compiles_once(self):
        _, validation = data()
        params, _ = start()
        optimizer = ft.tuned(optax.sgd, self.loss, every=2, learning_rate=0.01)
        update = jax.jit(optimizer.update, donate_argnums=0)
        state = optimizer.init(params)
        for batch in self.batches(8):
            state, _ = update(state, batch, validation)
        assert update._cache_size() <= 2
        assert np.all(np.isfinite(state.params["w"]))

    def test_bad_input(self):
        with pytest.raises(TypeError, match=r"functools\.partial"):
            ft.tuned(optax.sgd, self.loss, learning_rate=0.1, nesterov=True)
        unused = ft.tuned(lambda lr, foo: optax.sgd(lr), self.loss, lr=0.1, foo=1.0)
        with pytest.raises(ValueError, match="does not depend on hparams\\['foo'\\]"):
            unused.update(unused.init(start()[0]), self.batches(4)[0], data()[1])
        with pytest.raises(ValueError, match="nothing to tune"):
            ft.tuned(optax.sgd, self.loss)
        with pytest.raises(TypeError, match=re.escape("loss(params, batch)")):
            ft.tuned(optax.sgd, lambda params: 0.0, learning_rate=0.1)

"""Real-time tuning: exact where it must be, robust where it should be."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft
from foretune._problem.arguments import Recent

from ..compilations import compilations
from ..problems import assert_trees_close, penalised, squared_error, squares

pytestmark = pytest.mark.promotes("Adam and relative_adam multiply floats by counts")
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
    with compilations("_program") as compiled:
        for a, b in ((5, 9), (9, 12)):
            state, log = realtime.update(state, window(a, b), validation)
    # A new length is looked at once, abstractly; nothing is compiled for it.
    assert not compiled
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


@pytest.mark.second_tier
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


class Decay(ft.Dynamics):
    """A dynamics that is no training."""

    def init(self, params, hparams):
        return params

    def step(self, state, hparams, batch):
        return state * hparams["rate"] + batch


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


def test_a_diverging_window_is_rolled_back():
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
    assert log["rolled_back"]
    assert_trees_close(state.train.params, params, 0)
    assert int(state.train.step) == 0
    assert np.isclose(state.hparams["lr"], 25.0)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(state.Z))
    for window in windows[1:]:
        state, log = realtime.update(state, window, validation)
    assert not log["rolled_back"]
    assert log["value"] < 0.1


def test_the_log_has_the_hypergradient_of_a_window_that_is_rolled_back():
    (window, *_), validation = data(delta=2)
    params, hparams = start(lr=50.0)
    realtime = tuner()
    _, log = realtime.update(realtime.init(params, hparams), window, validation)
    assert log["rolled_back"]
    problem = ft.Problem(ft.Training(penalised, sgd), squared_error, params, window, validation)
    value, grad, _ = ft.Forward()(problem, hparams)
    assert_trees_close(log["value"], value, 1e-5)
    assert_trees_close(log["hypergradient"], grad, 1e-5)


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
    message = r"window 1 .*step 3 of 4.*batches.xs\[0\] \(float32\[4,8,3\]\) in 1 of 96 entries"
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
    with pytest.raises(ft.NonFiniteError, match=r"window 0 .*validation data.*validation\[0\]"):
        realtime.update(realtime.init(params, hparams), windows[0], (x, y))


def test_a_window_that_fails_leaves_the_state_as_it_was_but_for_z():
    windows, (x, y) = data()
    realtime = tuner()
    state, _ = realtime.update(realtime.init(*start()), windows[0], (x, y))
    windows[1][1][-1] = 1e4  # the last minibatch is an outlier, and is skipped
    assert realtime.update(state, windows[1], (x, y))[0].skipped_last
    with pytest.raises(ft.NonFiniteError, match="validation data") as caught:
        realtime.update(state, windows[1], (x + np.nan, y))
    kept = caught.value.state
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(kept.Z))
    assert_trees_close(kept._replace(Z=None), state._replace(Z=None), 0)


def test_only_the_last_shapes_are_remembered():
    recent = Recent(4)
    for i in range(7):
        recent[i] = i
    recent[5] = 0
    assert list(recent) == [3, 4, 5, 6]


def with_a_constant_pixel():
    """Return a window, validation data and a start with a gradient that is exactly 0."""
    (x, y), validation = data(windows=1)[0][0], data()[1]
    x[..., 1] = 0.0
    params, hparams = start(decay=0.0)
    params["w"][1] = 0.0
    return (x, y), validation, params, hparams


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.second_tier
def test_a_derivative_that_is_not_finite_does_not_stop_the_training(traced):
    window, validation, params, hparams = with_a_constant_pixel()
    realtime = tuner(lambda h: optax.adam(h["lr"], b1=h["momentum"]), outer=None)
    plain = ft.Problem(realtime.settings.dynamics, squared_error, params, window, validation)
    value, _ = plain.response(hparams)
    update = jax.jit(realtime.update) if traced else realtime.update
    state = realtime.init(params, hparams)
    with pytest.warns(RuntimeWarning, match=r"window 0 .*train\.\S*\['w'\].*minibatch 0.*eps_root"):
        state, log = jax.block_until_ready(update(state, window, validation))
    assert_trees_close(log["value"], value, 1e-6)  # trained as without tuning
    assert log["dropped"]
    assert state.dropped == 1
    assert state.window == 1
    state, log = update(state, window, validation)  # said once
    jax.effects_barrier()
    assert state.dropped == 2
    assert log["value"] < value
    assert state.hparams["lr"] != hparams["lr"]  # tuned by what is finite
    # A pixel that is always 0 has a weight that does not move: without it, nothing is lost.
    other = tuner(lambda h: optax.adam(h["lr"], b1=h["momentum"]), outer=None)
    less = lambda x: np.delete(x, 1, -1)  # noqa: E731
    fewer = params | {"w": less(params["w"])}
    small = (less(window[0]), window[1]), (less(validation[0]), validation[1])
    state = other.init(fewer, hparams)
    for _ in range(2):
        state, expected = other.update(state, *small)
    assert_trees_close(log["hypergradient"], expected["hypergradient"], 1e-4)


def test_a_hypergradient_that_is_not_finite_leaves_the_hyperparameters():
    (window, *_), validation = data()
    params, hparams = start()

    def error(state, hparams, batch):  # with an infinite derivative at 0
        return squared_error(state, hparams, batch) + jnp.sqrt(0.0 * jnp.sum(state.params["w"]))

    realtime = tuner(outer=None, objective=error)
    with pytest.warns(RuntimeWarning, match="the hypergradient is not finite"):
        state, log = realtime.update(realtime.init(params, hparams), window, validation)
    assert log["dropped"]
    assert not log["rolled_back"]
    assert_trees_close(state.hparams, hparams, 0)
    assert not np.allclose(state.train.params["w"], params["w"])
    assert all(np.all(np.asarray(z) == 0) for z in jax.tree.leaves(state.Z))


def in_entry(array, value):
    return jnp.asarray(array).at[(0,) * jnp.ndim(array)].set(value)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_start_that_is_not_finite_is_refused(value):
    params, hparams = start()
    realtime = tuner(constraints={"lr": ft.NonNegative()})
    with pytest.raises(ft.NonFiniteError, match=r"hparams\['lr'\] \(float32\[\]\) is not finite"):
        realtime.init(params, hparams | {"lr": jnp.array(value)})
    broken = params | {"w": in_entry(params["w"], value)}
    message = r"params\['w'\] \(float32\[3\]\) is not finite in 1 of 3 entries"
    with pytest.raises(ft.NonFiniteError, match=message):
        realtime.init(broken, hparams)
    with pytest.raises(ft.NonFiniteError, match=message):
        realtime.init(lambda h: broken, hparams)
    with pytest.raises(ft.NonFiniteError, match=r"params \(float32\[\]\) is not finite"):
        ft.RealTime(Decay(), lambda state, h, x: state).init(np.float32(np.nan), hparams)


@pytest.mark.second_tier
def test_a_window_that_begins_with_what_is_not_finite_is_an_error():
    windows, validation = data()
    params, hparams = start()
    realtime = tuner(outer=None)
    state, _ = realtime.update(realtime.init(params, hparams), windows[0], validation)
    train = state.train
    weights = train.params | {"w": in_entry(train.params["w"], np.inf)}
    momenta = jax.tree.map(lambda leaf: in_entry(leaf, np.nan), train.opt_state)
    for path, altered in {
        "hparams['lr']": state._replace(hparams=state.hparams | {"lr": jnp.array(np.nan)}),
        "state.train.params['w']": state._replace(train=train._replace(params=weights)),
        "state.train.opt_state[0]": state._replace(train=train._replace(opt_state=momenta)),
    }.items():
        with pytest.raises(ft.NonFiniteError, match=f"window 1 .*begins with. {re.escape(path)}"):
            realtime.update(altered, windows[1], validation)


@pytest.mark.second_tier
def test_an_infinite_accumulator_of_the_optimizer_is_no_fault():
    def optimizer(h):
        plateau = optax.contrib.reduce_on_plateau(accumulation_size=1)  # its best value is inf
        return optax.chain(optax.sgd(h["lr"], h["momentum"]), plateau)

    windows, validation = data()
    params, hparams = start()
    realtime = tuner(optimizer)
    _, log = realtime.update(realtime.init(params, hparams), windows[0], validation)
    assert np.isfinite(log["value"])


def corrupted(count, size, at=9, every=10):
    """Return minibatches of which every tenth has targets that are far off."""
    x, y = joined(data(windows=count // 4)[0])
    y[at::every] += size
    return list(zip(x, y, strict=True))


@pytest.mark.second_tier
@pytest.mark.parametrize(("size", "at"), [(100.0, 9), (1e25, 5), (1e6, 0)])
def test_outliers_are_skipped(size, at):
    _, validation = data()
    params, hparams = start()
    constraints = {
        "lr": ft.NonNegative(),
        "momentum": ft.Box(0.0, 0.999),
        "decay": ft.NonNegative(),
    }
    realtime = tuner(outer=None, constraints=constraints)
    stream = corrupted(1000, np.float32(size), at)
    result = realtime.run(stream, [validation], params=params, hparams=hparams, window=10)
    rates = [record["hparams"]["lr"] for record in result.history]
    assert len(rates) == 100
    assert 0.005 <= min(rates) < max(rates) < 0.5
    assert result.history[-1]["value"] < 0.01 * squares(params, validation)
    assert all(record["skipped"] == 1 for record in result.history[1:])
    # The very first minibatch of all is no outlier: there is nothing yet to compare it with.
    assert not any(record["rolled_back"] for record in result.history[1:])
    assert max(record["loss"] for record in result.history[1:]) < 100


@pytest.mark.second_tier
def test_an_outlier_leaves_training_and_z_as_they_are():
    (x, y), validation = data(windows=1, delta=6)[0][0], data()[1]
    params, hparams = start()
    realtime = tuner(discount=1.0)
    whole, log = realtime.update(realtime.init(params, hparams), (x, y + 0), validation)
    worse = [np.insert(leaf, 3, leaf[0], 0) for leaf in (x, y)]
    worse[1][3] = 1e4
    state, other = realtime.update(realtime.init(params, hparams), tuple(worse), validation)
    assert int(other["skipped"]) == 1
    assert_trees_close(state.train, whole.train, 1e-6)
    assert_trees_close(state.Z, whole.Z, 1e-5)
    assert_trees_close(other["hypergradient"], log["hypergradient"], 1e-5)
    assert_trees_close(other["loss"], log["loss"], 1e-6)


def test_data_that_has_changed_is_no_outlier():
    windows, validation = data(windows=6)
    params, hparams = start()
    realtime = tuner()
    state = realtime.init(params, hparams)
    counts = []
    for k, (x, y) in enumerate(windows):
        state, log = realtime.update(state, (x, y + 100 * (k >= 2)), (validation[0], y[0, 0] + 100))
        counts.append(int(log["skipped"]))
    assert counts == [0, 0, 1, 0, 0, 0]


class Growth(Decay):
    """A dynamics that diverges whatever its hyperparameter is."""

    def step(self, state, hparams, batch):
        return 10 * state + hparams["rate"]


@pytest.mark.parametrize("constraint", [ft.NonNegative(), ft.Log()])
def test_backing_off_stops_short_of_0(constraint):
    error = lambda state, h, x: state**2  # noqa: E731
    realtime = ft.RealTime(Growth(), error, constraints={"rate": constraint})
    state = realtime.init(jnp.array(1.0), {"rate": jnp.array(2e-38)})
    for _ in range(3):
        state, log = realtime.update(state, np.ones(2), None)
        assert log["rolled_back"]
        assert state.hparams["rate"] >= np.finfo(np.float32).tiny


def test_a_state_can_be_used_again_unless_it_is_donated():
    windows, validation = data()
    params, hparams = jax.tree.map(jnp.asarray, start())
    keeping = tuner()
    state = keeping.init(params, hparams)
    first, second = (keeping.update(state, windows[0], validation)[0] for _ in range(2))
    assert_trees_close(second, first, 0)
    donating = tuner(donate=True)
    state = donating.init(params, hparams)
    donating.update(state, windows[0], validation)
    with pytest.raises(ValueError, match=r"reused its memory \(`donate=True`\)"):
        donating.update(state, windows[1], validation)
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves((params, hparams)))


def test_a_run_reuses_the_memory_of_its_states():
    windows, validation = data()
    params, hparams = start()

    class Watcher(ft.Callback):
        seen = ()

        def step(self, run):
            self.seen = (*self.seen, run.state)

    watcher = Watcher()
    stream = list(zip(*joined(windows), strict=True))
    tuner().run(stream, [validation], params=params, hparams=hparams, window=4, callbacks=[watcher])
    *earlier, last = watcher.seen
    assert all(leaf.is_deleted() for state in earlier for leaf in jax.tree.leaves(state.Z))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(last))


@pytest.mark.second_tier
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


@pytest.mark.parametrize("name", ["discount", "rollback"])
@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_options_that_are_no_number_that_fits(name, value):
    with pytest.raises(ValueError, match=rf"RealTime\({name}="):
        tuner(**{name: value})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"discount": 1.5}, ValueError, r"\(0, 1\]"),
        ({"rollback": 1.0}, ValueError, "a factor over 1"),
        ({"chunk": 0}, ValueError, r"RealTime\(chunk=0\).*whole number"),
        ({"discount": 1, "rollback": 2}, None, ""),
    ],
)
def test_options(options, error, message):
    with pytest.raises(error, match=message) if error else contextlib.nullcontext():
        tuner(**options)


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


def test_windows_and_validation_that_are_no_data():
    (window, *_), validation = data()
    params, hparams = start()
    realtime = tuner()
    state = realtime.init(params, hparams)
    batches = ft.Minibatches(jax.tree.map(lambda leaf: leaf[0], window), np.zeros((2, 3), int))
    for empty in ([], (), None, (window[0][:0], window[1][:0]), batches.at(batches.indices[:0])):
        with pytest.raises(ValueError, match="the window is empty"):
            realtime.update(state, empty, validation)
    lists = jax.tree.map(lambda leaf: leaf.tolist(), (window, validation))
    with pytest.raises(TypeError, match=r"window\[0\] is a Python list of 4.*asarray"):
        realtime.update(state, lists[0], validation)
    with pytest.raises(TypeError, match=r"validation\[0\] is a Python list of 20.*asarray"):
        realtime.update(state, window, lists[1])


def test_data_that_no_longer_fits():
    (window, *_), validation = data()
    realtime = tuner()
    state = realtime.init(*start())
    realtime.update(state, window, validation)
    wide = (np.ones((4, 8, 5), np.float32), window[1]), (np.ones((20, 5)), validation[1])
    for update in (realtime.update, jax.jit(realtime.update)):
        with pytest.raises(TypeError, match="dot_general") as caught:
            update(state, wide[0], validation)
        assert "batch[0]: float32[8,5]" in str(caught.value)
        with pytest.raises(TypeError, match="dot_general"):
            update(state, window, wide[1])
    realtime.update(state, window, validation)  # and it continues


@pytest.mark.second_tier
def test_states_of_other_tuners():
    (window, *_), validation = data()
    params, hparams = start()
    realtime = tuner(outer=optax.adam(0.01))
    mine = realtime.init(params, hparams)
    for path, state in {
        "state.opt_state[0].count is absent, it should be int32[]": tuner().init(params, hparams),
        "state.Z.params['b'] is float32[1], it should be float32[3]": mine._replace(
            Z=jax.tree.map(lambda z: z[:1], mine.Z)
        ),
        "state.train.opt_state[0].count is int32[], it should be absent": tuner(
            adam, optax.adam(0.01)
        ).init(params, hparams),
    }.items():
        with pytest.raises(ValueError, match=re.escape(path)):
            realtime.update(state, window, validation)


def test_bad_input_is_refused_before_compilation():
    windows, validation = data()
    params, hparams = start()
    realtime = tuner()
    state = realtime.init(params, hparams | {"unused": jnp.array(1.0)})
    with pytest.raises(ValueError, match="does not depend on hparams\\['unused'\\]"):
        realtime.update(state, windows[0], validation)
    with pytest.raises(TypeError, match="only floating-point hyperparameters"):
        realtime.init(params, {"lr": 1})
    with pytest.raises(ValueError, match="there is no 'momentum'"):
        realtime.init(params, {"lr": 0.1})
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


@pytest.mark.second_tier
def test_divergence_in_the_last_step_is_rolled_back_too():
    windows, validation = data(delta=1, windows=3)
    params, hparams = start(lr=1e25)
    realtime = tuner(outer=None, constraints={"lr": ft.NonNegative()})
    state, log = realtime.update(realtime.init(params, hparams), windows[0], validation)
    assert log["rolled_back"]
    assert np.isclose(state.hparams["lr"], 5e24)
    assert_trees_close(state.train.params, params, 0)


def test_windows_whose_leaves_differ_in_length_are_refused():
    (window, *_), validation = data()
    params, hparams = start()
    realtime = tuner()
    state, _ = realtime.update(realtime.init(params, hparams), window, validation)
    with pytest.raises(ValueError, match="leading axes"):
        realtime.update(state, (window[0][:3], window[1][:2]), validation)


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

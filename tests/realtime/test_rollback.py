"""Windows that diverge, hold what is not finite, or an outlier."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft

from ..problems import assert_trees_close, penalised, squared_error, squares
from .tuners import EXACT, Decay, data, joined, sgd, start, tuner

pytestmark = pytest.mark.promotes("Adam and relative_adam multiply floats by counts")


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


@pytest.mark.second_tier
def test_divergence_in_the_last_step_is_rolled_back_too():
    windows, validation = data(delta=1, windows=3)
    params, hparams = start(lr=1e25)
    realtime = tuner(outer=None, constraints={"lr": ft.NonNegative()})
    state, log = realtime.update(realtime.init(params, hparams), windows[0], validation)
    assert log["rolled_back"]
    assert np.isclose(state.hparams["lr"], 5e24)
    assert_trees_close(state.train.params, params, 0)

"""A run that knows how long it will be: tuned in its first quarter, then decaying."""

import collections
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft
from foretune._realtime.horizon import rates_of

from ..problems import assert_trees_close, penalised, squared_error
from .test_realtime import STILL, data, sgd, start

pytestmark = pytest.mark.promotes("Adam and relative_adam multiply floats by counts")
WINDOWS, DELTA = 8, 4
HORIZON = WINDOWS * DELTA


def tuner(outer=STILL, objective=squared_error, optimizer=sgd, **options):
    return ft.RealTime(
        ft.Training(penalised, optimizer), objective, outer, **{"horizon": HORIZON} | options
    )


def updated(realtime, windows, validation, begin=None):
    """Return the state after all windows, and the logs."""
    state, logs = realtime.init(*(begin or start())), []
    for window in windows:
        state, log = realtime.update(state, window, validation)
        logs.append(log)
    return state, logs


@pytest.mark.second_tier
def test_the_rate_decays_linearly_after_the_first_quarter():
    windows, validation = data(WINDOWS, DELTA)
    state, logs = updated(tuner(), windows, validation)
    params, hparams = start()

    def decaying(h):
        factor = lambda t: jnp.minimum(1.0, (1 - t / HORIZON) / 0.75)  # noqa: E731
        return optax.sgd(lambda t: h["lr"] * factor(t), h["momentum"])

    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *windows)
    problem = ft.Problem(
        ft.Training(penalised, decaying), squared_error, params, joined, validation
    )
    value, train = problem.response(hparams)
    assert min(log["value"] for log in logs) == logs[-1]["value"]  # so that the last is kept
    assert_trees_close(logs[-1]["value"], value, 1e-5)
    assert_trees_close(state.train.params, train.params, 1e-5)
    assert [bool(log["tuned"]) for log in logs] == [True] * 2 + [False] * 6
    assert state.course is not None
    assert state.course.steps == HORIZON


@pytest.mark.second_tier
def test_the_first_quarter_is_as_without_a_horizon():
    windows, validation = data(WINDOWS, DELTA)
    with_one, _ = updated(tuner(ft.relative_adam()), windows[:2], validation)
    without, _ = updated(tuner(ft.relative_adam(), horizon=None), windows[:2], validation)
    assert_trees_close(with_one.hparams, without.hparams, 1e-6)
    assert_trees_close(with_one.train.params, without.train.params, 1e-6)
    after, _ = updated(tuner(ft.relative_adam()), windows, validation)
    assert_trees_close(after.hparams, with_one.hparams, 0)


def test_at_the_horizon_the_state_is_that_with_the_lowest_error():
    windows, _ = data(WINDOWS, DELTA)
    params, hparams = start()
    goal = {"w": np.array([0.6, 1.2, 1.8], np.float32), "b": np.float32(0.0)}  # passed on the way

    def error(state, h, batch):
        away = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), state.params, goal)
        return away["w"] + away["b"] + 0.0 * h["lr"]

    state, logs = updated(tuner(objective=error, rollback=None), windows, (), (params, hparams))
    values = [float(log["value"]) for log in logs[2:]]
    assert min(values) < values[-1]
    assert float(error(state.train, hparams, ())) == pytest.approx(min(values))
    assert state.course is not None
    assert state.course.lowest == pytest.approx(min(values))


def test_a_rate_that_falls_to_a_third_starts_again():
    windows, validation = data(16, 2)

    def halve(updates, state, params=None, **_):
        return jax.tree.map(lambda h: -h / 2, params), state

    outer: Any = optax.GradientTransformationExtraArgs(lambda params: (), halve)  # pyright: ignore
    realtime = tuner(outer)
    params, hparams = start()
    state = realtime.init(params, hparams)
    restarted = []
    for window in windows[:6]:
        state, log = realtime.update(state, window, validation)
        restarted.append(bool(log["restarted"]))
        if restarted[-1]:
            assert_trees_close(state.train.params, params, 0)
            assert all(np.all(np.asarray(z) == 0) for z in jax.tree.leaves(state.Z))
            assert state.course is not None
            assert_trees_close(state.course.peak, state.hparams, 0)
    # lr: 1, 1/2, then 1/4 is less than a third; from there again; the tuning ends after four windows
    assert restarted == [False, True, False, True, False, False]


@pytest.mark.second_tier
def test_a_run_ends_at_its_horizon_and_resumes(tmp_path):
    windows, validation = data(WINDOWS, DELTA)
    stream = [tuple(leaf[i] for leaf in window) for window in windows for i in range(DELTA)]
    params, hparams = start()
    given = {"params": params, "hparams": hparams, "window": DELTA}

    def run(most=None, **options):
        realtime = tuner(ft.relative_adam())
        batches = itertools.cycle(stream) if most is None else stream[:most]
        return realtime.run(batches, [validation], **given, **options)

    whole = run()
    assert whole.stopped == f"the horizon of {HORIZON} minibatches is reached"
    assert len(whole.history) == WINDOWS
    assert [record["tuned"] for record in whole.history] == [True] * 2 + [False] * 6
    for part in (1, 5):  # in either half
        folder = tmp_path / str(part)
        run(steps=part, callbacks=[ft.Checkpoint(folder)])
        again = run(callbacks=[ft.Checkpoint(folder)])
        assert_trees_close(again.state, whole.state, 0)


def test_rates_are_found_by_name():
    params, hparams = start()
    other = {"speed": hparams["lr"], "momentum": hparams["momentum"], "decay": hparams["decay"]}

    def make(**options):
        return ft.RealTime(
            ft.Training(penalised, lambda h: optax.sgd(h["speed"], h["momentum"])),
            squared_error,
            STILL,
            **options,
        )

    with pytest.raises(ValueError, match=r"hparams\['speed'\].*is called learning_rate.*rates="):
        make(horizon=HORIZON).init(params, other)
    state = make(horizon=HORIZON, rates=("speed",)).init(params, other)
    assert state.course is not None
    Pair = collections.namedtuple("Pair", ["lr", "rate"])
    assert rates_of(Pair(jnp.array(1.0), jnp.array(0.5)), None) == ("hparams.lr",)
    assert rates_of({"lr": [jnp.array(1.0)]}, None) == ("hparams['lr'][0]",)
    assert rates_of(jnp.array(1.0), ("hparams",)) == ("hparams",)
    with pytest.raises(ValueError, match="give both"):
        make(rates=("speed",))
    with pytest.raises(TypeError, match="names of learning rates"):
        make(rates="speed", horizon=HORIZON)
    for wrong in (0, -1, 2.5, "long", True):
        with pytest.raises((TypeError, ValueError), match="horizon"):
            make(horizon=wrong)

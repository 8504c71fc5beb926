"""Programs, states and arguments of an update."""

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
from ..problems import assert_trees_close, penalised, squared_error
from .tuners import EXACT, STILL, adam, data, joined, sgd, start, tuner

pytestmark = pytest.mark.promotes("Adam and relative_adam multiply floats by counts")


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


def test_only_the_last_shapes_are_remembered():
    recent = Recent(4)
    for i in range(7):
        recent[i] = i
    recent[5] = 0
    assert list(recent) == [3, 4, 5, 6]


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
    with pytest.raises(TypeError, match=r"window\[0\] is a Python list of 4"):
        realtime.update(state, lists[0], validation)
    with pytest.raises(TypeError, match=r"validation\[0\] is a Python list of 20"):
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
    with pytest.raises(TypeError, match="only floats have a gradient"):
        realtime.init(params, {"lr": 1})
    with pytest.raises(ValueError, match="there is no 'momentum'"):
        realtime.init(params, {"lr": 0.1})
    with pytest.raises(ValueError, match="leading axes"):
        realtime.update(
            realtime.init(params, hparams), (windows[0][0], windows[0][1][:2]), validation
        )
    with pytest.raises(ValueError, match="constraints\\['rate'\\] names no hyperparameter"):
        tuner(constraints={"rate": ft.NonNegative()}).init(params, hparams)


def test_windows_whose_leaves_differ_in_length_are_refused():
    (window, *_), validation = data()
    params, hparams = start()
    realtime = tuner()
    state, _ = realtime.update(realtime.init(params, hparams), window, validation)
    with pytest.raises(ValueError, match="leading axes"):
        realtime.update(state, (window[0][:3], window[1][:2]), validation)

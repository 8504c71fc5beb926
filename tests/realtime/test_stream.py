"""Streams of minibatches, cut into windows and tuned over."""

import itertools
import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft
from foretune._realtime.program import UpdateProgram

from ..problems import assert_trees_close, penalised, squared_error, squares

CONSTRAINTS = {"lr": ft.NonNegative(), "decay": ft.NonNegative()}


def batches(count, n=8, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        x = rng.normal(size=(n, 3)).astype(np.float32)
        yield x, x @ np.arange(1, 4, dtype=np.float32)


VALIDATION = next(batches(1, 20, seed=1))


def params():
    return {"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}


def hparams(lr=1e-3):
    return {"lr": jnp.array(lr), "decay": jnp.array(0.01)}


DYNAMICS = ft.Training(penalised, lambda h: optax.sgd(h["lr"], 0.5))


def tuner(**options):
    return ft.RealTime(DYNAMICS, squared_error, constraints=CONSTRAINTS, **options)


def run(train, validation=None, *, using=None, **options):
    options = {"params": params(), "hparams": hparams(), "window": 4} | options
    validation = itertools.repeat(VALIDATION) if validation is None else validation
    return (using or tuner()).run(train, validation, **options)


class TestWindows:
    def test_the_last_is_shorter(self):
        shapes = [x.shape for x, _ in ft.windows(batches(10), 4)]
        assert shapes == [(4, 8, 3), (4, 8, 3), (2, 8, 3)]

    def test_an_infinite_stream(self):
        stream = ft.windows(itertools.cycle(batches(3)), 5)
        assert [next(stream)[0].shape[0] for _ in range(4)] == [5] * 4

    def test_minibatches(self):
        whole = ft.Minibatches(jnp.arange(6.0), np.arange(10).reshape(5, 2) % 6)
        parts = list(ft.windows(whole, 2))
        assert [part.steps for part in parts] == [2, 2, 1]
        assert parts[0].data is whole.data

    def test_what_numpy_can_read(self):
        class Tensor:  # like PyTorch's
            def __array__(self, dtype=None, copy=None):
                return np.ones((2, 3), np.float32)

        (window,) = ft.windows([{"x": Tensor(), "y": 1.0}] * 3, 3)
        assert window["x"].shape == (3, 2, 3)
        assert window["y"].shape == (3,)

    def test_random_keys(self):
        keys = list(jax.random.split(jax.random.key(0), 3))
        (window,) = ft.windows(keys, 3)
        assert window.shape == (3,)

    def test_a_shape_that_changes(self):
        stream = [*batches(5), *batches(1, n=7)]
        message = r"minibatch 5 .* batch\[0\] is float32\[7,3\], it was float32\[8,3\].*drop_last"
        with pytest.raises(ValueError, match=message):
            list(ft.windows(stream, 4))

    def test_a_leaf_that_goes(self):
        with pytest.raises(ValueError, match=r"batch\['y'\] is absent, it was"):
            list(ft.windows([{"x": np.ones(2), "y": np.ones(2)}, {"x": np.ones(2)}], 4))

    def test_a_loader_may_reuse_its_buffers(self):
        def reusing():
            buffer = np.zeros(2)
            for _ in range(4):
                buffer += 1
                yield buffer

        first, second = ft.windows(reusing(), 2)
        assert first.tolist() == [[1, 1], [2, 2]]
        assert second.tolist() == [[3, 3], [4, 4]]

    @pytest.mark.parametrize(
        "one", [VALIDATION, {"x": VALIDATION[0]}, VALIDATION[0], list(VALIDATION)]
    )
    def test_one_batch_is_no_stream(self, one):
        with pytest.raises(TypeError, match=r"looks like one batch(.|\n)*itertools.repeat"):
            ft.windows(one, 2)

    def test_lists_of_numbers_are_no_data(self):
        lists = [(x.tolist(), y) for x, y in batches(4)]
        with pytest.raises(TypeError, match=r"batch\[0\] is a Python list of 8"):
            next(ft.windows(lists, 2))
        with pytest.raises(TypeError, match=r"validation\[0\] is a Python list of 20"):
            run(batches(4), [(VALIDATION[0].tolist(), VALIDATION[1])])

    def test_a_count(self):
        with pytest.raises(ValueError, match="n=0"):
            ft.windows([], 0)


class TestRun:
    @pytest.mark.second_tier
    def test_it_is_update_over_windows(self):
        result = run(batches(18))
        other = tuner()
        state = other.init(params(), hparams())
        logs = []
        for window in ft.windows(batches(18), 4):
            state, log = other.update(state, window, VALIDATION)
            logs.append(jax.device_get(log))
        assert result.stopped == "the training stream ended"
        assert_trees_close(result.hparams, state.hparams, 0)
        assert_trees_close(result.state.train.params, state.train.params, 0)
        assert [r["step"] for r in result.history] == [1, 2, 3, 4, 5]
        for record, log in zip(result.history, logs, strict=True):
            assert record["value"] == float(log["value"])
            assert record["hparams"]["lr"] == float(log["hparams"]["lr"])
            assert record["loss"] == float(log["loss"])
        json.dumps(result.history)

    def test_a_number_of_windows_of_an_endless_stream(self):
        read = []

        def endless():
            for i, batch in enumerate(itertools.cycle(batches(7))):
                read.append(i)
                yield batch

        result = run(endless(), steps=6)
        assert result.stopped == "6 steps done"
        assert len(result.history) == 6
        assert len(read) == 24  # no more than it needs

    def test_minibatches(self):
        x, y = map(np.concatenate, zip(*batches(10), strict=True))
        stream = ft.Minibatches.shuffled((x, y), batch_size=8, steps=50, key=jax.random.key(0))
        result = run(stream, window=20)
        assert len(result.history) == 3

    def test_an_empty_stream(self):
        with pytest.raises(ValueError, match="training stream is empty"):
            run([])
        with pytest.raises(ValueError, match="validation stream is empty"):
            run(batches(4), [])

    def test_a_validation_list_is_gone_through_again(self):
        validation = list(batches(2, 20, seed=5))
        result = run(batches(20), validation)
        assert len(result.history) == 5

    def test_a_validation_generator_ends_the_run(self):
        result = run(batches(40), batches(3, 20, seed=5))
        assert result.stopped == "the validation stream ended"
        assert len(result.history) == 3
        assert int(result.state.window) == 3

    def test_one_batch_as_validation_stream(self):
        with pytest.raises(TypeError, match=r"validation stream.*looks like one batch"):
            run(batches(4), VALIDATION)

    def test_metrics_best_and_stopping_rules(self):
        result = run(
            batches(200),
            evaluate=lambda state, h: {"norm": jnp.linalg.norm(state.params["w"])},
            score=lambda record: -record["norm"],
            stop=[ft.NoImprovement(10), lambda run: "enough" if run.step == 9 else None],
        )
        assert result.stopped == "enough"
        norms = [record["norm"] for record in result.history]
        assert result.best.step == 1 + np.argmax(norms)

    def test_progress_and_history_without_an_end(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        run(batches(10), callbacks=[ft.Progress(), ft.History(path), ft.TensorBoard(tmp_path)])
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3]
        assert set(lines[0]["z_norm"]) == {"lr", "decay"}

    @pytest.mark.second_tier
    def test_nan_in_the_stream_loses_nothing(self, tmp_path):
        stream = list(batches(40))
        stream[22][1][3] = np.nan
        checkpoint = ft.Checkpoint(tmp_path, every=3)
        with pytest.raises(
            ft.NonFiniteError, match=r"window 5 .*step 3 of 4.*batches.xs\[1\]"
        ) as e:
            run(stream, callbacks=[checkpoint])
        assert e.value.run.step == 5
        assert len(e.value.run.history) == 5
        weights = e.value.state.train.params
        assert np.all(np.isfinite(weights["w"]))
        mended = list(batches(40))
        result = run(mended, callbacks=[ft.Checkpoint(tmp_path, every=3)])
        assert len(result.history) == 10
        assert result.history[:5] == e.value.run.history

    @pytest.mark.parametrize("every", [1, 10])
    def test_a_stream_that_fails_loses_nothing(self, tmp_path, every):
        def failing():
            yield from batches(13)
            raise OSError("disk gone")

        whole = run(batches(20))
        with pytest.raises(OSError, match="disk gone"):
            run(failing(), callbacks=[ft.Checkpoint(tmp_path, every=every)])
        result = run(batches(20), callbacks=[ft.Checkpoint(tmp_path, every=every)])
        assert result.history == whole.history
        assert_trees_close(result.state.train, whole.state.train, 0)

    @pytest.mark.second_tier
    def test_models_with_functions_and_random_keys_resume(self, tmp_path):
        import equinox as eqx

        def loss(model, h, batch, key):
            noise = jax.random.normal(key["key"], batch[1].shape)
            again = {"key": jax.random.split(key["key"])[0]}
            return jnp.mean((jax.vmap(model)(batch[0]) - batch[1] - 0.01 * noise) ** 2), again

        using = ft.RealTime(
            ft.Training(loss, lambda h: optax.sgd(h["lr"]), has_state=True),
            lambda state, h, batch: jnp.mean((jax.vmap(state.params)(batch[0]) - batch[1]) ** 2),
            constraints={"lr": ft.NonNegative()},
        )
        model = eqx.nn.MLP(3, "scalar", 4, 1, key=jax.random.key(0))
        options = {
            "using": using,
            "params": (model, {"key": jax.random.key(1)}),
            "hparams": {"lr": jnp.array(1e-3)},
        }
        whole = run(batches(24), **options)
        run(batches(24), steps=2, callbacks=[ft.Checkpoint(tmp_path)], **options)
        resumed = run(batches(24), callbacks=[ft.Checkpoint(tmp_path)], **options)
        assert resumed.history == whole.history

    def test_best_is_what_the_window_ran_with(self):
        result = run(batches(40))
        record = result.history[int(result.best.step) - 1]
        assert record["hparams"]["lr"] == float(result.best.hparams["lr"])
        assert record["value"] == float(result.best.score)

    @pytest.mark.second_tier
    def test_a_diverging_start_without_validation_data(self):
        using = ft.RealTime(
            DYNAMICS,
            lambda state, h, batch: squares(state.params, VALIDATION),
            constraints=CONSTRAINTS,
        )
        result = run(batches(40), itertools.repeat(None), using=using, hparams=hparams(1e2))
        assert result.history[0]["rolled_back"]
        assert np.isfinite(result.history[-1]["value"])

    def test_windows_that_are_all_rolled_back_warn_once(self):
        with pytest.warns(RuntimeWarning, match="the last 10 windows were rolled back") as caught:
            result = run(batches(240), hparams=hparams(1e12))
        assert sum("were rolled back" in str(warning.message) for warning in caught) == 1
        assert not result.history[-1]["rolled_back"]  # and it recovers
        assert result.history[-1]["value"] < 1

    @pytest.mark.parametrize("killed_after", [1, pytest.param(5, marks=pytest.mark.second_tier)])
    def test_a_resumed_run_is_the_same_to_the_bit(self, tmp_path, killed_after):
        whole = run(batches(32))
        run(batches(32), steps=killed_after, callbacks=[ft.Checkpoint(tmp_path)])
        resumed = run(batches(32), callbacks=[ft.Checkpoint(tmp_path)])
        assert resumed.history == whole.history
        assert_trees_close(resumed.state.train, whole.state.train, 0)
        assert_trees_close(resumed.state.Z, whole.state.Z, 0)
        assert_trees_close(resumed.hparams, whole.hparams, 0)

    def test_the_value_of_a_finished_run_is_an_array_again(self, tmp_path):
        done = run(batches(8), callbacks=[ft.Checkpoint(tmp_path)])
        again = run(batches(8), callbacks=[ft.Checkpoint(tmp_path)])
        assert again.history == done.history
        assert isinstance(again.value, jax.Array)
        assert (again.value, again.value.dtype) == (done.value, done.value.dtype)

    def test_another_run_in_the_folder_is_refused(self, tmp_path):
        run(batches(8), callbacks=[ft.Checkpoint(tmp_path)])
        with pytest.raises(ValueError, match="another run"):
            run(batches(8), callbacks=[ft.Checkpoint(tmp_path)], window=2)
        with pytest.raises(ValueError, match="another run"):
            run(batches(8), callbacks=[ft.Checkpoint(tmp_path)], hparams=hparams(0.5))

    def test_ctrl_c_ends_after_the_window(self):
        class Interrupter(ft.Callback):
            def step(self, run):
                if run.step == 3:
                    os.kill(os.getpid(), signal.SIGINT)

        result = run(batches(100), callbacks=[Interrupter()])
        assert result.stopped == "interrupted"
        assert len(result.history) in (3, 4)

    def test_the_next_window_is_read_while_this_one_runs(self):
        events = []

        class Spy(UpdateProgram):
            def __call__(self, state, window, validation, donate):
                events.append("dispatch")
                return super().__call__(state, window, validation, donate)

        def stream():
            for batch in batches(12):
                events.append("read")
                yield batch

        class Done(ft.Callback):
            def step(self, run):
                events.append("done")

        using = ft.RealTime(DYNAMICS, squared_error, constraints=CONSTRAINTS)
        using._program = Spy(using.settings)
        run(stream(), using=using, callbacks=[Done()])
        order = [key for key, _ in itertools.groupby(events)]
        assert order[:5] == ["read", "dispatch", "read", "done", "dispatch"]

    def test_it_tunes(self):
        result = run(batches(400), hparams=hparams(1e-5))
        assert result.history[-1]["value"] < 0.05
        assert squares(result.state.train.params, VALIDATION) < 0.05

    def test_bad_arguments(self):
        with pytest.raises(ValueError, match="steps=0"):
            run(batches(4), steps=0)

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"steps": True}, ValueError, r"run\(steps=True\)"),
            ({"window": 0}, ValueError, r"run\(window=0\)"),
            ({"evaluate": lambda state: {}}, TypeError, r"`evaluate\(state, hparams\)` is how"),
            ({"score": lambda: 0.0}, TypeError, r"`score\(record\)` is how"),
            ({"stop": ft.NoImprovement}, TypeError, "got the class NoImprovement"),
        ],
    )
    def test_what_is_refused_before_anything_runs(self, options, error, message):
        class Untouched(ft.RealTime):
            def init(self, *_):
                raise AssertionError("begun")

        untouched = Untouched(DYNAMICS, squared_error, constraints=CONSTRAINTS)
        with pytest.raises(error, match=message):
            run(batches(4), using=untouched, **options)

    def test_rules_may_come_from_a_generator(self):
        rules = (rule for rule in [ft.NoImprovement(50), lambda run: run.step == 3 and "enough"])
        assert run(batches(40), stop=rules).stopped == "enough"

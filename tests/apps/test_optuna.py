"""Optuna around gradient-tuned hyperparameters: warm starts, pruning, what is kept, several workers."""

import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft
from foretune._outer.run import Run

optuna = pytest.importorskip("optuna")
fo = pytest.importorskip("foretune.optuna")

optuna.logging.set_verbosity(optuna.logging.ERROR)

DYNAMICS = ft.Training(
    lambda w, h, x: jnp.mean((w - x) ** 2) + jnp.sum(w**2) * h["decay"],
    lambda h: optax.sgd(h["lr"]),
)
TUNER = ft.RealTime(
    DYNAMICS,
    lambda state, h, x: jnp.mean((state.params - x) ** 2),
    constraints={"lr": ft.NonNegative(), "decay": ft.NonNegative()},
)
START = {"lr": jnp.array(0.01), "decay": jnp.array(0.1)}


def real_time(params=0.0, hparams=START, windows=4, callbacks=(), stream=None, **options):
    stream = np.ones((2 * windows, 3), np.float32) if stream is None else stream
    return TUNER.run(
        list(stream),
        [np.ones(3, np.float32)],
        params=jnp.array(params),
        hparams=hparams,
        window=2,
        callbacks=callbacks,
        **options,
    )


def offline(params=0.0, hparams=START, steps=4, callbacks=()):
    problem = ft.Problem(
        DYNAMICS,
        lambda state, h, x: (state.params - 1.0) ** 2,
        jnp.array(params),
        ft.FullBatch(jnp.ones(3), steps=3),
    )
    return ft.minimize(
        problem,
        hparams,
        steps=steps,
        optimizer=optax.adam(0.05),
        constraints={"lr": ft.Box(0.0, 0.5), "decay": ft.NonNegative()},
        callbacks=callbacks,
    )


def told(study, hparams, value):
    trial = study.ask()
    study.tell(trial, fo.keep(trial, hparams, value=value))
    return trial


class TestWarmStart:
    def test_the_default_where_nothing_is_finished(self):
        study = optuna.create_study()
        study.ask()
        assert fo.warm_start(study.ask(), START) == START
        assert fo.warm_start(study, START) == START
        assert fo.warm_start(optuna.trial.FixedTrial({}), START) == START

    @pytest.mark.parametrize(("direction", "lr"), [("minimize", 0.3), ("maximize", 0.2)])
    def test_takes_the_best_trial_and_says_which(self, direction, lr):
        study = optuna.create_study(direction=direction)
        for value, rate in [(3.0, 0.1), (9.0, 0.2), (1.0, 0.3)]:
            told(study, {"lr": jnp.array(rate)}, value)
        study.tell(study.ask(), -99.0 if direction == "minimize" else 99.0)  # which kept nothing
        trial = study.ask()
        start = fo.warm_start(trial, {"lr": jnp.array(0.01)})
        assert start["lr"] == jnp.float32(lr)
        assert trial.user_attrs["foretune:warm_start"] == {0.2: 1, 0.3: 2}[lr]

    def test_other_shapes_and_new_leaves_come_from_the_default(self):
        study = optuna.create_study()
        told(study, {"lr": jnp.array([0.1, 0.2]), "decay": jnp.array(0.5)}, 1.0)
        default = {"lr": jnp.ones(3), "decay": jnp.array(0.0), "momentum": jnp.array(0.9)}
        start = fo.warm_start(study, default)
        assert jax.tree.structure(start) == jax.tree.structure(default)
        assert start["lr"].tolist() == [1.0, 1.0, 1.0]
        assert start["decay"] == 0.5
        assert start["momentum"] == jnp.float32(0.9)

    def test_types_and_bits_are_kept(self):
        study = optuna.create_study()
        kept = {"a": jnp.float32(0.1), "b": jnp.bfloat16(0.3)}
        told(study, kept, 1.0)
        start = fo.warm_start(study, jax.tree.map(jnp.zeros_like, kept))
        assert start == kept
        assert start["b"].dtype == jnp.bfloat16

    @pytest.mark.parametrize("direction", ["minimize", "maximize"])
    def test_what_is_not_finite_is_never_the_best(self, direction):
        study = optuna.create_study(direction=direction)
        best = 1.0 if direction == "minimize" else 9.0
        told(study, {"lr": jnp.array(0.3)}, 5.0)  # the best of what is finite
        told(study, {"lr": jnp.array(0.4)}, np.inf if direction == "maximize" else -np.inf)
        told(study, {"lr": jnp.array(0.4), "other": jnp.array([1.0, np.nan])}, best)
        for rate in (np.inf, 1e39):  # the second of a study in double precision
            attributes = {"foretune:hparams": {"['lr']": rate}}
            study.add_trial(optuna.trial.create_trial(value=best, user_attrs=attributes))
        trial = study.ask()
        assert fo.warm_start(trial, {"lr": jnp.array(0.01)})["lr"] == jnp.float32(0.3)
        assert trial.user_attrs["foretune:warm_start"] == 0

    def test_the_default_where_nothing_is_finite(self):
        study = optuna.create_study()
        told(study, {"lr": jnp.array(np.nan)}, 1.0)
        trial = study.ask()
        assert fo.warm_start(trial, START) == START
        assert "foretune:warm_start" not in trial.user_attrs

    def test_refuses_what_is_no_hparams_and_no_single_objective(self):
        with pytest.raises(TypeError, match=r"hparams\['depth'\].*only floats"):
            fo.warm_start(optuna.create_study(), {"depth": jnp.array(3)})
        with pytest.raises(ValueError, match="2 objectives"):
            fo.warm_start(optuna.create_study(directions=["minimize", "minimize"]), START)


class TestKeep:
    def test_minimize_keeps_the_best_hyperparameters_and_its_score(self):
        study = optuna.create_study()
        trial = study.ask()
        result = offline()
        assert fo.keep(trial, result) == float(result.best.score)
        kept = trial.user_attrs["foretune:hparams"]
        assert kept == {f"['{n}']": float(v) for n, v in result.best.hparams.items()}

    def test_real_time_keeps_the_mean_up_to_the_best_window_and_the_last_error(self):
        trial = optuna.create_study().ask()
        result = real_time(windows=6)
        history = [{**r, "rolled_back": i == 1} for i, r in enumerate(result.history)]
        best = result.best._replace(step=jnp.array(4))
        result = result._replace(history=history, best=best)
        assert fo.keep(trial, result) == history[-1]["value"]
        rates = [history[i]["hparams"]["lr"] for i in (0, 2, 3)]
        kept = trial.user_attrs["foretune:hparams"]["['lr']"]
        assert kept == pytest.approx(np.mean(rates), rel=1e-6)

    def test_any_structure_of_hyperparameters(self):
        class Rates(NamedTuple):
            layers: jax.Array
            rest: tuple

        tuner = ft.RealTime(
            ft.Training(
                lambda w, h, x: jnp.mean((w - x) ** 2), lambda h: optax.sgd(h.layers[0] + h.rest[0])
            ),
            lambda state, h, x: jnp.mean((state.params - x) ** 2) + h.layers[1] ** 2,
        )
        start = Rates(jnp.array([0.1, 0.2]), (jnp.array(0.1),))
        windows = [np.ones(3, np.float32)] * 4
        result = tuner.run(windows, windows, params=jnp.array(0.0), hparams=start, window=2)
        study = optuna.create_study()
        trial = study.ask()
        study.tell(trial, fo.keep(trial, result))
        again = fo.warm_start(study, start)
        assert isinstance(again, Rates)
        assert again.layers.shape == (2,)
        assert again.layers[0] != start.layers[0]

    def test_own_loops_and_own_values(self):
        trial = optuna.create_study(direction="maximize").ask()
        assert fo.keep(trial, START, value=jnp.array(0.5)) == 0.5
        assert fo.keep(trial, offline(steps=1), value=0.25) == 0.25

    def test_clear_errors(self):
        trial = optuna.create_study().ask()
        with pytest.raises(ValueError, match="needs `value=`"):
            fo.keep(trial, START)
        with pytest.raises(ValueError, match="not one number"):
            fo.keep(trial, START, value=jnp.ones(2))
        result = offline(steps=1)
        both = result._replace(best=result.best._replace(score={"lr": 1.0, "decay": 2.0}))
        with pytest.raises(ValueError, match="several errors"):
            fo.keep(trial, both)
        with pytest.raises(ValueError, match=r"study maximizes.*give `value=`"):
            fo.keep(optuna.create_study(direction="maximize").ask(), result)


class TestPruning:
    @pytest.mark.parametrize(("run", "steps"), [(real_time, [2, 4]), (offline, [0, 2, 4])])
    def test_reports_the_curve(self, run, steps):
        study = optuna.create_study()
        result = run(callbacks=[fo.Pruning(study.ask(), every=2)])
        values = {r["step"]: r["value"] for r in result.history if r["step"] in steps}
        assert study.trials[0].intermediate_values == values

    @pytest.mark.parametrize("run", [real_time, offline])
    def test_a_trial_that_falls_behind_is_pruned_and_its_callbacks_end(self, run, tmp_path):
        ended = []

        class End(ft.Callback):
            def end(self, run):
                ended.append(run.step)

        def objective(trial):
            far = trial.suggest_categorical("start", [0.0, 100.0])
            result = run(params=far, callbacks=[fo.Pruning(trial), End()])
            return fo.keep(trial, result)

        study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=1))
        for start in (0.0, 100.0, 0.0):
            study.enqueue_trial({"start": start})
        study.optimize(objective, n_trials=3)
        assert [t.state.name for t in study.trials] == ["COMPLETE", "PRUNED", "COMPLETE"]
        assert ended[1] < ended[0] == ended[2]
        assert study.trials[1].value == study.trials[1].intermediate_values[ended[1]]

    def test_a_metric_of_evaluate(self):
        study = optuna.create_study(direction="maximize")
        real_time(
            callbacks=[fo.Pruning(study.ask(), metric="near")],
            evaluate=lambda state, h: {"near": -jnp.abs(state.params - 1.0)},
        )
        assert sorted(study.trials[0].intermediate_values) == [1, 2, 3, 4]

    def test_windows_that_were_rolled_back_count_with_the_value_before_them(self):
        study = optuna.create_study()
        pruning = fo.Pruning(study.ask())
        first, second = real_time(windows=2).history
        run = Run(2, None, None, dict)
        run.put(step=2)
        run.history = history = [first, second | {"rolled_back": True, "value": np.nan}]
        pruning.step(run)
        assert study.trials[0].intermediate_values == {2: history[0]["value"]}

    def test_clear_errors(self):
        study = optuna.create_study(direction="maximize")
        with pytest.raises(ValueError, match=r"every=0.*whole number"):
            fo.Pruning(study.ask(), every=0)
        with pytest.raises(ValueError, match="study maximizes"):
            real_time(callbacks=[fo.Pruning(study.ask())])
        with pytest.warns(UserWarning, match=r"metric='acuracy'.*records have"):
            real_time(callbacks=[fo.Pruning(study.ask(), metric="acuracy")])


def test_a_trial_that_is_not_finite_is_pruned_with_its_reason():
    def objective(trial):
        stream = np.ones((8, 3), np.float32)
        stream[3:, 0] = trial.suggest_categorical("x", [1.0, np.inf])
        with fo.prune_nonfinite(trial):
            return fo.keep(trial, real_time(stream=stream, callbacks=[fo.Pruning(trial)]))

    study = optuna.create_study()
    for x in (np.inf, 1.0):
        study.enqueue_trial({"x": x})
    study.optimize(objective, n_trials=2)
    assert [t.state.name for t in study.trials] == ["PRUNED", "COMPLETE"]
    assert "window" in study.trials[0].user_attrs["foretune:not_finite"]
    assert list(study.trials[0].intermediate_values) == [1]


def journal(folder):
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "study.log"))
    return optuna.storages.JournalStorage(backend)


def sqlite(folder):
    return optuna.storages.RDBStorage(f"sqlite:///{folder / 'study.db'}")


@pytest.mark.parametrize("storage", [journal, sqlite])
def test_two_workers_share_a_study(storage, tmp_path):
    optuna.create_study(storage=storage(tmp_path), study_name="shared")
    first_done = threading.Event()
    starts, errors = {}, []

    def objective(trial):
        start = fo.warm_start(trial, START)
        starts[trial.number] = float(start["lr"])
        with fo.prune_nonfinite(trial):
            result = real_time(hparams=start, callbacks=[fo.Pruning(trial, every=2)])
        return fo.keep(trial, result)

    def work(wait):
        try:  # each with a connection of its own, as a process has
            study = optuna.load_study(study_name="shared", storage=storage(tmp_path))
            if wait:
                first_done.wait()  # set in any case
            study.optimize(objective, n_trials=2)
        except BaseException as error:
            errors.append(error)
        finally:
            first_done.set()

    workers = [threading.Thread(target=work, args=(wait,)) for wait in (False, True)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors
    study = optuna.load_study(study_name="shared", storage=storage(tmp_path))
    assert [t.state.name for t in study.trials] == ["COMPLETE"] * 4
    assert starts[0] == float(START["lr"])
    for trial in study.trials[1:]:
        source = study.trials[trial.user_attrs["foretune:warm_start"]]
        assert starts[trial.number] == source.user_attrs["foretune:hparams"]["['lr']"]
    assert study.trials[2].user_attrs["foretune:warm_start"] in (0, 1)  # of the other worker

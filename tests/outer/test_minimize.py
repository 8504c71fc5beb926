"""The outer loop: optima, history, evaluation, stopping, callbacks, bad input."""

import json
import os
import signal

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest

import foretune as ft

from ..engines.test_known_answers import ridge
from ..problems import regression


@pytest.fixture
def untyped():
    """Without run-time checks of annotations, which users do not have."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("engine", "constraint"),
    [
        (ft.Forward(), ft.Log()),
        pytest.param(ft.Reverse(), ft.NonNegative(), marks=pytest.mark.second_tier),
    ],
    ids=str,
)
def test_the_optimal_ridge_coefficient(engine, constraint):
    problem, closed_form = ridge(200)
    grid = np.geomspace(1e-3, 10, 4001)
    best = grid[np.argmin(jax.vmap(closed_form)(jnp.array(grid)))]
    result = ft.minimize(
        problem,
        {"rho": jnp.array(1.0)},
        steps=400,
        engine=engine,
        optimizer=optax.adam(0.1),
        constraints={"rho": constraint},
    )
    np.testing.assert_allclose(result.hparams["rho"], best, rtol=5e-3, atol=1e-3)
    np.testing.assert_allclose(result.value, closed_form(best), rtol=1e-5)


def test_a_result_prints_what_was_found():
    problem, hparams = regression()
    result = ft.minimize(
        problem, hparams, steps=1, constraints=jax.tree.map(lambda _: ft.Box(0, 9), hparams)
    )
    lines = repr(result)
    assert lines.startswith("Result(hparams[")
    assert "; value = " in lines
    assert lines.endswith("; 2 records, 1 steps done)")
    assert len(lines) < 300  # neither the state nor the history
    assert "value = 'x'" in repr(jax.tree.map(lambda _: "x", result))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("constraint", [ft.NonNegative(), ft.Log()], ids=str)
@pytest.mark.second_tier
def test_the_default_optimizer_needs_no_rate(constraint):
    problem, closed_form = ridge(200)
    grid = np.geomspace(1e-3, 10, 4001)
    lowest = float(np.min(jax.vmap(closed_form)(jnp.array(grid))))
    start = {"rho": jnp.array(1.0)}
    result = ft.minimize(problem, start, steps=300, constraints={"rho": constraint})
    first = result.history[0]["value"]
    assert result.best.score - lowest < 0.01 * (first - lowest)


@pytest.mark.usefixtures("x64")
@pytest.mark.second_tier
def test_an_optimum_on_the_boundary():
    problem, closed_form = ridge(200)
    free = ft.minimize(
        problem, {"rho": jnp.array(1.0)}, steps=200, optimizer=optax.adam(0.05)
    ).hparams["rho"]
    bound = float(free) + 0.5
    result = ft.minimize(
        problem,
        {"rho": jnp.array(bound + 1)},
        steps=200,
        optimizer=optax.adam(0.05),
        constraints={"rho": ft.Box(bound, np.inf)},
    )
    np.testing.assert_allclose(result.hparams["rho"], bound, atol=1e-3)
    np.testing.assert_allclose(result.value, closed_form(bound), rtol=1e-6)


def test_history_and_best():
    problem, hparams = regression(steps=5)
    result = ft.minimize(
        problem,
        hparams,
        steps=7,
        optimizer=optax.sgd(0.01),
        evaluate=lambda state, h: {"norm": jnp.linalg.norm(state.params["w"])},
        score=lambda record: abs(record["step"] - 4),
    )
    assert [row["step"] for row in result.history] == list(range(8))
    assert all("norm" in row for row in result.history)
    assert int(result.best.step) == 4
    assert result.stopped == "7 steps done"
    value, state = problem.response(result.hparams)
    np.testing.assert_allclose(result.value, value, rtol=1e-6)
    np.testing.assert_allclose(result.state.params["w"], state.params["w"], rtol=1e-6)
    json.dumps(result.history)


def test_compiles_once(monkeypatch):
    traces = []

    def loss(params, hparams, batch):
        traces.append(1)
        return jnp.mean((batch[0] @ params["w"] - batch[1]) ** 2) + hparams["decay"]

    problem, hparams = regression(
        steps=3, dynamics=ft.Training(loss, lambda h: optax.sgd(h["lr"])),
        objective=lambda s, h, b: jnp.sum(s.params["w"] ** 2) + h["decay"] ** 2,
        init={"w": np.zeros(3, np.float32)},
    )  # fmt: skip
    ft.minimize(problem, hparams, steps=1)
    before = len(traces)
    ft.minimize(problem, hparams, steps=20)
    assert len(traces) == before


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (ft.NoImprovement(3), "no improvement over 3 steps"),
        (lambda run: "flat" if run.record["gradient_norm"] < 1e9 else None, "flat"),
        (ft.TimeLimit(0.0), "0 seconds are over"),
        (lambda run: "enough" if run.step == 2 else None, "enough"),
    ],
)
def test_stopping_rules(rule, reason):
    problem, hparams = regression(steps=3)
    result = ft.minimize(problem, hparams, steps=50, optimizer=optax.sgd(0.0), stop=rule)
    assert reason in result.stopped
    assert len(result.history) < 10


@pytest.mark.usefixtures("untyped")
def test_a_time_limit_counts_the_seconds_of_the_run():
    class Run:
        seconds = 9.9

    rule = ft.TimeLimit(10)
    assert rule(Run()) is None
    Run.seconds = 10.0
    assert rule(Run()) == "10 seconds are over"


def test_ctrl_c_ends_after_the_evaluation_and_returns_what_there_is():
    problem, hparams = regression(steps=3)

    class Interrupt(ft.Callback):
        def step(self, run):
            if run.step == 2:
                os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    result = ft.minimize(problem, hparams, steps=50, callbacks=[Interrupt()])
    assert result.stopped == "interrupted"
    assert len(result.history) == 3
    assert signal.getsignal(signal.SIGINT) is before


def test_a_callback_in_ten_lines_sees_the_run():
    seen = []

    class Watch(ft.Callback):
        def start(self, run):
            seen.append(("start", run.steps))

        def step(self, run):
            seen.append((run.step, float(run.hparams["lr"]), run.record["value"]))

        def end(self, run):
            seen.append(("end", run.step))

    problem, hparams = regression(steps=3)
    ft.minimize(problem, hparams, steps=2, callbacks=[Watch()])
    assert seen[0] == ("start", 2)
    assert seen[-1] == ("end", 2)
    assert [row[0] for row in seen[1:-1]] == [0, 1, 2]


def test_history_on_disk_and_progress(tmp_path, capsys):
    problem, hparams = regression(steps=3)
    path = tmp_path / "run" / "metrics.jsonl"
    result = ft.minimize(problem, hparams, steps=3, callbacks=[ft.History(path), ft.Progress()])
    assert [json.loads(line) for line in path.read_text().splitlines()] == result.history
    assert capsys.readouterr().out.strip() == ""  # quiet where there is no terminal


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    problem, hparams = regression(steps=3)
    ft.minimize(problem, hparams, steps=3, callbacks=[ft.TensorBoard(tmp_path)])
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) > 100
    ft.minimize(problem, hparams, steps=3, callbacks=[ft.TensorBoard(tmp_path)])
    assert len(list(tmp_path.iterdir())) == 2  # within a second, too, the first log stays


def test_a_start_outside_the_set_is_projected_with_a_warning():
    problem, hparams = regression(steps=3)
    with pytest.warns(UserWarning, match=r"hparams\['lr'\] starts outside .* distance of 0.05"):
        result = ft.minimize(
            problem, hparams, steps=1, optimizer=optax.sgd(0.0),
            constraints={"lr": ft.Box(0.0, 0.05)},
        )  # fmt: skip
    np.testing.assert_allclose(result.hparams["lr"], 0.05)


@pytest.mark.usefixtures("untyped")
def test_bad_input(tmp_path):
    problem, hparams = regression(steps=3)
    with pytest.raises(ValueError, match=r"steps=0\): it must be a whole number"):
        ft.minimize(problem, hparams, steps=0)
    with pytest.raises(ValueError, match="names no hyperparameter"):
        ft.minimize(problem, hparams, steps=1, constraints={"rate": ft.NonNegative()})
    for name, wrong in (("engine", ft.Forward), ("optimizer", optax.adam), ("callbacks", [print])):
        with pytest.raises(TypeError, match=f"{name} must be"):
            ft.minimize(problem, hparams, steps=1, **{name: wrong})
    with pytest.raises(ValueError, match="evaluate must return a dict of scalars"):
        ft.minimize(problem, hparams, steps=1, evaluate=lambda state, h: {"value": 1.0})
    (tmp_path / "file").write_text("")
    for callback in (
        ft.History(tmp_path / "file" / "x" / "m.jsonl"),
        ft.Checkpoint(tmp_path / "file"),
    ):
        with pytest.raises(OSError, match="cannot write to the folder"):
            ft.minimize(problem, hparams, steps=1, callbacks=[callback])


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"stop": 3}, r"stop must be a rule .* a list of them; got the int 3"),
        ({"stop": "soon"}, r"stop must be .* got the str 'soon'"),
        ({"stop": [3]}, r"stop must be a function, called as `stop\(run\)`; got the int 3"),
        ({"stop": ft.NoImprovement}, "stop must be a function.*; got the class NoImprovement"),
        ({"stop": lambda: None}, r"`stop\(run\)` is how it is called, but it takes `\(\)`"),
        ({"score": "accuracy"}, r"score must be a function.*got the str 'accuracy'"),
        ({"score": lambda a, b: a}, r"`score\(record\)` is how it is called"),
        ({"evaluate": {"a": 1}}, r"evaluate must be a function.*got a dict"),
        ({"evaluate": lambda state: {}}, r"`evaluate\(state, hparams\)` is how it is called"),
        ({"key": jax.random.key(0)}, "key=... is for a draw"),
        ({"callbacks": ft.Progress}, "callbacks must be a list"),
    ],
)
def test_arguments_are_checked_before_anything_is_compiled(wrong, message):
    def loss(params, hparams, batch):
        raise AssertionError("traced")

    training = ft.Training(loss, lambda h: optax.sgd(h["lr"]))
    problem, hparams = regression(steps=3, dynamics=training)
    with pytest.raises(TypeError, match=message):
        ft.minimize(problem, hparams, steps=1, **wrong)


def test_stopping_rules_of_any_iterable():
    problem, hparams = regression(steps=3)
    rules = (rule for rule in [lambda run: "enough" if run.step == 2 else None])
    assert ft.minimize(problem, hparams, steps=5, stop=rules).stopped == "enough"


@pytest.mark.parametrize(
    ("score", "returned"),
    [
        (lambda record: 1j, r"the complex 1j"),
        (lambda record: "good", r"the str 'good'"),
        (lambda record: np.zeros(3), r"float64\[3\]"),
        (lambda record: None, "None"),
    ],
)
def test_a_score_that_is_no_number(score, returned):
    problem, hparams = regression(steps=3)
    message = rf"score\(record\) must return one real number; at step 0 it returned {returned}"
    with pytest.raises(TypeError, match=message):
        ft.minimize(problem, hparams, steps=1, score=score)


def test_a_metric_that_the_record_does_not_have():
    problem, hparams = regression(steps=3)
    with pytest.raises(KeyError, match="acuracy") as error:
        ft.minimize(
            problem, hparams, steps=1, score=lambda record: -record["acuracy"],
            evaluate=lambda state, h: {"accuracy": jnp.array(1.0)},
        )  # fmt: skip
    (note,) = error.value.__notes__
    assert "score(record) at step 0" in note
    assert "'accuracy', 'gradient_norm', 'rejected', 'step', 'value'" in note


def test_a_score_of_nan_is_reported_and_never_best():
    problem, hparams = regression(steps=3)
    with pytest.warns(UserWarning, match=r"score at step 0 is NaN. It never counts") as warned:
        result = ft.minimize(
            problem, hparams, steps=4,
            score=lambda record: [np.nan, 2.0, np.nan, 1.0, np.nan][record["step"]],
        )  # fmt: skip
    assert len(warned) == 1
    assert int(result.best.step) == 3


def test_minimize_inside_a_program_is_refused():
    problem, hparams = regression(steps=3)
    message = r"minimize is a loop in Python.*call it outside of jax\.jit"
    for inside in (
        jax.jit(lambda h: ft.minimize(problem, h, steps=1).hparams),
        jax.jit(lambda _: ft.minimize(problem, hparams, steps=1).hparams),
        jax.grad(lambda h: ft.minimize(problem, h, steps=1).value),
    ):
        with pytest.raises(TypeError, match=message):
            inside(hparams)


@pytest.mark.usefixtures("untyped")
@pytest.mark.second_tier
def test_real_time_runs_check_the_same():
    problem, hparams = regression(steps=3)
    tuner = ft.RealTime(problem.dynamics, problem.objective)
    batch = problem.batches.data

    def run(**options):
        return tuner.run([batch] * 2, [batch], params=problem.init, hparams=hparams, **options)

    for name, wrong in {"stop": 3, "score": 3, "evaluate": 3, "callbacks": 3}.items():
        with pytest.raises(TypeError, match=f"{name} must be.*(the int )?3"):
            run(**{name: wrong})
    with pytest.raises(TypeError) as error:
        run(evaluate=lambda state, h: {"w": float(state.params["b"])})
    assert "evaluate is compiled, and cannot use NumPy" in "".join(error.value.__notes__)
    with pytest.raises(TypeError, match=r"RealTime\.run is a loop in Python"):
        jax.jit(lambda h: tuner.run([batch], [batch], params=problem.init, hparams=h))(hparams)
    with pytest.raises(TypeError, match="at step 1 it returned the str 'x'"):
        run(window=2, score=lambda record: "x")


@pytest.mark.parametrize(
    "metric",
    [
        lambda w: float(jnp.sum(w)),
        lambda w: np.linalg.norm(w),
        lambda w: jnp.sum(w).item(),
        lambda w: 1.0 if jnp.sum(w) > 0 else 0.0,
        lambda w: jnp.sum(w[w > 0]),
    ],
)
def test_an_evaluate_that_cannot_be_compiled(metric):
    problem, hparams = regression(steps=3)
    with pytest.raises((TypeError, IndexError)) as error:
        ft.minimize(
            problem, hparams, steps=1, evaluate=lambda state, h: {"m": metric(state.params["w"])}
        )
    assert "evaluate is compiled, and cannot use NumPy" in "".join(error.value.__notes__)


def test_a_start_that_is_not_finite_comes_with_the_run():
    problem, hparams = regression(steps=100)
    with pytest.raises(ft.NonFiniteError, match="training itself") as error:
        ft.minimize(problem, hparams | {"lr": jnp.array(1e30)}, steps=2)
    run = error.value.run
    assert (run.step, run.history, float(run.hparams["lr"])) == (0, [], np.float32(1e30))
    first, second = error.value.__notes__
    assert (
        "this was step 0 of minimize, with hparams['decay'] = 0.02, hparams['lr'] = 1e+30" in first
    )
    assert "in the attribute `run`" in second


@pytest.mark.second_tier
def test_a_step_that_is_not_finite_is_rejected_where_there_is_no_derivative():
    def error(state, h, _):  # in steps, and not finite beyond 1
        x = jax.lax.stop_gradient(h["x"])
        return jnp.where(x > 1.0, jnp.nan, -jnp.floor(10 * x) / 10) + 0 * state.params

    training = ft.Training(lambda w, h, _: w**2, optax.sgd(0.1))
    problem = ft.Problem(training, error, jnp.array(0.0), ft.FullBatch(None, steps=1))
    far = optax.sgd(1.0)
    with pytest.warns(RuntimeWarning, match="is not finite"):
        result = ft.minimize(
            problem, {"x": jnp.array(0.7)}, steps=4, engine=ft.Evolution(0.3, 4), optimizer=far
        )
    assert result.history[1]["rejected"]
    assert result.value <= -0.7 + 1e-6

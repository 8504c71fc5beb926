"""Bad input: a clear error with the path, the shape and the remedy, before any compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft
from foretune._validate import check_objective, check_steps

from .problems import penalised, regression, squared_error

ENGINES = [ft.Reverse(), ft.Forward()]


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    """Fail where an engine's program was compiled before the error came."""
    seen = []

    def listen(event, duration, fun_name="", **_):
        if "backend_compile" in event and "_compute" in fun_name:
            seen.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield
    jax.monitoring.unregister_event_duration_listener(listen)
    assert not seen


def rejects(error, pattern, problem, hparams):
    for call in (*ENGINES, problem.response.__func__, ft.check_hypergradient):
        with pytest.raises(error, match=pattern):
            call(problem, hparams)


@pytest.mark.parametrize(
    ("leaf", "pattern"),
    [
        (jnp.array(3), r"hparams\['lr'\] is int32\[\]; only floating-point"),
        (jnp.array([True]), r"hparams\['lr'\] is bool\[1\]"),
        (0.1, r"hparams\['lr'\] is the float 0.1; hyperparameters are float arrays. Write `jnp"),
        ("0.1", r"hparams\['lr'\] is the str '0.1'"),
        (jnp.array(1j), r"hparams\['lr'\] is complex64\[\]"),
        (jnp.zeros(0), r"hparams\['lr'\] is float32\[0\]: it holds no number"),
    ],
)
def test_hyperparameters_that_are_no_float_arrays(leaf, pattern):
    problem, hparams = regression()
    rejects((TypeError, ValueError), pattern, problem, hparams | {"lr": leaf})


def test_no_hyperparameters():
    rejects(ValueError, "no hyperparameters", regression()[0], {})


def unused(loss_use, optimizer_use=lambda h: 0.1, error_use=lambda h: 0.0):
    """Return a problem in which hparams["x"] is used only in the given ways."""

    def loss(params, hparams, batch):
        return penalised(params, hparams, batch) + loss_use(hparams["x"]) * jnp.sum(params["w"])

    problem, hparams = regression(
        dynamics=ft.Training(loss, lambda h: optax.sgd(h["lr"] + optimizer_use(h["x"]))),
        objective=lambda state, h, batch: squared_error(state, h, batch) + error_use(h["x"]),
    )
    return problem, hparams | {"x": jnp.array(0.5)}


@pytest.mark.parametrize(
    "use",
    [
        lambda x: 1.0,
        jax.lax.stop_gradient,
        lambda x: x.astype(int),
        lambda x: jnp.where(x > 0, 1.0, 2.0),
        jnp.round,
    ],
)
def test_hyperparameters_without_influence(use):
    problem, hparams = unused(use)
    rejects(ValueError, r"does not depend on hparams\['x'\]", problem, hparams)


def test_influence_that_never_reaches_the_error():
    """The hyperparameter moves a state variable that nothing reads."""

    def loss(params, hparams, batch, model_state):
        return penalised(params, hparams, batch), model_state + hparams["x"]

    problem, hparams = regression(
        dynamics=ft.Training(loss, lambda h: optax.sgd(h["lr"]), has_state=True),
        init=({"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}, jnp.array(0.0)),
    )
    rejects(ValueError, r"hparams\['x'\]", problem, hparams | {"x": jnp.array(1.0)})


def test_influence_on_another_error_only():
    problem, hparams = regression(
        objective={"lr": squared_error, "decay": lambda state, h, batch: h["lr"] ** 2}
    )
    rejects(ValueError, r"does not depend on hparams\['decay'\]", problem, hparams)


def test_influence_by_the_optimizer_or_the_error_is_enough():
    for problem, hparams in (
        unused(lambda x: 0.0, optimizer_use=lambda x: 0.1 * x),
        unused(lambda x: 0.0, error_use=lambda x: x**2),
    ):
        assert float(problem.response(hparams)[0]) > 0


@pytest.mark.parametrize(
    ("objective", "pattern"),
    [
        ({"lr": squared_error}, r"hparams\['decay'\] has no objective"),
        (
            {"lr": squared_error, "decay": squared_error, "rho": squared_error},
            r"objective\['rho'\] names no hyperparameter",
        ),
    ],
)
def test_objectives_that_do_not_fit_the_hyperparameters(objective, pattern):
    problem, hparams = regression(objective=objective)
    rejects(ValueError, pattern, problem, hparams)


def test_a_dict_of_objectives_needs_a_dict_of_hyperparameters():
    problem, _ = regression(objective={"lr": squared_error})
    rejects(TypeError, "needs a dict of hyperparameters", problem, [jnp.array(0.1)])


@pytest.mark.parametrize(
    ("objective", "pattern"),
    [
        (lambda s, h, b: s.params["w"], r"one scalar, it returned objective = float32\[3\]"),
        (lambda s, h, b: {"a": s.params["b"]}, r"objective\['a'\] = float32\[\]"),
        (lambda s, h, b: None, "it returned nothing"),
        (lambda s, h, b: jnp.sum(s.params["w"] > 0), "A count of errors has no gradient"),
    ],
)
def test_objectives_that_are_no_scalar(objective, pattern):
    problem, hparams = regression(objective=objective)
    rejects((ValueError, TypeError), pattern, problem, hparams)


class Grows:
    """A dynamics whose step returns `change(state)`."""

    def __init__(self, start, change):
        self.start, self.change = start, change

    def init(self, params, hparams):
        return self.start

    def step(self, state, hparams, batch):
        return self.change(state, hparams["a"])


@pytest.mark.parametrize(
    ("start", "change", "pattern"),
    [
        (
            {"w": jnp.zeros(2)},
            lambda s, a: {"w": jnp.zeros(3) + a},
            r"changes state\['w'\] from float32\[2\] to float32\[3\]. `step` must keep",
        ),
        (
            {"w": jnp.zeros(2)},
            lambda s, a: {"w": s["w"] + a, "v": a},
            r"state\['v'\] \(float32\[\]\) is in s_1 but not in s_0",
        ),
        (
            {"w": jnp.zeros(2), "v": jnp.zeros(())},
            lambda s, a: {"w": s["w"] + a},
            r"state\['v'\] \(float32\[\]\) is in s_0 but not in s_1",
        ),
        (
            {"w": jnp.zeros(2), "n": jnp.array(0)},
            lambda s, a: {"w": s["w"] + a, "n": s["n"] + a},
            r"changes state\['n'\] from int32\[\] to float32\[\]",
        ),
        (
            {"w": 0.0},
            lambda s, a: {"w": s["w"] + a},
            r"state\['w'\] from the float 0.0 to float32\[\]. Return it from `init` as an array",
        ),
    ],
)
def test_steps_that_change_the_state(start, change, pattern):
    problem = ft.Problem(
        Grows(start, change),
        lambda state, h, b: jnp.sum(state["w"]),
        None,
        ft.FullBatch(None, steps=2),
    )
    rejects(ValueError, pattern, problem, {"a": jnp.array(1.0)})


@pytest.mark.parametrize(
    ("batches", "pattern"),
    [
        (
            lambda: {"x": np.zeros((5, 2)), "y": np.zeros((4, 2))},
            r"differ:\n  batches\['x'\]: float\d\d\[5,2\]\n  batches\['y'\]: float\d\d\[4,2\]",
        ),
        (lambda: {"x": np.zeros((5, 2)), "t": np.float32(1)}, r"batches\['t'\] is float32\[\]"),
        (lambda: {"x": np.zeros((5, 2)), "t": "a"}, r"batches\['t'\] is the str 'a'"),
        (lambda: {}, "batches holds no array"),
        (lambda: np.zeros((0, 2)), "leading axis 0.*T must be"),
        (lambda: ft.FullBatch(np.zeros(3), steps=0), "steps=0.*T must be"),
        (lambda: ft.Minibatches((np.zeros(3), np.zeros(4)), np.zeros((2, 1), int)), "differ"),
        (lambda: ft.Minibatches(np.zeros(3), np.zeros((0, 2), int)), "leading axis 0"),
        (lambda: ft.Minibatches(np.zeros(3), np.zeros((2, 0), int)), "batches are empty"),
        (lambda: ft.Minibatches(np.zeros(3), np.zeros((2, 1))), "must be an integer array"),
        (lambda: ft.Minibatches(np.zeros(3), np.array([[0, 3]])), "run from 0 to 3.*3 examples"),
        (lambda: ft.Minibatches(np.zeros(3), np.array([[-1, 2]])), "run from -1 to 2"),
        (
            lambda: ft.Minibatches.shuffled(
                np.zeros(3), batch_size=4, steps=1, key=jax.random.key(0)
            ),
            "batch_size=4 must lie between 1 and the 3 examples",
        ),
    ],
)
def test_batches(batches, pattern):
    with pytest.raises((ValueError, TypeError), match=f"(?s){pattern}"):
        regression(batches=batches())


def test_the_parts_of_a_problem():
    with pytest.raises(TypeError, match=r"no method `init\(params, hparams\)`"):
        regression(dynamics=penalised)
    # Called directly: the tests' own type checker would catch these first.
    with pytest.raises(TypeError, match="must be a function"):
        check_objective(3.0)
    with pytest.raises(TypeError, match=r"objective\['lr'\] must be a function"):
        check_objective({"lr": 1})
    with pytest.raises(ValueError, match="steps=2.5: .*whole number"):
        check_steps(2.5, "steps=2.5")
    with pytest.raises(TypeError, match="non-empty dict"):
        regression(objective={})
    with pytest.raises(ValueError, match="chunk=0 columns"):
        ft.Forward(chunk=0)


def test_training_says_what_it_cannot_train():
    problem, hparams = regression(init={"w": np.zeros(3, int)})
    rejects(ValueError, "nothing to train", problem, hparams)
    problem, hparams = regression(
        dynamics=ft.Training(penalised, optax.sgd(0.1), has_state=True), init=np.zeros(3)
    )
    rejects(ValueError, r"starts from the pair \(params, model_state\)", problem, hparams)
    problem, hparams = regression(optimizer=lambda h: h["lr"])
    rejects(TypeError, "must be an Optax transformation or a function", problem, hparams)

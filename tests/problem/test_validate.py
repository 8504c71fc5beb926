"""Bad input: a clear error with the path, the shape and the remedy, before any compilation."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import PyTree

import foretune as ft
from foretune._problem.checks import check_count, check_objective
from foretune._problem.draws import as_problem

from ..problems import penalised, regression, squared_error

ENGINES = [ft.Reverse(), ft.Forward()]


@pytest.fixture(autouse=True)
def nothing_is_compiled(request):
    """Fail where an engine's program was compiled before the error came."""
    if "unknown_length" in request.node.name:  # it shows that the other engine works
        yield
        return
    seen = []

    def listen(event, duration, fun_name="", **_):
        if "backend_compile" in event and fun_name == "jit(compute)":
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
        (jnp.array(3), r"hparams\['lr'\] is int32\[\]; only floats"),
        (jnp.array([True]), r"hparams\['lr'\] is bool\[1\]"),
        (
            1,
            r"hparams\['lr'\] is the int 1; only floats .* Write `1.0`",
        ),
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
        lambda x: x.astype(int).astype(float),
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


def test_an_optimizer_that_is_no_function_of_the_hyperparameters():
    problem, _ = regression(dynamics=ft.Training(lambda w, h, b: w["b"] ** 2, optax.sgd(0.1)))
    rejects(ValueError, r'give `optimizer=lambda h: optax.sgd\(h\["lr"\]\)`', problem, {"lr": 0.1})


def test_an_objective_of_validation_data_that_was_not_given():
    problem, hparams = regression(validation=None)
    rejects(
        TypeError, "validation is None: the problem was given no `validation=`", problem, hparams
    )


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
        (
            lambda s, h, b: s.params["w"],
            r"one scalar, it returned\n  objective: float32\[3\]\nReduce it",
        ),
        (lambda s, h, b: {"a": s.params["b"]}, r"objective\['a'\]: float32\[\]\nReturn one array"),
        (lambda s, h, b: None, "Is a `return` missing"),
        (lambda s, h, b: jnp.sum(s.params["w"] > 0), "A count of errors has no gradient"),
    ],
)
def test_objectives_that_are_no_scalar(objective, pattern):
    problem, hparams = regression(objective=objective)
    rejects((ValueError, TypeError), pattern, problem, hparams)


class Grows(ft.Dynamics):
    """A dynamics whose step returns `change(state)`."""

    start: PyTree
    change: Callable

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
            lambda s, a: {"w": s["w"] + a, "n": s["n"].astype(float) + a},
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
        (lambda: np.zeros((0, 2)), r"batches is float32\[0,2\]: it holds no number"),
        (lambda: ft.FullBatch(np.zeros(3), steps=0), "steps=0: .*from 1 to"),
        (lambda: ft.Minibatches((np.zeros(3), np.zeros(4)), np.zeros((2, 1), int)), "differ"),
        (lambda: ft.Minibatches(np.zeros(3), np.zeros((0, 2), int)), r"indices are int\d\d\[0,2\]"),
        (lambda: ft.Minibatches(np.zeros(3), np.zeros((2, 0), int)), r"int\d\d\[2,0\].*not empty"),
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
    # Called directly: the tests' own type checker would catch these first.
    with pytest.raises(TypeError, match="must be a function"):
        check_objective(3.0)
    with pytest.raises(TypeError, match=r"objective\['lr'\].* must be a function"):
        check_objective({"lr": 1})
    with pytest.raises(ValueError, match=r"steps=2.5: .*whole number"):
        check_count(2.5, "steps=2.5")
    with pytest.raises(TypeError, match="non-empty dict"):
        regression(objective={})
    with pytest.raises(ValueError, match="chunk=0"):
        ft.Forward(chunk=0)


def test_training_says_what_it_cannot_train():
    problem, hparams = regression(init={"w": np.zeros(3, int)})
    rejects(ValueError, "nothing to train", problem, hparams)
    problem, hparams = regression(
        dynamics=ft.Training(lambda p, h, b, s: (p, s), optax.sgd(0.1), has_state=True),
        init=np.zeros(3),
    )
    rejects(ValueError, r"starts from the pair \(params, model_state\)", problem, hparams)
    problem, hparams = regression(optimizer=lambda h: h["lr"])
    rejects(TypeError, "must be an Optax transformation", problem, hparams)


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (
            lambda: ft.Training(lambda p, h: 0.0, optax.sgd(0.1)),
            r"`loss\(params, hparams, batch\)` is",
        ),
        (
            lambda: ft.Training(lambda p, h, b, s: 0.0, optax.sgd(0.1)),
            r"takes `\(p, h, b, s\)` \(missing a required argument: 's'\)",
        ),
        (
            lambda: ft.Training(penalised, optax.sgd(0.1), key=jax.random.key(0)),
            r"`loss\(params, hparams, batch, key=...\)` is how it is called",
        ),
        (lambda: ft.Training(penalised, optax.sgd), "one of Optax's functions"),
        (
            lambda: regression(objective=lambda s, h: 0.0),
            r"`objective\(state, hparams, validation\)`",
        ),
        (lambda: regression(init=lambda: 0.0), r"`init\(hparams\)` is how it is called"),
        (lambda: regression(dynamics=Grows), "give an instance, `Grows"),
        (lambda: regression(batches=[(np.ones(2), np.ones(2))] * 3), "a list of 3 batches. Stack"),
        (lambda: regression(batches=None), r"FullBatch\(None, steps=T\)"),
        (lambda: ft.Forward(regression()[0]), r"goes to the engine, not to its class: `Forward\("),
        # It is called directly: the tests' own type checker would catch it first.
        (lambda: as_problem(regression()[1]), "first argument must be a `foretune.Problem`"),
    ],
)
def test_first_day_mistakes(make, pattern):
    with pytest.raises((TypeError, ValueError), match=pattern):
        make()


@pytest.mark.parametrize(
    ("loss", "pattern"),
    [
        (
            lambda p, h, b: p["w"] * h["lr"],
            r"the loss must return a floating-point scalar(?s:.*)\[3\]",
        ),
        (lambda p, h, b: (penalised(p, h, b), 1), r"needs `has_state=True`"),
        (lambda p, h, b: None, r"loss: None, no leaf"),
    ],
)
def test_losses_that_are_no_scalar(loss, pattern):
    problem, hparams = regression(dynamics=ft.Training(loss, lambda h: optax.sgd(h["lr"])))
    rejects(TypeError, pattern, problem, hparams)


def test_a_model_state_must_come_back():
    training = ft.Training(lambda p, h, b, s: penalised(p, h, b), optax.sgd(0.1), has_state=True)
    init = ({"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}, np.zeros(2))
    problem, hparams = regression(dynamics=training, init=init)
    rejects(TypeError, r"must return the pair \(value, model_state\)", problem, hparams)


def test_an_objective_without_derivative_is_suspected():
    def accuracy(state, hparams, batch):
        return jnp.mean((batch[0] @ state.params["w"] > 0).astype(float))

    problem, hparams = regression(objective=accuracy)
    rejects(ValueError, "An accuracy, a sign or an argmax has no derivative", problem, hparams)


def test_errors_in_user_code_say_what_was_called():
    problem, hparams = regression(objective=lambda s, h, val: val[0].sum(), validation=None)
    with pytest.raises(TypeError) as error:
        ft.Reverse()(problem, hparams)
    message = str(error.value)
    assert "objective(state, hparams, validation)" in message
    assert "validation: None" in message
    assert "state.params['w']: float32[3]" in message


def test_a_name_that_the_loss_or_the_optimizer_does_not_find():
    problem, hparams = regression(optimizer=lambda h: optax.sgd(h["rate"]))
    rejects(ValueError, r"there is no 'rate'[\s\S]*hparams\['lr'\]: float32", problem, hparams)
    problem, _ = regression()
    rejects(ValueError, r"there is no 'decay'[\s\S]*step\(state", problem, {"lr": 0.1})


def test_data_of_another_width_is_named():
    x = np.ones((20, 4), np.float32)
    problem, hparams = regression(validation=(x, np.ones(20, np.float32)))
    rejects(TypeError, r"objective\(state[\s\S]*validation\[0\]: float32\[20,4\]", problem, hparams)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda h: optax.sgd(optax.exponential_decay(0.1, 10, h["lr"])),
        lambda h: optax.sgd(lambda t: optax.exponential_decay(0.1, 10, h["lr"])(t)),
    ],
    ids=["made with the optimizer", "made in a step"],
)
def test_schedules_that_branch_on_their_constants(optimizer):
    problem, hparams = regression(optimizer=optimizer)
    with pytest.raises(jax.errors.ConcretizationTypeError) as error:
        ft.Reverse()(problem, hparams)
    assert "Write the schedule as a formula in the step" in "".join(error.value.__notes__)


def test_multisteps_names_its_transformation():
    wrapped = optax.MultiSteps(optax.sgd(0.1), 2)
    with pytest.raises(TypeError, match=r"\.gradient_transformation\(\)"):
        ft.Training(penalised, wrapped)
    problem, hparams = regression(optimizer=lambda h: optax.MultiSteps(optax.sgd(h["lr"]), 2))
    rejects(TypeError, r"\.gradient_transformation\(\)", problem, hparams)


X, Y = np.ones((40, 3), np.float32), np.ones(40, np.float32)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda: ft.Training("mse", optax.sgd(0.1)),
            TypeError,
            "must be a function, got the str 'mse'",
        ),
        (lambda: ft.FullBatch((X[:0], Y[:0]), 3), ValueError, r"data\[0\] is float32\[0,3\]"),
        (
            lambda: ft.FullBatch([[1.0, 2.0], [3.0, 4.0]], 3),
            TypeError,
            "a Python list of 2 numbers",
        ),
        (lambda: ft.Minibatches(([1.0, 2.0], Y), [[0]]), TypeError, r"data\[0\] is a Python list"),
        (lambda: ft.FullBatch(np.array(["a", "b"]), 3), TypeError, "holds no numbers"),
        (lambda: regression(validation=(X, [1.0, 2.0])), TypeError, r"validation\[1\] is a Python"),
        (lambda: regression(trajectory="text"), TypeError, "trajectory='text'"),
        (
            lambda: ft.Minibatches(X, np.array([[2**32 + 1]])),
            ValueError,
            "run from 4294967297 to 4294967297",
        ),
        (lambda: ft.Minibatches(X, np.array([[2**31]], np.uint32)), ValueError, "2147483648"),
    ],
)
def test_arguments_that_were_accepted_in_silence(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_whole_data_set_as_batches():
    with pytest.warns(UserWarning, match="looks like a whole data set") as caught:
        regression(batches=(X, Y), validation=(X, Y))
    assert [warning.filename for warning in caught] == [regression.__code__.co_filename]
    stacked = np.ones((25, 8, 3), np.float32), np.ones((25, 8), np.float32)
    regression(batches=stacked, validation=(X, Y))  # minibatches: nothing is said


def test_python_floats_are_hyperparameters():
    problem, hparams = regression(2)
    floats = {name: float(value) for name, value in hparams.items()}
    assert problem.response(floats)[0] == problem.response(hparams)[0]


def test_a_loop_of_unknown_length_points_to_forward_mode():
    class Searching(ft.Dynamics):
        def init(self, params, hparams):
            return params

        def step(self, state, hparams, batch):
            return jax.lax.while_loop(lambda s: s < 1, lambda s: s + hparams["a"], state)

    problem = ft.Problem(
        Searching(), lambda s, h, b: s, jnp.array(0.0), ft.FullBatch(None, steps=1)
    )
    assert float(ft.Forward()(problem, {"a": jnp.array(0.3)}).grad["a"]) == 4.0
    with pytest.raises(ValueError, match="Reverse-mode") as error:
        ft.Reverse()(problem, {"a": jnp.array(0.3)})
    assert any("foretune.Forward()" in note for note in error.value.__notes__)


def test_a_flax_module_must_be_split():
    nnx = pytest.importorskip("flax.nnx")
    problem, hparams = regression(init=nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    rejects(TypeError, r"Split it, `graph, params, rest = nnx.split", problem, hparams)

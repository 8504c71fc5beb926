"""Every optimizer x every engine x every way a hyperparameter enters.

In float64, forward mode equals reverse mode to 1e-10, and both equal central finite differences to
1e-5, each relative to the leaf's own gradient.
"""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft
from foretune._diagnostics.check import finite_difference

from ..conftest import setting
from .optimizers import ALIASES, NOT_DIFFERENTIABLE, OTHERS, Row

pytestmark = pytest.mark.promotes("optimizers of Optax multiply floats by counts")

T = 5
ENGINES = {"forward": ft.Forward(), "forward by columns": ft.Forward(chunk=2)}


def data():
    draw = np.random.default_rng(0).normal
    train = draw(size=(12, 3)), draw(size=(12, 2))
    validation = draw(size=(9, 3)), draw(size=(9, 2))
    return train, validation, {"w": draw(size=(3, 2))}


def predict(params, x):
    return jnp.tanh(x @ params["w"])


def squared(params, batch):
    return jnp.mean((predict(params, batch[0]) - batch[1]) ** 2)


def penalised(params, hparams, batch):
    return squared(params, batch) + hparams.get("decay", 0.0) * jnp.sum(params["w"] ** 2)


def validation_error(state, hparams, batch):
    return squared(state.params, batch["validation"])


def training_error(state, hparams, batch):
    return squared(state.params, batch["train"])


def problem_and_hparams(row: Row, variant: str):
    """Return the problem of one cell of the table, and where to differentiate it."""
    train, validation, params = data()
    hparams = {"lr": row.lr, "c": row.c}
    if not row.signs:
        hparams["decay"] = 0.03
    hparams = {name: np.asarray(value) for name, value in hparams.items()}
    loss, init, has_state, objective = penalised, params, False, validation_error
    rate = lambda h: h["lr"]  # noqa: E731
    batches = ft.FullBatch(train, steps=T)

    if variant == "minibatches":
        batches = ft.Minibatches(train, np.random.default_rng(1).integers(0, 12, (T, 5)))
    elif variant == "schedule":
        if row.schedules:
            hparams["lr"] = row.lr * np.linspace(1.2, 0.8, T)
            rate = lambda h: lambda t: h["lr"][t]  # noqa: E731
        else:  # the optimizer takes no schedule: scale its updates by one
            hparams["lr"] = row.lr * np.linspace(1.2, 0.8, T)
            return scheduled_updates(row, hparams, params, train, validation)
    elif variant == "has_state":
        has_state, init = True, (params, {"mean": np.zeros(3)})

        def loss(params, hparams, batch, model_state):
            mean = 0.7 * model_state["mean"] + 0.3 * jnp.mean(batch[0] * params["w"][:, 0], 0)
            value = penalised(params, hparams, (batch[0] - mean, batch[1]))
            return value, {"mean": mean}

        def objective(state, hparams, batch):
            x, y = batch["validation"]
            return squared(state.params, (x - state.model_state["mean"], y))
    elif variant == "init":
        hparams["scale"] = np.array([0.9, 1.1])

        def init(hparams):
            return {"w": params["w"] * hparams["scale"]}
    elif variant == "dict":
        objective = {name: training_error for name in hparams}
        objective["c"] = validation_error

    problem = ft.Problem(
        ft.Training(loss, lambda h: row.make(rate(h), h["c"]), has_state=has_state),
        objective,
        init,
        batches,
        {"train": train, "validation": validation},
    )
    return problem, hparams


def scheduled_updates(row, hparams, params, train, validation):
    def optimizer(h):
        scale = optax.scale_by_schedule(lambda t: h["lr"][t] / row.lr)
        return optax.chain(row.make(row.lr, h["c"]), scale)

    problem = ft.Problem(
        ft.Training(penalised, optimizer),
        validation_error,
        params,
        ft.FullBatch(train, steps=T),
        {"train": train, "validation": validation},
    )
    return problem, hparams


def difference(problem, hparams, name, direction, engine):
    """Return the derivative of the error that `name` follows, along `direction` in it."""

    def moved(h):
        return {**hparams, name: hparams[name] + h * direction}

    def f(h):
        # An engine's value, to spare the compilation of the bare response.
        value, _, _ = engine(problem, moved(h))
        return float(value[name] if isinstance(value, dict) else value)

    return finite_difference(f, np.finfo(float).eps, least=1e-9)[0]


def assert_close(actual, expected, rtol, what):
    scale = np.linalg.norm(expected)
    assert scale > 0, f"{what}: a zero gradient shows nothing"
    assert np.linalg.norm(actual - expected) <= rtol * scale, f"{what}: {actual} != {expected}"


VARIANTS = ["plain", "minibatches", "schedule", "has_state", "init", "dict"]
# The whole table for Optax's own optimizers, its first column for the rest. In the first tier those
# that are used most, each in another column.
USED_MOST = ("sgd", "adam", "adamw", "rmsprop", "lion", "adafactor", "muon")
CELLS = [
    pytest.param(
        name,
        variant,
        marks=() if name in USED_MOST and column == row % 6 else pytest.mark.second_tier,
    )
    for row, name in enumerate(ALIASES)
    for column, variant in enumerate(VARIANTS)
]
CELLS += [
    pytest.param(name, "plain", marks=() if name in USED_MOST else pytest.mark.second_tier)
    for name in OTHERS
]


@pytest.fixture(autouse=True)
def quick_compilation(request):
    """The programs here are tiny and many: spend no time on optimizing them.

    But for Adamax: the derivative of max(a, b) asks whether a equals it, and where a is computed twice,
    once contracted with what follows and once not, it does not.
    """
    with setting(jax_disable_most_optimizations="adamax" not in request.node.name):
        yield


@pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("name", "variant"), CELLS)
@pytest.mark.usefixtures("x64")
def test_forward_equals_reverse_equals_differences(name, variant):
    problem, hparams = problem_and_hparams((ALIASES | OTHERS)[name], variant)
    with ft.check_finite(False):
        value, grad, state = ft.Reverse()(problem, hparams)
    # Columns in chunks are the same code for every optimizer: one row shows it.
    engines = ENGINES if name == "sgd" else {"forward": ft.Forward()}
    for engine_name, engine in engines.items():
        forward = engine(problem, hparams)
        for leaf in hparams:
            assert_close(forward.grad[leaf], grad[leaf], 1e-10, f"{engine_name} {leaf}")
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), value, forward.value
        )
        floats = eqx.filter((state, forward.state), eqx.is_inexact_array)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), *floats)
    rng = np.random.default_rng(1)
    for leaf, at in hparams.items():
        direction = rng.choice([-1.0, 1.0], at.shape) * np.abs(at)
        with ft.check_finite(False):  # the program that is compiled already
            expected = difference(problem, hparams, leaf, direction, ft.Reverse())
        assert_close(np.vdot(grad[leaf], direction), expected, 1e-5, f"differences {leaf}")


@pytest.mark.parametrize("name", NOT_DIFFERENTIABLE)
@pytest.mark.usefixtures("x64")
@pytest.mark.second_tier
def test_reasons_for_exclusion_still_hold(name):
    """An engine that cannot differentiate an optimizer says so; one that can is right."""
    row, right, _ = NOT_DIFFERENTIABLE[name]
    problem, hparams = problem_and_hparams(row, "plain")
    for mode, engine in {"forward": ft.Forward(), "reverse": ft.Reverse()}.items():
        if mode == right:
            grad = engine(problem, hparams).grad
            for leaf, at in hparams.items():
                expected = difference(problem, hparams, leaf, at, engine)
                assert_close(grad[leaf] * at, expected, 1e-5, leaf)
        else:
            with pytest.raises(
                (ft.NonFiniteError, ValueError), match=r"not finite|[Rr]everse-mode"
            ):
                engine(problem, hparams)


def test_every_alias_of_optax_has_a_row():
    module = inspect.getmodule(optax.sgd)
    names = {
        name
        for name, function in vars(module).items()
        if getattr(function, "__module__", None) == module.__name__ and not name.startswith("_")
        if inspect.isfunction(function) and hasattr(optax, name)
    }
    assert names - set(ALIASES) == {"radam"} & set(NOT_DIFFERENTIABLE)

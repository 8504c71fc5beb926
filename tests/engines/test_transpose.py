"""The adjoint through a gradient: forward mode over it is its transpose, whatever the training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft

from ..problems import assert_trees_close, regression, squared_error, squares

ORDINARY = ft.Reverse(transpose="reverse")
T = 5
later = functools.partial(pytest.param, marks=pytest.mark.second_tier)
FIRST = ("plain", "adam", "batch_statistics", "random_numbers")


def curved(params, hparams, batch):
    """A loss whose Hessian depends on the weights and on the hyperparameters."""
    out = jnp.tanh(batch[0] @ params["w"] * hparams["decay"] + params["b"])
    return jnp.mean((out - batch[1]) ** 2) + hparams["decay"] * jnp.sum(params["w"] ** 4)


def sgd(hparams):
    return optax.sgd(hparams["lr"], 0.5)


def plain():
    return regression(T, dtype=np.float64, dynamics=ft.Training(curved, sgd))


def adam():
    optimizer = lambda h: optax.adam(h["lr"], eps_root=1e-6)  # noqa: E731
    return regression(T, dtype=np.float64, dynamics=ft.Training(curved, optimizer))


def polyak():
    """The step's length is the loss itself, which has a cotangent too."""
    optimizer = lambda h: optax.polyak_sgd(10.0, scaling=h["lr"])  # noqa: E731
    return regression(T, dtype=np.float64, dynamics=ft.Training(curved, optimizer))


def batch_statistics():
    """A model state with floats, an integer and a function."""

    def loss(params, hparams, batch, state):
        mean = 0.7 * state["mean"] + 0.3 * jnp.mean(batch[0] * params["w"] ** 2, 0)
        value = curved(params, hparams, (batch[0] - mean, batch[1]))
        return value, {"mean": mean, "n": state["n"] + 1, "f": state["f"]}

    def error(state, hparams, batch):
        x = state.model_state["f"](batch[0] - state.model_state["mean"])
        return squares(state.params, (x, batch[1]))

    problem, hparams = regression(T, dtype=np.float64)
    init = problem.init, {"mean": np.zeros(3), "n": jnp.zeros((), int), "f": jnp.tanh}
    training = ft.Training(loss, sgd, has_state=True)
    return problem.replace(dynamics=training, init=init, objective=error), hparams


def frozen_leaves():
    """Parameters that are integers, None or functions."""

    def loss(params, hparams, batch):
        x = params["f"](batch[0]) * params["n"].astype(float)
        return curved(params, hparams, (x, batch[1]))

    problem, hparams = regression(T, dtype=np.float64, dynamics=ft.Training(loss, sgd))
    extra = {"n": jnp.array(2), "nothing": None, "f": jnp.sin}
    return problem.replace(init={**problem.init, **extra}), hparams


def random_numbers():
    def loss(params, hparams, batch, key):
        noise = jax.random.normal(key, batch[0].shape, batch[0].dtype)
        return curved(params, hparams, (batch[0] + hparams["decay"] * noise, batch[1]))

    training = ft.Training(loss, sgd, key=jax.random.key(3))
    return regression(T, dtype=np.float64, dynamics=training)


def several_errors():
    problem, hparams = plain()
    other = lambda state, h, batch: jnp.sum(state.params["w"] ** 4) + h["lr"]  # noqa: E731
    return problem.replace(objective={"lr": squared_error, "decay": other}), hparams


def trajectory():
    problem, hparams = plain()
    return problem.replace(trajectory=True), hparams


def folds():
    def fold(k):
        x = jnp.linspace(0.3 + k, 1, 15).reshape(5, 3)
        return plain()[0].replace(validation=(x, jnp.ones(5)))

    return ft.Mean([fold(k) for k in range(2)]), plain()[1]


class Twice(ft.Training):
    """A subclass with two gradients in a step."""

    def step(self, state, hparams, batch):
        return super().step(super().step(state, hparams, batch), hparams, batch)


def subclass():
    return regression(T, dtype=np.float64, dynamics=Twice(curved, sgd))


def layers():
    """A loop over layers, computed again in the gradient, with weights of examples in the loss."""

    def loss(params, hparams, batch):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        out, _ = jax.lax.scan(layer, batch[0], params["layers"])
        return jnp.mean(hparams["weight"] * (out @ params["w"] - batch[1]) ** 2)

    problem, _ = regression(T, dtype=np.float64)
    init = {**problem.init, "layers": np.random.default_rng(1).normal(size=(3, 3, 3))}
    problem = problem.replace(dynamics=ft.Training(loss, sgd), init=init)
    return problem, {"lr": jnp.array(0.1), "weight": jnp.linspace(0.5, 1, 20)}


FEW = [plain, adam, polyak, batch_statistics, frozen_leaves, random_numbers, several_errors]
PROBLEMS = {f.__name__: f for f in [*FEW, trajectory, folds, subclass, layers]}


@pytest.mark.promotes("optimizers of Optax multiply floats by counts")
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", [n if n in FIRST else later(n) for n in PROBLEMS])
@pytest.mark.second_tier
def test_it_equals_the_ordinary_transpose_and_forward_mode(name):
    problem, hparams = PROBLEMS[name]()
    expected = ORDINARY(problem, hparams)
    found = ft.Reverse()(problem, hparams)
    largest = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(expected.grad))
    assert_trees_close(found.grad, expected.grad, 1e-12, 1e-14 * largest)
    assert_trees_close(found.value, expected.value, 1e-14)
    assert_trees_close(ft.Forward()(problem, hparams).grad, found.grad, 1e-10, 1e-12 * largest)


@pytest.mark.promotes("batches minus their mean")
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("store", ["gradients", "segments", 2])
@pytest.mark.parametrize("name", ["batch_statistics", later("folds")])
def test_with_every_store(name, store):
    problem, hparams = PROBLEMS[name]()
    expected = ORDINARY(problem, hparams).grad
    assert_trees_close(ft.Reverse(store=store)(problem, hparams).grad, expected, 1e-12, 1e-14)


@pytest.mark.second_tier
@pytest.mark.usefixtures("x64")
def test_it_equals_finite_differences():
    ft.check_hypergradient(*layers(), verbose=False)  # raises where they differ


@pytest.mark.usefixtures("x64")
@pytest.mark.second_tier
def test_a_derivative_of_the_hypergradient():
    problem, hparams = plain()

    def slope(engine, lr):
        return engine(problem, {**hparams, "lr": lr}).grad["decay"]

    found, expected = (
        jax.grad(functools.partial(slope, engine))(jnp.array(0.1))
        for engine in (ft.Reverse(), ORDINARY)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-11)


@jax.custom_vjp
def reversed_gradient(x):
    return x


reversed_gradient.defvjp(lambda x: (x, None), lambda _, g: (-0.5 * g,))


@pytest.mark.usefixtures("x64")
def test_a_rule_of_its_own_in_the_loss_is_transposed_as_it_stands():
    def loss(params, hparams, batch):
        b = reversed_gradient(params["b"])
        return curved({"w": params["w"], "b": b * params["w"][0]}, hparams, batch)

    problem, hparams = regression(T, dtype=np.float64, dynamics=ft.Training(loss, sgd))
    for store in ("states", "gradients"):
        found = ft.Reverse(store=store)(problem, hparams).grad
        assert_trees_close(found, ORDINARY(problem, hparams).grad, 1e-14)


@pytest.mark.promotes("a bfloat16 loss of float32 hyperparameters")
def test_adjoints_of_a_low_precision_loss_are_not_in_low_precision():
    """A bfloat16 loss loses what one bfloat16 gradient loses, and no more as steps add up."""
    problem, hparams = regression(40, dynamics=ft.Training(curved, sgd))
    low = problem.replace(dynamics=ft.Training(curved, sgd).in_precision(jnp.bfloat16))
    found, exact = ft.Reverse()(low, hparams).grad, ft.Reverse()(problem, hparams).grad
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(found))
    assert_trees_close(found, exact, 0.05)


def deep(width=16, layers=20, rows=256):
    """A problem whose steps hold far more than its states."""

    def loss(params, hparams, batch):
        out, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params)
        return hparams["scale"] * jnp.mean(out**2)

    problem = ft.Problem(
        ft.Training(loss, optax.sgd(0.1)),
        lambda state, h, batch: loss(state.params, {"scale": 1.0}, batch),
        jnp.full((layers, width, width), 0.1),
        ft.FullBatch(jnp.ones((rows, width)), steps=3),
        jnp.ones((2, width)),
    )
    return problem, {"scale": jnp.array(1.0)}


def test_it_holds_less_inside_a_step():
    def temporary(engine):
        return engine.lower(*deep()).compile().memory_analysis().temp_size_in_bytes

    assert temporary(ft.Reverse()) < 0.8 * temporary(ORDINARY)


def test_bad_options():
    with pytest.raises(ValueError, match=r"transpose='backward'.*'forward' or 'reverse'"):
        ft.Reverse(transpose="backward")

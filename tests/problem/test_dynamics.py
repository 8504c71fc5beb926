"""Dynamics of every kind: models from three libraries, and iterations that are no network."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import foretune as ft
from foretune._problem.dynamics import Wrapper

from ..compilations import compilations
from ..problems import assert_trees_close, penalised, regression, squared_error


def assert_engines_agree(problem, hparams, rtol=1e-9):
    reverse = ft.Reverse()(problem, hparams)
    forward = ft.Forward()(problem, hparams)
    assert_trees_close(forward.grad, reverse.grad, rtol, atol=1e-4 * rtol)
    assert_trees_close(forward.value, reverse.value, rtol)
    return reverse


def classes(n=24, d=4, k=3):
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, d)), rng.integers(0, k, n)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@pytest.mark.usefixtures("x64")
@pytest.mark.second_tier
def test_equinox_model_as_it_is():
    """The model holds activation functions and a static width: only its arrays are trained."""
    data = classes()
    model = eqx.nn.MLP(4, 3, 5, 1, activation=jnp.tanh, key=jax.random.key(0), dtype=jnp.float64)

    def loss(model, hparams, batch):
        x, y, w = batch
        losses = optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y)
        return jnp.mean(hparams["weight"][w] * losses)

    problem = ft.Problem(
        ft.Training(loss, lambda h: optax.sgd(h["lr"], 0.9)),
        lambda state, h, batch: cross_entropy(jax.vmap(state.params)(batch[0]), batch[1]),
        model,
        ft.Minibatches((*data, np.arange(24)), np.arange(40).reshape(5, 8) % 24),
        classes(),
    )
    hparams = {"weight": jnp.full(24, 0.5), "lr": jnp.array(0.05)}
    result = assert_engines_agree(problem, hparams)
    assert isinstance(result.state.params, eqx.nn.MLP)
    assert result.state.params(np.zeros(4)).shape == (3,)


class Network(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, momentum=0.8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(jnp.tanh(self.norm(self.first(x)))))


def flax_problem():
    graph, params, rest = nnx.split(Network(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, hparams, batch, model_state):
        model = nnx.merge(graph, params, model_state)
        model.train()
        value = cross_entropy(model(batch[0]), batch[1])
        _, params, model_state = nnx.split(model, nnx.Param, ...)
        penalty = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        return value + hparams["decay"] * penalty, model_state

    def error(state, hparams, batch):
        model = nnx.merge(graph, state.params, state.model_state)
        model.eval()
        return cross_entropy(model(batch[0]), batch[1])

    problem = ft.Problem(
        ft.Training(loss, lambda h: optax.sgd(h["lr"], 0.9), has_state=True),
        error,
        (params, rest),
        ft.FullBatch(classes(), steps=6),
        classes(n=30),
    )
    return graph, problem, {"lr": jnp.array(0.1), "decay": jnp.array(0.01)}


@pytest.mark.second_tier
def test_flax_nnx_with_batch_norm_and_dropout():
    """Batch statistics and the dropout's random state travel in `model_state`."""
    graph, problem, hparams = flax_problem()
    result = assert_engines_agree(problem, hparams, rtol=1e-4)
    before, after = (
        jax.tree.leaves(nnx.state(nnx.merge(graph, *state), nnx.BatchStat))
        for state in (problem.init, (result.state.params, result.state.model_state))
    )
    assert all(not np.allclose(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.usefixtures("x64")
@pytest.mark.second_tier
def test_random_numbers_follow_the_step():
    """With a key, each step draws its own numbers, and the same ones when it is replayed."""
    seen = []

    def loss(params, hparams, batch, *, key):
        noise = jax.random.normal(key, params["w"].shape)
        jax.debug.callback(lambda n: seen.append(tuple(np.asarray(n))), noise)
        return jnp.sum((params["w"] - hparams["strength"] * noise) ** 2)

    problem = ft.Problem(
        ft.Training(loss, lambda h: optax.sgd(h["lr"]), key=jax.random.key(7)),
        lambda state, h, batch: jnp.sum((state.params["w"] - 1) ** 2),
        {"w": np.zeros(2)},
        ft.FullBatch(None, steps=4),
    )
    hparams = {"lr": jnp.array(0.1), "strength": jnp.array(0.5)}
    assert_engines_agree(problem, hparams)
    assert len(set(seen)) == 4


class PowerIteration(ft.Dynamics):
    """The leading eigenvector of a matrix that depends on the hyperparameters."""

    matrix: np.ndarray

    def init(self, params, hparams):
        return {"v": params, "count": jnp.array(0)}

    def step(self, state, hparams, batch):
        v = (self.matrix + jnp.diag(hparams["shift"])) @ state["v"]
        return {"v": v / jnp.linalg.norm(v), "count": state["count"] + 1}


@pytest.mark.usefixtures("x64")
def test_power_iteration_tends_to_the_eigenvalue_derivative():
    """d eigenvalue / d diagonal = v_i^2. The dynamics holds a NumPy array."""
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(4, 4))
    matrix = matrix @ matrix.T
    shift = np.array([0.1, 0.2, 0.3, 0.4])

    def error(state, hparams, batch):
        return state["v"] @ (matrix + jnp.diag(hparams["shift"])) @ state["v"]

    problem = ft.Problem(
        PowerIteration(matrix), error, np.ones(4) / 2, ft.FullBatch(None, steps=300)
    )
    result = assert_engines_agree(problem, {"shift": shift})
    values, vectors = np.linalg.eigh(matrix + np.diag(shift))
    np.testing.assert_allclose(result.value, values[-1], rtol=1e-10)
    np.testing.assert_allclose(result.grad["shift"], vectors[:, -1] ** 2, rtol=1e-8)
    assert int(result.state["count"]) == 300


class Ista(ft.Dynamics):
    """Iterative soft thresholding for the lasso; its matrix is an array of the dynamics."""

    X: jax.Array
    y: jax.Array

    def init(self, params, hparams):
        return params

    def step(self, state, hparams, batch):
        gradient = self.X.T @ (self.X @ state - self.y)
        w = state - hparams["rate"] * gradient
        return jnp.sign(w) * jax.nn.relu(jnp.abs(w) - hparams["rate"] * jnp.exp(hparams["log"]))


@pytest.mark.usefixtures("x64")
def test_iterative_soft_thresholding():
    rng = np.random.default_rng(1)
    X, w = rng.normal(size=(20, 6)), np.array([1.5, 0, 0, -2.0, 0, 0])
    problem = ft.Problem(
        Ista(jnp.array(X), jnp.array(X @ w)),
        lambda state, h, target: jnp.sum((state - target) ** 2),
        jnp.array(rng.normal(size=6)),
        ft.FullBatch(None, steps=50),
        w,
    )
    assert_engines_agree(problem, {"rate": np.array(0.01), "log": np.array([-1.0] * 6)})


class Mixture(ft.Dynamics):
    """EM for the means of a mixture of two Gaussians with a common width."""

    def init(self, params, hparams):
        return params

    def step(self, means, hparams, x):
        logits = -0.5 * ((x[:, None] - means[None]) / hparams["width"]) ** 2
        responsibility = jax.nn.softmax(logits, axis=1)
        return responsibility.T @ x / responsibility.sum(0)


@pytest.mark.usefixtures("x64")
def test_expectation_maximisation():
    rng = np.random.default_rng(2)
    x = np.concatenate([rng.normal(-2, 1, 40), rng.normal(2, 1, 40)])
    problem = ft.Problem(
        Mixture(),
        lambda means, h, batch: jnp.sum((means - jnp.array([-2.0, 2.0])) ** 2),
        np.array([-0.5, 1.0]),
        ft.FullBatch(x, steps=15),
    )
    assert_engines_agree(problem, {"width": np.array(1.3)})


@pytest.mark.promotes("hyperparameters in a wider type than the state")
@pytest.mark.usefixtures("x64")
def test_per_layer_rates_and_accumulator_dtypes():
    """Rates by layer through `optax.partition`; hyperparameters in a wider type than the state."""

    def optimizer(h):
        rates = {name: optax.sgd(h["rates"][i], 0.9) for i, name in enumerate(("w", "b"))}
        return optax.partition(rates, {"w": "w", "b": "b"})

    problem, _ = regression(optimizer=optimizer, dtype=np.float32)
    hparams = {"rates": jnp.array([0.1, 0.2]), "decay": jnp.array(0.01)}
    reverse, forward = ft.Reverse()(problem, hparams), ft.Forward()(problem, hparams)
    assert reverse.state.params["w"].dtype == jnp.float32
    assert jax.tree.leaves(reverse.state.opt_state)[0].dtype == jnp.float32
    assert_trees_close(forward.grad, reverse.grad, 1e-4, 1e-5)


def test_custom_vjp_in_the_loss_works_in_forward_mode():
    """The inner gradient is taken first, so forward mode meets its rule, not the function."""

    @jax.custom_vjp
    def cube(x):
        return x**3

    cube.defvjp(lambda x: (x**3, x), lambda x, g: (g * 3 * x**2,))
    problem = ft.Problem(
        ft.Training(lambda w, h, b: cube(w - h["a"]) ** 2, optax.sgd(0.05)),
        lambda state, h, b: cube(state.params),
        np.array(0.3, np.float32),
        ft.FullBatch(None, steps=5),
    )
    hparams = {"a": jnp.array(1.5)}
    np.testing.assert_allclose(
        ft.Forward()(problem, hparams).grad["a"],
        ft.Reverse()(problem, hparams).grad["a"],
        rtol=1e-5,
    )


SGD = optax.sgd(0.1, 0.5)


class Halved(ft.Training):
    """Overrides `step`, by way of the inherited one."""

    def step(self, state, hparams, batch):
        state = super().step(state, hparams, batch)
        return state._replace(params=jax.tree.map(lambda w: w / 2, state.params))


class HalvedAround(Wrapper):
    """The same, around another dynamics."""

    def step(self, state, hparams, batch):
        state = self.dynamics.step(state, hparams, batch)
        return state._replace(params=jax.tree.map(lambda w: w / 2, state.params))


def by_hand(problem, hparams):
    """Return the error of a training in which each step halves the weights, in a Python loop."""
    plain = ft.Training(penalised, SGD)
    state = plain.init(problem.init, hparams)
    for _ in range(problem.steps):
        state = plain.step(state, hparams, problem.batches.data)
        state = state._replace(params=jax.tree.map(lambda w: w / 2, state.params))
    return squared_error(state, hparams, problem.validation)


@pytest.mark.parametrize(
    "dynamics",
    [Halved(penalised, SGD), HalvedAround(ft.Training(penalised, SGD))],
    ids=["subclass", "wrapper"],
)
def test_an_overridden_step_counts_in_every_engine(dynamics):
    problem, _ = regression(4, dynamics=dynamics)
    hparams = {"decay": jnp.array(0.1)}
    value, grad = jax.value_and_grad(lambda h: by_hand(problem, h))(hparams)
    for engine in (ft.Reverse(), ft.Reverse("gradients"), ft.Forward()):
        found = engine(problem, hparams)
        np.testing.assert_allclose(found.value, value, rtol=1e-5)
        np.testing.assert_allclose(found.grad["decay"], grad["decay"], rtol=1e-4)


class Ridge(ft.Dynamics):
    """Gradient descent on a ridge regression, with the gradient that `Implicit` asks for."""

    rate: float

    def init(self, params, hparams):
        return ft.TrainState(params, (), None, jnp.array(0), jnp.array(0.0))

    def gradient(self, state, hparams, batch):
        return jax.grad(penalised)(state.params, hparams, batch)

    def step(self, state, hparams, batch):
        down = self.gradient(state, hparams, batch)
        moved = jax.tree.map(lambda w, g: w - self.rate * g, state.params, down)
        return state._replace(params=moved)


def test_an_equal_dynamics_made_anew_has_the_same_program():
    hparams = {"decay": jnp.array(0.1)}
    with compilations("compute") as compiled:
        found = [ft.Implicit()(regression(300, dynamics=Ridge(0.1))[0], hparams) for _ in range(2)]
    assert len(compiled) == 1
    exact = ft.Reverse()(regression(300, dynamics=Ridge(0.1))[0], hparams)
    np.testing.assert_allclose(found[1].grad["decay"], exact.grad["decay"], rtol=1e-3)


def test_a_wrapper_forwards_what_it_does_not_override():
    training = ft.Training(penalised, SGD)
    problem, hparams = regression(dynamics=HalvedAround(training))
    state = problem.start(hparams)
    arguments = state, hparams, problem.batches.data
    assert_trees_close(problem.dynamics.gradient(*arguments), training.gradient(*arguments), 1e-6)
    quick = problem.dynamics.transposable()
    assert type(quick) is HalvedAround
    assert quick.dynamics == training.transposable() != training


class DuckTyped:
    def init(self, params, hparams):
        return params

    def step(self, state, hparams, batch):
        return state


class OfTwo(ft.Dynamics):
    def init(self, params, hparams):
        return params

    def step(self, state, hparams):
        return state


class Named(Ridge):
    names: set = eqx.field(default_factory=lambda: {"a"})


class Halfway(ft.Dynamics):
    def init(self, params, hparams):
        return params


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (DuckTyped, r"the dynamics is a DuckTyped: give .*a subclass of `foretune.Dynamics`"),
        (lambda: penalised, r"the dynamics is a function.*`foretune.Dynamics`"),
        (lambda: optax.sgd(0.1), r"a subclass of `foretune.Dynamics`"),
        (lambda: None, r"the dynamics is None"),
        (lambda: Ridge, r"is a class; give an instance, `Ridge\(...\)`"),
        (OfTwo, r"`dynamics.step\(state, hparams, batch\)` is how it is called"),
        (lambda: Named(0.1), r"a field of Named cannot be hashed"),
        (Halfway, r"abstract"),
    ],
)
def test_objects_that_are_no_dynamics(make, pattern):
    with pytest.raises(TypeError, match=pattern):
        regression(dynamics=make())

"""Problems whose hypergradient is known: two toys with published figures, and ridge regression."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft

ENGINES = [ft.Reverse(), ft.Forward(), ft.Forward(chunk=4)]

TOYS = {
    "A": {
        "start": {"v1": [1.0, 3.0], "v2": [[-1.0, -2.0], [1.0, 0.0]]},
        "hparams": {"weight": [[0.0, 0.0], [0.0, 0.0]], "eta": 0.1, "mu": 0.9},
        "grad": {
            "weight": [[-1.218236439754, -7.309418638524], [1.218236439754, 0.0]],
            "eta": -1.231525944,
            "mu": 4.794621336,
        },
    },
    "B": {
        "start": {"v1": [[1.0, -1.0, 1.0], [2.0, 10.0, 2.0]], "v2": [-1.0, 1.0, 0.2]},
        "hparams": {"weight": [1.0, 1.0, 1.0], "eta": 0.1, "mu": 0.5},
        "grad": {
            "weight": [-0.018393528175, 0.055180584525, 0.003678705635],
            "eta": 0.53872249993,
            "mu": -0.07654224469,
        },
    },
}


@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize("name", TOYS)
@pytest.mark.usefixtures("x64")
def test_toy_problems(name, engine):
    """Momentum on mean(v1^2) + sum(weight v2^2) for 10 steps; E = mean(v1 v2)."""
    start, hparams, expected = (
        {leaf: np.array(value) for leaf, value in TOYS[name][part].items()}
        for part in ("start", "hparams", "grad")
    )

    def loss(params, hparams, batch):
        return jnp.mean(params["v1"] ** 2) + jnp.sum(hparams["weight"] * params["v2"] ** 2)

    def error(state, hparams, batch):
        v1, v2 = jnp.broadcast_arrays(state.params["v1"], state.params["v2"])
        return jnp.mean(v1 * v2)

    problem = ft.Problem(
        ft.Training(loss, lambda h: optax.sgd(h["eta"], h["mu"])),
        error,
        start,
        ft.FullBatch(None, steps=10),
    )
    grad = engine(problem, hparams).grad
    for leaf, answer in expected.items():  # published to 9 decimals at the least
        np.testing.assert_allclose(grad[leaf], answer, rtol=0, atol=1e-9)


def ridge(steps):
    """Gradient descent on the ridge objective, with the validation error of its result."""
    rng = np.random.default_rng(0)
    X, X_val = rng.normal(size=(30, 4)), rng.normal(size=(20, 4))
    w = rng.normal(size=4)
    y, y_val = X @ w + rng.normal(size=30), X_val @ w + rng.normal(size=20)

    def loss(w, hparams, batch):
        x, y = batch
        return 0.5 * jnp.mean((x @ w - y) ** 2) + 0.5 * hparams["rho"] * jnp.sum(w**2)

    def error(state, hparams, batch):
        return 0.5 * jnp.mean((batch[0] @ state.params - batch[1]) ** 2)

    problem = ft.Problem(
        ft.Training(loss, optax.sgd(0.3)),
        error,
        np.zeros(4),
        ft.FullBatch((X, y), steps=steps),
        (X_val, y_val),
    )

    def closed_form(rho):
        """f(rho) at the exact minimiser (X'X/n + rho I)^-1 X'y/n."""
        w = jnp.linalg.solve(X.T @ X / 30 + rho * jnp.eye(4), X.T @ y / 30)
        return 0.5 * jnp.mean((X_val @ w - y_val) ** 2)

    return problem, closed_form


@pytest.mark.parametrize("engine", [ft.Reverse(), ft.Forward()], ids=str)
@pytest.mark.usefixtures("x64")
def test_ridge_regression_tends_to_its_closed_form(engine):
    rho = jnp.array(0.2)
    errors = []
    for steps in (5, 40, 320):
        problem, closed_form = ridge(steps)
        value, exact = jax.value_and_grad(closed_form)(rho)
        result = engine(problem, {"rho": rho})
        errors.append(abs(float(result.grad["rho"] - exact)))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-12
    np.testing.assert_allclose(result.value, value, rtol=1e-12)


@pytest.mark.usefixtures("x64")
def test_first_step_and_initial_state_count():
    """T = 1, s_0 = lambda: f = (lambda - a lambda)^2 / 2, every term by hand."""
    problem = ft.Problem(
        ft.Training(lambda w, h, b: 0.5 * w**2, lambda h: optax.sgd(h["a"])),
        lambda state, h, b: 0.5 * state.params**2 + 3.0 * h["start"],
        lambda h: h["start"],
        ft.FullBatch(None, steps=1),
    )
    a, start = 0.25, 2.0
    for engine in ENGINES:
        value, grad, state = engine(problem, {"a": np.array(a), "start": np.array(start)})
        w = start * (1 - a)
        np.testing.assert_allclose(state.params, w)
        np.testing.assert_allclose(value, 0.5 * w**2 + 3 * start)
        np.testing.assert_allclose(grad["a"], -w * start)
        np.testing.assert_allclose(grad["start"], w * (1 - a) + 3.0)  # the explicit term counts


@pytest.mark.usefixtures("x64")
def test_complex_step_reference():
    """A derivative with no differences: Im f(lambda + i h) / h, to rounding."""
    x = np.array([0.3, -1.2, 0.7])

    def train(rate, decay):
        w, v = np.zeros(3, complex), np.zeros(3, complex)
        for _ in range(20):
            v = 0.8 * v + (w - x) ** 3 + decay * w
            w = w - rate * v
        return np.sum((w - 0.5 * x) ** 2)

    problem = ft.Problem(
        ft.Training(
            lambda w, h, b: jnp.sum((w - x) ** 4) / 4 + 0.5 * h["decay"] * jnp.sum(w**2),
            lambda h: optax.sgd(h["rate"], 0.8),
        ),
        lambda state, h, b: jnp.sum((state.params - 0.5 * x) ** 2),
        np.zeros(3),
        ft.FullBatch(None, steps=20),
    )
    h = 1e-30
    rate, decay = 0.05, 0.1
    expected = {
        "rate": train(rate + 1j * h, decay).imag / h,
        "decay": train(rate, decay + 1j * h).imag / h,
    }
    for engine in ENGINES[:2]:
        grad = engine(problem, {"rate": np.array(rate), "decay": np.array(decay)}).grad
        for leaf, answer in expected.items():
            np.testing.assert_allclose(grad[leaf], answer, rtol=1e-12)

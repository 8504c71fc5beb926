"""The gradient check: agrees where it should, and says where not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft
from foretune._diagnostics.check import finite_difference

from ..problems import penalised, regression, squared_error


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_right_gradient_passes_in_both_precisions(dtype, request, capsys):
    if dtype == np.float64:
        request.getfixturevalue("x64")
    problem, hparams = regression(steps=10, dtype=dtype)
    check = ft.check_hypergradient(problem, hparams)
    assert {row.verdict for row in check.rows} == {"agree"}
    assert capsys.readouterr().out.strip() == str(check)
    assert "hparams['lr']" in str(check)


def wrong_derivative(x):
    """x^2 with a derivative that is 10 % off."""

    @jax.custom_jvp
    def square(x):
        return x**2

    square.defjvp(lambda p, t: (p[0] ** 2, 2.2 * p[0] * t[0]))
    return square(x)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_wrong_derivative_is_named(dtype, request):
    if dtype == np.float64:
        request.getfixturevalue("x64")

    def loss(params, hparams, batch):
        return penalised(params, hparams | {"decay": wrong_derivative(hparams["decay"])}, batch)

    problem, hparams = regression(
        steps=30, dtype=dtype, dynamics=ft.Training(loss, lambda h: optax.sgd(h["lr"]))
    )
    hparams["decay"] = jnp.array(0.5, dtype)
    with pytest.raises(ft.HypergradientMismatch) as error:
        ft.check_hypergradient(problem, hparams, verbose=False)
    message = str(error.value).splitlines()[0]
    assert "hparams['decay']: differs from finite differences" in message
    assert "hparams['lr']" not in message


def test_disagreement_of_the_modes_is_named(monkeypatch):
    problem, hparams = regression()

    class Halved(ft.Reverse):
        def __call__(self, problem, hparams):
            value, grad, state = super().__call__(problem, hparams)
            return ft.Hypergradient(value, grad | {"lr": grad["lr"] / 2}, state)

    monkeypatch.setattr("foretune._diagnostics.check.Reverse", Halved)
    with pytest.raises(ft.HypergradientMismatch, match=r"\['lr'\]: forward and reverse disagree"):
        ft.check_hypergradient(problem, hparams, verbose=False)


def test_noise_is_not_taken_for_an_error():
    """A derivative far below the rounding of the value: unsure, not wrong."""

    def error(state, hparams, batch):
        return 1e4 + 1e-3 * squared_error(state, hparams, batch)

    problem, hparams = regression(objective=error)
    check = ft.check_hypergradient(problem, hparams, verbose=False)
    assert {row.verdict for row in check.rows} == {"unsure"}


def test_hyperparameters_at_zero_are_checked():
    problem, hparams = regression(steps=5)
    check = ft.check_hypergradient(problem, jax.tree.map(jnp.zeros_like, hparams), verbose=False)
    assert {row.verdict for row in check.rows} <= {"agree", "unsure"}


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (np.sin, 1.0),
        (lambda h: np.exp(3 * h), 3.0),
        (lambda h: np.tanh(200 * h), 200.0),  # sharp: the first steps are far outside
        (lambda h: np.sqrt(h + 1e-3), 0.5 / np.sqrt(1e-3)),  # not finite at the first steps
    ],
)
def test_finite_differences_know_their_error(f, expected):
    with np.errstate(invalid="ignore"):
        derivative, error = finite_difference(f, np.finfo(float).eps, 1e-8)
    assert abs(derivative - expected) <= 5 * error
    assert error < 1e-5 * expected

"""What of a problem is state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Literal

import foretune as ft
from foretune._problem.jaxprs import equations


def test_a_start_that_depends_on_hyperparameters_is_state_though_no_step_changes_it():
    class Still(ft.Dynamics):
        def init(self, params, hparams):
            return params

        def step(self, state, hparams, batch):
            return state

    problem = ft.Problem(
        Still(), lambda s, h, _: s["a"] ** 2 + s["b"], lambda h: {"a": h["a"], "b": jnp.array(1.0)},
        ft.FullBatch(None, steps=3),
    )  # fmt: skip
    for engine in (ft.Reverse(), ft.Forward()):
        assert float(engine(problem, {"a": 3.0}).grad["a"]) == 6.0


@jax.custom_jvp
def rows_of(table, places):
    """Return rows of a table, as an embedding does."""
    return table[places]


@rows_of.defjvp
def _(primals, tangents):
    (table, places), (d_table, _) = primals, tangents
    return table[places], d_table[places]


def embedding_loss(rows):
    """Return a loss whose model state is the integer places of the rows."""

    def loss(table, hparams, x, places):
        value = jnp.mean((rows(table, places) @ x - 1) ** 2)
        return value + hparams["decay"] * jnp.sum(table**2), places

    return loss


TABLE, PLACES, X = (
    jnp.linspace(-1.0, 1.0, 12).reshape(4, 3),
    jnp.array([2, 0]),
    jnp.arange(1.0, 4.0),
)


def test_programs_with_literals_that_are_no_numbers():
    """The tangent of an integer is a literal of float0, which cannot be compared with 0."""

    def problem(rows):
        training = ft.Training(embedding_loss(rows), lambda h: optax.sgd(h["lr"]), has_state=True)
        return ft.Problem(
            training, lambda state, h, x: jnp.mean((state.params @ x - 0.5) ** 2),
            (TABLE, PLACES), ft.FullBatch(X, steps=3), X,
        )  # fmt: skip

    hparams = {"lr": jnp.array(0.05), "decay": jnp.array(0.1)}
    gradient = jax.grad(embedding_loss(rows_of), has_aux=True)
    program = jax.make_jaxpr(gradient)(TABLE, hparams, X, PLACES)
    literals = [v for e in equations(program.jaxpr) for v in e.invars if isinstance(v, Literal)]
    assert any(v.aval.dtype == jax.dtypes.float0 for v in literals)
    expected = ft.Reverse()(problem(lambda table, places: table[places]), hparams)
    for engine in (
        ft.Reverse(),
        ft.Reverse("gradients"),
        ft.Reverse(first_order=True),
        ft.Forward(),
    ):
        found = engine(problem(rows_of), hparams)
        np.testing.assert_allclose(found.value, expected.value, rtol=1e-6)
        np.testing.assert_array_equal(found.state.model_state, PLACES)
        if engine != ft.Reverse(first_order=True):
            for name in hparams:
                np.testing.assert_allclose(found.grad[name], expected.grad[name], rtol=1e-4)

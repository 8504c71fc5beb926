"""What of a problem is state: neither stored nor differentiated is what no step changes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Literal

import foretune as ft
from foretune._problem.system import _origins

from ..problems import assert_trees_close


def frozen_problem(steps, optimizer=None, label=None):
    """Return a problem with a large matrix in its model state, or among its parameters, that stays."""
    frozen = jnp.ones((64, 64))

    def loss(params, hparams, batch, model_state):
        hidden = jnp.tanh(batch @ (model_state if label is None else params["frozen"]))
        value = jnp.mean((hidden @ params["w"] / 64) ** 2) + hparams["decay"] * jnp.sum(
            params["w"] ** 2
        )
        return value, model_state

    params = {"w": jnp.ones(64)} | ({} if label is None else {"frozen": frozen})
    return ft.Problem(
        ft.Training(loss, optimizer or optax.sgd(0.1), has_state=True),
        lambda state, h, x: jnp.sum(state.params["w"] ** 2) + jnp.sum(state.model_state[0]),
        (params, frozen),
        ft.FullBatch(jnp.ones((4, 64)), steps=steps),
        jnp.ones(()),
    )


@pytest.mark.parametrize("where", ["model state", "parameters"])
def test_what_no_step_changes_is_not_stored(where):
    optimizer = label = None
    if where == "parameters":
        label = {"w": "trained", "frozen": "frozen"}
        optimizer = optax.partition(
            {"trained": optax.sgd(0.1), "frozen": optax.set_to_zero()}, label
        )
    problem, hparams = frozen_problem(100, optimizer, label), {"decay": jnp.array(0.1)}
    memory = ft.Reverse().lower(problem, hparams).compile().memory_analysis()
    matrix = 64 * 64 * 4
    assert memory.temp_size_in_bytes < 20 * matrix  # not 100 of them
    reverse, forward = ft.Reverse()(problem, hparams), ft.Forward()(problem, hparams)
    assert_trees_close(reverse.grad, forward.grad, 1e-5)
    np.testing.assert_array_equal(reverse.state.model_state, np.ones((64, 64)))


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


def test_a_constant_without_tangent_is_no_zero():
    """Derivatives of integers, as positions in a text are, have the type float0."""
    jaxpr = jax.make_jaxpr(lambda x: x + 0.0)(1.0).jaxpr
    (sum_,) = jaxpr.eqns
    nothing = np.zeros((), jax.dtypes.float0)
    aval = jax.core.ShapedArray((), jax.dtypes.float0)
    odd = sum_.replace(invars=[sum_.invars[0], Literal(nothing, aval)])
    assert len(_origins(jaxpr)) == 1
    assert _origins(jaxpr.replace(eqns=[odd])) == {}

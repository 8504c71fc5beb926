"""What of a problem is state."""

import jax.numpy as jnp

import foretune as ft


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

"""Compiled programs: used again for what does the same, and let go."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft
from foretune._problem.arguments import PROGRAMS, Compiled, filtered
from foretune._problem.equality import reused

from ..problems import momentum, penalised, regression, squared_error


@pytest.mark.parametrize("makes", ["adam", "sgd", "adamw", "lion", "rmsprop"])
def test_optimizers_of_the_same_constants_are_one(makes):
    make = getattr(optax, makes)
    assert reused(make(0.25)) is reused(make(0.25))
    assert reused(make(0.25)) is not reused(make(0.5))


def test_optimizers_that_could_change_are_not():
    rate = [0.1]

    def schedule(count):
        return rate[0]

    masks = {"a": True}
    for make in (
        lambda: optax.sgd(schedule),  # the same function, of what may be another number by now
        lambda: optax.masked(optax.sgd(0.1), masks),
        lambda: optax.sgd(jnp.array(0.1)),
    ):
        assert reused(make()) is not reused(make())


@pytest.mark.promotes("Adam multiplies floats by counts")
@pytest.mark.second_tier
def test_an_optimizer_written_inline_is_compiled_once():
    problem, hparams = regression()
    counted = []

    def compiled(name, *_, **__):
        counted.append(name.endswith("backend_compile_duration"))

    def run():
        ft.minimize(problem, hparams, steps=2, optimizer=optax.adam(0.0625))
        tuner = ft.RealTime(tunable, squared_error, optax.adam(0.0625))
        tuner.run(stream, stream[:1], params=problem.init, hparams=hparams)

    tunable = ft.Training(penalised, momentum)
    x = np.ones((4, 3), np.float32)
    stream = [(x, x[:, 0])] * 20
    run()
    jax.monitoring.register_event_duration_secs_listener(compiled)
    try:
        run()
    finally:
        jax.monitoring.unregister_event_duration_listener(compiled)
    assert sum(counted) == 0


@pytest.mark.second_tier
def test_programs_are_let_go():
    def make(i):
        return lambda x: x + i

    program = Compiled(lambda function, x: function(x), 1)
    first = make(0)
    kept = weakref.ref(first)
    assert program(first, jnp.array(1.0)) == 1
    del first
    for i in range(1, PROGRAMS):
        program(make(i), jnp.array(1.0))
    gc.collect()
    assert kept() is not None
    program(make(PROGRAMS), jnp.array(1.0))
    gc.collect()
    assert kept() is None


def test_filtered_takes_and_returns_what_is_no_array():
    @filtered
    def apply(function, x, times):
        for _ in range(times):
            x = function(x)
        return {"function": function, "x": x, "times": times, "none": None}

    result = apply(jnp.sin, np.ones(2, np.float32), 2)
    assert {**result, "x": None} == {"function": jnp.sin, "x": None, "times": 2, "none": None}
    np.testing.assert_allclose(result["x"], jnp.sin(jnp.sin(jnp.ones(2))), rtol=1e-6)


@pytest.mark.second_tier
def test_an_attribution_with_new_functions_at_each_call_keeps_few_programs():
    problem, hparams = regression(steps=2)
    x, y = problem.validation

    def live():
        gc.collect()
        return len(jax.local_devices()[0].client.live_executables())

    def attributed():
        training = ft.Training(lambda *given: penalised(*given), momentum)
        ft.attribute(problem.replace(dynamics=training), hparams, (x[:2], y[:2]))

    attributed()
    before = live()
    for _ in range(PROGRAMS // 2):
        attributed()
    assert live() - before <= PROGRAMS

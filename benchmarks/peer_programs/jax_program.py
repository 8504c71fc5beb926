"""What a user of JAX writes: `jax.grad` through a `lax.scan` of the training."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import Program, jax_models
from .problems import Spec


def make(spec: Spec, library: str = "") -> Program:
    """Return the hypergradient by reverse mode through the scan, all residuals kept."""
    hypergradient = jax.jit(jax.value_and_grad(response(spec)))
    arguments = (
        jax.tree.map(jnp.asarray, spec.hparams),
        jax_models.parameters(spec),
        jax_models.examples(spec.data),
        None if spec.indices is None else jnp.asarray(spec.indices),
        jax_models.examples(spec.validation),
    )

    def run():
        value, grad = jax.device_get(hypergradient(*arguments))
        return float(value), grad

    def compiled_bytes():
        memory: Any = hypergradient.lower(*arguments).compile().memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    return Program(run, "grad of scan", compiled_bytes)


def response(spec: Spec, checkpoint: bool = False):
    """Return f(h); with `checkpoint`, steps are computed again on the way back."""

    def f(hparams, params, data, indices, validation):
        eta, mu = spec.rates(hparams)

        def step(state, rows):
            w, v = state
            batch = data if rows is None else (data[0][rows], data[1][rows])
            g = jax.grad(jax_models.loss)(w, hparams, batch)
            v = g if v is None else jax.tree.map(lambda v, g: mu * v + g, v, g)
            w = jax.tree.map(lambda w, v: w - eta * v, w, v)
            return (w, v if momentum else None), None

        momentum = "momentum" in hparams or spec.momentum > 0
        start = params, jax.tree.map(jnp.zeros_like, params) if momentum else None
        body = jax.checkpoint(step) if checkpoint else step
        (w, _), _ = lax.scan(body, start, indices, length=spec.steps)
        return jax_models.error(w, validation)

    return f

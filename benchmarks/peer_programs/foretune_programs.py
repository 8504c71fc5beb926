"""foretune, with the engine that its documentation names for the problem, and with `Auto`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

import foretune as ft

from . import Program, jax_models
from .problems import Spec

BUDGET = "4GiB"


def make(spec: Spec, library: str) -> Program:
    """Return the hypergradient by `natural`, or by what `Auto` chooses within 4 GiB."""
    problem, hparams = training(spec)
    auto = library.endswith("Auto")
    engine: Any = ft.Auto(memory=BUDGET) if auto else natural(spec)

    def run():
        found = engine(problem, hparams)
        value, grad = jax.device_get((found.value, found.grad))
        return float(value), grad

    def compiled_bytes():
        memory: Any = engine.lower(problem, hparams).compile().memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    chosen = engine.explain(problem, hparams).engine if auto else engine
    return Program(run, name_of(chosen), compiled_bytes)


def natural(spec: Spec) -> Any:
    """Return the engine for the problem: forward mode for two numbers, reverse mode for more.

    On a GPU a step of softmax regression is so short that the loop itself takes time.
    """
    if "lr" in spec.hparams:
        return ft.Forward()
    short = spec.name == "cleaning" and jax.default_backend() == "gpu"
    return ft.Reverse(unroll=5 if short else 1)


def name_of(engine: Any) -> str:
    """Return an engine as a user writes it."""
    options = {"store": "states", "chunk": None, "unroll": 1}
    given = {k: getattr(engine, k) for k in options if hasattr(engine, k)}
    shown = ", ".join(f"{k}={v!r}" for k, v in given.items() if v != options[k])
    return f"{type(engine).__name__}({shown})"


def training(spec: Spec) -> tuple[ft.Problem, dict[str, jax.Array]]:
    """Return the problem and its hyperparameters."""
    data = jax_models.examples(spec.data)
    if spec.indices is None:
        batches = ft.FullBatch(data, steps=spec.steps)
    else:
        batches = ft.Minibatches(data, jnp.asarray(spec.indices))
    problem = ft.Problem(
        dynamics=ft.Training(jax_models.loss, functools.partial(sgd, spec.lr, spec.momentum)),
        objective=error,
        init=jax_models.parameters(spec),
        batches=batches,
        validation=jax_models.examples(spec.validation),
    )
    return problem, {name: jnp.asarray(h) for name, h in spec.hparams.items()}


def sgd(lr, momentum, hparams):
    """Return the optimizer; without momentum, one that keeps no velocity."""
    momentum = hparams.get("momentum", momentum or None)
    return optax.sgd(hparams.get("lr", lr), momentum)


def error(state, hparams, batch):
    return jax_models.error(state.params, batch)

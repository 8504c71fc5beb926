"""Mixtures that are chosen without a hypergradient.

uniform, by size, X alone     without looking
excess loss                   as DoReMi (Xie et al., NeurIPS 2023): the mixture follows the sources on
                              which a network is furthest above a reference network; it does not know
                              the target
alignment                     as DoGE (Fan et al., ICML 2024) and one-step hypergradients: it follows
                              the sources whose gradient points where the target's does

The last two take the mean of the mixture over a training, and their step is the best of `STEPS`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .model import DRAWS, Language, losses

STEPS = (1.0, 3.0, 10.0)
"""How far, at most, a log weight moves in a training."""
EACH = 4
"""Windows of each source in a step of these two, and as many of the target for each source."""


def fixed(text: Any) -> dict[str, np.ndarray]:
    """Return the mixtures that need no training."""
    alone = np.eye(len(text.names))
    uniform = np.full(len(text.names), 1 / len(text.names))
    return {
        "uniform": uniform,
        "by size": text.sizes,
        **{f"{name} alone": alone[k] for k, name in enumerate(text.names)},
    }


def excess_loss(language: Language, hparams: dict, seed: int) -> list[np.ndarray]:
    """Return a mixture for each of `STEPS`, by the excess over a network trained evenly."""
    reference = language.problem(seed, trial=2).response(hparams)[1].params

    def score(params, windows, _):
        excess = _by_source(language, params, windows) - _by_source(language, reference, windows)
        return jnp.maximum(excess, 0.0)

    return _follow(language, hparams, seed, score)


def alignment(language: Language, hparams: dict, seed: int) -> list[np.ndarray]:
    """Return a mixture for each of `STEPS`, by the gradients' inner product with the target's."""

    def score(params, windows, target):
        wanted = jax.grad(lambda p: jnp.mean(losses(p, target, language.size.heads)))(params)
        # <grad L_k, grad E>, for all sources by one forward derivative of their losses
        return jax.jvp(lambda p: _by_source(language, p, windows), (params,), (wanted,))[1]

    return _follow(language, hparams, seed, score)


def _by_source(language: Language, params: Any, windows: Any) -> Any:
    rows = windows.reshape(-1, windows.shape[-1])
    return jnp.mean(losses(params, rows, language.size.heads).reshape(windows.shape[:2]), 1)


def _follow(language: Language, hparams: dict, seed: int, score: Callable) -> list[np.ndarray]:
    """Train while the mixture is multiplied by exp(step / T * score); return its mean for each step."""
    size, count = language.size, len(language.text.names)
    optimizer = language.optimizer(hparams)
    params = language.params(jax.random.key(seed))

    def advance(step, carry, key):
        params, state, log_w, largest = carry
        share = jax.nn.softmax(log_w)
        keys = jax.random.split(key, 3)
        draws = jax.random.randint(keys[0], (count * EACH,), 0, DRAWS)
        source = jnp.repeat(jnp.arange(count), EACH)
        windows = language.sources.windows(source, draws, size.context).reshape(count, EACH, -1)
        rows = jax.random.randint(keys[1], (count * EACH,), 0, len(language.validation))
        found = score(params, windows, language.validation[rows])
        largest = jnp.maximum(largest, jnp.max(jnp.abs(found)))  # scores have no unit
        log_w = log_w + step / size.steps * found / largest
        batch = language.sources, jax.random.randint(keys[2], (2, size.batch), 0, DRAWS)
        grad = jax.grad(language.loss)(params, {**hparams, "sources": share}, batch)
        updates, state = optimizer.update(grad, state, params)
        return (optax.apply_updates(params, updates), state, log_w, largest), share

    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 3), size.steps)
    start = (params, optimizer.init(params), jnp.zeros(count), jnp.asarray(1e-30))

    @jax.jit
    def mean(step):
        return jnp.mean(jax.lax.scan(partial(advance, step), start, keys)[1], 0)

    return [np.asarray(mean(step), float) for step in STEPS]

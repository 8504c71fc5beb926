"""A byte-level transformer on text from several sources, as a function of its sizes.

Its hyperparameters are the weight of each source in the training loss and the rate of AdamW in each of
ten blocks of steps. The text lies in the folder `text` of the directory that FORETUNE_DATA names; where
there is none, Markov chains generate some.
"""

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft
from experiments.language.model import initial, losses

BLOCKS = 10  # of steps, each with a rate
SMALL: dict[str, Any] = {
    "layers": 2, "width": 32, "context": 16, "batch": 8, "steps": 60, "heads": 2,
    "rate": 0.01, "validation": 32,
}  # fmt: skip
LARGE: dict[str, Any] = {  # 10.8 million weights, for one large GPU
    "layers": 6, "width": 384, "context": 256, "batch": 64, "steps": 200, "heads": 6,
    "rate": 1e-3, "validation": 128,
}  # fmt: skip


def text() -> tuple[np.ndarray, np.ndarray]:
    """Return the sources' bytes, one row each, and those of the target."""
    folder = Path(os.environ.get("FORETUNE_DATA", "")) / "text"
    if "FORETUNE_DATA" in os.environ and folder.is_dir():
        with np.load(folder / "sources.npz") as sources:
            rows = np.stack([sources[name] for name in sorted(sources.files)])
        with np.load(folder / "target-modern-speeches.npz") as target:
            return rows, target["validation"]
    bytes_ = _chains(8)
    return bytes_[1:], bytes_[0]


def _chains(sources: int, chains: int = 1000, length: int = 400) -> np.ndarray:
    """Return the bytes of the target and of sources that are less and less like it."""
    rng = np.random.default_rng(0)
    target, *others = rng.dirichlet(np.full(64, 0.05), (sources + 1, 64))
    far = np.linspace(0, 1, sources)
    tables = [target] + [(1 - a) * target + a * other for a, other in zip(far, others, strict=True)]
    steps = np.cumsum(tables, -1)
    state = rng.integers(0, 64, (sources + 1, chains))
    columns = []
    for _ in range(length):
        columns.append(state)
        rows = steps[np.arange(sources + 1)[:, None], state]
        state = np.minimum((rows < rng.random((sources + 1, chains, 1))).sum(-1), 63)
    return np.stack(columns, -1).reshape(sources + 1, -1).astype(np.uint8)


def language_problem(
    *, layers: int, width: int, context: int, batch: int, steps: int, heads: int,
    warmup: bool, dtype: Any, eps_root: float, rate: float, validation: int,
) -> tuple[ft.Problem, dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Return the problem, hyperparameters and their constraints.

    Args:
        layers, width, context, batch, steps, heads: the sizes, with `steps` a multiple of ten.
        warmup: whether rates are times a factor that rises over a tenth of the steps, then falls as
            a cosine.
        dtype: what the training loss is computed in.
        eps_root: of AdamW; the smaller, the rougher the response.
        rate: that all blocks start from.
        validation: windows of the target that the error is the mean of.
    """
    sources, target = text()

    def windows(row, count):  # all over the text
        starts = np.linspace(0, len(row) - context - 1, count).astype(int)
        return row[starts[:, None] + np.arange(context + 1)]

    each = min(2 * steps * batch // len(sources), sources.shape[1] // context)
    examples = np.concatenate([windows(row, each) for row in sources])
    source = np.repeat(np.arange(len(sources)), each).astype(np.int32)
    keys = jax.random.split(jax.random.key(0), 2)

    def loss(params, hparams, batch):
        share = hparams["sources"] / jnp.sum(hparams["sources"])
        return jnp.mean(len(sources) * share[batch[1]] * losses(params, batch[0], heads))

    def rates(t, lr):
        t = jnp.asarray(t)
        factor = jnp.minimum(1.0, BLOCKS * (t + 1) / steps) * (1 + jnp.cos(jnp.pi * t / steps)) / 2
        return lr[jnp.minimum(t // (steps // BLOCKS), BLOCKS - 1)] * (factor if warmup else 1.0)

    training = ft.Training(
        loss, lambda h: optax.adamw(lambda t: rates(t, h["lr"]), eps_root=eps_root)
    )
    problem = ft.Problem(
        training if dtype == np.float32 else training.in_precision(dtype),
        lambda state, hparams, examples: jnp.mean(losses(state.params, examples, heads)),
        initial(keys[0], layers, width, context),
        ft.Minibatches.shuffled((examples, source), batch_size=batch, steps=steps, key=keys[1]),
        windows(target, validation),
    )
    hparams = {"sources": jnp.ones(len(sources)), "lr": jnp.full(BLOCKS, rate)}
    return problem, hparams, {"sources": ft.Log(), "lr": ft.Log()}

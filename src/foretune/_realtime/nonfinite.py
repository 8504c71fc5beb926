"""Errors where the start, the data or the training of a real-time run is not finite."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._engines.nonfinite import NonFiniteError, first_nonfinite, origin_of
from .._files.digests import on_host
from .._problem.checks import describe
from .._problem.problem import Problem
from .._problem.training import TrainState

GROWN = "With Z = 0 the window is finite: Z had grown before. Give `RealTime` a smaller `discount`."
KEPT = "The state before the window is kept, in the attribute `state` of this error."


def start_of(train: PyTree, hparams: PyTree) -> tuple[PyTree, PyTree]:
    """Return what must be finite; an optimizer's infinite accumulators need not, and are 0."""

    def tolerated(leaf):
        return jnp.where(jnp.isinf(leaf), 0, leaf) if eqx.is_inexact_array(leaf) else leaf

    begun = jax.tree.map(tolerated, train)
    return begun._replace(params=train.params) if isinstance(train, TrainState) else begun, hparams


def check_start(train: PyTree, hparams: PyTree) -> None:
    """Raise where the initial parameters or hyperparameters are not finite."""
    name = "" if isinstance(train, TrainState) else "params"  # their paths: `params['w']` in both
    if found := _fault(train, hparams, name):
        raise NonFiniteError(
            f"not finite: {found.removeprefix('.')} Every window from there would be rolled back."
        )


def explain_fault(problem: Problem, train: PyTree, hparams: PyTree, window: int) -> str:
    """Return the message for a window that failed, from the training state before it."""
    if found := _fault(train, hparams, "state.train"):
        return f"not finite: what window {window} (counted from 0) begins with. {found}"
    for i in range(problem.steps):
        x = jax.tree.map(lambda leaf, i=i: leaf[i], problem.batches.xs)
        if found := _entries(problem.batches.batch(x), "batch"):
            where = f"window {window}, minibatch {i} of {problem.steps} (both counted from 0)"
            return f"not finite: the data. In {where}, {found} {KEPT}"
    if found := _entries(problem.validation, "validation"):
        where = f"window {window} (counted from 0)"
        return f"not finite: the validation data of {where}. {found} {KEPT}"
    origin = origin_of(problem, hparams, jax.tree.map(jnp.ones_like, hparams), otherwise=GROWN)
    return f"not finite: window {window} (counted from 0). {origin} {KEPT}"


def _fault(train: PyTree, hparams: PyTree, name: str) -> str | None:
    return _entries(hparams, "hparams") or _entries(start_of(train, hparams)[0], name)


def _entries(tree: PyTree, name: str) -> str | None:
    """Return which leaf of a tree is not finite, and in how many entries, or None."""
    found = first_nonfinite(on_host(tree), name)
    if found is None:
        return None
    path, leaf, where = found
    return f"{path} ({describe(leaf)}) is not finite in {where.sum()} of {where.size} entries."

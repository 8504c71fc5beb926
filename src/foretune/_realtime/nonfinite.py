"""What is said where a real-time run meets what is not finite: in its start, its data, its training."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from .._engines.nonfinite import NonFiniteError, first_nonfinite, origin_of
from .._files.digests import on_host
from .._problem.checks import describe, named_leaves
from .._problem.problem import Problem
from .._problem.training import TrainState

GROWN = (
    "From this state with Z = 0 the window is finite: the derivative Z had grown over the windows "
    "before. Give `RealTime` a smaller `discount`."
)


def not_finite(
    train: PyTree, hparams: PyTree, name: str = "state.train"
) -> dict[str, Bool[Array, "..."]]:
    """Return, by path, where a start holds what no training can begin with.

    An optimizer may begin with an infinite accumulator, but parameters may not.
    """
    params = train.params if isinstance(train, TrainState) else ()
    numbers = named_leaves(hparams, "hparams") | named_leaves(params, f"{name}.params")
    rest = {path: leaf for path, leaf in named_leaves(train, name).items() if path not in numbers}
    masks = {path: ~jnp.isfinite(x) for path, x in numbers.items() if eqx.is_inexact_array(x)}
    return masks | {path: jnp.isnan(x) for path, x in rest.items() if eqx.is_inexact_array(x)}


def check_start(train: PyTree, hparams: PyTree) -> None:
    """Raise where the initial parameters or hyperparameters are not finite."""
    name = "" if isinstance(train, TrainState) else "params"  # their paths: `params['w']` in both
    if found := _first(train, hparams, name):
        raise NonFiniteError(
            f"not finite: {found.removeprefix('.')} A run cannot start from there: every window "
            "would be rolled back."
        )


def explain_fault(problem: Problem, train: PyTree, hparams: PyTree, window: int) -> str:
    """Return the message for a window that failed, from the training state before it."""
    if begun := _first(train, hparams, "state.train"):
        return f"not finite: what window {window} (counted from 0) begins with. {begun}"
    return _explain_window(problem, hparams, window)


def _explain_window(problem: Problem, hparams: PyTree, window: int) -> str:
    kept = "The state before the window is kept, in the attribute `state` of this error."
    for i in range(problem.steps):
        x = jax.tree.map(lambda leaf, i=i: leaf[i], problem.batches.xs)
        if found := first_nonfinite(jax.device_get(problem.batches.batch(x)), "batch"):
            path, leaf, where = found
            return (
                f"not finite: the data. In window {window}, minibatch {i} of {problem.steps} (both "
                f"counted from 0), {path} ({describe(leaf)}) is not finite in {where.sum()} of "
                f"{where.size} entries. {kept}"
            )
    if found := first_nonfinite(jax.device_get(problem.validation), "validation"):
        path, leaf, where = found
        return (
            f"not finite: the validation data of window {window} (counted from 0): {path} "
            f"({describe(leaf)}) in {where.sum()} of {where.size} entries. {kept}"
        )
    everywhere = jax.tree.map(jnp.ones_like, hparams)
    origin = origin_of(problem, hparams, everywhere, otherwise=GROWN)
    return f"not finite: window {window} (counted from 0). {origin} {kept}"


def _first(train: PyTree, hparams: PyTree, name: str) -> str | None:
    """Return which leaf of a start is not finite, or None."""
    for path, where in not_finite(train, hparams, name).items():
        if wrong := int(jnp.sum(where)):
            leaf = (named_leaves(hparams, "hparams") | named_leaves(train, name))[path]
            values, at = on_host((leaf, where))
            shown = ", ".join(map(str, np.unique(values[at]).tolist()))
            return f"{path} ({describe(leaf)}) is {shown} in {wrong} of {where.size} entries."
    return None

"""What is said where a real-time run meets what is not finite: in its start, its data, its training."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from .._engines.nonfinite import NonFiniteError, explain_window
from .._outer.run import on_host
from .._problem.checks import describe, named_leaves
from .._problem.problem import Problem
from .._problem.training import TrainState


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
    return explain_window(problem, hparams, window)


def _first(train: PyTree, hparams: PyTree, name: str) -> str | None:
    """Return which leaf of a start is not finite, or None."""
    for path, where in not_finite(train, hparams, name).items():
        if wrong := int(jnp.sum(where)):
            leaf = (named_leaves(hparams, "hparams") | named_leaves(train, name))[path]
            values, at = on_host((leaf, where))
            shown = ", ".join(map(str, np.unique(values[at]).tolist()))
            return f"{path} ({describe(leaf)}) is {shown} in {wrong} of {where.size} entries."
    return None

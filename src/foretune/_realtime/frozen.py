"""Parameters that are not trained: they stand beside the data, so that they are no state, with no Z."""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from .._engines.nonfinite import NonFiniteError
from .._problem.checks import as_arrays, describe, named_leaves

Trainable = PyTree | Callable[[PyTree], PyTree]  # of True and False


class Beside(NamedTuple):
    """A batch, and beside it the parameters that are not trained."""

    data: PyTree
    frozen: PyTree


def check_trainable(trainable: Trainable) -> None:
    """Raise unless it is a prefix of parameters with True and False, or a function that makes one."""
    if not callable(trainable) or _are_flags(trainable):
        _check_flags(trainable)


def divide(params: PyTree, trainable: Trainable | None) -> tuple[PyTree, PyTree]:
    """Return the parameters that are trained, with None for the others, and the others."""
    if trainable is None:
        return params, None
    params, flags = as_arrays(params, "params"), trainable
    if callable(flags) and not _are_flags(flags):  # an Equinox model of flags can be called too
        flags = flags(params)
        _check_flags(flags)
    try:
        stays = jax.tree.map(
            lambda flag, part: jax.tree.map(lambda x: eqx.is_inexact_array(x) and not flag, part),
            flags,
            params,
        )
    except ValueError as problem:
        raise ValueError(
            f"tuned(trainable=...) is no prefix of the parameters: {problem!s:.300}"
        ) from None
    frozen, trained = eqx.partition(params, stays)
    for path, leaf in named_leaves(frozen, "params").items():
        if not isinstance(leaf, Tracer) and not jnp.all(jnp.isfinite(leaf)):
            raise NonFiniteError(f"not finite: {path} ({describe(leaf)}), which is not trained.")
    if not any(map(eqx.is_inexact_array, jax.tree.leaves(trained))):
        raise ValueError(
            "tuned(trainable=...) leaves nothing to train: no floating-point array has a True."
        )
    return trained, frozen


def unite(params: PyTree, frozen: PyTree) -> PyTree:
    """Return all parameters."""
    return params if frozen is None else eqx.combine(params, frozen)


def parted(data: PyTree) -> tuple[PyTree, PyTree]:
    """Return the data, and the parameters beside them, or None."""
    return (data.data, data.frozen) if isinstance(data, Beside) else (data, None)


def _are_flags(tree: PyTree) -> bool:
    return all(isinstance(leaf, bool | np.bool_) for leaf in jax.tree.leaves(tree))


def _check_flags(flags: PyTree) -> None:
    leaves = named_leaves(flags, "trainable")
    wrong = {path: leaf for path, leaf in leaves.items() if not isinstance(leaf, bool | np.bool_)}
    if not leaves or wrong:
        path, leaf = next(iter(wrong.items()), ("trainable", flags))
        raise TypeError(
            "tuned(trainable=...) is a prefix of the parameters with True and False, or a function "
            f"from the parameters to it; {path} is {describe(leaf)}."
        )

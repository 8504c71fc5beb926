"""The state of a real-time run, the settings of its tuner, and the derivative Z that it carries."""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._constraints.base import check_constraints
from .._outer.update import Outer
from .._problem.checks import describe, named_leaves
from .._problem.dynamics import Continued, Dynamics
from .._problem.problem import Problem
from .._problem.sharding import TANGENTS, Placement
from .._problem.training import Training, TrainState

Objective = Callable[..., Array] | dict[str, Callable[..., Array]]


class RealTimeState(NamedTuple):
    """Where a real-time run is: all that decides how it continues.

    Attributes:
        train: the state of the dynamics, a `TrainState` for `Training`.
        hparams: the current hyperparameters.
        Z: the derivative of the training state, its floating-point leaves with a leading axis of m.
        opt_state: the outer optimizer's state.
        window: the number of windows done, those that were rolled back included.
        first: the error before the first window.
        highest: the highest loss at the beginning of a window so far.
        skipped_last: whether the last minibatch was skipped.
        dropped: the number of windows in which a derivative was dropped.
    """

    train: PyTree
    hparams: PyTree[Float[Array, "..."]]
    Z: PyTree
    opt_state: PyTree
    window: Int[Array, ""]
    first: Float[Array, ""]
    highest: Float[Array, ""]
    skipped_last: Bool[Array, ""]
    dropped: Int[Array, ""]


class TunerSettings(eqx.Module):
    """What a `RealTime` is made of, as its program sees it."""

    dynamics: Dynamics
    objective: Objective
    optimizer: optax.GradientTransformation
    constraints: PyTree
    discount: float = eqx.field(static=True)
    rollback: float | None = eqx.field(static=True)
    chunk: int | None = eqx.field(static=True)
    mesh: Mesh | None = eqx.field(static=True)

    def problem(
        self, train: PyTree, window: PyTree, validation: PyTree, carried: tuple[str, ...] = ()
    ) -> Problem:
        """Return the training over a window as a problem of its own.

        `carried` are the paths of the hyperparameters that `train` may depend on.
        """
        dynamics = Continued(self.dynamics, carried)
        return Problem(dynamics, self.objective, train, window, validation)

    def outer(self, hparams: PyTree) -> Outer:
        """Return the outer step on these hyperparameters."""
        return Outer(self.optimizer, check_constraints(self.constraints, hparams))


def carried(state: RealTimeState) -> tuple[str, ...]:
    """Return the paths of the hyperparameters that the training state may depend on."""
    names = named_leaves(state.hparams, "hparams")
    if state.window > 0:
        return tuple(names)
    flat, unravel = ravel_pytree(state.hparams)  # at first Z says it
    norms = jax.tree.leaves(unravel(column_norms(state.Z).astype(flat.dtype)))
    return tuple(name for name, norm in zip(names, norms, strict=True) if jnp.any(norm != 0))


def directions_of(hparams: PyTree) -> tuple[PyTree, Callable[[Array], PyTree]]:
    """Return the unit directions in lambda, and the function from a vector to hyperparameters."""
    flat, unravel = ravel_pytree(hparams)
    return jax.vmap(unravel)(jnp.eye(flat.size, dtype=flat.dtype)), unravel


def loss_of(state: PyTree) -> Float[Array, "..."] | None:
    """Return the field `loss` of a training state, or of the columns of Z; None where it has none."""
    loss = getattr(state, "loss", None)
    return loss if eqx.is_inexact_array(loss) else None


def column_norms(Z: PyTree) -> Float[Array, " m"]:
    """Return the norms of the columns of Z without the loss, in single precision at least."""
    if loss_of(Z) is not None:
        Z = eqx.tree_at(lambda columns: columns.loss, Z, None)
    wide = jax.tree.map(lambda z: z.astype(np.promote_types(z.dtype, np.float32)), Z)
    return jax.vmap(optax.tree.norm)(wide)


def check_state(settings: TunerSettings, state: RealTimeState) -> None:
    """Raise where a state is not one of this tuner: its optimizers' states, and the columns of Z."""
    expected = {"opt_state": jax.eval_shape(settings.outer(state.hparams).init, state.hparams)}
    dynamics, train = settings.dynamics, state.train
    if isinstance(dynamics, Training) and isinstance(train, TrainState):
        begun = (train.params, train.model_state) if dynamics.has_state else train.params
        expected["train"] = eqx.filter_eval_shape(dynamics.init, begun, state.hparams)
    if state.Z is not None:
        m = ravel_pytree(state.hparams)[0].size
        moving = eqx.filter(train, eqx.is_inexact_array)
        expected["Z"] = jax.tree.map(lambda s: jax.ShapeDtypeStruct((m, *s.shape), s.dtype), moving)
    for name, tree in expected.items():
        now, old = (shapes_of(part, f"state.{name}") for part in (getattr(state, name), tree))
        if path := differing(now, old):
            raise ValueError(
                f"this state does not fit this tuner: {path} is {now.get(path, 'absent')}, it should "
                f"be {old.get(path, 'absent')}. Begin with `init` of this one."
            )


def shapes_of(tree: PyTree, name: str) -> dict[str, str]:
    """Return what the leaves are, by path."""
    return {path: describe(leaf) for path, leaf in named_leaves(tree, name).items()}


def differing(expected: dict[str, str], found: dict[str, str]) -> str | None:
    """Return the first path at which two results of `shapes_of` differ."""
    paths = (path for path in expected | found if expected.get(path) != found.get(path))
    return next(paths, None)


def check_not_donated(tree: PyTree) -> None:
    """Raise where an `update` has reused the memory of a state."""
    arrays = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    if any(not isinstance(array, Tracer) and array.is_deleted() for array in arrays):
        why = "this state was given to an `update` that reused its memory (`donate=True`)"
        raise ValueError(f"{why}. Continue from the state that it returned, or leave `donate` out.")


def placed(state: RealTimeState, mesh: Mesh) -> RealTimeState:
    """Return the state on a mesh, with the columns of Z split over `tangents`, if it has that axis."""
    m, size = ravel_pytree(state.hparams)[0].size, mesh.shape.get(TANGENTS, 1)
    if m % size:
        what = f"the {m} columns of Z, one for each hyperparameter, cannot be split evenly over"
        raise ValueError(f"RealTime(mesh=...): {what} the {size} devices of the axis 'tangents'.")
    others = Placement(mesh).whole(state._replace(Z=None))
    columns = PartitionSpec(TANGENTS) if TANGENTS in mesh.shape else PartitionSpec()
    return others._replace(Z=jax.device_put(state.Z, NamedSharding(mesh, columns)))

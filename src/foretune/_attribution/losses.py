"""The loss of each example, of a loss that is their mean.

That their mean is the loss is tried on the first minibatch, at parameters that are changed a little.
What the user's losses leave out must be the same for other examples: a penalty on the parameters.
"""

from collections.abc import Callable
from typing import TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._problem.arguments import filtered
from .._problem.batches import Minibatches
from .._problem.checks import check_leading_axis, check_signature, describe_tree
from .._problem.jaxprs import equations
from .._problem.problem import Problem
from .._problem.system import make_system
from .._problem.training import Training, TrainState
from .._problem.validation import noting

Losses: TypeAlias = Callable[..., PyTree]  # called as a loss is: the losses of the examples
LossAndGradient: TypeAlias = tuple[Float[Array, ""], PyTree]

COUPLED = 1e-3  # relative difference from which on a mean of losses is not the loss,
LOW = 0.05  # and where it is computed below single precision
ROUNDING = 100  # units in the last place up to which it is the loss
NOT_A_MEAN = (
    "the loss of the first minibatch is {loss:.6g}, but the mean of the losses of its examples, each "
    "as a batch of one, is {mean:.6g} (and their gradients differ by {off:.2g} of their length). Where "
    "examples depend on each other (batch normalisation), draw random numbers (dropout) or are summed, "
    "give `losses=`, which returns the array of B losses."
)
NOT_THE_LOSSES = (
    "`losses` are not those that the loss is the mean of: the loss less their mean, a penalty on the "
    "parameters that is the same whatever the examples, is {one:.6g} on the first minibatch and "
    "{two:.6g} on the first half of it twice."
)


class WeightedLoss(eqx.Module):
    """The loss of a minibatch with a weight for each of its examples."""

    loss: Callable[..., PyTree]
    losses: Losses | None
    has_state: bool = eqx.field(static=True)
    more: bool = eqx.field(static=True)
    weights: Float[Array, " b"]

    def __call__(self, *given: PyTree, **key: Array) -> PyTree:
        l, model_state = self.each(*given, **key)
        w = self.weights.astype(l.dtype)
        if self.more:
            loss = self.loss(*given, **key)
            loss, model_state = loss if self.has_state else (loss, None)
            value = loss + jnp.sum((w - 1) * l) / w.size
        else:
            value = jnp.sum(w * l) / w.size
        return (value, model_state) if self.has_state else value

    def each(
        self, params: PyTree, hparams: PyTree, batch: PyTree, *state: PyTree, **key: Array
    ) -> tuple[Float[Array, " b"], PyTree]:
        """Return the losses of the examples, and the model state."""
        if self.losses is not None:
            result = self.losses(params, hparams, batch, *state, **key)
            l, model_state = result if self.has_state else (result, None)
            B = self.weights.size
            if getattr(l, "shape", None) != (B,) or not jnp.issubdtype(l.dtype, jnp.floating):
                needed = f"a number for each of the {B} examples of a minibatch, of shape ({B},)"
                returned = describe_tree(l, "losses")
                raise TypeError(f"`losses` must return {needed}; it returned\n{returned}")
            return l, model_state

        def one(example):
            row = jax.tree.map(lambda leaf: leaf[None], example)
            result = self.loss(params, hparams, row, *state, **key)
            return result[0] if self.has_state else result

        whole = self.loss(params, hparams, batch, *state, **key) if self.has_state else (None, None)
        return jax.vmap(one)(batch), whole[1]


def with_weights(
    training: Training, losses: Losses | None, more: bool, weights: Float[Array, " b"]
) -> Training:
    """Return the training on a minibatch with a weight for each of its examples."""
    loss = WeightedLoss(training.loss, losses, training.has_state, more, weights)
    return eqx.tree_at(lambda training: training.loss, training, loss)


def check_losses(
    problem: Problem, training: Training, hparams: PyTree, losses: Losses | None
) -> tuple[bool, jnp.dtype]:
    """Return whether the loss is more than the mean of the losses, and its type, or raise."""
    if losses is not None:
        state = ", model_state" if training.has_state else ""
        key = ", key=..." if training.key is not None else ""
        form = f"losses(params, hparams, batch{state}{key})"
        check_signature(losses, form, ("key",) if key else ())
    batch = problem.batches.first()
    B = check_leading_axis(batch, "the minibatch")
    if isinstance(problem.batches, Minibatches) and problem.batches.indices.shape[1] != B:
        raise ValueError(f"gather makes {B} rows of {problem.batches.indices.shape[1]} indices.")
    call = "init(params, hparams) of the dynamics"
    with noting(call, params=problem.init, hparams=hparams):
        state = problem.start(hparams)
    what = "losses" if losses is not None else "the loss of a batch of one (give `losses=`)"
    with noting(what, batch=batch), jax.default_matmul_precision("highest"):
        L, M = _at(training, losses, state, hparams, batch)
        half = jax.tree.map(lambda leaf: leaf[np.arange(B) // 2], batch)
        halves = _at(training, losses, state, hparams, half) if losses is not None else (L, M)

    def wrong(apart):
        far = float(apart.max())
        return far > LOW or (far > COUPLED and not _is_low(problem, hparams))

    apart = _apart(L, M, L, M)
    if losses is None and wrong(apart):
        loss, mean, off = float(L[0]), float(M[0]), float(apart[1])
        raise ValueError(NOT_A_MEAN.format(loss=loss, mean=mean, off=off))
    if losses is not None:
        rest, other = (jax.tree.map(jnp.subtract, *both) for both in ((L, M), halves))
        if wrong(_apart(rest, other, L, halves[0])):
            raise ValueError(NOT_THE_LOSSES.format(one=float(rest[0]), two=float(other[0])))
    dtype = L[0].dtype
    return bool(apart.max() > ROUNDING * float(jnp.finfo(dtype).eps)), dtype


@filtered
def _at(
    training: Training, losses: Losses | None, state: TrainState, hparams: PyTree, batch: PyTree
) -> tuple[LossAndGradient, LossAndGradient]:
    """Return the loss and the mean of the losses, at parameters that are changed a little."""
    state = state._replace(params=_changed(state.params))

    def at(training: Training) -> LossAndGradient:
        weights, _, objective = training.objective(state, hparams, batch)
        (value, _), gradient = jax.value_and_grad(objective, has_aux=True)(weights)
        return value, gradient

    ones = jnp.ones(len(jax.tree.leaves(batch)[0]))
    return at(training), at(with_weights(training, losses, False, ones))


@filtered
def _apart(
    a: LossAndGradient, b: LossAndGradient, one: LossAndGradient, other: LossAndGradient
) -> Float[Array, "2"]:
    """Return how far values, and gradients, are apart, relative to others; not where not finite."""
    parts = zip(jax.tree.map(jnp.subtract, a, b), one, other, strict=True)
    ratios = [_length(d) / (_length(x) + _length(y)) for d, x, y in parts]
    return jnp.nan_to_num(jnp.stack(ratios), nan=0.0, posinf=jnp.inf)


def _is_low(problem: Problem, hparams: PyTree) -> bool:
    """Return whether a step computes below single precision."""

    def step(hparams):
        system = make_system(problem, hparams)
        x = jax.tree.map(lambda leaf: leaf[0], system.xs)
        return system.step(system.initial(hparams), hparams, x)

    program = jax.make_jaxpr(step)(hparams).jaxpr
    found = {str(getattr(v.aval, "dtype", "")) for e in equations(program) for v in e.outvars}
    return not found.isdisjoint({"bfloat16", "float16"})


def _changed(params: PyTree) -> PyTree:
    """Return the parameters with about a tenth of their size added; zeros get a hundredth of 1."""
    leaves, treedef = jax.tree.flatten(params)
    for i, leaf in enumerate(leaves):
        if eqx.is_inexact_array(leaf):
            size = jnp.sqrt(jnp.mean(jnp.abs(leaf).astype(float) ** 2))
            waves = jnp.cos(7 * jnp.arange(leaf.size, dtype=float) + i).reshape(leaf.shape)
            leaves[i] = leaf + (jnp.where(size > 0, size / 10, 0.01) * waves).astype(leaf.dtype)
    return treedef.unflatten(leaves)


def _length(tree: PyTree) -> Float[Array, ""]:
    squares = (jnp.sum(jnp.abs(leaf).astype(float) ** 2) for leaf in jax.tree.leaves(tree))
    return jnp.sqrt(sum(squares, jnp.zeros(())))

"""A problem as a function of the weights of its training examples alone.

`Training` on the mean loss of a minibatch of B examples becomes training on

    (1/B) sum_i w_i l_i(params),

the same at w = 1. A weight of 0 leaves an example out, and the others count as before. Where the loss
is the mean of the l_i and something more (a penalty on the parameters), it becomes loss + (1/B) sum_i
(w_i - 1) l_i. A problem whose own hyperparameters hold the weights stays as it is.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from .._problem.batches import Batches, FullBatch, Minibatches
from .._problem.checks import check_hparams, check_leading_axis, describe, named_leaves
from .._problem.dynamics import Wrapper
from .._problem.problem import Problem
from .._problem.training import Training
from .._problem.warn import warn
from .losses import Losses, check_losses, with_weights
from .queries import Queries


class Seen(NamedTuple):
    """The weights of the examples of one minibatch, where those of all are expected."""

    weights: Float[Array, " b"]


class Numbered(Batches):
    """The minibatches of a problem, each with the numbers of its examples, or of their groups."""

    batches: FullBatch | Minibatches
    groups: Int[Array, " n"] | None

    @property
    def xs(self) -> PyTree:
        return self.batches.xs

    @property
    def steps(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.batches.steps

    def numbers(self, x: PyTree) -> Int[Array, " b"]:
        """Return the numbers of a minibatch's examples."""
        if x is None:  # the full batch
            x = jnp.arange(jax.tree.leaves(self.batches.data)[0].shape[0])
        return x if self.groups is None else self.groups[x]

    def batch(self, x: PyTree) -> tuple[PyTree, Int[Array, " b"]]:
        return self.batches.batch(x), self.numbers(x)


class Fixed(eqx.Module):
    """The user's hyperparameters as a function of the weights: all others are fixed."""

    hparams: PyTree
    own: str | None = eqx.field(static=True)  # the weights' name among them, where they are

    def __call__(self, weights: PyTree) -> PyTree:
        return self.hparams if self.own is None else {**self.hparams, self.own: weights[self.own]}


class OfWeights(Wrapper):
    """A dynamics as a function of the weights, which are among its own hyperparameters."""

    hparams: Fixed
    # the initial parameters as a function of the hyperparameters, where they are one
    begin: Callable[[PyTree], PyTree] | None = eqx.field(static=True)

    def init(self, params: PyTree, hparams: PyTree) -> PyTree:
        hparams = self.hparams(hparams)
        return self.dynamics.init(self.begin(hparams) if self.begin else params, hparams)

    def step(self, state: PyTree, hparams: PyTree, batch: PyTree) -> PyTree:
        return self.dynamics.step(state, self.hparams(hparams), batch)


class Weighted(OfWeights):
    """Training with weights that are added to its loss."""

    losses: Losses | None  # None: the loss of batches of one
    more: bool = eqx.field(static=True)  # whether the loss is more than the mean of the losses
    name: str = eqx.field(static=True)

    def step(self, state: PyTree, hparams: PyTree, batch: PyTree) -> PyTree:
        batch, numbers = batch
        weights = hparams[self.name]
        weights = weights.weights if isinstance(weights, Seen) else weights[numbers]
        assert isinstance(self.dynamics, Training)
        training = with_weights(self.dynamics, self.losses, self.more, weights)
        return training.step(state, self.hparams(hparams), batch)


def weighted_problem(
    problem: Problem,
    hparams: PyTree,
    queries: Queries,
    name: str,
    losses: Losses | None,
    groups: object,
    share: float = 1.0,
) -> tuple[Problem, dict[str, Float[Array, " n"]], Queries]:
    """Return problem and queries as functions of the weights alone, and the weights."""
    own = isinstance(hparams, dict) and name in hparams
    if not jax.tree.leaves(hparams) and hparams != {}:
        raise TypeError(f"hparams is {describe(hparams)}, with no number: give `{{}}` for none.")
    hparams = check_hparams(hparams) if jax.tree.leaves(hparams) else hparams
    begin = problem.init if problem.starts_from_function else None
    batches = problem.batches
    if own:
        weights = hparams[name]
        if not eqx.is_array(weights) or weights.ndim != 1:
            raise ValueError(
                f"hparams[{name!r}] is {describe(weights)}, but weights of examples are a vector. Name "
                'them otherwise, `weights="example"` say.'
            )
        if share != 1 or losses is not None or groups is not None:
            raise ValueError(
                "attribute's `losses`, `groups` and `share` are for weights that are added to the "
                f"loss; hparams[{name!r}] holds weights already."
            )
        fixed = Fixed({k: leaf for k, leaf in hparams.items() if k != name}, name)
        dynamics = OfWeights(problem.dynamics, fixed, begin)
    else:
        training = problem.dynamics
        if not isinstance(training, Training):
            raise TypeError(
                f"the dynamics is {describe(training)}: weights of examples can be added to "
                f"`foretune.Training` alone. Make them a hyperparameter, hparams[{name!r}], a vector."
            )
        n = examples_of(batches)
        for path, leaf in named_leaves(hparams, "hparams").items():
            if getattr(leaf, "shape", None) == (n,):
                warn(
                    f"{path} has an entry for each of the {n} training examples. If these are their "
                    f"weights, name them, `weights=...`; weights {name!r} of 1 are added."
                )
        numbers = as_groups(groups, n)
        fixed = Fixed(hparams, None)
        more, dtype = check_losses(problem, training, hparams, losses)
        dynamics = Weighted(training, fixed, begin, losses, more, name)
        count = n if numbers is None else int(numbers.max()) + 1
        weights = jnp.full(count, share, np.promote_types(dtype, np.float32))
        batches = Numbered(batches, numbers)  # pyright: ignore[reportCallIssue]
    asked = Queries(queries.objectives, queries.validation, queries.stacked, fixed)
    wanted = problem.replace(
        dynamics=dynamics,
        objective=asked.chosen(np.array([0])).mean,
        init=None if begin else problem.init,
        batches=batches,
    )
    return wanted, {name: weights}, asked


def examples_of(batches: Batches) -> int:
    """Return n, the number of training examples, or raise where they cannot be told apart."""
    if isinstance(batches, FullBatch):
        return check_leading_axis(batches.data, "FullBatch's data")
    if not isinstance(batches, Minibatches):
        raise TypeError(
            f"the batches are {describe(batches)}, which do not number the examples. Give "
            "`FullBatch(data, steps)` or `Minibatches(data, indices)`."
        )
    if batches.indices.ndim != 2:
        found = describe(batches.indices)
        raise ValueError(f"Minibatches' indices are {found}, not of the shape (T, batch size).")
    if batches.gather is not None:
        return int(batches.indices.max()) + 1
    return jax.tree.leaves(batches.data)[0].shape[0]


def as_groups(groups: object, n: int) -> Int[Array, " n"] | None:
    """Return the group of each example, or raise unless they are whole numbers from 0 on."""
    if groups is None:
        return None
    found = np.asarray(groups)
    whole = np.issubdtype(found.dtype, np.integer) and not np.ma.is_masked(groups)
    if found.ndim != 1 or not whole:
        raise TypeError(f"groups must be one integer for each of {n} rows, got {describe(found)}.")
    if len(found) != n:
        raise ValueError(f"groups has {len(found)} entries for {n} training examples.")
    if found.min() < 0 or found.max() >= n or not np.bincount(found).all():
        raise ValueError(
            f"groups are numbered 0, 1, ... without gaps; these run from {found.min()} to {found.max()}"
            ": take `np.unique(groups, return_inverse=True)[1]`."
        )
    return jnp.asarray(found, jnp.int32)

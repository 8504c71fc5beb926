"""Do scores predict what happens? The linear datamodelling score.

Subsets of the examples are drawn at random, and the training is run again without each. For a query k,
the changes of its error are compared with those predicted, minus the sums of the scores that were left
out, by Spearman's rank correlation: 1 where the subsets come in the predicted order.

Reference: Park et al., TRAK: Attributing model behavior at scale, ICML 2023, section 3.
"""

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, PyTree

from .._diagnostics.slopes import side_by_side
from .._engines.nonfinite import NonFiniteError
from .._problem.arguments import filtered
from .._problem.checks import check_count, check_key
from .._problem.problem import Problem
from .._problem.system import make_system
from .queries import Queries

RESAMPLES = 200  # for the standard error


class Validation(NamedTuple):
    """What `Attribution.validate` returns; prints as a line.

    `correlations` has the linear datamodelling score of each query, `mean` is theirs, `standard_error`
    how much that would vary with other subsets and queries; `predicted` and `actual` are the changes of
    the errors.
    """

    predicted: Float[np.ndarray, "K m"]
    """The change of each error that the scores predict for each subset that is left out."""
    actual: Float[np.ndarray, "K m"]
    """The change of each error in a training without that subset."""
    correlations: Float[np.ndarray, " K"]
    """Spearman's rank correlation of the two, for each query."""
    mean: float
    standard_error: float
    left_out: Float[np.ndarray, "m n"]
    """The weights that each subset takes away: those of its examples, and 0 for the others."""

    def of(self, scores: ArrayLike) -> "Validation":
        """Return the validation of other scores, K x n, by the same trainings.

        >>> import foretune as ft, numpy as np
        >>> left_out = np.eye(3)
        >>> ours = ft.Validation(
        ...     np.zeros((1, 3)), np.array([[3.0, 1.0, 2.0]]), np.zeros(1), 0.0, 0.0, left_out)
        >>> ours.of([[-3.0, -1.0, -2.0]]).mean
        1.0
        """
        scores = np.asarray(scores)
        shape = len(self.actual), self.left_out.shape[1]
        if scores.shape != shape:
            raise ValueError(
                f"the scores have the shape {scores.shape}, but {shape[0]} queries and {shape[1]} "
                "weights were validated."
            )
        return _compared(-scores @ self.left_out.T, self.actual, self.left_out)

    def __str__(self) -> str:
        K, m = self.actual.shape
        return (
            f"linear datamodelling score {self.mean:.3f} +- {self.standard_error:.3f} "
            f"({K} {'query' if K == 1 else 'queries'}, {m} subsets left out)"
        )

    __repr__ = __str__


class Retraining(NamedTuple):
    """The training as a function of the weights of its examples, and the queries."""

    problem: Problem
    name: str
    weights: Float[np.ndarray, " n"]
    queries: Queries
    chunk: int | None
    """How many trainings run side by side; None for as many as memory allows."""

    def errors(self, kept: Bool[np.ndarray, "m n"]) -> Float[np.ndarray, "m K"]:
        """Return the errors of the queries, trained on each of the subsets that are kept."""
        m, point = len(kept), {self.name: jnp.asarray(self.weights)}
        chunk = min(m, self.chunk or side_by_side(self.problem, point))
        found = []
        for i in range(0, m, chunk):
            rows = np.minimum(np.arange(i, i + chunk), m - 1)  # the last chunk is filled up
            points = {self.name: jnp.asarray(self.weights * kept[rows])}
            found.append(np.asarray(_errors(self.problem, points, self.queries))[: m - i])
        return np.concatenate(found)


def validate(
    scores: Float[np.ndarray, "K n"],
    errors: Float[np.ndarray, " K"] | None,
    retraining: Retraining,
    subsets: int,
    drop: float,
    key: Array | None,
) -> Validation:
    """Return the validation of scores by trainings without subsets.

    `errors` are those of the training on all examples, where they are known.
    """
    check_count(subsets, f"validate(subsets={subsets!r:.60})")
    if subsets < 3:
        raise ValueError(f"validate(subsets={subsets}): a correlation needs 3 or more.")
    if not isinstance(drop, int | float) or not 0 < drop < 1:
        raise ValueError(f"validate(drop={drop!r:.60}): give a part between 0 and 1, 0.1 say.")
    if retraining.chunk is not None:
        check_count(retraining.chunk, f"validate(chunk={retraining.chunk!r:.60})")
    key = jax.random.key(0) if key is None else key
    check_key(key, "the key of validate")
    w = retraining.weights
    count = min(max(round(drop * len(w)), 1), len(w) - 1)
    keys = jax.random.split(key, subsets)
    order = jax.vmap(lambda key: jax.random.permutation(key, len(w)))(keys)
    kept = np.asarray(order >= count)
    all_examples = np.ones((1, len(w)), bool)
    whole, *parts = retraining.errors(np.concatenate([all_examples, kept]))
    if errors is not None and np.median(abs(whole - errors)) > 0.1 * np.median(abs(errors)):
        warnings.warn(
            f"trained on all examples, the errors are {np.median(whole):.4g} in the median; those of "
            f"the attribution are {np.median(errors):.4g}. Give validate the problem, hparams and "
            "queries that attribute had.",
            stacklevel=3,
        )
    actual = (np.stack(parts) - whole).T
    if not np.isfinite(actual).all():
        bad = int((~np.isfinite(actual)).any(0).sum())
        raise NonFiniteError(
            f"the errors of {bad} of {subsets} trainings without {count} of {len(w)} examples are not "
            "finite: the training diverges without them. Leave out fewer, `drop=0.1` say."
        )
    left_out = (w * ~kept).astype(w.dtype)
    return _compared(-scores @ left_out.T, actual, left_out)


def _compared(predicted: np.ndarray, actual: np.ndarray, left_out: np.ndarray) -> Validation:
    correlations = spearman(predicted, actual)
    deviation = _standard_error(predicted, actual)
    mean = float(correlations.mean())
    return Validation(predicted, actual, correlations, mean, deviation, left_out)


@filtered
def _errors(problem: Problem, points: PyTree, queries: Queries) -> Float[Array, "c K"]:
    def at(weights):
        system = make_system(problem, weights)
        state = system.restore(system.run(weights))
        return queries.each(lambda objective, data: objective(state, weights, data))

    if len(jax.tree.leaves(points)[0]) == 1:  # a training of one, without a batch axis
        return at(jax.tree.map(lambda leaf: leaf[0], points))[None]
    return jax.vmap(at)(points)


def spearman(a: Float[np.ndarray, "K m"], b: Float[np.ndarray, "K m"]) -> Float[np.ndarray, " K"]:
    """Return the rank correlations of rows; 0 where a row is constant.

    >>> spearman(np.array([[1.0, 2.0, 9.0]]), np.array([[0.0, 5.0, 5.0]])).round(3)
    array([0.866])
    """
    from scipy.stats import rankdata

    a, b = (rankdata(x, axis=1) - (x.shape[1] + 1) / 2 for x in (a, b))
    lengths = np.sqrt((a**2).sum(1) * (b**2).sum(1))
    return (a * b).sum(1) / np.where(lengths > 0, lengths, 1)


def _standard_error(predicted: np.ndarray, actual: np.ndarray) -> float:
    """Return the standard deviation of the mean with queries and subsets drawn anew from these."""
    rng, (K, m) = np.random.default_rng(0), actual.shape
    means = []
    for _ in range(RESAMPLES):
        k, j = rng.integers(K, size=K), rng.integers(m, size=m)
        chosen = np.ix_(k, j)
        means.append(spearman(predicted[chosen], actual[chosen]).mean())
    return float(np.std(means))

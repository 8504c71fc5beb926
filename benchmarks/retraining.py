"""Do scores predict what happens? The linear datamodelling score, by training again.

Subsets of the examples are drawn at random, and the training is run again without each. For a query k,
the changes of its error are compared with those predicted, minus the sums of the scores that were left
out, by Spearman's rank correlation: 1 where the subsets come in the predicted order.

Reference: Park et al., TRAK: Attributing model behavior at scale, ICML 2023, section 3.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree
from scipy.stats import rankdata

from foretune import Attribution, Problem
from foretune._attribution.queries import Queries, as_queries
from foretune._attribution.weighted import weighted_problem
from foretune._diagnostics.slopes import side_by_side
from foretune._problem.arguments import filtered
from foretune._problem.system import make_system

RESAMPLES = 200  # for the standard error


class Validation(NamedTuple):
    """What `validate` returns; prints as a line."""

    predicted: Float[np.ndarray, "K m"]
    """The change of each error that the scores predict for each subset that is left out."""
    actual: Float[np.ndarray, "K m"]
    """The change of each error in a training without that subset."""
    correlations: Float[np.ndarray, " K"]
    """Spearman's rank correlation of the two, for each query: the linear datamodelling score."""
    left_out: Float[np.ndarray, "m n"]
    """The weights that each subset takes away: those of its examples, and 0 for the others."""

    @property
    def mean(self) -> float:
        """Of the correlations."""
        return float(self.correlations.mean())

    @property
    def standard_error(self) -> float:
        """Of the mean, with queries and subsets drawn anew from these."""
        rng, (K, m) = np.random.default_rng(0), self.actual.shape
        means = []
        for _ in range(RESAMPLES):
            chosen = np.ix_(rng.integers(K, size=K), rng.integers(m, size=m))
            means.append(spearman(self.predicted[chosen], self.actual[chosen]).mean())
        return float(np.std(means))

    def of(self, scores: Float[np.ndarray, "K n"]) -> "Validation":
        """Return the validation of other scores by the same trainings."""
        predicted = -np.asarray(scores) @ self.left_out.T
        return Validation(predicted, self.actual, spearman(predicted, self.actual), self.left_out)

    def __str__(self) -> str:
        K, m = self.actual.shape
        score = f"{self.mean:.3f} +- {self.standard_error:.3f}"
        return f"linear datamodelling score {score} ({K} queries, {m} subsets left out)"


def validate(
    found: Attribution,
    problem: Problem,
    hparams: PyTree,
    queries: PyTree,
    *,
    subsets: int = 50,
    drop: float = 0.5,
    key: Array | None = None,
    chunk: int | None = None,
    **options: PyTree,
) -> Validation:
    """Train again without random subsets of the examples: do the scores predict the errors?

    Args:
        found: the scores.
        problem: as given to `attribute`, and so are `hparams` and `queries`.
        hparams: its hyperparameters.
        queries: the errors that are explained.
        subsets: how many trainings, each without a part of the examples (or groups) drawn anew.
        drop: that part.
        key: the random key of the draws.
        chunk: how many trainings run side by side; by default as many as memory allows.
        options: `weights`, `losses` and `groups`, as given to `attribute`.
    """
    name = options.get("weights", "weight")
    added = options.get("losses"), options.get("groups")
    asked = as_queries(problem, queries)
    wanted, point, asked = weighted_problem(problem, hparams, asked, name, *added)
    weights = np.asarray(point[name])
    n = len(weights)
    assert found.scores.shape == (asked.count, n), "give what `attribute` was given"
    keys = jax.random.split(jax.random.key(0) if key is None else key, subsets)
    order = jax.vmap(lambda key: jax.random.permutation(key, n))(keys)
    kept = np.asarray(order >= min(max(round(drop * n), 1), n - 1))
    kept = np.concatenate([np.ones((1, n), bool), kept])
    chunk = chunk or side_by_side(wanted, point)
    whole, *parts = _retrained(wanted, name, weights, asked, kept, min(len(kept), chunk))
    actual = (np.stack(parts) - whole).T
    assert np.isfinite(actual).all(), "a training without a part of the examples diverges"
    left_out = (weights * ~kept[1:]).astype(weights.dtype)
    return Validation(actual, actual, np.ones(len(actual)), left_out).of(found.scores)


def _retrained(
    problem: Problem,
    name: str,
    weights: Float[np.ndarray, " n"],
    queries: Queries,
    kept: Bool[np.ndarray, "m n"],
    chunk: int,
) -> Float[np.ndarray, "m K"]:
    """Return the errors of the queries, trained on each of the subsets that are kept."""
    found, m = [], len(kept)
    for i in range(0, m, chunk):
        rows = np.minimum(np.arange(i, i + chunk), m - 1)  # the last chunk is filled up
        points = {name: jnp.asarray(weights * kept[rows])}
        found.append(np.asarray(_errors(problem, points, queries))[: m - i])
    return np.concatenate(found)


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
    """Return the rank correlations of rows; 0 where a row is constant."""
    a, b = (rankdata(x, axis=1) - (x.shape[1] + 1) / 2 for x in (a, b))
    lengths = np.sqrt((a**2).sum(1) * (b**2).sum(1))
    return (a * b).sum(1) / np.where(lengths > 0, lengths, 1)

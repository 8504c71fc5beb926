"""Exact data attribution: how each training example moved each error, through the whole training."""

from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from .._engines.base import AbstractEngine, Hypergradient
from .._engines.memory import parse_bytes
from .._engines.nonfinite import NonFiniteError, explain, first_nonfinite, when_checked
from .._engines.reverse import Reverse
from .._files.digests import digest
from .._outer.callbacks import Callback
from .._outer.checks import check_callbacks
from .._outer.drive import started
from .._outer.run import Run
from .._problem.checks import check_count, check_mesh, check_outside_programs, describe
from .._problem.draws import Drawn, as_problem
from .._problem.mean import Mean
from .._problem.problem import Problem, ProblemLike, validated
from .._problem.warn import warn
from .attribution import Attribution
from .chunks import chunks_in
from .losses import Losses
from .queries import Queries, as_queries
from .sweep import sweep
from .weighted import weighted_problem

PART = 0.1  # of the examples, whose leaving out is judged by the size of the scores
BEYOND = 100  # times the mean error


def attribute(
    problem: ProblemLike,
    hparams: PyTree,
    queries: PyTree,
    *,
    key: Array | None = None,
    weights: str = "weight",
    losses: Losses | None = None,
    groups: object = None,
    share: float = 1.0,
    engine: AbstractEngine | None = None,
    chunk: int | None = None,
    memory: int | str | None = None,
    mesh: Mesh | None = None,
    folder: object = None,
    callbacks: Sequence[Callback] = (),
) -> Attribution:
    """Return d error_k / d weight_i for K queries and n training examples, exactly.

    Each training example has a weight in the mean loss of its minibatches, (1/B) sum_i w_i l_i, which
    is 1. Where a score is negative, the example helps; to leave a few out changes the error by about
    minus their scores. It costs one training, and for each query about as much as a hypergradient.

    Args:
        problem: the problem, of `Training` on `Minibatches` or `FullBatch`; or a `draw(key)` of it.
        hparams: its hyperparameters (`{}` where it has none), which stay as they are.
        queries: what to explain: K validation examples, a pytree like the problem's `validation` with
            a leading axis of K, each with the problem's objective on it as a batch of one. Or a list
            of K objectives `f(state, hparams, validation)`.
        key: of the draw.
        weights: the name of the hyperparameter that holds the weights of the examples, a vector; any
            dynamics will do then. Where `hparams` has none of that name, they are added to the loss.
        losses: called as the loss is, it returns the array of B losses whose mean, but for a penalty on
            the parameters, is the loss (with `has_state`, the pair of them and the model state). By
            default the loss of each example as a batch of one.
        groups: the group of each training example, 0, 1, ...: one weight, and one score, per group.
        share: the weight of all examples at which derivatives are taken; 0.5 suits halves of the data.
        engine: `Reverse(...)`, whose `store` says what is stored of the training.
        chunk: the most queries that go back through the training together, 64 by default.
        memory: what a program may need at most: bytes, or a text like "4GiB". By default what is free.
        mesh: `foretune.mesh(queries=8)`, say: each device takes its share of the queries, beside a
            training of its own. Give the problem as `foretune.shard(problem, mesh)`.
        folder: where finished chunks are written; the same call continues there.
        callbacks: `foretune.Progress()`, say. A run's `step` counts queries.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> x, y = jnp.array([1.0, 1.0, 2.0]), jnp.array([1.0, 1.0, 8.0])
    >>> problem = ft.Problem(
    ...     dynamics=ft.Training(
    ...         lambda w, h, batch: jnp.mean((w * batch[0] - batch[1]) ** 2), optax.sgd(0.1)),
    ...     objective=lambda state, h, batch: jnp.mean((state.params * batch[0] - batch[1]) ** 2),
    ...     init=jnp.array(0.0), batches=ft.FullBatch((x, y), steps=50))
    >>> found = ft.attribute(problem, {}, (jnp.array([3.0]), jnp.array([3.0])))
    >>> found.scores.round(1)
    array([[-12., -12.,  24.]], dtype=float32)
    >>> found.bottom(1)  # the most harmful
    array([[2]])
    """
    reverse = Reverse() if engine is None else engine
    if not isinstance(reverse, Reverse) or reverse.store in ("everything", "gradients"):
        why = "errors go back through one training in chunks"
        how = '`foretune.Reverse()`, or where memory is short `Reverse(store="segments")`'
        raise ValueError(f"attribute(engine={engine!r:.60}): {why}. Give {how}.")
    if chunk is not None:
        check_count(chunk, f"attribute(chunk={chunk!r:.60})")
    if not isinstance(share, int | float | np.floating) or not 0 < share <= 1:
        raise ValueError(f"attribute(share={share!r:.60}): give a share above 0, up to 1.")
    if mesh is not None:
        check_mesh(mesh, "attribute(mesh=...)", "queries")
    check_callbacks(callbacks)
    if saving := [describe(callback) for callback in callbacks if callback.resumes]:
        raise TypeError(f"attribute saves its own chunks: give `folder=` instead of {saving[0]}.")
    memory = None if memory is None else parse_bytes(memory, "attribute")
    one = one_training(problem, key, hparams)
    asked = as_queries(one, queries)
    wanted, point, asked = weighted_problem(one, hparams, asked, weights, losses, groups, share)
    program, K = validated(wanted, point), asked.count
    w = np.asarray(point[weights])
    found = Attribution(np.zeros((K, len(w)), w.dtype), np.zeros(K, w.dtype), float(share))
    run = Run(K, None, None, dict)
    with chunks_in(folder, lambda: _fingerprint(wanted, point, asked)) as chunks:
        missing = chunks.read(found.scores, found.errors)
        run.put(step=K - len(missing))
        with started(callbacks, run):
            swept = sweep(reverse, program, asked, missing, chunk, memory, mesh)
            for rows, errors, scores in swept:
                found.errors[rows], found.scores[rows] = errors, scores
                if when_checked() is not False:
                    _check_finite(wanted, point, hparams, asked, rows, found)
                chunks.write(rows, scores, errors)
                step = run.step + len(rows)
                run.move({"step": step, "error": float(errors.mean())}, step=step)
                for callback in callbacks:
                    callback.step(run)
    if when_checked() is not False:
        _warn_of_size(found)
    return found


def one_training(problem: ProblemLike, key: Array | None, hparams: PyTree) -> Problem:
    """Return the problem, or raise unless it is one training with an error at its end."""
    check_outside_programs("attribute", problem if isinstance(problem, Problem) else None, hparams)
    given = as_problem(problem, key)
    one = cast(Problem, given.problem() if isinstance(given, Drawn) else given)
    if isinstance(one, Mean):
        raise TypeError("attribute explains one training, but the problem is a `Mean` of several.")
    if one.trajectory:
        raise ValueError("attribute explains errors at the end; the problem averages its error.")
    return one


def _fingerprint(problem: Problem, weights: PyTree, queries: Queries) -> dict[str, object]:
    """Return what tells one attribution from another; functions cannot be compared."""
    return {
        "the queries": digest(queries),
        "the weights": digest(weights),
        "the training data, minibatches and groups": digest(problem.batches),
        "the initial parameters": digest(problem.init),
        "the hyperparameters, keys and other arrays of the dynamics": digest(problem.dynamics),
    }


def _check_finite(
    problem: Problem,
    weights: PyTree,
    hparams: PyTree,
    queries: Queries,
    rows: np.ndarray,
    found: Attribution,
) -> None:
    """Raise where an error or a score is not finite, and say since which step."""
    finite = np.isfinite(found.scores[rows]).all(1) & np.isfinite(found.errors[rows])
    if finite.all():
        return
    if fault := first_nonfinite(jax.device_get(hparams), "hparams"):
        raise NonFiniteError(f"{fault[0]} itself is not finite.")
    k = int(rows[np.argmin(finite)])
    problem = problem.replace(objective=queries.chosen(np.array([k])).mean)
    grad = jax.tree.map(lambda leaf: jnp.asarray(found.scores[k], leaf.dtype), weights)
    result = Hypergradient(jnp.asarray(found.errors[k]), grad, None)
    raise NonFiniteError(f"query {k}: {explain(problem, weights, result)}")


def _warn_of_size(found: Attribution) -> None:
    """Warn where leaving out a random tenth is predicted to move errors far beyond their size."""
    variance = PART * (1 - PART) * np.sum(found.scores.astype(np.float64) ** 2, 1)
    moved, size = float(np.sqrt(variance.mean())), float(np.abs(found.errors).mean())
    if moved > BEYOND * size > 0:
        what = f"a random tenth of the examples errors of {size:.2g} would move by {moved:.2g}"
        why = "the training is chaotic, and the scores say nothing. docs/guides/trust.md has what helps"
        warn(f"without {what}: {why}.", RuntimeWarning)

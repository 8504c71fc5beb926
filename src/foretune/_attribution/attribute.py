"""Exact data attribution: how each training example moved each error, through the whole training."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._engines.base import Hypergradient
from .._engines.memory import parse_bytes
from .._engines.nonfinite import NonFiniteError, explain, when_checked
from .._engines.reverse import Reverse
from .._files.digests import digest
from .._outer.checks import check_callbacks
from .._outer.drive import started
from .._outer.run import Run
from .._problem.checks import check_count, check_flag, check_mesh, check_outside_programs, describe
from .._problem.mean import Mean
from .._problem.problem import Problem, validated
from .attribution import Attribution
from .doubts import warn_first, warn_of_size
from .parts import Parts
from .queries import as_queries, chosen, is_functions, with_query
from .sweep import MOST, Spread, backward, ends, fitting, forward
from .weighted import HeldObjective, weighted_problem


def attribute(
    problem: Problem,
    hparams: PyTree,
    queries: Any,
    *,
    weights: str = "weight",
    losses: Any = None,
    groups: Any = None,
    keep: Any = 1.0,
    trust: bool = False,
    engine: Any = None,
    chunk: Any = None,
    memory: Any = None,
    mesh: Any = None,
    folder: Any = None,
    callbacks: Any = (),
) -> Attribution:
    """Return d error_k / d weight_i for K queries and n training examples, exactly.

    Each training example has a weight in the mean loss of its minibatches, (1/B) sum_i w_i l_i, which
    is 1. A score says what becomes of the error of a query as that weight grows: where it is negative,
    the example helps. To leave a few examples out changes the error by about minus their scores. The
    derivative goes through every step of the training as it was: its minibatches, optimizer and random
    numbers. It costs one training, and for each query about as much as a hypergradient.

    Args:
        problem: the problem; its dynamics is `Training`, its batches `Minibatches` or `FullBatch`.
        hparams: its hyperparameters (`{}` where it has none), which are held.
        queries: what to explain: K validation examples, a pytree like the problem's `validation` with
            a leading axis of K. The error of each is the problem's objective on it as a batch of one.
            Or a list of K objectives `f(state, hparams, validation)`.
        weights: the name of the hyperparameter that holds the weights of the examples, a vector, where
            the problem has one: the scores are then its gradients, where it is, and any dynamics will
            do. Where `hparams` has no entry of that name, weights of 1 are added to the loss.
        losses: called as the loss is, it returns the array of B losses that the loss is the mean of;
            with `has_state`, the pair of them and the model state. By default the loss of each example
            as a batch of one; that their mean is the loss is checked. A penalty on the parameters is
            best left out here: by default each example has its share of it.
        groups: the group of each training example, 0, 1, ...: one weight, and one score, per group.
        keep: the weight of all examples at which the derivatives are taken. To see what leaving out a
            large part does, give the share that is kept: 0.5 is halfway between with and without, and
            predicts trainings on half of the data better than 1 does. `errors` are those there.
        trust: whether `foretune.trust` is asked first, about the mean error of the queries, and a
            warning says where scores may mislead. Costs a hypergradient and some tens of trainings.
            In any case there is a warning where scores are far beyond the errors.
        engine: `Reverse(...)`, whose `store` says what is kept of the training.
        chunk: the most queries that go back through the training together, 64 by default.
        memory: what a program may need at most: bytes, or a text like "4GiB". By default what is free.
        mesh: `foretune.mesh(queries=8)`, say: each device takes its share of the queries, beside a
            training of its own. Give the problem as `foretune.shard(problem, mesh)`.
        folder: where finished chunks are written. A call with the same folder, problem and queries
            continues there.
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
    engine = Reverse() if engine is None else engine
    _check(problem, hparams, weights, engine, chunk, callbacks)
    _check_options(keep, trust, mesh)
    memory = None if memory is None else parse_bytes(memory, "attribute")
    queries, K = as_queries(problem, queries)
    one = with_query(problem, queries, 0)
    wanted, point = weighted_problem(one, hparams, weights, losses, groups, keep)
    arrays, structure = validated(wanted, point)
    w = np.asarray(point[weights])
    scores, errors = np.zeros((K, len(w)), w.dtype), np.zeros(K, w.dtype)
    run, spread = Run(K, None, None, dict), Spread(mesh)
    with Parts(folder, lambda: _fingerprint(wanted, point, queries, K)) as parts:
        missing = parts.read(scores, errors)
        run.begin_at(K - len(missing))
        with started(callbacks, run):
            if len(missing):
                if trust:
                    warn_first(wanted, point, queries, engine)
                most = min(len(missing), chunk or MOST * spread.devices)
                c = fitting(engine, structure, arrays, most, memory, spread)
                s_T, stored = forward(engine, structure, arrays)
                for rows in np.split(missing, range(c, len(missing), c)):
                    filled = np.append(rows, np.repeat(rows[-1], c - len(rows)))  # for one program
                    E, adjoint = ends(wanted, point, s_T, spread.place(chosen(queries, filled)))
                    found = backward(engine, structure, arrays, stored, spread.place(adjoint))
                    errors[rows] = np.asarray(E)[: len(rows)]
                    scores[rows] = np.asarray(found)[: len(rows)]
                    if when_checked() is not False:
                        _check_finite(wanted, point, queries, rows, Attribution(scores, errors))
                    parts.write(rows, scores[rows], errors[rows])
                    _report(run, callbacks, rows, errors)
    if when_checked() is not False:
        warn_of_size(scores, errors)
    return Attribution(scores, errors, float(keep))


def _check(problem: Any, hparams: Any, name: Any, engine: Any, chunk: Any, callbacks: Any) -> None:
    if not isinstance(problem, Problem):
        raise TypeError(
            f"attribute's problem must be a `foretune.Problem`, got {describe(problem)}."
        )
    check_outside_programs("attribute", problem, hparams)
    if isinstance(problem, Mean):
        raise TypeError(
            "attribute explains one training; the problem is a `CrossValidated`, the mean of several. "
            "Give the problem of one fold."
        )
    if problem.trajectory:
        raise ValueError(
            "attribute explains errors at the end of the training, but the problem averages its error "
            "over all steps. Give `problem.replace(trajectory=False)`."
        )
    if not isinstance(name, str):
        raise TypeError(f"attribute(weights={name!r:.60}): give the name of a hyperparameter.")
    if not isinstance(engine, Reverse):
        raise TypeError(
            f"attribute(engine={engine!r:.60}): the adjoints of many errors go back through one "
            "training by reverse mode. Give `foretune.Reverse()`, or where memory is short "
            '`foretune.Reverse(store="segments")`.'
        )
    if engine.store in ("everything", "gradients"):
        raise ValueError(
            f"attribute(engine=Reverse(store={engine.store!r})): what is inside the steps is not kept "
            "between chunks of queries, and computing it again costs little beside the adjoints of "
            'many. Give `foretune.Reverse()` or `foretune.Reverse(store="segments")`.'
        )
    if chunk is not None:
        check_count(chunk, f"attribute(chunk={chunk!r:.60})")
    check_callbacks(callbacks)
    for callback in callbacks:
        if callback.resumes:
            raise TypeError(
                f"attribute keeps its own parts: give `folder=` instead of {describe(callback)}."
            )


def _check_options(keep: Any, trust: Any, mesh: Any) -> None:
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise ValueError(f"attribute(keep={keep!r:.60}): give a share above 0, up to 1.")
    check_flag(trust, f"attribute(trust={trust!r:.60})")
    if mesh is not None:
        check_mesh(mesh, "attribute(mesh=...)", "queries")


def _fingerprint(problem: Problem, weights: PyTree, queries: Any, K: int) -> dict[str, Any]:
    """Return what tells one attribution from another; functions cannot be compared."""
    batches = problem.batches
    return {
        "the number of queries": K,
        "the queries": digest(queries),
        "the number of weights": [leaf.size for leaf in jax.tree.leaves(weights)],
        "the weights": digest(weights),
        "the training data, minibatches and groups": digest(batches),
        "the initial parameters": digest(problem.init),
        "the hyperparameters, keys and other arrays of the dynamics": digest(problem.dynamics),
    }


def _check_finite(
    problem: Problem, weights: PyTree, queries: Any, rows: np.ndarray, found: Attribution
) -> None:
    """Raise where an error or a score is not finite, and say since which step."""
    finite = np.isfinite(found.scores[rows]).all(1) & np.isfinite(found.errors[rows])
    if finite.all():
        return
    k = int(rows[np.argmin(finite)])
    if is_functions(queries):
        problem = problem.replace(objective=HeldObjective(queries[k], problem.dynamics.hparams))
    else:
        problem = with_query(problem, queries, k)
    grad = jax.tree.map(lambda leaf: jnp.asarray(found.scores[k], leaf.dtype), weights)
    result = Hypergradient(jnp.asarray(found.errors[k]), grad, None)
    raise NonFiniteError(f"query {k}: {explain(problem, weights, result)}")


def _report(run: Run, callbacks: Any, rows: np.ndarray, errors: np.ndarray) -> None:
    step = run.step + len(rows)
    run.count(step, {"step": step, "error": float(errors[rows].mean())})
    for callback in callbacks:
        callback.step(run)

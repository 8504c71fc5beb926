"""One driver for all runs: a stepper's steps, and all that happens beside them.

A step is, in this order: the stepper's own work; `evaluate`; `score`; the record is noted; callbacks;
stopping rules; and the callbacks that can resume a run, which thus save whether it is over.
"""

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, ArrayLike, Bool, Float, PyTree

from .._engines.nonfinite import NonFiniteError
from .._files.digests import on_host
from .._files.records import Record
from .._problem.arguments import filtered
from .._problem.checks import describe, named_leaves
from .._problem.warn import warn
from .callbacks import Callback
from .run import Best, Interrupt, Result, Run

Score = Callable[[Record], object]
Metrics = Callable[[PyTree, PyTree], dict[str, Array]]


class Evaluation(NamedTuple):
    """What a step has found."""

    carry: PyTree  # all that decides how the run continues
    hparams: PyTree  # those that the value belongs to
    value: PyTree
    grad: PyTree
    state: PyTree
    record: dict[str, PyTree]  # all but the step and the metrics
    counts: bool | Bool[Array, ""] = True  # whether it may be the best
    before: dict[str, PyTree] | None = None  # records of steps made on the way, NumPy's columns
    arguments: tuple[PyTree, PyTree] | None = None  # of `evaluate`: state and hparams, if not these


class Stepper(abc.ABC):
    """What makes the steps of a run."""

    first: int  # the step of the first evaluation

    def begin(self, run: Run) -> None:  # noqa: B027 (a hook)
        """Do what is to be done before the first step of this process, when the run is resumed."""

    @abc.abstractmethod
    def advance(self, run: Run, step: int) -> Evaluation | str:
        """Make a step from the run's carry; or return why there are no more."""

    def noted(self, run: Run) -> None:  # noqa: B027 (a hook)
        """Do what is to be done when a step has been noted, before the callbacks."""

    @abc.abstractmethod
    def result(self, run: Run) -> tuple[PyTree, PyTree, PyTree]:
        """Return the hyperparameters, the value and the state that the run ends with."""


def drive(
    run: Run,
    stepper: Stepper,
    *,
    callbacks: Sequence[Callback],
    rules: Sequence[Callable[[Run], object]] = (),
    evaluate: Metrics | None = None,
    score: Score | None = None,
) -> Result:
    """Make the steps of a run until it ends, and return its result."""
    run.rules = rules
    run.coarse = evaluate is score is None and all(callback.coarse for callback in callbacks)
    run.coarse &= all(getattr(rule, "pauses", False) for rule in rules)
    with Interrupt() as run.interrupt, started(callbacks, run):
        run.stopped = run.ended or _all_done(run)
        if run.stopped is None:
            stepper.begin(run)
        while run.stopped is None:
            step = stepper.first if run.begins else run.step + 1
            found = _found(stepper, run, step)
            if isinstance(found, str):
                run.stopped = found
                break
            _note(run, step, found, evaluate, score)
            stepper.noted(run)
            for callback in callbacks:
                if not callback.resumes:
                    callback.step(run)
            run.stopped = _reason(run)
            for callback in callbacks:
                if callback.resumes:
                    callback.step(run)
        hparams, value, state = stepper.result(run)
    return Result(hparams, value, state, run.history, run.best, run.stopped)


@contextlib.contextmanager
def started(callbacks: Sequence[Callback], run: Run) -> Iterator[None]:
    """Start the callbacks, those that may resume the run first; end each that has started."""
    with contextlib.ExitStack() as stack:
        for callback in sorted(callbacks, key=lambda callback: not callback.resumes):
            callback.start(run)
            stack.callback(callback.end, run)
        yield


def _found(stepper: Stepper, run: Run, step: int) -> Evaluation | str:
    try:
        return stepper.advance(run, step)
    except NonFiniteError as error:
        error.run = run
        error.add_note("foretune: history and best until then are in the attribute `run`.")
        raise


def _note(
    run: Run, step: int, found: Evaluation, evaluate: Metrics | None, score: Score | None
) -> None:
    """Move the run to where a step has led."""
    run.new = [] if found.before is None else _rows(step, found.before)
    run.history.extend(run.new)
    step += len(run.new)
    record = {"step": step, **found.record}
    if evaluate is not None:
        record |= _metrics(evaluate, *(found.arguments or (found.state, found.hparams)))
    record = plain(record)
    best = run.best
    if found.counts:
        best = _better(best, found.hparams, _score_of(run, record, score), step)
    run.value, run.grad, run.state = found.value, found.grad, found.state
    run.new.append(record)
    run.move(record, step=step, carry=found.carry, best=best, hparams=found.hparams)


@filtered
def _metrics(evaluate: Metrics, state: PyTree, hparams: PyTree) -> dict[str, Array]:
    return evaluate(state, hparams)


@jax.jit
def _better(best: Best, hparams: PyTree, score: Float[Array, ""], step: ArrayLike) -> Best:
    new = Best(hparams, score, jnp.asarray(step, best.step.dtype))
    return jax.tree.map(lambda new, old: jnp.where(score < best.score, new, old), new, best)


def _score_of(run: Run, record: Record, score: Score | None) -> Float[Array, ""]:
    """Return the score of a record, and warn, once, where it is NaN."""
    values = jax.tree.leaves(record.get("paired", record["value"]))
    now = sum(values) if score is None else _scored(score, record)
    if np.isnan(now) and not run.nan_reported:
        run.nan_reported = True
        warn(f"the score at step {record['step']} is NaN. It never counts as the best.")
    return jnp.asarray(now, float)


def _scored(score: Score, record: Record) -> np.ndarray:
    """Return the user's score of a record."""
    try:
        given = score(record)
    except Exception as error:
        where = f"score(record) at step {record['step']}"
        error.add_note(f"foretune: this happened in {where}; the record has {list(record)}.")
        raise
    number = np.asarray(on_host(given))
    real = any(jnp.issubdtype(number.dtype, kind) for kind in (np.floating, np.integer, np.bool_))
    if not real or number.shape != ():
        what = f"at step {record['step']} it returned {describe(given)}"
        raise TypeError(f"score(record) must return one real number; {what}.")
    return number


def _all_done(run: Run) -> str | None:
    done = run.steps is not None and not run.begins and run.step >= run.steps
    return f"{run.steps} steps done" if done else None


def _reason(run: Run) -> str | None:
    """Return the reason to stop, if any; that of a rule is also kept in `run.ended`."""
    reasons = []
    for rule in run.rules:
        reason = rule(run) or None  # `run.step > 9 and "enough"` may be False
        if not isinstance(reason, str | None):
            found = f"at step {run.step} it returned {describe(reason)}"
            raise TypeError(f"a stopping rule returns text or None; {found}.")
        if reason:
            reasons.append(reason)
            if not getattr(rule, "pauses", False):
                run.ended = run.ended or reason
    # An interrupt comes first: whoever asked for the run asks whether it was one.
    reasons = ["interrupted"] * run.interrupted + reasons
    if done := _all_done(run):
        reasons.append(done)
    if jax.process_count() > 1:  # all end at the same step, else some would wait for ever
        stops = multihost_utils.process_allgather(np.array(bool(reasons)))
        reasons = reasons or ["another process stopped"] * bool(stops.any())
    return reasons[0] if reasons else None


def plain(record: dict[str, PyTree]) -> Record:
    """Return a record as JSON gives it back, so that a resumed history is equal to a fresh one.

    What JSON has no word for is named by path: hparams of `{0: a}` become `{"hparams[0]": a}`.
    """
    return _named(on_host(record))


def _named(record: dict[str, PyTree]) -> Record:
    return {name: _plain(part, name) for name, part in sorted(record.items())}


def _rows(step: int, columns: dict[str, PyTree]) -> list[Record]:
    """Return the records of the steps from one on, whose columns these are."""
    arrays, structure = jax.tree.flatten(columns)
    steps, last = np.arange(step, step + len(arrays[0])), len(arrays)
    named = _named({"step": last, **structure.unflatten(range(last))})  # of columns' numbers
    places, structure = jax.tree.flatten(named)
    lists = [[*arrays, steps][place].tolist() for place in places]
    return [structure.unflatten(row) for row in zip(*lists, strict=True)]


def _plain(tree: PyTree, name: str) -> PyTree:
    if type(tree) in (float, int, bool, str):
        return tree
    if isinstance(tree, np.ndarray | np.generic):
        return tree.tolist()
    if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
        return {key: _plain(part, f"{name}[{key!r}]") for key, part in tree.items()}
    if type(tree) in (list, tuple):
        return [_plain(part, f"{name}[{i}]") for i, part in enumerate(tree)]
    if tree is None or jax.tree_util.all_leaves([tree]):
        return tree
    return {path: _plain(leaf, path) for path, leaf in named_leaves(tree, name).items()}

"""The offline outer loop: hypergradient, outer Optax step, projection, repeat.

    u_{k+1} = u_k + optimizer(grad f(lambda_k)),    lambda_{k+1} = P(u_{k+1})

with P the projection onto the constraints (or, for `Log` and `Logit`, with u the transformed
variable). Step k costs one hypergradient; the loop itself adds two small programs.
"""

import functools
import hashlib
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jaxtyping import Array, Float, Key, PyTree

from ._callbacks import Callback
from ._constraints import apply_constraints, check_constraints
from ._engines.base import AbstractEngine, Hypergradient
from ._engines.nonfinite import NonFiniteError
from ._engines.reverse import Reverse
from ._problem import Problem
from ._validate import check_count, check_hparams, check_leading_axis, named_leaves, validated

DEFAULT_OPTIMIZER = optax.contrib.cocob()


class Best(NamedTuple):
    """The hyperparameters of the lowest score so far, and where it was."""

    hparams: PyTree
    score: Float[Array, "..."]
    step: Any


class Carry(NamedTuple):
    """All that decides how a run goes on: what a checkpoint saves."""

    hparams: PyTree
    opt_state: PyTree
    best: Best
    inner: PyTree  # s_T of the last step where the next starts from it, else None


class Result(NamedTuple):
    """What `minimize` returns: `hparams`, `value`, `state`, `history`, `best` and `stopped`."""

    hparams: PyTree
    """The last hyperparameters."""
    value: PyTree
    """The error there."""
    state: PyTree
    """The final inner state there."""
    history: list[dict[str, Any]]
    """One dict per evaluation: `step`, `value`, `gradient_norm` and what `evaluate` adds."""
    best: Best
    """The hyperparameters of the lowest score, with the score and its step."""
    stopped: str
    """Why the run ended."""


class Run:
    """A run in progress, as callbacks and stopping rules see it.

    `step` counts finished updates; `hparams`, `value`, `grad`, `state` and `record` belong to the
    evaluation at that step; `history` holds all records, `steps` is the last step asked for.
    """

    def __init__(self, problem: Problem, steps: int, carry: Carry, settings: dict[str, str]):
        self.problem, self.steps, self.settings = problem, steps, settings
        self.step, self.carry, self.history = 0, carry, []
        self.started = time.monotonic()
        self.record: dict[str, Any] = {}
        self.value: Any = None
        self.grad: Any = None
        self.state: Any = None

    @property
    def hparams(self) -> PyTree:
        """The current hyperparameters."""
        return self.carry.hparams

    @property
    def best(self) -> Best:
        """The best so far."""
        return self.carry.best

    @property
    def seconds(self) -> float:
        """Wall-clock seconds since this process began (or resumed) the run."""
        return time.monotonic() - self.started


def minimize(
    problem: Problem,
    hparams: PyTree,
    *,
    steps: int,
    engine: Any = None,
    optimizer: Any = None,
    constraints: PyTree = None,
    callbacks: Any = (),
    stop: Callable[[Run], str | None] | Iterable[Callable[[Run], str | None]] | None = None,
    key: Key[Array, ""] | None = None,
    batches: Callable[..., PyTree] | None = None,
    evaluate: Callable[[PyTree, PyTree], dict[str, Any]] | None = None,
    evaluate_every: int = 1,
    score: Callable[[dict[str, Any]], Any] | None = None,
    warm_start: bool = False,
    batched: bool = False,
) -> Result:
    """Descend on the hyperparameters by their hypergradient, inside their constraints.

    Args:
        problem: the problem.
        hparams: where to start; projected onto the constraints, with a warning, if outside.
        steps: the number of updates. The error is evaluated `steps + 1` times, ends included.
        engine: how the hypergradient is computed; `Reverse()` by default.
        optimizer: an Optax optimizer for the hyperparameters. By default `optax.contrib.cocob()`,
            which needs no hyper-learning rate (the README has the comparison behind this choice).
            Gradient clipping is Optax's: `optax.chain(optax.clip_by_global_norm(1.0), ...)`.
        constraints: sets (`Box`, `CappedSimplex`, ...) or changes of variable (`Log`, `Logit`) as a
            prefix of the hyperparameters; what is left out is free.
        callbacks: `Progress()`, `History(file)`, `Checkpoint(directory)`, `TensorBoard(directory)`
            or your own `Callback`.
        stop: stopping rules, `NoImprovement(10)`, `SmallGradient(1e-4)`, `TimeLimit(600)` or any
            function of the `Run` that returns a reason to stop, or None.
        key: a random key for `batches`.
        batches: new batches for each step: `batches(step)`, or `batches(step, key)` with a `key`
            (the same key at the same step of a resumed run). Same shapes at each step.
        evaluate: `evaluate(state, hparams) -> dict` of further scalars on the final inner state,
            compiled once, every `evaluate_every` steps.
        score: what `best` is lowest in, as a function of a record; by default its `value` (the sum
            of the values, where the objective is a dict). `lambda r: -r["accuracy"]` for a metric
            of `evaluate`; only records that have the metrics are scored.
        warm_start: start each training from the final inner state of the one before. The step
            counter goes on, and a start that depends on the hyperparameters is used only once.
        batched: the hyperparameters have a leading axis of independent descents, run as one
            program; records then hold one number for each.

    Ctrl-C ends the run after the current evaluation and returns what there is; a second one
    interrupts at once. A hypergradient that is not finite raises `NonFiniteError`, whose attribute
    `run` holds the history and the best hyperparameters until then.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> problem = ft.Problem(
    ...     dynamics=ft.Training(lambda w, h, x: (w - x) ** 2 + h["decay"] * w**2, optax.sgd(0.2)),
    ...     objective=lambda state, h, x: (state.params - 0.8) ** 2,
    ...     init=jnp.array(0.0), batches=ft.FullBatch(jnp.array(1.0), steps=50))
    >>> result = ft.minimize(problem, {"decay": jnp.array(1.0)}, steps=100,
    ...                      optimizer=optax.adam(0.05), constraints={"decay": ft.NonNegative()})
    >>> round(float(result.hparams["decay"]), 2)  # w = 1 / (1 + decay)
    0.25
    """
    check_count(steps, f"minimize(steps={steps!r})")
    _check_kinds(engine, optimizer, callbacks)
    check_count(evaluate_every, f"minimize(evaluate_every={evaluate_every})")
    engine = Reverse() if engine is None else engine
    optimizer = DEFAULT_OPTIMIZER if optimizer is None else optimizer
    if batched and warm_start:
        raise ValueError("minimize takes either batched=True or warm_start=True, not both.")
    hparams = check_hparams(hparams)
    members = check_leading_axis(hparams, "hparams", "the descents") if batched else None
    single = jax.tree.map(lambda leaf: leaf[0], hparams) if batched else hparams
    validated(problem, single)
    constraints = check_constraints(constraints, single)
    hparams = _feasible(hparams, constraints, batched)
    outer = _Outer(optimizer, constraints, batched)
    inner = problem.start(hparams) if warm_start else None
    nowhere = jnp.full(() if members is None else (members,), jnp.inf)
    best = Best(hparams, nowhere, jnp.zeros(nowhere.shape, jnp.int32))
    settings = {
        "constraints": repr(constraints),
        "inner steps": str(problem.steps),
        "start": _digest_of(hparams),
    }
    run = Run(problem, steps, Carry(hparams, outer.init(hparams), best, inner), settings)
    rules = [stop] if callable(stop) else list(stop or ())
    score = score or _total_value

    with _Interrupt() as interrupt:
        for callback in sorted(callbacks, key=lambda callback: not callback.resumes):
            callback.start(run)
        try:
            stopped = None
            while stopped is None:
                now = problem
                if batches is not None:
                    extra = () if key is None else (jax.random.fold_in(key, run.step),)
                    now = problem.replace(batches=batches(run.step, *extra))
                if warm_start:
                    now = now.continued(run.carry.inner)
                try:
                    hyper = _hypergradient(engine, now, run.hparams, batched)
                except NonFiniteError as error:
                    error.add_note(
                        f"foretune: this was step {run.step} of minimize; what there is until then "
                        "(history, best, hparams) is in the attribute `run` of this error."
                    )
                    error.run = run
                    raise
                run.value, run.grad, run.state = hyper
                norms = _gradient_norm(hyper.grad, batched)
                record = {"step": run.step, "value": hyper.value, "gradient_norm": norms}
                measured = evaluate and (run.step % evaluate_every == 0 or run.step == steps)
                if measured:
                    record |= _metrics(evaluate, hyper.state, run.hparams, batched, record)
                run.record = jax.tree.map(_plain, jax.device_get(record))
                run.history.append(run.record)
                if measured or not evaluate:
                    now_score = jnp.asarray(score(run.record))
                    best = _better(run.best, run.hparams, now_score, run.step)
                    run.carry = run.carry._replace(best=best)
                for callback in callbacks:
                    callback.step(run)
                reasons = [reason for rule in rules if (reason := rule(run))]
                if run.step >= steps:
                    reasons.append(f"{steps} steps done")
                if interrupt.asked:
                    reasons.append("interrupted")
                stopped = reasons[0] if reasons else None
                if stopped is None:
                    new, opt_state = outer.update(run.hparams, run.carry.opt_state, hyper)
                    inner = hyper.state if warm_start else None
                    run.carry = Carry(new, opt_state, run.best, inner)
                    run.step += 1
        finally:
            for callback in callbacks:
                callback.end(run)
    return Result(run.hparams, run.value, run.state, run.history, run.best, stopped)


class _Outer(eqx.Module):
    """The outer step: gradient in the search variable, Optax update, projection."""

    optimizer: optax.GradientTransformation
    constraints: PyTree
    batched: bool = eqx.field(static=True)

    def init(self, hparams: PyTree) -> PyTree:
        """Return the optimizer's state, which holds for the search variable."""
        return _outer_init(self, hparams)

    def update(self, hparams: PyTree, opt_state: PyTree, hyper: Hypergradient) -> tuple:
        """Return the next hyperparameters and optimizer state."""
        return _outer_update(self, hparams, opt_state, hyper.value, hyper.grad)


@eqx.filter_jit
def _outer_init(outer: _Outer, hparams: PyTree) -> PyTree:
    def init(hparams):
        return outer.optimizer.init(apply_constraints(outer.constraints, "to_search", hparams))

    return jax.vmap(init)(hparams) if outer.batched else init(hparams)


@eqx.filter_jit
def _outer_update(outer: _Outer, hparams: PyTree, opt_state: PyTree, value: Any, grad: PyTree):
    from_search = functools.partial(apply_constraints, outer.constraints, "from_search")

    def update(hparams, opt_state, value, grad):
        u = apply_constraints(outer.constraints, "to_search", hparams)
        _, pull = jax.vjp(from_search, u)  # du = grad f(lambda) dlambda/du
        (direction,) = pull(grad)
        optimizer = optax.with_extra_args_support(outer.optimizer)
        total = sum(jax.tree.leaves(value))
        updates, opt_state = optimizer.update(direction, opt_state, u, value=total, grad=direction)
        moved = from_search(optax.apply_updates(u, updates))
        return apply_constraints(outer.constraints, "project", moved), opt_state

    if outer.batched:
        update = jax.vmap(update)
    return update(hparams, opt_state, value, grad)


def _hypergradient(engine, problem, hparams, batched) -> Hypergradient:
    if not batched:
        return engine(problem, hparams)
    result = _batched_hypergradient(engine, problem, hparams)
    finite = jax.device_get(_rows_finite((result.value, result.grad)))
    if not finite.all():  # run the first bad one alone, which explains itself
        first = int(np.argmin(finite))
        engine(problem, jax.tree.map(lambda leaf: leaf[first], hparams))
    return result


@eqx.filter_jit
def _batched_hypergradient(engine, problem, hparams):
    return eqx.filter_vmap(lambda h: engine(problem, h))(hparams)


@jax.jit
def _rows_finite(tree: PyTree) -> Array:
    rows = [jnp.isfinite(leaf).reshape(leaf.shape[0], -1).all(1) for leaf in jax.tree.leaves(tree)]
    return jnp.stack(rows).all(0)


@functools.partial(jax.jit, static_argnums=1)
def _gradient_norm(grad: PyTree, batched: bool) -> Array:
    norm = jax.vmap(optax.tree.norm) if batched else optax.tree.norm
    return norm(grad)


@jax.jit
def _better(best: Best, hparams: PyTree, score: Array, step: Any) -> Best:
    better = score < best.score

    def keep(new, old):
        return jnp.where(better.reshape(better.shape + (1,) * (new.ndim - better.ndim)), new, old)

    chosen = jax.tree.map(keep, hparams, best.hparams)
    return Best(chosen, jnp.where(better, score, best.score), jnp.where(better, step, best.step))


def _metrics(evaluate, state, hparams, batched, record) -> dict[str, Any]:
    metrics = _measure(evaluate, state, hparams, batched)
    if not isinstance(metrics, dict) or set(metrics) & set(record):
        raise ValueError(
            f"evaluate must return a dict of scalars with names other than {list(record)}, got "
            f"{metrics!r:.200}."
        )
    return metrics


def _check_kinds(engine: Any, optimizer: Any, callbacks: Any) -> None:
    if engine is not None and not isinstance(engine, AbstractEngine):
        raise TypeError(f"engine must be an engine, `foretune.Reverse()` say; got {engine!r:.100}.")
    if optimizer is not None and not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"optimizer must be an Optax optimizer, `optax.adam(0.01)` say; got {optimizer!r:.100}."
        )
    listed = isinstance(callbacks, list | tuple)
    if not listed or not all(isinstance(callback, Callback) for callback in callbacks):
        raise TypeError(
            f"callbacks must be a list like `[foretune.Progress()]`; got {callbacks!r:.100}."
        )


def _digest_of(tree: PyTree) -> str:
    digest = hashlib.sha256()
    for leaf in jax.device_get(jax.tree.leaves(tree)):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


@eqx.filter_jit
def _measure(evaluate, state, hparams, batched: bool) -> dict[str, Any]:
    return (eqx.filter_vmap(evaluate) if batched else evaluate)(state, hparams)


@eqx.filter_jit
def _project(constraints: PyTree, hparams: PyTree, batched: bool) -> PyTree:
    project = functools.partial(apply_constraints, constraints, "project")
    return (jax.vmap(project) if batched else project)(hparams)


def _feasible(hparams: PyTree, constraints: PyTree, batched: bool) -> PyTree:
    apply_constraints(constraints, "check_start", hparams)
    inside = _project(constraints, hparams, batched)
    for (path, given), moved in zip(
        named_leaves(hparams, "hparams").items(), jax.tree.leaves(inside), strict=True
    ):
        distance = float(jnp.linalg.norm(jnp.ravel(given - moved)))
        if distance > 1e-5 * max(1.0, float(jnp.linalg.norm(jnp.ravel(given)))):
            warnings.warn(
                f"{path} starts outside its constraint, at a distance of {distance:.3g}; it is "
                "projected onto it.",
                stacklevel=3,
            )
    return inside


def _total_value(record: dict[str, Any]) -> Any:
    return sum(np.asarray(value) for value in jax.tree.leaves(record["value"], is_leaf=_is_row))


def _is_row(node: Any) -> bool:
    return isinstance(node, list)


def _plain(leaf: Any) -> Any:
    """Return numbers as Python's own, so that records can be written as JSON and compared."""
    return leaf.tolist() if isinstance(leaf, np.ndarray | np.generic) else leaf


class _Interrupt:
    """Turns the first Ctrl-C into a request; the second acts as usual."""

    def __init__(self):
        self.asked = False

    def __enter__(self) -> "_Interrupt":
        self._before = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def _ask(self, *_):
        self.asked = True
        signal.signal(signal.SIGINT, self._before)

    def __exit__(self, *_):
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

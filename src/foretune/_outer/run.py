"""What the drivers share: the run that callbacks see, its result, and the outer step.

    u_{k+1} = u_k + optimizer(grad f(lambda_k)),    lambda_{k+1} = P(u_{k+1})

with P the projection onto the constraints (or, for `Log` and `Logit`, with u the transformed
variable).
"""

import contextlib
import functools
import hashlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jaxtyping import Array, Float, PyTree

from .._constraints.base import (
    from_unconstrained,
    project,
    scales,
    scales_with,
    to_unconstrained,
)
from .._problem.arguments import filtered
from .._problem.checks import check_signature, describe, named_leaves
from .callbacks import Callback
from .interrupt import Interrupt

DIGEST = "sha256:"  # what the digest of arrays begins with
UNTRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


class Best(NamedTuple):
    """The lowest score so far: the `hparams` there, the `score` itself, and its `step`."""

    hparams: PyTree
    score: Float[Array, "..."]
    step: Any


class Result(NamedTuple):
    """What a driver returns.

    Attributes:
        hparams: the last hyperparameters.
        value: the last error: at these hyperparameters in `minimize`, in the last window in real time.
        state: the final inner state there; in real time the tuner's state, to continue from.
        history: one dict per evaluation: `step`, `value`, `gradient_norm` and what `evaluate` adds.
        best: the lowest score of the run, as `best.hparams`, `best.score` and `best.step`.
        stopped: why the run ended.
    """

    hparams: PyTree
    value: PyTree
    state: PyTree
    history: list[dict[str, Any]]
    best: Best
    stopped: str


class Run:
    """A run in progress, as callbacks and stopping rules see it.

    `step` counts finished updates; `hparams`, `value`, `grad`, `state` and `record` belong to the
    evaluation at that step; `history` holds all records, `steps` is the last step asked for (None
    where a stream decides). `resumed` says whether the run continues an earlier one.
    """

    def __init__(self, steps: int | None, carry: Any, fingerprint: Callable[[], dict[str, str]]):
        # What a checkpoint belongs to. Digests cost time, so only a checkpoint asks for it.
        self.steps, self.fingerprint = steps, fingerprint
        self.history: list[dict[str, Any]] = []
        self._lost = 0  # of its records: damaged ones of the run that it resumes
        self.begun = False  # whether an earlier run was killed before it saved anything
        self.resumed = self.nan_reported = False
        self.move(0, carry)
        self.started = time.monotonic()
        self.record: dict[str, Any] = {}
        self.value: Any = None
        self.grad: Any = None
        self.state: Any = None

    def move(self, step: int, carry: Any) -> None:
        """Go to a step with the carry that belongs to it.

        Both change in one assignment: wherever an interrupt comes, they belong together.
        """
        self._place = step, carry

    def resume(self, step: int, carry: Any, history: list[dict[str, Any]]) -> None:
        """Go to where an earlier run was."""
        self.history, self.resumed, self._lost = history, True, step - len(history)
        self.move(step, carry)

    @property
    def step(self) -> int:
        """The number of finished updates."""
        return self._place[0]

    @property
    def carry(self) -> Any:
        """All that decides how the run continues from this step."""
        return self._place[1]

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

    @property
    def whole(self) -> bool:
        """Whether the carry can be resumed from: its step has been evaluated."""
        return len(self.history) > self.finished

    @property
    def finished(self) -> int:
        """The number of records of finished updates: that of this step may be made again."""
        return self.step - self._lost

    def note(self, record: dict[str, Any]) -> None:
        """Append a record, as `plain` returns it."""
        self.record = record
        self.history.append(record)

    def ranked(
        self, score: Callable[[dict[str, Any]], Any] | None, record: dict[str, Any], hparams: PyTree
    ) -> Best:
        """Return the best once the hyperparameters of a record are counted, too."""
        now = _total_value(record) if score is None else _scored(score, record, self.best.score)
        if np.isnan(now).any() and not self.nan_reported:
            self.nan_reported = True
            warnings.warn(
                f"the score at step {record['step']} is NaN. It never counts as the best, here or "
                "later in the run.",
                stacklevel=3,
            )
        return _better(self.best, hparams, jnp.asarray(now, float), record["step"])

    def reasons(self, rules: list[Any], interrupt: Interrupt) -> list[str]:
        """Return the reasons to stop, if any."""
        # An interrupt comes first: whoever asked for the run asks whether it was one.
        reasons = ["interrupted"] if interrupt.asked else []
        reasons += [reason for rule in rules if (reason := _reason(rule, self))]
        if self.steps is not None and self.step >= self.steps:
            reasons.append(f"{self.steps} steps done")
        if jax.process_count() > 1:  # all end at the same step, else some would wait for ever
            stops = multihost_utils.process_allgather(np.array(bool(reasons)))
            reasons = reasons or ["another process stopped"] * bool(stops.any())
        return reasons


def _reason(rule: Callable[["Run"], Any], run: "Run") -> str | None:
    """Return a rule's reason to stop, or raise where it is none."""
    reason = rule(run)
    if reason is False:  # `run.step > 9 and "enough"`
        return None
    if reason is not None and not isinstance(reason, str):
        raise TypeError(
            f"a stopping rule returns the reason to stop, as text, or None; at step {run.step} it "
            f"returned {describe(reason)}. Write `lambda run: 'enough' if ... else None`."
        )
    return reason


def nowhere(hparams: PyTree, shape: tuple[int, ...] = ()) -> Best:
    """Return the best of nothing yet."""
    hparams = jax.tree.map(jnp.copy, hparams)  # theirs may be donated
    return Best(hparams, jnp.full(shape, jnp.inf), jnp.zeros(shape, jnp.int32))


class Outer(eqx.Module):
    """The outer step: gradient in the unconstrained variable, Optax update, projection."""

    optimizer: optax.GradientTransformation
    constraints: PyTree
    in_units: bool = False  # whether the optimizer sees u / c, with c the scales at the start

    def init(self, hparams: PyTree) -> PyTree:
        """Return the optimizer's state, which holds for the unconstrained variable."""
        u = to_unconstrained(self.constraints, hparams)
        if not self.in_units:
            return self.optimizer.init(u)
        c = scales(self.constraints, u)
        return c, self.optimizer.init(jax.tree.map(jnp.divide, u, c))

    def update(self, hparams: PyTree, opt_state: PyTree, value: PyTree, grad: PyTree) -> tuple:
        """Return the next hyperparameters and optimizer state."""
        updates, opt_state = self.direction(hparams, opt_state, value, grad)
        return self.moved(hparams, updates), opt_state

    def direction(self, hparams: PyTree, opt_state: PyTree, value: PyTree, grad: PyTree) -> tuple:
        """Return the optimizer's update of the unconstrained variable, and its state."""
        u = to_unconstrained(self.constraints, hparams)
        inverse = functools.partial(from_unconstrained, self.constraints)
        _, pull = jax.vjp(inverse, u)  # du = grad f(lambda) dlambda/du
        (direction,) = pull(grad)
        optimizer = optax.with_extra_args_support(self.optimizer)
        c = None
        if self.in_units:
            c, opt_state = opt_state
            u = jax.tree.map(jnp.divide, u, c)
            direction = jax.tree.map(jnp.multiply, direction, c)
        with jax.numpy_dtype_promotion("standard"):  # Adam multiplies floats by a count
            updates, opt_state = optimizer.update(
                direction,
                opt_state,
                u,
                value=sum(jax.tree.leaves(value)),
                grad=direction,
                scale=functools.partial(scales_with, self.constraints),
            )
        if c is None:
            return updates, opt_state
        return jax.tree.map(jnp.multiply, updates, c), (c, opt_state)

    def moved(self, hparams: PyTree, updates: PyTree) -> PyTree:
        """Return the hyperparameters after an update of their unconstrained variable."""
        u = to_unconstrained(self.constraints, hparams)
        there = from_unconstrained(self.constraints, optax.apply_updates(u, updates))
        return project(self.constraints, there)


def metrics_of(evaluate, state, hparams, batched: bool = False) -> dict:
    """Return the scalars of the user's `evaluate`, which `check_evaluate` has seen."""
    with _explaining_traces():
        return _metrics(evaluate, state, hparams, batched)


def check_evaluate(evaluate: Any, state: Any, hparams: PyTree, names: Iterable[str]) -> None:
    """Raise where `evaluate` cannot be traced on the shapes of a state, or returns no metrics."""
    with _explaining_traces():
        metrics = eqx.filter_eval_shape(evaluate, state, hparams)
    _check_metrics(metrics, names)


def _check_metrics(metrics: Any, names: Iterable[str]) -> None:
    named = isinstance(metrics, dict) and all(
        isinstance(name, str) and _is_scalar(metric) for name, metric in metrics.items()
    )
    if not named or set(metrics) & set(names):
        raise ValueError(
            f"evaluate must return a dict of scalars with names (strings) other than "
            f"{sorted(names)}, got {metrics!r:.200}."
        )


def _is_scalar(metric: Any) -> bool:
    return isinstance(metric, int | float) or getattr(metric, "shape", None) == ()


@contextlib.contextmanager
def _explaining_traces() -> Iterator[None]:
    try:
        yield
    except UNTRACEABLE as error:
        raise TypeError(
            "evaluate(state, hparams) is compiled: it cannot use NumPy, `float(...)`, `.item()` or "
            "an `if` on what it computes. Write it with jax.numpy and return its arrays, "
            '`{"accuracy": jnp.mean(...)}`. What cannot be compiled goes into `step(run)` of a '
            "callback, where `run.state` and `run.hparams` hold numbers. JAX says: "
            + str(error).splitlines()[0]
        ) from error


@filtered
def _metrics(evaluate, state, hparams, batched: bool) -> dict[str, Any]:
    return (eqx.filter_vmap(evaluate) if batched else evaluate)(state, hparams)


@jax.jit
def _better(best: Best, hparams: PyTree, score: Array, step: Any) -> Best:
    better = score < best.score

    def keep(new, old):
        return jnp.where(better.reshape(better.shape + (1,) * (new.ndim - better.ndim)), new, old)

    chosen = jax.tree.map(keep, hparams, best.hparams)
    return Best(chosen, jnp.where(better, score, best.score), jnp.where(better, step, best.step))


def check_optimizer(optimizer: Any) -> None:
    """Raise unless it is an Optax optimizer or None."""
    if optimizer is not None and not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"optimizer must be an Optax optimizer, `optax.adam(0.01)` say; got {optimizer!r:.100}."
        )


def check_functions(stop: Any, evaluate: Any, score: Any) -> list[Any]:
    """Raise unless they can be called as the drivers do; return the stopping rules as a list."""
    for form, function in {"evaluate(state, hparams)": evaluate, "score(record)": score}.items():
        if function is not None:
            check_function(function, form)
    rules = [] if stop is None else [stop] if callable(stop) else stop
    if isinstance(rules, str | dict) or not isinstance(rules, Iterable):
        raise TypeError(
            "stop must be a rule like `foretune.NoImprovement(10)`, a function of the run, or a "
            f"list of them; got {describe(stop)}."
        )
    rules = list(rules)
    for rule in rules:
        check_function(rule, "stop(run)")
    return rules


def check_function(function: Any, form: str) -> None:
    """Raise unless `function` can be called as `form` says."""
    name = form.split("(")[0]
    if isinstance(function, type) or not callable(function):
        given = (
            f"the class {function.__name__}" if isinstance(function, type) else describe(function)
        )
        raise TypeError(f"{name} must be a function, called as `{form}`; got {given}.")
    check_signature(function, form)


def check_callbacks(callbacks: Any) -> None:
    """Raise unless it is a list of callbacks."""
    listed = isinstance(callbacks, list | tuple)
    if not listed or not all(isinstance(callback, Callback) for callback in callbacks):
        raise TypeError(
            f"callbacks must be a list like `[foretune.Progress()]`; got {callbacks!r:.100}."
        )


@contextlib.contextmanager
def started(callbacks: Any, run: Run) -> Iterator[None]:
    """Start the callbacks, those that may resume the run first; each that has started is ended.

    They end in the reverse order, each of them also where the run or another callback fails.
    """
    with contextlib.ExitStack() as stack:
        for callback in sorted(callbacks, key=lambda callback: not callback.resumes):
            callback.start(run)
            stack.callback(callback.end, run)
        yield


def digest_of(tree: PyTree) -> str:
    """Return a digest of the arrays in a pytree: their numbers, types and shapes."""
    digest = hashlib.sha256()
    for leaf in numbers(tree):
        digest.update(f"{leaf.dtype}{leaf.shape}".encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return DIGEST + digest.hexdigest()


def numbers(tree: PyTree) -> list[np.ndarray]:
    """Return the arrays of a pytree on the host, random keys as their data."""

    def data(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if is_key else leaf

    arrays = [data(leaf) for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf)]
    return [np.asarray(array) for array in on_host(arrays)]


def on_host(tree: PyTree) -> PyTree:
    """Return the tree with its arrays on the host, whole where other processes hold parts of them."""

    def whole(leaf):
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return leaf
        return multihost_utils.process_allgather(leaf, tiled=True)

    return jax.device_get(jax.tree.map(whole, tree))


def _scored(
    score: Callable[[dict[str, Any]], Any], record: dict[str, Any], like: Any
) -> np.ndarray:
    """Return the user's score of a record: a number, or one for each descent."""
    try:
        given = score(record)
    except Exception as error:
        error.add_note(
            f"foretune: this happened in score(record) at step {record['step']}; the record has the "
            f"names {list(record)}."
        )
        raise
    number = np.asarray(on_host(given))
    real = any(jnp.issubdtype(number.dtype, kind) for kind in (np.floating, np.integer, np.bool_))
    if not real or number.shape not in ((), like.shape):
        wanted = "one real number" + (
            f" for each of the {like.size} descents" if like.shape else ""
        )
        raise TypeError(
            f"score(record) must return {wanted}; at step {record['step']} it returned "
            f"{describe(given)}. The record has the names {list(record)}."
        )
    return number


def _total_value(record: dict[str, Any]) -> Any:
    return sum(np.asarray(value) for value in jax.tree.leaves(record["value"], is_leaf=_is_row))


def _is_row(node: Any) -> bool:
    return isinstance(node, list)


def plain(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record as JSON gives it back, so that a resumed history is equal to a fresh one.

    Numbers are Python's own, and what JSON has no word for is named by path, as in error messages:
    `{0: a}` under the name hparams becomes `{"hparams[0]": a}`.
    """
    return {name: _plain(part, name) for name, part in on_host(record).items()}


def _plain(tree: Any, name: str) -> Any:
    if isinstance(tree, np.ndarray | np.generic):
        return tree.tolist()
    if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
        return {key: _plain(part, f"{name}[{key!r}]") for key, part in tree.items()}
    if type(tree) in (list, tuple):
        return [_plain(part, f"{name}[{i}]") for i, part in enumerate(tree)]
    if tree is None or jax.tree_util.all_leaves([tree]):
        return tree
    return {path: _plain(leaf, path) for path, leaf in named_leaves(tree, name).items()}

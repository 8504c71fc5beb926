"""Streams of minibatches: cut into windows, and tuned over in real time.

Any iterable of batches will do, of known, unknown or infinite length: a list, a generator, a Grain
or PyTorch loader. A batch is a pytree of what NumPy can read; all batches of a stream have the same
shapes.
"""

import contextlib
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._files.digests import digest, on_host
from .._outer.checks import check_callbacks, check_evaluate, check_functions
from .._outer.drive import Evaluation, Stepper, drive
from .._outer.run import Result, Run
from .._problem.arguments import Structure, flatten
from .._problem.batches import FullBatch, Minibatches
from .._problem.checks import (
    check_count,
    check_leading_axis,
    check_numbers,
    check_outside_programs,
    check_some_number,
    describe,
    describe_tree,
    named_leaves,
)
from .warn import warn_of_dropped, warn_of_vanished

REMEMBERED = 256  # entries of a memory, before it is begun again
_CAPACITY: dict[Any, int] = {}  # the longest window seen, by the program it is for


def windows(stream: Any, n: int) -> Iterator[Any]:
    """Cut a stream of minibatches into windows of n, stacked on a leading axis; the last is shorter.

    Of `Minibatches` it makes shorter `Minibatches`, whose data stays where it is.

    >>> import foretune as ft, numpy as np
    >>> batches = [{"x": np.zeros((8, 3))} for _ in range(5)]
    >>> [window["x"].shape for window in ft.windows(batches, 2)]
    [(2, 8, 3), (2, 8, 3), (1, 8, 3)]
    """
    check_count(n, f"windows(n={n})")
    check_stream(stream, "the stream of minibatches", minibatches=True)
    return _windows(stream, n)


def _windows(stream: Any, n: int) -> Iterator[Any]:
    if isinstance(stream, Minibatches):
        for first in range(0, stream.steps, n):
            yield stream.at(stream.indices[first : first + n])
        return
    count, expected, batches = 0, None, []
    for batch in stream:
        if expected is None:
            check_data(batch, "batch")
        batch = jax.tree.map(_copied, batch)
        if expected is None:
            check_numbers(batch, f"minibatch {count}")
        shape = shapes_of(batch, "batch")
        if expected is not None and shape != expected:
            raise ValueError(_changed(count, expected, shape))
        expected, count = shape, count + 1
        batches.append(batch)
        if len(batches) == n:
            yield jax.tree.map(_stack, *batches)
            batches = []
    if batches:
        yield jax.tree.map(_stack, *batches)


def readable(leaf: Any) -> Any:
    """Return an array of what NumPy can read."""
    return leaf if isinstance(leaf, jax.Array | np.ndarray) else np.asarray(leaf)


def _copied(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.Array) else np.array(leaf)  # a loader may reuse its own


def _stack(*leaves: Any) -> Any:
    return (jnp if isinstance(leaves[0], jax.Array) else np).stack(leaves)


def _changed(index: int, expected: dict[str, str], found: dict[str, str]) -> str:
    paths = [*expected, *(path for path in found if path not in expected)]
    path = next(path for path in paths if expected.get(path) != found.get(path))
    return (
        f"minibatch {index} of the stream (counted from 0) differs from those before it: {path} is "
        f"{found.get(path, 'absent')}, it was {expected.get(path, 'absent')}. A program is compiled "
        "for one shape: drop the last, smaller batch of an epoch (`drop_last=True` in most loaders), "
        "or pad it and weigh the padding with 0 in the loss."
    )


def check_stream(stream: Any, name: str, *, minibatches: bool = False) -> None:
    """Raise where a stream is one batch, or nothing that can be iterated over."""
    arrays = isinstance(stream, tuple | dict) and any(
        hasattr(leaf, "shape") for leaf in (stream.values() if isinstance(stream, dict) else stream)
    )
    shapes = [getattr(item, "shape", None) for item in stream] if isinstance(stream, list) else []
    arrays = arrays or (None not in shapes and len(set(shapes)) > 1)  # [x, y]: no list of batches
    if arrays or hasattr(stream, "shape"):
        raise TypeError(
            f"{name} must be an iterable of batches, but it looks like one batch, of\n"
            + "\n".join(f"  {path}: {leaf}" for path, leaf in shapes_of(stream, "batch").items())
            + "\nGive `itertools.repeat(batch)` for the same batch each time, or a list of batches."
        )
    if isinstance(stream, str | bytes) or not (
        isinstance(stream, Iterable) or (minibatches and isinstance(stream, Minibatches))
    ):
        raise TypeError(f"{name} must be an iterable of batches, got {describe(stream)}.")


def padded(program: Structure, window: Any) -> tuple[Any, np.ndarray]:
    """Return the window padded to the longest like it so far, and its true length.

    A program is compiled for the shape of its window; its loop runs to the true length.
    """
    if isinstance(window, FullBatch):
        return FullBatch(window.data, 1), np.asarray(window.steps, np.int32)
    xs = window.indices if isinstance(window, Minibatches) else window
    steps = check_leading_axis(xs, "window", "the minibatches") if jax.tree.leaves(xs) else 0
    if steps == 0:
        raise ValueError(
            "the window is empty: no minibatch is on its leading axis,\n"
            + describe_tree(xs, "window")
            + "\nLeave it out. Where steps need no data, give `FullBatch(None, steps=...)`."
        )
    leaves, structure = flatten(xs)
    key = program, structure, tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves)
    if key not in _CAPACITY:
        check_some_number(xs, "window")
    capacity = max(_CAPACITY.get(key, 0), steps)
    remember(_CAPACITY, key, capacity)
    if capacity > steps:
        xs = jax.tree.map(functools.partial(_pad, capacity), xs)
        window = window.at(xs) if isinstance(window, Minibatches) else xs
    return window, np.asarray(steps, np.int32)


def _pad(capacity: int, x: Any) -> Any:
    more = (capacity - len(x), *x.shape[1:])
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.concatenate([x, jnp.broadcast_to(x[:1], more)])
    if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1:  # it stays where it is
        return jax.device_put(jnp.concatenate([x, jnp.zeros(more, x.dtype)]), x.sharding)
    x = np.asarray(x)  # by NumPy, which compiles nothing
    return np.concatenate([x, np.zeros(more, x.dtype)])


def remember(memory: dict[Any, Any], key: Any, value: Any) -> None:
    if len(memory) >= REMEMBERED:
        memory.clear()
    memory[key] = value


def check_data(tree: PyTree, name: str) -> None:
    """Raise for lists of numbers, each of which would be a leaf of its own."""

    def of_numbers(node: Any) -> bool:
        number = isinstance(node, int | float | complex)
        return number or (isinstance(node, list) and bool(node) and all(map(of_numbers, node)))

    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=of_numbers)
    for path, leaf in leaves:
        if isinstance(leaf, list):
            raise TypeError(
                f"{name}{jax.tree_util.keystr(path)} is a list of {len(leaf)}, down to numbers. Data "
                "are arrays: give `numpy.asarray(...)` of it."
            )


class Misfit(ValueError):
    """Something that does not fit, in an error that says all about it."""


class Shapes:
    """What a tuner was given last that fitted, for what is said of something that does not."""

    def __init__(self):
        self.known: dict[str, dict[str, str]] = {}

    def note(self, **given: PyTree) -> None:
        """Take these for what fits."""
        self.known |= {name: shapes_of(tree, name) for name, tree in given.items()}

    @contextlib.contextmanager
    def explaining(self, **given: PyTree) -> Iterator[None]:
        """Add to an error, of checks, what has changed since all was well."""
        try:
            yield
        except Misfit:
            raise
        except Exception as error:
            now = {name: shapes_of(tree, name) for name, tree in given.items()}
            old = {name: self.known[name] for name in given if name in self.known}
            lines = [differences(now[name], old[name], "it was") for name in old]
            if changed := "\n".join(filter(None, lines)):
                advice = " Is the state that of another tuner?" if "  state" in changed else ""
                raise ValueError(
                    "`update` was given something that differs from before, and does not fit:\n"
                    f"{changed}\nWith it: {type(error).__name__}: {error}{advice}"
                ) from error
            if getattr(error, "__notes__", ()):  # it comes from the user's code
                for name in (name for name in given if name not in old):
                    error.add_note(f"foretune: given with\n{describe_tree(given[name], name)}")
            raise
        self.note(**given)


def shapes_of(tree: PyTree, name: str) -> dict[str, str]:
    """Return what the leaves are, by path."""
    return {path: describe(leaf) for path, leaf in named_leaves(tree, name).items()}


def differences(now: dict[str, str], old: dict[str, str], was: str, most: int = 6) -> str:
    """Return in which leaves two trees differ, the first few of them."""
    paths = [path for path in {**now, **old} if now.get(path) != old.get(path)]
    lines = [
        f"  {path} is {now.get(path, 'absent')}, {was} {old.get(path, 'absent')}" for path in paths
    ]
    return "\n".join(lines[:most] + ["  ..."] * (len(lines) > most))


class RealTimeRun(Run):
    """A real-time run in progress: `step` counts finished windows.

    `state` is the tuner's state after the window, `record` what belongs to the window; `window` and
    `validation` are its data, `log` is what `update` returned, `tuner` the `RealTime`.
    """

    tuner: Any = None
    window: Any = None
    validation: Any = None
    log: Any = None

    @property
    def hparams(self) -> PyTree:
        """The current hyperparameters."""
        return (self.state or self.carry).hparams


def run_stream(
    tuner: Any,
    train_stream: Any,
    validation_stream: Any,
    *,
    params: PyTree,
    hparams: PyTree,
    steps: Any,
    window: Any,
    callbacks: Any,
    stop: Any,
    evaluate: Any,
    score: Any,
) -> Result:
    """Do what `RealTime.run` documents."""
    if steps is not None:
        check_count(steps, f"run(steps={steps!r})")
    check_count(window, f"run(window={window!r})")
    check_callbacks(callbacks)
    rules = check_functions(stop, evaluate, score)
    check_outside_programs("RealTime.run", params, hparams)
    check_stream(validation_stream, "the validation stream")
    pieces = windows(train_stream, window)
    state = tuner.init(params, hparams)
    if evaluate is not None:
        check_evaluate(evaluate, state.train, state.hparams, _RECORD)

    def fingerprint():  # asked for before the first window, while `state` is the initial one
        static = [f.name for f in dataclasses.fields(tuner.settings) if f.metadata.get("static")]
        constants = [name for name in static if name not in ("chunk", "mesh")]
        return {name: str(getattr(tuner.settings, name)) for name in constants} | {
            "constraints": repr(tuner.settings.constraints),
            "window": str(window),
            "initial hyperparameters": digest(state.hparams),
            "initial parameters": digest(state.train),
        }

    run = RealTimeRun(steps, state, state.hparams, fingerprint)
    run.tuner = tuner
    stepper = Windows(tuner, pieces, _repeated(validation_stream))
    return drive(run, stepper, callbacks=callbacks, rules=rules, evaluate=evaluate, score=score)


class Windows(Stepper):
    """The steps of a real-time run: a window each."""

    first = 1

    def __init__(self, tuner: Any, pieces: Iterator[Any], validations: Iterator[Any]):
        self.tuner, self.pieces, self.validations = tuner, pieces, validations
        self.failure: BaseException | None = None

    def begin(self, run: Run) -> None:
        """Skip what was seen, and read the first window."""
        self.validations = itertools.islice(self.validations, run.step, None)
        self.pieces = itertools.islice(self.pieces, run.step, None)
        self.upcoming = _next(self.pieces)

    def advance(self, run: Any, step: int) -> Evaluation | str:
        """Train over a window."""
        if self.failure is not None:
            raise self.failure
        run.window, run.validation = self.upcoming, _next(self.validations)
        if run.window is END or run.validation is END:
            which = "training" if run.window is END else "validation"
            if run.begins:
                raise ValueError(f"the {which} stream is empty: it gave no batch.")
            return f"the {which} stream ended"
        state, log, fault = self.tuner.dispatch(run.carry, run.window, run.validation)
        # The next window is read and sent to the device while this one runs.
        more = run.steps is None or step < run.steps
        try:
            self.upcoming = _next(self.pieces) if more and not run.interrupted else END
        except BaseException as error:  # raised when this window has been noted
            self.failure = error
        if fault:
            error = self.tuner.fault(state, run.window, run.validation)
            if not run.whole:  # the state before the window comes back without its Z
                run.put_back(state)
            raise error
        run.log = log
        return Evaluation(
            state, log["hparams"], log["value"], log["hypergradient"], state, _record(log),
            (state.train, state.hparams), ~log["undone"],
        )  # fmt: skip

    def noted(self, run: Any) -> None:
        """Warn of what has happened."""
        _warn_where_all_is_undone(run)
        warn_of_dropped(run.carry, run.log, stacklevel=3)
        first, ran = run.history[0]["hparams"], run.record["hparams"]
        warn_of_vanished(first, ran, run.carry.hparams, stacklevel=3)

    def result(self, run: Run) -> tuple[PyTree, PyTree, PyTree]:
        """Return the last hyperparameters, the last value and the tuner's state."""
        value = run.value
        if value is None and run.history:  # resumed at its end
            value = jax.tree.map(lambda x: jnp.asarray(x, float), run.history[-1]["value"])
        return run.carry.hparams, value, run.carry


END = object()  # of a stream
UNDONE = 10  # windows in a row, after which a run warns
_NOTED = (
    "loss",
    "hparams",
    "z_norm",
    "undone",
    "outliers",
    "dropped",
    "tuned",
    "restarted",
)  # of a window's log
_RECORD = {"step", "value", "gradient_norm", *_NOTED}


def _record(log: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a window, which is waited for."""
    numbers = on_host(log)
    wide = jax.tree.map(lambda g: np.asarray(g, np.float64), numbers["hypergradient"])
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(wide)))
    record = {"value": numbers["value"], "gradient_norm": norm}
    return record | {name: numbers[name] for name in _NOTED}


def _warn_where_all_is_undone(run: RealTimeRun) -> None:
    """Warn once, when many windows in a row have been undone: backing off may not help."""
    recent = run.history[-UNDONE - 1 :]
    if [record["undone"] for record in recent][-UNDONE:] != [True] * UNDONE:
        return
    if len(recent) > UNDONE and recent[0]["undone"]:  # it has been said
        return
    warnings.warn(
        f"the last {UNDONE} windows were undone, because training diverged in each; the last ran with "
        f"{run.record['hparams']!r:.200}. Hyperparameters halve with each of them, at most: start from "
        "others (a smaller learning rate), and look at the scale of the inputs and of the initial "
        "parameters. `RealTime(rollback=None)` undoes nothing, and says where something is not finite.",
        RuntimeWarning,
        stacklevel=4,
    )


def _next(iterator: Iterator[Any]) -> Any:
    """Return what comes next, on the device, or END."""
    batch = next(iterator, END)
    if batch is END:
        return END

    def put(leaf):  # what is on devices stays there: other processes may have parts of it
        return leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf)

    return jax.tree.map(put, batch)


def _repeated(stream: Any) -> Iterator[Any]:
    """Go through a stream again and again, where it can be; an iterator only once."""
    while True:
        empty = True
        for batch in stream:
            if empty:
                check_data(batch, "validation")
            empty = False
            yield jax.tree.map(_copied, batch)
        if empty or isinstance(stream, Iterator):
            return

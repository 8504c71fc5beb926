"""A run over streams: window after window, until one of them ends."""

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, NoReturn, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .._engines.nonfinite import NonFiniteError
from .._outer.callbacks import Callback
from .._outer.interrupt import Interrupt
from .._outer.run import (
    Best,
    Result,
    Run,
    check_callbacks,
    check_evaluate,
    check_functions,
    check_outside_programs,
    digest_of,
    metrics_of,
    nowhere,
    on_host,
    plain,
    started,
)
from .._problem.batches import Minibatches
from .._problem.checks import check_count
from .._problem.validation import noting
from .stream import END, check_stream, following, repeated, windows
from .warn import warn_of_dropped, warn_of_vanished
from .window import RealTimeState, TunerSettings

IN_A_ROW = 10  # windows that are rolled back, after which a run warns
_NOTED = ("loss", "hparams", "z_norm", "rolled_back", "skipped", "dropped")  # of a window's log
_RECORD = {"step", "value", "gradient_norm", *_NOTED}


@runtime_checkable
class Tuner(Protocol):
    """What a run needs of a `RealTime`."""

    settings: TunerSettings

    def init(self, params: PyTree, hparams: PyTree) -> RealTimeState:
        """Return the state before the first window."""
        ...

    def dispatch(
        self, state: RealTimeState, window: PyTree, validation: PyTree
    ) -> tuple[RealTimeState, dict[str, PyTree], Array]:
        """Begin an update without waiting for it."""
        ...

    def fault(self, state: RealTimeState, window: PyTree, validation: PyTree) -> NonFiniteError:
        """Return the error for a window that failed."""
        ...


class RealTimeCarry(NamedTuple):
    """All that decides how a real-time run continues: what a checkpoint saves."""

    state: RealTimeState
    best: Best

    @property
    def hparams(self) -> PyTree:
        """The current hyperparameters."""
        return self.state.hparams


class RealTimeRun(Run):
    """A real-time run in progress: `step` counts finished windows.

    `state` is the tuner's state after the window, `record` what belongs to the window; `window` and
    `validation` are its data, `log` is what `update` returned, `tuner` the `RealTime`.
    """

    tuner: Tuner
    window: PyTree = None
    validation: PyTree = None
    log: dict[str, PyTree] | None = None

    @property
    def hparams(self) -> PyTree:
        """The current hyperparameters."""
        return (self.state or self.carry).hparams

    @property
    def whole(self) -> bool:
        """Whether the carry can be resumed from: not where a window has taken its memory."""
        gone = (x.is_deleted() for x in jax.tree.leaves(self.carry) if isinstance(x, jax.Array))
        return self.step > 0 and not any(gone)


def run_stream(
    tuner: Tuner,
    train_stream: Iterable[PyTree] | Minibatches,
    validation_stream: Iterable[PyTree],
    *,
    params: PyTree,
    hparams: PyTree,
    steps: int | None,
    window: int,
    callbacks: Sequence[Callback],
    stop: object,
    evaluate: Callable[[PyTree, PyTree], dict[str, Array]] | None,
    score: Callable[[dict[str, PyTree]], float] | None,
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
        with noting("evaluate(state, hparams)", state=state.train, hparams=state.hparams):
            check_evaluate(evaluate, state.train, state.hparams, _RECORD)

    def fingerprint():  # asked for before the first window, while `state` is the initial one
        static = [f.name for f in dataclasses.fields(tuner.settings) if f.metadata.get("static")]
        constants = [name for name in static if name not in ("chunk", "mesh")]
        return {name: str(getattr(tuner.settings, name)) for name in constants} | {
            "constraints": repr(tuner.settings.constraints),
            "window": str(window),
            "initial hyperparameters": digest_of(state.hparams),
            "initial parameters": digest_of(state.train),
        }

    run = RealTimeRun(steps, RealTimeCarry(state, nowhere(state.hparams)), fingerprint)
    run.tuner = tuner
    with Interrupt() as interrupt, started(callbacks, run):
        validations = itertools.islice(repeated(validation_stream), run.step, None)
        pieces = itertools.islice(pieces, run.step, None)
        upcoming, stopped, failure = following(pieces), None, None
        if steps is not None and run.step >= steps:
            stopped = f"{steps} steps done"
        while stopped is None:
            run.window, run.validation = upcoming, following(validations)
            if run.window is END or run.validation is END:
                which = "training" if run.window is END else "validation"
                stopped = f"the {which} stream ended"
                if run.step == 0:
                    raise ValueError(f"the {which} stream is empty: it gave no batch.")
                break
            state, log, fault = tuner.dispatch(run.carry.state, run.window, run.validation)
            run.state = state
            # The next window is read and sent to the device while this one runs.
            more = steps is None or run.step + 1 < steps
            try:
                upcoming = following(pieces) if more and not interrupt.asked else END
            except BaseException as error:  # raised when this window has been noted
                failure = error
            if fault:
                _fail(tuner, run, state)
            record = _record(run, state, log, evaluate)
            best = run.best if record["rolled_back"] else run.ranked(score, record, log["hparams"])
            # The window is done: from here on the run stands after it, in every respect.
            run.value, run.grad, run.log = log["value"], log["hypergradient"], log
            run.note(record)
            run.move(run.step + 1, RealTimeCarry(state, best))
            _warn_where_all_is_rolled_back(run)
            warn_of_dropped(state, log, stacklevel=3)
            warn_of_vanished(
                run.history[0]["hparams"], record["hparams"], state.hparams, stacklevel=3
            )
            for callback in callbacks:
                callback.step(run)
            if failure is not None:
                raise failure
            stopped = next(iter(run.reasons(rules, interrupt)), None)
    if run.value is None and run.history:  # resumed at its end
        run.value = jax.tree.map(lambda x: jnp.asarray(x, float), run.history[-1]["value"])
    return Result(run.hparams, run.value, run.carry.state, run.history, run.best, stopped)


def _record(
    run: RealTimeRun,
    state: RealTimeState,
    log: dict[str, PyTree],
    evaluate: Callable[[PyTree, PyTree], dict[str, Array]] | None,
) -> dict[str, PyTree]:
    """Return the record of the window that follows the run's step, which is waited for."""
    numbers = on_host(log)
    wide = jax.tree.map(lambda g: np.asarray(g, np.float64), numbers["hypergradient"])
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(wide)))
    record = {"step": run.step + 1, "value": numbers["value"], "gradient_norm": norm}
    record |= {name: numbers[name] for name in _NOTED}
    if evaluate is not None:
        record |= metrics_of(evaluate, state.train, state.hparams)
    return plain(record)


def _warn_where_all_is_rolled_back(run: RealTimeRun) -> None:
    """Warn once, when many windows in a row have been rolled back: backing off may not help."""
    recent = [record["rolled_back"] for record in run.history[-IN_A_ROW - 1 :]]
    # One more, and it has been said.
    if recent[-IN_A_ROW:] != [True] * IN_A_ROW or recent == [True] * (IN_A_ROW + 1):
        return
    warnings.warn(
        f"the last {IN_A_ROW} windows were rolled back, because training diverged in each; the last "
        f"ran with {run.record['hparams']!r:.200}. Hyperparameters halve with each of them, at most: "
        "start from others (a smaller learning rate), and look at the scale of the inputs and of the "
        "initial parameters. `RealTime(rollback=None)` rolls nothing back, and says where something is "
        "not finite.",
        RuntimeWarning,
        stacklevel=4,
    )


def _fail(tuner: Tuner, run: RealTimeRun, state: RealTimeState) -> NoReturn:
    error = tuner.fault(state, run.window, run.validation)
    if not run.whole:  # the state before the window comes back without its Z
        run.move(run.step, run.carry._replace(state=state))
    error.run = run
    error.add_note(
        "foretune: what there is until then (history, best, hparams) is in the attribute `run` of "
        "this error."
    )
    raise error

"""A run over streams: window after window, until one of them ends."""

import itertools
import warnings
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._files.digests import digest, on_host
from .._outer.drive import Evaluation, Stepper
from .._outer.run import Run
from .dropped import warn_of_dropped
from .stream import END, following
from .updates import Updates
from .window import RealTimeState

IN_A_ROW = 10  # windows that are rolled back, after which a run warns
NOTED = ("loss", "hparams", "z_norm", "rolled_back", "skipped", "dropped")  # of a window's log
RECORD = {"step", "value", "gradient_norm", *NOTED}


class RealTimeRun(Run):
    """A real-time run in progress: `step` counts finished windows.

    `window` and `validation` are the data of the last one, `log` is what `update` returned.
    """

    window: PyTree = None
    validation: PyTree = None
    log: dict[str, PyTree]

    def __init__(self, tuner: Updates, steps: int | None, state: RealTimeState, window: int):
        def fingerprint():  # asked for before the first window, while `state` is whole
            return {
                "discount": str(tuner.settings.discount),
                "rollback": str(tuner.settings.rollback),
                "constraints": repr(tuner.settings.constraints),
                "window": str(window),
                "initial hyperparameters": digest(state.hparams),
                "initial parameters": digest(state.train),
            }

        super().__init__(steps, state, state.hparams, fingerprint)
        self.tuner = tuner

    @property
    def hparams(self) -> PyTree:
        """The current hyperparameters."""
        return (self.state or self.carry).hparams


class Windows(Stepper[RealTimeRun]):
    """The steps of a real-time run, a window each."""

    first = 1

    def __init__(self, pieces: Iterator[PyTree], validations: Iterator[PyTree]):
        self.pieces, self.validations = pieces, validations
        self.upcoming: PyTree = END
        self.failure: BaseException | None = None

    def begin(self, run: RealTimeRun) -> None:
        """Skip what was seen, and read the first window."""
        self.validations = itertools.islice(self.validations, run.step, None)
        self.pieces = itertools.islice(self.pieces, run.step, None)
        self.upcoming = following(self.pieces)

    def advance(self, run: RealTimeRun, step: int) -> Evaluation | str:
        """Train over a window, and read the next one meanwhile."""
        if self.failure is not None:
            raise self.failure
        run.window, run.validation = self.upcoming, following(self.validations)
        if run.window is END or run.validation is END:
            which = "training" if run.window is END else "validation"
            if run.begins:
                raise ValueError(f"the {which} stream is empty: it gave no batch.")
            return f"the {which} stream ended"
        state, log, fault = run.tuner.dispatch(run.carry, run.window, run.validation)
        more = run.steps is None or step < run.steps
        try:  # the next window is read and sent to the device while this one runs
            self.upcoming = following(self.pieces) if more and not run.interrupted else END
        except BaseException as error:  # raised when this window has been noted
            self.failure = error
        if fault:
            if not run.whole:  # the state before the window comes back without its Z
                run.put_back(state)
            raise run.tuner.fault(state, run.window, run.validation)
        run.log = log
        return Evaluation(
            carry=state,
            hparams=log["hparams"],
            value=log["value"],
            grad=log["hypergradient"],
            state=state,
            record=_record(log),
            arguments=(state.train, state.hparams),
            counts=~log["rolled_back"],
        )

    def noted(self, run: RealTimeRun) -> None:
        """Warn of what has happened."""
        _warn_where_all_is_rolled_back(run)
        warn_of_dropped(run.carry, run.log, stacklevel=4)

    def result(self, run: RealTimeRun) -> tuple[PyTree, PyTree, PyTree]:
        """Return the last hyperparameters, the last value and the tuner's state."""
        value = run.value
        if value is None and run.history:  # resumed at its end
            value = jax.tree.map(lambda x: jnp.asarray(x, float), run.history[-1]["value"])
        return run.carry.hparams, value, run.carry


def _record(log: dict[str, PyTree]) -> dict[str, PyTree]:
    """Return the record of a window, which is waited for."""
    numbers = on_host(log)
    gradients = (np.asarray(g, np.float64) for g in jax.tree.leaves(numbers["hypergradient"]))
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in gradients))
    noted = {name: numbers[name] for name in NOTED}
    return {"value": numbers["value"], "gradient_norm": norm, **noted}


def _warn_where_all_is_rolled_back(run: RealTimeRun) -> None:
    """Warn once, when many windows in a row have been rolled back."""
    recent = [record["rolled_back"] for record in run.history[-IN_A_ROW - 1 :]]
    # One more, and it has been said.
    if recent[-IN_A_ROW:] != [True] * IN_A_ROW or recent == [True] * (IN_A_ROW + 1):
        return
    warnings.warn(
        f"the last {IN_A_ROW} windows were rolled back, because training diverged; the last ran with "
        f"{run.record['hparams']!r:.200}. Start from a smaller learning rate, and look at the scale of "
        "the inputs and initial parameters. `RealTime(rollback=None)` says where it is not finite.",
        RuntimeWarning,
        stacklevel=5,
    )

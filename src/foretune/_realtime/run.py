"""A run over streams: window after window, until one of them ends."""

import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._files.digests import digest, on_host
from .._outer.drive import Evaluation, Stepper
from .._outer.run import Run
from .._problem.warn import warn
from .faults import fault, warn_of_dropped
from .program import UpdateProgram
from .state import RealTimeState, TunerSettings
from .stream import END, following

IN_A_ROW = 10  # windows that are rolled back, after which a run warns
NOTED = ("loss", "hparams", "z_norm", "rolled_back", "skipped", "dropped")  # of a window's log
RECORD = {"step", "value", "gradient_norm", *NOTED}


def fingerprint(settings: TunerSettings, state: RealTimeState, window: int) -> dict[str, str]:
    """Return what a checkpoint of a run that begins at `state` belongs to."""
    return {
        "discount": str(settings.discount),
        "rollback": str(settings.rollback),
        "constraints": repr(settings.constraints),
        "window": str(window),
        "initial hyperparameters": digest(state.hparams),
        "initial parameters": digest(state.train),
    }


class Tuning(Stepper):
    """The steps of a real-time run, a window each."""

    first = 1

    def __init__(
        self, program: UpdateProgram, pieces: Iterator[PyTree], validations: Iterator[PyTree]
    ):
        self.program, self.pieces, self.validations = program, pieces, validations
        self.upcoming: PyTree = END
        self.failure: BaseException | None = None
        self.log: dict[str, PyTree] = {}  # of the last window

    def begin(self, run: Run) -> None:
        """Skip what was seen, and read the first window."""
        self.validations = itertools.islice(self.validations, run.step, None)
        self.pieces = itertools.islice(self.pieces, run.step, None)
        self.upcoming = following(self.pieces)

    def advance(self, run: Run, step: int) -> Evaluation | str:
        """Train over a window, and read the next one meanwhile."""
        if self.failure is not None:
            raise self.failure
        window, validation = self.upcoming, following(self.validations)
        if window is END or validation is END:
            which = "training" if window is END else "validation"
            if run.begins:
                raise ValueError(f"the {which} stream is empty: it gave no batch.")
            return f"the {which} stream ended"
        state, log, failed = self.program(run.carry, window, validation, donate=True)
        more = run.steps is None or step < run.steps
        try:  # the next window is read and sent to the device while this one runs
            self.upcoming = following(self.pieces) if more and not run.interrupted else END
        except BaseException as error:  # raised when this window has been noted
            self.failure = error
        if failed:
            if not run.whole:  # the state before the window comes back without its Z
                run.put(carry=state)
            raise fault(self.program.settings, state, window, validation)
        self.log = log
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

    def noted(self, run: Run) -> None:
        """Warn of what has happened; once, when many windows in a row have been rolled back."""
        recent = [record["rolled_back"] for record in run.history[-IN_A_ROW - 1 :]]
        # One more, and it has been said.
        if recent[-IN_A_ROW:] == [True] * IN_A_ROW and recent != [True] * (IN_A_ROW + 1):
            warn(
                f"the last {IN_A_ROW} windows were rolled back, because training diverged; the last "
                f"ran with {run.record['hparams']!r:.200}. Start from a smaller learning rate, and "
                "look at the scale of the inputs and initial parameters. `RealTime(rollback=None)` "
                "says where it is not finite.",
                RuntimeWarning,
            )
        warn_of_dropped(run.carry, self.log)

    def result(self, run: Run) -> tuple[PyTree, PyTree, PyTree]:
        """Return the last hyperparameters, the last value and the tuner's state."""
        value = run.value
        if value is None and run.history:  # resumed at its end
            value = jax.tree.map(lambda x: jnp.asarray(x, float), run.history[-1]["value"])
        return run.carry.hparams, value, run.carry


def _record(log: dict[str, PyTree]) -> dict[str, PyTree]:
    """Return the record of a window, which is waited for."""
    numbers = on_host(log)
    gradients = (np.asarray(g, np.float64) for g in jax.tree.leaves(numbers["hypergradient"]))
    with np.errstate(over="ignore"):  # of a window that diverged
        norm = np.sqrt(sum(np.sum(np.square(g)) for g in gradients))
    noted = {name: numbers[name] for name in NOTED}
    return {"value": numbers["value"], "gradient_norm": norm, **noted}

"""A run in progress, as callbacks and stopping rules see it, its result, and requests to end it."""

import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from .._files.records import Record
from .._problem.checks import shown


class Interrupt:
    """Turns the first Ctrl-C, or SIGTERM, into a request to end a run; the second acts as usual.

    A program that handles SIGTERM by itself continues to.
    """

    def __init__(self):
        self.asked = False
        self._before = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            ours = [signal.SIGINT, signal.SIGTERM] if default else [signal.SIGINT]
            self._before = {number: signal.signal(number, self._ask) for number in ours}
        return self

    def _ask(self, *_):
        self.asked = True
        self.__exit__()

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Best(NamedTuple):
    """The lowest score so far: the `hparams` there, the `score` itself, and its `step`."""

    hparams: PyTree
    score: Float[Array, ""]
    step: Int[Array, ""]


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
    history: list[Record]
    best: Best
    stopped: str

    def __repr__(self) -> str:
        """Say what was found, without the state and the history."""
        records = f"{len(self.history)} records, {self.stopped}"
        return f"Result({shown(self.hparams)}; {shown(self.value, name='value')}; {records})"


class Place(NamedTuple):
    """Where a run stands, after an evaluation."""

    step: int  # of the last evaluation; 0 before the first
    carry: PyTree  # all that decides how the run continues
    best: Best
    hparams: PyTree  # of the last evaluation
    records: int  # of the history


class Run:
    """A run in progress, as callbacks and stopping rules see it.

    `step` is that of the last evaluation, to which `hparams`, `value`, `grad`, `state` and `record`
    belong; `history` holds all records, `new` those since the callbacks were last called. `best` is the
    lowest score so far, `steps` the last step asked for (None where a stream decides). `resumed` is
    whether the run continues an earlier one, `stopped` why it ends.
    """

    def __init__(
        self,
        steps: int | None,
        carry: PyTree,
        hparams: PyTree,
        fingerprint: Callable[[], dict[str, str]],
    ):
        # What a checkpoint belongs to. Digests cost time, so only a checkpoint asks for it.
        self.steps, self.fingerprint = steps, fingerprint
        self.history: list[Record] = []
        self.record: Record = {}
        self.new: list[Record] = []
        self.value: PyTree = None
        self.grad: PyTree = None
        self.state: PyTree = None
        self.rules: Sequence[Callable[[Run], object]] = ()
        self.stopped: str | None = None
        self.ended: str | None = None  # the reason of a rule: it ends the run for good
        self.interrupt: Interrupt | None = None
        self.resumed = self.nan_reported = False
        self.coarse = False  # whether several steps may be made before the callbacks are called
        self.begun = False  # whether an earlier run was killed before it saved anything
        nowhere = jax.tree.map(jnp.copy, hparams)  # theirs may be donated
        best = Best(nowhere, jnp.array(jnp.inf, float), jnp.zeros((), jnp.int32))
        # Replaced by one assignment: wherever an interrupt comes, its parts belong together.
        self._place = Place(0, carry, best, hparams, 0)
        self._started = time.monotonic()

    def move(self, record: Record, **place: PyTree) -> None:
        """Go to another place, after an evaluation with this record."""
        self.record = record
        self.history.append(record)
        self.put(records=len(self.history), **place)

    def put(self, **place: PyTree) -> None:
        """Change where the run stands."""
        self._place = self._place._replace(**place)

    def resume(self, step: int, carry: PyTree, best: Best, history: list[Record]) -> None:
        """Go to where an earlier run was."""
        self.history, self.record, self.resumed = history, history[-1] if history else {}, True
        self._place = Place(step, carry, best, carry.hparams, len(history))

    @property
    def step(self) -> int:
        return self._place.step

    @property
    def carry(self) -> PyTree:
        return self._place.carry

    @property
    def best(self) -> Best:
        return self._place.best

    @property
    def hparams(self) -> PyTree:
        return self._place.hparams

    @property
    def records(self) -> list[Record]:
        """The records up to this step: the history, unless an interrupt came in between."""
        return self.history[: self._place.records]

    @property
    def seconds(self) -> float:
        """Wall-clock seconds since this process began (or resumed) the run."""
        return time.monotonic() - self._started

    @property
    def interrupted(self) -> bool:
        """Whether the run is asked to end, by Ctrl-C say."""
        return self.interrupt is not None and self.interrupt.asked

    @property
    def begins(self) -> bool:
        """Whether nothing has been evaluated yet."""
        return not self.resumed and self._place.records == 0

    @property
    def whole(self) -> bool:
        """Whether it can be resumed from here: not where a step has taken the carry's memory."""
        leaves = (x for x in jax.tree.leaves(self.carry) if isinstance(x, jax.Array))
        return not self.begins and not any(leaf.is_deleted() for leaf in leaves)

"""The methods of the speech experiment, each with the same seconds to spend.

Vanilla        one training with eta = 0.075, mu = 0.5, rho = 0 (until it stops early)
RS             random search: rho ~ U(0, 4), eta ~ Exp(0.1), mu ~ U(0, 1)
SMBO           Optuna's Gaussian process and TPE over eta in [1e-5, 1], mu in [0, 0.999], rho in [0, 4]
RTHO           real-time tuning as in the paper, from eta = 0.075, mu = 0.5, rho = 1.6
RTHO-NT        the same from 0, 0, 0 (the "null teacher")
foretune, foretune-NT   the defaults of `RealTime`, from the same two starts, with hyper-batches of a
               half the length: its steps are relative, and need more of them

Every method measures the accuracy on all validation frames each few windows, and answers for the
weights where it was highest. A training at constant hyperparameters stops early when it has not risen
for some measurements, real-time tuning after twice as many. The test accuracy is measured beside it
and decides nothing. The clock runs while a method proposes, trains and measures validation accuracy,
and stands while programs compile, test accuracy is measured and checkpoints are written.
"""

import functools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from foretune import Box, Callback, Checkpoint, NonFiniteError, NonNegative, RealTime
from foretune._files.files import write_whole
from foretune.report import RunError

from ..runs import RunFolder
from . import model
from .clock import Clock, Curve

CONSTRAINTS = {"eta": NonNegative(), "mu": Box(0.0, 1.0), "rho": NonNegative()}
OURS = CONSTRAINTS | {"mu": Box(0.0, 0.999)}
KNOWN = {"eta": 0.075, "mu": 0.5, "rho": 1.6}
NULL = {"eta": 0.0, "mu": 0.0, "rho": 0.0}
PACE = 2
"""How many times the hyper-updates of the paper's setting ours has."""
MOST = 20_000
"""Windows in the stream of a real-time run, more than it will use."""


def vanished(run):
    """Return a reason to stop when the rate has stayed at 0, or close to it, over ten windows."""
    rates = [record["hparams"]["eta"] for record in run.history]
    gone = len(rates) >= 10 and max(rates) > 0 and max(rates[-10:]) <= 1e-4 * max(rates)
    return "eta has gone to 0" if gone else None


class Task(NamedTuple):
    """What all methods share."""

    speech: model.Speech
    validation: np.ndarray
    test: np.ndarray
    shape: dict[str, int]
    """The network: arguments of `make_params`."""
    batch: int
    window: int
    """Minibatches in a hyper-batch."""
    sample: int
    """Validation frames in a hyper-update, drawn anew each time."""
    check: int
    """Windows between two measurements of accuracy."""
    patience: int
    """Measurements without a rise, after which a training stops."""
    budget: float
    """Seconds."""
    folder: RunFolder
    now: Callable[[], float] = time.monotonic
    """The clock that the budget is counted by."""

    def paced(self, pace: int) -> "Task":
        """Return the same with a multiple of the hyper-updates."""
        fewer = {"window": self.window, "sample": self.sample}
        fewer = {name: max(1, value // pace) for name, value in fewer.items()}
        return self._replace(check=self.check * pace, **fewer)

    def params(self, seed: int, trial: int = 0) -> Any:
        """Return the initial weights."""
        return model.make_params(jax.random.fold_in(jax.random.key(seed), trial), **self.shape)

    def batches(self, seed: int, trial: int = 0, windows: int = 1) -> model.Minibatches:
        """Return the minibatches of the first windows."""
        key = jax.random.fold_in(jax.random.key(1_000 + seed), trial)
        return model.minibatches(self.speech, key, self.batch, windows * self.window)

    def samples(self, seed: int) -> Iterator[tuple[model.Speech, Any]]:
        """Yield validation samples, without end."""
        rng = np.random.default_rng([seed, 3])
        while True:
            yield self.speech, rng.choice(self.validation, min(self.sample, len(self.validation)))

    def accuracies(self, params: Any, clock: Clock) -> tuple[float, float]:
        """Return validation and test accuracy; the second while the clock stands."""
        validation = model.accuracy(params, self.speech, self.validation)
        clock.pause()
        test = model.accuracy(params, self.speech, self.test)
        clock.go()
        return validation, test


def measure_speed(task: Task, rounds: int = 3) -> dict[str, float]:
    """Return the milliseconds of a step, by method.

    It also compiles what the methods run, so that their clocks do not count it.
    """
    hparams = {name: jnp.asarray(value, jnp.float32) for name, value in KNOWN.items()}
    tasks = {"plain": task, "RTHO": task, "foretune": task.paced(PACE)}
    batches = {name: t.batches(0) for name, t in tasks.items()}
    samples = {name: next(t.samples(0)) for name, t in tasks.items()}
    plain = jax.tree.map(jnp.copy, model.dynamics.init(task.params(0), hparams))
    for rows in (task.validation, task.test, np.asarray(task.speech.rows)[: model.CHUNK]):
        model.accuracy(plain.params, task.speech, rows)
    tuned = {"RTHO": paper_tuner(), "foretune": our_tuner()}
    states = {name: tuner.init(task.params(0), hparams) for name, tuner in tuned.items()}
    states["plain"] = plain

    def step(name):
        if name == "plain":
            return model.train(states[name], hparams, batches[name])[0]
        return tuned[name].update(states[name], batches[name], samples[name])[0]

    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(1 + rounds):
        for name in tasks:
            began = time.perf_counter()
            states[name] = jax.block_until_ready(step(name))
            seconds[name].append(time.perf_counter() - began)
    return {name: 1e3 * min(times[1:]) / tasks[name].window for name, times in seconds.items()}


def training(
    task: Task, hparams: dict[str, float], seed: int, trial: int, clock: Clock, curve: Curve
) -> dict[str, Any]:
    """Train at constant hyperparameters until early stopping or the end of the budget."""
    began = clock.seconds
    arrays = {name: jnp.asarray(value, jnp.float32) for name, value in hparams.items()}
    state = jax.tree.map(jnp.copy, model.dynamics.init(task.params(seed, trial), arrays))
    batches = task.batches(seed, trial)
    best, at, windows, checks, stopped = 0.0, 0, 0, 0, "the budget is spent"
    loss: Any = None
    while not clock.over:
        for _ in range(task.check):
            state, loss = model.train(state, arrays, batches)
            batches = batches.at(batches.indices + task.window)
        windows, checks = windows + task.check, checks + 1
        loss = float(loss)
        if not np.isfinite(loss):
            stopped = "diverged"
            break
        validation, test = task.accuracies(state.params, clock)
        curve.note(
            windows,
            trial=trial,
            seconds=clock.seconds,
            loss=loss,
            validation_accuracy=validation,
            test_accuracy=test,
        )
        clock.show(f"trial {trial + 1}, {100 * (curve.best or {})['validation_accuracy']:.2f} %")
        if validation > best:
            best, at = validation, checks
        elif checks - at >= task.patience:
            stopped = "no rise"
            break
    return {
        **hparams,
        "validation_accuracy": best,
        "steps": windows * task.window,
        "seconds": clock.seconds - began,
        "stopped": stopped,
    }


def vanilla(task: Task, series: str, seed: int) -> dict[str, Any]:
    """Train once, without the auxiliary task."""
    curve = Curve(task, series, seed, lambda record: False)
    with Clock(task.budget, f"{series}, seed {seed}", task.now) as clock:
        clock.go()
        hparams = KNOWN | {"rho": 0.0}
        found = training(task, hparams, seed, 0, clock, curve)
        more = {"stopped": found["stopped"], "trials": 1, "hparams": hparams}
        return curve.outcome(clock, found["steps"], **more)


class Random:
    """Random search."""

    def __init__(self, seed: int):
        self.seed = seed

    def ask(self, k: int) -> dict[str, float]:
        """Return the hyperparameters of trial k."""
        rng = np.random.default_rng([self.seed, 4, k])
        return {"eta": rng.exponential(0.1), "mu": rng.uniform(0, 1), "rho": rng.uniform(0, 4)}

    def tell(self, hparams: dict[str, float], accuracy: float) -> None:
        """Learn nothing."""


class Optuna:
    """A sampler of Optuna's, after five random points."""

    def __init__(self, kind: str, seed: int):
        optuna = _optuna()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = {"GP": optuna.samplers.GPSampler, "TPE": optuna.samplers.TPESampler}[kind]
        self._study = optuna.create_study(
            direction="maximize", sampler=sampler(seed=seed, n_startup_trials=5)
        )
        real = optuna.distributions.FloatDistribution
        self._space = {"eta": real(1e-5, 1.0, log=True), "mu": real(0, 0.999), "rho": real(0, 4)}
        self._create = optuna.trial.create_trial

    def ask(self, k: int) -> dict[str, float]:
        """Return the hyperparameters of the next trial."""
        return dict(self._study.ask(self._space).params)

    def tell(self, hparams: dict[str, float], accuracy: float) -> None:
        """Learn what they have led to."""
        asked = [t for t in self._study.trials if not t.state.is_finished() and t.params == hparams]
        if asked:
            self._study.tell(asked[0].number, accuracy)
        else:  # of an earlier run
            self._study.add_trial(
                self._create(params=hparams, distributions=self._space, value=accuracy)
            )


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ImportError("the searches need Optuna: pip install 'foretune[optuna]'.") from error
    return optuna


def read_trials(path: Path) -> list[dict[str, Any]]:
    """Return the trials of an earlier run, none where there was none."""
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise RunError(
            f"{path} is damaged ({error}): mend or remove the line; without the file the search begins "
            "anew."
        ) from error


def search(task: Task, series: str, seed: int, sampler: Any) -> dict[str, Any]:
    """Train with one proposal after another until the budget is spent; resumes after a trial."""
    path = task.folder.path / "trials" / f"{series}-{seed}.jsonl".replace(" ", "_")
    path.parent.mkdir(exist_ok=True)
    trials = read_trials(path)
    proposer = sampler(seed)
    names = ("eta", "mu", "rho")
    for trial in trials:
        proposer.tell({name: trial[name] for name in names}, trial["validation_accuracy"])
    curve = Curve(task, series, seed, lambda record: record["trial"] < len(trials))
    spent = sum(trial["seconds"] + trial["proposing"] for trial in trials)
    with Clock(task.budget, f"{series}, seed {seed}", task.now) as clock:
        clock.spend(spent)
        clock.go()
        while not clock.over:
            began = clock.seconds
            hparams = proposer.ask(len(trials))
            proposing = clock.seconds - began
            found = training(task, hparams, seed, len(trials), clock, curve)
            proposer.tell(hparams, found["validation_accuracy"])
            clock.pause()
            trials.append(found | {"proposing": proposing})
            write_whole(path, "".join(json.dumps(trial) + "\n" for trial in trials))
            clock.go()
        clock.pause()
    best = max(trials, key=lambda trial: trial["validation_accuracy"])
    return curve.outcome(
        clock,
        sum(trial["steps"] for trial in trials),
        stopped="the budget is spent",
        trials=len(trials),
        hparams={name: best[name] for name in names},
    )


@functools.cache
def paper_tuner() -> RealTime:
    """Return real-time tuning as in the paper."""
    return RealTime.paper(model.dynamics, model.error, constraints=CONSTRAINTS)


@functools.cache
def our_tuner() -> RealTime:
    """Return real-time tuning with this package's defaults."""
    return RealTime(model.dynamics, model.error, constraints=OURS)


class Measure(Callback):
    """Measures accuracy each few windows, keeps the clock, and writes all down."""

    def __init__(self, task: Task, clock: Clock, series: str, seed: int):
        self.task, self.clock = task, clock
        rows = np.asarray(task.speech.rows)
        some = np.random.default_rng([seed, 5]).choice(rows, min(model.CHUNK, len(rows)))
        self._training = some
        self._make_curve = functools.partial(Curve, task, series, seed)

    def start(self, run: Any) -> None:
        """Continue from where the run is resumed."""
        self.curve = self._make_curve(lambda record: record["step"] <= run.step)
        if run.history:
            self.clock.spend(run.history[-1]["seconds"])

    def step(self, run: Any) -> None:
        """Note the window."""
        record = run.record
        measured = {
            "loss": record["loss"],
            "error": record["value"],
            **{name: record["hparams"][name] for name in ("eta", "mu", "rho")},
            "rolled_back": record["rolled_back"],
        }
        if run.step % self.task.check == 0 or (self.clock.over and self.curve.best is None):
            params = run.state.train.params
            validation, test = self.task.accuracies(params, self.clock)
            self.clock.pause()
            training = model.accuracy(params, self.task.speech, self._training)
            measured |= {
                "validation_accuracy": validation,
                "test_accuracy": test,
                "training_accuracy": training,
            }
        self.clock.pause()
        record["seconds"] = self.clock.seconds
        self.curve.note(run.step, seconds=self.clock.seconds, **measured)
        best = self.curve.best
        self.clock.show(f"{100 * best['validation_accuracy']:.2f} %" if best else "")

    def reason(self, run: Any) -> str | None:
        """Return why to stop, or None."""
        if self.clock.over:
            return "the budget is spent"
        best = self.curve.best
        patience = 2 * self.task.patience * self.task.check
        return "no rise" if best and run.step - best["step"] >= patience else None


class Go(Callback):
    """Lets the clock run again, after the callbacks before it."""

    def __init__(self, clock: Clock):
        self.clock = clock

    def start(self, run: Any) -> None:
        """Let it run."""
        self.clock.go()

    def step(self, run: Any) -> None:
        """Let it run."""
        self.clock.go()


def realtime(
    task: Task,
    series: str,
    seed: int,
    tuner: Callable[[], RealTime],
    start: dict[str, float],
    pace: int = 1,
) -> dict[str, Any]:
    """Tune while the network trains, until the learning rate has gone to 0 or the budget is spent."""
    task = task.paced(pace)
    directory = task.folder.checkpoints / f"{series}-{seed}".replace(" ", "_")
    with Clock(task.budget, f"{series}, seed {seed}", task.now) as clock:
        measure = Measure(task, clock, series, seed)
        try:
            result = tuner().run(
                task.batches(seed, windows=MOST),
                task.samples(seed),
                params=task.params(seed),
                hparams={name: jnp.asarray(value, jnp.float32) for name, value in start.items()},
                window=task.window,
                callbacks=[measure, Checkpoint(directory, every=100, keep=1), Go(clock)],
                stop=[vanished, measure.reason],
            )
            stopped, hparams = result.stopped, result.hparams
        except NonFiniteError as fault:
            stopped, hparams = str(fault).splitlines()[0], fault.state.hparams
        clock.pause()
    if stopped == "interrupted":
        raise KeyboardInterrupt
    shutil.rmtree(directory, ignore_errors=True)
    last = {name: float(value) for name, value in hparams.items()}
    windows = measure.curve.records[-1]["step"] if measure.curve.records else 0
    return measure.curve.outcome(
        clock, windows * task.window, stopped=stopped, trials=1, hparams=last
    )

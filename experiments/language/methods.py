"""The methods of the language experiment, and what each has spent.

All start from the even mixture at the best peak rate of a grid, all are judged by the target's
validation loss, and none looks at its test loss. Time is counted in trainings: a search has as many as
the descent on hypergradients took the time of.
"""

import itertools
import math
import time
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft
from foretune.report import RunFolder

from . import mixtures
from .model import CONSTRAINTS, Language, adamw

RATES = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
"""Peak rates that every fixed mixture is trained with; the best by validation counts."""
STEP = 0.3
"""Of the descent, in log or logit of each hyperparameter; it falls to 0 as a cosine."""


class Task(NamedTuple):
    """What the methods share."""

    language: Language
    folder: RunFolder
    outer: int
    """Steps of the descent on hypergradients."""
    window: int
    """Steps between two updates in real time."""
    seconds: float
    """Of a training."""
    seeds: int
    """Among which the cost of asking `trust` is shared."""
    asked: dict[str, Any]
    """The answer, once there is one."""


def train(language: Language, hparams: dict, seed: int, trial: int = 0) -> tuple[float, Any]:
    """Return validation loss and weights; a training that diverged has the loss infinity."""
    value, state = language.problem(seed, trial).response(hparams)
    return float(value) if math.isfinite(value) else math.inf, state.params


def seconds_of_training(language: Language) -> float:
    """Return the time of a training."""
    hparams, problem = language.start(RATES[0]), language.problem(0)

    def once():
        began = time.perf_counter()
        jax.block_until_ready(problem.response(hparams))
        return time.perf_counter() - began

    once()  # compiles
    return median(once() for _ in range(3))


def best_rate(
    language: Language, mixture: Any, seed: int, rates: tuple[float, ...] = RATES
) -> dict[str, Any]:
    """Train a mixture at each peak rate, and return the best."""
    values = [train(language, language.start(rate, mixture), seed)[0] for rate in rates]
    rate = rates[int(np.argmin(values))]
    return {
        "validation": min(values),
        "rate": rate,
        "trainings": len(rates),
        "hparams": as_lists(language.start(rate, mixture)),
    }


def choose(language: Language, found: list[np.ndarray], seed: int, spent: float) -> dict[str, Any]:
    """Return the best of several mixtures, each at its best rate."""
    tried = [best_rate(language, mixture, seed) for mixture in found]
    best = min(tried, key=lambda t: t["validation"])
    return best | {"trainings": spent + sum(t["trainings"] for t in tried)}


def excess_loss(task: Task, seed: int, start: dict) -> dict[str, Any]:
    """Return the mixture of `mixtures.excess_loss`."""
    found = mixtures.excess_loss(task.language, as_arrays(start["hparams"]), seed)
    return choose(task.language, found, seed, 1 + 2 * len(found))  # and two losses a step


def alignment(task: Task, seed: int, start: dict) -> dict[str, Any]:
    """Return the mixture of `mixtures.alignment`."""
    found = mixtures.alignment(task.language, as_arrays(start["hparams"]), seed)
    return choose(task.language, found, seed, 3 * len(found))  # a gradient and a tangent a step


# ---- by hypergradients


def descent(task: Task, seed: int, start: dict) -> dict[str, Any]:
    """Descend on mixture, schedule and constants through whole trainings, with fresh draws for each.

    The engine is the one that `trust` advises for the first seed.
    """
    language = task.language
    problem, hparams = language.problem(seed), as_arrays(start["hparams"])
    report = task.asked.get("report")
    if report is None:
        report = task.asked["report"] = ft.trust(
            problem, hparams, constraints=CONSTRAINTS, directions=1, advice="engine"
        )
    result = ft.minimize(
        problem,
        hparams,
        steps=task.outer,
        engine=report.engine,
        optimizer=optax.adam(optax.cosine_decay_schedule(STEP, task.outer)),
        constraints=CONSTRAINTS,
        batches=lambda step, key: language.batches(key),
        key=jax.random.fold_in(jax.random.key(seed), 5),
        callbacks=[
            Trail(),
            ft.Progress(),
            ft.Checkpoint(task.folder.checkpoints / f"descent-{seed}", every=1, keep=1),
        ],
    )
    if result.stopped == "interrupted":
        raise KeyboardInterrupt
    path = [record["hparams"] for record in result.history]
    step = median(record["seconds"] for record in result.history)
    asking = (report.trainings + step / task.seconds) / task.seeds
    return {
        "validation": float(result.value),
        "hparams": as_lists(result.hparams),
        "path": path,
        "values": [float(record["value"]) for record in result.history],
        "trainings": asking + len(path) * step / task.seconds,
        "asking": asking,
        "trust": str(report),
        "engine": repr(report.engine),
    }


class Trail(ft.Callback):
    """Notes at each step how long it took, and the hyperparameters."""

    def start(self, run: Any) -> None:
        """Begin."""
        self._since = time.perf_counter()

    def step(self, run: Any) -> None:
        """Note a step."""
        now = time.perf_counter()
        run.record["seconds"], self._since = now - self._since, now
        run.record["hparams"] = as_lists(run.hparams)


def real_time(task: Task, seed: int, start: dict) -> dict[str, Any]:
    """Tune mixture, rate and constants in the first quarter of one training, and keep its weights."""
    language = task.language
    problem = language.problem(seed, trial=1)
    rate = jnp.asarray(start["rate"], jnp.float32)
    hparams = as_arrays(start["hparams"])
    del hparams["rate"]
    rng = np.random.default_rng([seed, 6])
    rows = min(len(language.validation), 4 * language.size.batch)
    some = (
        language.validation[rng.permutation(len(language.validation))[:rows]]
        for _ in itertools.count()
    )
    began = time.perf_counter()
    result = tuner(language).run(
        problem.batches,
        some,
        params=problem.init,
        hparams=hparams | {"lr": rate},
        window=task.window,
        callbacks=[ft.Progress()],
    )
    if result.stopped == "interrupted":
        raise KeyboardInterrupt
    state, hparams = result.state.train, result.state.hparams
    path = [as_lists(record["hparams"]) for record in result.history]
    return {
        "validation": float(language.error(state, None, language.validation)),
        "hparams": as_lists(hparams),
        "path": path,
        "values": [float(record["value"]) for record in result.history],
        "trainings": (time.perf_counter() - began) / task.seconds,  # with compilation
        "test": [language.measure(state.params)],
    }


def tuner(language: Language) -> ft.RealTime:
    """Return real-time tuning for a training of this length."""
    constraints = {name: c for name, c in CONSTRAINTS.items() if name != "rate"}
    return ft.RealTime(
        ft.Training(language.loss, lambda h: adamw(h["lr"], h)),
        language.error,
        constraints=constraints | {"lr": ft.NonNegative()},
        horizon=language.size.steps,
    )


def as_lists(hparams: dict[str, Any]) -> dict[str, Any]:
    """Return hyperparameters as JSON has them."""
    return {name: np.asarray(value).tolist() for name, value in hparams.items()}


def as_arrays(hparams: dict[str, Any]) -> dict[str, Any]:
    """Return hyperparameters as arrays."""
    return {name: jnp.asarray(value, jnp.float32) for name, value in hparams.items()}

"""The methods of the language experiment, and what each has spent.

All start from the even mixture, all are judged by the target's validation loss, and none looks at its
test loss. Trainings run side by side, `BESIDE` of them, and time is counted in trainings of such a
batch: a search has as many as the descent on hypergradients took the time of.
"""

import time
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft

from ..runs import RunFolder
from . import mixtures
from .model import BESIDE, CONSTRAINTS, Language

RATES = (1e-3, 2e-3, 3e-3, 4e-3, 6e-3, 8e-3, 12e-3, 16e-3)
"""Peak rates that every fixed mixture is trained with; the best by validation counts."""
STEP = 0.5
"""Of the descent, in log or logit of each hyperparameter; it falls to 0 as a cosine."""
FASTER = 2.0
"""Times this step in the logarithm of each source's weight: useless sources have to lose decades."""
MOST = 1.0
"""Longest gradient that counts, in nats by a factor of e: a longer one tells of chaos."""
MOST_KEPT = 2**35
"""Bytes of states and gradients that are kept on the device, 32 GiB."""
FACTORS = (0.5, 1.0, 2.0, 4.0)
"""Of a learnt schedule, of which the best counts."""
TIMES = 4
"""Trainings by which the best of a few is chosen, of each."""
TIMES_OF_PATH = 8
"""Trainings of each point of a descent by which it is judged afterwards; they do not count."""


class Task(NamedTuple):
    """What the methods share."""

    language: Language
    folder: RunFolder
    outer: int
    """Steps of the descent on hypergradients."""
    draws: int
    """Trainings of each of its steps, with starts and draws of their own."""
    seconds: float
    """Of a training, where `BESIDE` run side by side."""


def train(language: Language, points: list[dict], seed: int) -> list[float]:
    """Return the validation loss of each of these hyperparameters; infinity where it diverged."""
    return language.train(points, seed, [0] * len(points))[0].tolist()


def seconds_of_training(language: Language) -> float:
    """Return the time of a training, of `BESIDE` side by side."""
    points = [language.start(RATES[0])] * BESIDE

    def once():
        began = time.perf_counter()
        train(language, points, 0)
        return time.perf_counter() - began

    once()  # compiles
    return median(once() for _ in range(3)) / BESIDE


def best_of(
    language: Language, points: list[dict], seed: int, times: int = TIMES
) -> tuple[int, float, int]:
    """Return which of a few hyperparameters is best, its mean loss, and the trainings that took."""
    trials = 50 + np.repeat(np.arange(times), len(points))
    values = language.train(times * points, seed, trials)[0].reshape(times, -1).mean(0)
    best = int(np.argmin(values))
    return best, float(values[best]), times * len(points)


def best_rate(
    language: Language,
    mixture: Any,
    seed: int,
    rates: tuple[float, ...] = RATES,
    times: int = TIMES,
) -> dict[str, Any]:
    """Train a mixture at each peak rate, and return the best."""
    points = [language.start(rate, mixture) for rate in rates]
    best, value, trainings = best_of(language, points, seed, times)
    return {
        "validation": value,
        "rate": rates[best],
        "trainings": trainings,
        "hparams": as_lists(points[best]),
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


def descent(task: Task, seed: int) -> dict[str, Any]:
    """Descend on mixture, schedule and constants through whole trainings.

    Each step is the mean of several trainings, which draw anew. It starts at the lowest rate of the
    grid: near the best one small changes of a training grow, and exact gradients are of no use; from
    below, the descent finds schedules with high rates late, where they do not. Where they grow in some
    of the trainings after all, these count less (`RobustMean`), and where they grow in all, the
    gradient is cut to the length `MOST`, lest Adam should stop for the rest of the way. `minimize`
    returns the last point, or the last that was accepted; its schedule counts at the best of `FACTORS`.
    """
    language = task.language
    starts = [language.problem(seed, 10 + k) for k in range(task.draws)]

    def draw(key):  # the same starts each time, minibatches anew
        keys = jax.random.split(key, task.draws)
        drawn = zip(starts, map(language.batches, keys), strict=True)
        return ft.Mean([start.replace(batches=batches) for start, batches in drawn])

    began = time.perf_counter()
    result = ft.minimize(
        draw,
        language.start(RATES[0]),
        steps=task.outer,
        engine=ft.RobustMean(engine(task)),
        optimizer=optax.chain(
            optax.clip_by_global_norm(MOST),
            optax.adam(optax.cosine_decay_schedule(STEP, task.outer)),
            optax.stateless(faster),
        ),
        constraints=CONSTRAINTS,
        key=jax.random.fold_in(jax.random.key(seed), 5),
        callbacks=[
            Trail(),
            ft.Progress(),
            ft.Checkpoint(task.folder.checkpoints / f"descent-{seed}", every=1, keep=1),
        ],
    )
    last = time.perf_counter() - began
    if result.stopped == "interrupted":
        raise KeyboardInterrupt
    path = [record["hparams"] for record in result.history]
    seconds = [record["seconds"] for record in result.history]
    seconds[0] = median(seconds)  # it compiled
    ends = max(0.0, last - sum(record["seconds"] for record in result.history))  # to compare
    learnt = [result.hparams | {"rate": factor * result.hparams["rate"]} for factor in FACTORS]
    chosen, value, choosing = best_of(language, learnt, seed)
    return {
        "validation": value,
        "hparams": as_lists(learnt[chosen]),
        "path": path,
        "values": [float(record["value"]) for record in result.history],
        "trainings": (sum(seconds) + ends) / task.seconds + choosing,
        "factor": FACTORS[chosen],
        "above the end": above_the_end(language, path, result.hparams, seed),
    }


def faster(updates: Any, _: Any) -> Any:
    """Return an update of the hyperparameters that is longer for the sources."""
    return updates | {"sources": FASTER * updates["sources"]}


def above_the_end(
    language: Language, path: list[dict], end: dict[str, Any], seed: int
) -> list[tuple[float, float]]:
    """Return how far each point of a descent is above its end in the same trainings, and its error."""
    points, trials = [*map(as_arrays, path), end], 150 + np.arange(TIMES_OF_PATH)
    values = np.array([language.train([p] * len(trials), seed, trials)[0] for p in points])
    above = values[:-1] - values[-1]
    return list(zip(above.mean(1), above.std(1, ddof=1) / len(trials) ** 0.5, strict=True))


def engine(task: Task) -> ft.Reverse:
    """Return reverse mode that keeps gradients, so that no step is computed again, where they fit."""
    weights = sum(leaf.size for leaf in jax.tree.leaves(task.language.problem(0).init))
    numbers = 4 * weights * task.language.size.steps * task.draws  # Adam has three by weight
    return ft.Reverse(store="gradients" if 4 * numbers < MOST_KEPT else "segments")


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


def as_lists(hparams: dict[str, Any]) -> dict[str, Any]:
    """Return hyperparameters as JSON has them."""
    return {name: np.asarray(value).tolist() for name, value in hparams.items()}


def as_arrays(hparams: dict[str, Any]) -> dict[str, Any]:
    """Return hyperparameters as arrays."""
    return {name: jnp.asarray(value, jnp.float32) for name, value in hparams.items()}

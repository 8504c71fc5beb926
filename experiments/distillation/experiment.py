"""Distilled data: one or ten learnt images of each digit, and what networks trained on them know.

The images, soft labels and step sizes are learnt through whole trainings of 10 steps, then of more,
each from weights drawn anew. They are judged by networks trained from fresh weights, of the same kind
and of others, beside real images: random ones, and those nearest to the mean of their class, with the
best of nine rates. No image of MNIST's test set is used before that; 10,000 of the training set are
held out for the choice of rates.
"""

import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from foretune.report import say

from ..datasets import load
from ..runs import Phases, RunFolder
from .distil import (
    Architecture,
    Judge,
    Stage,
    best_rate,
    chosen,
    convolutional_network,
    distilled,
    judge,
    longer,
    perceptron,
    start,
)
from .page import describe

HELD = 10_000  # training images
INNER_RATE = 0.05  # to begin with
RANDOM, NEAREST = "random", "nearest to the mean"


class Settings(NamedTuple):
    """What a run is asked to do."""

    data: str = "mnist"
    each: tuple[int, ...] = (1, 10)  # images of a class
    stages: tuple[tuple[int, int], ...] = ((10, 3000), (50, 2500), (200, 300))
    width: int = 64
    draws: int = 4
    batch: int = 512
    rate: float = 0.02
    judges: int = 20
    seeds: int = 1
    quick: bool = False


QUICK = Settings(each=(1,), stages=((10, 120),), width=8, draws=1, batch=128, judges=3, quick=True)


def architectures(width: int) -> dict[str, Architecture]:
    """Return the kind that images are learnt with, and others."""
    return {
        f"convolutions, {width} wide": convolutional_network(width),
        f"convolutions, {2 * width} wide": convolutional_network(2 * width),
        "convolutions, two layers": convolutional_network(width, layers=2),
        "convolutions without norm": convolutional_network(width, norm=False),
        "perceptron": perceptron(4 * width),
    }


def run(out: str | Path, settings: Settings) -> Path:
    """Run the experiment, or what is left of it, and return the report's path."""
    title = "Distilled data"
    say(f"{title}: a few learnt images in the place of {settings.data}'s training set.")
    folder = RunFolder(out, kind="distillation", title=title, settings=settings._asdict())
    if folder.result is not None:
        return folder.page()
    data = split(settings.data, settings.quick)
    cells = [(each, seed) for each in settings.each for seed in range(settings.seeds)]
    left = [cell for cell in cells if folder.read(stage_file(*cell)) is None]
    if 0 < len(left) < len(cells):
        say(f"resumed: {len(cells) - len(left)} of {len(cells)} parts are there")
    phases = Phases(len(cells) + 1, done=len(cells) - len(left))
    for each, seed in left:
        phases.begin(f"{each} of each class, seed {seed}")
        folder.write(stage_file(each, seed), learnt(folder, data, settings, each, seed))
    phases.begin("tables, figures and report")
    records = [folder.read(stage_file(*cell)) for cell in cells]
    keep = ("each", "seed", "accuracy", "seconds", "others")
    folder.write_metrics([{k: r[k] for k in keep} for r in records])
    folder.write("result.json", describe(folder, settings, records))
    return folder.page()


def stage_file(each: int, seed: int) -> str:
    """Return the file of what was found."""
    return f"stages/{each}-{seed}.json"


def split(name: str, quick: bool) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return images and labels to learn from, to choose rates with, and to test."""
    found = load(name)
    x = np.round(255 * found.x).astype(np.uint8).reshape(-1, 28, 28, 1)
    last = len(x) - 10_000
    count = 1000 if quick else HELD
    return {
        "train": (x[: last - HELD], found.y[: last - HELD]),
        "held": (x[last - HELD :][:count], found.y[last - HELD :][:count]),
        "test": (x[last:][:count], found.y[last:][:count]),
    }


def learnt(
    folder: RunFolder, data: dict[str, Any], settings: Settings, each: int, seed: int
) -> dict[str, Any]:
    """Return the images of a cell and the accuracies of networks trained on them."""
    kinds = architectures(settings.width)
    kinds = dict(list(kinds.items())[: 1 if settings.quick else None])
    network = next(iter(kinds.values()))
    key, judge_key = jax.random.split(jax.random.key(seed))
    keys = jax.random.split(judge_key, settings.judges)
    images, labels = chosen(data["train"], each, RANDOM, seed)
    hparams: Any = start(images, labels, settings.stages[0][0], INNER_RATE)
    judges: dict[str, Judge] = {}
    found: dict[str, Any] = {
        "each": each,
        "seed": seed,
        "accuracy": {},
        "seconds": {},
        "errors": {},
    }
    for k, (inner, outer) in enumerate(settings.stages):
        began = time.monotonic()
        hparams, errors = distilled(
            network,
            data["train"],
            longer(hparams, inner),
            Stage(inner, outer),
            jax.random.fold_in(key, k),
            draws=settings.draws,
            batch=settings.batch,
            rate=settings.rate,
            folder=folder.checkpoints / f"{each}-{seed}-{inner}",
        )
        found["seconds"][str(inner)] = time.monotonic() - began
        found["errors"][str(inner)] = errors[:: max(1, len(errors) // 200)]
        judges = {name: judge(kind, inner) for name, kind in kinds.items()}
        right = next(iter(judges.values()))(hparams, data["test"], keys)
        found["accuracy"][str(inner)] = right.tolist()
        say(f"  T = {inner}: {100 * right.mean():.2f} ± {100 * right.std():.2f} %")
    found["others"] = compared(judges, data, hparams, each, keys)
    names = ("images", "labels", "log")
    return found | {name: np.round(hparams[name], 4).tolist() for name in names}


def compared(
    judges: dict[str, Judge], data: dict[str, Any], hparams: Any, each: int, keys: jax.Array
) -> dict[str, dict[str, list[float]]]:
    """Return accuracies of all kinds of networks on learnt images and on real ones."""
    steps, few = len(hparams["log"]), max(2, len(keys) // 4)
    sets = {"learnt": hparams}
    for kind in (RANDOM, NEAREST):
        images, labels = chosen(data["train"], each, kind, 100)
        real = start(images, labels, steps, 0.1)
        sets[kind] = real | {"labels": 5 * real["labels"]}  # hard ones
    found: dict[str, dict[str, list[float]]] = {}
    for name, judged in judges.items():
        found[name] = {}
        for kind, h in sets.items():
            if kind != "learnt":
                h = best_rate(lambda h, of=judged: of(h, data["held"], keys[:few]), h, steps)
            found[name][kind] = judged(h, data["test"], keys).tolist()
            say(f"  {name}, {kind}: {100 * np.mean(found[name][kind]):.2f} %")
    return found

"""Phone classification: Tables 3 and 5 and Figure 4 of Franceschi et al., ICML 2017.

A network of 15 million weights classifies frames of speech into phone states, helped by an auxiliary
task. Its learning rate eta, momentum mu and the auxiliary task's weight rho are tuned while it trains,
in one run, beside searches that have the same time (`_phones_methods` says how each of them works).
"""

import importlib.util
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from foretune.apps._tables import DataError
from foretune.report import say, write_page

from ..datasets import check_memory
from ..runs import Phases, RunFolder
from . import methods
from .model import AROUND, on_device
from .page import describe
from .speech.corpus import Corpus
from .speech.synthetic import synthetic_speech
from .speech.timit import timit

WIDTH = 123
"""Numbers of a frame."""
GP, TPE = "SMBO (GP)", "SMBO (TPE)"
_ours = partial(methods.realtime, tuner=methods.our_tuner, pace=methods.PACE)
METHODS: dict[str, Callable[..., dict[str, Any]]] = {
    "Vanilla": methods.vanilla,
    "RS": partial(methods.search, sampler=methods.Random),
    GP: partial(methods.search, sampler=partial(methods.Optuna, "GP")),
    TPE: partial(methods.search, sampler=partial(methods.Optuna, "TPE")),
    "RTHO": partial(methods.realtime, tuner=methods.paper_tuner, start=methods.KNOWN),
    "RTHO-NT": partial(methods.realtime, tuner=methods.paper_tuner, start=methods.NULL),
    "foretune": partial(_ours, start=methods.KNOWN),
    "foretune-NT": partial(_ours, start=methods.NULL),
}


class Settings(NamedTuple):
    """What a run is asked to do."""

    data: str = "synthetic"
    frames: int = 1_500_000
    budget: float = 100.0
    seeds: int = 3
    searches: int = 5
    width: int = 2000
    layers: int = 4
    batch: int = 500
    window: int = 200
    sample: int = 20_000
    check: int = 5
    patience: int = 5
    cepstral: bool = False
    quick: bool = False


QUICK = Settings(
    frames=40_000,
    budget=15.0,
    seeds=1,
    searches=1,
    width=128,
    layers=2,
    batch=100,
    window=40,
    sample=2000,
    check=3,
    patience=5,
    quick=True,
)


def possible_methods() -> dict[str, Callable[..., dict[str, Any]]]:
    """Return the methods whose libraries are installed; say which are left out."""
    if importlib.util.find_spec("torch") is not None:
        return METHODS
    say(f"left out: {GP}, for Optuna's sampler needs PyTorch (pip install torch)")
    return {name: method for name, method in METHODS.items() if name != GP}


def read(settings: Settings) -> Corpus:
    """Return the corpus that is asked for."""
    if settings.data == "synthetic":
        return synthetic_speech(settings.frames, cepstral=settings.cepstral)
    if settings.data != "timit":
        return timit(settings.data, cepstral=settings.cepstral)
    where = os.environ.get("FORETUNE_DATA")
    for name in ("timit", "timit-sample"):
        if where is not None and (Path(where) / name).is_dir():
            return timit(Path(where) / name, cepstral=settings.cepstral)
    looked = "FORETUNE_DATA is not set" if where is None else f"{where} has no folder timit"
    raise DataError(f"{looked}: give the folder of your copy of TIMIT, --data FOLDER.")


def run(out: str | Path, settings: Settings) -> Path:
    """Run the experiment, or what is left of it, and return the report's path."""
    check(settings)
    say(f"Phone classification on {settings.data}: tune a speech network while it trains.")
    corpus = read(settings)
    asked = settings._asdict()
    if settings.data != "synthetic":
        asked["frames"] = len(corpus.frames)
    title = f"Phone classification on {corpus.name}"
    folder = RunFolder(out, kind="phones", title=title, settings=asked)
    if folder.result is not None:
        return write_page(folder.path)
    announce(corpus)
    jobs = [
        (name, seed, f"stages/{name.replace(' ', '_')}-{seed}.json")
        for name in possible_methods()
        for seed in range(settings.searches if name == "RS" else settings.seeds)
    ]
    left = [job for job in jobs if folder.read(job[2]) is None]
    if 0 < len(left) < len(jobs):
        say(f"resumed: {len(jobs) - len(left)} of {len(jobs)} runs are there")
    phases = Phases(len(jobs) + 1, done=len(jobs) - len(left))
    if left:
        if jax.default_backend() == "cpu" and settings.width >= 1000:
            say("note: no GPU is used; a network of this size is slow (--quick)")
        task = make_task(corpus, settings, folder)
        say("  compiling, and measuring the time of a step")
        speed = methods.measure_speed(task)  # before the clocks run
        if folder.read("stages/speed.json") is None:
            folder.write("stages/speed.json", speed)
        for name, seed, stage in left:
            phases.begin(f"{name}, seed {seed}: {settings.budget:g} s")
            folder.write(stage, METHODS[name](task, name, seed))
            say(f"  {sentence(folder.read(stage))}")
    phases.begin("tables, figures and report")
    found: dict[str, list[dict[str, Any]]] = {}
    for name, _, stage in jobs:
        found.setdefault(name, []).append(folder.read(stage))
    speed = folder.read("stages/speed.json")
    folder.write("result.json", describe(folder, corpus, settings, found, speed))
    return write_page(folder.path)


def check(settings: Settings) -> None:
    """Raise for sizes that no memory holds, before anything is spoken or compiled."""
    if settings.data == "synthetic":
        frames = 2 * 4 * WIDTH * settings.frames  # as they are read, and on the device
        check_memory(f"{settings.frames:,} frames of speech", frames)
    weights = settings.width * ((2 * AROUND + 1) * WIDTH + settings.width * (settings.layers - 1))
    # The weights and their momenta, and the derivatives of both by three hyperparameters.
    check_memory(f"{weights:,} weights and their derivatives", 4 * 2 * (1 + 3) * weights)


def announce(corpus: Corpus) -> None:
    """Say what the corpus is, and which of its files are left out."""
    for why in list(corpus.skipped.values())[:3]:
        say(f"left out: {why}")
    if len(corpus.skipped) > 3:
        say(f"left out: {len(corpus.skipped)} files in all")
    say(f"  {corpus.summary()}")


def make_task(corpus: Corpus, settings: Settings, folder: RunFolder) -> methods.Task:
    """Return what the methods share, with the corpus on the device."""
    count = len(corpus.rows("train"))
    if settings.batch > count:
        raise DataError(f"--batch {settings.batch:,}: there are {count:,} frames to train on.")
    speech = on_device(corpus)
    return methods.Task(
        speech=speech,
        validation=corpus.rows("validation"),
        test=corpus.rows("test"),
        shape={
            "width": settings.width,
            "layers": settings.layers,
            "classes": corpus.classes,
            "size": speech.table.shape[1],
            "inputs": (2 * AROUND + 1) * speech.frames.shape[1],
        },
        batch=settings.batch,
        window=settings.window,
        sample=settings.sample,
        check=settings.check,
        patience=settings.patience,
        budget=settings.budget,
        folder=folder,
    )


def sentence(found: dict[str, Any]) -> str:
    """Return what a method has reached, in words."""
    return (
        f"validation {100 * found['validation_accuracy']:.2f} %, test "
        f"{100 * found['test_accuracy']:.2f} %, {found['seconds']:.0f} s, {found['steps']:,} steps, "
        f"{found['trials']} {'trial' if found['trials'] == 1 else 'trials'} ({found['stopped']})"
    )

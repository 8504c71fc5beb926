"""A language model's data mixture, schedule and constants, learnt by hypergradients.

A byte-level transformer trains on a mixture of sources and is judged by the loss on a target that it
never trains on. Learnt: the weight of each source, the rate at six knots, the decay and both betas of
AdamW; through whole trainings (`descent`). Beside it: mixtures that are fixed, mixtures by shortcuts,
and searches with the same time (see `mixtures` and `searches`).
"""

import concurrent.futures
import contextlib
import math
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from foretune.report import RunError, say

from ..datasets import cache_folder
from ..runs import Phases, RunFolder
from . import methods, mixtures
from .model import Language, Size
from .page import OURS, describe
from .searches import import_optuna, search
from .text import Text, read

SEARCHES = ("random search", "TPE")
SHORTCUTS = {"excess loss": methods.excess_loss, "alignment": methods.alignment}
SLOWER = (4, 2, 1)
"""What the best rate of the small network is divided by in the wider one."""


class Settings(NamedTuple):
    """What a run is asked to do."""

    data: str | None = None
    target: str | None = None
    seeds: int = 3
    layers: int = 2
    width: int = 64
    heads: int = 2
    context: int = 64
    batch: int = 16
    steps: int = 1000
    outer: int = 6
    draws: int = 8
    validation: int = 256
    test: int = 1024
    again: int = 8
    transfer: int = 4
    quick: bool = False

    @property
    def size(self) -> Size:
        """The network and its training."""
        return Size(*(getattr(self, name) for name in Size._fields))


QUICK = Settings(
    seeds=1,
    layers=1,
    width=32,
    heads=2,
    context=32,
    batch=8,
    steps=200,
    outer=18,
    draws=2,
    validation=64,
    test=512,
    transfer=2,
    quick=True,
)


def run(out: str | Path, settings: Settings, processes: int = 1) -> Path:
    """Run the experiment, or what is left of it, and return the report's path."""
    text = read(settings.data, settings.target)
    check(settings, text)
    title = f"A language model for {text.target}"
    say(f"{title}: which of {len(text.names)} sources, and how to train on them?")
    folder = RunFolder(out, kind="language", title=title, settings=settings._asdict())
    if folder.result is not None:
        return folder.page()
    names = names_of(text)
    if settings.transfer > 1:
        names += [f"transfer, {name}" for name in ("uniform", "alignment", OURS)]
    left = {seed: _left(folder, names, seed) for seed in range(settings.seeds)}
    count, done = settings.seeds * len(names), 0
    if (missing := sum(map(len, left.values()))) < count:
        done = count - missing
        say(f"resumed: {done} of {count} parts are there")
    if jax.default_backend() == "cpu" and missing and not settings.quick:
        say("note: no GPU is used; this takes hours (--quick)")
    phases = Phases(count + 1, done=done)
    if processes == 1:
        for seed in left:
            of_seed(folder, settings, left[seed], seed, phases.begin)
    else:
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(processes, mp_context=spawn) as pool:
            asked = (folder.path, settings)
            seeds = [pool.submit(of_seed, *asked, left[seed], seed) for seed in left]
            for done in concurrent.futures.as_completed(seeds):
                done.result()
        phases.done = count
    phases.begin("tables, figures and report")
    parts = {
        name: [folder.read(stage(name, seed)) for seed in range(settings.seeds)] for name in names
    }
    seconds = folder.read(_speed(0))["training"]
    folder.write("result.json", describe(folder, text, settings.size, parts, seconds))
    return folder.page()


def of_seed(
    folder: RunFolder | Path,
    settings: Settings,
    names: list[str],
    seed: int,
    begin: Callable[[str], None] = say,
) -> None:
    """Do what is left of a seed; in a process of its own, in a folder that another has opened."""
    if isinstance(folder, Path):
        folder = RunFolder.shared(folder)
    if not names:
        return
    text = read(settings.data, settings.target)
    language = Language(text, settings.size, settings.validation, settings.test)
    wider = settings.size.times(settings.transfer)
    large = Language(text, wider, settings.validation, settings.test, beside=len(SLOWER))
    if jax.default_backend() != "cpu":
        keep_programs()
    if folder.read(_speed(seed)) is None:
        say("  compiling, and measuring the time of a training")
        folder.write(_speed(seed), {"training": methods.seconds_of_training(language)})
    seconds = folder.read(_speed(seed))["training"]
    task = methods.Task(language, folder, settings.outer, settings.draws, seconds)
    for name in names:
        begin(f"{name}, seed {seed}")
        if name.startswith("transfer, "):
            found = transferred(folder, large, name.removeprefix("transfer, "), seed)
        else:
            found = tuned(folder, task, name, seed)
            found["test"] = again(language, found["hparams"], seed, settings.again)
        folder.write(stage(name, seed), found)
        say(f"  {text.target}, test: {np.mean([t[text.target] for t in found['test']]):.4f}")


def _left(folder: RunFolder, names: list[str], seed: int) -> list[str]:
    return [name for name in names if folder.read(stage(name, seed)) is None]


def _speed(seed: int) -> str:
    return f"stages/speed-{seed}.json"


def keep_programs() -> None:
    """Let JAX keep compiled programs for the next run, unless it has been told where to.

    Without Pooch there is no folder for them: they are compiled again.
    """
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        with contextlib.suppress(ImportError):
            jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))


def names_of(text: Text) -> list[str]:
    """Return the methods; the uniform mixture is where all others start, the searches come last."""
    fixed = mixtures.fixed(text)
    if np.allclose(fixed["by size"], fixed["uniform"]):
        del fixed["by size"]
    return [*fixed, *SHORTCUTS, OURS, *SEARCHES]


def stage(name: str, seed: int) -> str:
    """Return the file of a method's outcome."""
    return f"stages/{name.replace(', ', '-').replace(' ', '-')}-{seed}.json"


def check(settings: Settings, text: Text) -> None:
    """Raise for sizes that do not fit each other, before anything is compiled."""
    import_optuna()  # not after hours
    if settings.width % settings.heads:
        raise RunError(f"--width {settings.width} is no multiple of --heads {settings.heads}.")
    least = min(text.length.min(), len(text.validation), len(text.test))
    if settings.context + 1 >= least:
        raise RunError(f"--context {settings.context}: the shortest text has {least:,} bytes.")


def tuned(folder: RunFolder, task: methods.Task, name: str, seed: int) -> dict[str, Any]:
    """Return what a method finds."""
    fixed = mixtures.fixed(task.language.text)
    if name in fixed:
        return methods.best_rate(task.language, fixed[name], seed)
    start = folder.read(stage("uniform", seed))
    if name in SHORTCUTS:
        return SHORTCUTS[name](task, seed, start)
    if name == OURS:
        return methods.descent(task, seed)
    spent = folder.read(stage(OURS, seed))["trainings"]
    return search(task, name, seed, start, math.ceil(spent))


def again(language: Language, hparams: dict, seed: int, times: int) -> list[dict[str, float]]:
    """Train anew with these hyperparameters, and return the test losses."""
    points = [methods.as_arrays(hparams)] * times
    return [language.measure(w) for w in language.train(points, seed, 100 + np.arange(times))[1]]


def transferred(folder: RunFolder, large: Language, name: str, seed: int) -> dict[str, Any]:
    """Train longer and wider on a mixture that was found in the small, at the best of a few rates."""
    shares = np.asarray(folder.read(stage(name, seed))["hparams"]["sources"])
    rate = folder.read(stage("uniform", seed))["rate"]
    rates = tuple(rate / factor for factor in SLOWER)
    found = methods.best_rate(large, shares / shares.sum(), seed, rates, times=1)
    return found | {"test": again(large, found["hparams"], seed, large.beside)}

"""Few-shot learning: letters of scripts that were not seen, from one or five images of each.

The classes of `glyphs/background.npz` are learnt from, but for those of six scripts, on which choices
are made; those of `glyphs/test.npz`, or of another file, are only tested. A task has some classes, a
few images of each as its support and ten more as its query. Every method makes as many steps, with as
many tasks in each, by the same outer optimizer.
"""

import concurrent.futures
import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from foretune.report import say

from ..runs import Phases, RunFolder
from . import baselines, methods
from .page import describe
from .tasks import Images, Letters, Size, check, files, read, sampled

QUERIES = 10
MAML, MEANS, FIRST = "MAML", "MAML from class means", "MAML, first order"
HEAD, PROTOTYPES = "representation, own head", "prototypical network"
PRETRAINED = "pretrained"
INNER = {MAML: 5, MEANS: 5, FIRST: 5, HEAD: 50}
LEARNT = (MAML, MEANS, FIRST, HEAD, PROTOTYPES)


class Settings(NamedTuple):
    """What a run is asked to do."""

    data: str | None = None
    methods: tuple[str, ...] = LEARNT
    sizes: tuple[tuple[int, int], ...] = ((5, 1), (5, 5), (20, 1), (20, 5))
    inner: tuple[int, ...] = (1, 5, 50, 200)
    seeds: int = 1
    steps: int = 4000
    tasks: int = 16
    rate: float = 0.002
    widths: tuple[int, ...] = (64, 64, 64, 64)
    test: int = 1000
    quick: bool = False


QUICK = Settings(
    methods=(MAML, PROTOTYPES), sizes=((5, 1),), inner=(), steps=30, tasks=4, widths=(8, 16),
    test=100, quick=True,
)  # fmt: skip


class Cell(NamedTuple):
    """One method on tasks of one size."""

    method: str
    ways: int
    shots: int
    inner: int
    seed: int

    @property
    def stage(self) -> str:
        """The file of what was found."""
        name = self.method.replace(",", "").replace(" ", "-")
        return f"stages/{name}-{self.ways}-{self.shots}-{self.inner}-{self.seed}.json"


def run(out: str | Path, settings: Settings, processes: int = 1) -> Path:
    """Run the experiment, or what is left of it, and return the report's path."""
    title = "Few-shot learning"
    say(f"{title}: letters of other scripts, from a few images of each.")
    paths = files(settings.data)
    letters = read(*paths)
    for ways, shots in settings.sizes:
        check(letters, Size(ways, shots, QUERIES))
    folder = RunFolder(
        out, kind="fewshot", title=title, settings=settings._asdict(), files=list(map(str, paths))
    )
    if folder.result is not None:
        return folder.page()
    cells = cells_of(settings)
    left = [cell for cell in cells if folder.read(cell.stage) is None]
    if 0 < len(left) < len(cells):
        say(f"resumed: {len(cells) - len(left)} of {len(cells)} parts are there")
    phases = Phases(len(cells) + 1, done=len(cells) - len(left))
    for cell, found in computed(left, settings, paths, processes):
        phases.begin(f"{cell.method}, {cell.ways} ways, {cell.shots} shots, {cell.inner} steps")
        folder.write(cell.stage, found)
        for name, right in found["accuracy"].items():
            say(f"  {name}: {100 * right['mean']:.2f} ± {100 * right['error']:.2f} %")
    phases.begin("tables, figures and report")
    records = [cell._asdict() | folder.read(cell.stage) for cell in cells]
    folder.write_metrics([{k: v for k, v in r.items() if k != "sha256"} for r in records])
    usual = {method: INNER.get(method, 0) for method in settings.methods}
    folder.write("result.json", describe(folder, settings, letters, records, usual))
    return folder.page()


def cells_of(settings: Settings) -> list[Cell]:
    """Return the parts of a run, the slowest first, so that processes end together."""
    cells = [
        Cell(method, ways, shots, INNER.get(method, 0), seed)
        for seed in range(settings.seeds)
        for ways, shots in settings.sizes
        for method in settings.methods
    ]
    ways, shots = settings.sizes[0]
    others = [
        Cell(method, ways, shots, inner, 0)
        for inner in settings.inner
        for method in (MAML, HEAD)
        if method in settings.methods and inner != INNER[method]
    ]
    cells += [Cell(PRETRAINED, 0, 0, 0, seed) for seed in range(settings.seeds)]
    return sorted(others + cells, key=lambda c: -c.inner * (10 if c.method != HEAD else 1) - c.ways)


def computed(
    left: list[Cell], settings: Settings, paths: tuple[Path, Path], processes: int
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Give each cell with what was found, here or in processes of their own."""
    if processes == 1:
        for cell in left:
            yield cell, found_in(cell, settings, paths)
        return
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        waiting = {pool.submit(found_in, cell, settings, paths): cell for cell in left}
        for done in concurrent.futures.as_completed(waiting):
            yield waiting[done], done.result()


def found_in(cell: Cell, settings: Settings, paths: tuple[Path, Path]) -> dict[str, Any]:
    """Return the test accuracies of a cell, by name, and the seconds of its learning."""
    letters = read(*paths)
    start_key, learn_key, test_key = jax.random.split(jax.random.key(cell.seed), 3)
    budget = methods.Budget(settings.steps, settings.tasks, settings.rate, settings.widths)
    began = time.monotonic()
    if cell.method == PRETRAINED:
        ways, shots = settings.sizes[0]
        count = budget.tasks * ways * (shots + QUERIES)
        layers = baselines.pretrained(start_key, letters.train, budget.widths, budget, count)
        layers = jax.block_until_ready(layers)
        seconds = time.monotonic() - began
        sizes = [Size(ways, shots, QUERIES) for ways, shots in settings.sizes]
        found = {}
        for size in sizes:
            found |= with_own_heads(layers, letters, size, settings, test_key)
        return {"accuracy": found, "seconds": seconds}
    size = Size(cell.ways, cell.shots, QUERIES)
    budget = budget._replace(steps=steps_of(cell, settings))
    if cell.ways > 5:
        budget = budget._replace(tasks=max(1, budget.tasks // 4))  # as many images
    method = made(cell, size, budget.widths, start_key)
    learnt = jax.block_until_ready(method.learn(letters.train, size, budget, learn_key))
    seconds = time.monotonic() - began
    judged = judge(method.accuracy)
    found = {cell.method: judged(learnt, letters.test, size, test_key, settings.test)}
    rates = jax.tree.map(lambda x: float(jnp.exp(x)), learnt["log"])
    return {"accuracy": found, "seconds": seconds, "rates": rates}


def steps_of(cell: Cell, settings: Settings) -> int:
    """Return the outer steps; where more than 50 steps are inside, so many times fewer."""
    return settings.steps * 50 // max(50, cell.inner)


def made(
    cell: Cell, size: Size, widths: tuple[int, ...], key: jax.Array
) -> methods.Bilevel | baselines.Prototypes:
    """Return the method of a cell."""
    if cell.method == PROTOTYPES:
        return baselines.Prototypes(key, size, widths)
    if cell.method == HEAD:
        return methods.representation(key, size, widths, cell.inner)
    means, exact = cell.method == MEANS, cell.method != FIRST
    return methods.maml(key, size, widths, cell.inner, means=means, exact=exact)


tasks = jax.jit(jax.vmap(sampled, (0, None, None)), static_argnums=2)  # keys, images, size


def judge(accuracy: methods.Accuracy) -> Callable[..., dict[str, float]]:
    """Return the mean accuracy over random tasks, and its standard error, as a function."""

    @jax.jit
    def of_tasks(learnt, support, query):
        return jax.vmap(accuracy, (None, 0, 0))(learnt, support, query)

    def judged(learnt, images: Images, size: Size, key: jax.Array, count: int):
        keys, images = jax.random.split(key, count), jnp.asarray(images)
        parts = [keys[i : i + 50] for i in range(0, count, 50)]
        right = np.concatenate([of_tasks(learnt, *tasks(part, images, size)) for part in parts])
        return {"mean": float(right.mean()), "error": float(right.std(ddof=1) / np.sqrt(count))}

    return judged


def with_own_heads(
    layers: Any, letters: Letters, size: Size, settings: Settings, key: jax.Array
) -> dict[str, dict[str, float]]:
    """Return the accuracies of a pretrained network's features; validation chooses the options."""
    heads = {
        "own head": (baselines.by_own_head(size), baselines.HEADS),
        "nearest mean": (baselines.by_nearest_mean(size), baselines.COSINE),
    }
    found = {}
    for name, (accuracy, options) in heads.items():
        judged, few = judge(accuracy), max(50, settings.test // 5)
        learnt = [(layers, option) for option in options]
        tried = [judged(each, letters.validation, size, key, few)["mean"] for each in learnt]
        of_size = f"{PRETRAINED}, {name}, {size.ways} ways, {size.shots} shots"
        best = learnt[int(np.argmax(tried))]
        found[of_size] = judged(best, letters.test, size, key, settings.test)
    return found

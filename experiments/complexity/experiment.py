"""What a hypergradient costs: Appendix A of Franceschi et al., ICML 2017, measured.

A network of rectified layers is trained for T steps of gradient descent with momentum on minibatches
of random inputs, and the hypergradient of m hyperparameters is computed by each engine. Three sweeps:
over m, over the number of weights (the width of the hidden layers) and over T.
`_complexity_programs` says what is measured, and how.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax

from foretune._engines.memory import show_bytes
from foretune.report import RunError, say

from ..datasets import check_memory
from ..runs import Phases, RunFolder
from .page import describe, with_present_names
from .programs import EXAMPLES, Point, engines_of, make_data, measure_point


class Settings(NamedTuple):
    """What a run is asked to do."""

    network: tuple[int, ...] = (784, 200, 200, 10)
    steps: int = 1000
    batch: int = 100
    hyperparameters: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 256, 1024, 4096)
    forward: int = 64
    """The most hyperparameters that forward mode is measured with."""
    widths: tuple[int, ...] = (50, 100, 200, 400, 800, 1600, 3200)
    rounds: int = 5
    seed: int = 0
    quick: bool = False


QUICK = Settings(
    steps=20,
    hyperparameters=(2, 8, 1024),
    forward=8,
    widths=(50, 200),
    rounds=3,
    quick=True,
)


def run(out: str | Path, settings: Settings) -> Path:
    """Run the experiment, or what is left of it, and return the report's path."""
    check(settings)
    title = "Time and memory of a hypergradient"
    say(f"{title}: what do forward and reverse mode cost, compared with plain training?")
    folder = RunFolder(out, kind="complexity", title=title, settings=settings._asdict())
    if folder.result is not None:
        return folder.page()
    points = points_of(settings)
    left = [point for point in points if folder.read(stage(point)) is None]
    announce(settings, points)
    if 0 < len(left) < len(points):
        say(f"resumed: {len(points) - len(left)} of {len(points)} points are there")
    if left and jax.default_backend() == "cpu" and not settings.quick:
        say("note: no GPU is used; this can take hours (--quick)")
    data = make_data(settings.network, settings.seed) if left else None
    phases = Phases(len(points) + 1, done=len(points) - len(left))
    for point in left:
        phases.begin(str(point))
        records = measure_point(point, settings, data)
        folder.write(stage(point), records)
        say(f"  {sentence(records)}")
        note(folder, points)
    phases.begin("tables, figures and report")
    records = note(folder, points)
    folder.write("result.json", describe(folder, settings, records))
    return folder.page()


def announce(settings: Settings, points: list[Point]) -> None:
    """Say what the run is about to do: the sizes of its data, and how many trainings."""
    programs = sum(1 + len(engines_of(point, settings)) for point in points)
    say(
        f"  data: {EXAMPLES:,} random examples of {settings.network[0]:,} inputs and "
        f"{settings.network[-1]:,} classes, minibatches of {settings.batch:,}"
    )
    say(
        f"  trainings: {len(points)} points, {programs} programs in all, each compiled and run "
        f"{settings.rounds + 1} times"
    )


def check(settings: Settings) -> None:
    """Raise for settings that cannot be run, before anything is compiled."""
    wrong = [
        f"{name} {value:,}: it must be 1 or more."
        for name in ("steps", "batch", "rounds")
        if (value := getattr(settings, name)) < 1
    ]
    if len(settings.network) < 3 or min(settings.network) < 1:
        wrong.append(
            f"network {settings.network}: give the inputs, one hidden layer or more, and the classes, "
            "each 1 or more, as 784-200-200-10."
        )
    for name, least in (("hyperparameters", 2), ("widths", 1)):
        values = getattr(settings, name)
        if not values or min(values) < least:
            wrong.append(f"{name} {values}: give one number or more, each {least} or more.")
    most = max(settings.hyperparameters, default=2)
    if most > EXAMPLES + 2:
        wrong.append(
            f"hyperparameters {most:,}: there are {EXAMPLES:,} examples to weight, so give at most "
            f"{EXAMPLES + 2:,}."
        )
    if settings.forward < 2:
        wrong.append(f"forward {settings.forward}: it must be 2 or more.")
    if settings.batch > EXAMPLES:
        wrong.append(f"batch {settings.batch:,}: there are {EXAMPLES:,} examples.")
    if wrong:
        raise RunError("\n".join(wrong))
    largest = max(points_of(settings), key=lambda point: point.weights)
    # The weights, their momenta and gradients; the indices of all minibatches; the examples.
    check_memory(f"{largest.weights:,} weights", 3 * 4 * largest.weights)
    check_memory(f"minibatches of {settings.steps:,} steps", 4 * settings.steps * settings.batch)
    check_memory(f"{EXAMPLES:,} examples", 4 * EXAMPLES * largest.network[0])


def points_of(settings: Settings) -> list[Point]:
    """Return the points of the three sweeps, each once, from small to large."""
    network, T = settings.network, settings.steps
    points = {Point(network, m, T) for m in settings.hyperparameters}
    points |= {Point(network, 2, steps) for steps in (T, max(T // 4, 1))}
    for width in settings.widths:
        hidden = (width,) * (len(network) - 2)
        points.add(Point((network[0], *hidden, network[-1]), 2, T))
    return sorted(points, key=lambda p: (p.weights * p.steps, p.hyperparameters))


def stage(point: Point) -> str:
    """Return the file of a point's measurements."""
    return f"stages/{point.shape}-m{point.hyperparameters}-T{point.steps}.json"


def note(folder: RunFolder, points: list[Point]) -> list[dict[str, Any]]:
    """Write the measurements so far, one to a line, and return them."""
    found = [record for point in points for record in folder.read(stage(point)) or []]
    records = with_present_names(found)
    folder.write_metrics(records)
    return records


def sentence(records: list[dict[str, Any]]) -> str:
    """Return a point's measurements in words."""
    parts = []
    for r in records:
        if "skipped" in r:
            parts.append(f"{r['series']} skipped ({r['skipped']})")
        else:
            parts.append(f"{r['series']} {r['seconds']:.3g} s, {show_bytes(r['bytes'])}")
    return "; ".join(parts)

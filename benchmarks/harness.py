"""What every benchmark shares: its command line, timing, tables, and records of what it ran on."""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

Timing = dict[str, float]


def command_line(doc: str | None, out: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with the option `--out`, whose description is the module's docstring."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default=out, help="write the results to this JSON file")
    return parser


def record(path: str | None, results: Any, packages: Sequence[str] = ()) -> None:
    """Write the results, where a path is given, with machine, versions, date and command.

    `packages` are those whose versions count beside the usual ones.
    """
    if path is None:
        return
    device = jax.devices()[0]
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    names = ("jax", "jaxlib", "optax", "equinox", *packages)
    program = Path(sys.argv[0]).stem
    document = {
        "command": shlex.join(["python", "-m", f"benchmarks.{program}", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": f"{device.platform}: {device.device_kind}",
        "machine": f"{platform.machine()}, {cores} CPU cores",
        "versions": {
            "python": platform.python_version(),
            "foretune": __import__("foretune").__version__,  # also where it is not installed
            **{name: importlib.metadata.version(name) for name in names},
        },
        "results": results,
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(document, indent=2) + "\n")


def recorded(path: str) -> Any:
    """Return the results of a file."""
    return json.loads(Path(path).read_text())["results"]


class Table:
    """A table in Markdown, printed row by row."""

    def __init__(self, *heads: str):
        self._show(heads)
        self._show(["---"] * len(heads))

    def add(self, *cells: Any) -> None:
        """Print a row; floats have four significant digits."""
        self._show([f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells])

    def _show(self, cells: Sequence[str]) -> None:
        print("|", " | ".join(cells), "|", flush=True)


def time_in_turns(
    programs: dict[str, Callable[[], Any]], rounds: int
) -> tuple[Timing, Callable[[str, str], float]]:
    """Return each program's median seconds, and a function for the median ratio of two.

    Programs run one after another in each round, so that a ratio is taken between neighbours.
    """
    for program in programs.values():
        for _ in range(2):
            jax.block_until_ready(program())
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            seconds[name].append(time.perf_counter() - start)

    def ratio(numerator: str, denominator: str) -> float:
        pairs = zip(seconds[numerator], seconds[denominator], strict=True)
        return statistics.median(a / b for a, b in pairs)

    return {name: statistics.median(values) for name, values in seconds.items()}, ratio


def timed(program: Callable[[], Any], budget: float = 3.0) -> tuple[Any, float]:
    """Return a compiled program's result and its median seconds: three runs, fewer over the budget."""
    result, seconds = None, []
    while len(seconds) < 3 and sum(seconds) < budget:
        began = time.perf_counter()
        result = jax.block_until_ready(program())
        seconds.append(time.perf_counter() - began)
    return result, statistics.median(seconds)


def temporary_bytes(lowered: Any) -> int:
    """Return the compiler's figure for the temporary arrays of a program."""
    return lowered.compile().memory_analysis().temp_size_in_bytes

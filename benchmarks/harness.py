"""How benchmarks time programs and record what they ran on."""

import datetime
import importlib.metadata
import json
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


def record(path: str, results: dict[str, Any], packages: Sequence[str] = ()) -> None:
    """Write the results with the machine, the versions, the date and the command.

    `packages` are those whose versions count beside the usual ones.
    """
    device = jax.devices()[0]
    names = ("foretune", "jax", "jaxlib", "optax", "equinox", *packages)
    document = {
        "command": shlex.join(
            ["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
        ),
        "date": datetime.date.today().isoformat(),
        "device": f"{device.platform}: {device.device_kind}",
        "machine": f"{platform.machine()}, {_cores()} CPU cores",
        "versions": {"python": platform.python_version(), **{n: _version(n) for n in names}},
        "results": results,
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(document, indent=2) + "\n")


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(name: str) -> str:
    if name == "foretune":  # also where it is run from its source tree, not installed
        return __import__("foretune").__version__
    return importlib.metadata.version(name)

"""What memory there is, what a program needs of it, and sizes in words."""

import math
import re
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{prefix}i": 1024**k for k, prefix in enumerate("kmgt", start=1)}


def parse_bytes(memory: object, where: str = "Auto") -> int:
    """Return the bytes of a number or of a text like "4GiB"."""
    found = memory
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]?i?)b?\s*", memory.lower())
        if match and match[2] in _UNITS and match[1].replace(".", "", 1).isdigit():
            found = int(float(match[1]) * _UNITS[match[2]])
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
        raise ValueError(f'{where}(memory={memory!r}): give bytes, or a text like "4GiB".')
    return int(found)


def show_bytes(count: float | int) -> str:
    """Return a size in words.

    >>> show_bytes(3 * 2**30), show_bytes(1500)
    ('3.0 GiB', '1.5 KiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def tree_bytes(tree: PyTree) -> int:
    """Return the bytes of the arrays in a pytree, or of its shapes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def program_bytes(program: jax.stages.Compiled) -> int:
    """Return the memory of a compiled program: data, results and temporary arrays."""
    memory = program.memory_analysis()
    if memory is None:  # a backend that does not say
        return 0
    given = memory.argument_size_in_bytes - memory.alias_size_in_bytes
    return int(agreed(given + memory.output_size_in_bytes + memory.temp_size_in_bytes))


def free_bytes() -> float:
    """Return what is free on this process's first device; without a limit where it does not tell."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return float(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return host_bytes()


def host_bytes(root: Path = Path("/")) -> float:
    """Return the memory of the host that a program can get, within the limit of its container.

    Files that the system keeps in memory count as free: it gives that memory back.
    """
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text())
        free = float(found[1]) * 1024 if found else math.inf
    except OSError:  # not Linux
        free = math.inf
    group = root / "sys/fs/cgroup"
    try:
        limit, used = (float((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = (group / "memory.stat").read_text()
        cached = re.search(r"^inactive_file (\d+)", stat, re.MULTILINE)
        return max(0.0, min(free, limit - used + (float(cached[1]) if cached else 0.0)))
    except (OSError, ValueError):  # no container, or "max": no limit
        return free


def agreed(figure: float | int, least: bool = False) -> float:
    """Return process 0's figure, or the least of all: the same in every process."""
    if jax.process_count() == 1:
        return float(figure)
    figures = multihost_utils.process_allgather(np.array([figure]))
    return float(figures.min() if least else figures.flat[0])

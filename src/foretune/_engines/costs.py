"""What the parts of a hypergradient take on this device: a few steps of the problem itself, timed.

The first n of the T steps are compiled and run as plain training, with the adjoint from stored states
(the loss's gradient transposed in both ways), with some of them stored, with all that the adjoint needs
stored, and with one, four and more tangents; n is so large that plain training takes some hundredths of
a second. The compiler says how much memory each takes.

Where a hundred trainings take less time than the compiler took for one, no choice of an engine can save
what measuring them costs: plain training alone is timed, and the rest assumed.
"""

import functools
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from .._problem.arguments import Structure
from .._problem.problem import Problem, opened
from .._problem.system import System, make_system
from .products import directional, has_no_mode, unstack
from .reverse import Reverse
from .schedules import binomial_steps
from .segments import split_where_worth

Name = str | int
Key = TypeVar("Key")
Solve = Callable[[Problem, System, PyTree], PyTree]
_SHORT = 4
_SECONDS = 0.02
_CALLS = 100  # of a hypergradient, in which measuring costs must pay
_PROMISING = 3.0


class Costs(NamedTuple):
    """Seconds and bytes of one step, in each of the ways an engine goes through it."""

    steps: int
    hyperparameters: int
    state: float
    """Bytes of a state."""
    step: float
    again: float
    """Seconds of a step that is computed again in a loop whose length the compiler does not know."""
    adjoint: float
    """Seconds of a step's adjoint from the state before it: the step is computed once more."""
    ordinary: float
    """Seconds of the same with a gradient transposed by reverse mode, where that differs."""
    whole: float
    """Seconds of a step and its adjoint, where all that the adjoint needs was stored."""
    kept: float
    """Bytes that are stored for a step then."""
    kept_gradient: float
    """Seconds of a step's adjoint where its gradient was stored with the state before it."""
    gradient: float
    """Bytes that are stored for a step then, beside the state."""
    tangents: dict[int, float]
    """Seconds of a step with c tangents, for some c."""
    measured: bool = True
    """Whether more than `step` was measured."""
    split: bool = False
    """Whether segments keep gradients in place of states."""

    def with_tangents(self, count: int) -> float:
        """Return the seconds of a step with `count` tangents, between or beyond those measured."""
        known = sorted(self.tangents)
        if not known:
            return math.inf
        if len(known) == 1:
            return self.step + count * (self.tangents[1] - self.step)
        upper = next((k for k in known[1:] if k >= count), known[-1])
        lower = known[known.index(upper) - 1]
        slope = (self.tangents[upper] - self.tangents[lower]) / (upper - lower)
        return self.tangents[lower] + max(slope, 0.0) * (count - lower)


def measure_costs(structure: Structure, arrays: list[Array], limit: float | int) -> Costs:
    """Return the costs, infinite where a mode cannot differentiate the step.

    Nothing is run that needs more than `limit` bytes.
    """
    sizes = {}

    def count(arrays):
        problem, hparams = opened(structure, arrays)
        system = make_system(problem, hparams)
        s = system.initial(hparams)
        sizes["T"], sizes["m"] = system.steps, ravel_pytree(hparams)[0].size
        sizes["two ways"] = problem.dynamics.transposable() is not problem.dynamics
        sizes["K"] = len(jax.eval_shape(system.errors, s, hparams))
        sizes["split"] = split_where_worth(system, hparams, s) is not None
        return s

    state = sum(math.prod(a.shape) * a.dtype.itemsize for a in _leaves(count, arrays))
    T, m = sizes["T"], sizes["m"]

    def timed(
        solves: Mapping[str, Solve] | Mapping[Name, Solve], steps: int
    ) -> dict[Name, tuple[float, float]]:
        """Return seconds per step and bytes of each; all are compiled, then run in turn."""

        def program(solve, arrays):
            problem, hparams = opened(structure, arrays)
            short = _shortened(make_system(problem, hparams), steps, sizes["K"])
            return solve(problem, short, hparams)

        found, lowered = dict.fromkeys(solves, (math.inf, 0.0)), {}
        for name, solve in solves.items():
            try:
                lowered[name] = jax.jit(functools.partial(program, solve)).lower(arrays)
            except (ValueError, TypeError) as error:
                if not has_no_mode(error):
                    raise
        began = time.perf_counter()
        programs = compile_all(lowered)
        sizes["compiling"] = agreed(time.perf_counter() - began)
        for name, compiled in programs.items():
            seconds, size = run_time(compiled.result(), arrays, limit)
            found[name] = seconds / steps, size
        return found

    def tangents(c):
        def solve(problem, system, hparams):
            flat, unravel = ravel_pytree(hparams)
            directions = jax.nn.one_hot(jnp.arange(c) % m, m, dtype=flat.dtype)
            return directional(system, hparams, unstack(jax.vmap(unravel)(directions)))[1:]

        return solve

    plain = {"plain": lambda problem, system, hparams: system.run(hparams)}
    most = max(1, min(T, int(limit / (4 * max(state, 1)))))
    n = min(most, _SHORT)
    step, _ = timed(plain, n)["plain"]
    if _CALLS * T * step < sizes["compiling"]:
        return _assumed(T, m, state, step)._replace(split=sizes["split"])
    n = max(n, min(most, math.ceil(_SECONDS / step)))
    few = max(1, n // 4)
    stores = {s: s for s in ("states", "gradients", "everything")} | {"some": few}
    solves = {name: Reverse(store=store).solve for name, store in stores.items()}
    if sizes["two ways"]:
        solves["ordinary"] = Reverse(transpose="reverse").solve
    largest = int(max(1, min(m, limit // max(state, 1) - 2)))
    counts = dict.fromkeys((1, min(4, largest)))
    runs = timed({**plain, **solves, **{c: tangents(c) for c in counts}}, n)
    step, (states, held), (whole, more) = runs["plain"][0], runs["states"], runs["everything"]
    kept = state + max(more - held, 0.0) / n
    adjoint = max(states - step, step)
    ordinary = max(runs["ordinary"][0] - step, step) if "ordinary" in runs else math.inf
    kept_gradient = max(runs["gradients"][0] - step, step)
    gradient = min(max(runs["gradients"][1] - held, 0.0) / n, state)
    again = math.inf
    if math.isfinite(adjoint):
        again = max((runs["some"][0] - adjoint) * n / (binomial_steps(n, few) + 1), step)
    found = {c: runs[c][0] for c in counts if math.isfinite(runs[c][0])}
    costs = Costs(
        T, m, state, step, again, adjoint, ordinary, whole, kept, kept_gradient, gradient, found,
        split=sizes["split"],
    )  # fmt: skip
    # Many tangents only where a few of them promise something.
    passes = -(-m // largest) * costs.with_tangents(largest)
    if largest not in counts and passes < _PROMISING * min(step + adjoint, whole):
        seconds = timed({largest: tangents(largest)}, n)[largest][0]
        if math.isfinite(seconds):
            found[largest] = seconds
    return costs


def _assumed(T: int, m: int, state: float | int, step: float) -> Costs:
    """Return what a step of some network takes, as multiples of plain training."""
    tangents = {1: 2 * step, 4: 4 * step}
    return Costs(
        steps=T,
        hyperparameters=m,
        state=state,
        step=step,
        again=step,
        adjoint=3 * step,
        ordinary=math.inf,
        whole=4 * step,
        kept=4 * state,
        kept_gradient=2 * step,
        gradient=state,
        tangents=tangents,
        measured=False,
    )


def _shortened(system: System, steps: int, K: int) -> System:
    """Return the first steps of a system, with errors that cost nothing."""

    def errors(s, hparams):
        moving = [leaf for leaf in jax.tree.leaves(s) if eqx.is_inexact_array(leaf)]
        total = sum(jnp.sum(leaf) for leaf in moving)
        return tuple((k + 1) * total for k in range(K))

    xs = jax.tree.map(lambda leaf: leaf[:steps], system.xs)
    return system._replace(xs=xs, steps=steps, errors=errors)


def concrete(array: Array) -> Array:
    """Return the array, or one of its shape where it is being traced."""
    if isinstance(array, Tracer | jax.ShapeDtypeStruct):
        return jnp.zeros(array.shape, array.dtype)
    return array


def _leaves(f: Callable[..., PyTree], arrays: list[Array]) -> list[jax.ShapeDtypeStruct]:
    return jax.tree.leaves(jax.eval_shape(f, arrays))


def compile_all(lowered: Mapping[Key, jax.stages.Lowered]) -> dict[Key, Future]:
    """Compile programs: at once on a CPU, elsewhere one by one.

    Compilers for other devices choose kernels by timing them, which programs at once would disturb.
    Programs come lowered, since contexts like `jax.enable_x64` do not hold in threads.
    """
    workers = None if jax.default_backend() == "cpu" else 1
    with ThreadPoolExecutor(workers) as pool:
        return {name: pool.submit(program.compile) for name, program in lowered.items()}


def run_time(
    compiled: jax.stages.Compiled, arrays: list[Array], limit: float | int = math.inf
) -> tuple[float, float]:
    """Return the seconds of a compiled program, and the bytes of its temporary arrays."""
    memory: Any = compiled.memory_analysis()
    if memory.temp_size_in_bytes + memory.output_size_in_bytes > limit:
        return math.inf, float(memory.temp_size_in_bytes)
    times, began = [], time.perf_counter()
    several = jax.process_count() > 1  # all run it equally often, whatever their clocks say
    while len(times) < (2 if several else 5):
        start = time.perf_counter()
        jax.block_until_ready(compiled(arrays))
        times.append(time.perf_counter() - start)
        if not several and time.perf_counter() - began > 10 * _SECONDS:
            break
    return agreed(min(times)), float(memory.temp_size_in_bytes)


@functools.cache
def byte_seconds() -> float:
    """Return the seconds to write a byte to new memory and to read it again."""
    big = np.ones(2**24, np.float32)
    arrays = [jax.device_put(big)]
    copy = jax.jit(lambda arrays: arrays[0] + 1.0).lower(arrays).compile()
    return run_time(copy, arrays)[0] / big.nbytes


def free_bytes() -> float:
    """Return what is free on this process's first device; without a limit where it does not tell."""
    stats: Any = jax.local_devices()[0].memory_stats()
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
        free = _free_pages()
    group = root / "sys/fs/cgroup"
    try:
        limit, used = (float((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = re.search(
            r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE
        )
        return max(0.0, min(free, limit - used + (float(cached[1]) if cached else 0.0)))
    except (OSError, ValueError):  # no container, or "max": no limit
        return free


def _free_pages() -> float:
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        return math.inf


def agreed(figure: float | int, least: bool = False) -> float:
    """Return process 0's figure, or the least of all: the same in every process."""
    if jax.process_count() == 1:
        return float(figure)
    figures = multihost_utils.process_allgather(np.array([figure]))
    return float(figures.min() if least else figures.flat[0])


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

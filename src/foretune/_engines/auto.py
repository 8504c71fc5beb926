"""The fastest exact engine that fits in memory, chosen from the compiler's own estimates.

One step of the training is compiled on its own: as it is, with its adjoint, with one tangent and with
two. The compiler says how many operations, bytes and kernels each takes. A hypergradient over T steps
of m hyperparameters is then

    Reverse, everything      T step + T (adjoint - step)             T times what the adjoint keeps
    Reverse, states          T step + T adjoint                      T states
    Reverse, segments        2 T step + T adjoint                    about 2 sqrt(T) states
    Reverse, c states        N(T, c) step + T adjoint                c states (N: binomial)
    Forward, chunk c         ceil(m / c) T (step with c tangents)    c + 1 states

Operations, bytes and kernels become time by three figures of the device, measured once in a process:
the rates of a matrix product and of a copy, and the time of an empty kernel. The candidates are gone
through from the cheapest on; the first whose whole program, compiled, needs no more memory than
allowed is taken.
"""

import functools
import math
import os
import re
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import PyTree

from .._arguments import Structure, unflatten
from .._problem import Problem, System
from .._validate import validated
from .base import AbstractEngine, Hypergradient, Solution, check_options
from .forward import Forward
from .products import pull_rows, pushforward
from .reverse import Reverse
from .schedules import binomial_steps, segments_of

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{prefix}i": 1024**k for k, prefix in enumerate("kmgt", start=1)}
_REMEMBERED = 64


class Candidate(NamedTuple):
    """An engine with what it is predicted to take."""

    engine: AbstractEngine
    seconds: float
    bytes: float
    """The states that it holds; the whole program holds some more."""

    @property
    def name(self) -> str:
        """The engine as a user writes it."""
        e: Any = self.engine
        if isinstance(e, Forward):
            return "Forward()" if e.chunk is None else f"Forward(chunk={e.chunk})"
        return "Reverse()" if e.store == "states" else f"Reverse(store={e.store!r})"


class Choice(NamedTuple):
    """What `Auto` chose, and from what; prints as a table."""

    engine: AbstractEngine
    bytes: int
    """What its program needs: data, results and temporary arrays."""
    limit: float
    candidates: list[Candidate]
    compiled: dict[str, int]
    """The memory of each program that was compiled, by the candidate's name."""

    def __str__(self) -> str:
        head = f"{'engine':<28} {'predicted time':>14} {'its states':>12} {'memory, compiled':>17}"
        lines = [head]
        for c in self.candidates:
            size = show_bytes(self.compiled[c.name]) if c.name in self.compiled else ""
            mark = "  <- chosen" if c.engine == self.engine else ""
            over = "  too large" if self.compiled.get(c.name, c.bytes) > self.limit else ""
            lines.append(
                f"{c.name:<28} {c.seconds:>13.3g}s {show_bytes(c.bytes):>12} {size:>17}{mark or over}"
            )
        limit = "no limit" if math.isinf(self.limit) else f"at most {show_bytes(self.limit)}"
        return "\n".join([*lines, f"The fastest that needs {limit}."])


class Auto(AbstractEngine):
    """Chooses the fastest exact engine that fits in memory.

    Args:
        memory: what the program may need at most, with its data and results: bytes, or a text like
            "4GiB" or "500MB". None (default): what is free on the device.
        check_finite: see `AbstractEngine`.

    The choice is made once for given shapes, from the compiler's estimates of one step, and
    `explain(problem, hparams)` returns it as a table. Where no exact engine fits, an error says what
    the smallest needs.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> problem = ft.Problem(
    ...     dynamics=ft.Training(lambda w, h, x: (w - x) ** 2, lambda h: optax.sgd(h["lr"])),
    ...     objective=lambda state, h, x: (state.params - x) ** 2,
    ...     init=jnp.array(0.0), batches=ft.FullBatch(jnp.array(1.0), steps=1),
    ...     validation=jnp.array(1.0))
    >>> value, grad, state = ft.Auto(memory="1GiB")(problem, {"lr": jnp.array(0.25)})
    >>> float(value), float(grad["lr"])  # f = (1 - 2 lr)^2
    (0.25, -2.0)
    """

    memory: Any
    check_finite: bool | None

    def __init__(self, memory: Any = None, *, check_finite: bool | None = None):
        self.memory = None if memory is None else parse_bytes(memory)
        self.check_finite = check_finite
        check_options(self)

    def solve(self, system: System, hparams: PyTree) -> Solution:
        """Never called: a call goes to the engine that is chosen."""
        raise NotImplementedError

    def __call__(self, problem: Problem, hparams: PyTree) -> Hypergradient:
        """Return the error at `hparams`, its gradient and the final state."""
        return self.explain(problem, hparams).engine(problem, hparams)

    def lower(self, problem: Problem, hparams: PyTree) -> jax.stages.Lowered:
        """Return the program that a call runs."""
        return self.explain(problem, hparams).engine.lower(problem, hparams)

    def explain(self, problem: Problem, hparams: PyTree) -> Choice:
        """Return the choice, which prints as a table of the candidates."""
        arrays, structure = validated(problem, hparams)
        shapes = tuple((a.shape, a.dtype, getattr(a, "weak_type", False)) for a in arrays)
        abstract = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
        key = (structure, shapes, self.memory, self.check_finite)
        if key not in _CHOICES:
            if len(_CHOICES) >= _REMEMBERED:
                _CHOICES.clear()
            _CHOICES[key] = choose(structure, abstract, self.memory, self.check_finite)
        return _CHOICES[key]


_CHOICES: dict[Any, Choice] = {}


def choose(
    structure: Structure, arrays: list[Any], memory: int | None, check_finite: bool | None
) -> Choice:
    """Return the fastest exact engine that fits."""
    given = sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)
    limit = free_bytes() + given if memory is None else memory
    found = sorted(candidates(structure, arrays, check_finite), key=lambda c: c.seconds)
    compiled: dict[str, int] = {}
    for candidate in found:
        if candidate.bytes + given > limit:
            continue
        compiled[candidate.name] = program_bytes(candidate.engine, structure, arrays)
        if compiled[candidate.name] <= limit:
            size = compiled[candidate.name]
            return Choice(candidate.engine, size, limit, found, compiled)
    smallest = min(found, key=lambda c: c.bytes)
    needed = program_bytes(smallest.engine, structure, arrays)
    raise MemoryError(
        f"no exact engine fits into {show_bytes(limit)}: the smallest, {smallest.name}, needs "
        f"{show_bytes(needed)}, of which the data and parameters are {show_bytes(given)}. Allow more, "
        "`Auto(memory=...)`, give a smaller batch, or approximate: `Truncated`, `Implicit`, `Sampled`."
    )


class Cost(NamedTuple):
    """What the compiler says of a program."""

    flops: float
    bytes: float
    kernels: float
    kept: float = 0.0

    def plus(self, other: "Cost", times: float | int = 1) -> "Cost":
        """Return the cost of both, the other so many times."""
        return Cost(*(a + times * b for a, b in zip(self, other, strict=True)))

    def seconds(self) -> float | int:
        """Return the time on this device, about."""
        rate = device_rates()
        return self.flops / rate[0] + self.bytes / rate[1] + self.kernels * rate[2]


def candidates(
    structure: Structure, arrays: list[Any], check_finite: bool | None
) -> list[Candidate]:
    """Return the exact engines, with what each is predicted to take."""
    step, adjoint, one, two, state, T, m = step_costs(structure, arrays)
    tangent = Cost(*(max(b - a, 0.0) for a, b in zip(one, two, strict=True)))
    found = []
    for chunk in _halved(m):
        pass_cost = one.plus(tangent, chunk - 1)
        seconds = -(-m // chunk) * T * pass_cost.seconds()
        engine = Forward(chunk=None if chunk == m else chunk, check_finite=check_finite)
        found.append(Candidate(engine, seconds, (chunk + 1) * state))

    def reverse(store, steps, adjoints, held):
        moved = Cost(0.0, 2.0 * held, 0.0)  # what is stored is written and read once
        seconds = steps * step.seconds() + adjoints + moved.seconds()
        engine = Reverse(store=store, check_finite=check_finite)
        found.append(Candidate(engine, seconds, held))

    back = T * adjoint.seconds()
    length, count = segments_of(T)
    reverse("everything", 0, back, T * max(adjoint.kept, state))
    reverse("states", T, back, T * state)
    reverse("segments", 2 * T, back, (length + count) * state)
    for c in _halved(T):
        if c < T:
            reverse(c, binomial_steps(T, c) + 1, back, c * state)
    return found


def _halved(n: int) -> list[int]:
    """Return n, n / 2, n / 4, ..., 1, rounded up."""
    found = [n]
    while found[-1] > 1:
        found.append(-(-found[-1] // 2))
    return found


def step_costs(structure: Structure, arrays: list[Any]) -> tuple:
    """Return the costs of a step, its adjoint, one and two tangents; the state's bytes; T and m."""

    def system_of(arrays):
        problem, hparams = unflatten(structure, arrays)
        system = problem.system(hparams)
        return system, hparams, jax.tree.map(lambda leaf: leaf[0], system.xs)

    def start(arrays):
        system, hparams, _ = system_of(arrays)
        return system.initial(hparams)

    def step(arrays, s):
        system, hparams, x = system_of(arrays)
        return system.step(s, hparams, x)

    def errors(arrays, s):
        system, hparams, _ = system_of(arrays)
        return system.errors(s, hparams)

    def adjoint(arrays, s, alpha):
        system, hparams, x = system_of(arrays)
        _, pull = eqx.filter_vjp(lambda s, h: system.step(s, h, x), s, hparams)
        return pull_rows(pull, alpha)

    def tangents(arrays, s, Z, directions):
        system, hparams, x = system_of(arrays)
        return pushforward(lambda s, h: system.step(s, h, x), (s, hparams), (Z, directions))

    s = jax.eval_shape(start, arrays)
    K = len(jax.eval_shape(errors, arrays, s))
    sizes: dict[str, int] = {}

    def count(arrays):
        system, hparams, _ = system_of(arrays)
        sizes["T"], sizes["m"] = system.steps, ravel_pytree(hparams)[0].size
        return hparams

    hparams = jax.eval_shape(count, arrays)
    moving = jax.tree.map(lambda leaf: leaf if _inexact(leaf) else None, s)

    def stacked(tree, n):
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct((n, *a.shape), a.dtype), tree)

    costs = [
        program_cost(step, arrays, s),
        program_cost(adjoint, arrays, s, stacked(moving, K)),
        *(
            program_cost(tangents, arrays, s, stacked(moving, n), stacked(hparams, n))
            for n in (1, 2)
        ),
    ]
    state = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(s))
    return (*costs, state, sizes["T"], sizes["m"])


def _inexact(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def program_cost(f: Any, *arguments: Any) -> Cost:
    """Return what the compiler says of a program."""
    compiled = jax.jit(f).lower(*arguments).compile()
    analysis: Any = compiled.cost_analysis() or {}
    analysis = analysis[0] if isinstance(analysis, list) else analysis
    memory = compiled.memory_analysis()
    kept = memory.temp_size_in_bytes if memory else 0.0
    return Cost(
        float(analysis.get("flops", 0.0)),
        float(analysis.get("bytes accessed", 0.0)),
        float(count_kernels(compiled.as_text() or "")),
        float(kept),
    )


def count_kernels(hlo: str) -> int:
    """Return how many instructions of a compiled program's entry do work."""
    entry = hlo.split("ENTRY", 1)[-1]
    operations = re.findall(r"= \S+ ([a-z][\w-]*)\(", entry)
    free = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
    return sum(operation not in free for operation in operations)


def program_bytes(engine: AbstractEngine, structure: Structure, arrays: list[Any]) -> int:
    """Return the memory of an engine's whole program: data, results and temporary arrays."""
    from .base import _compute

    memory: Any = _compute.lower(engine, structure, True, arrays).compile().memory_analysis()
    return int(
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


@functools.cache
def device_rates() -> tuple[float, float, float]:
    """Return the operations and bytes per second of this device, and the seconds of a kernel."""
    n = 2048 if jax.default_backend() != "cpu" else 768
    a, big, small = jnp.ones((n, n)), jnp.ones(2**24), jnp.ones(8)
    product = jax.jit(lambda a: a @ a)
    copy = jax.jit(lambda x: x + 1.0)
    loop = jax.jit(lambda x: lax.fori_loop(0, 2000, lambda _, x: jnp.sin(x), x))

    def seconds(f, x):
        jax.block_until_ready(f(x))
        times = []
        for _ in range(3):
            began = time.perf_counter()
            jax.block_until_ready(f(x))
            times.append(time.perf_counter() - began)
        return min(times)

    return (
        2 * n**3 / seconds(product, a),
        2 * big.nbytes / seconds(copy, big),
        seconds(loop, small) / 2000,
    )


def free_bytes() -> float:
    """Return what is free on the device; without a limit where it does not tell."""
    stats: Any = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return float(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        return math.inf


def parse_bytes(memory: Any) -> int:
    """Return the bytes of a number or of a text like "4GiB".

    >>> parse_bytes("4GiB"), parse_bytes("1.5 MB"), parse_bytes(100)
    (4294967296, 1500000, 100)
    """
    found = memory
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]?i?)b?\s*", memory.lower())
        if match and match[2] in _UNITS and match[1].replace(".", "", 1).isdigit():
            found = int(float(match[1]) * _UNITS[match[2]])
    if isinstance(found, bool) or not isinstance(found, int | float) or not found > 0:
        raise ValueError(f'Auto(memory={memory!r}): give bytes, or a text like "4GiB" or "500MB".')
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

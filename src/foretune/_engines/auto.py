"""The fastest exact engine that fits in memory.

A few steps of the training are timed in the ways that engines go through it (`costs.py`). A
hypergradient over T steps of m hyperparameters then takes

    Reverse, everything      T (step and adjoint, all stored)        T times what the adjoint keeps
    Reverse, gradients       T step + T adjoint less a gradient      T states and gradients
    Reverse, states          T step + T adjoint                      T states
    Reverse, segments        2 T step + the same                     about 2 sqrt(T) of both
    Reverse, c states        N(T, c) step + T adjoint                c states (N: binomial)
    Forward, chunk c         ceil(m / c) T (step with c tangents)    c + 1 states

and what is stored is written and read once. The candidates are gone through from the fastest on; the
first whose whole program, compiled, needs no more memory than allowed is taken. Where others are
predicted to be nearly as fast, and that is fast, whole programs are timed to decide.
"""

import math
import re
import sys
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, PyTree

from .._problem.arguments import Structure
from .._problem.draws import Drawn, as_problem
from .._problem.problem import Problem, ProblemLike, validated
from .base import AbstractEngine, Hypergradient, TracedEngine, check_not_problem, compute
from .costs import (
    Costs,
    agreed,
    byte_seconds,
    compile_all,
    concrete,
    free_bytes,
    measure_costs,
    run_time,
    show_bytes,
)
from .forward import Forward
from .products import has_no_mode
from .reverse import Reverse
from .schedules import binomial_steps
from .segments import price_of_segments

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{prefix}i": 1024**k for k, prefix in enumerate("kmgt", start=1)}
_REMEMBERED = 64
_RIVALS = 3  # whole programs that are timed,
_NEAR = 1.15  # where they are predicted to be this close to the fastest,
_BRIEF = 2.0  # and that to take no more than this, in seconds
_PASSES = 1.05  # several passes repeat what is around the steps too; they must promise to be faster


class Candidate(NamedTuple):
    """An engine with what it is predicted to take."""

    engine: TracedEngine
    seconds: float
    bytes: float
    """The states that it holds; the whole program holds some more."""

    @property
    def name(self) -> str:
        """The engine as a user writes it."""
        e: Any = self.engine
        if isinstance(e, Forward):
            return "Forward()" if e.chunk is None else f"Forward(chunk={e.chunk})"
        if e.transpose != "forward":
            return f"Reverse(transpose={e.transpose!r})"
        return "Reverse()" if e.store == "states" else f"Reverse(store={e.store!r})"


class Choice(NamedTuple):
    """What `Auto` chose, and from what; prints as a table."""

    engine: TracedEngine
    bytes: int
    """What its program needs: data, results and temporary arrays."""
    limit: float
    given: int
    """Bytes of the data, the parameters and the hyperparameters."""
    candidates: list[Candidate]
    compiled: dict[str, int]
    """The memory of each program that was compiled, by the candidate's name."""
    measured: dict[str, float]
    """The seconds of each program that was timed: those predicted to be nearly the fastest."""

    def __str__(self) -> str:
        lines = [
            f"{'engine':<28} {'predicted time':>14} {'measured':>9} {'its states':>11} "
            f"{'memory, compiled':>17}"
        ]
        for c in self.candidates:
            time = f"{self.measured[c.name]:.3g}s" if c.name in self.measured else ""
            size = show_bytes(self.compiled[c.name]) if c.name in self.compiled else ""
            mark = "  <- chosen" if c.engine == self.engine else ""
            over = ""
            if self.compiled.get(c.name, 0) > self.limit:
                over = "  too large"
            elif c.name not in self.compiled and c.bytes + self.given > self.limit:
                over = "  its states are too large"
            lines.append(
                f"{c.name:<28} {c.seconds:>13.3g}s {time:>9} {show_bytes(c.bytes):>11} {size:>17}"
                f"{mark or over}"
            )
        limit = "no limit" if math.isinf(self.limit) else f"at most {show_bytes(self.limit)}"
        return "\n".join([*lines, f"The fastest that needs {limit}."])


class Auto(AbstractEngine):
    """Chooses the fastest exact engine that fits in memory.

    Args:
        memory: what the program may need at most, with its data and results: bytes, or a text like
            "4GiB" or "500MB". None (default): what is free on the device, which is also the most that
            any budget allows.

    The choice is made from the time that a few steps of the training take and the memory that the
    compiler plans, and for a brief training between engines that are predicted to be level from their
    own times; `explain(problem, hparams)` returns it as a table. It is remembered for given shapes,
    and made anew where the program no longer fits into what is free. Several processes make the same
    choice. Where no exact engine fits, an error says what the smallest needs.

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

    memory: int | None

    def __init__(self, memory: object = None):
        check_not_problem("Auto", memory)
        self.memory = None if memory is None else parse_bytes(memory)

    def __call__(
        self, problem: ProblemLike, hparams: PyTree, *, key: Array | None = None
    ) -> Hypergradient:
        """Return the error at `hparams`, its gradient and the final state."""
        given = as_problem(problem, key)
        return self.explain(given, hparams).engine(given, hparams)

    def lower(self, problem: Problem | Drawn, hparams: PyTree) -> jax.stages.Lowered:
        """Return the program that a call runs."""
        return self.explain(problem, hparams).engine.lower(problem, hparams)

    def explain(self, problem: ProblemLike, hparams: PyTree, *, key: Array | None = None) -> Choice:
        """Return the choice, which prints as a table of the candidates."""
        arrays, structure = validated(as_problem(problem, key), hparams)
        shapes = tuple((a.shape, a.dtype, getattr(a, "weak_type", False)) for a in arrays)
        asked = (structure, shapes, self.memory)
        given = sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)
        with jax.ensure_compile_time_eval():  # inside `jit` too, programs are to run now
            free = agreed(free_bytes(), least=True) + given
            limit = min(free, float(self.memory or math.inf))
            if asked not in _CHOICES or _CHOICES[asked].bytes > limit:
                if len(_CHOICES) >= _REMEMBERED:
                    _CHOICES.clear()
                _CHOICES[asked] = choose(structure, arrays, limit, given)
        return _CHOICES[asked]


_CHOICES: dict[Any, Choice] = {}


def choose(structure: Structure, arrays: list[Array], limit: float, given: int) -> Choice:
    """Return the fastest exact engine that needs no more than `limit` bytes, `given` among them."""
    if sys.stderr.isatty():
        print("foretune.Auto: timing a few steps, to choose an engine", file=sys.stderr)
    arrays = [concrete(array) for array in arrays]
    costs = measure_costs(structure, arrays, limit)
    found = sorted(candidates(costs), key=lambda c: c.seconds)
    left, sizes = [c for c in found if c.bytes + given <= limit], {}
    while left:
        rivals = _RIVALS if costs.measured and left[0].seconds <= _BRIEF else 1
        group = [c for c in left[:rivals] if c.seconds <= _NEAR * left[0].seconds]
        try:
            programs = compiled(group, structure, arrays)
        except (ValueError, TypeError) as error:  # a mode that was assumed, not measured
            if costs.measured or not has_no_mode(error):
                raise
            left = [c for c in left if type(c.engine) is not type(group[0].engine)]
            continue
        sizes |= {name: program_bytes(program) for name, program in programs.items()}
        if fit := [c for c in group if sizes[c.name] <= limit]:
            measured = {}
            if len(fit) > 1:
                measured = {c.name: run_time(programs[c.name], arrays)[0] for c in fit}
            best = min(fit, key=lambda c: measured.get(c.name, 0.0))
            return Choice(best.engine, sizes[best.name], limit, given, found, sizes, measured)
        left = left[len(group) :]
    few = sorted(found, key=lambda c: c.bytes)[:_RIVALS]  # beside its states a program holds more
    programs = compiled([c for c in few if c.name not in sizes], structure, arrays)
    sizes |= {name: program_bytes(program) for name, program in programs.items()}
    smallest = min(sizes, key=lambda name: sizes[name])
    raise MemoryError(
        f"no exact engine fits into {show_bytes(limit)}: of those compiled the smallest, {smallest}, "
        f"needs {show_bytes(sizes[smallest])}, with the data and parameters ({show_bytes(given)}). "
        "Allow more, `Auto(memory=...)`, give a smaller batch, or take `ReverseOnDisk`."
    )


def candidates(costs: Costs) -> list[Candidate]:
    """Return the exact engines, with what each is predicted to take."""
    T, m, state = costs.steps, costs.hyperparameters, costs.state
    found = []
    for chunk in _halved(m):
        passes = -(-m // chunk)
        seconds = passes * T * costs.with_tangents(chunk) * (1.0 if passes == 1 else _PASSES)
        engine = Forward(None if chunk == m else chunk)
        found.append(Candidate(engine, seconds, (chunk + 1) * state))

    def reverse(store, seconds, held, transpose="forward"):
        engine = Reverse(store, transpose=transpose)
        found.append(Candidate(engine, seconds + held * byte_seconds(), held))

    back, kept = T * costs.adjoint, T * costs.kept_gradient
    both = state + costs.gradient
    few, again = price_of_segments(T, costs.gradient / max(state, 1), costs.split)
    reverse("everything", T * costs.whole, T * costs.kept)
    reverse("gradients", T * costs.step + kept, T * both)
    reverse("states", T * costs.step + back, T * state)
    if math.isfinite(costs.ordinary):
        reverse("states", T * (costs.step + costs.ordinary), T * state, transpose="reverse")
    reverse("segments", (T + again) * costs.step + kept, few * state)
    for c in _halved(T):
        if c < T:
            reverse(c, (binomial_steps(T, c) + 1) * costs.again + back, c * state)
    possible = [c for c in found if math.isfinite(c.seconds)]
    return possible or found  # where none is, the error is that of an engine


def _halved(n: int) -> list[int]:
    """Return n, n / 2, n / 4, ..., 1, rounded up."""
    found = [n]
    while found[-1] > 1:
        found.append(-(-found[-1] // 2))
    return found


def compiled(
    group: list[Candidate], structure: Structure, arrays: list[Any]
) -> dict[str, jax.stages.Compiled]:
    """Return the candidates' whole programs."""
    lowered = {c.name: compute.lower(c.engine, structure, True, arrays) for c in group}
    return {name: program.result() for name, program in compile_all(lowered).items()}


def program_bytes(program: Any) -> int:
    """Return the memory of a compiled program: data, results and temporary arrays."""
    memory = program.memory_analysis()
    return int(
        agreed(
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes
        )
    )


def parse_bytes(memory: object, where: str = "Auto") -> int:
    """Return the bytes of a number or of a text like "4GiB".

    >>> parse_bytes("4GiB"), parse_bytes("1.5 MB"), parse_bytes(100)
    (4294967296, 1500000, 100)
    """
    found = memory
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]?i?)b?\s*", memory.lower())
        if match and match[2] in _UNITS and match[1].replace(".", "", 1).isdigit():
            found = int(float(match[1]) * _UNITS[match[2]])
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
        raise ValueError(
            f'{where}(memory={memory!r}): give bytes, or a text like "4GiB" or "500MB".'
        )
    return int(found)

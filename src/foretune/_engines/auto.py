"""The fastest exact engine that fits in memory.

For m hyperparameters and T steps, in plain training runs and states, about

    Forward()               1 + 2m                 m + 1
    Forward(c)              (1 + 2c) m / c         c + 1
    Reverse("gradients")    3                      T, and T gradients
    Reverse()               4                      T
    Reverse("segments")     5                      2 sqrt(T)
    Reverse(c)              4 + N(T, c) / T        c          (N: binomial checkpoints)

Of each family, from the fastest on, the first is taken whose whole program, compiled, needs no more
memory than allowed: forward mode first for up to three hyperparameters, and else reverse mode.
"""

import math
import sys
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from .._problem.arguments import Recent, Structure, flatten
from .._problem.draws import Drawn, as_problem
from .._problem.problem import Problem, ProblemLike, opened, validated
from .._problem.system import make_system
from .base import AbstractEngine, Hypergradient, TracedEngine, compute
from .forward import Forward
from .memory import agreed, free_bytes, parse_bytes, program_bytes, show_bytes, tree_bytes
from .products import has_no_mode
from .reverse import Reverse
from .segments import split_where_worth, states_in_segments

FEW = 3  # hyperparameters up to which forward mode is the faster one


class Candidate(NamedTuple):
    """An engine with the bytes of the states that it holds; the whole program holds some more."""

    engine: Forward | Reverse
    bytes: float

    @property
    def name(self) -> str:
        if isinstance(self.engine, Forward):
            return "Forward()" if self.engine.chunk is None else f"Forward({self.engine.chunk})"
        return "Reverse()" if self.engine.store == "states" else f"Reverse({self.engine.store!r})"


class Choice(NamedTuple):
    """What `Auto` chose, and from what; prints as a table."""

    engine: TracedEngine
    bytes: int  # what its program needs: data, results and temporary arrays
    limit: float
    given: int  # bytes of the data, the parameters and the hyperparameters
    candidates: list[Candidate]
    compiled: dict[str, int]  # the memory of each program that was compiled, by candidate's name

    def __str__(self) -> str:
        lines = [f"{'engine':<24} {'its states':>11} {'memory, compiled':>17}"]
        for c in self.candidates:
            size = show_bytes(self.compiled[c.name]) if c.name in self.compiled else ""
            note = "  <- chosen" if c.engine == self.engine else ""
            if self.compiled.get(c.name, 0) > self.limit:
                note = "  too large"
            elif c.name not in self.compiled and c.bytes + self.given > self.limit:
                note = "  its states are too large"
            lines.append(f"{c.name:<24} {show_bytes(c.bytes):>11} {size:>17}{note}")
        limit = "no limit" if math.isinf(self.limit) else f"at most {show_bytes(self.limit)}"
        return "\n".join([*lines, f"The fastest that needs {limit}."])


class Auto(AbstractEngine):
    """Chooses the fastest exact engine that fits in memory.

    Args:
        memory: what the program may need at most, with its data and results: bytes, or a text like
            "4GiB" or "500MB". By default, and at most, what is free on the device.

    `explain(problem, hparams)` returns the choice as a table. It is remembered for given shapes, and
    made anew where the program no longer fits. Several processes make the same choice.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> problem = ft.Problem(
    ...     ft.Training(lambda w, h, _: (w - 1) ** 2, lambda h: optax.sgd(h["lr"])),
    ...     lambda state, h, _: (state.params - 1) ** 2, jnp.array(0.0), ft.FullBatch(None, steps=1))
    >>> value, grad, state = ft.Auto(memory="1GiB")(problem, {"lr": jnp.array(0.25)})
    >>> float(value), float(grad["lr"])  # f = (1 - 2 lr)^2
    (0.25, -2.0)
    """

    memory: int | None

    def __init__(self, memory: object = None):
        self.memory = None if memory is None else parse_bytes(memory)

    def __call__(
        self, problem: ProblemLike, hparams: PyTree, *, key: Array | None = None
    ) -> Hypergradient:
        given = as_problem(problem, key)
        return self.explain(given, hparams).engine(given, hparams)

    def lower(self, problem: Problem | Drawn, hparams: PyTree) -> jax.stages.Lowered:
        return self.explain(problem, hparams).engine.lower(problem, hparams)

    def explain(self, problem: ProblemLike, hparams: PyTree, *, key: Array | None = None) -> Choice:
        """Return the choice, which prints as a table of the candidates."""
        arrays, structure = validated(as_problem(problem, key), hparams)
        shapes = tuple((a.shape, a.dtype, getattr(a, "weak_type", False)) for a in arrays)
        asked = (structure, shapes, self.memory)
        given = tree_bytes(arrays)
        with jax.ensure_compile_time_eval():  # inside `jit` too, programs are to run now
            free = agreed(free_bytes(), least=True) + given
            limit = min(free, float(self.memory or math.inf))
            if asked not in _CHOICES or _CHOICES[asked].bytes > limit:
                _CHOICES[asked] = choose(structure, arrays, limit, given)
        return _CHOICES[asked]


_CHOICES = Recent()


def choose(structure: Structure, arrays: list[Array], limit: float, given: int) -> Choice:
    """Return the fastest exact engine that needs no more than `limit` bytes, `given` among them."""
    if sys.stderr.isatty():
        print("foretune.Auto: compiling a few programs, to choose an engine", file=sys.stderr)
    arrays = [_concrete(array) for array in arrays]
    m, reverses, forwards = candidates(structure, arrays)
    sizes: dict[str, int] = {}
    errors: list[Exception] = []

    def measure(c: Candidate) -> None:
        _, engine = flatten(c.engine)
        lowered = compute.lower(engine, structure, True, [], arrays)
        sizes[c.name] = program_bytes(lowered.compile())

    def first_fitting(family: list[Candidate]) -> Candidate | None:
        for c in family:
            if c.bytes + given > limit:
                continue
            try:
                measure(c)
            except (ValueError, TypeError) as error:
                if not has_no_mode(error):
                    raise
                errors.append(error)  # a step that this mode cannot differentiate
                break
            if sizes[c.name] <= limit:
                return c
        return None

    families = [forwards, reverses] if m <= FEW else [reverses, forwards]
    best = first_fitting(families[0]) or first_fitting(families[1])
    found = [*reverses, *forwards]
    if best is not None:
        return Choice(best.engine, sizes[best.name], limit, given, found, sizes)
    if len(errors) == 2:
        raise errors[0]
    for c in sorted(found, key=lambda c: c.bytes)[:2]:  # beside its states a program holds more
        if c.name not in sizes:
            measure(c)
    least = min(sizes, key=lambda name: sizes[name])
    raise MemoryError(
        f"no exact engine fits into {show_bytes(limit)}: of those compiled the smallest, {least}, "
        f"needs {show_bytes(sizes[least])}, with the data and parameters ({show_bytes(given)}). "
        "Allow more, give a smaller batch, or take `ReverseOnDisk` or `Truncated`."
    )


def candidates(
    structure: Structure, arrays: list[Array]
) -> tuple[int, list[Candidate], list[Candidate]]:
    """Return m, and the engines of each mode from the fastest on, with the bytes of their states."""
    facts = {}

    def start(arrays):
        problem, hparams = opened(structure, arrays)
        system = make_system(problem, hparams)
        s = system.initial(hparams)
        split = split_where_worth(system, hparams, s)
        facts.update(T=system.steps, m=ravel_pytree(hparams)[0].size, split=split)
        return s, eqx.filter(getattr(s, "params", None), eqx.is_array)

    s, params = jax.eval_shape(start, arrays)
    T, m, split = facts["T"], facts["m"], facts["split"]
    state, gradient = tree_bytes(s), tree_bytes(params)
    few = states_in_segments(T, gradient / max(state, 1), split is not None)
    stores = {"states": T * state, "segments": few * state}
    if split is not None:
        stores = {"gradients": T * (state + gradient), **stores}
    stores |= {c: c * state for c in _halved(T) if c < T}
    reverses = [Candidate(Reverse(store), size) for store, size in stores.items()]
    forwards = [Candidate(Forward(None if c == m else c), (c + 1) * state) for c in _halved(m)]
    return m, reverses, forwards


def _halved(n: int) -> list[int]:
    """Return n, n / 2, n / 4, ..., 1, rounded up."""
    return [-(-n // 2**k) for k in range((n - 1).bit_length() + 1)]


def _concrete(array: Array) -> Array:
    """Return the array, or one of its shape where it is being traced."""
    if not isinstance(array, Tracer):
        return array
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0, impl=jax.random.key_impl(array)), array.shape)
    return jnp.zeros(array.shape, array.dtype)

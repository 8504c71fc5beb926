"""Draws: what is random of a problem, as a function of a key.

    draw(key) -> Problem

draws minibatches, a start, data, validation: whatever may differ from run to run. It is traced once and
becomes a part of the program that uses it: another key compiles nothing, and the arrays that it closes
over are inputs of the program, on the device once.
"""

import contextlib
import functools
import inspect
import re
from collections.abc import Callable
from typing import cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jaxtyping import Array

from .._files.digests import digest
from .arguments import Structure, flatten, unflatten
from .checks import check_key, check_signature, describe
from .definition import Definition
from .equality import closed_over
from .validation import noting
from .warn import warn

REMEMBERED = 8  # draws, with the arrays that they close over
Draw = Callable[[Array], Definition]


class Drawn(eqx.Module):
    """A draw with its key: a problem that is made inside the program."""

    key: Array
    constants: list[Array]  # what the draw closes over
    program: Jaxpr = eqx.field(static=True)
    structure: Structure = eqx.field(static=True)

    def at(self, key: Array) -> "Drawn":
        return eqx.tree_at(lambda drawn: drawn.key, self, key)

    def fingerprint(self) -> dict[str, str]:
        """Return what tells it from other draws; of the problem's functions nothing is known."""
        program = re.sub("0x[0-9a-f]+", "", str(self.program))  # without addresses in memory
        return {"draw": digest(program), "data of the draw": digest(self.constants)}

    def problem(self) -> Definition:
        """Return the problem; call it inside a trace."""
        arrays = jaxpr_as_fun(ClosedJaxpr(self.program, self.constants))(self.key)
        return unflatten(self.structure, list(map(jnp.asarray, arrays)))  # a literal is none yet


def as_problem(problem: object, key: Array | None = None) -> Definition | Drawn:
    """Return a problem as it is, and a draw with its key, or raise."""
    if isinstance(problem, Definition | Drawn):
        if key is not None:
            raise TypeError("key=... is for a draw, `draw(key)`; this is a problem already.")
        return problem
    if not callable(problem) or isinstance(problem, type):
        raise TypeError(
            "the first argument must be a `foretune.Problem`, or a function `draw(key)` that returns "
            f"one; got {describe(problem)}. Call an engine as `engine(problem, hparams)`."
        )
    check_signature(problem, "draw(key)")
    if key is None:
        raise TypeError("the problem is a draw: give the key too, `key=jax.random.key(0)`.")
    check_key(key, "the key of a draw")
    try:
        hash(problem)
    except TypeError:
        message = f"a draw of {describe(problem)} cannot be hashed; give a function."
        raise TypeError(message) from None
    closed, structure = traced(cast(Draw, problem), key)
    return Drawn(key, closed.consts, closed.jaxpr, structure)


def traced(draw: Draw, key: Array) -> tuple[ClosedJaxpr, Structure]:
    """Return a draw as a program from the key to its problem's arrays, and the rest of the problem."""
    return _traced(draw, jax.eval_shape(lambda: key), jnp.result_type(float))


@functools.lru_cache(maxsize=REMEMBERED)
def _traced(
    draw: Draw, key: jax.ShapeDtypeStruct, precision: np.dtype
) -> tuple[ClosedJaxpr, Structure]:
    # `precision`, the type of Python's floats, is a key of the cache: the program depends on it
    found: list[Structure] = []
    before = _random_states(draw)

    def arrays_of(key):
        with noting("draw(key)", key=key):
            problem = draw(key)
        if not isinstance(problem, Definition):
            raise TypeError(f"draw(key) returned {describe(problem)}, not a `foretune.Problem`.")
        arrays, structure = flatten(problem)
        found[:] = [structure]
        return arrays

    closed = jax.make_jaxpr(arrays_of)(key)
    if set().union(*map(_tracers, found[0].static)) - _tracers(draw):  # of no program around it
        raise TypeError(
            "a function of the drawn problem (its loss, objective or init) closes over an array that "
            "is drawn, and a draw is traced once. Pass it through `batches`, `validation` or `init`."
        )
    if _random_states(draw) != before:
        raise TypeError(
            "draw(key) takes random numbers from NumPy, but it is traced once: they would be "
            "the same in every draw. Take them from the key, `jax.random.normal(key, shape)` say."
        )
    (variable,) = closed.jaxpr.invars
    used = set(map(id, closed.jaxpr.outvars))
    for step in reversed(closed.jaxpr.eqns):
        used |= set(map(id, step.invars)) if used & set(map(id, step.outvars)) else set()
    if id(variable) not in used:
        warn("draw(key) does not use its key: every draw is the same problem.")
    with jax.ensure_compile_time_eval():  # inside `jit` too: what is remembered is of no trace
        constants = [c if isinstance(c, Tracer) else jnp.asarray(c) for c in closed.consts]
    return closed.replace(consts=constants), found[0]


def _random_states(draw: object) -> list[bytes | str]:
    """Return the states of NumPy's generators that a draw may use besides its key."""
    states: list[object] = [np.random.get_state(legacy=False)]  # noqa: NPY002
    with contextlib.suppress(TypeError):  # no function in Python
        seen = inspect.getclosurevars(draw)  # pyright: ignore[reportArgumentType]
        for value in [*seen.nonlocals.values(), *seen.globals.values()]:
            if isinstance(value, np.random.Generator):
                states.append(value.bit_generator.state)
            elif isinstance(value, np.random.RandomState):
                states.append(value.get_state(legacy=False))
    leaves = jax.tree.leaves(states)
    return [leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf) for leaf in leaves]


def _tracers(leaf: object, seen: frozenset[int] = frozenset()) -> set[int]:
    """Return the ids of what is traced and closed over by a function, itself or by another function."""
    leaf = getattr(leaf, "draw", leaf)  # of a mean over draws
    if isinstance(leaf, Tracer) or id(leaf) in seen:
        return {id(leaf)} if isinstance(leaf, Tracer) else set()
    parts = jax.tree.leaves(closed_over(leaf))
    return set().union(*(_tracers(part, seen | {id(leaf)}) for part in parts))

"""Reverse mode in segments: about 2 sqrt(T) states are held, and each step is computed once more.

On the way forward the state at which each segment begins is stored. On the way back a segment is run
again from there, and what its adjoint needs is stored while it is in work: the states, and gradients.

Where the update is nothing beside the gradient (`split.py`), as in a large network, less is stored: the
gradients, a fraction of a state each, and the state at which each block of a few steps begins. Within a
block, states are found again by updates.

With T = k L, L = m b (k segments of m blocks of b steps), states of S bytes and gradients of G, that is

    (k - 1) S + L G + m S,     b <= BLOCK.

The first state of all is not counted: it is the parameters that were given, and zeros.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from .._problem.system import System
from .schedules import (
    Adjoint,
    adjoint_step,
    advance,
    entry,
    pulled,
    recorded,
    sweep,
    take,
    with_gradients,
)
from .split import Split, split_step

BLOCK = 8
"""A state is found again by at most this many updates less one, half of that on the mean."""
WORTH = 4000
"""Operations of a gradient for each number of the state, above which updates cost little beside it."""
UNEQUAL = 1.15
"""Rather so much more memory than a shorter last segment, which is a program more."""


class Segments(NamedTuple):
    """Store the first state of each of some segments, and go through a segment once more."""

    unroll: int = 1

    def forward(self, system: System, hparams: PyTree, s_0: PyTree) -> tuple[PyTree, Any]:
        """Run, and keep the state at which each segment begins."""
        split = split_where_worth(system, hparams, s_0)
        if split is not None:
            return _Split(split, *self).forward(system, hparams, s_0)
        length, count = segments_of(system.steps)
        s, firsts = firsts_of(system, hparams, s_0, length, count, self.unroll)
        rest = system.steps - count * length
        s_T = advance(system, hparams, s, system.steps - rest, rest, self.unroll)
        return s_T, (None, firsts, s)

    def backward(self, system: System, hparams: PyTree, memory: Any, adjoint: Adjoint) -> Adjoint:
        """Go back segment by segment, the shorter last one first."""
        split, *memory = memory
        if split is not None:
            return _Split(split, *self).backward(system, hparams, memory, adjoint)
        length, count = segments_of(system.steps)
        firsts, last = memory

        def back(adjoint, s, first, steps):
            if system.sees_all:
                _, pull = with_gradients(system, hparams, s, first, steps, self.unroll)
                return pulled(pull, adjoint)
            _, states = recorded(system, hparams, s, first, steps, self.unroll)
            return sweep(system, hparams, states, adjoint, first, steps, self.unroll)

        done = count * length
        if done < system.steps:
            adjoint = back(adjoint, last, done, system.steps - done)

        def segment(adjoint, stored):
            s, k = stored
            return back(adjoint, s, k * length, length), None

        return lax.scan(segment, adjoint, (firsts, jnp.arange(count)), reverse=True)[0]


def firsts_of(
    system: System, hparams: PyTree, s_0: PyTree, length: int, count: int, unroll: int = 1
) -> tuple[PyTree, PyTree]:
    """Return the state after so many segments, and the stack of those at which each begins."""

    def segment(s, k):
        return advance(system, hparams, s, k * length, length, unroll), s

    return lax.scan(segment, s_0, jnp.arange(count))


def segments_of(steps: int) -> tuple[int, int]:
    """Return the length of a segment and how many there are, but for a shorter last one.

    Where equal segments hold nearly as little they are taken, since a shorter one is a program more.

    >>> segments_of(100), segments_of(1000), segments_of(7)
    ((10, 10), (25, 40), (3, 2))
    """
    length = max(1, math.isqrt(steps - 1) + 1)
    equal = next(d for d in range(math.isqrt(steps), 0, -1) if steps % d == 0)
    if equal + steps // equal <= 2.3 * math.sqrt(steps):
        length = equal
    return length, steps // length


def split_where_worth(system: System, hparams: PyTree, s: PyTree) -> Split | None:
    """Return the parts of the step, where segments are to keep gradients in place of states."""
    split = split_step(system, hparams, s) if system.sees_all else None
    return split if split is not None and split.work >= WORTH * _size(s) else None


def states_of_segments(steps: int, gradient: float, split: bool) -> float:
    """Return how many states are held, where a gradient has this share of one."""
    if split:
        return lengths_of(steps, gradient).states(gradient)
    length, count = segments_of(steps)
    return length * (1 + gradient) + count


class Lengths(NamedTuple):
    """The segments of a training: T = segments * blocks * block + rest."""

    segments: int
    blocks: int
    block: int
    rest: int

    def states(self, gradient: float) -> float:
        """Return what is held, in states, where a gradient has this share of one."""
        kept = self.segments - 1 + self.blocks + self.rest
        return kept + self.blocks * self.block * gradient


@functools.lru_cache(maxsize=256)
def lengths_of(steps: int, gradient: float) -> Lengths:
    """Return the segments that hold least, where a gradient has this share of a state.

    >>> lengths_of(32, 1 / 3), lengths_of(1000, 1 / 3)
    (Lengths(segments=4, blocks=1, block=8, rest=0), Lengths(segments=25, blocks=5, block=8, rest=0))
    """
    found = []
    for length in range(1, min(steps, 8 + math.isqrt(int(16 * steps / max(gradient, 0.1)))) + 1):
        block = next(b for b in range(min(BLOCK, length), 0, -1) if length % b == 0)
        found.append(Lengths(steps // length, length // block, block, steps % length))
    return min(found, key=lambda f: f.states(gradient) * (UNEQUAL if f.rest else 1))


class _Record(NamedTuple):
    """Of each block of a segment: the state at which it begins, and its gradients."""

    starts: PyTree
    gradients: list[Any]


class _Split(NamedTuple):
    """Segments of steps that are a gradient and an update."""

    split: Split
    unroll: int = 1

    def forward(self, system: System, hparams: PyTree, s_0: PyTree) -> tuple[PyTree, Any]:
        """Run, and keep where each segment but the first begins, and the states of what is over."""
        count, blocks, block, rest = self._lengths(system, s_0)
        length = blocks * block
        empty = jax.tree.map(lambda a: jnp.zeros((max(count - 1, 1), *a.shape), a.dtype), s_0)

        def segment(k, carry):
            s, firsts = carry
            firsts = jax.tree.map(lambda f, a: f.at[jnp.maximum(k - 1, 0)].set(a), firsts, s)
            return advance(system, hparams, s, k * length, length, self.unroll), firsts

        s, firsts = lax.fori_loop(0, count, segment, (s_0, empty))
        s_T, states = recorded(system, hparams, s, system.steps - rest, rest, self.unroll)
        return s_T, (self.split, s_0, firsts, states)

    def backward(self, system: System, hparams: PyTree, memory: Any, adjoint: Adjoint) -> Adjoint:
        """Go back segment by segment."""
        s_0, firsts, states = memory
        count, _, _, rest = self._lengths(system, s_0)
        if rest:
            first = system.steps - rest
            adjoint = sweep(system, hparams, states, adjoint, first, rest, self.unroll)

        def first_of(k):
            later = take(firsts, jnp.maximum(k - 1, 0))
            return jax.tree.map(lambda a, b: jnp.where(k == 0, a, b), s_0, later)

        def segment(adjoint, k):
            record = self._record(system, hparams, first_of(k), k)
            return self._pull(system, hparams, record, adjoint, k), None

        return lax.scan(segment, adjoint, jnp.arange(count), reverse=True)[0]

    def _lengths(self, system: System, s: PyTree) -> Lengths:
        return lengths_of(system.steps, self.split.size / max(_size(s), 1))

    def _record(self, system: System, hparams: PyTree, s: PyTree, k: Any) -> _Record:
        """Run segment k once more."""
        _, blocks, length, _ = self._lengths(system, s)

        def step(s, t):
            x = entry(system, t)
            g = self.split.gradient(s, hparams, x)
            return self.split.update(s, hparams, x, g), g

        def block(s, i):
            times = (k * blocks + i) * length + jnp.arange(length)
            end, gradients = lax.scan(step, s, times, unroll=self.unroll)
            return end, _Record(s, gradients)

        return lax.scan(block, s, jnp.arange(blocks))[1]

    def _pull(
        self, system: System, hparams: PyTree, record: _Record, adjoint: Adjoint, k: Any
    ) -> Adjoint:
        """Return the adjoint before segment k."""
        _, blocks, length, _ = self._lengths(system, take(record.starts, 0))

        def step(adjoint, at):
            i, j = at // length, at % length

            first = (k * blocks + i) * length

            def gradient(j):
                return [take(take(g, i), j) for g in record.gradients]

            def updated(j, s):
                return self.split.update(s, hparams, entry(system, first + j), gradient(j))

            s = lax.fori_loop(0, j, updated, take(record.starts, i))
            known = lambda s, h, x: self.split.known(s, h, x, gradient(j))  # noqa: E731
            cheap = system._replace(transposable=known)
            return adjoint_step(cheap, hparams, adjoint, s, first + j), None

        steps = jnp.arange(blocks * length)
        return lax.scan(step, adjoint, steps, reverse=True, unroll=self.unroll)[0]


def _size(s: PyTree) -> int:
    return sum(a.size for a in jax.tree.leaves(s))

"""Reverse mode in segments: about 2 sqrt(T) states are held, and each step is computed once more.

On the way forward the state at which each segment begins is stored. On the way back a segment is run
again from there, and the states and gradients that its adjoint needs are stored meanwhile.

Where updates cost little beside gradients (`split.py`), as in a large network, less is stored: the
gradients, and the state at which each block of a few steps begins. Within a block, states are found
again by updates. The record of the last segment is kept on the way forward. With k segments of L steps,
m blocks in each, states of S bytes and gradients of G, and without the first states of two segments,
that is

    (k - 2) S + L G + m S,     k = ceil(T / L), m = ceil(L / BLOCK).
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from .._problem.system import System
from .schedules import Adjoint, Index, Loop, Schedule, pulled, put, take
from .split import Split, split_step

BLOCK = 8  # a state is found again by at most this many updates less one
WORTH = 4000  # operations of a gradient for each number of the state: then updates are cheap


class Segments(Schedule):
    """Store the first state of each of some segments, and go through a segment once more."""

    def forward(self, loop: Loop, s_0: PyTree) -> tuple[PyTree, PyTree]:
        split = split_where_worth(loop.system, loop.hparams, s_0)
        if split is not None:
            return _Split(split, loop, _lengths(split, loop, s_0)).forward(s_0)
        length, count = segments_of(loop.system.steps)

        def segment(s, k):
            return loop.advance(s, k * length, length), s

        s, firsts = lax.scan(segment, s_0, jnp.arange(count))
        rest = loop.system.steps - count * length
        return loop.advance(s, count * length, rest), (None, firsts, s)

    def backward(self, loop: Loop, stored: PyTree, adjoint: Adjoint) -> Adjoint:
        """Go back segment by segment, the shorter last one first."""
        split, *stored = stored
        if split is not None:
            return _Split(split, loop, _lengths(split, loop, stored[0])).backward(stored, adjoint)
        length, count = segments_of(loop.system.steps)
        firsts, last = stored

        def back(adjoint, s, first, steps):
            if loop.system.sees_all:
                return pulled(loop.with_gradients(s, first, steps)[1], adjoint)
            return loop.sweep(loop.recorded(s, first, steps)[1], adjoint, first, steps)

        done = count * length
        if done < loop.system.steps:
            adjoint = back(adjoint, last, done, loop.system.steps - done)

        def segment(adjoint, stored):
            s, k = stored
            return back(adjoint, s, k * length, length), None

        return lax.scan(segment, adjoint, (firsts, jnp.arange(count)), reverse=True)[0]


def segments_of(steps: int) -> tuple[int, int]:
    """Return the length of a segment and how many there are, but for a shorter last one.

    Equal segments are preferred: a shorter one is a program more.
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


def states_in_segments(steps: int, gradient: float, split: bool) -> float:
    """Return the states held, where a gradient has this share of one."""
    if split:
        return lengths_of(steps, gradient).states(gradient)
    length, count = segments_of(steps)
    return length * (1 + gradient) + count


class Lengths(NamedTuple):
    """The segments of a training and their blocks; the first segment and last blocks may be shorter."""

    segments: int
    length: int
    blocks: int
    block: int

    def states(self, gradient: float) -> float:
        return max(self.segments - 2, 0) + self.blocks + self.length * gradient


@functools.lru_cache(maxsize=256)
def lengths_of(steps: int, gradient: float) -> Lengths:
    """Return the segments that hold least, where a gradient has this share of a state."""

    def of(length):
        blocks = -(-length // BLOCK)
        return Lengths(-(-steps // length), length, blocks, -(-length // blocks))

    most = min(steps, 8 + math.isqrt(int(16 * steps / max(gradient, 0.1))))
    # of equals the longest
    return min(map(of, range(most, 0, -1)), key=lambda lengths: lengths.states(gradient))


class _Record(NamedTuple):
    """Of a segment: the state at which each block begins, and the gradient of each step."""

    starts: PyTree
    gradients: list[Array]


class _Split(NamedTuple):
    """Segments of steps that are a gradient and an update."""

    split: Split
    loop: Loop
    lengths: Lengths

    def forward(self, s_0: PyTree) -> tuple[PyTree, PyTree]:
        """Run, and store where segments but the first and the last begin, and the last one's record."""
        lengths, loop = self.lengths, self.loop
        inner = lengths.segments - 2

        def segment(k, carry):
            s, firsts, record = carry
            slot = jnp.where((k >= 1) & (k <= inner), k - 1, inner)  # beyond them: dropped
            firsts = jax.tree.map(lambda f, a: f.at[slot].set(a, mode="drop"), firsts, s)
            s, record = self._run(s, record, k)
            return s, firsts, record

        gradients = jax.eval_shape(self.split.gradient, s_0, loop.hparams, loop.entry(0))
        record = _Record(_rows(lengths.blocks, s_0), _rows(lengths.length, gradients))
        carry = s_0, _rows(max(inner, 1), s_0), record
        s_T, firsts, record = lax.fori_loop(0, lengths.segments, segment, carry)
        return s_T, (self.split, s_0, firsts, record)

    def backward(self, stored: PyTree, adjoint: Adjoint) -> Adjoint:
        """Go back segment by segment, each from its record, which then makes room for another."""
        s_0, firsts, record = stored
        last = self.lengths.segments - 1

        def segment(i, carry):
            adjoint, record = carry
            k = last - i
            adjoint = self._pull(record, adjoint, k)
            before = _known_after(adjoint, k - 1)
            later = take(firsts, jnp.maximum(before - 1, 0))
            first = jax.tree.map(lambda a, b: jnp.where(before <= 0, a, b), s_0, later)
            return adjoint, self._run(first, record, before)[1]

        return lax.fori_loop(0, last + 1, segment, (adjoint, record))[0]

    def _run(self, s: PyTree, record: _Record, k: Index) -> tuple[PyTree, _Record]:
        """Return the state after segment k, and its record in place of another's; -1 has no steps."""
        (first, steps), block_size = self._span(k), self.lengths.block

        def step(j, carry):
            s, gradients = carry
            x = self.loop.entry(first + j)
            g = self.split.gradient(s, self.loop.hparams, x)
            return self.split.update(s, self.loop.hparams, x, g), put(gradients, j, g)

        def block(i, carry):
            s, (starts, gradients) = carry
            starts, begin = put(starts, i, s), i * block_size
            end = jnp.minimum(begin + block_size, steps)
            s, gradients = lax.fori_loop(begin, end, step, (s, gradients))
            return s, _Record(starts, gradients)

        return lax.fori_loop(0, -(-steps // block_size), block, (s, record))

    def _pull(self, record: _Record, adjoint: Adjoint, k: Index) -> Adjoint:
        (first, steps), block_size = self._span(k), self.lengths.block

        def updated(j, s):
            g = take(record.gradients, j)
            return self.split.update(s, self.loop.hparams, self.loop.entry(first + j), g)

        def step(i, adjoint):
            j = steps - 1 - i
            block = j // block_size
            s = lax.fori_loop(block * block_size, j, updated, take(record.starts, block))
            g = take(record.gradients, j)
            known = lambda s, h, x: self.split.known(s, h, x, g)  # noqa: E731
            cheap = self.loop._replace(system=self.loop.system._replace(transposable=known))
            return cheap.adjoint_step(adjoint, s, first + j)

        return lax.fori_loop(0, steps, step, adjoint)

    def _span(self, k: Index) -> tuple[Array, Array]:
        """Return the first step of segment k, and how many it has."""
        steps, lengths = self.loop.system.steps, self.lengths
        ends = [steps - (lengths.segments - i) * lengths.length for i in (k, k + 1)]
        first, after = (jnp.maximum(end, 0) for end in ends)
        return first, after - first


def _lengths(split: Split, loop: Loop, s: PyTree) -> Lengths:
    return lengths_of(loop.system.steps, split.size / max(_size(s), 1))


def _known_after(done: PyTree, i: Index) -> Array:
    """Return i, hidden from the compiler until `done` is computed.

    Else a loop that writes into an array may run before one that reads it, on a copy.
    """
    leaf = next(leaf for leaf in jax.tree.leaves(done) if leaf.size)
    return jnp.where(jnp.real(leaf[(0,) * leaf.ndim]) > jnp.inf, i - 1, i)  # never i - 1


def _rows(count: int, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda a: jnp.zeros((count, *a.shape), a.dtype), tree)


def _size(s: PyTree) -> int:
    return sum(a.size for a in jax.tree.leaves(s))

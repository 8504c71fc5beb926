"""What reverse mode keeps on its way forward, and what it computes again on its way back.

The adjoint of step t needs s_{t-1}. States that are not stored are computed again from one before.

| `store`        | states held      | steps computed again             |
|----------------|------------------|----------------------------------|
| "everything"   | T, and more      | none: also what is inside a step |
| "gradients"    | T, T gradients   | none: only the optimizer's part  |
| "states"       | T                | T                                |
| "segments"     | about 2 sqrt(T)  | T (`segments.py`)                |
| c, a number    | c, and one more  | as few as c allow (`Binomial`)   |

Where no gradient is stored, the adjoint itself runs the step to differentiate it.
"""

import abc
import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree

from .._problem.system import System
from .._problem.training import GRADIENT
from .products import pull_rows

Index = int | np.integer | np.ndarray | Array  # of a step or a slot, maybe traced


class Adjoint(NamedTuple):
    """The adjoint on its way back: alpha_t, and the sum of alpha_s B_s for s > t."""

    alpha: PyTree
    g: PyTree


class Loop(NamedTuple):
    """The steps of a training at some hyperparameters, forward and back."""

    system: System
    hparams: PyTree
    unroll: int = 1

    def entry(self, t: Index) -> PyTree:
        return take(self.system.xs, t)

    def step(self, s: PyTree, t: Index) -> PyTree:
        return self.system.step(s, self.hparams, self.entry(t))

    def advance(self, s: PyTree, first: Index, count: int) -> PyTree:
        """Return the state after the steps."""
        if count <= self.unroll:  # nothing is stacked for a loop
            return functools.reduce(lambda s, t: self.step(s, first + t), range(count), s)
        times = first + jnp.arange(count)
        return lax.scan(lambda s, t: (self.step(s, t), None), s, times, unroll=self.unroll)[0]

    def recorded(self, s: PyTree, first: Index, count: int) -> tuple[PyTree, PyTree]:
        """Return the state after the steps, and the stack of those before each."""
        times = first + jnp.arange(count)
        return lax.scan(lambda s, t: (self.step(s, t), s), s, times, unroll=self.unroll)

    def with_gradients(self, s: PyTree, first: Index, count: int) -> tuple[PyTree, PyTree]:
        """Return the state after the steps and its pullback, with states and gradients stored."""
        policy = jax.checkpoint_policies.save_only_these_names(GRADIENT)

        @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
        def step(s, hparams, t):
            return self.system.transposable(s, hparams, self.entry(t))

        def run(s, hparams):
            times = first + jnp.arange(count)
            taken = lambda s, t: (step(s, hparams, t), None)  # noqa: E731
            return lax.scan(taken, s, times, unroll=self.unroll)[0]

        return eqx.filter_vjp(run, s, self.hparams)

    def sweep(self, states: PyTree, adjoint: Adjoint, first: Index, count: int) -> Adjoint:
        """Return the adjoint before these steps, from the stack of the states before each."""

        def back(adjoint, stored):
            return self.adjoint_step(adjoint, *stored), None

        steps = states, first + jnp.arange(count)
        return lax.scan(back, adjoint, steps, reverse=True, unroll=self.unroll)[0]

    def adjoint_step(self, adjoint: Adjoint, s: PyTree, t: Index) -> Adjoint:
        """alpha_{t-1} = alpha_t A_t, and alpha_t B_t is added to g."""
        system, x = self.system, self.entry(t)
        seen = system.seen(self.hparams, x)
        _, pull = eqx.filter_vjp(lambda s, h: system.transposable(s, h, x), s, seen)
        alpha_A, alpha_B = pull_rows(pull, adjoint.alpha)
        return Adjoint(alpha_A, system.add(adjoint.g, alpha_B, x))


class Schedule(eqx.Module):
    """How states are stored and computed again."""

    @abc.abstractmethod
    def forward(self, loop: Loop, s_0: PyTree) -> tuple[PyTree, PyTree]:
        """Return s_T, and what `backward` needs."""

    def backward(self, loop: Loop, stored: PyTree, adjoint: Adjoint) -> Adjoint:
        """Return alpha_0 and the sum over all steps: by the pullback, where that is what was stored."""
        return pulled(stored, adjoint)


class Everything(Schedule):
    """Store all that the adjoint needs, inside each step too: the fastest, and the largest."""

    def forward(self, loop: Loop, s_0: PyTree) -> tuple[PyTree, PyTree]:
        def run(s, hparams):
            return loop._replace(hparams=hparams).advance(s, 0, loop.system.steps)

        return eqx.filter_vjp(run, s_0, loop.hparams)


class Gradients(Schedule):
    """Store each state, and the gradient of the loss with which the step from it begins."""

    def forward(self, loop: Loop, s_0: PyTree) -> tuple[PyTree, PyTree]:
        return loop.with_gradients(s_0, 0, loop.system.steps)


class States(Schedule):
    """Store each state."""

    def forward(self, loop: Loop, s_0: PyTree) -> tuple[PyTree, PyTree]:
        return loop.recorded(s_0, 0, loop.system.steps)

    def backward(self, loop: Loop, stored: PyTree, adjoint: Adjoint) -> Adjoint:
        return loop.sweep(stored, adjoint, 0, loop.system.steps)


class Binomial(Schedule):
    """Store at most c states at a time, chosen so that the fewest steps are computed again.

    Griewank and Walther, Algorithm 799 (Revolve), 2000. One of the c states is s_0.
    """

    states: int

    def forward(self, loop: Loop, s_0: PyTree) -> tuple[PyTree, PyTree]:
        """Run, and store the states that the way back begins with, and s_{T-1}."""
        steps = loop.system.steps
        plan = binomial_plan(steps, self.states)
        slots = int(plan.top.max(initial=0)) + 1
        stored = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (slots, *leaf.shape)), s_0)
        stored, s = _reach(loop, plan, stored, jax.tree.map(lambda a: a[-1], plan.rows))
        return loop.step(s, steps - 1), (stored, s)

    def backward(self, loop: Loop, stored: PyTree, adjoint: Adjoint) -> Adjoint:
        """Go back step by step; before each, compute what is missing."""
        plan = binomial_plan(loop.system.steps, self.states)
        stored, s = stored

        def back(carry, now):
            adjoint, stored, s = carry
            t, before = now
            return (loop.adjoint_step(adjoint, s, t), *_reach(loop, plan, stored, before)), None

        # before step t, the row of step t - 1; before step 0, one that computes nothing
        nothing = Row(0, 0, 0, 0, 0)
        before = jax.tree.map(lambda a, b: np.append(np.int32(a), b[:-1]), nothing, plan.rows)
        steps = np.arange(loop.system.steps, dtype=np.int32), before
        return lax.scan(back, (adjoint, stored, s), steps, reverse=True)[0][0]


def _reach(loop: Loop, plan: "Plan", stored: PyTree, row: "Row") -> tuple[PyTree, PyTree]:
    """Return the stored states, with new ones on the way, and the state before a step."""
    lengths = jnp.asarray(plan.lengths)

    # one loop for what is stored and, last, for what is not: one program
    def advance(k, carry):
        stored, s, at = carry
        stores = k < row.stored
        until = jnp.where(stores, at + lengths[row.first + k], row.step)
        s = lax.fori_loop(at, until, lambda t, s: loop.step(s, t), s)
        # the last is not: what is written in its place is what is there
        slot = row.slot + k + stores.astype(jnp.int32)
        new = jax.tree.map(lambda a, b: jnp.where(stores, a, b), s, take(stored, slot))
        return put(stored, slot, new), s, until

    row = Row(*map(jnp.asarray, row))
    start = stored, take(stored, row.slot), row.at
    return lax.fori_loop(0, row.stored + 1, advance, start)[:2]


class Row(NamedTuple):
    """Before the adjoint of a step (from 0): where the topmost stored state is, and what to store."""

    step: Index
    slot: Index  # of the topmost state that is stored
    at: Index  # the step that it is the state before
    first: Index  # of the lengths of advances whose end is stored
    stored: Index  # how many


class Plan(NamedTuple):
    """The whole way back of `Binomial`: rows for steps 0 .. T-1."""

    rows: Row
    lengths: np.ndarray
    top: np.ndarray  # for each step, the highest slot in use


@functools.lru_cache(maxsize=32)
def binomial_plan(steps: int, states: int) -> Plan:
    """Return which states to store on the way back over the steps, at most `states` at a time."""
    stack, rows, lengths, top = [0], [], [], []
    for step in range(steps - 1, -1, -1):
        while stack[-1] > step:
            stack.pop()
        row = [step, len(stack) - 1, stack[-1], len(lengths), 0]
        while step - stack[-1] > 0 and len(stack) < states:
            length = _split(step + 1 - stack[-1], states - len(stack) + 1)
            if stack[-1] + length >= step:
                break  # the state itself: used at once, not stored
            lengths.append(length)
            stack.append(stack[-1] + length)
            row[4] += 1
        rows.append(row)
        top.append(len(stack) - 1)
    columns = np.array(rows[::-1], np.int32).T
    return Plan(Row(*columns), np.array(lengths or [0], np.int32), np.array(top[::-1], np.int32))


def _split(steps: int, states: int) -> int:
    """Where to store next, of 2 steps or more, when `states` states may be held with the first.

    With beta(s, r) = C(s + r, s), the steps that s states reverse by computing none more than r times,
    and r the least with beta(s, r) >= steps, the halves k and steps - k must need r - 1 and r.
    """
    r = next(r for r in itertools.count(1) if math.comb(states + r, states) >= steps)
    most, rest = math.comb(states + r - 1, states), math.comb(states + r - 2, states - 1)
    return max(1, min(most, steps - rest, steps - 1))


def pulled(pull: Callable[..., PyTree], adjoint: Adjoint) -> Adjoint:
    """Return the adjoint before the steps of a pullback."""
    alpha_A, alpha_B = pull_rows(pull, adjoint.alpha)
    return Adjoint(alpha_A, jax.tree.map(operator.add, adjoint.g, alpha_B))


def take(stack: PyTree, slot: Index) -> PyTree:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, slot, keepdims=False), stack)


def put(stack: PyTree, slot: Index, s: PyTree) -> PyTree:
    update = lambda old, new: lax.dynamic_update_index_in_dim(old, new, slot, 0)  # noqa: E731
    return jax.tree.map(update, stack, s)

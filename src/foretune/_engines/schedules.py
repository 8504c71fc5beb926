"""What reverse mode keeps on its way forward, and what it computes again on its way back.

The adjoint of step t needs s_{t-1}. States that are not stored are computed again from the nearest one
before them.

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


class Schedule(eqx.Module):
    """How states are stored and computed again."""

    unroll: int

    @abc.abstractmethod
    def forward(self, system: System, hparams: PyTree, s_0: PyTree) -> tuple[PyTree, PyTree]:
        """Return s_T, and what `backward` needs."""

    def backward(self, system: System, hparams: PyTree, kept: PyTree, adjoint: Adjoint) -> Adjoint:
        """Return alpha_0 and the sum over all steps: by the pullback, where that is what was kept."""
        return pulled(kept, adjoint)


class Everything(Schedule):
    """Store all that the adjoint needs, inside each step too: the fastest, and the largest."""

    def forward(self, system: System, hparams: PyTree, s_0: PyTree) -> tuple[PyTree, PyTree]:
        return eqx.filter_vjp(
            lambda s, h: advance(system, h, s, 0, system.steps, self.unroll), s_0, hparams
        )


class Gradients(Schedule):
    """Store each state, and the gradient of the loss with which the step from it begins."""

    def forward(self, system: System, hparams: PyTree, s_0: PyTree) -> tuple[PyTree, PyTree]:
        return with_gradients(system, hparams, s_0, 0, system.steps, self.unroll)


class States(Schedule):
    """Store each state."""

    def forward(self, system: System, hparams: PyTree, s_0: PyTree) -> tuple[PyTree, PyTree]:
        return recorded(system, hparams, s_0, 0, system.steps, self.unroll)

    def backward(self, system: System, hparams: PyTree, kept: PyTree, adjoint: Adjoint) -> Adjoint:
        return sweep(system, hparams, kept, adjoint, 0, system.steps, self.unroll)


class Binomial(Schedule):
    """Store at most c states at a time, chosen so that the fewest steps are computed again.

    Griewank and Walther, Algorithm 799 (Revolve), 2000. Of the c states one is s_0; the state that is
    being advanced comes on top.
    """

    states: int

    def forward(self, system: System, hparams: PyTree, s_0: PyTree) -> tuple[PyTree, PyTree]:
        """Run, and keep the states that the way back begins with, and s_{T-1}."""
        plan = binomial_plan(system.steps, self.states)
        slots = int(plan.top.max(initial=0)) + 1
        kept = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (slots, *leaf.shape)), s_0)
        kept, s = self._reach(system, hparams, plan, kept, jax.tree.map(lambda a: a[-1], plan.rows))
        return system.step(s, hparams, entry(system, system.steps - 1)), (kept, s)

    def backward(self, system: System, hparams: PyTree, kept: PyTree, adjoint: Adjoint) -> Adjoint:
        """Go back step by step; before each, compute what is missing."""
        plan = binomial_plan(system.steps, self.states)
        kept, s = kept

        def back(carry, now):
            adjoint, kept, s = carry
            t, before = now
            adjoint = adjoint_step(system, hparams, adjoint, s, t)
            return (adjoint, *self._reach(system, hparams, plan, kept, before)), None

        # before step t, the row of step t - 1; before step 0, one that computes nothing
        nothing = Row(0, 0, 0, 0, 0)
        before = jax.tree.map(lambda a, b: np.append(np.int32(a), b[:-1]), nothing, plan.rows)
        steps = np.arange(system.steps, dtype=np.int32), before
        return lax.scan(back, (adjoint, kept, s), steps, reverse=True)[0][0]

    def _reach(
        self, system: System, hparams: PyTree, plan: "Plan", kept: PyTree, row: "Row"
    ) -> tuple[PyTree, PyTree]:
        """Return the stored states, with new ones on the way, and the state before a step."""
        lengths = jnp.asarray(plan.lengths)
        step = lambda t, s: system.step(s, hparams, entry(system, t))  # noqa: E731

        # one loop for what is stored and, last, for what is not: one program
        def advance(k, carry):
            kept, s, at = carry
            stored = k < row.stored
            until = jnp.where(stored, at + lengths[row.first + k], row.step)
            s = lax.fori_loop(at, until, step, s)
            # the last is not: what is written in its place is what is there
            slot = row.slot + k + stored.astype(jnp.int32)
            new = jax.tree.map(lambda a, b: jnp.where(stored, a, b), s, take(kept, slot))
            return put(kept, slot, new), s, until

        row = Row(*map(jnp.asarray, row))
        start = kept, take(kept, row.slot), row.at
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
    """Return which states to store on the way back over the steps, at most `states` at a time.

    >>> rows = binomial_plan(10, 3).rows
    >>> int((rows.step - rows.at).sum())  # steps computed on the way to the states
    15
    """
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


def advance(
    system: System, hparams: PyTree, s: PyTree, first: Index, count: int, unroll: int
) -> PyTree:
    if count == 0:
        return s

    def step(s, t):
        return system.step(s, hparams, entry(system, t)), None

    return lax.scan(step, s, first + jnp.arange(count), unroll=unroll)[0]


def recorded(
    system: System, hparams: PyTree, s: PyTree, first: Index, count: int, unroll: int
) -> tuple[PyTree, PyTree]:
    """Return the state after the steps, and the stack of those before each."""

    def step(s, t):
        return system.step(s, hparams, entry(system, t)), s

    return lax.scan(step, s, first + jnp.arange(count), unroll=unroll)


def with_gradients(
    system: System, hparams: PyTree, s: PyTree, first: Index, count: int, unroll: int
) -> tuple[PyTree, PyTree]:
    """Return the state after the steps and its pullback, with states and gradients kept."""
    policy = jax.checkpoint_policies.save_only_these_names(GRADIENT)

    @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def step(s, hparams, t):
        return system.transposable(s, hparams, entry(system, t))

    def run(s, hparams):
        times = first + jnp.arange(count)
        return lax.scan(lambda s, t: (step(s, hparams, t), None), s, times, unroll=unroll)[0]

    return eqx.filter_vjp(run, s, hparams)


def pulled(pull: Callable[..., PyTree], adjoint: Adjoint) -> Adjoint:
    """Return the adjoint before the steps of a pullback."""
    alpha_A, alpha_B = pull_rows(pull, adjoint.alpha)
    return Adjoint(alpha_A, jax.tree.map(operator.add, adjoint.g, alpha_B))


def sweep(
    system: System,
    hparams: PyTree,
    states: PyTree,
    adjoint: Adjoint,
    first: Index,
    count: int,
    unroll: int,
) -> Adjoint:
    """Return the adjoint before these steps, from the stack of the states before each."""

    def back(adjoint, stored):
        s, t = stored
        return adjoint_step(system, hparams, adjoint, s, t), None

    steps = (states, first + jnp.arange(count))
    return lax.scan(back, adjoint, steps, reverse=True, unroll=unroll)[0]


def adjoint_step(system: System, hparams: PyTree, adjoint: Adjoint, s: PyTree, t: Index) -> Adjoint:
    """alpha_{t-1} = alpha_t A_t, and alpha_t B_t is added to g."""
    x = entry(system, t)
    seen = system.seen(hparams, x)
    _, pull = eqx.filter_vjp(lambda s, h: system.transposable(s, h, x), s, seen)
    alpha_A, alpha_B = pull_rows(pull, adjoint.alpha)
    return Adjoint(alpha_A, system.add(adjoint.g, alpha_B, x))


def entry(system: System, t: Index) -> PyTree:
    return take(system.xs, t)


def take(kept: PyTree, slot: Index) -> PyTree:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, slot, keepdims=False), kept)


def put(kept: PyTree, slot: Index, s: PyTree) -> PyTree:
    return jax.tree.map(
        lambda old, new: lax.dynamic_update_index_in_dim(old, new, slot, 0), kept, s
    )

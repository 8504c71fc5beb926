"""The trials of a rehearsed training, as the steps of a run."""

import functools
import itertools
import math
import warnings
from collections.abc import Callable
from typing import NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._constraints.base import (
    AbstractConstraint,
    from_unconstrained,
    map_parts,
    project,
    scales,
    to_unconstrained,
)
from .._constraints.sets import NonNegative
from .._constraints.variables import Change, Log
from .._engines.base import AbstractEngine
from .._engines.nonfinite import NonFiniteError, check_finite, explain, is_finite
from .._files.digests import digest
from .._problem.arguments import filtered
from .._problem.batches import Minibatches, shuffled_rows
from .._problem.checks import shown
from .._problem.definition import Definition
from .._problem.draws import REMEMBERED, Draw, Drawn, as_problem
from .._problem.mean import Mean
from .._problem.problem import Problem, opened, responded, validated
from .drive import Evaluation, Stepper
from .paired import errors_of, total
from .run import Run
from .search import candidates, is_scale, leading_scale, lowest_on_line
from .secant import Secant, first_secant, secant_step
from .update import select

Make = Callable[[int, Array], Definition]
SEARCH, DESCENT, LINE, PERFORMANCE = "search", "descent", "line", "performance"
DECADES = (8.0, 2.0)  # of the two searches
RISE, SLACK = 0.1, 0.01  # of the error and of the bar: no rise
SIZES = (1.0, 0.7)  # of the first step and of the others, in units
UNIT = 0.4  # of its scale, for what does not move by factors
SPACING = math.log(2.0)  # of the places on a line, in logarithms
CARRIED_ON = 0.5  # of the fall from the first line to the last
FARTHEST = 1.2  # that this is, in logarithms
LOWER = 1 / 3  # scales, where the performance failed


class Trial(NamedTuple):
    """A step of the run: what is done, over how many steps, with how many candidates or draws."""

    kind: str
    steps: int
    number: int
    cost: float


class Carry(NamedTuple):
    """All that decides how the run continues. A point v is one of `Moves`."""

    hparams: PyTree  # of the next trial
    start: PyTree
    origin: PyTree  # what the search found
    accepted: PyTree  # the last v of a descent that was, and the step from there
    step: PyTree
    begun: Bool[Array, ""]  # whether any was
    bar: Float[Array, ""]  # an error that descents should be below, of the search
    lowest: Float[Array, ""]  # error of this length so far
    secant: Secant
    leading: Int[Array, ""]  # which scale the error depends on most, of those that are searched
    first: PyTree  # the lowest place on the first line


@functools.lru_cache(maxsize=REMEMBERED)
def rehearsal_of(make: Make, steps: int, draws: int, share: float | None) -> Draw:
    """Return the draw of so many steps and a share of the rows, or of the mean of several.

    It is the same function in every call, so that its programs are reused.
    """

    def rehearsal(key):
        problem = make(steps, key)
        if not isinstance(problem, Problem):
            raise TypeError(f"make({steps}, key) returned {problem!r:.80}, not a problem.")
        if problem.steps != steps:
            raise ValueError(
                f"make({steps}, key) returned a problem of {problem.steps} steps: its minibatches and "
                "its schedule must follow the first argument."
            )
        return problem if share is None else cut_rows(problem, share, key)

    return rehearsal if draws == 1 else Mean.of_draws(rehearsal, draws)


class Rehearsals(Stepper):
    """The steps of a rehearsed training, a trial each."""

    first = 1

    def __init__(
        self,
        make: Make,
        constraints: PyTree,
        engine: AbstractEngine,
        key: Array,
        trials: list[Trial],
    ):
        self.make, self.constraints, self.engine = make, constraints, engine
        self.key, self.trials, self.steps = key, trials, trials[-1].steps

    def start(self, hparams: PyTree) -> Carry:
        """Return the carry before the first trial."""
        zeros = jax.tree.map(jnp.zeros_like, hparams)
        none, most = jnp.array(False), jnp.array(jnp.inf, float)
        secant, leading = first_secant(zeros), jnp.zeros((), jnp.int32)
        return Carry(
            *(hparams, hparams, hparams, zeros, zeros, none, most, most, secant, leading, hparams)
        )

    def check(self, hparams: PyTree) -> None:
        """Raise where the problem of a trial is none."""
        for trial in dict.fromkeys(self.trials):
            validated(self._problem(trial), hparams, smooth=self.engine.differentiates)

    def advance(self, run: Run, step: int) -> Evaluation | str:
        """Do a trial, and find the hyperparameters of the next one."""
        trial, carry = self.trials[step - 1], run.carry
        if run.record.get("trial") == PERFORMANCE and not _failed(run.record["value"], carry):
            return "performed"
        hparams, grad, state = carry.hparams, None, None
        if trial.kind == PERFORMANCE and self._goes_on(
            step
        ):  # what was accepted, not the last step
            moves = Moves.about(self.constraints, carry.origin, carry.leading)
            hparams = moves.back(carry.accepted)
        if trial.kind == SEARCH:
            value, carry = self._search(carry, step)
            hparams = carry.hparams
        elif trial.kind == DESCENT:
            value, grad, carry = self._descend(carry, step)
        elif trial.kind == LINE:
            value, carry, trial = self._line(carry, step)
            hparams = carry.hparams
        else:
            value, state = responded(self._problem(trial), hparams)
            if step == len(self.trials) and not is_finite(value):
                raise NonFiniteError(self._why(hparams, value))
            moves = Moves.about(self.constraints, hparams, carry.leading)
            lower = moves.scaled(jnp.log(LOWER), hparams)
            carry = carry._replace(hparams=lower)
        record = {
            "value": value,
            "gradient_norm": None if grad is None else optax.tree.norm(grad),
            "trial": trial.kind,
            "length": trial.steps,
            "cost": trial.cost,
            "hparams": hparams,
        }
        performs = state is not None and is_finite(value)  # the best is one that was
        return Evaluation(carry, hparams, value, grad, state, record, (state, hparams), performs)

    def result(self, run: Run) -> tuple[PyTree, PyTree, PyTree]:
        """Return what was performed, again where it is not at hand; or what would be."""
        if run.record.get("trial") != PERFORMANCE:
            return run.carry.hparams, run.value, None
        if run.state is None or run.step != int(run.best.step):
            hparams = run.best.hparams
            return hparams, *responded(self._problem(self.trials[-1]), hparams)
        return run.hparams, run.value, run.state

    def fingerprint(self, hparams: PyTree) -> dict[str, str]:
        """Return what tells this run from others; functions cannot be compared."""
        return {
            "constraints": repr(self.constraints),
            "initial hyperparameters": digest(hparams),
            "key": digest(self.key),
            "trials": repr(self.trials),
            "data of the draw": digest(self._problem(self.trials[-1]).constants),
        }

    def _problem(self, trial: Trial) -> Drawn:
        """Return the problem of a trial: one draw for each length."""
        performs = trial.kind == PERFORMANCE
        key = self.key if performs else jax.random.fold_in(self.key, trial.steps)
        draws = trial.number if trial.kind == DESCENT else 1
        share = None if performs else trial.steps / self.steps
        draw = rehearsal_of(self.make, trial.steps, draws, share)
        with warnings.catch_warnings():  # a training in which nothing is random will do
            warnings.filterwarnings("ignore", r"draw\(key\) does not use its key")
            return cast(Drawn, as_problem(draw, key))

    def _goes_on(self, step: int) -> bool:
        """Return whether the trial before was a descent of the same length."""
        trial, before = self.trials[step - 1], self.trials[max(step - 2, 0)]
        return step > 1 and before.kind == DESCENT and before.steps == trial.steps

    def _search(self, carry: Carry, step: int) -> tuple[Array, Carry]:
        """Find the best candidate: of the scale that leads, far and wide; then of all, nearby."""
        trial, decades = self.trials[step - 1], DECADES[step - 1]
        tried = candidates(self.constraints, carry.hparams, trial.number, decades)
        values = errors_of(self._problem(trial), tried)
        leading, counts = carry.leading, jnp.isfinite(values)
        if step == 1:  # far from the best, others make up for what is wrong with the one that leads
            leading = leading_scale(values[1:], trial.number)
            number = (jnp.arange(len(values)) - 1) // trial.number  # -1: the start
            counts &= (number == leading) | (number < 0)
        best = int(jnp.argmin(jnp.where(counts, values, jnp.inf)))
        found = jax.tree.map(lambda leaf: leaf[best], tried)
        v = Moves.about(self.constraints, found, leading).to(found)
        # In another draw the best is still better than half of them, of those far and wide.
        typical = jnp.nanmedian(jnp.where(jnp.isfinite(values), values, jnp.nan))
        bar = (values[best] + typical) / 2 if step == 1 else carry.bar
        return values[best], carry._replace(
            hparams=found, origin=found, accepted=v, bar=bar, leading=leading
        )

    def _descend(self, carry: Carry, step: int) -> tuple[Array, PyTree, Carry]:
        """Go to where the derivatives would be 0; or back, where the error has risen."""
        trial = self.trials[step - 1]
        with check_finite(False):
            value, grad, _ = self.engine(self._problem(trial), carry.hparams)
        moves = Moves.about(self.constraints, carry.origin, carry.leading)
        same = self._goes_on(step)
        size, same = SIZES[same], jnp.array(same)
        return total(value), grad, _next(moves, carry, value, grad, size, same)

    def _line(self, carry: Carry, step: int) -> tuple[Array, Carry, Trial]:
        """Multiply the scale that leads by a factor, and find the one with the lowest error.

        After the last line: the start, where that is better; or what the trend leads to.
        """
        trial = self.trials[step - 1]
        problem, moves = (
            self._problem(trial),
            Moves.about(self.constraints, carry.origin, carry.leading),
        )
        share = trial.steps / self.steps

        def error(hparams):
            return float(total(responded(problem, hparams)[0]))

        def at(place):
            return moves.scaled(jnp.array(place * SPACING), carry.hparams)

        place, lowest, count = lowest_on_line(lambda place: error(at(place)), trial.number)
        hparams = at(place)
        if self._goes_on(step) and carry.begun and not lowest <= _most(carry.lowest, carry):
            hparams, lowest = moves.back(carry.accepted), float(carry.lowest)
        v = moves.to(hparams)
        carry = carry._replace(accepted=v, begun=jnp.array(True), lowest=jnp.array(lowest))
        if any(later.kind == LINE for later in self.trials[step:]):
            carry = carry._replace(hparams=hparams, first=hparams)
            return jnp.array(lowest), carry, trial._replace(cost=count * share)
        of_start = error(carry.start)
        if of_start < lowest or not math.isfinite(lowest):
            hparams, lowest = carry.start, of_start
        else:
            hparams = moves.carried_on(moves.to(carry.first), v)
        carry = carry._replace(hparams=hparams, lowest=jnp.array(lowest))
        return jnp.array(lowest), carry, trial._replace(cost=(count + 1) * share)

    def _why(self, hparams: PyTree, value: PyTree) -> str:
        drawn = self._problem(self.trials[-1])
        arrays, structure = validated(drawn, hparams)
        problem, hparams = opened(structure, arrays)
        why = explain(problem, hparams, (value, jax.tree.map(jnp.zeros_like, hparams), None))
        return f"{why}\nThis was a performance, with {shown(hparams)}."


class Moves(eqx.Module):
    """The unconstrained variable in units, v = u / c. Scales move by factors: theirs is log(x)."""

    constraints: PyTree
    units: PyTree
    leads: PyTree  # of each constraint, whether it is that of the scale that leads

    @classmethod
    def about(cls, constraints: PyTree, origin: PyTree, leading: Int[Array, ""]) -> "Moves":
        """Return the moves about a point. A scale that is 0 there cannot move by factors."""
        number = itertools.count()
        leads = map_parts(lambda c: is_scale(c) and leading == next(number), constraints)
        constraints = map_parts(_by_factors, constraints, origin)
        sizes = scales(constraints, to_unconstrained(constraints, origin))

        def unit(constraint, sizes):
            share = 1.0 if isinstance(constraint, Change) else UNIT
            return jax.tree.map(lambda size: share * size, sizes)

        return cls(constraints, map_parts(unit, constraints, sizes), leads)

    def to(self, hparams: PyTree) -> PyTree:
        u = to_unconstrained(self.constraints, hparams)
        return jax.tree.map(jnp.divide, u, self.units)

    def back(self, v: PyTree) -> PyTree:
        return project(self.constraints, self._unconfined(v))

    def gradient(self, v: PyTree, grad: PyTree) -> PyTree:
        """Return the gradient in v, from that in the hyperparameters."""
        _, pull = jax.vjp(self._unconfined, v)
        return pull(grad)[0]

    def of_leading(self, f: Callable[..., Array], v: PyTree, *others: PyTree) -> PyTree:
        """Return v, where it is of the scale that leads f of it and of others."""

        def part(constraint, leads, v, *others):
            if not isinstance(constraint, Log):
                return v
            return jax.tree.map(lambda v, *others: jnp.where(leads, f(v, *others), v), v, *others)

        return map_parts(part, self.constraints, self.leads, v, *others)

    def scaled(self, by: Array, hparams: PyTree) -> PyTree:
        """Return the hyperparameters with the scale that leads times exp(by)."""
        return self.back(self.of_leading(lambda v: v + by.astype(v.dtype), self.to(hparams)))

    def carried_on(self, before: PyTree, v: PyTree) -> PyTree:
        """Return the hyperparameters at v, the scale that leads lower still, if it has fallen."""

        def further(v, before):
            return v + jnp.clip(CARRIED_ON * (v - before), -FARTHEST, 0)

        return self.back(self.of_leading(further, v, before))

    def _unconfined(self, v: PyTree) -> PyTree:
        u = jax.tree.map(jnp.multiply, v, self.units)
        return from_unconstrained(self.constraints, u)


def _by_factors(constraint: AbstractConstraint, part: PyTree) -> AbstractConstraint:
    if not isinstance(constraint, NonNegative):
        return constraint
    positive = all(bool(jnp.all(leaf > 0)) for leaf in jax.tree.leaves(part))
    return Log() if positive else constraint


@filtered
def _next(
    moves: Moves, carry: Carry, value: PyTree, grad: PyTree, size: float, same: Bool[Array, ""]
) -> Carry:
    """Return the carry after a descent, which is accepted or rejected."""
    v, error = moves.to(carry.hparams), total(value)
    lowest = jnp.where(same, carry.lowest, carry.bar)
    accepts = is_finite((value, grad)) & ~(error > _most(lowest, carry))
    secant = carry.secant._replace(known=carry.secant.known & same)
    ahead, after = secant_step(secant, v, moves.gradient(v, grad), size)
    back = jax.tree.map(lambda step: -0.5 * step, carry.step)
    step = select(accepts, ahead, back)
    origin = select(accepts | carry.begun, select(accepts, v, carry.accepted), v)
    # Where none has been accepted yet, the scale is too high.
    lower = moves.of_leading(lambda step: step - 1, jax.tree.map(jnp.zeros_like, v))
    step = select(accepts | carry.begun, step, lower)
    hparams = moves.back(jax.tree.map(jnp.add, origin, step))
    return carry._replace(
        hparams=hparams,
        accepted=origin,
        step=step,
        begun=carry.begun | accepts,
        lowest=jnp.where(accepts, jnp.fmin(error, lowest), lowest),
        secant=select(accepts, after, secant),
    )


def _most(error: Array, carry: Carry) -> Array:
    """Return what is not above an error, up to a tenth of it and a hundredth of the bar."""
    slack = RISE * jnp.abs(error) + SLACK * jnp.abs(carry.bar)
    return error + jnp.where(jnp.isfinite(slack), slack, 0)


def _failed(value: PyTree, carry: Carry) -> bool:
    """Return whether a performance is not finite, or worse than a rehearsal."""
    error = sum(jax.tree.leaves(value))
    return not np.isfinite(error) or error > float(_most(carry.lowest, carry))


def cut_rows(problem: Problem, share: float, key: Array) -> Problem:
    """Return the problem with minibatches of a share of the rows, where each is seen more than once."""
    batches = problem.batches
    if (
        not isinstance(batches, Minibatches)
        or batches.gather is not None
        or batches.indices.ndim != 2
    ):
        return problem
    steps, size = batches.indices.shape
    n = jax.tree.leaves(batches.data)[0].shape[0]
    kept = max(size, round(share * n))
    if kept >= n or steps * size <= kept:
        return problem
    of_rows, of_batches = jax.random.split(jax.random.fold_in(key, 1))
    rows = jax.random.permutation(of_rows, n)[:kept]
    indices = rows[shuffled_rows(kept, size, steps, of_batches)].astype(batches.indices.dtype)
    return problem.replace(batches=batches.at(indices))

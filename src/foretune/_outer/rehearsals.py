"""The trials of a rehearsed training, as the steps of a run."""

import functools
import math
import warnings
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

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
from .._problem.warn import warn
from .descent import total
from .drive import Evaluation, Stepper
from .moves import Moves, Secant, first_secant, secant_step
from .paired import errors_of
from .run import Run
from .search import candidates, leading_scale, lowest_on_line
from .update import select

Make = Callable[[int, Array], Definition]
SEARCH, DESCENT, LINE, OTHERS = "search", "descent", "line", "others"
REFINEMENT, CHOICE, START, PERFORMANCE = "refinement", "choice", "start", "performance"
DECADES, FAR = (8.0, 2.0), 12.0  # of the two searches, and of that of the others
RISE, SLACK = 0.1, 0.01  # of the error and of the bar: no rise
SIZES = (1.0, 0.7)  # of the first step and of the others, in units
SPACING = math.log(2.0)  # of the places on a line, in logarithms
LOWER = 1 / 3  # the leading scale, before a refinement or where the performance failed
ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(0.7, 0.9))
SIZE = 0.3  # of the first step of a refinement, in units; it falls to 0 as a cosine
WAY = 4  # points that a choice compares: before a refinement, and at the end of each third of it


class Trial(NamedTuple):
    """A step of the run: what is done, over how many steps, with how many candidates or draws."""

    kind: str
    steps: int
    number: int
    cost: float


class Rehearsed(NamedTuple):
    """All that decides how the run continues. A point v is one of `Moves`."""

    hparams: PyTree  # of the next trial
    origin: PyTree  # what the search found
    accepted: PyTree  # the last v that a descent accepted, and the step from there
    step: PyTree
    begun: Bool[Array, ""]  # whether any was
    bar: Float[Array, ""]  # an error of the search, which descents should be below
    lowest: Float[Array, ""]  # error of this length so far
    secant: Secant
    leading: Int[Array, ""]  # which of the scales the error depends on most
    first: PyTree  # the lowest place on the first line
    adam: optax.OptState
    way: tuple[PyTree, ...]
    of_start: Float[Array, ""]  # the error of the start at full length, where it is known


class Found(NamedTuple):
    """What a trial has found."""

    carry: Rehearsed
    hparams: PyTree  # those that the value belongs to
    value: PyTree
    grad: PyTree = None
    state: PyTree = None
    cost: float | None = None  # where it is not the planned one


@functools.lru_cache(maxsize=REMEMBERED)
def rehearsal_of(make: Make, steps: int, draws: int, share: float | None) -> Draw:
    """Return the draw of n steps and a share of the rows, or of the mean of several.

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
    _warned = False

    def __init__(
        self,
        make: Make,
        start: PyTree,
        constraints: PyTree,
        engine: AbstractEngine,
        key: Array,
        trials: list[Trial],
    ):
        self.make, self.start, self.constraints, self.engine = make, start, constraints, engine
        self.key, self.trials, self.steps = key, trials, trials[-1].steps

    def first_carry(self) -> Rehearsed:
        zeros, most = jax.tree.map(jnp.zeros_like, self.start), jnp.array(jnp.inf, float)
        secant, leading = first_secant(zeros), jnp.zeros((), jnp.int32)
        h, begun = self.start, jnp.array(False)
        adam = ADAM.init(zeros)
        return Rehearsed(
            h, h, zeros, zeros, begun, most, most, secant, leading, h, adam, WAY * (h,), most
        )

    def check(self) -> None:
        """Raise where the problem of a trial is none."""
        for trial in dict.fromkeys(self.trials):
            validated(self._problem(trial), self.start, smooth=self.engine.differentiates)

    def advance(self, run: Run, step: int) -> Evaluation | str:
        """Do a trial, and find the hyperparameters of the next one."""
        trial, carry = self.trials[step - 1], run.carry
        if run.record.get("trial") == PERFORMANCE and not _failed(run.record["value"], carry):
            return "performed"
        do = {
            SEARCH: self._search,
            DESCENT: self._descend,
            LINE: self._line,
            OTHERS: self._search_others,
            REFINEMENT: self._refine,
            CHOICE: self._choose,
            START: self._start,
            PERFORMANCE: self._perform,
        }
        found = do[trial.kind](carry, step)
        record = {
            "value": found.value,
            "gradient_norm": None if found.grad is None else optax.tree.norm(found.grad),
            "trial": trial.kind,
            "length": trial.steps,
            "cost": trial.cost if found.cost is None else found.cost,
            "hparams": found.hparams,
        }
        performs = found.state is not None and is_finite(found.value)  # the best is one that was
        return Evaluation(*found[:5], record, performs)

    def result(self, run: Run) -> tuple[PyTree, PyTree, PyTree]:
        """Return what was performed, again where it is not at hand; or what would be."""
        if run.record.get("trial") != PERFORMANCE:
            return run.carry.hparams, run.value, None
        if run.state is None or run.step != int(run.best.step):
            hparams = run.best.hparams
            return hparams, *responded(self._problem(self.trials[-1]), hparams)
        return run.hparams, run.value, run.state

    def fingerprint(self) -> dict[str, str]:
        """Return what tells this run from others; functions cannot be compared."""
        return {
            "constraints": repr(self.constraints),
            "initial hyperparameters": digest(self.start),
            "key": digest(self.key),
            "trials": repr(self.trials),
            **self._problem(self.trials[-1]).fingerprint(),
        }

    def _problem(self, trial: Trial) -> Drawn:
        """Return the problem of a trial: one draw for each length."""
        whole = trial.kind in (START, PERFORMANCE)
        key = self.key if whole else jax.random.fold_in(self.key, trial.steps)
        draws = trial.number if trial.kind == DESCENT else 1
        share = None if trial.steps == self.steps else trial.steps / self.steps
        draw = rehearsal_of(self.make, trial.steps, draws, share)
        with warnings.catch_warnings():  # a training in which nothing is random will do
            warnings.filterwarnings("ignore", r"draw\(key\) does not use its key")
            return cast(Drawn, as_problem(draw, key))

    def _moves(self, carry: Rehearsed) -> Moves:
        return Moves.about(self.constraints, carry.origin, carry.leading)

    def _continues(self, step: int) -> bool:
        """Return whether the trial before was a descent or a refinement of the same length."""
        trial, before = self.trials[step - 1], self.trials[max(step - 2, 0)]
        return step > 1 and before.kind in (DESCENT, REFINEMENT) and before.steps == trial.steps

    def _search(self, carry: Rehearsed, step: int) -> Found:
        """Find the best candidate: of the leading scale, over decades; then of all, nearby."""
        trial, decades = self.trials[step - 1], DECADES[step - 1]
        tried = candidates(self.constraints, carry.hparams, trial.number, decades)
        values = jnp.mean(errors_of(self._problem(trial), tried), 1)
        counts = jnp.isfinite(values)
        if step == 1:  # far from the best, others make up for what is wrong with the leading one
            leading = leading_scale(values[1:], trial.number)
            number = (jnp.arange(len(values)) - 1) // trial.number  # -1: the start
            counts &= (number == leading) | (number < 0)
            carry = carry._replace(leading=leading)
        found, lowest = _lowest(tried, jnp.where(counts, values, jnp.inf))
        if step == 1:  # in another draw the best is still better than half of the candidates
            typical = jnp.nanmedian(jnp.where(jnp.isfinite(values), values, jnp.nan))
            carry = carry._replace(bar=(lowest + typical) / 2)
        carry = carry._replace(hparams=found, origin=found)
        return Found(carry._replace(accepted=self._moves(carry).to(found)), found, lowest)

    def _search_others(self, carry: Rehearsed, step: int) -> Found:
        """Find the best candidate of the scales that do not lead, over decades."""
        trial, leading = self.trials[step - 1], int(carry.leading)
        tried = candidates(self.constraints, carry.hparams, trial.number, FAR, without=leading)
        found, lowest = _lowest(tried, jnp.mean(errors_of(self._problem(trial), tried), 1))
        return Found(carry._replace(hparams=found, origin=found), found, lowest)

    def _descend(self, carry: Rehearsed, step: int) -> Found:
        """Go to where the derivatives would be 0; or back, where the error has risen."""
        drawn, same = self._problem(self.trials[step - 1]), self._continues(step)
        with check_finite(False):
            value, grad, _ = self.engine(drawn, carry.hparams)
        lowest = carry.lowest if same else carry.bar
        if not is_finite(grad) and not total(value) > _most(lowest, carry):
            self._warn_of(drawn, carry.hparams, (value, grad, None))
            return Found(carry, carry.hparams, total(value), grad)  # it tells nothing
        after = _next(self._moves(carry), carry, value, grad, SIZES[same], jnp.array(same))
        return Found(after, carry.hparams, total(value), grad)

    def _line(self, carry: Rehearsed, step: int) -> Found:
        """Multiply the leading scale by a factor, and find the one with the lowest error.

        After the last line: the start, where that is better; or what the trend leads to.
        """
        trial, moves = self.trials[step - 1], self._moves(carry)
        problem = self._problem(trial)

        def error(hparams):
            return float(total(responded(problem, hparams)[0]))

        def at(place):
            return moves.scaled(place * SPACING, carry.hparams)

        place, lowest, count = lowest_on_line(lambda place: error(at(place)), trial.number)
        hparams, first = at(place), carry.first
        if self._continues(step) and carry.begun and not lowest <= _most(carry.lowest, carry):
            hparams, lowest = moves.back(carry.accepted), float(carry.lowest)
        v = moves.to(hparams)
        if any(later.kind == LINE for later in self.trials[step:]):
            first = hparams
        else:
            of_start, count = error(self.start), count + 1
            if of_start < lowest or not math.isfinite(lowest):
                hparams, lowest = self.start, of_start
            else:
                hparams = moves.carried_on(moves.to(first), v)
        carry = carry._replace(
            hparams=hparams,
            accepted=v,
            begun=jnp.array(True),
            lowest=jnp.array(lowest),
            first=first,
            way=(hparams, *carry.way[1:]),
        )
        return Found(carry, hparams, carry.lowest, cost=count * trial.steps / self.steps)

    def _refine(self, carry: Rehearsed, step: int) -> Found:
        """Step down at full length, in a draw of its own."""
        moves = Moves.about(self.constraints, carry.origin, carry.leading, wide=True)
        if not self._continues(step):
            lower = moves.scaled(jnp.log(LOWER), carry.hparams)
            carry = carry._replace(hparams=lower)
        drawn, hparams = self._drawn(step, 0), carry.hparams
        with check_finite(False):
            value, grad, _ = self.engine(drawn, hparams)
        all_of_them = [i for i, trial in enumerate(self.trials, 1) if trial.kind == REFINEMENT]
        made = (step - all_of_them[0]) / len(all_of_them)
        if is_finite(grad):
            size = SIZE * (1 + math.cos(math.pi * made)) / 2
            carry = _refined(moves, carry, grad, jnp.array(size))
        else:
            self._warn_of(drawn, hparams, (value, grad, None))
        way = list(carry.way)
        way[1 + int((WAY - 1) * made)] = carry.hparams
        return Found(carry._replace(way=tuple(way)), hparams, total(value), grad)

    def _choose(self, carry: Rehearsed, step: int) -> Found:
        """Find the best point of a refinement, with the leading scale or half of it."""
        moves, (first, *others) = self._moves(carry), carry.way
        halves = [moves.scaled(-SPACING, hparams) for hparams in others]
        tried = jax.tree.map(lambda *leaves: jnp.stack(leaves), first, *others, *halves)
        draws = [self._drawn(step, i) for i in range(self.trials[step - 1].number)]
        values = jnp.mean(jnp.stack([errors_of(drawn, tried) for drawn in draws]), (0, 2))
        found, lowest = _lowest(tried, values.astype(float))
        return Found(carry._replace(hparams=found, lowest=lowest), found, lowest)

    def _drawn(self, step: int, number: int) -> Drawn:
        """Return the problem of a trial in a draw of its own."""
        drawn = self._problem(self.trials[step - 1])
        return drawn.at(jax.random.fold_in(jax.random.fold_in(drawn.key, step), number))

    def _start(self, carry: Rehearsed, step: int) -> Found:
        """Train as was given, in the draw of the performance."""
        value = responded(self._problem(self.trials[step - 1]), self.start)[0]
        return Found(carry._replace(of_start=total(value)), self.start, total(value))

    def _perform(self, carry: Rehearsed, step: int) -> Found:
        """Do the whole training; the next one, if any, is the start's or has a lower leading scale."""
        hparams, drawn = carry.hparams, self._problem(self.trials[step - 1])
        value, state = responded(drawn, hparams)
        if step == len(self.trials) and not is_finite(value):
            why = _why(drawn, hparams, (value, jax.tree.map(jnp.zeros_like, hparams), None))
            raise NonFiniteError(f"{why}\nThis was a performance, with {shown(hparams)}.")
        moves = Moves.about(self.constraints, hparams, carry.leading)
        lower = moves.scaled(jnp.log(LOWER), hparams)
        further = self.start if _above_start(value, carry) else lower
        return Found(carry._replace(hparams=further), hparams, value, None, state)

    def _warn_of(
        self, drawn: Drawn, hparams: PyTree, result: tuple[PyTree, PyTree, PyTree]
    ) -> None:
        if not self._warned:
            self._warned = True
            why = f"a hypergradient of rehearse is {_why(drawn, hparams, result)}"
            warn(f"{why}\nSuch trials move nothing.", RuntimeWarning)


def _lowest(tried: PyTree, values: Float[Array, " tried"]) -> tuple[PyTree, Float[Array, ""]]:
    """Return the hyperparameters with the lowest error that is finite, and it."""
    best = int(jnp.argmin(jnp.where(jnp.isfinite(values), values, jnp.inf)))
    return jax.tree.map(lambda leaf: leaf[best], tried), values[best]


def _why(drawn: Drawn, hparams: PyTree, result: tuple[PyTree, PyTree, PyTree]) -> str:
    arrays, structure = validated(drawn, hparams)
    return explain(*opened(structure, arrays), result)


@filtered
def _next(
    moves: Moves, carry: Rehearsed, value: PyTree, grad: PyTree, size: float, same: Bool[Array, ""]
) -> Rehearsed:
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
    step = select(accepts | carry.begun, step, jax.tree.map(jnp.negative, moves.ahead))
    return carry._replace(
        hparams=moves.back(jax.tree.map(jnp.add, origin, step)),
        accepted=origin,
        step=step,
        begun=carry.begun | accepts,
        lowest=jnp.where(accepts, jnp.fmin(error, lowest), lowest),
        secant=select(accepts, after, secant),
    )


@filtered
def _refined(moves: Moves, carry: Rehearsed, grad: PyTree, size: Array) -> Rehearsed:
    """Return the carry after a step of Adam."""
    v = moves.to(carry.hparams)
    with jax.numpy_dtype_promotion("standard"):  # Adam multiplies floats by a count
        direction, adam = ADAM.update(moves.gradient(v, grad), carry.adam)
    v = jax.tree.map(lambda v, d: v - (size * d).astype(v.dtype), v, direction)
    return carry._replace(hparams=moves.back(v), adam=adam)


def _most(error: Array, carry: Rehearsed) -> Array:
    """Return what is not above an error, up to a tenth of it and a hundredth of the bar."""
    slack = RISE * jnp.abs(error) + SLACK * jnp.abs(carry.bar)
    return error + jnp.where(jnp.isfinite(slack), slack, 0)


def _failed(value: PyTree, carry: Rehearsed) -> bool:
    """Return whether a performance is not finite, or worse than a rehearsal or than the start."""
    error = sum(jax.tree.leaves(value))
    worse = error > float(_most(carry.lowest, carry)) or _above_start(value, carry)
    return not np.isfinite(error) or worse


def _above_start(value: PyTree, carry: Rehearsed) -> bool:
    """Return whether a performance is worse than one from the start, where that is known."""
    of_start = float(carry.of_start)
    return math.isfinite(of_start) and not float(sum(jax.tree.leaves(value))) <= of_start


def cut_rows(problem: Problem, share: float, key: Array) -> Problem:
    """Return the problem with minibatches of a share of the rows, where each is seen more than once."""
    batches = problem.batches
    plain = isinstance(batches, Minibatches) and batches.gather is None
    if not plain or batches.indices.ndim != 2:
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

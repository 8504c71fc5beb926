"""The descent on a problem that is drawn anew at each step: points are compared in the same draws.

Errors of different draws differ by more than a step gains, so single steps are not judged: only one
that is not finite is rejected, and the descent goes on from the point before, with steps of a quarter.
After a span of S steps the point reached, lambda, is compared with the incumbent, the last one that was
accepted, in n draws that both share,

    d_i = f_i(lambda) - f_i(incumbent),    m = mean of d,    e = t std(d) / sqrt(n)

- m < -e: lambda is the new incumbent, steps may be twice as long, up to the optimizer's own, and the
  next span is a quarter of all steps so far, or as long as this one;
- m > e', of a larger t, and again in 32 draws: lambda is rejected; the descent goes on from the
  incumbent, the optimizer anew, with steps of a quarter;
- else noise decides: on, and the next span is twice as long and compared in twice as many draws.

A draw that is a mean has n differences, one for each of its problems, and S is shorter.

So an optimizer that descends is left alone. Between two comparisons, unless callbacks want to see each,
the steps are one program, or several of about a second; what is not finite ends it, and is evaluated
again by itself. Programs make whole blocks of B steps, and a span S > B is a multiple of B: a GPU waits
for the host, which decides whether to go on, after each block alone.
"""

import functools
import time
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._engines.base import TracedEngine
from .._engines.nonfinite import check_finite, is_finite
from .._problem.arguments import filtered
from .._problem.draws import Drawn
from .._problem.mean import Mean
from .._problem.problem import responded
from .._problem.system import make_system
from .descent import LONGER, SHORTER, Descent, total
from .drive import Evaluation
from .run import Run
from .update import Outer, select, times

SPAN, SHORTEST = 8, 2  # steps to the first comparison, and where a draw is a mean of many
SHARE = 4  # of the steps so far, a span is at least the fourth part
QUANTILES = {4: (2.35, 4.54), 8: (1.89, 3.00), 16: (1.75, 2.60), 32: (1.70, 2.45)}
"""n -> t of n - 1 degrees of freedom, one side of 95 % and of 99 %."""
FEWEST = 4  # n
BLOCK = 8  # B
MOST, FEW = 1024, 32  # steps of one program, and of the first ones
SECONDS = 1.0  # that a program may take, about: callbacks and interrupts wait for it

_folded = jax.jit(jax.random.fold_in)  # one program, where it would be several


class Paired(NamedTuple):
    """All that decides how the descent continues: what a checkpoint saves."""

    hparams: PyTree  # to be evaluated next
    last: PyTree  # that were evaluated
    opt_state: PyTree
    incumbent: PyTree
    finite: PyTree  # the last point with a finite gradient; then the incumbent
    error: Float[Array, ""]  # of the incumbent: the first one, and all differences since
    share: Float[Array, ""]  # of the optimizer's steps
    since: Int[Array, ""]  # steps since the last comparison
    span: Int[Array, ""]
    undecided: Int[Array, ""]


class PairedDescent(Descent):
    """The steps of `minimize` on a draw."""

    source: Drawn
    _most = FEW  # steps of the next program

    def first_carry(self, hparams: PyTree) -> Paired:
        copy = jax.tree.map(jnp.copy, hparams)
        error, share = jnp.array(jnp.inf, float), jnp.ones((), float)
        first = max(SHORTEST, SPAN // self._each)
        since, span, undecided = (jnp.array(n, jnp.int32) for n in (0, first, 0))
        opt_state = self.outer.init(hparams)
        return Paired(hparams, copy, opt_state, copy, copy, error, share, since, span, undecided)

    def problem_at(self, step: int) -> Drawn:
        return self.source.at(_folded(self.source.key, step))

    def advance(self, run: Run, step: int) -> Evaluation | str:
        """Make the steps up to the next comparison, or one; and compare, where it is time."""
        found = self._many(run, step) or self._one(run, step)
        carry = found.carry
        due = found.counts and int(carry.since) >= int(carry.span)
        if len(jax.tree.leaves(found.value)) > 1:  # is not compared
            return found._replace(carry=_counted(carry, 2 * int(carry.span))) if due else found
        if before := found.before:
            step += (made := len(before["rejected"]))
            before["paired"] = np.broadcast_to(run.carry.error, made)
        if run.begins:
            carry = carry._replace(error=total(found.value))
        elif due:
            carry = self._compared(carry, step, found.hparams)
        found.record["paired"] = carry.error
        return found._replace(carry=carry)

    def result(self, run: Run) -> tuple[PyTree, PyTree, PyTree]:
        """Return the incumbent, or the last point, where that is lower (of several objectives: it)."""
        carry: Paired = run.carry
        single = "paired" in run.record
        lower = not run.record["rejected"]
        if single and lower:
            lower = self._difference(run.step, carry.last, carry.incumbent, FEWEST)[0] < 0
        if lower and run.state is not None:
            return carry.last, run.value, run.state
        hparams = carry.last if lower else carry.incumbent
        return hparams, *responded(self.problem_at(run.step), hparams)

    def _many(self, run: Run, step: int) -> Evaluation | None:
        """Make steps in one program: to the next comparison, the last step, or what is not finite."""
        carry: Paired = run.carry
        if run.begins or not run.coarse or not isinstance(self.engine, TracedEngine):
            return None
        span, since = jax.device_get((carry.span, carry.since))
        count = min(int(span) - int(since), cast(int, run.steps) - step, self._most)
        if (count := count // BLOCK * BLOCK) < 1:
            return None
        place, began = np.array([step, count], np.int32), time.monotonic()
        with check_finite(False):
            carry, grad, made, rows = _steps(self.engine, self.outer, self.source, carry, place)
        made, rows = jax.device_get((made, rows))
        if count == self._most and jax.process_count() == 1:  # the clocks of several differ
            quick = time.monotonic() - began < SECONDS / 2
            self._most = min(MOST, 2 * self._most) if quick else max(FEW, self._most // 2)
        if not made:
            return None
        record = jax.tree.map(lambda rows: rows[made - 1], rows)
        before = jax.tree.map(lambda rows: rows[: made - 1], rows)
        return Evaluation(carry, carry.last, record["value"], grad, None, record, before=before)

    def _one(self, run: Run, step: int) -> Evaluation:
        """Make one step."""
        carry: Paired = run.carry
        hyper = self.evaluated(step, carry.hparams)
        moved, finite, norm = _moved(self.outer, carry, hyper.value, hyper.grad)
        value, norm, finite = jax.device_get((hyper.value, norm, finite))
        if not finite:
            self.report(run, step, carry.hparams, hyper)
        record = {"value": value, "gradient_norm": norm, "rejected": ~finite}
        return Evaluation(moved, carry.hparams, *hyper, record, finite)

    def _difference(
        self, step: int, hparams: PyTree, other: PyTree, draws: int
    ) -> tuple[float, float, float]:
        """Return the mean difference of the errors in draws of a step's own, and t e of both sides."""
        at_step, pair = self.problem_at(step), (hparams, other)
        group = -(-FEWEST // self._each)  # draws: one program, however many there are
        times = range(max(1, draws // (group * self._each)))
        found = [_in_draws(at_step, pair, group, np.array(i, np.int32)) for i in times]
        errors = np.concatenate(jax.device_get(found), 1, dtype=float)
        n = errors.shape[1]
        with np.errstate(invalid="ignore"):  # NaN, where both are infinite, counts as no gain
            differences = errors[0] - errors[1]
            deviation = np.std(differences, ddof=1) / np.sqrt(n)
        low, high = QUANTILES[max(known for known in QUANTILES if known <= n)]
        return float(differences.mean()), float(low * deviation), float(high * deviation)

    @functools.cached_property
    def _each(self) -> int:
        """How many errors a draw has: that of each problem of a mean."""
        problem = eqx.filter_eval_shape(self.source.problem)
        return problem.count if isinstance(problem, Mean) and not problem.trajectory else 1

    def _compared(self, carry: Paired, step: int, hparams: PyTree) -> Paired:
        """Return the carry after a comparison at a step."""
        share, span, undecided = jax.device_get((carry.share, carry.span, carry.undecided))
        draws = min(FEWEST * 2 ** int(undecided), max(QUANTILES))
        mean, low, high = self._difference(step, hparams, carry.incumbent, draws)
        if mean < -low:
            share, span = min(LONGER * share, 1), max(span, step // SHARE)
            carry = carry._replace(incumbent=hparams, error=carry.error + mean)
            return _counted(carry, span, share=share, undecided=0)
        if not mean <= high:  # NaN, too; once more, since tails may be long, and a span is at stake
            mean, _, high = self._difference(step, hparams, carry.incumbent, max(QUANTILES))
            if not mean <= high:
                return _back(self.outer, carry, carry.incumbent)
        return _counted(carry, 2 * span, undecided=undecided + 1)


def _counted(carry: Paired, span: Any, **others: Any) -> Paired:
    """Return the carry with a new span, of whole blocks where it is longer than one."""
    if span > BLOCK:
        span = -(-span // BLOCK) * BLOCK
    numbers = {"since": 0, "span": span, **others}
    arrays = {name: jnp.asarray(n, getattr(carry, name).dtype) for name, n in numbers.items()}
    return carry._replace(**arrays)


@filtered
def _moved(
    outer: Outer, carry: Paired, value: PyTree, grad: PyTree
) -> tuple[Paired, Bool[Array, ""], Float[Array, ""]]:
    """Return the carry for lambda_{k+1}; whether lambda_k is finite; its gradient norm."""
    finite = is_finite((value, grad))
    ahead = _ahead(outer, carry, value, grad)
    back = _back(outer, carry, carry.finite)._replace(finite=carry.incumbent)
    carry = select(finite, ahead, back._replace(last=carry.hparams))
    return carry, finite, optax.tree.norm(grad)


def _ahead(outer: Outer, carry: Paired, value: PyTree, grad: PyTree) -> Paired:
    """Return the carry after a step by the optimizer."""
    direction, opt_state = outer.direction(carry.hparams, carry.opt_state, value, grad)
    moved = outer.moved(carry.hparams, times(carry.share, direction))
    here, since = carry.hparams, carry.since + 1
    return carry._replace(hparams=moved, last=here, opt_state=opt_state, finite=here, since=since)


def _back(outer: Outer, carry: Paired, to: PyTree) -> Paired:
    """Return the carry at a point before, for shorter steps."""
    return carry._replace(
        hparams=jax.tree.map(jnp.copy, to),
        opt_state=outer.init(to),
        share=SHORTER * carry.share,
        since=jnp.zeros_like(carry.since),
        undecided=jnp.zeros_like(carry.undecided),
    )


@filtered
def _steps(
    engine: TracedEngine,
    outer: Outer,
    source: Drawn,
    carry: Paired,
    place: Int[Array, " 2"],
) -> tuple[Paired, PyTree, Int[Array, ""], dict[str, PyTree]]:
    """Make the steps from a first one on, a number of whole blocks, while they are finite.

    Returns the carry, the last gradient, how many steps were made, and their records. One that is not
    finite is not made.
    """
    first, count = place

    def step(carried, _):
        carry, last, i, rows, going = carried
        drawn = source.at(jax.random.fold_in(source.key, first + i))
        value, grad, _ = engine(drawn, carry.hparams)
        norm = optax.tree.norm(grad)
        finite = going & is_finite((value, norm))  # a norm that overflows is none here
        row = {"value": value, "gradient_norm": norm, "rejected": ~finite}
        rows = jax.tree.map(lambda rows, leaf: rows.at[i].set(leaf), rows, row)
        ahead = _ahead(outer, carry, value, grad), grad, i + 1
        return (*select(finite, ahead, (carry, last, i)), rows, finite), None

    def shapes():
        value, grad, _ = engine(source, carry.hparams)
        return {"value": value, "gradient_norm": optax.tree.norm(grad), "rejected": jnp.array(True)}

    rows = jax.tree.map(lambda leaf: jnp.zeros(MOST, leaf.dtype), jax.eval_shape(shapes))
    none = jax.tree.map(jnp.zeros_like, carry.hparams), jnp.zeros((), jnp.int32)
    return lax.while_loop(
        lambda carried: carried[4] & (carried[2] < count),
        lambda carried: lax.scan(step, carried, length=BLOCK)[0],
        (carry, *none, rows, jnp.array(True)),
    )[:4]


@filtered
def errors_of(drawn: Drawn, tried: PyTree) -> Float[Array, "tried each"]:
    """Return the errors of several hyperparameters in one draw; of a mean, that of each problem."""
    problem = drawn.problem()

    def errors(hparams):
        system = make_system(problem, hparams)
        state = system.run(hparams)
        if isinstance(problem, Mean) and not problem.trajectory:
            values = problem.values(system.restore(state), hparams)
            return jnp.asarray(sum(jax.tree.leaves(values)), float)
        return total(system.value(system.errors(state, hparams)))[None]

    return lax.map(errors, tried)


@filtered
def _in_draws(
    drawn: Drawn, tried: tuple[PyTree, ...], count: int, part: Int[Array, ""]
) -> Float[Array, "tried errors"]:
    """Return the errors of several hyperparameters in a part of the draws that follow from one."""
    key = jax.random.fold_in(jax.random.fold_in(drawn.key, 1), part)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *tried)
    errors = lax.map(lambda key: errors_of(drawn.at(key), stacked), jax.random.split(key, count))
    return jnp.concatenate(list(errors), axis=1)

"""The steps of `minimize` on a problem: the hypergradient, accept or reject, move on.

    u_{k+1} = u_a + q d_a,    q <- q / 4  when rejected,  q <- min(2 q, 1)  when accepted

with u_a the unconstrained variable that was accepted last, and d_a the optimizer's update there. A step
is accepted when the error after it is finite, no higher than at the start, and one of two holds:

- it is no higher than the highest of the last five that were accepted;
- it is above the lowest so far by at most a tenth of the gain: good optimizers swing about a minimum.

While q < 1 only the last of the five counts. After a second rejection in a row the optimizer begins
anew at u_a: its momentum may lead uphill, however short the step. `paired.py` is for draws.
Reference: Grippo, Lampariello and Lucidi, A Nonmonotone Line Search Technique, 1986.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._constraints.base import to_unconstrained
from .._engines.base import AbstractEngine, Hypergradient
from .._engines.nonfinite import NonFiniteError, check_finite, explain, is_finite
from .._files.digests import digest
from .._problem.arguments import filtered
from .._problem.checks import shown
from .._problem.definition import Definition
from .._problem.draws import Drawn
from .._problem.problem import opened, validated
from .._problem.warn import warn
from .drive import Evaluation, Stepper
from .run import Run
from .update import Outer, select, times

REMEMBERED = 5  # errors that a new one is compared with
SHORTER, LONGER = 0.25, 2.0
ROUNDING = 1e-5  # of the error: not a rise
GAINED = 0.1  # of what has been gained: not a rise
RESTART = 2  # times in a row that a step is rejected, and the optimizer begins anew


class Accepted(NamedTuple):
    """The last evaluation that was accepted, and how the descent continues from it."""

    hparams: PyTree
    grad: PyTree
    direction: PyTree  # d_a, in the unconstrained variable
    values: Float[Array, " 5"]  # the last accepted errors, the newest first; -inf before them
    first: Float[Array, ""]
    lowest: Float[Array, ""]
    share: Float[Array, ""]  # q
    tries: Int[Array, ""]  # how often in a row a step from here was rejected


class Carry(NamedTuple):
    """All that decides how a descent continues: what a checkpoint saves."""

    hparams: PyTree  # to be evaluated next
    opt_state: PyTree
    accepted: Accepted


class Descent(Stepper):
    """The steps of `minimize` on a problem."""

    first = 0

    def __init__(self, source: Definition | Drawn, engine: AbstractEngine, outer: Outer):
        self.source, self.engine, self.outer = source, engine, outer
        self._warned = False

    def first_carry(self, hparams: PyTree) -> PyTree:
        """Return what the descent begins with."""
        return _first(self.outer, hparams)

    def advance(self, run: Run, step: int) -> Evaluation | str:
        """Evaluate lambda_k, accept or reject it, and find lambda_{k+1}."""
        hparams = run.carry.hparams
        hyper = self.evaluated(step, hparams)
        carry, finite, accepts, norm = _next(self.outer, run.carry, hyper.value, hyper.grad)
        if not finite:
            self.report(run, step, hparams, hyper)
        record = {"value": hyper.value, "gradient_norm": norm, "rejected": ~accepts}
        return Evaluation(carry, hparams, *hyper, record)

    def result(self, run: Run) -> tuple[PyTree, PyTree, PyTree]:
        """Return the lowest evaluation that was accepted (of several objectives: the last).

        It is made again where it is not at hand.
        """
        accepted = run.carry.accepted
        hparams, here = accepted.hparams, not run.record["rejected"]
        if float(run.best.score) == float(accepted.lowest) < float(accepted.values[0]):
            hparams, here = run.best.hparams, False
        if here and run.value is not None:
            return hparams, run.value, run.state
        hyper = self.evaluated(run.step, hparams)
        return hparams, hyper.value, hyper.state

    def problem_at(self, step: int) -> Definition | Drawn:
        """Return the problem of a step."""
        return self.source

    def evaluated(self, step: int, hparams: PyTree) -> Hypergradient:
        """Return the hypergradient at a step, finite or not."""
        with check_finite(False):
            return self.engine(self.problem_at(step), hparams)

    def report(self, run: Run, step: int, hparams: PyTree, hyper: Hypergradient) -> None:
        """Raise where the start is not finite; warn, once, of a step that is rejected for it."""
        if self._warned:
            return
        smooth = self.engine.differentiates
        arrays, structure = validated(self.problem_at(step), hparams, smooth=smooth)
        problem, hparams = opened(structure, arrays)
        why = explain(problem, hparams, hyper, self.engine.other_mode)
        if run.begins:  # there is nothing to go back to
            error = NonFiniteError(why)
            where = f"step {step} of minimize, with {shown(hparams)}"
            error.add_note(f"foretune: this was {where}. Start from others.")
            raise error
        self._warned = run.nan_reported = True  # the score's NaN is no news
        what = f"the error or the hypergradient at step {step} of minimize is not finite"
        rejected = "Such steps are rejected and shortened."
        warn(f"{what}, with {shown(hparams)}. {rejected} {why}", RuntimeWarning)

    def fingerprint(self, hparams: PyTree) -> dict[str, str]:
        """Return what tells this run from others; functions cannot be compared."""
        source, constraints = self.source, repr(self.outer.constraints)
        ours = {"constraints": constraints, "initial hyperparameters": digest(hparams)}
        if isinstance(source, Drawn):
            return ours | {"key": digest(source.key), **source.fingerprint()}
        return ours | {
            "inner steps": str(source.steps),
            "trajectory": str(source.trajectory),
            "initial parameters": digest(source.init),  # of none, where it is a function
            "training data": digest(source.batches),
            "validation data": digest(source.validation),
            "arrays of the dynamics": digest(source.dynamics),
        }


@filtered
def _first(outer: Outer, hparams: PyTree) -> Carry:
    none = jnp.array(jnp.inf, float)
    accepted = Accepted(
        hparams=hparams,
        grad=jax.tree.map(jnp.zeros_like, hparams),
        direction=jax.tree.map(jnp.zeros_like, to_unconstrained(outer.constraints, hparams)),
        values=jnp.full(REMEMBERED, -jnp.inf, float),
        first=none,
        lowest=none,
        share=jnp.ones(()),
        tries=jnp.zeros((), jnp.int32),
    )
    return Carry(hparams, outer.init(hparams), accepted)


@filtered
def _next(
    outer: Outer, carry: Carry, value: PyTree, grad: PyTree
) -> tuple[Carry, Bool[Array, ""], Bool[Array, ""], Float[Array, ""]]:
    """Return the carry for lambda_{k+1}; whether lambda_k is finite, is accepted; its gradient norm."""
    hparams, opt_state, accepted = carry
    accepts = _is_accepted(accepted, value, grad)
    direction, after = outer.direction(hparams, opt_state, value, grad)
    here = hparams, grad, direction
    accepted = select(accepts, _from_here(accepted, here, value), _from_before(accepted))
    opt_state = select(accepts, after, opt_state)
    error = jax.tree.map(lambda x: accepted.values[0].astype(x.dtype), value)
    anew = outer.direction(accepted.hparams, outer.init(accepted.hparams), error, accepted.grad)
    restarts = accepted.tries == RESTART
    direction, opt_state = select(restarts, anew, (accepted.direction, opt_state))
    hparams = outer.moved(accepted.hparams, times(accepted.share, direction))
    carry = Carry(hparams, opt_state, accepted._replace(direction=direction))
    return carry, is_finite((value, grad)), accepts, optax.tree.norm(grad)


def _is_accepted(accepted: Accepted, value: PyTree, grad: PyTree) -> Bool[Array, ""]:
    """Return whether the step to an evaluation is accepted; of several errors, if all are finite."""
    finite = is_finite((value, grad))
    if len(jax.tree.leaves(value)) > 1:
        return finite
    error = jax.tree.leaves(value)[0].astype(accepted.values.dtype)
    known = jnp.isfinite(accepted.values)
    highest = jnp.max(accepted.values)
    most = jnp.maximum(highest, accepted.lowest + GAINED * (accepted.first - accepted.lowest))
    slack = ROUNDING * jnp.abs(highest)
    return finite & (~jnp.any(known) | (error <= jnp.minimum(most, accepted.first) + slack))


def _from_here(accepted: Accepted, here: tuple[PyTree, PyTree, PyTree], value: PyTree) -> Accepted:
    """Return what follows from an evaluation that is accepted."""
    error = total(value).astype(accepted.values.dtype)
    share = jnp.minimum(LONGER * accepted.share, 1.0)
    shifted = jnp.roll(accepted.values, 1).at[0].set(error)
    return Accepted(
        *here,
        values=jnp.where(share < 1, _alone(error), shifted),
        first=jnp.where(jnp.isinf(accepted.first), error, accepted.first),
        lowest=jnp.minimum(accepted.lowest, error),
        share=share,
        tries=jnp.zeros_like(accepted.tries),
    )


def _from_before(accepted: Accepted) -> Accepted:
    """Return what follows from one that is rejected: the same place, and a shorter step."""
    share, tries = SHORTER * accepted.share, accepted.tries + 1
    return accepted._replace(values=_alone(accepted.values[0]), share=share, tries=tries)


def _alone(error: Array) -> Float[Array, " 5"]:
    return jnp.full(REMEMBERED, -jnp.inf, error.dtype).at[0].set(error)


def total(value: PyTree) -> Float[Array, ""]:
    """Return the error, or the sum of several."""
    return jnp.sum(jnp.stack([leaf.astype(float) for leaf in jax.tree.leaves(value)]))

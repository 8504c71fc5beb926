"""The steps of `minimize` on a problem: the hypergradient, accept or reject, move on.

    u_{k+1} = u_k + optimizer(grad f(lambda_k)),    lambda_{k+1} = P(u_{k+1})

`acceptance.py` accepts or rejects, `update.py` moves on. `paired.py` is for problems that are drawn.
"""

from typing import NamedTuple

import jax
import optax
from jaxtyping import Array, Bool, Float, PyTree

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
from .acceptance import RESTART, Accepted, is_accepted, next_accepted, none_accepted
from .drive import Evaluation, Stepper
from .run import Run
from .update import Outer, select


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
        found = _next(self.outer, run.carry, hyper.value, hyper.grad)
        carry, finite, accepts, norm = found
        if not finite:
            self.report(run, step, hyper)
        record = {"value": hyper.value, "gradient_norm": norm, "rejected": ~accepts}
        return Evaluation(carry, hparams, *hyper, record, (hyper.state, hparams))

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

    def report(self, run: Run, step: int, hyper: Hypergradient) -> None:
        """Raise where the start is not finite; warn, once, of a step that is rejected for it."""
        smooth = self.engine.differentiates
        arrays, structure = validated(self.problem_at(step), run.carry.hparams, smooth=smooth)
        problem, hparams = opened(structure, arrays)
        why = explain(problem, hparams, hyper, self.engine.other_mode)
        if run.begins:  # there is nothing to go back to
            error = NonFiniteError(why)
            error.add_note(
                f"foretune: this was step {step} of minimize, with {shown(hparams)}. Start from others."
            )
            raise error
        self.warn_once(run, step, f", with {shown(hparams)}", why)

    def warn_once(self, run: Run, step: int, place: str = "", why: str = "") -> None:
        """Warn of the first step that is not finite."""
        run.nan_reported = True  # the score's NaN is no news
        if not self._warned:
            self._warned = True
            warn(
                f"the error or the hypergradient at step {step} of minimize is not finite{place}. Such "
                f"steps are rejected and shortened. {why}",
                RuntimeWarning,
            )

    def fingerprint(self, hparams: PyTree) -> dict[str, str]:
        """Return what tells this run from others; functions cannot be compared."""
        source = self.source
        ours = {
            "constraints": repr(self.outer.constraints),
            "initial hyperparameters": digest(hparams),
        }
        if isinstance(source, Drawn):
            return ours | {"key": digest(source.key), "data of the draw": digest(source.constants)}
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
    u = to_unconstrained(outer.constraints, hparams)
    return Carry(hparams, outer.init(hparams), none_accepted(hparams, u))


@filtered
def _next(
    outer: Outer, carry: Carry, value: PyTree, grad: PyTree
) -> tuple[Carry, Bool[Array, ""], Bool[Array, ""], Float[Array, ""]]:
    """Return the carry for lambda_{k+1}; whether lambda_k is finite, is accepted; its gradient norm."""
    hparams, opt_state, accepted = carry
    accepts = is_accepted(accepted, value, grad)
    direction, after = outer.direction(hparams, opt_state, value, grad)
    accepted = next_accepted(accepts, accepted, hparams, grad, direction, value)
    opt_state = select(accepts, after, opt_state)
    error = jax.tree.map(lambda x: accepted.values[0].astype(x.dtype), value)
    anew = outer.direction(accepted.hparams, outer.init(accepted.hparams), error, accepted.grad)
    restarts = accepted.tries == RESTART
    direction, opt_state = select(restarts, anew, (accepted.direction, opt_state))
    shorter = jax.tree.map(lambda d: d * accepted.share.astype(d.dtype), direction)
    hparams = outer.moved(accepted.hparams, shorter)
    carry = Carry(hparams, opt_state, accepted._replace(direction=direction))
    return carry, is_finite((value, grad)), accepts, optax.tree.norm(grad)

"""The offline outer loop: hypergradient, outer Optax step, projection, repeat.

    u_{k+1} = u_k + optimizer(grad f(lambda_k)),    lambda_{k+1} = P(u_{k+1})

`Descent.advance` is one step: the hypergradient at lambda_k, then `_next`, which accepts or rejects it
(`acceptance.py`) and moves on (`update.py`). `drive` has all that happens beside the steps.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import optax
from jaxtyping import Array, Bool, Float, Key, PyTree

from .._constraints.base import check_constraints, feasible, to_unconstrained
from .._engines.base import AbstractEngine, Hypergradient, check_engine
from .._engines.nonfinite import NonFiniteError, check_finite, explain, is_finite
from .._engines.reverse import Reverse
from .._files.digests import digest
from .._problem.arguments import filtered
from .._problem.checks import check_count, check_hparams, check_outside_programs, shown
from .._problem.definition import Definition
from .._problem.draws import Drawn, as_problem
from .._problem.equality import reused
from .._problem.problem import ProblemLike, opened, validated
from .acceptance import RESTART, Accepted, is_accepted, next_accepted, none_accepted
from .callbacks import Callback
from .checks import check_callbacks, check_evaluate, check_functions, check_optimizer
from .drive import Evaluation, Metrics, Score, Stepper, drive
from .run import Result, Run
from .update import Outer, select

DEFAULT_OPTIMIZER = optax.adam(0.1)  # steps of a tenth, in units of the start
RECORD = ("step", "value", "gradient_norm", "rejected")  # what a record has besides metrics


def minimize(
    problem: ProblemLike,
    hparams: PyTree,
    *,
    steps: int,
    engine: AbstractEngine | None = None,
    optimizer: optax.GradientTransformation | None = None,
    constraints: PyTree = None,
    key: Key[Array, ""] | None = None,
    callbacks: Sequence[Callback] = (),
    stop: Callable[[Run], str | None] | Iterable[Callable[[Run], str | None]] | None = None,
    evaluate: Metrics | None = None,
    score: Score | None = None,
) -> Result:
    """Descend on the hyperparameters by their hypergradient, inside their constraints.

    Args:
        problem: the problem; or a function `draw(key) -> Problem`, with `key`, whose problem is drawn
            anew at each step.
        hparams: where to start; projected onto the constraints, with a warning, if outside.
        steps: the number of updates. The error is evaluated `steps + 1` times, ends included.
        engine: how the hypergradient is computed; `Reverse()` by default.
        optimizer: an Optax optimizer for the hyperparameters. By default `optax.adam(0.1)` on
            hyperparameters in units of their own scale at the start (of log(x) under `Log`).
        constraints: sets (`Box`, `CappedSimplex`, ...) or changes of variable (`Log`, `Logit`) as a
            prefix of the hyperparameters: a dict by name (of a key or a field), `{"lr": Log()}` say,
            or the same container with sets for subtrees. None, and what is left out, is free.
        key: a random key for `draw`, which gets `jax.random.fold_in(key, step)`.
        callbacks: `Progress()`, `History(file)`, `Checkpoint(directory)`, `TensorBoard(directory)`
            or your own `Callback`.
        stop: stopping rules, `NoImprovement(10)`, `SmallGradient(1e-4)`, `TimeLimit(600)` or any
            function of the `Run` that returns a reason to stop, or None.
        evaluate: `evaluate(state, hparams) -> dict` of further scalars on the final inner state,
            compiled once.
        score: what `best` is lowest in, as a function of a record, `lambda r: -r["accuracy"]` say;
            by default its `value` (the sum, where the objective is a dict).

    A step is rejected, and tried again a quarter as long, when the error is not finite, above the
    start, or above both the highest of the last five and a tenth of what has been gained (of problems
    that are drawn: by more than ten times what these five differ by). Its record says `rejected`, and
    the result is the last evaluation that was not. Of several objectives, only what is not finite is
    rejected; at the start that raises `NonFiniteError`.

    Ctrl-C, or SIGTERM, ends the run after the current evaluation; a second one interrupts at once.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> problem = ft.Problem(
    ...     dynamics=ft.Training(lambda w, h, x: (w - x) ** 2 + h["decay"] * w**2, optax.sgd(0.2)),
    ...     objective=lambda state, h, x: (state.params - 0.8) ** 2,
    ...     init=jnp.array(0.0), batches=ft.FullBatch(jnp.array(1.0), steps=50))
    >>> result = ft.minimize(problem, {"decay": jnp.array(1.0)}, steps=100,
    ...                      optimizer=optax.adam(0.05), constraints={"decay": ft.NonNegative()})
    >>> round(float(result.hparams["decay"]), 2)  # w = 1 / (1 + decay)
    0.25
    """
    hparams = check_hparams(hparams)
    check_outside_programs("minimize", problem, hparams)
    check_count(steps, f"minimize(steps={steps!r})")
    check_engine(engine)
    check_optimizer(optimizer)
    check_callbacks(callbacks)
    rules = check_functions(stop, evaluate, score)
    engine = Reverse() if engine is None else engine
    chosen_optimizer = DEFAULT_OPTIMIZER if optimizer is None else reused(optimizer)
    source = as_problem(problem, key)
    arrays, structure = validated(source, hparams, smooth=engine.differentiates)
    if evaluate is not None:

        def start(arrays):
            problem, hparams = opened(structure, arrays)
            return problem.start(hparams)

        check_evaluate(evaluate, eqx.filter_eval_shape(start, arrays), hparams, RECORD)
    constraints = check_constraints(constraints, hparams)
    hparams = feasible(constraints, hparams)
    outer = Outer(chosen_optimizer, constraints, in_units=optimizer is None)
    descent = Descent(source, engine.within(constraints), outer)
    run = Run(steps, _first(outer, hparams), hparams, lambda: descent.fingerprint(hparams))
    return drive(run, descent, callbacks=callbacks, rules=rules, evaluate=evaluate, score=score)


class Carry(NamedTuple):
    """All that decides how a descent continues: what a checkpoint saves."""

    hparams: PyTree  # to be evaluated next
    opt_state: PyTree
    accepted: Accepted


class Descent(Stepper):
    """The steps of `minimize`, on a problem or on one that is drawn anew at each of them."""

    first = 0

    def __init__(self, source: Definition | Drawn, engine: AbstractEngine, outer: Outer):
        self.source, self.engine, self.outer = source, engine, outer
        self._warned = False

    def advance(self, run: Run, step: int) -> Evaluation:
        """Evaluate lambda_k, accept or reject it, and find lambda_{k+1}."""
        hparams = run.carry.hparams
        hyper = self._evaluated(step, hparams)
        noisy = isinstance(self.source, Drawn)
        found = _next(self.outer, run.carry, hyper.value, hyper.grad, noisy)
        carry, finite, accepts, norm = found
        if not finite:
            self._report(run, step, hyper)
        record = {"value": hyper.value, "gradient_norm": norm, "rejected": ~accepts}
        return Evaluation(carry, hparams, *hyper, record, (hyper.state, hparams))

    def result(self, run: Run) -> tuple[PyTree, PyTree, PyTree]:
        """Return the last evaluation that was accepted, made again where it is not at hand."""
        hparams = run.carry.accepted.hparams
        if run.value is not None and not run.record["rejected"]:
            return hparams, run.value, run.state
        step = next(record["step"] for record in reversed(run.history) if not record["rejected"])
        hyper = self._evaluated(step, hparams)  # in the draw of that step
        return hparams, hyper.value, hyper.state

    def _problem_at(self, step: int) -> Definition | Drawn:
        if isinstance(self.source, Drawn):
            return self.source.at(jax.random.fold_in(self.source.key, step))
        return self.source

    def _evaluated(self, step: int, hparams: PyTree) -> Hypergradient:
        with check_finite(False):  # `_next` looks, and rejects
            return self.engine(self._problem_at(step), hparams)

    def _report(self, run: Run, step: int, hyper: Hypergradient) -> None:
        """Raise where the start is not finite; warn, once, of a step that is rejected for it."""
        smooth = self.engine.differentiates
        arrays, structure = validated(self._problem_at(step), run.carry.hparams, smooth=smooth)
        problem, hparams = opened(structure, arrays)
        why = explain(problem, hparams, hyper, self.engine.other_mode)
        if run.begins:  # there is nothing to go back to
            error = NonFiniteError(why)
            error.add_note(
                f"foretune: this was step {step} of minimize, with {shown(hparams)}. Start from others."
            )
            raise error
        run.nan_reported = True  # the score's NaN is no news
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the error or the hypergradient at step {step} of minimize is not finite, with "
                f"{shown(hparams)}. Such steps are rejected and shortened. {why}",
                RuntimeWarning,
                stacklevel=6,
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
    outer: Outer, carry: Carry, value: PyTree, grad: PyTree, noisy: bool
) -> tuple[Carry, Bool[Array, ""], Bool[Array, ""], Float[Array, ""]]:
    """Return the carry for lambda_{k+1}; whether lambda_k is finite, is accepted; its gradient norm."""
    hparams, opt_state, accepted = carry
    accepts = is_accepted(accepted, value, grad, noisy)
    direction, after = outer.direction(hparams, opt_state, value, grad)
    accepted = next_accepted(accepts, accepted, hparams, grad, direction, value, noisy)
    opt_state = select(accepts, after, opt_state)
    error = jax.tree.map(lambda x: accepted.values[0].astype(x.dtype), value)
    anew = outer.direction(accepted.hparams, outer.init(accepted.hparams), error, accepted.grad)
    restarts = accepted.tries == RESTART
    direction, opt_state = select(restarts, anew, (accepted.direction, opt_state))
    shorter = jax.tree.map(lambda d: d * accepted.share.astype(d.dtype), direction)
    hparams = outer.moved(accepted.hparams, shorter)
    carry = Carry(hparams, opt_state, accepted._replace(direction=direction))
    return carry, is_finite((value, grad)), accepts, optax.tree.norm(grad)

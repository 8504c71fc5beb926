"""The offline outer loop: hypergradient, outer Optax step, projection, repeat.

    u_{k+1} = u_k + optimizer(grad f(lambda_k)),    lambda_{k+1} = P(u_{k+1})

with P the projection onto the constraints (or, for `Log` and `Logit`, with u the transformed
variable). Step k costs one hypergradient; the loop itself adds two small programs. A step that raises
the error is taken back: `guard.py` has the rule.
"""

import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import optax
from jaxtyping import Array, Key, PyTree

from .._constraints.base import check_constraints, feasible
from .._diagnostics.slopes import TRUST
from .._diagnostics.trust import trust as report_trust
from .._diagnostics.verdicts import Trust
from .._engines.base import check_engine
from .._engines.nonfinite import NonFiniteError
from .._engines.reverse import Reverse
from .._problem.batches import Minibatches
from .._problem.checks import (
    check_count,
    check_flag,
    check_hparams,
    check_key,
    check_leading_axis,
    check_outside_programs,
    describe,
)
from .._problem.equality import reused
from .._problem.mean import Mean
from .._problem.problem import Problem, validated
from .._problem.validation import noting
from .guard import Held
from .interrupt import Interrupt
from .run import (
    Best,
    Outer,
    Result,
    Run,
    check_callbacks,
    check_evaluate,
    check_function,
    check_functions,
    check_optimizer,
    digest_of,
    metrics_of,
    nowhere,
    plain,
    started,
)
from .steps import chosen_rows, evaluated, hypergradient, outer_init, outer_update, shown

DEFAULT_OPTIMIZER = optax.adam(0.1)  # steps of a tenth, in units of the start
RECORD = ("step", "value", "gradient_norm", "taken_back")  # what a record has besides metrics


_START = "Where training diverges there, start from other hyperparameters."
_FURTHER = (
    "Where that is further than was meant, a smaller outer step (`optimizer=optax.adam(0.01)`, say) or "
    "`constraints=` keep the hyperparameters back."
)


class Carry(NamedTuple):
    """All that decides how a run continues: what a checkpoint saves."""

    hparams: PyTree
    opt_state: PyTree
    best: Best
    inner: PyTree  # s_T of the last step where the next starts from it, else None
    held: Held | None  # the last step that was not taken back, where steps may be


def minimize(
    problem: Problem,
    hparams: PyTree,
    *,
    steps: int,
    engine: Any = None,
    optimizer: Any = None,
    constraints: PyTree = None,
    callbacks: Any = (),
    stop: Callable[[Run], str | None] | Iterable[Callable[[Run], str | None]] | None = None,
    key: Key[Array, ""] | None = None,
    batches: Any = None,
    evaluate: Callable[[PyTree, PyTree], dict[str, Any]] | None = None,
    evaluate_every: int = 1,
    score: Callable[[dict[str, Any]], Any] | None = None,
    warm_start: bool = False,
    batched: bool = False,
    take_back: bool = True,
    trust: bool = False,
) -> Result:
    """Descend on the hyperparameters by their hypergradient, inside their constraints.

    Args:
        problem: the problem.
        hparams: where to start; projected onto the constraints, with a warning, if outside.
        steps: the number of updates. The error is evaluated `steps + 1` times, ends included.
        engine: how the hypergradient is computed; `Reverse()` by default.
        optimizer: an Optax optimizer for the hyperparameters. By default `optax.adam(0.1)` on
            hyperparameters in units of their own size at the start (of log(x) under `Log`): steps of
            about a tenth, shortened where they raise the error. docs/outer.md has the comparison
            behind this choice.
            Gradient clipping is Optax's: `optax.chain(optax.clip_by_global_norm(1.0), ...)`.
        constraints: sets (`Box`, `CappedSimplex`, ...) or changes of variable (`Log`, `Logit`) as a
            prefix of the hyperparameters, `{"lr": Log()}` say: a dict by name (of a key, or of a field
            of a NamedTuple or `equinox.Module`), or the same container with sets in the places of
            subtrees. None, and what is left out, is free.
        callbacks: `Progress()`, `History(file)`, `Checkpoint(directory)`, `TensorBoard(directory)`
            or your own `Callback`.
        stop: stopping rules, `NoImprovement(10)`, `SmallGradient(1e-4)`, `TimeLimit(600)` or any
            function of the `Run` that returns a reason to stop, or None.
        key: a random key for `batches`; of "fresh" ones `jax.random.key(0)` by default.
        batches: new batches for each step, so that the hyperparameters are not fitted to one order of
            them: "fresh" draws the problem's `Minibatches` anew. Or a function `batches(step)`, with a
            `key` `batches(step, key)` (the same key at the same step of a resumed run), that returns
            batches of the same shapes at each step.
        evaluate: `evaluate(state, hparams) -> dict` of further scalars on the final inner state,
            compiled once, every `evaluate_every` steps.
        score: what `best` is lowest in, as a function of a record; by default its `value` (the sum
            of the values, where the objective is a dict). `lambda r: -r["accuracy"]` for a metric
            of `evaluate`; only records that have the metrics are scored. A NaN is never the best, and
            is warned of.
        warm_start: start each training from the final inner state of the one before. The step
            counter continues, and a start that depends on the hyperparameters is used only once.
        batched: the hyperparameters have a leading axis of independent descents, run as one
            program; records then hold one number for each. A descent that is not finite is named in a
            `RuntimeWarning` and stays where it is, its records NaN, while the others continue.
        take_back: whether a step that raises the error is taken back and tried again a quarter as long
            (default). It is when the error is not finite, above the start, or above both the highest of
            the last five and a tenth of what has been gained (with new `batches`: by more than these
            five differ). The record of its evaluation says `taken_back`,
            and the result is the last evaluation that was not: without new `batches` its error is never
            above that of the start. Of several objectives, and with `warm_start`, only what is not
            finite is taken back.

        trust: whether `foretune.trust` first reports how far the hypergradient at the start can be
            trusted, and a warning says so where it cannot. Costs some tens of trainings.

    Ctrl-C, or SIGTERM, ends the run after the current evaluation and returns what there is; a second
    one interrupts at once. A hypergradient that is not finite at the start (of `batched` descents, all
    of them), or anywhere with `take_back=False`, raises `NonFiniteError`, whose attribute `run` holds
    the history and the best hyperparameters until then.

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
    batches, key = _checked_batches(problem, batches, key)
    check_count(evaluate_every, f"minimize(evaluate_every={evaluate_every})")
    check_flag(warm_start, f"minimize(warm_start={warm_start!r:.60})")
    check_flag(batched, f"minimize(batched={batched!r:.60})")
    check_flag(take_back, f"minimize(take_back={take_back!r:.60})")
    check_flag(trust, f"minimize(trust={trust!r:.60})")
    engine = Reverse() if engine is None else engine
    optimizer = DEFAULT_OPTIMIZER if optimizer is None else reused(optimizer)
    if batched and warm_start:
        raise ValueError("minimize takes either batched=True or warm_start=True, not both.")
    if batched and trust:
        raise ValueError(
            "minimize(batched=True, trust=True): `foretune.trust` looks at one start; call it for "
            "those that you want to know about."
        )
    members = check_leading_axis(hparams, "hparams", "the descents") if batched else None
    single = jax.tree.map(lambda leaf: leaf[0], hparams) if batched else hparams
    validated(problem, single, smooth=engine.differentiates)
    if evaluate is not None:
        state = eqx.filter_eval_shape(problem.start, single)
        with noting("evaluate(state, hparams)", state=state, hparams=single):
            check_evaluate(evaluate, state, single, RECORD)
    constraints = check_constraints(constraints, single)
    engine = engine.within(constraints)
    quiet = engine
    hparams = feasible(constraints, hparams, batched)
    outer = Outer(optimizer, constraints, in_units=optimizer is DEFAULT_OPTIMIZER)
    inner = problem.start(hparams) if warm_start else None
    best = nowhere(hparams, () if members is None else (members,))

    def fingerprint():
        return {
            "constraints": repr(constraints),
            "inner steps": str(problem.steps),
            "folds": str(problem.count) if isinstance(problem, Mean) else "1",
            "trajectory": str(problem.trajectory),
            "initial hyperparameters": digest_of(hparams),
            "initial parameters": digest_of(problem.init),  # of none, where it is a function
            "training data": digest_of(problem.batches),
            "validation data": digest_of(problem.validation),
            "arrays of the dynamics": digest_of(problem.dynamics),
            "take_back": str(take_back),
        }

    opt_state, held = outer_init(outer, hparams, batched)
    carry = Carry(hparams, opt_state, best, inner, held if take_back else None)
    run = Run(steps, carry, fingerprint)

    with Interrupt() as interrupt, started(callbacks, run):
        if trust and not run.resumed:
            with interrupt.paused():
                _warn_of(report_trust(problem, hparams, engine=engine, constraints=constraints))
        stopped, now, holds = None, problem, np.array(True)
        while stopped is None:
            now = problem
            if batches is not None:
                extra = () if key is None else (jax.random.fold_in(key, run.step),)
                now = problem.replace(batches=batches(run.step, *extra))
            if warm_start:
                now = now.continued(run.carry.inner)
            try:
                hyper, norms, holds = evaluated(
                    engine, quiet, now, run, batched,
                    comparable=not warm_start, noisy=batches is not None,
                )  # fmt: skip
            except NonFiniteError as error:
                error.add_note(
                    f"foretune: this was step {run.step} of minimize, with {shown(run.hparams)}. "
                    f"{_FURTHER if run.step else _START} What there is until then (history, best, "
                    "hparams) is in the attribute `run` of this error."
                )
                error.run = run
                raise
            run.value, run.grad, run.state = hyper
            record = {"step": run.step, "value": hyper.value, "gradient_norm": norms}
            if take_back:
                record["taken_back"] = ~holds
            measured = evaluate and (run.step % evaluate_every == 0 or run.step == steps)
            if measured:
                record |= metrics_of(evaluate, hyper.state, run.hparams, batched)
            run.note(plain(record))
            if measured or not evaluate:
                best = run.ranked(score, run.record, run.hparams)
                run.move(run.step, run.carry._replace(best=best))
            for callback in callbacks:
                callback.step(run)
            stopped = next(iter(run.reasons(rules, interrupt)), None)
            if stopped is None:
                new, opt_state, held = outer_update(outer, *run.carry[:2], run.carry.held, *hyper[:2],
                                                     holds, batched)  # fmt: skip
                inner = run.carry.inner
                if warm_start and holds.all():
                    inner = hyper.state
                run.move(run.step + 1, Carry(new, opt_state, run.best, inner, held))
    hparams, value, state = run.hparams, run.value, run.state
    if not holds.all():  # the last evaluation that was held, made again by the same program
        hparams = chosen_rows(holds, hparams, run.carry.held.hparams, batched)
        value, _, state = hypergradient(quiet, now, hparams, batched)
    return Result(hparams, value, state, run.history, run.best, stopped)


def _warn_of(report: Trust) -> None:
    if report.ok:
        return
    wrong = {leaf: verdict for leaf, verdict in report.verdicts.items() if verdict != TRUST}
    helps = [str(advice) for advice in report.advice if advice.helps]
    warnings.warn(
        f"over a step of {report.scale:g} the hypergradient at the start cannot be trusted: {wrong}. "
        + ("What helps, " + "; or ".join(helps) if helps else "Nothing that was tried helps")
        + ". `foretune.trust` has the whole report.",
        RuntimeWarning,
        stacklevel=3,
    )


def _checked_batches(problem: Problem, batches: Any, key: Any) -> tuple[Any, Any]:
    """Return the function that makes the batches, and its key, or raise."""
    if isinstance(batches, str):
        if batches != "fresh":
            raise ValueError(f'minimize(batches={batches!r:.60}): give "fresh" or a function.')
        key = jax.random.key(0) if key is None else key
        check_key(key, "minimize's key")
        given = getattr(problem, "batches", None)
        if isinstance(problem, Mean):
            raise TypeError(
                'minimize(batches="fresh") does not draw for the folds of a `CrossValidated` problem. '
                "Give a function `batches(step, key)` that makes a list, an entry for each fold."
            )
        if not isinstance(given, Minibatches):
            raise TypeError(
                f'minimize(batches="fresh") draws the problem\'s `Minibatches` anew, but its batches '
                f"are {describe(given)}. Give a function `batches(step, key)` that makes them."
            )
        given.reshuffled(key)  # raises where it cannot
        return lambda step, key: given.reshuffled(key), key
    if batches is not None:
        check_function(batches, "batches(step)" if key is None else "batches(step, key)")
    if key is not None:
        check_key(key, "minimize's key")
        if batches is None:
            raise ValueError(
                "minimize(key=...) is for `batches(step, key)`, and there is no `batches`. A key of "
                "the loss goes to `Training(..., key=...)`."
            )
    return batches, key

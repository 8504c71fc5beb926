"""The outer loop: `descent.py` has the steps, `paired.py` those on a draw, `drive.py` all else."""

import functools
from collections.abc import Callable, Iterable, Sequence

import equinox as eqx
import optax
from jaxtyping import Array, Key, PyTree

from .._constraints.base import check_constraints, feasible
from .._engines.base import AbstractEngine, check_engine
from .._engines.reverse import Reverse
from .._problem.arguments import Structure
from .._problem.checks import check_count, check_hparams, check_outside_programs
from .._problem.draws import Drawn, as_problem
from .._problem.equality import reused
from .._problem.problem import ProblemLike, opened, validated
from .callbacks import Callback
from .checks import check_callbacks, check_evaluate, check_functions, check_optimizer
from .descent import Descent
from .drive import Metrics, Score, drive
from .paired import PairedDescent
from .run import Result, Run
from .update import Outer

DEFAULT_OPTIMIZER = optax.adam(0.1)  # steps of a tenth, in units of the start
RECORD = ("step", "value", "gradient_norm", "rejected", "paired")  # besides metrics


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
        problem: the problem; or, with `key`, `draw(key) -> Problem`, drawn anew at each step.
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
        stop: stopping rules, `NoImprovement(10)`, `TimeLimit(600)` or any function of the `Run` that
            returns a reason to stop, or None.
        evaluate: `evaluate(state, hparams) -> dict` of further scalars on the final inner state.
        score: what `best` is lowest in, as a function of a record, `lambda r: -r["accuracy"]` say;
            by default its `value` (the sum, where the objective is a dict).

    A step that raises the error, or after which it is not finite, is rejected and tried again a quarter
    as long. Its record says `rejected`, and the result is the lowest evaluation. Of several objectives,
    only what is not finite is rejected; at the start that raises `NonFiniteError`.

    Of a draw, the point reached and the last that was accepted are compared in the same draws, every
    few steps; `paired` of a record is the error of the latter, by these differences. The result is the
    lowest by comparison.

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
    engine, source = engine or Reverse(), as_problem(problem, key)
    arrays, structure = validated(source, hparams, smooth=engine.differentiates)
    if evaluate is not None:
        state = eqx.filter_eval_shape(functools.partial(_start, structure), arrays)
        check_evaluate(evaluate, state, hparams, RECORD)
    constraints = check_constraints(constraints, hparams)
    hparams = feasible(constraints, hparams)
    chosen = DEFAULT_OPTIMIZER if optimizer is None else reused(optimizer)
    outer = Outer(chosen, constraints, in_units=optimizer is None)
    kind = PairedDescent if isinstance(source, Drawn) else Descent
    descent = kind(source, engine.within(constraints), outer)
    own = functools.partial(descent.fingerprint, hparams)
    run = Run(steps, descent.first_carry(hparams), hparams, own)
    return drive(run, descent, callbacks=callbacks, rules=rules, evaluate=evaluate, score=score)


def _start(structure: Structure, arrays: list[Array]) -> PyTree:
    """Return the state before the first step."""
    problem, hparams = opened(structure, arrays)
    return problem.start(hparams)

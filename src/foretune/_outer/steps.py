"""One step of `minimize`: the evaluation, whether it is held, and the update, each as a program.

`batched` says that hyperparameters, values and gradients have a leading axis of independent descents.
"""

import functools
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from .._constraints.base import to_unconstrained
from .._engines.base import Hypergradient
from .._engines.nonfinite import NonFiniteError, check_finite, explain, is_finite
from .._problem.arguments import filtered
from .._problem.checks import shown
from .._problem.problem import Problem
from .guard import RESTART, Held, chosen, is_held, next_held, nothing_held
from .run import Outer, Run


def evaluated(
    engine: Any, quiet: Any, problem: Problem, run: Run, batched: bool, **rule: bool
) -> tuple:
    """Return the hypergradient, its norm, and whether the step to it is held (for each descent).

    `quiet` is the engine that does not check what is finite, since the rule does.
    """
    held = run.carry.held
    if held is None:
        hyper = _of_members(engine, problem, run) if batched else engine(problem, run.hparams)
        holds = np.ones(np.shape(run.best.score), bool)
        return hyper, _norms(hyper.grad, batched), holds
    hyper = hypergradient(quiet, problem, run.hparams, batched)
    judged = _judged(held, hyper.value, hyper.grad, batched, rule)
    norms, holds, finite = jax.device_get(judged)
    if finite.all():
        return hyper, norms, holds
    silent, run.nan_reported = run.nan_reported, True  # the score's NaN is no news
    if run.step == 0:  # there is nothing to go back to
        hyper = _of_members(engine, problem, run) if batched else engine(problem, run.hparams)
        return hyper, _norms(hyper.grad, batched), holds
    started = np.isfinite(jax.device_get(held.values)).any(-1)
    if (started & ~finite).any() and not silent:
        which = f" of descents {np.flatnonzero(started & ~finite).tolist()}" if batched else ""
        why = "" if batched else f" {explain(problem, run.hparams, hyper, engine.other_mode)}"
        warnings.warn(
            f"the error or the hypergradient{which} at step {run.step} of minimize is not finite, with "
            f"{shown(run.hparams)}. The step is taken back and shortened, here and later in the run; "
            f"`take_back=False` raises an error instead.{why}",
            RuntimeWarning,
            stacklevel=3,
        )
    return hyper, norms, holds


@filtered
def outer_init(outer: Outer, hparams: PyTree, batched: bool) -> tuple[PyTree, Held]:
    def init(hparams):
        return outer.init(hparams), nothing_held(
            hparams, to_unconstrained(outer.constraints, hparams)
        )

    return (jax.vmap(init) if batched else init)(hparams)


@filtered
def _judged(
    held: Held, value: Any, grad: PyTree, batched: bool, rule: dict[str, bool]
) -> tuple[Array, Array, Array]:
    def judge(held, value, grad):
        holds = is_held(held, value, grad, **rule)
        return optax.tree.norm(grad), holds, is_finite((value, grad))

    return (jax.vmap(judge) if batched else judge)(held, value, grad)


@filtered
def outer_update(
    outer: Outer,
    hparams: PyTree,
    opt_state: PyTree,
    held: Held | None,
    value: Any,
    grad: PyTree,
    holds: Any,
    batched: bool,
) -> tuple[PyTree, PyTree, Held | None]:
    def update(hparams, opt_state, held, value, grad, holds):
        direction, after = outer.direction(hparams, opt_state, value, grad)
        if held is None:
            return outer.moved(hparams, direction), after, None
        held = next_held(holds, held, hparams, grad, direction, value)
        opt_state = chosen(holds, after, opt_state)
        error = jax.tree.map(lambda x: held.values[0].astype(x.dtype), value)
        anew = outer.direction(held.hparams, outer.init(held.hparams), error, held.grad)
        direction, opt_state = chosen(held.tries == RESTART, anew, (held.direction, opt_state))
        step = jax.tree.map(lambda d: d * held.share.astype(d.dtype), direction)
        return outer.moved(held.hparams, step), opt_state, held._replace(direction=direction)

    arguments = hparams, opt_state, held, value, grad, holds
    if not batched:
        return update(*arguments)
    updated = jax.vmap(update)(*arguments)
    if held is not None:
        return updated
    return *jax.vmap(chosen)(_rows_finite(grad), updated[:2], (hparams, opt_state)), None


@filtered
def chosen_rows(holds: Any, yes: PyTree, no: PyTree, batched: bool) -> PyTree:
    return (jax.vmap(chosen) if batched else chosen)(holds, yes, no)


def _of_members(engine: Any, problem: Problem, run: Run) -> Hypergradient:
    """Return the hypergradients of all descents, NaN for one that is not finite or was not before."""
    result = _batched_hypergradient(engine, problem, run.hparams)
    finite = jax.device_get(_rows_finite((result.value, result.grad)))
    # A resumed run sees those that had ended in its records, as an uninterrupted one does.
    ended = np.isnan(run.history[-1]["gradient_norm"]) if run.history else np.zeros_like(finite)
    alive = finite & ~ended
    if alive.all():
        return result
    for i in np.flatnonzero(~finite & ~ended):
        reason = _reason(engine, problem, jax.tree.map(lambda leaf, i=i: leaf[i], run.hparams))
        if not alive.any():
            raise NonFiniteError(f"all {len(alive)} descents have ended; descent {i}: {reason}")
        warnings.warn(
            f"descent {i} of {len(alive)} (counted from 0) ends at step {run.step}: {reason} Its "
            "hyperparameters stay as they are and its records hold NaN; the others continue.",
            RuntimeWarning,
            stacklevel=4,
        )
    run.nan_reported = True  # the score's NaN is no news
    nothing = jax.tree.map(lambda x: x * jnp.nan, result[:2])
    value, grad = chosen_rows(alive, result[:2], nothing, True)
    return result._replace(value=value, grad=grad)


def _reason(engine: Any, problem: Problem, hparams: PyTree) -> str:
    """Return why a descent is not finite: run alone, it explains itself."""
    try:
        engine(problem, hparams)
    except NonFiniteError as error:
        return str(error)
    return "not finite: its value or hypergradient."


def hypergradient(engine: Any, problem: Problem, hparams: PyTree, batched: bool) -> Hypergradient:
    """Return an engine's result, of all descents at once where there are several."""
    with check_finite(False):
        if batched:
            return _batched_hypergradient(engine, problem, hparams)
        return engine(problem, hparams)


@filtered
def _batched_hypergradient(engine, problem, hparams):
    return eqx.filter_vmap(lambda h: engine(problem, h))(hparams)


_rows_finite = jax.jit(jax.vmap(is_finite))


@functools.partial(jax.jit, static_argnums=1)
def _norms(grad: PyTree, batched: bool) -> Array:
    norm = jax.vmap(optax.tree.norm) if batched else optax.tree.norm
    return norm(grad)

"""Where a value or a gradient stops being finite: in which leaf, since which step, and why.

Nothing here runs while results are finite. When one is not, the training is run once more, beside one
tangent (the sum of the offending directions) for as long as that is finite.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, PyTree

from .._problem.arguments import filtered
from .._problem.checks import describe, named_leaves
from .._problem.problem import Problem
from .._problem.system import make_system
from .products import error_gradients, has_no_mode, pushforward

ZERO_MOMENT = (
    "There, {leaves} hold exact zeros: the gradient of the loss has been exactly 0, and the square "
    "root in the optimizer has no derivative at 0. Give it a term under the root, "
    "`optax.adam(..., eps_root=1e-8)` (adamw, nadam, radam and lamb take it too)."
)
ZERO_ROOT = (
    "An operation has no finite derivative at its argument. Typical are sqrt, a norm or a log at "
    "exactly 0, also in the branch that `jnp.where` does not take; `optax.clip_by_global_norm` and "
    "the Adam family (remedy: `eps_root=1e-8`) where a gradient is exactly 0."
)
GREW = "It had grown to {peak:.1e} the step before: {what}"
DIVERGES = "it diverges. Try a smaller learning rate."
UNSTABLE = "the training is unstable here (lower the learning rate, or take fewer steps)."
IN_REVERSE = (
    "The training and its forward derivative are finite: an operation has no finite derivative in "
    "reverse mode alone. Use `Forward()`, in which the hypergradient is finite here."
)
IN_OBJECTIVE = "The training is finite: it begins in the gradient of the objective. {guess}"
REVERSE, FORWARD = "Reverse()", "Forward()"
HUGE = 1e12
Fault = tuple[str, np.ndarray, np.ndarray]  # a leaf: its path, itself, and where it is not finite


class NonFiniteError(FloatingPointError):
    """A value or a hypergradient is NaN or infinite."""

    run: Any = None
    """The run until then, where a driver raised it."""
    state: Any = None
    """The state before the window, where real-time tuning raised it."""


_WHEN: ContextVar[bool | None] = ContextVar("foretune.check_finite", default=None)


@contextlib.contextmanager
def check_finite(when: object) -> Iterator[None]:
    """Say when a value or a hypergradient that is not finite is an error, in all engines.

    Args:
        when: None (default): a call of an engine outside `jax.jit` raises `NonFiniteError`, with
            origin and remedy. True: inside `jit` too, by a runtime check. False: never.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> problem = ft.Problem(
    ...     ft.Training(lambda w, h, _: w**2, lambda h: optax.sgd(h["lr"])),
    ...     lambda state, h, _: jnp.sqrt(state.params),  # at 0, where it has no derivative
    ...     init=jnp.array(0.0), batches=ft.FullBatch(None, steps=1))
    >>> with ft.check_finite(False):
    ...     grad = ft.Reverse()(problem, {"lr": jnp.array(0.25)}).grad
    >>> bool(jnp.isfinite(grad["lr"]))
    False
    """
    if not isinstance(when, bool | None):
        raise TypeError(f"check_finite({when!r:.60}): give None, True or False.")
    token = _WHEN.set(when)
    try:
        yield
    finally:
        _WHEN.reset(token)


def when_checked() -> bool | None:
    return _WHEN.get()


def is_finite(tree: PyTree) -> Bool[Array, ""]:
    """Return whether every floating-point leaf is finite."""
    floats = jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in floats]))


def explain(
    problem: Problem,
    hparams: PyTree,
    result: tuple[PyTree, PyTree, PyTree],
    other: str | None = None,
) -> str:
    """Return the message of `NonFiniteError`; `other` is the other mode's engine, maybe the remedy."""
    value, grad, _ = result
    bad = [name for name, leaf in named_leaves(value, "value").items() if not np.isfinite(leaf)]
    for name, leaf in named_leaves(grad, "hparams").items():
        if wrong := int(jnp.sum(~jnp.isfinite(leaf))):
            bad.append(f"the gradient of {name} ({wrong} of {leaf.size} entries)")
    direction = jax.tree.map(lambda g: jnp.where(jnp.isfinite(g), 0, 1).astype(g.dtype), grad)
    return f"not finite: {', '.join(bad)}.\n{origin_of(problem, hparams, direction, other)}"


def guard_finite(result: Any) -> Any:
    """Return `result` with a runtime check of its value and gradient, for use inside `jit`."""
    advice = "Call the engine outside `jit` at the same values to see where it begins."

    def guarded(tree, name):
        def guard(path, leaf):
            message = f"{name}{jax.tree_util.keystr(path)} is not finite. {advice}"
            return eqx.error_if(leaf, ~jnp.all(jnp.isfinite(leaf)), message)

        return jax.tree_util.tree_map_with_path(guard, tree)

    value, grad = guarded(result.value, "value"), guarded(result.grad, "the gradient of hparams")
    return result._replace(value=value, grad=grad)


def origin_of(
    problem: Problem,
    hparams: PyTree,
    direction: PyTree,
    other: str | None = None,
    otherwise: str = IN_OBJECTIVE,
) -> str:
    T, guess = problem.steps, _holes(problem) or ZERO_ROOT
    if found := first_nonfinite(jax.device_get(hparams), "hparams"):
        return f"{found[0]} itself is not finite."
    try:
        march = jax.device_get(_march(problem, hparams, direction))
    except (ValueError, TypeError) as error:
        if not has_no_mode(error):
            raise
        otherwise = "The training is finite, its derivative is not. {guess}"
        march = jax.device_get(_march(problem, hparams, None))
    if found := first_nonfinite(march.state, "state"):
        name, leaf, where = found
        if march.t == 0:
            entries = f"{name} ({describe(leaf)}) in {where.sum()} of {where.size} entries"
            return f"The initial parameters, or the first state, hold NaN or infinity: {entries}."
        cause = GREW.format(peak=march.peak, what=DIVERGES) if march.peak > HUGE else guess
        what = f"{name} ({describe(leaf)}) is not finite"
        return f"First at step {march.t} of {T}, in the training itself: {what}. {cause}"
    if not march.finite_errors:
        finite = "The training is finite to its end: the objective is not, at the last state."
        return f"{finite} {_holes(problem)}".strip()
    if found := first_nonfinite(march.z, "state"):
        name, leaf, where = found
        if march.z_peak > HUGE:
            cause = GREW.format(peak=march.z_peak, what=UNSTABLE)
        else:
            cause = _remedy(march.z_state, where, guess)
            cause += " In reverse mode it may be finite: try `Reverse()`." * (other == REVERSE)
        return (
            f"First at step {march.z_t} of {T}: the derivative of {name} ({describe(leaf)}) is not "
            f"finite in {where.sum()} of {where.size} entries, while the state is. {cause}"
        )
    if march.z is None or not march.finite_slopes or other != FORWARD:
        return (otherwise if march.finite_slopes else IN_OBJECTIVE).format(guess=guess)
    return IN_REVERSE


def _holes(problem: Problem) -> str:
    """Return what the problem itself holds that is not finite, with path and count, or ""."""
    found = []
    for what, name in {"data": "batches", "validation data": "validation"}.items():
        for path, leaf in named_leaves(getattr(problem, name), name).items():
            if eqx.is_inexact_array(leaf) and (wrong := int(jnp.sum(~jnp.isfinite(leaf)))):
                where = f"{path} ({describe(leaf)}) in {wrong} of {leaf.size} entries"
                found.append(f"The {what} hold NaN or infinity: {where}.")
    return " ".join(found)


def first_nonfinite(tree: PyTree, name: str) -> Fault | None:
    """Return the first leaf that is not finite: its path, itself, and where."""
    for path, leaf in named_leaves(tree, name).items():
        where = np.asarray(~np.isfinite(leaf)) if eqx.is_inexact_array_like(leaf) else np.array(0)
        if where.any():
            return path, np.asarray(leaf), where
    return None


def _remedy(state: PyTree, where: np.ndarray, guess: str) -> str:
    moments = [
        path
        for path, leaf in named_leaves(state, "state").items()
        if path.startswith("state.opt_state") and eqx.is_inexact_array_like(leaf)
        if np.shape(leaf) == where.shape and np.any(where & (leaf == 0))
    ]
    return ZERO_MOMENT.format(leaves=" and ".join(moments)) if moments else guess


class March(NamedTuple):
    """Where the training, and its derivative z_t = Z_t direction, stopped being finite, or the end."""

    t: Array | int
    state: PyTree  # s_t
    peak: Array  # max |s_{t-1}|
    finite_errors: Array  # E(s_t)
    finite_slopes: Array  # its gradient
    z_t: Array | int
    z_state: PyTree
    z: PyTree
    z_peak: Array  # max |z| the step before


@filtered
def _march(problem: Problem, hparams: PyTree, direction: PyTree | None) -> March:
    """Train beside one tangent, where there is one, until it is not finite, then without it."""
    system = make_system(problem, hparams)
    directions = jax.tree.map(lambda leaf: leaf[None], direction)

    def phi(t):
        return lambda s, h: system.step(s, h, jax.tree.map(lambda leaf: leaf[t], system.xs))

    def with_tangent(carry):
        t, s, z, *_ = carry
        return t + 1, *pushforward(phi(t), (s, hparams), (z, directions)), _peak(s), _peak(z)

    def alone(carry):
        t, s, _ = carry
        return t + 1, phi(t)(s, hparams), _peak(s)

    def proceed(carry):
        t, *finite = carry[:3]
        return (t < system.steps) & is_finite(finite)

    peak = z_peak = jnp.zeros((), float)
    z_t, z_s, z = 0, system.initial(hparams), None
    if direction is not None:
        z_s, z = pushforward(system.initial, (hparams,), (directions,))
        start = z_t, z_s, z, peak, z_peak
        z_t, z_s, z, peak, z_peak = lax.while_loop(proceed, with_tangent, start)
    t, s, peak = lax.while_loop(lambda c: proceed(c[:2]), alone, (z_t, z_s, peak))
    errors, *slopes = error_gradients(system, s, hparams)
    if z is not None:
        z = system.restore(jax.tree.map(lambda leaf: leaf[0], z))
    state, z_state = system.restore(s), system.restore(z_s)
    return March(t, state, peak, is_finite(errors), is_finite(slopes), z_t, z_state, z, z_peak)


def _peak(tree: PyTree) -> Array:
    floats = jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))
    peaks = [jnp.max(jnp.abs(leaf), initial=0.0).astype(float) for leaf in floats]
    return jnp.max(jnp.array(peaks), initial=0.0)

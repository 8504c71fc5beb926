"""What is said when a value or a gradient is not finite: which leaf, since which step, and why.

Nothing here runs while results are finite. When one is not, the training is run again beside one
tangent (the sum of the offending directions) until the state or its derivative stops being
finite; if neither does, the fault lies in the adjoint alone and the steps are searched backwards.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, PyTree

from .._problem.checks import describe, named_leaves
from .._problem.problem import Problem
from .._problem.system import make_system
from .products import error_gradients, pull_rows, pushforward

ZERO_MOMENT = (
    "There, {leaves} hold exact zeros: the gradient of the loss has been exactly 0, and the square "
    "root in the optimizer has no derivative at 0. Give the optimizer a term under the root, for "
    "instance `optax.adam(..., eps_root=1e-8)` (adamw, nadam, radam and lamb take it too)."
)
ZERO_ROOT = (
    "An operation has no finite derivative at its argument. Typical are sqrt, a norm or a log at "
    "exactly 0, also in the branch that `jnp.where` does not take; `optax.clip_by_global_norm` and "
    "the Adam family (remedy: `eps_root=1e-8`) where a gradient is exactly 0."
)
DIVERGES = "It had grown to {peak:.1e} the step before: it diverges. Try a smaller learning rate."
HUGE = 1e12
UNSTABLE = (
    "It had grown to {peak:.1e} the step before: the training is unstable at these hyperparameters "
    "(lower the learning rate, or take fewer steps)."
)

IN_OBJECTIVE = (
    f"The states and their derivatives are finite: it begins in the objective. {ZERO_ROOT}"
)
GROWN = (
    "From this state with Z = 0 the window is finite: the derivative Z had grown over the windows "
    "before. Give `RealTime` a smaller `discount`, a `z_cap` or a `reset`."
)


class NonFiniteError(FloatingPointError):
    """A value or a hypergradient is NaN or infinite."""

    run: Any = None
    """The run until then, where a driver raised it."""
    state: Any = None
    """The state before the window, where real-time tuning raised it."""


def is_finite(tree: PyTree) -> Bool[Array, ""]:
    """Return whether every floating-point leaf is finite."""
    floats = jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in floats]))


def explain(problem: Problem, hparams: PyTree, result: Any) -> str:
    """Return the message of `NonFiniteError`: which leaves are not finite, since when and why."""
    value, grad, _ = result
    bad = [name for name, leaf in named_leaves(value, "value").items() if not np.isfinite(leaf)]
    for name, leaf in named_leaves(grad, "hparams").items():
        wrong = int(jnp.sum(~jnp.isfinite(leaf)))
        if wrong:
            bad.append(f"the gradient of {name} ({wrong} of {leaf.size} entries)")
    direction = jax.tree.map(lambda g: jnp.where(jnp.isfinite(g), 0, 1).astype(g.dtype), grad)
    return f"not finite: {', '.join(bad)}.\n{_origin(problem, hparams, direction)}"


def explain_window(problem: Problem, hparams: PyTree, window: int) -> str:
    """Return the message for a window of real-time tuning, from the state before it."""
    kept = "The state before the window is kept, in the attribute `state` of this error."
    for i in range(problem.steps):
        x = jax.tree.map(lambda leaf, i=i: leaf[i], problem.batches.xs)
        if found := _first(jax.device_get(problem.batches.batch(x)), "batch"):
            path, leaf, where = found
            return (
                f"not finite: the data. In window {window}, minibatch {i} of {problem.steps} (both "
                f"counted from 0), {path} ({describe(leaf)}) is not finite in {where.sum()} of "
                f"{where.size} entries. {kept}"
            )
    if found := _first(jax.device_get(problem.validation), "validation"):
        path, leaf, where = found
        return (
            f"not finite: the validation data of window {window} (counted from 0): {path} "
            f"({describe(leaf)}) in {where.sum()} of {where.size} entries. {kept}"
        )
    everywhere = jax.tree.map(jnp.ones_like, hparams)
    origin = _origin(problem, hparams, everywhere, GROWN)
    return f"not finite: window {window} (counted from 0). {origin} {kept}"


def guard_finite(result: Any) -> Any:
    """Return `result` with a runtime check of its value and gradient, for use inside `jit`."""

    def guard(name, leaf):
        advice = "Call the engine outside `jit` at the same values to see where it begins."
        return eqx.error_if(leaf, ~jnp.all(jnp.isfinite(leaf)), f"{name} is not finite. {advice}")

    def guard_tree(tree, name):
        leaves = [guard(path, leaf) for path, leaf in named_leaves(tree, name).items()]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    return result._replace(
        value=guard_tree(result.value, "value"),
        grad=guard_tree(result.grad, "the gradient of hparams"),
    )


def _origin(
    problem: Problem, hparams: PyTree, direction: PyTree, otherwise: str = IN_OBJECTIVE
) -> str:
    T = problem.steps
    if found := _first(jax.device_get(hparams), "hparams"):
        return f"{found[0]} itself is not finite."
    still = jax.tree.map(jnp.zeros_like, direction)
    t, state, _, peak, _ = jax.device_get(_march(problem, hparams, still))
    if found := _first(state, "state"):
        name, leaf, _ = found
        cause = DIVERGES.format(peak=float(peak)) if peak > HUGE else ZERO_ROOT
        return (
            f"First at step {t} of {T}, in the training itself: {name} ({describe(leaf)}) is not "
            f"finite. {cause}"
        )
    if not _finite_errors(problem, hparams):
        return "The training is finite to its end: the objective itself is not, at the last state."
    t, state, derivative, _, peak = jax.device_get(_march(problem, hparams, direction))
    if found := _first(derivative, "state"):
        name, leaf, where = found
        return (
            f"First at step {t} of {T}: the derivative of {name} ({describe(leaf)}) is not finite "
            f"in {where.sum()} of {where.size} entries, while the state is. "
            + (UNSTABLE.format(peak=float(peak)) if peak > HUGE else _remedy(state, where))
        )
    t, alpha = jax.device_get(_march_back(problem, hparams))
    if found := _first(alpha, "state"):
        name, leaf, where = found
        place = (
            f"at step {t + 1} of {T}, going back" if t < T else "in the gradient of the objective"
        )
        return (
            f"The training and its forward derivative are finite; the adjoint of {name} "
            f"({describe(leaf)}) is not, first {place}. {_remedy(state, where)}"
        )
    return otherwise


def _first(tree: PyTree, name: str) -> tuple[str, np.ndarray, np.ndarray] | None:
    """Return the first leaf that is not finite: its path, itself, and where."""
    for path, leaf in named_leaves(tree, name).items():
        where = np.asarray(~np.isfinite(leaf)) if eqx.is_inexact_array_like(leaf) else np.array(0)
        if where.any():
            return path, np.asarray(leaf), where
    return None


def _remedy(state: PyTree, where: np.ndarray) -> str:
    moments = [
        path
        for path, leaf in named_leaves(state, "state").items()
        if path.startswith("state.opt_state")
        and eqx.is_inexact_array_like(leaf)
        and np.shape(leaf) == where.shape
        and np.any(where & (leaf == 0))
    ]
    return ZERO_MOMENT.format(leaves=" and ".join(moments)) if moments else ZERO_ROOT


@eqx.filter_jit
def _march(problem: Problem, hparams: PyTree, direction: PyTree) -> tuple[Any, ...]:
    """Return t, s_t, z_t = Z_t direction, max |s_{t-1}|, max |z_{t-1}| at the first t not finite.

    With a direction of 0, only s_t counts.
    """
    system = make_system(problem, hparams)
    directions = jax.tree.map(lambda leaf: leaf[None], direction)

    def proceed(carry):
        t, s, z, *_ = carry
        return (t < system.steps) & is_finite(s) & (is_finite(z) | (_peak(direction) == 0))

    def step(carry):
        t, s, z, *_ = carry
        x = jax.tree.map(lambda leaf: leaf[t], system.xs)
        phi = lambda s, h: system.step(s, h, x)  # noqa: E731
        peaks = _peak(s), _peak(z)
        return t + 1, *pushforward(phi, (s, hparams), (z, directions)), *peaks

    s, z = pushforward(system.initial, (hparams,), (directions,))
    none = jnp.zeros((), float)
    t, s, z, *peaks = lax.while_loop(proceed, step, (0, s, z, none, none))
    z = jax.tree.map(lambda leaf: leaf[0], eqx.filter(system.restore(z), eqx.is_array))
    return t, system.restore(s), z, *peaks


def _peak(tree: PyTree) -> Array:
    """Return the largest magnitude among the floating-point leaves."""
    floats = jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))
    peaks = [jnp.max(jnp.abs(leaf), initial=0.0).astype(float) for leaf in floats]
    return jnp.max(jnp.array(peaks), initial=0.0)


@eqx.filter_jit
def _finite_errors(problem: Problem, hparams: PyTree) -> Array:
    system = make_system(problem, hparams)
    return is_finite(system.errors(system.run(hparams), hparams))


@eqx.filter_jit
def _march_back(problem: Problem, hparams: PyTree) -> tuple[Any, PyTree]:
    """Return (t, alpha_t) at the last t where alpha_t is not finite, else at 0."""
    system = make_system(problem, hparams)
    s_0 = system.initial(hparams)
    s_T, states = lax.scan(
        lambda s, x: (system.step(s, hparams, x), s), s_0, system.xs, length=system.steps
    )
    _, alpha, _ = error_gradients(system, s_T, hparams)

    def proceed(carry):
        t, alpha = carry
        return (t > 0) & is_finite(alpha)

    def step(carry):
        t, alpha = carry
        s, x = jax.tree.map(lambda leaf: leaf[t - 1], (states, system.xs))
        _, pull = eqx.filter_vjp(lambda s: system.step(s, hparams, x), s)
        return t - 1, *pull_rows(pull, alpha)

    t, alpha = lax.while_loop(proceed, step, (jnp.array(system.steps), alpha))
    return t, system.restore(jax.tree.map(lambda leaf: leaf.sum(0), alpha))

"""Implicit differentiation: the hypergradient at a minimum of the inner problem.

At a minimum of the loss, grad_w J(w, lambda) = 0, the implicit function theorem gives

    grad f = dE/dlambda - grad E(w) H^-1 d(grad_w J)/dlambda,    H = d^2 J / dw^2,

with the system H v = grad E(w) solved by conjugate gradients. For any other dynamics at a fixed point,
s = Phi(s, lambda), with A = dPhi/ds and B = dPhi/dlambda,

    grad f = dE/dlambda + grad E(s) (I - A)^-1 B,    (I - A)^-1 = I + A + A^2 + ...    (Neumann).

Away from the minimum both are biased, and nothing of the way there (a learning rate, the initial
state, when training stopped) has a derivative: a hyperparameter that is neither in grad_w J (in
Phi) nor in E is refused.

Time: a training run, and two gradients for each iteration of the solver. Memory: a few states.
References: Bengio, Gradient-Based Optimization of Hyperparameters, 2000; Pedregosa, ICML 2016; Lorraine
et al., AISTATS 2020.
"""

import math
import operator
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import optax
from jax import lax
from jax.interpreters import partial_eval
from jaxtyping import Array, Bool, Float, PyTree

from .._problem.batches import Whole, users_level
from .._problem.checks import check_count, named_leaves
from .._problem.problem import Problem
from .._problem.system import System, make_system, owners
from .base import Solution, TracedEngine, check_not_problem
from .nonfinite import is_finite
from .products import error_gradients, pull_rows

norm = optax.tree.norm
SOLVERS = ("cg", "neumann")
INDEFINITE = (
    "Implicit: conjugate gradients met negative curvature in the Hessian of the loss{found}: the "
    "training did not end at a minimum.{share} Train longer, add a regulariser, or use `Reverse()`."
)


class Report(NamedTuple):
    """How far the result can be trusted."""

    stationarity: Float[Array, ""]  # the last inner gradient (or step) as a share of the first
    residual: Float[Array, ""]  # of the linear system, relative to its right-hand side
    curvature: Float[Array, ""]  # v H v / |v|^2 of its solution v; 0 for "neumann"
    sound: Bool[Array, ""] | bool = True  # whether the error's gradient is finite


class Implicit(TracedEngine):
    """The hypergradient of inner problems at their minimum, from the minimum alone.

    Use it where the training converges (a strongly convex loss, say), T is large, and the
    hyperparameters are in the loss: regularisers, example weights. It approximates as far as the
    training has not converged, and refuses learning rates and whatever else changes only the way
    there. The training may have any batches; the loss at its end is that of all the data.

    Args:
        solver: "cg", conjugate gradients with the Hessian of the loss, for `Training`; or "neumann",
            the Neumann series of the dynamics' own step, for any dynamics that contracts.
        iterations: of the solver, at most.
        tolerance: of the solver, relative.
        stationarity: warn where the inner gradient is above this share of what it was at the
            beginning.

    A linear system that is not solved, or a training that is not at its end, is a warning with the
    figure; negative curvature is an error. Both also inside `jax.jit`, while the program runs.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> problem = ft.Problem(
    ...     dynamics=ft.Training(
    ...         lambda w, h, x: jnp.sum((w - x) ** 2) + h["decay"] * jnp.sum(w ** 2), optax.sgd(0.2)),
    ...     objective=lambda state, h, x: jnp.sum(state.params), init=jnp.zeros(2),
    ...     batches=ft.FullBatch(jnp.array([1.0, 3.0]), steps=100), validation=jnp.array(0.0))
    >>> hparams = {"decay": jnp.array(1.0)}  # w = x / (1 + decay)
    >>> print(f"{ft.Implicit()(problem, hparams).grad['decay']:.4f}")  # -(1 + 3) / (1 + decay)^2
    -1.0000
    """

    solver: str
    iterations: int
    tolerance: float
    stationarity: float

    def __init__(
        self,
        solver: Any = "cg",
        *,
        iterations: int = 100,
        tolerance: float = 1e-5,
        stationarity: float = 0.01,
    ):
        check_not_problem("Implicit", solver)
        if solver not in SOLVERS:
            raise ValueError(f"Implicit(solver={solver!r}): give one of {', '.join(SOLVERS)}.")
        check_count(iterations, f"Implicit(iterations={iterations})")
        self.solver, self.iterations, self.tolerance = solver, iterations, tolerance
        self.stationarity = stationarity
        for name, size in {"tolerance": tolerance, "stationarity": stationarity}.items():
            if not (isinstance(size, int | float) and size > 0):
                raise ValueError(f"Implicit({name}={size!r:.60}): it must be a number above 0.")

    def solve(self, problem: Problem, system: System, hparams: PyTree) -> Solution:
        """Return the errors, their gradients, s_T and a `Report`."""
        if problem.trajectory:
            raise ValueError(
                "Implicit sees the end of the training alone: not with trajectory=True."
            )
        s = system.run(hparams)
        errors, alpha, g = error_gradients(system, s, hparams)
        solve = _by_conjugate_gradients if self.solver == "cg" else _by_series
        more, report = solve(self, problem, system, hparams, s, alpha)
        rows = jax.tree.map(operator.add, g, more)
        return Solution(errors, rows, s, report._replace(sound=is_finite(alpha)))

    def review(self, report: Report) -> None:
        if _indefinite(report):
            curvature, percent = float(report.curvature), 100 * float(report.stationarity)
            found = f"{curvature:.3g} along the solution" if curvature < 0 else "they broke down"
            share = f" Its last gradient has {percent:.3g} % of the length of the first."
            raise ValueError(INDEFINITE.format(found=f" ({found})", share=share))
        self._warn(report)

    def guard(self, grad: PyTree, report: Report) -> PyTree:
        jax.debug.callback(self._warn, report)
        return eqx.error_if(grad, _indefinite(report), INDEFINITE.format(found="", share=""))

    def _warn(self, report: Report) -> None:
        share, residual = float(report.stationarity), float(report.residual)
        if not (report.sound and math.isfinite(share)):
            return  # what is not finite began before this: `NonFiniteError` says where
        if not share <= self.stationarity:
            what = "gradient" if self.solver == "cg" else "step"
            warnings.warn(
                f"Implicit: the training has not converged. Its last {what} over all the data has "
                f"{100 * share:.3g} % of the length of the first (expected: at most "
                f"{100 * self.stationarity:g} %). Train longer, or use `Reverse()`.",
                stacklevel=users_level(sys._getframe()),
            )
        if not residual <= 10 * self.tolerance:
            warnings.warn(
                f"Implicit: the linear system is solved to a relative residual of {residual:.3g} after "
                f"{self.iterations} iterations (asked for: {self.tolerance:g}). Give more iterations.",
                stacklevel=users_level(sys._getframe()),
            )


def _indefinite(report: Report) -> Bool[Array, ""]:
    """Return whether conjugate gradients broke down, and not by what was not finite before them."""
    sound = report.sound & jnp.isfinite(report.stationarity)
    return sound & ~(report.curvature >= 0)


def _check_influence(
    problem: Problem,
    system: System,
    hparams: PyTree,
    F: Callable[..., PyTree],
    s: Callable[..., PyTree],
) -> None:
    """Raise for a hyperparameter that is neither in the equation F of the minimum nor in its error.

    Asked is whether the program of E(s + F(lambda), lambda) passes a derivative back to it at all;
    every entry of the state is moved by all of F, since H^-1 may mix them.
    """

    def errors(hparams):
        floats = jax.tree.leaves(eqx.filter(F(hparams), eqx.is_inexact_array))
        return system.errors(s(sum(jnp.sum(leaf) for leaf in floats)), hparams)

    def pull(hparams, rows):
        return jax.vjp(errors, hparams)[1](rows)[0]

    rows = jax.tree.map(jnp.zeros_like, jax.eval_shape(errors, hparams))
    jaxpr = jax.make_jaxpr(pull)(hparams, rows).jaxpr
    idle = []
    named = zip(named_leaves(hparams, "hparams"), owners(problem, hparams), strict=True)
    for i, (path, owner) in enumerate(named):
        _, used = partial_eval.dce_jaxpr(jaxpr, [k == i for k in range(len(jaxpr.outvars))])
        if not used[len(jaxpr.invars) - len(rows) + system.rows[owner]]:
            idle.append(path)
    if idle:
        raise ValueError(
            f"Implicit: {', '.join(idle)} has no influence on the minimum that the training ends "
            "at. Use `Reverse()` or `Forward()`, or leave it out."
        )


def _shifted(tree: PyTree, shift: Float[Array, ""]) -> PyTree:
    def moved(leaf):
        return leaf + jnp.asarray(shift, leaf.dtype) if eqx.is_inexact_array(leaf) else leaf

    return jax.tree.map(moved, tree)


def _by_conjugate_gradients(engine, problem, system, hparams, s, alpha):
    """Return -v d(grad J)/dlambda with H v = alpha, for each of K rows, and the report."""
    gradient = problem.dynamics.gradient
    batch, state = problem.batches.whole(), system.restore(s)
    try:
        eqx.filter_eval_shape(gradient, state, hparams, batch)
    except NotImplementedError:
        raise TypeError(
            "Implicit(solver='cg') needs a dynamics with a method `gradient(state, hparams, batch)`, "
            "as `Training` has. Use Implicit(solver='neumann')."
        ) from None
    weights = eqx.filter(s.params, eqx.is_inexact_array)
    trained = jax.tree.map(eqx.is_array, weights, is_leaf=lambda leaf: leaf is None)

    def G(weights, hparams):  # in the weights that the training moves
        params = eqx.combine(weights, state.params)
        return eqx.filter(gradient(state._replace(params=params), hparams, batch), trained)

    def H(v):
        return jax.jvp(lambda w: G(w, hparams), (weights,), (v,))[1]

    def moved(shift):
        return s._replace(params=_shifted(s.params, shift))

    _check_influence(problem, system, hparams, lambda h: G(weights, h), moved)
    shape = jax.eval_shape(lambda: weights)
    hessian = lx.FunctionLinearOperator(H, shape, tags=lx.positive_semidefinite_tag)
    solver = lx.CG(rtol=engine.tolerance, atol=0.0, max_steps=engine.iterations)

    def row(alpha):
        v = lx.linear_solve(hessian, alpha, solver, throw=False).value
        Hv = H(v)
        residual = norm(optax.tree.sub(Hv, alpha)) / _safe(norm(alpha))
        return v, residual, optax.tree.vdot(v, Hv) / _safe(norm(v) ** 2)

    v, residual, curvature = jax.vmap(row)(eqx.filter(alpha.params, eqx.is_inexact_array))
    at_end, pull = jax.vjp(lambda h: G(weights, h), hparams)
    (more,) = pull_rows(pull, v)
    start = eqx.filter(system.initial(hparams).params, eqx.is_inexact_array)
    share = norm(at_end) / _safe(norm(G(start, hparams)))
    report = Report(share, jnp.max(residual), jnp.min(curvature))
    return jax.tree.map(jnp.negative, more), report


def _by_series(engine, problem, system, hparams, s, alpha):
    """Return alpha (I + A + A^2 + ...) B for each of K rows, and the report."""
    on_all = eqx.tree_at(lambda p: p.batches, problem, Whole(batches=problem.batches))
    whole = make_system(on_all, hparams)

    def phi(s, hparams):
        return whole.step(s, hparams, None)

    _check_influence(problem, system, hparams, lambda h: phi(s, h), lambda x: _shifted(s, x))
    after, pull = eqx.filter_vjp(phi, s, hparams)

    def term(carry):
        k, term, total, _ = carry
        term, _ = pull_rows(pull, term)
        total = jax.tree.map(operator.add, total, term)
        return k + 1, term, total, norm(term) / _safe(norm(total))

    _, _, v, residual = lax.while_loop(
        lambda carry: (carry[0] < engine.iterations) & (carry[3] > engine.tolerance),
        term,
        (0, alpha, alpha, jnp.ones(())),
    )
    _, more = pull_rows(pull, v)

    def distance(*states):
        a, b = (eqx.filter(s, eqx.is_inexact_array) for s in states)
        return norm(optax.tree.sub(a, b))

    s_0 = system.initial(hparams)
    share = distance(after, s) / _safe(distance(phi(s_0, hparams), s_0))
    return more, Report(share, residual, jnp.zeros(()))


def _safe(x: Array) -> Array:
    return jnp.where(x > 0, x, 1.0)

"""Implicit differentiation: the hypergradient at a minimum of the inner problem.

Where a training ends, an equation F(x, lambda) = 0 holds, and the implicit function theorem gives

    grad f = dE/dlambda - v dF/dlambda,    v dF/dx = grad E(x).

At a minimum of a loss J(w, lambda) the equation is F = grad_w J; its dF/dw is the Hessian, and the
system is solved by conjugate gradients. At a fixed point of any other dynamics, s = Phi(s, lambda), it
is F = s - Phi(s, lambda), and the system is solved by GMRES.

Away from the end both are biased. Nothing of the way there (a learning rate, the initial state) has a
derivative: a hyperparameter that is neither in F nor in E is refused.

Time: a training run, and two gradients for each iteration of the solver. Memory: a few states.
References: Bengio, Gradient-Based Optimization of Hyperparameters, 2000; Pedregosa, ICML 2016; Lorraine
et al., AISTATS 2020.
"""

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import optax
from jaxtyping import Array, Bool, Float, PyTree

from .._problem.checks import check_count, named_leaves
from .._problem.jaxprs import inputs_of
from .._problem.problem import Problem
from .._problem.system import System, owners
from .._problem.warn import warn
from .base import Solution, TracedEngine
from .nonfinite import is_finite
from .products import error_gradients, pull_rows

norm = optax.tree.norm
INDEFINITE = (
    "Implicit: conjugate gradients met negative curvature in the Hessian of the loss{found}: the "
    "training did not end at a minimum.{share} Train longer, add a regulariser, or use `Reverse()`."
)


class Report(NamedTuple):
    """How far the result can be trusted."""

    stationarity: Float[Array, ""]  # the last inner gradient (or step) as a share of the first
    residual: Float[Array, ""]  # of the linear system, relative to its right-hand side
    curvature: Float[Array, ""]  # v H v / |v|^2 of its solution v; 0 at a fixed point
    sound: Bool[Array, ""]  # whether the error's gradient is finite


class Equation(NamedTuple):
    """F(x, lambda) = 0, which holds where a training ends, in a part x of the state."""

    F: Callable[[PyTree, PyTree], PyTree]
    part: Callable[[PyTree], PyTree]  # s -> x
    put: Callable[[PyTree], PyTree]  # x -> the last state, with x in its place
    is_minimum: bool  # then dF/dx is symmetric


class Implicit(TracedEngine):
    """The hypergradient of inner problems at their minimum, from the minimum alone.

    Use it where the training converges, T is large, and the hyperparameters are in the loss:
    regularisers, example weights. It refuses learning rates and whatever else changes only the way to
    the minimum. The loss at the end is that of all the data. For a dynamics without the method
    `gradient`, it is the hypergradient at the fixed point of its step.

    Args:
        iterations: of the solver of the linear system, at most.
        tolerance: of the solver, relative.
        stationarity: warn where the last inner gradient is above this share of the first.

    A linear system that is not solved, or a training that is not at its end, is a warning; negative
    curvature is an error. Both also inside `jax.jit`, while the program runs.

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

    iterations: Any = 100  # a number
    tolerance: Any = eqx.field(default=1e-5, kw_only=True)
    stationarity: Any = eqx.field(default=0.01, kw_only=True)

    def __check_init__(self):
        check_count(self.iterations, f"Implicit(iterations={self.iterations!r:.60})")
        for name in ("tolerance", "stationarity"):
            size = getattr(self, name)
            if not (isinstance(size, int | float) and size > 0):
                raise ValueError(f"Implicit({name}={size!r:.60}): it must be a number above 0.")

    def solve(self, problem: Problem, system: System, hparams: PyTree) -> Solution:
        """Return the errors, their gradients, s_T and a `Report`."""
        if problem.trajectory:
            raise ValueError("Implicit sees only the end of training: not with trajectory=True.")
        s = system.run(hparams)
        errors, alpha, g = error_gradients(system, s, hparams)
        F, part, _, is_minimum = equation = _equation(problem, system, hparams, s)
        _check_influence(problem, system, hparams, equation, part(s))
        at_end, pull = jax.vjp(F, part(s), hparams)

        def times(v):
            return pull(v)[0]

        limits = {"rtol": self.tolerance, "atol": 0.0, "max_steps": self.iterations}
        solver = lx.CG(**limits) if is_minimum else lx.GMRES(**limits)
        tags = lx.positive_semidefinite_tag if is_minimum else ()
        matrix = lx.FunctionLinearOperator(times, jax.eval_shape(lambda: at_end), tags)

        def row(alpha):
            v = lx.linear_solve(matrix, alpha, solver, throw=False).value
            product = times(v)
            residual = norm(optax.tree.sub(product, alpha)) / _safe(norm(alpha))
            return v, residual, optax.tree.vdot(v, product) / _safe(norm(v) ** 2)

        v, residual, curvature = jax.vmap(row)(part(alpha))
        rows = jax.tree.map(operator.sub, g, pull_rows(pull, v)[1])
        share = norm(at_end) / _safe(norm(F(part(system.initial(hparams)), hparams)))
        curvature = jnp.min(curvature) if is_minimum else jnp.zeros(())
        report = Report(share, jnp.max(residual), curvature, is_finite(alpha))
        return Solution(errors, rows, s, report)

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
            warn(
                "Implicit: the training has not converged. Its last gradient (or step) over all the "
                f"data has {100 * share:.3g} % of the length of the first (expected: at most "
                f"{100 * self.stationarity:g} %). Train longer, or use `Reverse()`."
            )
        if not residual <= 10 * self.tolerance:
            found = f"a relative residual of {residual:.3g} after {self.iterations} iterations"
            more = f"(asked for: {self.tolerance:g}). Give more iterations."
            warn(f"Implicit: the linear system is solved to {found} {more}")


def _indefinite(report: Report) -> Bool[Array, ""]:
    """Return whether conjugate gradients broke down, and not by what was not finite before them."""
    sound = report.sound & jnp.isfinite(report.stationarity)
    return sound & ~(report.curvature >= 0)


def _equation(problem: Problem, system: System, hparams: PyTree, s: PyTree) -> Equation:
    """Return the equation of a minimum, or of a fixed point where the dynamics has no gradient."""
    batch, dynamics = problem.batches.whole(), problem.dynamics

    def floats(s):
        return eqx.filter(s, eqx.is_inexact_array)

    def put(x):
        return eqx.combine(x, s)

    def change(x, hparams):
        after = dynamics.step(system.restore(put(x)), hparams, batch)
        return optax.tree.sub(x, floats(after))

    def weights(s):
        return eqx.filter(s.params, trained)

    def put_weights(weights):
        return s._replace(params=eqx.combine(weights, s.params))

    def gradient(weights, hparams):
        state = system.restore(put_weights(weights))
        return eqx.filter(dynamics.gradient(state, hparams, batch), trained)

    try:
        eqx.filter_eval_shape(dynamics.gradient, system.restore(s), hparams, batch)
    except NotImplementedError:
        return Equation(change, floats, put, is_minimum=False)
    trained = _trained(system, hparams, s)
    return Equation(gradient, weights, put_weights, is_minimum=True)


def _trained(system: System, hparams: PyTree, s: PyTree) -> PyTree[bool]:
    """Return which arrays of `s.params` are trained: a step makes them of more than themselves."""
    x = jax.tree.map(lambda leaf: leaf[0], system.xs)
    jaxpr = jax.make_jaxpr(system.step)(s, hparams, x).jaxpr
    used = [inputs_of(jaxpr, i) for i in range(len(jaxpr.outvars))]
    moves = [any(row[:i] + row[i + 1 :]) for i, row in enumerate(used)]
    moving = jax.tree.unflatten(jax.tree.structure(s), moves)
    return jax.tree.map(lambda leaf, moves: moves and eqx.is_inexact_array(leaf), s, moving).params


def _check_influence(
    problem: Problem, system: System, hparams: PyTree, equation: Equation, x: PyTree
) -> None:
    """Raise for a hyperparameter that is neither in the equation of the end nor in its error.

    Asked is whether the program of E(x + F(x, lambda), lambda) passes a derivative back to it at all;
    every entry of x is moved by all of F, since the inverse of dF/dx may mix them.
    """

    def errors(hparams):
        shift = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(equation.F(x, hparams)))
        moved = jax.tree.map(lambda leaf: leaf + jnp.asarray(shift, leaf.dtype), x)
        return system.errors(equation.put(moved), hparams)

    rows = jax.tree.map(jnp.zeros_like, jax.eval_shape(errors, hparams))
    jaxpr = jax.make_jaxpr(lambda h, rows: jax.vjp(errors, h)[1](rows))(hparams, rows).jaxpr
    first = len(jaxpr.invars) - len(rows)
    followed = [first + system.rows[owner] for owner in owners(problem, hparams)]
    named = zip(named_leaves(hparams, "hparams"), followed, strict=True)
    if idle := [path for i, (path, row) in enumerate(named) if not inputs_of(jaxpr, i)[row]]:
        why = f"{', '.join(idle)} has no influence on the minimum that the training ends at"
        raise ValueError(f"Implicit: {why}. Use `Reverse()` or `Forward()`, or leave it out.")


def _safe(x: Array) -> Array:
    return jnp.where(x > 0, x, 1.0)

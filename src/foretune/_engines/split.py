"""A step of training in two parts: the gradient, which takes nearly all of its time, and the rest.

    g_t = gradient(s_{t-1}, lambda, x_t),      s_t = update(s_{t-1}, lambda, x_t, g_t)

Where the gradients are stored, a state is found again by updates alone. The parts are read off the
step's own program, in which `Training` has marked the gradient.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jaxtyping import Array, PyTree

from .._problem.jaxprs import equations, subjaxprs
from .._problem.system import System
from .._problem.training import GRADIENT

COSTLY = (  # an update that is computed several times has none of these
    "dot_general", "conv_general_dilated", "ragged_dot", "scan", "while", "sort", "fft", "eigh", "svd",
    "qr", "cholesky", "lu", "triangular_solve", "custom_call", "pure_callback", "io_callback",
)  # fmt: skip


class Split(NamedTuple):
    """The two parts of a step."""

    gradient: Callable[[PyTree, PyTree, PyTree], list[Array]]  # s, lambda, x -> g
    update: Callable[[PyTree, PyTree, PyTree, list[Array]], PyTree]  # s, lambda, x, g -> the next s
    size: int  # of g, in numbers
    work: int  # multiplications and additions of products, in g

    def known(self, s: PyTree, hparams: PyTree, x: PyTree, g: list[Array]) -> PyTree:
        """Return the next state for the price of an update; its derivative is that of the step."""
        pairs = zip(self.gradient(s, hparams, x), g, strict=True)
        g = [_standing_for(a, b) if eqx.is_inexact_array(b) else b for a, b in pairs]
        return self.update(s, hparams, x, g)


@jax.custom_vjp
def _standing_for(found: Array, known: Array) -> Array:
    """Return `known`, with the derivative of `found`, whose value nobody asks for."""
    return known


_standing_for.defvjp(lambda found, known: (known, None), lambda _, u: (u, jnp.zeros_like(u)))


def split_step(system: System, hparams: PyTree, s: PyTree) -> Split | None:
    """Return the parts of the system's step, or None where it has no gradient or a costly update."""
    x = jax.tree.map(lambda leaf: leaf[0], system.xs)
    traced, shape = jax.make_jaxpr(system.transposable, return_shape=True)(s, hparams, x)
    jaxpr = traced.jaxpr
    marks = [e for e in jaxpr.eqns if _is_mark(e)]
    if not marks or jaxpr.effects:
        return None
    before = [v for e in marks for v in e.invars]
    after = [v for e in marks for v in e.outvars]
    rest = [e for e in jaxpr.eqns if not _is_mark(e)]
    update, gradient = _needed(rest, jaxpr.outvars), _needed(rest, before)
    if any(v is mark for mark in after for e in gradient for v in e.invars):
        return None  # a gradient after another one's update
    if any(e.primitive.name in COSTLY for e in equations(jaxpr.replace(eqns=update))):
        return None

    def part(eqns, inputs, outputs):
        cut = jaxpr.replace(eqns=eqns, invars=[*jaxpr.invars, *inputs], outvars=outputs)
        return jaxpr_as_fun(ClosedJaxpr(cut, traced.consts))

    of_gradient, of_update = part(gradient, [], before), part(update, after, jaxpr.outvars)

    def updated(s, hparams, x, g):
        new = of_update(*jax.tree.leaves((s, hparams, x)), *g)
        return jax.tree.unflatten(jax.tree.structure(shape), new)

    size, work = sum(v.aval.size for v in after), sum(map(_work, gradient))
    return Split(lambda *given: of_gradient(*jax.tree.leaves(given)), updated, size, work)


def _is_mark(equation: JaxprEqn) -> bool:
    return equation.primitive.name == "name" and equation.params["name"] == GRADIENT


def _needed(equations: list[JaxprEqn], outputs: list[Var | Literal]) -> list[JaxprEqn]:
    """Return the equations that these outputs depend on."""
    wanted = {v for v in outputs if not isinstance(v, Literal)}
    found = []
    for equation in reversed(equations):
        if any(v in wanted for v in equation.outvars):
            wanted.update(v for v in equation.invars if not isinstance(v, Literal))
            found.append(equation)
    return found[::-1]


def _work(equation: JaxprEqn) -> int:
    """Return the multiplications and additions of matrix products and convolutions."""
    name, parameters = equation.primitive.name, equation.params
    if name in ("dot_general", "conv_general_dilated"):
        factor: Any = equation.invars[1].aval
        if name == "dot_general":
            (_, summed), _ = parameters["dimension_numbers"]
            each = math.prod(factor.shape[axis] for axis in summed)
        else:
            each = factor.size // factor.shape[parameters["dimension_numbers"].rhs_spec[0]]
        product: Any = equation.outvars[0].aval
        return 2 * product.size * each
    inner = [e for jaxpr in subjaxprs(parameters) for e in jaxpr.eqns]
    return parameters.get("length", 1) * sum(map(_work, inner)) if inner else 0

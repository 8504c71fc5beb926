"""The gradient check: forward mode, reverse mode and finite differences on one problem.

For each hyperparameter leaf and a few random directions v in it, three numbers that must agree:

    forward      grad E(s_T) Z_T v + dE/dlambda v      (one tangent along v)
    reverse      the adjoint's gradient times v
    differences  (f(lambda + h v) - f(lambda - h v)) / 2h, extrapolated to h = 0
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._constraints.base import Free, scales
from .._engines.products import directional
from .._engines.reverse import Reverse
from .._problem.arguments import filtered
from .._problem.checks import check_count, check_key, named_leaves
from .._problem.draws import as_problem
from .._problem.problem import Problem, ProblemLike, opened, validated
from .._problem.system import make_system
from .slopes import errors_at, random_probes

FIRST_STEP = 0.05  # relative to the hyperparameter's own size
AGREE, UNSURE = "agree", "unsure"


class HypergradientMismatch(AssertionError):
    """Forward mode, reverse mode and finite differences do not agree."""


class CheckRow(NamedTuple):
    """One direction in one hyperparameter leaf."""

    leaf: str
    forward: float
    reverse: float
    differences: float
    uncertainty: float
    verdict: str


class HypergradientCheck(NamedTuple):
    """The rows of the check; prints as a table."""

    rows: list[CheckRow]
    leaves: list[str]

    def line(self, row: CheckRow) -> str:
        """Return one row of the table."""
        numbers = f"{row.forward:>13.6e} {row.reverse:>13.6e} {row.differences:>13.6e}"
        return f"{row.leaf:<{self._width}} {numbers} {row.uncertainty:>8.1e}  {row.verdict}"

    def __str__(self) -> str:
        heads = f"{'forward':>13} {'reverse':>13} {'differences':>13}      +/-"
        return "\n".join([f"{'leaf':<{self._width}} {heads}", *map(self.line, self.rows)])

    @property
    def _width(self) -> int:
        return max(len("leaf"), *map(len, self.leaves))


def check_hypergradient(
    problem: ProblemLike,
    hparams: PyTree,
    *,
    directions: int = 2,
    tolerance: float | None = None,
    key: Array | None = None,
    verbose: bool = True,
) -> HypergradientCheck:
    """Check that forward mode = reverse mode = finite differences, or raise where they are not.

    A row of the table is the derivative along one direction v in one leaf: each entry of v is the size
    of the hyperparameter's own entry (1 where the leaf is 0), with a random sign.

    Args:
        problem: the problem, or a function `draw(key)` that returns it.
        hparams: where to check; not on a kink of the dynamics, where there is no gradient.
        directions: random directions for each hyperparameter leaf.
        tolerance: relative tolerance between forward and reverse; 10 times it against the
            differences. Default: 3 sqrt(eps), 1e-3 in float32 and 4.5e-8 in float64.
        key: the random key of the draw, and of the directions.
        verbose: print each row as soon as it is known.

    Raises:
        HypergradientMismatch: with the table and the leaves that disagree.

    Rows whose differences are too noisy are marked `unsure`: settle them in float64 (`jax_enable_x64`,
    and parameters, data and hyperparameters made of float64 arrays).

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> problem = ft.Problem(
    ...     ft.Training(lambda w, h, _: (w - 1) ** 2, lambda h: optax.sgd(h["lr"])),
    ...     lambda state, h, _: (state.params - 1) ** 2, jnp.array(0.0), ft.FullBatch(None, steps=3))
    >>> check = ft.check_hypergradient(problem, {"lr": jnp.array(0.1)}, verbose=False)
    >>> {row.verdict for row in check.rows}
    {'agree'}
    """
    check_count(directions, f"directions={directions}")
    if key is not None:
        check_key(key, "the key of check_hypergradient")
    given = as_problem(problem, None if isinstance(problem, Problem) else key)
    arrays, structure = validated(given, hparams)
    problem, hparams = opened(structure, arrays)
    state = eqx.filter_eval_shape(problem.start, hparams)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves((hparams, state)) if hasattr(leaf, "dtype")]
    eps = max(float(jnp.finfo(d).eps) for d in dtypes if jnp.issubdtype(d, jnp.inexact))
    tolerance = 3 * eps**0.5 if tolerance is None else tolerance
    if not isinstance(tolerance, int | float) or not tolerance > 0:
        raise ValueError(f"tolerance={tolerance!r:.60}: it must be a number above 0, or None.")
    key = jax.random.key(0) if key is None else key
    check = HypergradientCheck([], list(named_leaves(hparams, "hparams")))
    if verbose:
        print(check)
    with jax.default_matmul_precision("highest"):
        for row in _rows(problem, hparams, directions, tolerance, eps, key):
            check.rows.append(row)
            if verbose:
                print(check.line(row), flush=True)
    wrong = {row.leaf: row.verdict for row in check.rows if row.verdict not in (AGREE, UNSURE)}
    if wrong:
        named = "; ".join(f"{leaf}: {verdict}" for leaf, verdict in wrong.items())
        raise HypergradientMismatch(f"the hypergradient is wrong. {named}\n{check}")
    return check


def _rows(
    problem: Problem, hparams: PyTree, count: int, tolerance: float, eps: float, key: Array
) -> Iterator[CheckRow]:
    _, grad, _ = Reverse()(problem, hparams)
    sizes = scales(Free(), hparams)
    for probe in random_probes(problem, hparams, count, key):
        v = jax.tree.map(lambda sign, c: sign * c, probe.change, sizes)
        stacked = jax.tree.map(lambda leaf: leaf[None], v)
        forward = float(_along(problem, hparams, stacked)[probe.row][0])
        pairs = zip(jax.tree.leaves(grad), jax.tree.leaves(v), strict=True)
        terms = np.concatenate([np.ravel(np.asarray(g * d, np.float64)) for g, d in pairs])

        def f(h, v=v, row=probe.row):
            point = jax.tree.map(lambda x, way: (x + h * way)[None], hparams, v)
            return float(errors_at(problem, point)[0, row])

        difference = finite_difference(f, eps, tolerance)
        yield _judge(probe.leaf, forward, terms, *difference, tolerance)


def _judge(name, forward, terms, difference, uncertainty, tolerance) -> CheckRow:
    reverse = float(terms.sum())
    # The terms of v grad f may cancel; their norm is the size that rounding is relative to.
    scale = max(abs(reverse), float(np.linalg.norm(terms)), abs(forward), 1e-300)
    slack = max(10 * tolerance * scale, 5 * uncertainty)
    if abs(forward - reverse) > tolerance * scale:
        verdict = "forward and reverse disagree"
    elif abs(reverse - difference) > slack:
        verdict = "differs from finite differences"
    elif not uncertainty <= 0.1 * scale:
        verdict = UNSURE
    else:
        verdict = AGREE
    return CheckRow(name, forward, reverse, difference, uncertainty, verdict)


def finite_difference(f: Callable[[float], float], eps: float, least: float) -> tuple[float, float]:
    """Return f'(0) by extrapolated central differences, and an estimate of its error.

    D(h) is the central difference, R(h) = (16 D(h/4) - D(h)) / 15 is trusted as far as it agrees with
    the one before and with D(h/4).
    """
    best, error, h = np.nan, np.inf, FIRST_STEP
    D = R = np.nan
    while h > eps**0.45 and not error <= least * abs(best):
        high, low = f(h), f(-h)
        D, D_before = (high - low) / (2 * h), D
        R, R_before = (16 * D - D_before) / 15, R
        rounding = 4 * eps * max(abs(high), abs(low)) / h
        change = max(abs(R - R_before), abs(R - D)) + rounding
        if change < error:  # never with a NaN
            best, error = R, change
        h /= 4
    return float(best), float(error)


@filtered
def _along(problem: Problem, hparams: PyTree, V: PyTree) -> Float[Array, "K c"]:
    return directional(make_system(problem, hparams), hparams, V)[1]

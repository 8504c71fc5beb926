"""The gradient check: forward mode, reverse mode and finite differences on one problem.

For each hyperparameter leaf and a few random directions v in it, three numbers that must agree:

    forward      grad E(s_T) Z_T v + dE/dlambda v      (one tangent along v)
    reverse      the adjoint's gradient times v
    differences  (f(lambda + h v) - f(lambda - h v)) / 2h, extrapolated to h = 0

The differences come with an error estimate (Ridders' method: steps are halved until rounding
takes over), so in float32 they are not trusted further than they can be.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from ._engines.forward import directional
from ._engines.reverse import Reverse
from ._problem import Problem
from ._validate import check_steps, named_leaves, validated

FIRST_STEP = 0.05  # relative to the hyperparameter's own size
LEVELS = 12


class HypergradientMismatch(AssertionError):
    """Forward mode, reverse mode and finite differences do not agree."""


class CheckRow(NamedTuple):
    """One direction in one hyperparameter leaf."""

    leaf: str
    forward: float
    reverse: float
    differences: float
    uncertainty: float
    scale: float
    verdict: str


class HypergradientCheck(NamedTuple):
    """The rows of the check; prints as a table."""

    rows: list[CheckRow]
    tolerance: float

    def __str__(self) -> str:
        width = max(len("leaf"), *(len(row.leaf) for row in self.rows))
        lines = [_header(width), *(_line(row, width) for row in self.rows)]
        return "\n".join(lines)


def check_hypergradient(
    problem: Problem,
    hparams: PyTree,
    *,
    directions: int = 2,
    tolerance: float | None = None,
    key: Key[Array, ""] | None = None,
    verbose: bool = True,
) -> HypergradientCheck:
    """Check that forward mode = reverse mode = finite differences, or raise where they are not.

    Args:
        problem: the problem.
        hparams: where to check; not on a kink of the dynamics, where there is no gradient.
        directions: random directions for each hyperparameter leaf.
        tolerance: relative tolerance between forward and reverse; 10 times it against the
            differences. Default: 3 sqrt(eps) of the lowest precision in use, 1e-3 in float32
            and 4.5e-8 in float64.
        key: the random key of the directions.
        verbose: print each row as soon as it is known.

    Raises:
        HypergradientMismatch: with the table and the leaves that disagree.

    Rows whose differences are too noisy to tell (uncertainty over a tenth of the derivative's
    scale) are marked `unsure`: run the check in float64 (`jax_enable_x64`) to settle them. Matrix
    products run at the highest precision during the check.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> problem = ft.Problem(
    ...     dynamics=ft.Training(lambda w, h, x: (w - x) ** 2, lambda h: optax.sgd(h["lr"])),
    ...     objective=lambda state, h, x: (state.params - x) ** 2,
    ...     init=jnp.array(0.0), batches=ft.FullBatch(jnp.array(1.0), steps=3),
    ...     validation=jnp.array(1.0))
    >>> check = ft.check_hypergradient(problem, {"lr": jnp.array(0.1)}, verbose=False)
    >>> {row.verdict for row in check.rows}
    {'agree'}
    """
    check_steps(directions, f"directions={directions}")
    hparams = validated(problem, hparams)
    with jax.default_matmul_precision("highest"):
        rows = _rows(problem, hparams, directions, tolerance, key, verbose)
    check = HypergradientCheck(rows, _tolerance(problem, hparams, tolerance))
    wrong = {row.leaf: row.verdict for row in rows if row.verdict not in ("agree", "unsure")}
    if wrong:
        named = "; ".join(f"{leaf}: {verdict}" for leaf, verdict in wrong.items())
        raise HypergradientMismatch(f"the hypergradient is wrong. {named}\n{check}")
    return check


def _rows(problem, hparams, directions, tolerance, key, verbose) -> list[CheckRow]:
    value, grad, _ = Reverse()(problem, hparams)
    del value
    tolerance = _tolerance(problem, hparams, tolerance)
    names = list(named_leaves(hparams, "hparams"))
    width = max(len("leaf"), *map(len, names))
    if verbose:
        print(_header(width))
    rows = []
    key = jax.random.key(0) if key is None else key
    for i, name in enumerate(names):
        V = _directions(hparams, i, jax.random.fold_in(key, i), directions)
        forward = _forward(problem, hparams, V)[_row(problem, hparams, i)]
        for j in range(directions):
            v = jax.tree.map(lambda leaf, j=j: leaf[j], V)
            terms = np.asarray(jax.tree.leaves(grad)[i] * jax.tree.leaves(v)[i], np.float64)
            f = _line_function(problem, hparams, v, i)
            difference, uncertainty = ridders(f, np.finfo(_dtype(problem, hparams)).eps)
            row = _judge(name, forward[j], terms, difference, uncertainty, tolerance)
            if verbose:
                print(_line(row, width), flush=True)
            rows.append(row)
    return rows


def _judge(name, forward, terms, difference, uncertainty, tolerance) -> CheckRow:
    reverse = float(terms.sum())
    # The terms of v grad f may cancel; their norm is the size that rounding is relative to.
    scale = max(abs(reverse), float(np.linalg.norm(terms)), abs(float(forward)), 1e-300)
    slack = max(10 * tolerance * scale, 3 * uncertainty)
    if abs(forward - reverse) > tolerance * scale:
        verdict = "forward and reverse disagree"
    elif abs(reverse - difference) > slack:
        verdict = "differs from finite differences"
    elif uncertainty > 0.1 * scale:
        verdict = "unsure"
    else:
        verdict = "agree"
    return CheckRow(name, float(forward), reverse, difference, uncertainty, scale, verdict)


def ridders(f: Callable[[float], float], eps: float) -> tuple[float, float]:
    """Return f'(0) by extrapolated central differences, and an estimate of its error."""
    best, error, previous, h = np.nan, np.inf, [], FIRST_STEP
    for _ in range(LEVELS):
        high, low = f(h), f(-h)
        if np.isfinite(high) and np.isfinite(low):
            row = [(high - low) / (2 * h)]
            rounding = 4 * eps * max(abs(high), abs(low)) / h
            for k, coarse in enumerate(previous):
                row.append(row[k] + (row[k] - coarse) / (4.0 ** (k + 1) - 1))
                change = max(abs(row[k + 1] - row[k]), abs(row[k + 1] - coarse)) + rounding
                if change < error:
                    best, error = row[k + 1], change
            if previous and abs(row[-1] - previous[-1]) > 2 * error and error < np.inf:
                break
            previous = row
        h /= 2
    return float(best), float(error)


def _directions(hparams: PyTree, index: int, key: Any, count: int) -> PyTree:
    """Return random directions in one leaf, each entry a random sign times the entry's size."""
    leaves, treedef = jax.tree.flatten(hparams)
    zeros = [jnp.zeros((count, *leaf.shape), leaf.dtype) for leaf in leaves]
    leaf = leaves[index]
    typical = jnp.mean(jnp.abs(leaf))
    size = jnp.where(leaf == 0, jnp.where(typical == 0, 1.0, typical), jnp.abs(leaf))
    zeros[index] = jax.random.rademacher(key, (count, *leaf.shape), leaf.dtype) * size
    return jax.tree.unflatten(treedef, zeros)


@eqx.filter_jit
def _along(problem: Problem, hparams: PyTree, V: PyTree):
    return directional(problem.system(hparams), hparams, V)[1]


def _forward(problem: Problem, hparams: PyTree, V: PyTree) -> np.ndarray:
    return np.asarray(_along(problem, hparams, V), np.float64)


def _row(problem: Problem, hparams: PyTree, index: int) -> int:
    return problem.rows()[_owner(problem, hparams, index)]


def _owner(problem: Problem, hparams: PyTree, index: int) -> str | None:
    """Return the top-level name of a leaf where the objective is a dict, else None."""
    if not isinstance(problem.objective, dict):
        return None
    paths, _ = jax.tree_util.tree_flatten_with_path(hparams)
    return paths[index][0][0].key


def _line_function(problem, hparams, v, index) -> Callable[[float], float]:
    owner = _owner(problem, hparams, index)

    def f(h: float) -> float:
        moved = jax.tree.map(lambda leaf, d: leaf + jnp.asarray(h, leaf.dtype) * d, hparams, v)
        value, _ = problem.response(moved)
        return float(value if owner is None else value[owner])

    return f


def _dtype(problem: Problem, hparams: PyTree) -> Any:
    """Return the least precise floating type among hyperparameters and state."""
    state = eqx.filter_eval_shape(problem.start, hparams)
    leaves = [leaf for leaf in jax.tree.leaves((hparams, state)) if hasattr(leaf, "dtype")]
    floats = [leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return max(floats, key=lambda dtype: jnp.finfo(dtype).eps)


def _tolerance(problem: Problem, hparams: PyTree, given: float | None) -> float:
    return 3 * float(jnp.finfo(_dtype(problem, hparams)).eps) ** 0.5 if given is None else given


def _header(width: int) -> str:
    return f"{'leaf':<{width}}  {'forward':>13} {'reverse':>13} {'differences':>13} {'+/-':>8}"


def _line(row: CheckRow, width: int) -> str:
    return (
        f"{row.leaf:<{width}}  {row.forward:>13.6e} {row.reverse:>13.6e} {row.differences:>13.6e} "
        f"{row.uncertainty:>8.1e}  {row.verdict}"
    )

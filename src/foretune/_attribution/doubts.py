"""Where a derivative says nothing about leaving examples out, and a warning says so.

`warn_first` asks `foretune.trust` about the mean error of the queries as a function of the weights,
before any score is computed. `warn_of_size` costs nothing: scores whose sums are far beyond the errors
themselves come from a training that multiplies small changes.
"""

import warnings
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._diagnostics.slopes import TRUST
from .._diagnostics.trust import trust as report_trust
from .._diagnostics.verdicts import Trust
from .._problem.problem import Problem
from .queries import is_functions
from .weighted import HeldObjective

SCALE = 0.3  # a change of all weights by it, of random sign, is as long as leaving out a tenth
PART = 0.1  # of the examples, whose leaving out is judged by the size of the scores
BEYOND = 100  # times the mean error


class MeanObjective(eqx.Module):
    """The mean of several objectives."""

    objectives: list[Any]

    def __call__(self, state: Any, hparams: PyTree, validation: PyTree) -> Float[Array, ""]:
        errors = [objective(state, hparams, validation) for objective in self.objectives]
        return jnp.mean(jnp.stack(errors))


def warn_first(problem: Problem, weights: PyTree, queries: Any, engine: Any) -> None:
    """Warn where the mean error over the queries does not follow its gradient in the weights."""
    if is_functions(queries):
        held = [HeldObjective(objective, problem.dynamics.hparams) for objective in queries]
        problem = problem.replace(objective=MeanObjective(held))
    else:
        problem = problem.replace(validation=queries)
    report = report_trust(problem, weights, engine=engine, scale=SCALE, advice=False, verbose=False)
    if not report.ok:
        warnings.warn(_reason(report), RuntimeWarning, stacklevel=3)


def _reason(report: Trust) -> str:
    verdicts = ", ".join(f"{name}: {v}" for name, v in report.verdicts.items() if v != TRUST)
    why = f"; {report.growth}" if report.growth is not None and report.growth.factor >= 2 else ""
    return (
        f"scores may mislead: over a change of the weights as large as leaving out a tenth of the "
        f"examples, the mean error does not follow its derivative ({verdicts}{why}). Make the training "
        "smoother (docs/trust.md), and see what `Attribution.validate` says of the scores."
    )


def warn_of_size(scores: Float[np.ndarray, "K n"], errors: Float[np.ndarray, " K"]) -> None:
    """Warn where leaving out a random tenth is predicted to move errors far beyond their size."""
    variance = PART * (1 - PART) * np.sum(scores.astype(np.float64) ** 2, 1)
    moved, size = float(np.sqrt(variance.mean())), float(np.abs(errors).mean())
    if moved > BEYOND * size > 0:
        warnings.warn(
            f"the scores predict that errors of {size:.2g} in the mean move by {moved:.2g} where a "
            "random tenth of the examples is left out: the training multiplies small changes, and its "
            "derivatives say nothing about larger ones. `attribute(trust=True)` measures it, "
            "docs/trust.md has what makes a training smoother.",
            RuntimeWarning,
            stacklevel=3,
        )

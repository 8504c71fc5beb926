"""Where a derivative says nothing about leaving examples out, and a warning says so.

`warn_first` asks `foretune.trust` about the mean error of the queries as a function of the weights,
before any score is computed. `warn_of_size` costs nothing: scores whose sums are far beyond the errors
themselves come from a training that multiplies small changes.
"""

import warnings

import numpy as np
from jaxtyping import Float, PyTree

from .._diagnostics.slopes import TRUST
from .._diagnostics.trust import trust as report_trust
from .._diagnostics.verdicts import Trust
from .._engines.reverse import Reverse
from .._problem.problem import Problem
from .queries import Queries

SCALE = 0.3  # a change of all weights by it, of random sign, is as long as leaving out a tenth
PART = 0.1  # of the examples, whose leaving out is judged by the size of the scores
BEYOND = 100  # times the mean error


def warn_first(problem: Problem, weights: PyTree, queries: Queries, engine: Reverse) -> None:
    """Warn where the mean error over the queries does not follow its gradient in the weights."""
    problem = problem.replace(objective=queries.mean)
    report = report_trust(problem, weights, engine=engine, scale=SCALE, advice=False, verbose=False)
    if not report.ok:
        warnings.warn(_reason(report), RuntimeWarning, stacklevel=3)


def _reason(report: Trust) -> str:
    verdicts = ", ".join(f"{name}: {v}" for name, v in report.verdicts.items() if v != TRUST)
    grows = report.sensitivity is not None and report.sensitivity.factor >= 2
    why = f"; {report.sensitivity}" if grows else ""
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

"""Is a hypergradient useful? What it predicts, beside what happens over a step of tuning."""

import math
import warnings
from collections.abc import Iterator
from typing import cast

import jax
import numpy as np
from jaxtyping import Array, PyTree

from .._constraints.base import check_constraints, feasible
from .._engines.auto import Auto
from .._engines.base import AbstractEngine, check_engine
from .._engines.nonfinite import NonFiniteError, check_finite, is_finite
from .._engines.reverse import Reverse
from .._engines.robust import INNER, RobustMean
from .._engines.smoothing import Evolution, Smoothed
from .._engines.truncated import Truncated
from .._problem.batches import Minibatches
from .._problem.checks import check_count, check_hparams, check_key, check_outside_programs, shown
from .._problem.draws import Drawn, as_problem
from .._problem.mean import Mean
from .._problem.problem import Problem, ProblemLike, validated
from .sensitivity import sensitivity_of
from .slopes import DESCENT, MISLEADS, PAIRS, SIZE, TRUST, Slope, Study, points_of, random_probes
from .verdicts import Advice, Trust, radius_of, verdicts_of

SCALES = (0.1, 0.3, 1.0, 3.0)  # times `scale`
OTHERS = 4  # draws
WHAT = {  # the engines that are tried
    Evolution: "the slope over a neighbourhood, from values alone",
    Smoothed: "the gradient averaged over a neighbourhood",
    RobustMean: "the mean of the folds, of which those with long gradients hardly count",
}
POINTS = {TRUST: 1.0, SIZE: 0.5, MISLEADS: 0.0}  # of a direction, by which engines are compared
MOST_BY_VALUES = 40  # hyperparameters that differences of values are enough for
FOLDS = 3  # from which on some can be told from the others


def trust(
    problem: ProblemLike,
    hparams: PyTree,
    *,
    engine: AbstractEngine | None = None,
    scale: float = 0.1,
    constraints: PyTree = None,
    directions: int = 2,
    key: Array | None = None,
    advice: bool = True,
    verbose: bool = True,
) -> Trust:
    """Compare what a hypergradient predicts with what happens over a step of tuning.

    Trainings are run on both sides, at `scale` times 0.1, 0.3, 1 and 3, along random directions of each
    leaf and along the descent. A verdict is "trust" where, at all scales up to `scale`, the predicted
    change has the right sign, and size within a factor of 2; "size": only the sign; else "misleads".

    Args:
        problem: the problem, or a function `draw(key)` that returns it.
        hparams: where to look, usually the start of a descent.
        engine: how the hypergradient is computed; `Reverse()` by default.
        scale: the size of a step of tuning, relative to each hyperparameter (to its leaf's mean where
            it is 0, to 1 where the whole leaf is; an absolute change of log(x) under `Log`).
        constraints: as in `minimize`; the trainings stay inside.
        directions: random directions for each leaf of several numbers.
        key: the random key of the draw, and of the directions.
        advice: whether other engines are tried where the gradient cannot be trusted.
        verbose: print what it will cost, and the report.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> problem = ft.Problem(
    ...     ft.Training(lambda w, h, _: (w - 1) ** 2, lambda h: optax.sgd(h["lr"])),
    ...     lambda state, h, _: (state.params - 1) ** 2, jnp.array(0.0), ft.FullBatch(None, steps=3))
    >>> report = ft.trust(problem, {"lr": jnp.array(0.1)}, verbose=False)
    >>> report.ok, report.verdicts
    (True, {"hparams['lr']": 'trust', 'descent': 'trust'})
    """
    hparams = check_hparams(hparams)
    check_outside_programs("trust", problem if isinstance(problem, Problem) else None, hparams)
    check_engine(engine)
    engine = engine or Reverse()
    if not 0 < scale < math.inf:
        raise ValueError(f"trust(scale={scale!r:.60}): give a number above 0, 0.1 say.")
    check_count(directions, f"trust(directions={directions!r:.60})")
    if key is not None:
        check_key(key, "the key of trust")
    one, others = _draws(problem, key)
    key = jax.random.key(0) if key is None else key
    validated(one, hparams, smooth=engine.differentiates)
    constraints = check_constraints(constraints, hparams)
    hparams = feasible(constraints, hparams)
    probes = random_probes(one, hparams, directions, jax.random.fold_in(key, 2))
    points_of(constraints, hparams, probes, [SCALES[0] * scale])  # raises where one cannot move
    study = Study(one, hparams, constraints, float(scale), probes, key)
    if verbose:
        count = 2 * len(SCALES) * (len(probes) + 1) + 1 + 2 * PAIRS + len(others)
        more = "; where it cannot be trusted, some more for each engine that is tried" * advice
        cost = f"one hypergradient and about {count} trainings of {one.steps} steps"
        print(f"trust: {cost}, and their compilation{more}.", flush=True)
    report = _report(study, engine.within(constraints), others, advice)
    if verbose:
        print(report)
    return report


def _draws(problem: ProblemLike, key: Array | None) -> tuple[Problem, list[Problem]]:
    """Return the problem that is asked about, and some other draws of it."""
    first = jax.random.key(0) if key is None else key
    keys = jax.random.split(jax.random.fold_in(first, 1), OTHERS)
    if not isinstance(problem, Problem):
        drawn = cast(Drawn, as_problem(problem, key))
        one, *others = (cast(Problem, drawn.at(k).problem()) for k in (drawn.key, *keys))
        return one, others
    batches = problem.batches
    if not isinstance(batches, Minibatches) or batches.gather or batches.indices.ndim != 2:
        return problem, []
    return problem, [problem.replace(batches=batches.reshuffled(k)) for k in keys]


def _report(study: Study, engine: AbstractEngine, others: list[Problem], advise: bool) -> Trust:
    problem, hparams, scale = study.problem, study.hparams, study.scale
    nonfinite = ""
    try:
        value, grad, _ = engine(problem, hparams)
    except NonFiniteError as error:
        with check_finite(False):
            value, grad, _ = engine(problem, hparams)
        if not is_finite(value):
            raise
        nonfinite = str(error)
    scales = [round(factor * scale, 12) for factor in SCALES]
    around = study.around(scales)
    slopes = study.slopes(grad, around, scales)
    if nonfinite:  # it has no direction
        nan, noise = math.nan, float(around.noise[0])
        slopes += [Slope(DESCENT, x, nan, nan, noise) for x in scales]
    report = Trust(
        title=f"trust in {_shown(engine)} at {shown(hparams)}",
        slopes=slopes,
        scale=scale,
        verdicts=verdicts_of(slopes, scale),
        radius=radius_of(slopes, scale),
        value=float(sum(jax.tree.leaves(value))),
        sensitivity=sensitivity_of(problem, hparams, jax.random.fold_in(study.key, 4)),
        fresh=[float(study.here(other).sum()) for other in others],
        engine=engine,
        grad=grad,
        around=around,
        nonfinite=nonfinite,
        advice=[],
        trainings=0,
    )
    report.advice.extend(_about_fresh_runs(report))
    if not report.ok and advise:
        engines, best, grad = _tried_engines(study, report)
        report = report._replace(engine=best, grad=grad, advice=[*engines, *report.advice])
    return report._replace(trainings=study.trainings)


def _about_fresh_runs(report: Trust) -> Iterator[Advice]:
    """Yield advice that follows from how much the error varies between draws."""
    if not report.fresh:
        return
    step = max(abs(s.measured) for s in report.slopes if s.scale == report.scale)
    mean, deviation = np.mean(report.fresh), np.std(report.fresh, ddof=1)
    if lost := int(np.sum(~np.isfinite(report.fresh))):
        why = f"the error of {lost} of {len(report.fresh)} other runs is not finite"
        yield Advice("draws", why)
    remedy = "tune with draws, `minimize(draw, hparams, key=...)`, or `Mean.of_draws(draw, n)`"
    if report.value < mean - max(3 * deviation, step):
        why = f"the error of this run is {report.value:.4g}, of others {mean:.4g}: the "
        yield Advice("draws", f"{why}hyperparameters are fitted to it; {remedy}")
    elif deviation > step:
        why = f"other draws move the error by {deviation:.2g}, a step of tuning by {step:.2g}"
        yield Advice("draws", f"{why}: {remedy}")


def _tried_engines(study: Study, report: Trust) -> tuple[list[Advice], AbstractEngine, PyTree]:
    """Return engines for chaotic responses, tried on the same directions, the best, its gradient."""
    here = [POINTS[slope.verdict] for slope in report.slopes if slope.scale == study.scale]
    tried, best, best_grad, most = [], report.engine, report.grad, float(np.mean(here))
    for candidate in _candidates(study, report, report.engine):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # trainings that diverge
            try:
                _, grad, _ = candidate(study.problem, study.hparams)
            except NonFiniteError:
                continue
        radius = getattr(candidate, "radius", study.scale)
        slopes = study.slopes(grad, report.around, [radius])
        verdicts = verdicts_of(slopes, radius)
        tried.append(Advice(f"engine={_shown(candidate)}", WHAT[type(candidate)], verdicts))
        points = float(np.mean([POINTS[slope.verdict] for slope in slopes]))
        if points > most:
            best, best_grad, most = candidate, grad, points
            tried.insert(0, tried.pop())
        if tried[0].helps:
            break
    return tried, best, best_grad


def _candidates(study: Study, report: Trust, engine: AbstractEngine) -> Iterator[AbstractEngine]:
    """Yield engines: for folds of which only some are chaotic, then over ever larger neighbourhoods."""
    problem = study.problem
    if isinstance(problem, Mean) and problem.count >= FOLDS and isinstance(engine, INNER):
        yield RobustMean(engine)
    scales = sorted({s.scale for s in report.slopes if s.scale >= study.scale})
    noise = max(s.noise for s in report.slopes)
    clear = [s.scale for s in report.slopes if s.scale in scales and abs(s.measured) > 4 * noise]
    radius = min(clear, default=study.scale)
    m = sum(leaf.size for leaf in jax.tree.leaves(study.hparams))
    by_values = m <= MOST_BY_VALUES and not isinstance(engine, Evolution)

    def evolution(radius):
        order = 1 << (m - 1).bit_length()  # of the balanced signs that it draws
        samples = max(8, order * math.ceil(1.5 * m / order))
        chunk = min(study.beside, 2 * samples)
        return Evolution(radius, samples, chunk=chunk).within(study.constraints)

    if by_values:
        yield evolution(radius)
    if engine.differentiates and not isinstance(engine, Smoothed | Auto):
        yield Smoothed(engine, radius, 4).within(study.constraints)
    if by_values and radius < scales[-1]:  # waves as long as a step average out over a longer way
        yield evolution(scales[-1])


def _shown(engine: AbstractEngine) -> str:
    name = type(engine).__name__
    if isinstance(engine, RobustMean):
        return f"{name}({_shown(engine.engine)})"
    if not isinstance(engine, Smoothed | Evolution):
        return f"{name}({engine.steps})" if isinstance(engine, Truncated) else f"{name}()"
    inner = f"{_shown(engine.engine)}, " if isinstance(engine, Smoothed) else ""
    return f"{name}({inner}radius={engine.radius:g}, samples={engine.samples})"

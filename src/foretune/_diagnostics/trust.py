"""Is a hypergradient useful? What it predicts, beside what happens over a step of tuning.

`check_hypergradient` asks whether a gradient is exact, over changes as small as rounding allows. An
exact gradient may still mislead: where training multiplies small changes, the response is jagged, and
its slope at a point has nothing to do with that over a step. `trust` measures the latter.
"""

import contextlib
import math
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from .._constraints.base import check_constraints
from .._engines.auto import Auto
from .._engines.base import AbstractEngine, Hypergradient, check_engine
from .._engines.nonfinite import NonFiniteError, check_finite, is_finite
from .._engines.reverse import Reverse
from .._engines.robust import INNER, RobustMean
from .._engines.smoothing import Evolution, Smoothed
from .._engines.truncated import Truncated
from .._outer.update import feasible
from .._problem.checks import (
    check_count,
    check_hparams,
    check_key,
    check_outside_programs,
    describe,
    shown,
)
from .._problem.mean import Mean
from .._problem.problem import Problem, validated
from .remedies import remedies
from .sensitivity import ORDER, growth_of, low_precision, rounding_of, variants_of
from .slopes import (
    DESCENT,
    MISLEADS,
    PAIRS,
    SIZE,
    TRUST,
    Measured,
    Probe,
    Slope,
    Trainings,
    descent_probes,
    in_search,
    jitters,
    noise_of,
    points_of,
    random_probes,
)
from .verdicts import Advice, Trust, radius_of, verdicts_of

SCALES = (0.1, 0.3, 1.0, 3.0)  # times `scale`
FRESH = "fresh batches and starts"
VARIANTS = 4  # trainings for each change that should not matter
POINTS = {TRUST: 1.0, SIZE: 0.5, MISLEADS: 0.0}  # of a direction, by which engines are compared
FEW = 40  # hyperparameters that differences of values are enough for
FOLDS = 3  # from which on some can be told from the others


def trust(
    problem: Problem,
    hparams: PyTree,
    *,
    engine: Any = None,
    scale: Any = 0.1,
    constraints: PyTree = None,
    directions: Any = 2,
    key: Any = None,
    fresh: Any = None,
    advice: bool | str = True,
    chunk: Any = None,
    verbose: bool = True,
) -> Trust:
    """Compare what a hypergradient predicts with what happens over a step of tuning.

    For each hyperparameter leaf, along random directions and downhill, and for the descent direction
    of all together, trainings are run on both sides at `scale` times 0.1, 0.3, 1 and 3. A leaf's
    verdict is "trust" where the predicted change has the right sign, and the right size up to a factor
    of 2, at all scales up to `scale`; "size" where only the sign is right; else "misleads".

    Args:
        problem: the problem.
        hparams: where to look, usually the start of a descent.
        engine: how the hypergradient is computed; `Reverse()` by default.
        scale: the size of a step of tuning, relative to each hyperparameter (to its leaf's mean where
            it is 0, to 1 where the whole leaf is; an absolute change of log(x) under `Log`). The first
            steps of `minimize` with its default optimizer are 0.1.
        constraints: as in `minimize`; the trainings stay inside.
        directions: random directions for each leaf of several numbers.
        key: the random key of the directions.
        fresh: `fresh(key)` returns the problem with fresh batches and, if you like, another start:
            the error with these is reported. By default the same batches in other orders, and another
            key of the loss.
        advice: whether remedies are tried where the gradient cannot be trusted: engines and changes of
            the training (True), engines alone ("engine"), or none (False).
        chunk: how many trainings run side by side; by default as many as memory allows.
        verbose: print what it will cost, a progress bar (in a terminal or notebook), and the report.

    >>> import foretune as ft, jax.numpy as jnp, optax
    >>> problem = ft.Problem(
    ...     dynamics=ft.Training(lambda w, h, x: (w - x) ** 2, lambda h: optax.sgd(h["lr"])),
    ...     objective=lambda state, h, x: (state.params - x) ** 2,
    ...     init=jnp.array(0.0), batches=ft.FullBatch(jnp.array(1.0), steps=3),
    ...     validation=jnp.array(1.0))
    >>> report = ft.trust(problem, {"lr": jnp.array(0.1)}, verbose=False)
    >>> report.ok, report.verdicts
    (True, {"hparams['lr']": 'trust', 'descent': 'trust'})
    """
    hparams = check_hparams(hparams)
    check_outside_programs("trust", problem, hparams)
    engine = Reverse() if engine is None else engine
    check_engine(engine)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise ValueError(f"trust(scale={scale!r:.60}): give a number above 0, 0.1 say.")
    check_count(directions, f"trust(directions={directions!r:.60})")
    if chunk is not None:
        check_count(chunk, f"trust(chunk={chunk!r:.60})")
    if advice not in (True, False, "engine"):
        raise ValueError(f'trust(advice={advice!r:.60}): give True, False or "engine".')
    key = jax.random.key(0) if key is None else key
    check_key(key, "the key of trust")
    if fresh is not None and not callable(fresh):
        raise TypeError(f"trust(fresh={describe(fresh)}): give a function fresh(key) -> Problem.")
    validated(problem, hparams, smooth=engine.differentiates)
    constraints = check_constraints(constraints, hparams)
    hparams = feasible(constraints, hparams)
    engine = engine.within(constraints)
    others = _others(problem, fresh, jax.random.fold_in(key, 1))
    probes = random_probes(problem, hparams, directions, jax.random.fold_in(key, 2))
    points_of(constraints, hparams, probes, [SCALES[0] * scale])  # raises where one cannot move
    run = Trainings(chunk, lambda count: None)
    study = _Study(problem, hparams, constraints, float(scale), probes, key, run)
    if verbose:
        run.say = lambda text: print(text, flush=True)
    with _bar(verbose, study, others, advice) as run.progress:
        report = _report(study, engine, others, advice)
    if verbose:
        print(report)
    return report


class _Study(NamedTuple):
    """What a report is about."""

    problem: Problem
    hparams: PyTree
    constraints: PyTree
    scale: float
    probes: list[Probe]  # of random signs
    key: Any
    run: Trainings

    def around(self, problem: Problem, scales: list[float]) -> tuple[Measured, Any]:
        """Return what the error does along the random directions, and the errors in the middle."""
        near = jitters(self.constraints, self.hparams, self.scale, jax.random.fold_in(self.key, 3))
        middle, *values = self.run(problem, near)
        measured = self.measured(problem, self.probes, scales, np.zeros_like(middle))
        pairs = np.reshape(values, (2, PAIRS, -1))
        if scales[0] < 0.2 * self.scale:  # as near as those
            pairs = np.concatenate([pairs, measured.values[:, :: len(scales)]], 1)
        noise = noise_of(middle, pairs, jax.tree.leaves(self.hparams)[0].dtype)
        return measured._replace(noise=noise), middle

    def measured(
        self, problem: Problem, probes: list[Probe], scales: list[float], noise: Any
    ) -> Measured:
        """Return what the error does along some directions."""
        points = points_of(self.constraints, self.hparams, probes, scales)
        both = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), points.hparams)
        values = self.run(problem, both).reshape(2, len(probes) * len(scales), -1)
        return Measured(probes, scales, points, values, noise)

    def downhill(
        self, problem: Problem, grad: PyTree, scales: list[float], noise: Any
    ) -> list[Slope]:
        """Return what a gradient predicts in its own directions of descent, and what happens."""
        probes = descent_probes(problem, self.hparams, self.constraints, grad)
        if not probes:
            return []
        return self.measured(problem, probes, scales, noise).slopes(self.in_search(grad))

    def in_search(self, grad: PyTree) -> PyTree:
        """Return a gradient in the variable that is searched in."""
        return in_search(self.constraints, self.hparams, grad)


def _report(
    study: _Study, engine: AbstractEngine, others: dict[str, list[Problem]], advise: bool | str
) -> Trust:
    problem, hparams, scale = study.problem, study.hparams, study.scale
    (value, grad, _), nonfinite = _hypergradient(engine, problem, hparams)
    scales = [round(factor * scale, 12) for factor in SCALES]
    around, _ = study.around(problem, scales)
    slopes = around.slopes(study.in_search(grad))
    slopes += study.downhill(problem, grad, scales, around.noise)
    if nonfinite:  # it has no direction
        nan, noise = math.nan, float(around.noise[0])
        slopes += [Slope(DESCENT, x, nan, nan, noise, nan, nan) for x in scales]
    growth = growth_of(problem, hparams, jax.random.fold_in(study.key, 4))
    spread, fresh = {}, []
    for name, variants in others.items():
        found = [float(study.run.one(variant, hparams).sum()) for variant in variants]
        spread[name] = float(np.std(found, ddof=1))
        fresh += found
    if jax.default_backend() != "cpu":  # which computes in full precision anyway
        with jax.default_matmul_precision("highest"):
            precise = float(study.run.one(problem, hparams).sum())
        spread["precision of products"] = abs(precise - float(sum(jax.tree.leaves(value))))
    title = f"trust in {_shown(engine)} at {shown(hparams)}"
    report = Trust(
        title, slopes, scale, verdicts_of(slopes, scale), radius_of(slopes, scale),
        float(sum(jax.tree.leaves(value))), growth, spread, fresh, [], engine, grad, around, 0,
        nonfinite, None if nonfinite else rounding_of(engine, problem, hparams, grad),
    )  # fmt: skip
    advice = list(_about_noise(report))
    if not report.ok and advise:
        engines, best, grad = _tried_engines(study, report)
        advice = [*engines, *advice]
        if advise != "engine":
            advice += _tried_remedies(study, report, engine)
        report = report._replace(engine=best, grad=grad)
    return report._replace(advice=advice, trainings=study.run.count)


def _hypergradient(
    engine: AbstractEngine, problem: Problem, hparams: PyTree
) -> tuple[Hypergradient, str]:
    """Return the hypergradient, and why it is not finite, where only the gradient is not."""
    try:
        return engine(problem, hparams), ""
    except NonFiniteError as error:
        with check_finite(False):
            found = engine(problem, hparams)
        if not is_finite(found.value):
            raise
        return found, str(error)


def _about_noise(report: Trust) -> Iterator[Advice]:
    """Yield advice that follows from how much the error varies."""
    step = max(abs(s.measured) for s in report.slopes if s.scale == report.scale)
    if not report.fresh:
        return
    mean, deviation = np.mean(report.fresh), np.std(report.fresh, ddof=1)
    if report.value < mean - max(3 * deviation, step):
        yield Advice(
            "fresh batches",
            f"the error of this run is {report.value:.4g}, of others {mean:.4g}: the hyperparameters "
            'are fitted to its batches; let `minimize` draw new ones at each step, `batches="fresh"`',
        )
    elif deviation > step:
        yield Advice(
            "fresh batches",
            f"other batches move the error by {deviation:.2g}, a step of tuning by {step:.2g}: let "
            '`minimize` draw new ones at each step, `batches="fresh"`, or tune the mean over several '
            "runs, `CrossValidated`",
        )


def _tried_remedies(study: _Study, report: Trust, engine: AbstractEngine) -> Iterator[Advice]:
    """Yield what changes of the training do to the verdicts, up to the first that helps."""
    step = max(abs(s.measured) for s in report.slopes if s.scale == study.scale)
    noisy = max(report.spread.get(name, 0.0) for name in (ORDER, FRESH)) > step
    low = low_precision(study.problem, study.hparams)
    for remedy in remedies(study.problem, study.hparams, report.growth, noisy, low):
        study.run.say(f"trying {remedy.name}: {remedy.how}")
        with remedy.context():
            try:
                _, grad, _ = engine(remedy.problem, study.hparams)
            except NonFiniteError:
                yield Advice(remedy.name, remedy.how, dict.fromkeys(report.verdicts, MISLEADS))
                continue
            around, value = study.around(remedy.problem, [study.scale])
            slopes = around.slopes(study.in_search(grad))
            slopes += study.downhill(remedy.problem, grad, [study.scale], around.noise)
        verdicts = verdicts_of(slopes, study.scale)
        advice = Advice(remedy.name, remedy.how, verdicts, float(value.sum()))
        yield advice
        if advice.helps:
            return


def _tried_engines(study: _Study, report: Trust) -> tuple[list[Advice], AbstractEngine, PyTree]:
    """Return engines for rough responses, tried on the same directions, the best, and its gradient."""
    here = [POINTS[slope.verdict] for slope in report.slopes if slope.scale == study.scale]
    tried, best, best_grad, most = [], report.engine, report.grad, float(np.mean(here))
    for candidate in _candidates(study, report, report.engine):
        study.run.say(f"trying {_shown(candidate)}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # trainings that diverge
            try:
                _, grad, _ = candidate(study.problem, study.hparams)
            except NonFiniteError:
                continue
        radius = getattr(candidate, "radius", study.scale)
        slopes = [s for s in report.around.slopes(study.in_search(grad)) if s.scale == radius]
        slopes += study.downhill(study.problem, grad, [radius], report.around.noise)
        verdicts = verdicts_of(slopes, radius)
        tried.append(Advice(f"engine={_shown(candidate)}", _WHAT[type(candidate)], verdicts))
        points = float(np.mean([POINTS[slope.verdict] for slope in slopes]))
        if points > most:
            best, best_grad, most = candidate, grad, points
            tried.insert(0, tried.pop())
        if tried[0].helps:
            break
    return tried, best, best_grad


_WHAT = {
    Evolution: "the slope over a neighbourhood, from values alone",
    Smoothed: "the gradient averaged over a neighbourhood",
    RobustMean: "the mean of the folds, of which those with long gradients hardly count",
}


def _candidates(study: _Study, report: Trust, engine: AbstractEngine) -> Iterator[Any]:
    """Yield engines for what may be rough, first for folds of which only some are.

    The others are over a neighbourhood in which changes can be told from noise, or a larger one.
    """
    problem = study.problem
    if isinstance(problem, Mean) and problem.count >= FOLDS and isinstance(engine, INNER):
        yield RobustMean(engine)
    scales = sorted({s.scale for s in report.slopes if s.scale >= study.scale})
    seen = {
        scale: max(abs(s.measured) for s in report.slopes if s.scale == scale) for scale in scales
    }
    noise = max(s.noise for s in report.slopes)
    radius = next((scale for scale in scales if seen[scale] > 4 * noise), study.scale)
    m = sum(leaf.size for leaf in jax.tree.leaves(study.hparams))
    by_values = m <= FEW and not isinstance(engine, Evolution)

    def evolution(radius):
        order = 1 << (m - 1).bit_length()  # of the balanced signs that it draws
        samples = max(8, order * math.ceil(1.5 * m / order))
        chunk = study.run.beside(study.problem, study.hparams)
        return Evolution(radius, samples, chunk=min(chunk, 2 * samples)).within(study.constraints)

    if by_values:
        yield evolution(radius)
    if engine.differentiates and not isinstance(engine, Smoothed | Auto):
        yield Smoothed(engine, radius, 4).within(study.constraints)
    if by_values and radius < scales[-1]:  # waves as long as a step average out over a longer way
        yield evolution(scales[-1])


def _shown(engine: Any) -> str:
    name = type(engine).__name__
    if isinstance(engine, RobustMean):
        return f"{name}({_shown(engine.engine)})"
    if not isinstance(engine, Smoothed | Evolution):
        return f"{name}({engine.steps})" if isinstance(engine, Truncated) else f"{name}()"
    inner = f"{_shown(engine.engine)}, " if isinstance(engine, Smoothed) else ""
    return f"{name}({inner}radius={engine.radius:g}, samples={engine.samples})"


def _others(problem: Problem, fresh: Any, key: Any) -> dict[str, list[Problem]]:
    """Return problems that should give about the same error, by what differs."""
    if fresh is None:
        return dict(variants_of(problem, VARIANTS, key))
    problems = [fresh(k) for k in jax.random.split(key, VARIANTS)]
    for other in problems:
        if not isinstance(other, Problem):
            raise TypeError(
                f"trust's fresh(key) returns {describe(other)}; a `foretune.Problem` is expected, "
                "`lambda key: problem.replace(batches=...)` say."
            )
    return {FRESH: problems}


@contextlib.contextmanager
def _bar(verbose: bool, study: _Study, others: dict[str, Any], advise: Any) -> Iterator[Any]:
    """Say what it will cost, then show a bar of trainings."""
    if not verbose:
        yield lambda count: None
        return
    from rich import get_console, progress

    leaves = jax.tree.leaves(study.hparams)
    downhill = 1 + sum(leaf.size > 1 for leaf in leaves) * (len(leaves) > 1)
    points = 2 * len(SCALES) * (len(study.probes) + downhill) + 1 + 2 * PAIRS
    points += sum(len(problems) for problems in others.values())
    more = ""
    if advise:
        more = (
            "; where it cannot be trusted, up to as many again for each remedy that is tried "
            "(`advice=False` tries none)"
        )
    cost = f"one hypergradient and {points} trainings of {study.problem.steps} steps"
    print(f"trust: {cost}, and their compilation{more}.", flush=True)
    shown = sys.stdout.isatty() or get_console().is_jupyter
    with progress.Progress(disable=not shown) as bar:
        task = bar.add_task("trainings", total=points)

        def done(count: int) -> None:
            finished = bar.tasks[task].completed + count
            bar.update(task, completed=finished, total=max(points, finished))

        yield done

"""The report of `trust`: a verdict for each leaf, and how it reads."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import PyTree

from .._engines.base import AbstractEngine
from .sensitivity import Sensitivity
from .slopes import TRUST, Measured, Slope, judged, worst


class Advice(NamedTuple):
    """Something that was tried, or should be, and what came of it."""

    name: str
    how: str
    verdicts: dict[str, str] | None = None  # those with it; None where it was not tried

    @property
    def helps(self) -> bool:
        """Whether all verdicts are "trust" then, or it could not be tried."""
        return self.verdicts is None or set(self.verdicts.values()) <= {TRUST}

    def __str__(self) -> str:
        text = f"{self.name}: {self.how}"
        if self.verdicts is None:
            return text
        good = sum(verdict == TRUST for verdict in self.verdicts.values())
        return f"{text}; then trust in {good} of {len(self.verdicts)}"


class Trust(NamedTuple):
    """The report of `trust`; prints as a table."""

    title: str
    slopes: list[Slope]
    """Predicted and measured change for each direction and scale."""
    scale: float
    verdicts: dict[str, str]
    """By leaf, and for the descent: "trust"; "size", where only the sign is right; or "misleads"."""
    radius: dict[str, float]
    """By leaf: the largest scale up to which sign and size hold, 0 where there is none."""
    value: float
    """The error at the hyperparameters (the sum of them, where there are several)."""
    sensitivity: Sensitivity | None
    """To a small change of the weights; None where a step has no forward mode."""
    fresh: list[float]
    """The error in other draws."""
    engine: AbstractEngine
    """The engine to use, with its gradient: the one given, or a better one that was tried."""
    grad: PyTree
    around: Measured
    """The errors along the random directions, by which other gradients can be judged."""
    nonfinite: str
    """Why the gradient is not finite, where the error is; else empty."""
    advice: list[Advice]
    """What helps, and what was tried and does not."""
    trainings: int
    """How many trainings it took, besides hypergradients."""

    @property
    def ok(self) -> bool:
        """Whether the gradient can be trusted in all leaves and along the descent."""
        return set(self.verdicts.values()) <= {TRUST}

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    __repr__ = __str__


def verdicts_of(slopes: list[Slope], scale: float) -> dict[str, str]:
    """Return, for each leaf, the worst verdict up to the scale."""
    return {
        leaf: worst(verdict for s, verdict in found.items() if s <= scale * (1 + 1e-6))
        for leaf, found in _judgements(slopes, scale).items()
    }


def radius_of(slopes: list[Slope], at: float) -> dict[str, float]:
    """Return, for each leaf, the largest scale up to which it can be trusted."""
    radius = {}
    for leaf, found in _judgements(slopes, at).items():
        trusted = itertools.takewhile(lambda item: item[1] == TRUST, found.items())
        radius[leaf] = max(dict(trusted), default=0.0)
    return radius


def _judgements(slopes: list[Slope], at: float) -> dict[str, dict[float, str]]:
    """Return the verdict by leaf and scale, the smallest scale first."""
    rows: dict[str, dict[float, list[Slope]]] = {slope.leaf: {} for slope in slopes}
    for slope in sorted(slopes, key=lambda slope: slope.scale):
        rows[slope.leaf].setdefault(slope.scale, []).append(slope)
    return {leaf: {s: judged(row, at) for s, row in each.items()} for leaf, each in rows.items()}


def _telling(report: Trust, leaf: str) -> Slope:
    """Return the direction and scale that decide a verdict: the largest scale that has it."""
    verdict, found = report.verdicts[leaf], _judgements(report.slopes, report.scale)[leaf]
    scale = max(s for s in found if s <= report.scale * (1 + 1e-6) and found[s] == verdict)
    rows = [slope for slope in report.slopes if (slope.leaf, slope.scale) == (leaf, scale)]
    return max(rows, key=lambda s: (s.verdict == verdict, abs(s.measured)))


def _lines(report: Trust) -> Iterator[str]:
    yield f"{report.title}: {'ok' if report.ok else 'not ok'}"
    width = max(len(leaf) for leaf in report.verdicts)
    heads = f"{'change by':>9} {'predicted':>10} {'measured':>10} {'noise':>8} {'radius':>7}"
    yield f"{'':<{width}} {heads}  verdict"
    for leaf, verdict in report.verdicts.items():
        s = _telling(report, leaf)
        numbers = f"{s.scale:>9.3g} {s.predicted:>10.3g} {s.measured:>10.3g} {s.noise:>8.1g}"
        yield f"{leaf:<{width}} {numbers} {report.radius[leaf]:>7.3g}  {verdict}"
    if report.nonfinite:
        yield report.nonfinite
    if report.sensitivity is not None:
        yield str(report.sensitivity)
    if report.fresh:
        runs = f"{np.mean(report.fresh):.4g} +- {np.std(report.fresh, ddof=1):.2g}"
        yield f"error {report.value:.4g} here, {runs} in {len(report.fresh)} other runs"
    for advice in sorted(report.advice, key=lambda advice: not advice.helps):
        yield f"{'advice' if advice.helps else 'tried'}: {advice}"

"""The report of `trust`: a verdict for each leaf, how it reads and how it is drawn."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import PyTree

from .._engines.base import AbstractEngine
from .sensitivity import Rounding, Sensitivity
from .slopes import MISLEADS, SIZE, TRUST, Measured, Slope, judged

if TYPE_CHECKING:
    from matplotlib.axes import Axes


COLOURS = {"trust": "#2f855a", "size": "#b7791f", "misleads": "#c53030"}


class Advice(NamedTuple):
    """Something that was tried, or should be, and what came of it."""

    name: str
    how: str
    verdicts: dict[str, str] | None = None
    """Those with it; None where it was not tried."""
    value: float | None = None
    """The error with it, at the same hyperparameters."""

    @property
    def helps(self) -> bool:
        """Whether all verdicts are "trust" then, or it could not be tried."""
        return self.verdicts is None or set(self.verdicts.values()) <= {TRUST}

    def __str__(self) -> str:
        text = f"{self.name}: {self.how}"
        if self.verdicts is None:
            return text
        good = sum(verdict == TRUST for verdict in self.verdicts.values())
        text += f"; then trust in {good} of {len(self.verdicts)}"
        return text + (f", error {self.value:.4g}" if self.value is not None else "")


class Trust(NamedTuple):
    """The report of `trust`; prints as a table, `plot()` draws it.

    `ok` and `verdicts` (by leaf) are what it comes to, `radius` (by leaf) how far the gradient holds,
    `advice` and `engine` (with its gradient, `grad`) what to do.
    """

    title: str
    slopes: list[Slope]
    """Predicted and measured change for each direction and scale."""
    scale: float
    verdicts: dict[str, str]
    """By leaf, and for the direction of descent: "trust"; "size", where the sign is right and the size
    is not; or "misleads"."""
    radius: dict[str, float]
    """By leaf: the largest scale up to which sign and size hold, 0 where there is none."""
    value: float
    """The error at the hyperparameters (the sum of them, where there are several)."""
    sensitivity: Sensitivity | None
    """What becomes of a small change of the weights; None where a step has no forward mode."""
    fresh: list[float]
    """The error in other draws: with other minibatches, starts or data."""
    engine: AbstractEngine
    """The engine to use: the one given where it can be trusted, else the best that was tried."""
    grad: PyTree
    """Its gradient."""
    around: Measured
    """The errors along the random directions: `around.slopes(gradient)` judges another gradient, of
    the unconstrained variable, by the same trainings."""
    nonfinite: str
    """Why the gradient is not finite, where the error is; else empty."""
    rounding: Rounding | None
    """What a loss in bfloat16 or float16 does to the gradient, where it is computed in one."""
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

    def plot(self, axes: "Sequence[Axes] | None" = None) -> "Sequence[Axes]":
        """Draw the error along the first direction of each leaf, and what the gradient predicts.

        The last picture is how a small change of the weights grows in training. `axes` are one for
        each leaf, and one for the sensitivity; by default new ones. Returns the axes.
        """
        return _plot(self, axes)


def verdicts_of(slopes: list[Slope], scale: float) -> dict[str, str]:
    """Return, for each leaf, the worst verdict up to the scale."""
    worst: dict[str, str] = {}
    for leaf, by_scale in _by_leaf(slopes).items():
        found = [judged(rows, scale) for s, rows in by_scale.items() if s <= scale * (1 + 1e-6)]
        worst[leaf] = max(found, key=[TRUST, SIZE, MISLEADS].index)
    return worst


def radius_of(slopes: list[Slope], at: float) -> dict[str, float]:
    """Return, for each leaf, the largest scale up to which it can be trusted."""
    radius: dict[str, float] = {}
    for leaf, by_scale in _by_leaf(slopes).items():
        radius[leaf] = 0.0
        for scale in sorted(by_scale):
            if judged(by_scale[scale], at) != TRUST:
                break
            radius[leaf] = scale
    return radius


def _by_leaf(slopes: list[Slope]) -> dict[str, dict[float, list[Slope]]]:
    found: dict[str, dict[float, list[Slope]]] = {}
    for slope in slopes:
        found.setdefault(slope.leaf, {}).setdefault(slope.scale, []).append(slope)
    return found


def _telling(report: Trust, leaf: str) -> Slope:
    """Return the direction and scale that decide a verdict: the largest scale that has it."""
    by_scale = _by_leaf(report.slopes)[leaf]
    scales = sorted(s for s in by_scale if s <= report.scale * (1 + 1e-6))
    verdict = report.verdicts[leaf]
    chosen = [s for s in scales if judged(by_scale[s], report.scale) == verdict][-1]
    return max(by_scale[chosen], key=lambda s: (s.verdict == verdict, abs(s.measured)))


def _lines(report: Trust) -> Iterator[str]:
    yield f"{report.title}: {'ok' if report.ok else 'not ok'}"
    width = max(len(leaf) for leaf in report.verdicts)
    heads = f"{'change by':>9} {'predicted':>10} {'measured':>10} {'noise':>8} {'radius':>7}"
    yield f"{'':<{width}} {heads}  verdict"
    for leaf, verdict in report.verdicts.items():
        row = _telling(report, leaf)
        numbers = f"{row.predicted:>10.3g} {row.measured:>10.3g} {row.noise:>8.1g}"
        yield (
            f"{leaf:<{width}} {row.scale:>9.3g} {numbers} {report.radius[leaf]:>7.3g}  {verdict}"
        )
    if report.nonfinite:
        yield report.nonfinite
    yield from (str(part) for part in (report.sensitivity, report.rounding) if part is not None)
    if report.fresh:
        runs = f"{np.mean(report.fresh):.4g} +- {np.std(report.fresh, ddof=1):.2g}"
        yield f"error {report.value:.4g} here, {runs} in {len(report.fresh)} other runs"
    helps = [advice for advice in report.advice if advice.helps]
    yield from (f"advice: {advice}" for advice in helps)
    yield from (f"tried: {advice}" for advice in report.advice if not advice.helps)


def _plot(report: Trust, axes: "Sequence[Axes] | None" = None) -> "Sequence[Axes]":
    import matplotlib.pyplot as plt

    leaves = list(report.verdicts)
    count = len(leaves) + (report.sensitivity is not None)
    if axes is None:
        columns = min(count, 3)
        rows = -(-count // columns)
        figure, grid = plt.subplots(
            rows, columns, figsize=(3.6 * columns, 2.9 * rows), squeeze=False, layout="constrained"
        )
        for spare in grid.flat[count:]:
            figure.delaxes(spare)
        axes = list(grid.flat[:count])
    if len(axes) != count:
        raise ValueError(
            f"the plot needs {count} axes: one for each of {leaves}, and one for the sensitivity "
            f"where it is known; got {len(axes)}."
        )
    for ax, leaf in zip(axes, leaves, strict=False):
        _draw_leaf(ax, report, leaf)
    if report.sensitivity is not None:
        norms, ax = report.sensitivity.norms, axes[-1]
        ax.semilogy(np.arange(1, len(norms) + 1), norms, color="#2b6cb0")
        ax.axhline(1, color="grey", linewidth=0.6)
        ax.set(title="sensitivity to a small change", xlabel="step of training")
    return axes


def _draw_leaf(ax: "Axes", report: Trust, leaf: str) -> None:
    per_scale: dict[float, Slope] = {}
    for slope in report.slopes:
        if slope.leaf == leaf:
            per_scale.setdefault(slope.scale, slope)  # the first direction
    rows = [per_scale[scale] for scale in sorted(per_scale)]
    x = [-row.scale for row in rows[::-1]] + [0.0] + [row.scale for row in rows]
    y = [row.low for row in rows[::-1]] + [report.value] + [row.high for row in rows]
    ax.plot(x, y, "o-", color="#2b6cb0", markersize=3, linewidth=1, label="measured")
    ends = np.array([-rows[-1].scale, rows[-1].scale])
    slope = rows[0].predicted / rows[0].scale
    colour = COLOURS[report.verdicts[leaf]]
    low, high = np.nanmin(y), np.nanmax(y)
    room = max(high - low, 1e-12)
    ax.plot(ends, report.value + slope * ends, "--", color=colour, label="predicted")
    ax.axvspan(-report.scale, report.scale, color="grey", alpha=0.12, linewidth=0)
    ax.set_ylim(low - 0.3 * room, high + 0.3 * room)
    ax.set(title=f"{leaf}: {report.verdicts[leaf]}", xlabel="relative change", ylabel="error")
    ax.legend(frameon=False, fontsize=8)

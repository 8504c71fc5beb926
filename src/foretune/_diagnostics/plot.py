"""The drawing of a trust report."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .slopes import Slope
from .verdicts import Trust

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"trust": "#2f855a", "size": "#b7791f", "misleads": "#c53030"}


def plot_trust(report: Trust, axes: "Sequence[Axes] | None" = None) -> "Sequence[Axes]":
    """Draw the error along the first direction of each leaf, and what the gradient predicts.

    The last picture is how a small change of the weights grows in training. `axes` are one for each
    leaf, and one for the sensitivity; by default new ones, which are returned.
    """
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

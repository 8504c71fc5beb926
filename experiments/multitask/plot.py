"""A drawing of the graph of classes: nodes on a circle, edges the wider the stronger."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes


def plot_task_graph(
    graph: np.ndarray, names: Sequence[str], axes: Axes, *, edges: int | None = None
) -> None:
    """Draw classes as nodes and the strongest of their interactions as edges.

    Args:
        graph: the symmetric matrix C.
        names: the classes' names.
        axes: what is drawn on.
        edges: the number of edges to draw; by default twice the number of classes.
    """
    K, colour = len(graph), "#2b7bba"
    if graph.shape != (K, K) or not np.allclose(graph, graph.T) or len(names) != K:
        raise ValueError(f"{len(names)} names, and a graph of shape {graph.shape}: not symmetric.")
    angle = 2 * np.pi * np.arange(K) / K
    x, y = np.cos(angle), np.sin(angle)
    i, j = np.triu_indices(K, 1)
    strength = graph[i, j]
    for e in np.argsort(-strength, kind="stable")[: 2 * K if edges is None else edges]:
        if strength[e] > 0:
            ends, width = [i[e], j[e]], 5 * strength[e] / strength.max()
            axes.plot(x[ends], y[ends], color=colour, alpha=0.6, linewidth=width)
    axes.scatter(x, y, s=60, color=colour, zorder=2)
    for k, name in enumerate(names):
        axes.annotate(str(name), (1.1 * x[k], 1.1 * y[k]), ha="center", va="center", fontsize=9)
    axes.margins(0.15)
    axes.set_axis_off()

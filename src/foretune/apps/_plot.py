"""A drawing of the graph of classes."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def plot_task_graph(
    graph: Any,
    names: Sequence[str] | None = None,
    *,
    edges: int | None = None,
    ax: Any = None,
    colour: str = "#2b6cb0",
) -> Any:
    """Draw classes as nodes and their interactions as edges, the wider the stronger.

    Args:
        graph: a fitted `TaskGraphClassifier`, or a symmetric matrix C.
        names: the classes' names; by default the estimator's classes.
        edges: the number of edges to draw, the strongest; by default twice the number of classes.
        ax: Matplotlib axes to draw on; by default new ones.
        colour: of the edges.

    Returns the axes.

    >>> from foretune.apps import plot_task_graph
    >>> axes = plot_task_graph([[0, 2, 0], [2, 0, 1], [0, 1, 0]], ["cat", "dog", "car"])
    >>> sorted(text.get_text() for text in axes.texts)
    ['car', 'cat', 'dog']
    """
    import matplotlib.pyplot as plt
    import networkx as nx

    if hasattr(graph, "fit") and not hasattr(graph, "task_graph_"):
        raise ValueError(
            "plot_task_graph takes a fitted TaskGraphClassifier or a matrix; this "
            f"{type(graph).__name__} has no task_graph_. Fit it first; of a pipeline give the last "
            "step, `pipeline[-1]`."
        )
    C = np.asarray(getattr(graph, "task_graph_", graph), np.float64)
    if C.ndim != 2 or C.shape[0] != C.shape[1]:
        raise ValueError(f"the graph must be a square matrix; got shape {C.shape}.")
    if not np.allclose(C, C.T):
        raise ValueError("the graph must be a symmetric matrix, C_jk = C_kj.")
    if edges is not None and edges < 1:
        raise ValueError(f"edges={edges}: draw one or more.")
    K = len(C)
    given: Any = getattr(graph, "classes_", range(K)) if names is None else names
    shown = [str(name) for name in given]
    if len(shown) != K:
        raise ValueError(f"{len(shown)} names for a graph of {K} classes.")
    net = nx.Graph()
    net.add_nodes_from(range(K))
    i, j = np.triu_indices(K, 1)
    strength = C[i, j]
    order = np.argsort(-strength, kind="stable")[: 2 * K if edges is None else edges]
    strongest = max(float(strength.max(initial=0.0)), 1e-300)
    for e in order:
        if strength[e] > 0:
            net.add_edge(int(i[e]), int(j[e]), weight=float(strength[e] / strongest))
    if ax is None:
        _, ax = plt.subplots(figsize=(7, 7))
    place = nx.circular_layout(net)
    if net.number_of_edges():
        place = nx.spring_layout(net, pos=place, weight="weight", k=1.8 / np.sqrt(K), seed=0)
    widths = [5 * net.edges[e]["weight"] for e in net.edges]
    nx.draw_networkx_edges(net, place, ax=ax, width=widths, edge_color=colour, alpha=0.6)
    nx.draw_networkx_nodes(net, place, ax=ax, node_color=colour, node_size=60)
    nx.draw_networkx_labels(
        net,
        {k: (x, y + 0.035) for k, (x, y) in place.items()},
        dict(enumerate(shown)),
        ax=ax,
        font_size=9,
        font_color=plt.rcParams["text.color"],
        verticalalignment="bottom",
    )
    ax.margins(0.15)
    ax.set_axis_off()
    return ax

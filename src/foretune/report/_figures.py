"""Figures for a run's page: curves and histograms as SVG, pictures as PNG.

An SVG keeps its text as text, in the reader's font, and has no background: in dark mode the page puts
a light card behind it. The same data give the same bytes.
"""

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from .._files.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:  # which takes long to import
    Axes = Figure = object

Curve = Mapping[str, Any]  # a panel of `curves`, or a line of it
_INK = "#1d1c1a"
# With a contrast of 3 or more on white. The colour-blind can tell the first four apart; lines of the
# others are dashed.
_COLOURS = ("#2b7bba", "#d55e00", "#00936b", "#b8609a", "#947a00", "#7d7d85")
_STYLE = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "grid.color"), _INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), _INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.7},
    **{"axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.14, "grid.linewidth": 0.7},
    **{"font.family": "sans-serif", "font.size": 9, "axes.titlesize": 10, "axes.titlepad": 9},
    **{"axes.titlelocation": "left", "axes.titleweight": "bold", "legend.frameon": False},
    "figure.constrained_layout.h_pad": 0.1,
    "text.parse_math": False,  # a $ in a label is a $
    "svg.fonttype": "none",
}
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def curves(
    path: Path,
    panels: Sequence[Curve],
    *,
    xlabel: str,
    scale: Callable[[Axes], object] | None = None,
) -> Path:
    """Draw panels of lines, two to a row, into an SVG file, and return its path.

    A panel has a "title", a "ylabel", "lines", and perhaps an "xlabel" of its own; a line a "label",
    "x", "y" (NaN is a gap), and perhaps a "band", a pair (low, high). `scale` changes the axes' scales.
    """
    labels = [[_label(line["label"]) for line in panel["lines"]] for panel in panels]
    shared = all(names == labels[0] for names in labels)
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)

    def draw(figure: Figure) -> None:
        for i, panel in enumerate(panels):
            axes = figure.add_subplot(rows, columns, i + 1)
            along = panel.get("xlabel", xlabel)
            axes.set(title=panel["title"], ylabel=panel["ylabel"], xlabel=along)
            handles, whole = [], True
            for k, line in enumerate(panel["lines"]):
                x, y = (np.asarray(line[name], float) for name in "xy")
                y, whole = np.where(np.isfinite(y), y, np.nan), whole and np.all(x == np.round(x))
                colour = _COLOURS[k % len(_COLOURS)]
                dash = ("-", "--", ":", "-.")[k // 4 % 4]
                dot = "o" if scale or np.isfinite(y).sum() == 1 else None
                handles += axes.plot(x, y, dash, color=colour, lw=1.6, marker=dot, ms=4)
                if (band := line.get("band")) is not None:
                    low, high = (np.asarray(edge, float) for edge in band)
                    axes.fill_between(x, low, high, color=colour, alpha=0.18, lw=0)
            if scale is not None:
                scale(axes)
            elif whole:
                axes.xaxis.get_major_locator().set_params(integer=True)  # pyright: ignore
            # Beside the lines a legend would hide some of them sooner or later: it goes below.
            if not shared and any(labels[i]):
                place = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.2)}
                axes.legend(handles, labels[i], ncols=_ncols(labels[i], 46), **place)
            elif i == 0 and any(labels[0]):
                ncols = _ncols(labels[0], 46 * columns)
                figure.legend(handles, labels[0], ncols=ncols, loc="outside lower left")

    return save_svg(path, (4.7 * columns, 3.1 * rows + 0.3), draw)


def histogram(path: Path, groups: Mapping[str, ArrayLike], *, xlabel: str, bins: int = 40) -> Path:
    """Draw a stacked histogram of the finite values of each group into an SVG; return its path.

    The axis of the counts is logarithmic when they differ by more than a factor of 100.
    """
    from matplotlib.patches import Patch

    values = [np.asarray(group, float).ravel() for group in groups.values()]
    finite = [x[np.isfinite(x)] for x in values]
    counts, edges = np.histogram(np.concatenate(finite), bins)
    log = bool(counts.max() > 100 * counts[counts > 0].min())

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.set(xlabel=xlabel, ylabel="count (log scale)" if log else "count")
        axes.grid(visible=False, axis="x")
        colours = [_COLOURS[k % len(_COLOURS)] for k in range(len(groups))]
        axes.hist(finite, edges.tolist(), stacked=True, color=colours, log=log, rwidth=0.92)
        if log:
            axes.set_ylim(bottom=0.7)  # a bin of one stays visible
            axes.yaxis.set_major_formatter(lambda count, _: f"{count:,.0f}")
        handles, names = [Patch(color=colour) for colour in colours], [*map(_label, groups)]
        if any(names):
            figure.legend(handles, names, ncols=_ncols(names, 54), loc="outside lower left")

    return save_svg(path, (5.4, 3.1), draw)


def picture(path: Path, pixels: ArrayLike) -> Path:
    """Write an image as a PNG file, enlarged to 84 pixels or more, and return its path.

    Pixels are height x width for grey, or height x width x 1, 3 (RGB) or 4 (RGBA). uint8 and floats in
    [0, 1] are taken as they are; all else is scaled from its minimum (black) to its maximum (white).
    """
    from matplotlib.image import imsave

    x = np.asarray(pixels)
    if x.ndim == 2:
        x = x[..., None]
    if x.ndim != 3 or x.shape[2] not in (1, 3, 4) or 0 in x.shape:
        raise ValueError(f"pixels of shape {np.shape(pixels)}: give height x width (x 1, 3 or 4).")
    if x.dtype != np.uint8:
        x = x.astype(float)
        finite = x[np.isfinite(x)]
        low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
        if low < 0 or high > 1:
            x = (x - low) / (high - low or 1)
        x = np.round(255 * np.nan_to_num(x, posinf=0.0, neginf=0.0).clip(0, 1)).astype(np.uint8)
    factor, file = -(-84 // max(x.shape[:2])), io.BytesIO()
    x = x.repeat(factor, 0).repeat(factor, 1).repeat(3 if x.shape[2] == 1 else 1, 2)
    metadata: Any = {"Software": None}  # a version there would change the bytes
    imsave(file, x, format="png", metadata=metadata)
    return _written(path, file.getvalue())


def _label(text: object) -> str:
    text = str(text)
    return f" {text}" if text.startswith("_") else text  # matplotlib leaves _names out


def _ncols(labels: list[str], width: int) -> int:
    """How many columns of these labels fit a legend of a width in characters."""
    return max(1, min(len(labels), width // (max(map(len, labels)) + 6)))


def save_svg(path: Path, size: tuple[float, float], draw: Callable[[Figure], object]) -> Path:
    """Let `draw(figure)` draw on an empty figure into an SVG file, and return its path."""
    from matplotlib import figure, rc_context

    file = io.StringIO()
    # ids that are the same each time, and other than in others
    style: Any = {**_STYLE, "svg.hashsalt": path.name}
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context(style), warnings.catch_warnings():
        # The reader's font draws the text, not the one that matplotlib measures it with.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        drawn = figure.Figure(figsize=size, layout="constrained")
        draw(drawn)
        drawn.savefig(file, format="svg", metadata=no_metadata)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: sans-serif", file.getvalue())
    # A browser would refuse the whole image for one character.
    return _written(path, _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", svg))


def _written(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)
    return path

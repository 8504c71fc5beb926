"""Draws the pictures of the site from committed results (`mkdocs.yml` names this file as a hook).

All are in the style of reports: one ink, colours that the colour-blind can tell apart, no background.
The site shows an SVG as part of its page, with the page's ink, so it is legible in the dark too.

    python docs/_figures.py FOLDER    the pictures without the site
    python docs/_figures.py           those that the README and GitHub show, in docs/img
"""

import html
import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from foretune.report._figures import _COLOURS, _INK, save_svg

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
DARK = "#e7e5e0"
BLUE, ORANGE, GREEN, PINK, OLIVE, GREY = _COLOURS
SMALL, WIDE = (4.4, 2.9), (8.8, 3.1)
Draw = Callable[[Any], None]
PICTURES: dict[str, tuple[tuple[float, float], Draw]] = {}


def picture(size: tuple[float, float] = SMALL) -> Callable[[Draw], Draw]:
    """Add a function that draws on an empty figure to the pictures."""

    def add(draw: Draw) -> Draw:
        PICTURES[draw.__name__] = size, draw
        return draw

    return add


def recorded(name: str) -> Any:
    """Return what a command wrote to `benchmarks/results`."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    return found.get("results", found)


def of_gallery(part: str) -> Any:
    """Return what an example did."""
    return recorded("gallery-cpu")[part]


def dots(figure: Any, rows: Mapping[str, Sequence[float]], xlabel: str, ours: str) -> None:
    """Draw a row for each method: each value, and their mean; those whose name has `ours` in blue."""
    axes = figure.add_subplot(xlabel=xlabel)
    for k, (name, values) in enumerate(rows.items()):
        colour = BLUE if re.search(ours, name) else GREY
        axes.plot(values, [k] * len(values), "o", color=colour, ms=4, alpha=0.55, mew=0)
        axes.plot(np.mean(values), k, "|", color=colour, ms=13, mew=2)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


def plain_numbers(*axes: Any) -> None:
    """Label logarithmic axes with numbers, not powers."""
    for axis in axes:
        axis.set_major_formatter(lambda x, _: f"{x:,.0f}" if x >= 10 else f"{x:g}")
        axis.set_minor_formatter(lambda *_: "")


def images(
    figure: Any, pixels: Any, shape: tuple[int, int], marks: Sequence[tuple[str, str]]
) -> None:
    """Draw images in a grid, each with a line of text of a colour below."""
    for k, (image, (text, colour)) in enumerate(zip(pixels, marks, strict=True)):
        axes = figure.add_subplot(*shape, k + 1)
        axes.imshow(np.asarray(image, float), cmap="Greys", interpolation="nearest")
        margin = 0.06 * len(image)  # clear of the neighbours in the dark
        axes.set(xticks=[], yticks=[], xlim=(-margin - 0.5, len(image) + margin - 0.5))
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        axes.set_xlabel(text, color=colour, labelpad=2)


@picture(WIDE)
def schedule(figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    styles = zip(
        of_gallery("schedule").items(), (BLUE, ORANGE, GREY), ("-", "--", ":"), strict=True
    )
    for (name, found), colour, line in styles:
        left.plot(found["rate"], line, color=colour, lw=1.8)
        right.plot(found["test loss"], line, color=colour, lw=1.8, label=name)
        last = found["test loss"][-1]
        right.annotate(f"{last:.2f}", (100.5, last), va="center")
    left.set(title="learning rate of each step", xlabel="step", ylim=(0, None))
    right.set(title="test loss", xlabel="step", xlim=(0, 109))
    right.legend(loc="upper right")


@picture()
def rates(figure: Any) -> None:
    axes = figure.add_subplot(xlabel="step", ylabel="learning rate")
    found = of_gallery("schedule")
    axes.plot(found["best constant of a grid"]["rate"], ":", color=GREY, label="best constant")
    axes.plot(found["learnt"]["rate"], color=BLUE, label="learnt")
    axes.set_ylim(0, None)
    axes.legend()


@picture()
def digits(figure: Any) -> None:
    found = of_gallery("digits")
    marks = [
        (f"label {label}", ORANGE if wrong else GREEN)
        for label, wrong in zip(found["labels"], found["wrong"], strict=True)
    ]
    images(figure, np.reshape(found["pixels"], (-1, 8, 8)), (2, 6), marks)


@picture()
def weights(figure: Any) -> None:
    axes = figure.add_subplot(xlabel="learnt weight", ylabel="training examples")
    edges, bottom = np.linspace(0, 1, 21)[:-1], np.zeros(20)
    found = of_gallery("digits")["weights"]
    for (name, counts), colour in zip(found.items(), (BLUE, ORANGE), strict=True):
        axes.bar(edges, counts, 0.045, bottom, align="edge", color=colour, label=name)
        bottom = bottom + counts
    axes.legend()


@picture()
def attribution(figure: Any) -> None:
    found = of_gallery("attribution")
    shown, marks = [], []
    for k in range(2):
        shown += [found["digits"][k], *found["harmful"][k]]
        marks += [(f"a {found['truth'][k]}, missed", BLUE)]
        for label, wrong in zip(found["labels"][k], found["wrong"][k], strict=True):
            marks += [(f"label {label}", ORANGE if wrong else GREY)]
    images(figure, np.reshape(shown, (-1, 8, 8)), (2, 4), marks)


@picture()
def scores(figure: Any) -> None:
    axes = figure.add_subplot(xlabel="predicted change of the error", ylabel="measured")
    predicted, measured = of_gallery("attribution")["change"]
    axes.plot(predicted, measured, "o", color=BLUE, ms=4)
    ends = min(predicted + measured), max(predicted + measured)
    axes.plot(ends, ends, ":", color=GREY, label="equal")
    axes.legend()


@picture()
def mixture(figure: Any) -> None:
    axes = figure.add_subplot(xlabel="step of the descent", ylabel="share of the training text")
    found = of_gallery("mixture")
    shares = np.transpose(found["shares"])
    colours = (GREY, BLUE, GREEN, ORANGE)
    axes.stackplot(range(shares.shape[1]), shares, labels=found["sources"], colors=colours)
    axes.set(xlim=(0, shares.shape[1] - 1), ylim=(0, 1))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=4)


@picture()
def stream(figure: Any) -> None:
    axes = figure.add_subplot(xlabel="step", ylabel="learning rate")
    found = of_gallery("stream")
    steps = found["window"] * np.arange(1, len(found["rates"]) + 1)
    for k in (1, 3):
        span = (k * steps[-1] / 4, (k + 1) * steps[-1] / 4)
        axes.axvspan(*span, color=ORANGE, alpha=0.15, lw=0, label="noise" if k == 1 else None)
    axes.plot(steps, found["rates"], color=BLUE, label="learnt rate")
    axes.set(ylim=(0, None), xlim=(0, steps[-1]))
    axes.legend(loc="lower left")


@picture()
def stars(figure: Any) -> None:
    axes = figure.add_subplot()
    found = of_gallery("stars")
    axes.plot(*np.transpose(found["observed"]), ".", color=GREY, ms=3, label="observed")
    axes.plot(*np.transpose(found["guess"]), ":", color=ORANGE, label="guess")
    axes.plot(*np.transpose(found["fitted"]), color=BLUE, label="fitted")
    axes.plot([-1, 1], [0, 0], "*", color=OLIVE, ms=13, label="stars")
    axes.set_aspect("equal")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


@picture()
def maml(figure: Any) -> None:
    axes = figure.add_subplot(xlabel="x", ylabel="y")
    found = of_gallery("maml")
    task = found["tasks"][0]
    axes.plot(found["x"], task["random weights"], ":", color=GREY, label="random start")
    axes.plot(found["x"], task["learnt weights"], color=BLUE, label="learnt start")
    axes.plot(*task["points"], "o", color=ORANGE, ms=5, label="ten points")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=3)


@picture()
def optimizer(figure: Any) -> None:
    axes = figure.add_subplot(ylabel="test loss")
    found = of_gallery("optimizer")
    colours = dict(zip(("Reverse", "Evolution", "Adam", "SGD"), _COLOURS[:4], strict=True))
    for (name, colour), mark in zip(colours.items(), "oDs^", strict=True):
        label = f"learnt by {name}" if name in ("Reverse", "Evolution") else name
        axes.plot([row[name] for row in found.values()], mark, color=colour, label=label)
    axes.set_xticks(range(len(found)), [name.replace(", ", ",\n") for name in found])
    axes.margins(x=0.2)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=2)


@picture()
def penalties(figure: Any) -> None:
    axes = figure.add_subplot(xlabel="feature", ylabel="learnt penalty", yscale="log")
    found = of_gallery("penalties")
    useful, n = found["useful"], len(found["penalty"])
    axes.plot(range(useful), found["penalty"][:useful], ".", color=BLUE, label="it matters")
    axes.plot(range(useful, n), found["penalty"][useful:], ".", color=GREY, label="it does not")
    axes.axhline(found["one"], ls=":", color=ORANGE, label="one for all")
    plain_numbers(axes.yaxis)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=3)


@picture()
def loop(figure: Any) -> None:
    found = of_gallery("loop")
    for k, ((name, values), colour) in enumerate(zip(found.items(), (BLUE, GREEN), strict=True)):
        axes = figure.add_subplot(2, 1, k + 1, ylabel=name.replace("_", " "))
        axes.plot(10 * np.arange(len(values)), values, color=colour)
        axes.set_ylim(0, None)
    axes.set_xlabel("step of the training loop")


@picture()
def distilled(figure: Any) -> None:
    found = of_gallery("distilled")["images"]
    images(figure, found, (2, 5), [(f"a learnt {k}", _INK) for k in range(len(found))])


@picture()
def memory(figure: Any) -> None:
    axes = figure.add_subplot(
        xlabel="memory, in training states", ylabel="time, in trainings", xscale="log"
    )
    for name, row in recorded("schedules_cpu")["engines"].items():
        colour = ORANGE if name.startswith("Forward") else GREY if "Tru" in name else BLUE
        axes.plot(row["states"], row["training_runs"], "o", color=colour, ms=5)
        text = re.sub(r"Reverse\((?:store=)?(.*)\)", r"\1", name).replace("'", "")
        axes.annotate(
            text.replace("()", ""),
            (row["states"], row["training_runs"]),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=7.5,
        )
    axes.margins(0.16)
    axes.set_ylim(0, None)
    plain_numbers(axes.xaxis)


@picture()
def cost(figure: Any) -> None:
    axes = figure.add_subplot(
        xlabel="hyperparameters", ylabel="time, in trainings", xscale="log", yscale="log"
    )
    rows = [r for r in recorded("complexity_cpu")["records"] if r["weights"] == 199_210]
    for (name, colour), line in zip(
        (("Forward", ORANGE), ("Reverse", BLUE)), ("o--", "o-"), strict=True
    ):
        own = {r["hyperparameters"]: r["trainings"] for r in rows if r["series"] == name}
        axes.plot(sorted(own), [own[m] for m in sorted(own)], line, color=colour, ms=4, label=name)
    plain_numbers(axes.xaxis, axes.yaxis)
    axes.legend()


@picture()
def peers(figure: Any) -> None:
    found = recorded("peers_h200")
    axes = figure.add_subplot(xlabel="seconds of one hypergradient", xscale="log")
    tasks = {
        "cleaning": "5,000 weights",
        "rates": "rate, momentum",
        "decay": "decay by layer",
        "large": "15 million weights",
    }
    colours = {"foretune": BLUE, "TorchOpt": ORANGE, "higher": GREEN, "betty": PINK, "torch": GREY}
    for (name, colour), mark in zip(colours.items(), "oDs^v", strict=True):
        seconds = [found[task]["libraries"][name]["seconds"] for task in tasks]
        axes.plot(seconds, range(4), mark, color=colour, label=name, ms=5)
    plain_numbers(axes.xaxis)
    axes.set_yticks(range(4), tasks.values())
    axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=3)


@picture()
def rehearsal(figure: Any) -> None:
    found = recorded("rehearsed-h200")["digits"]
    rows = {f"untuned {k}": v["seeds"] for k, v in found["untuned"].items() if "," in k}
    rows |= {f"grid {k}, each of 7": list(v.values()) for k, v in found["grid"].items()}
    rows |= {f"rehearsed {k}": v["seeds"] for k, v in found["rehearsed"].items()}
    rows = {name: [v for v in values if v > 90] for name, values in rows.items()}
    dots(figure, rows, "test accuracy in % (those above 90)", "rehearsed")


@picture()
def language(figure: Any) -> None:
    rows: dict[str, list[float]] = {}
    names = {"uniform": "even mixture", "foretune, descent": "foretune, descent"}
    names |= {name: name for name in ("random search", "TPE")}
    for row in recorded("language-h200")["values"]:
        if name := names.get(row["method"]):
            rows.setdefault(name, []).append(float(np.mean(row["test"])))
    dots(figure, rows, "test loss, nats a byte", "foretune")


@picture()
def fewshot(figure: Any) -> None:
    rows = [r for r in recorded("fewshot-h200") if (r["ways"], r["shots"]) == (5, 1)]
    usual = {"MAML": 5, "representation, own head": 50}
    rows = [r for r in rows if usual.get(r["method"], r["inner"]) == r["inner"]]
    rows.sort(key=lambda r: r["inner"] > 0)  # what is not ours first
    shown = {r["method"]: [100 * r["accuracy"]] for r in rows}
    dots(figure, shown, "accuracy in %", "MAML|representation")


@picture()
def human(figure: Any) -> None:
    rows: dict[str, list[float]] = {}
    for row in recorded("human-cpu")["values"]:
        if row["checked"] == 100:
            for method, f1 in row["f1"].items():
                rows.setdefault(method, []).append(f1)
    dots(figure, rows, "F1, with 100 verified labels", "clean_labels")


@picture()
def cleaning(figure: Any) -> None:
    rows: dict[str, list[float]] = {}
    for row in recorded("cleaning-wild-cpu")["rows"]:
        if row["checked"] == 50 and row["noise"] != "human":
            rows.setdefault(row["method"], []).append(row["f1"])
    order = sorted(rows, key=lambda name: -np.mean(rows[name]))
    dots(figure, {name: rows[name] for name in order}, "F1, with 50 verified labels", "LabelC")


@picture()
def phones(figure: Any) -> None:
    axes = figure.add_subplot(xlabel="test accuracy in %")
    table = recorded("phones_synthetic_h200")["tables"][0]["rows"]
    for k, (name, text, *_) in enumerate(table):
        mean, _, deviation = text.partition(" ± ")
        colour = BLUE if "foretune" in name else GREY
        axes.errorbar(float(mean), k, xerr=float(deviation or 0), fmt="o", color=colour, ms=4)
    axes.set_yticks(range(len(table)), [row[0] for row in table])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


@picture()
def multitask(figure: Any) -> None:
    found = recorded("multitask_cifar")["values"]["cifar10"]
    names = {"no regulariser": "no regulariser", "STL": "one strength (STL)"}
    names |= {"HMTL": "learnt graph (HMTL)", "known groups": "known groups"}
    rows = {
        text: [100 * x for x in found[name]["folds"]["accuracy"]] for name, text in names.items()
    }
    dots(figure, rows, "test accuracy in %, CIFAR-10", "learnt")


@picture()
def discrete(figure: Any) -> None:
    axes = figure.add_subplot(xlabel="seconds", ylabel="best validation error")
    found = recorded("discrete_cpu")["mnist"]["cold"]
    for (name, colour), line in zip(
        (("Optuna alone", GREY), ("with gradients", BLUE)), ("--", "-"), strict=True
    ):
        for k, run in enumerate(found[name]):
            seconds, _, errors = np.transpose(sorted(run["curve"]))
            axes.step(
                seconds,
                np.minimum.accumulate(errors),
                line,
                where="post",
                color=colour,
                label=None if k else name,
            )
    axes.legend()


@picture(WIDE)
def responses(figure: Any) -> None:
    found = of_gallery("responses")
    for k, name in enumerate(("tanh network", "recurrent")):
        axes = figure.add_subplot(1, 2, k + 1, xlabel="change of log(learning rate)")
        change, errors = np.array(found["change"]), found[name]["error"]
        tangent = found[name]["value"] + found[name]["slope"] * change
        axes.plot(change, errors, color=BLUE, lw=1.2, label="error")
        axes.plot(change, tangent, "--", color=ORANGE, label="its hypergradient at 0")
        margin = 0.2 * (max(errors) - min(errors))
        axes.set(ylim=(min(errors) - margin, max(errors) + margin))
        axes.set_title(f"{name}: slope {found[name]['slope']:.2g}")
        axes.legend()


def drawn(name: str, folder: Path) -> str:
    """Return the SVG of a picture."""
    size, draw = PICTURES[name]
    return save_svg(folder / f"{name}.svg", size, draw).read_text()


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pictures to the site's files, as `img/gallery/NAME.svg`."""
    with tempfile.TemporaryDirectory() as folder:
        for name in PICTURES:
            svg = drawn(name, Path(folder))
            files.append(File.generated(config, f"img/gallery/{name}.svg", content=svg))


def on_page_content(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put each SVG in its page, where it takes the ink of the page."""

    def inlined(tag: re.Match[str]) -> str:
        source = re.search(r'src="[^"]*?(img/[^"]*\.svg)"', tag[0])
        file = source and files.get_file_from_path(source[1])
        if not file:
            return tag[0]
        alt = html.unescape(match[1] if (match := re.search(r'alt="([^"]*)"', tag[0])) else "")
        svg = file.content_string
        svg = re.sub(r' id="[a-z\d.]+_\d+"', "", svg[svg.index("<svg") :]).replace(
            _INK, "currentColor"
        )
        width = float((re.search(r'viewBox="0 0 ([\d.]+)', svg) or [0, 400])[1])
        least = f"min-width:{0.85 * width:.0f}px"  # below, its box scrolls
        label = f'<svg role="img" aria-label="{html.escape(alt)}" style="{least}"'
        svg = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", svg, count=1)
        kind = "wide figure" if width > 72 * SMALL[0] else "figure"
        box = f'<span class="{kind}" style="max-width:{1.25 * width:.0f}px">'
        return f"{box}{svg.replace('<svg', label, 1)}</span>"

    return re.sub(r"<img [^>]*>", inlined, text)


if __name__ == "__main__":
    if sys.argv[1:]:
        for picture_name in PICTURES:
            drawn(picture_name, Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            made = {name: drawn(name, Path(temporary)) for name in ("schedule", "responses")}
        (DOCS / "img/responses.svg").write_text(made["responses"])
        (DOCS / "img/schedule-light.svg").write_text(made["schedule"])
        (DOCS / "img/schedule-dark.svg").write_text(made["schedule"].replace(_INK, DARK))

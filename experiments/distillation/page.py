"""Tables, figures and pictures of distilled data."""

from typing import Any

import numpy as np

from foretune.report import curves, picture

from ..runs import RunFolder

Records = list[dict[str, Any]]
PUBLISHED = [
    ["Wang et al., 2018", "gradients through trainings", "79.5", "random weights, no soft labels"],
    ["Zhao et al., 2021", "gradient matching", "91.7", "three wider layers, instance norm"],
    [
        "kernels, implicit gradients, 2021-23",
        "infinite or wide networks",
        "93 to 95",
        "wider networks",
    ],
    [
        "Deng and Russakovsky, 2022",
        "shared bases",
        "98.7",
        "stores more than an image of each class",
    ],
]


def describe(folder: RunFolder, settings: Any, records: Records) -> dict[str, Any]:
    """Return the result: headline, tables, figures, and every number behind them."""
    by_each = {each: [r for r in records if r["each"] == each] for each in settings.each}
    last = str(settings.stages[-1][0])
    best = {
        e: max(np.mean([r["accuracy"][t] for r in rs]) for t in rs[0]["accuracy"])
        for e, rs in by_each.items()
    }
    said = ", ".join(f"{100 * share:.1f} % with {e} of each class" for e, share in best.items())
    return {
        "headline": f"Test accuracy from fresh random weights: {said}.",
        "notes": [
            f"Mean and standard deviation over {settings.judges} networks, each from weights drawn "
            f"anew, of three layers {settings.width} wide with instance norm. Learnt: images, soft "
            "labels and a rate for each step, in stages of growing length T, each from where the one "
            "before ended.",
        ],
        "tables": [
            by_length(by_each),
            *(others(e, rs, last) for e, rs in by_each.items()),
            published(),
        ],
        "figures": [*pictures(folder, by_each), *draw(folder, by_each)],
        "values": [
            {k: r[k] for k in ("each", "seed", "accuracy", "seconds", "others")} for r in records
        ],
    }


def spread(values: Any) -> str:
    """Return mean and standard deviation in per cent."""
    return f"{100 * np.mean(values):.2f} ± {100 * np.std(values):.2f}"


def by_length(by_each: dict[int, Records]) -> dict[str, Any]:
    """Return the table of accuracies after each stage."""
    rows = [
        [
            each,
            length,
            spread([r["accuracy"][length] for r in records]),
            round(np.mean([r["seconds"][length] for r in records])),
        ]
        for each, records in by_each.items()
        for length in records[0]["accuracy"]
    ]
    columns = ["images of a class", "T", "test accuracy", "seconds of learning"]
    return {"title": "Learnt images, by length of training", "columns": columns, "rows": rows}


def others(each: int, records: Records, length: str) -> dict[str, Any]:
    """Return the table of kinds of networks and of images."""
    kinds = list(records[0]["others"])
    sets = list(records[0]["others"][kinds[0]])
    rows = [
        [kind, *(spread([r["others"][kind][s] for r in records]) for s in sets)] for kind in kinds
    ]
    return {
        "title": f"{each} of each class: other networks, other images",
        "note": f"T = {length}. Real images: hard labels, the best of nine rates on images held out.",
        "columns": ["network", *sets],
        "rows": rows,
    }


def published() -> dict[str, Any]:
    """Return what others have reported, and what is comparable."""
    return {
        "title": "Published with one image of each class",
        "note": "Networks, steps and labels differ: no row is quite comparable.",
        "columns": ["source", "by", "test accuracy", "remark"],
        "rows": PUBLISHED,
    }


def pictures(folder: RunFolder, by_each: dict[int, Records]) -> list[dict[str, str]]:
    """Write the learnt images, a column for each class."""
    shown = []
    for each, records in by_each.items():
        x = np.asarray(records[0]["images"])[..., 0].reshape(10, each, 28, 28)
        x = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=np.nan)
        low, high = np.nanquantile(x, [0.002, 0.998])
        x = np.nan_to_num(((x - low) / (high - low)).clip(0, 1), nan=1.0)
        sheet = x.transpose(1, 2, 0, 3).reshape(each * 30, 300)
        picture(folder.figures / f"images-{each}.png", sheet)
        title = f"{each} of each class"
        shown.append(
            {
                "file": f"figures/images-{each}.png",
                "title": title,
                "caption": "0 to 9, left to right.",
            }
        )
    return shown


def draw(folder: RunFolder, by_each: dict[int, Records]) -> list[dict[str, str]]:
    """Draw the error on the way, and the learnt rates."""
    panels = []
    for each, records in by_each.items():
        lines = [
            {"label": f"T = {length}", "x": np.linspace(0, 1, len(errors)), "y": errors}
            for length, errors in records[0]["errors"].items()
        ]
        panels.append(
            {"title": f"{each} of each class", "ylabel": "loss on real images", "lines": lines}
        )
    curves(folder.figures / "loss.svg", panels, xlabel="share of the stage")
    rates = [
        {
            "label": f"{each} of each class",
            "x": np.arange(len(r[0]["log"])),
            "y": np.exp(r[0]["log"]),
        }
        for each, r in by_each.items()
    ]
    panel = {"title": "Learnt rates", "ylabel": "rate", "lines": rates}
    curves(folder.figures / "rates.svg", [panel], xlabel="step")
    return [
        {"file": "figures/loss.svg", "title": "Learning", "caption": "Of the first seed."},
        {"file": "figures/rates.svg", "title": "Rates", "caption": "Of each step, at the end."},
    ]

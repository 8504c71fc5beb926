"""Tables and figures of time and memory."""

from typing import Any

import numpy as np

from foretune.report import curves

from ..runs import RunFolder, logarithmic

MIB = 2**20
Records = list[dict[str, Any]]
FORMER_NAMES = {
    "Forward": "Forward()",
    "Forward by columns": "Forward(chunk=1)",
    "Reverse": "Reverse()",
    "Reverse by segments": 'Reverse(store="segments")',
    "Reverse with 10 states": "Reverse(store=10)",
}
"""How series were called up to version 0.1: in a run to be resumed, and in benchmarks/results."""


def with_present_names(records: Records) -> Records:
    """Return the records with their series named as they are now."""
    return [r | {"series": FORMER_NAMES.get(r["series"], r["series"])} for r in records]


def describe(folder: RunFolder, settings: Any, records: Records) -> dict[str, Any]:
    """Return the result: headline, tables, figures, and every number behind them."""
    records = with_present_names(records)
    sweeps = sweeps_of(settings, records)
    names = list(dict.fromkeys(r["series"] for r in records))
    slopes = {name: slopes_of(name, sweeps) for name in names[1:]}
    return {
        "headline": headline(slopes),
        "notes": notes(settings, records),
        "tables": [
            *slope_tables(slopes),
            point_table(records),
            *allocator_table(records),
        ],
        "figures": draw(folder, names, sweeps),
        "values": {"records": records, "slopes": slopes},
    }


def sweeps_of(settings: Any, records: Records) -> dict[str, Records]:
    """Return the measurements over hyperparameters, weights and steps, each in order."""
    shape, T = "-".join(map(str, settings.network)), settings.steps
    found = {
        "hyperparameters": [r for r in records if (r["network"], r["steps"]) == (shape, T)],
        "weights": [r for r in records if (r["hyperparameters"], r["steps"]) == (2, T)],
        "steps": [r for r in records if (r["network"], r["hyperparameters"]) == (shape, 2)],
    }
    return {name: sorted(sweep, key=lambda r: r[name]) for name, sweep in found.items()}


def of(name: str, sweep: Records, measured: str) -> Records:
    """Return a program's points in a sweep where it was measured."""
    return [r for r in sweep if r["series"] == name and measured in r]


def states(record: dict[str, Any]) -> float:
    """Return a program's memory in states: the weights and their momentum, in 32 bits."""
    return record["bytes"] / (2 * 4 * record["weights"])


def slope(x: list[float], y: list[float]) -> float | None:
    """Return the slope of the least-squares line, or None for less than two places."""
    return float(np.polyfit(x, y, 1)[0]) if len(set(x)) > 1 else None


def slopes_of(name: str, sweeps: dict[str, Records]) -> dict[str, Any]:
    """Return what one more hyperparameter, and one more step, costs a program."""
    timed = of(name, sweeps["hyperparameters"], "trainings")
    sized = of(name, sweeps["hyperparameters"], "bytes")
    over_steps = of(name, sweeps["steps"], "bytes")
    m = [float(r["hyperparameters"]) for r in timed]
    return {
        "from": [timed[0]["hyperparameters"], timed[0]["trainings"]] if timed else None,
        "to": [timed[-1]["hyperparameters"], timed[-1]["trainings"]] if timed else None,
        "trainings_per_hyperparameter": slope(m, [r["trainings"] for r in timed]),
        "states": states(sized[0]) if sized else None,
        "states_per_hyperparameter": slope(
            [float(r["hyperparameters"]) for r in sized], [states(r) for r in sized]
        ),
        "states_per_step": slope(
            [float(r["steps"]) for r in over_steps], [states(r) for r in over_steps]
        ),
    }


def headline(slopes: dict[str, dict[str, Any]]) -> str:
    """Return the outcome in a sentence or two."""
    parts = []
    forward, reverse = slopes["Forward()"], slopes["Reverse()"]
    if forward["trainings_per_hyperparameter"] is not None:
        parts.append(
            "Each further hyperparameter costs forward mode "
            f"{forward['trainings_per_hyperparameter']:.2f} plain trainings and "
            f"{forward['states_per_hyperparameter']:.2f} states of memory."
        )
    if reverse["from"] is not None:
        (few, low), (many, high) = reverse["from"], reverse["to"]
        parts.append(
            f"Reverse mode takes {low:.1f} plain trainings for {few:,} hyperparameters and {high:.1f} "
            f"for {many:,}, and {reverse['states']:.0f} states of memory."
        )
    return " ".join(parts) or "No program fitted the device's memory."


def notes(settings: Any, records: Records) -> list[str]:
    """Return what a reader needs to know of the measurements."""
    differences = [r["difference"] for r in records if "difference" in r]
    found = [
        f"Minibatches of {settings.batch} of 5,000 random examples; gradient descent with momentum. "
        "The hyperparameters are the learning rate, the momentum and, beyond these two, weights of "
        "groups of examples in the training error.",
        f"Seconds: the median of {settings.rounds} rounds in which the programs take turns, without "
        "compilation. Memory: temporary arrays and results of the compiled program. A state is the "
        "weights and their momentum.",
        f"Forward mode was measured with up to {settings.forward} hyperparameters.",
    ]
    if differences:
        found.append(
            f"The hypergradients of a point differ by at most {max(differences):.0e} of their norm."
        )
    if settings.quick:
        found.append("A quick run: few and short trainings, to see how the experiment runs.")
    return found


def slope_tables(slopes: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what one more hyperparameter and one more step costs, by program: time, then memory."""

    def shown(end: Any) -> str | None:
        return end and f"{end[1]:.2f} (m = {end[0]:,})"

    time = [
        [
            name,
            shown(s["from"]),
            shown(s["to"]),
            _rounded(s["trainings_per_hyperparameter"], 4),
        ]
        for name, s in slopes.items()
    ]
    memory = [
        [
            name,
            _rounded(s["states"], 1),
            _rounded(s["states_per_hyperparameter"], 4),
            _rounded(s["states_per_step"], 3),
        ]
        for name, s in slopes.items()
    ]
    lines = "Per further: the slope of the least-squares line."
    return [
        {
            "title": "Time of a hypergradient",
            "note": f"For the fewest and the most hyperparameters m. {lines}",
            "columns": [
                "engine",
                "at fewest m, trainings",
                "at most m, trainings",
                "per further m, trainings",
            ],
            "rows": time,
        },
        {
            "title": "Memory of a hypergradient",
            "note": f"A state is the weights and their momentum. {lines}",
            "columns": [
                "engine",
                "at fewest m, states",
                "per further m, states",
                "per further step, states",
            ],
            "rows": memory,
        },
    ]


def point_table(records: Records) -> dict[str, Any]:
    """Return every measurement, a program and a point to a row."""

    def cell(record: dict[str, Any], measured: str, scale: int = 1) -> Any:
        if measured in record:
            return float(f"{record[measured] / scale:.4g}")
        return "skipped" if "skipped" in record else None  # no ratio without plain training

    note = "m hyperparameters, T steps. Memory: as compiled, run or not."
    return {
        "title": "All points",
        "note": f"{note} {skipped(records)}".strip(),
        "columns": ["engine", "weights", "m", "T", "time, s", "time, trainings", "memory, MiB"],
        "rows": [
            [
                r["series"],
                r["weights"],
                r["hyperparameters"],
                r["steps"],
                cell(r, "seconds"),
                cell(r, "trainings"),
                cell(r, "bytes", MIB),
            ]
            for r in records
        ],
    }


def skipped(records: Records) -> str:
    """Return which programs were skipped, and why."""
    found = [
        f"{r['series']} at {r['weights']:,} weights, m = {r['hyperparameters']:,}, "
        f"T = {r['steps']:,}: {r['skipped']}"
        for r in records
        if "skipped" in r
    ]
    return f"Skipped for lack of memory: {'; '.join(found)}." if found else ""


def allocator_table(records: Records) -> list[dict[str, Any]]:
    """Return the allocator's peaks beside the compiler's figures, where there are any."""
    rows = [
        [
            r["series"],
            r["weights"],
            r["hyperparameters"],
            r["steps"],
            round(r["bytes"] / MIB, 1),
            round(r["allocator_bytes"] / MIB, 1),
        ]
        for r in records
        if "allocator_bytes" in r
    ]
    note = (
        "What the program added to the bytes in use. The peak never falls within a process: it "
        "is known only for programs that raised it."
    )
    columns = ["engine", "weights", "m", "T", "compiler, MiB", "allocator, MiB"]
    table = {"title": "The allocator's peak", "note": note, "columns": columns, "rows": rows}
    return [table] if rows else []


def draw(folder: RunFolder, names: list[str], sweeps: dict[str, Records]) -> list[dict[str, str]]:
    """Draw time and memory against hyperparameters and weights."""
    panels = []
    for sweep in ("hyperparameters", "weights"):
        for measured, title, unit in (("seconds", "Time", "s"), ("bytes", "Memory", "MiB")):
            scale = MIB if measured == "bytes" else 1
            lines = [
                {
                    "label": name,
                    "x": [r[sweep] for r in found],
                    "y": [r[measured] / scale for r in found],
                }
                for name in names
                if (found := of(name, sweeps[sweep], measured))
            ]
            panel = {"title": f"{title} against {sweep}", "ylabel": unit, "xlabel": sweep}
            panels.append({**panel, "lines": lines})
    panels = [panel for panel in panels if panel["lines"]]
    if not panels:
        return []
    curves(folder.figures / "complexity.svg", panels, xlabel="", scale=logarithmic)
    caption = (
        "Logarithmic axes. Left: median seconds of a hypergradient; right: temporary arrays and "
        "results of its program. Against weights: with two hyperparameters."
    )
    return [{"file": "figures/complexity.svg", "title": "Time and memory", "caption": caption}]


def _rounded(x: float | None, digits: int) -> float | None:
    return None if x is None else round(x, digits) + 0.0  # no -0

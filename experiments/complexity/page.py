"""Tables and figures of time and memory."""

from typing import Any

import numpy as np

from foretune.report import RunFolder, curves

MIB = 2**20
Records = list[dict[str, Any]]


def describe(folder: RunFolder, settings: Any, records: Records) -> dict[str, Any]:
    """Return the result: headline, tables, figures, and every number behind them."""
    sweeps = sweeps_of(settings, records)
    names = list(dict.fromkeys(r["series"] for r in records))
    slopes = {name: slopes_of(name, sweeps) for name in names[1:]}
    return {
        "headline": headline(slopes),
        "notes": notes(settings, records),
        "tables": [
            slope_table(slopes),
            point_table("Seconds", skipped(records), records, "seconds", 1),
            point_table("Memory, MiB", "As compiled, run or not.", records, "bytes", MIB),
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
    forward, reverse = slopes["Forward"], slopes["Reverse"]
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
        f"Forward mode was measured with up to {settings.forward} hyperparameters. By columns: "
        'Forward(chunk=1). By segments: Reverse(store="segments"). With 10 states: Reverse(store=10).',
    ]
    if differences:
        found.append(
            f"The hypergradients of a point differ by at most {max(differences):.0e} of their norm."
        )
    if settings.quick:
        found.append("A quick run: few and short trainings, to see how the experiment runs.")
    return found


def slope_table(slopes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what one more hyperparameter and one more step costs, by program."""

    def shown(end: Any) -> str | None:
        return end and f"{end[1]:.2f} (of {end[0]:,})"

    return {
        "title": "What one more costs",
        "note": "Time in plain trainings and memory in states, for the fewest and the most "
        "hyperparameters m, and slopes of least-squares lines: each further hyperparameter costs so "
        "many plain trainings and so many states, each further step so many states.",
        "columns": [
            "engine",
            "time, fewest m",
            "time, most m",
            "time per m",
            "memory, fewest m",
            "memory per m",
            "memory per step",
        ],
        "rows": [
            [
                name,
                shown(s["from"]),
                shown(s["to"]),
                _rounded(s["trainings_per_hyperparameter"], 4),
                _rounded(s["states"], 1),
                _rounded(s["states_per_hyperparameter"], 4),
                _rounded(s["states_per_step"], 3),
            ]
            for name, s in slopes.items()
        ],
    }


def point_table(
    title: str, note: str, records: Records, measured: str, unit: float | int
) -> dict[str, Any]:
    """Return a measurement of all programs at all points."""
    names = list(dict.fromkeys(r["series"] for r in records))
    rows: dict[tuple[int, ...], dict[str, Any]] = {}
    for r in records:
        at = (r["weights"], r["hyperparameters"], r["steps"])
        rows.setdefault(at, {})[r["series"]] = r

    def cell(record: dict[str, Any] | None) -> Any:
        if record is None:
            return None
        return float(f"{record[measured] / unit:.4g}") if measured in record else "skipped"

    return {
        "title": title,
        "note": note,
        "columns": ["weights", "m", "T", *names],
        "rows": [[*at, *(cell(found.get(n)) for n in names)] for at, found in rows.items()],
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
        "What the program added to the bytes in use, in MiB. The peak never falls within a process: it "
        "is known only for programs that raised it."
    )
    columns = ["engine", "weights", "m", "T", "compiler", "allocator"]
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
    curves(folder.figures / "complexity.svg", panels, xlabel="", log=True)
    caption = (
        "Logarithmic axes. Left: median seconds of a hypergradient; right: temporary arrays and "
        "results of its program. Against weights: with two hyperparameters."
    )
    return [{"file": "figures/complexity.svg", "title": "Time and memory", "caption": caption}]


def _rounded(x: float | None, digits: int) -> float | None:
    return None if x is None else round(x, digits) + 0.0  # no -0

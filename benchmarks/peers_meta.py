"""MAML on sinusoids beside other libraries: outer steps per second, and memory.

    python -m benchmarks.peers_meta [--libraries torch higher ...] [--rounds 3] [--out FILE.json]

25 tasks of ten points, 5 inner steps, a network 1-40-40-1, Adam outside, on the CPU
(`peer_programs/maml.py`). How to install the peers is in `benchmarks/requirements-peers.txt`.

steps a second  outer steps by processor time, and by the clock: medians over rounds. In each round the
                libraries come one after another, each in a process of its own.
memory          by how much one outer gradient through 200 inner steps raises the resident memory.
gradient        its distance to that of `torch` on the same 25 tasks, of its length.

What does not install, or raises, is a row that says so.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from benchmarks.harness import Table, command_line, record
from benchmarks.peer_programs import PACKAGES
from benchmarks.peer_programs.maml import LIBRARIES, TORCH
from benchmarks.peers import installed, started

ON_CPU = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"}
INNER, LONG = 5, 200
LONG_ONLY = ('foretune, Reverse("segments")', "foretune, Reverse(8)")


def asked(library: str, limit: float, **request: Any) -> dict[str, Any]:
    """Return what the process of a library answers."""
    print(f"[{time.strftime('%H:%M:%S')}]", library, request, file=sys.stderr, flush=True)
    try:
        return json.loads(started("maml", {"library": library, **request}, limit))
    except subprocess.CalledProcessError as error:
        return {"failed": f"ended with code {error.returncode}"}
    except subprocess.TimeoutExpired as error:
        return {"failed": f"no answer in {error.timeout:g} s"}


def distances(rows: dict[str, dict[str, Any]]) -> None:
    """Put the distance to the gradient of `torch`, of its length, in the place of each gradient."""
    given = {n: np.array(row.pop("gradient")) for n, row in rows.items() if "gradient" in row}
    for name, gradient in given.items():
        if "torch" in given:
            error = np.linalg.norm(gradient - given["torch"]) / np.linalg.norm(given["torch"])
            rows[name]["error"] = float(error)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=[*LIBRARIES])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50, help="outer steps of a library in PyTorch")
    parser.add_argument("--own-steps", type=int, default=1000, help="outer steps of foretune")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of one process")
    arguments = parser.parse_args()
    os.environ |= ON_CPU
    rows: dict[str, dict[str, Any]] = {name: {} for name in arguments.libraries}
    for turn in range(arguments.rounds + 1):
        for name, row in rows.items():
            weigh = turn == arguments.rounds
            if "failed" in row or (name in LONG_ONLY and not weigh):
                continue
            steps = arguments.steps if name in TORCH else arguments.own_steps
            inner = LONG if weigh else INNER
            request = {"steps": steps, "inner": inner, "rounds": 1, "weigh": weigh}
            found = asked(name, arguments.limit, **request)
            for key in ("seconds", "of_processor"):
                row.setdefault(key, []).extend(found.pop(key, []))
            row |= found
    distances(rows)
    table = Table("library", "steps a second", "by the clock", f"MiB, {LONG} steps", "gradient")
    for name, row in rows.items():
        if row["seconds"]:
            row["per_second"] = 1 / statistics.median(row["of_processor"])
            row["per_second_by_clock"] = 1 / statistics.median(row["seconds"])
        memory = round(row["bytes"] / 2**20, 1) if "bytes" in row else row.get("failed", "")
        speed = row.get("per_second", ""), row.get("per_second_by_clock", "")
        table.add(name, *speed, memory, row.get("error", ""))
    results = {"inner": INNER, "long": LONG, "tasks": 25, "libraries": rows}
    results |= {"OMP_WAIT_POLICY": "PASSIVE", "load": os.getloadavg()[0]}
    packages = [name for name in (*PACKAGES, "learn2learn") if installed(name)]
    record(arguments.out, results, packages)


if __name__ == "__main__":
    main()

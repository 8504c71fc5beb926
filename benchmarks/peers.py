"""Hypergradients beside other libraries: seconds, memory and error.

    python -m benchmarks.peers [--problems cleaning rates decay large] [--libraries foretune higher ...]
                               [--rounds 3] [--device cpu|gpu] [--quick] [--out FILE.json]

The peers and how to install them are in `benchmarks/requirements-peers.txt`. The problems
(`peer_programs/problems.py`) are the same arrays for all; each library is used as it recommends for
exact hypergradients through an unrolled training (one short module each in `peer_programs`). What
does not install, raises, or takes too long is a row that says so.

seconds      one hypergradient, median over the rounds; libraries come one after another, each in a
             process of its own.
first call   with compilation and whatever else happens once, in seconds.
memory       what one hypergradient needs at most beyond the data: on a CPU the growth of the process's
             resident memory in a call after the first (exact to some MiB; for JAX at least what its
             compiler plans); on a GPU what PyTorch's allocator held, or the plan of JAX's compiler.
error        |g - g*| / |g*| against float64, the largest among the hyperparameters.

Both frameworks multiply in full float32; `--tf32` lets both use TensorFloat-32 on a GPU.

Measure on a machine that does nothing else. Where it must do more, set OMP_WAIT_POLICY=PASSIVE:
otherwise PyTorch's threads spin while they wait for one that has no core, at up to 50 times the time.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.harness import Table, command_line, record
from benchmarks.peer_programs import LIBRARIES, PACKAGES, problems

HERE = Path(__file__).parent
OPTIONS = ("device", "quick", "tf32", "rounds", "limit")
Row = dict[str, Any]


def started(module: str, request: Row, limit: float | None = None) -> str:
    """Run a program of `peer_programs` and return what it prints."""
    known = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), *known])}
    command = [sys.executable, "-m", f"benchmarks.peer_programs.{module}", json.dumps(request)]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=limit, check=True
    )
    return done.stdout


def measure(problem: str, arguments: argparse.Namespace) -> tuple[int, dict[str, Row]]:
    """Return the steps of a problem and the row of each library."""
    steps = problems.make(problem, arguments.device, arguments.quick).steps
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        request = {"problem": problem, "exact": str(Path(folder, "exact.npz"))}
        request |= {name: getattr(arguments, name) for name in OPTIONS}
        started("reference", request)
        for library in arguments.libraries:
            print(f"[{time.strftime('%H:%M:%S')}]", problem, library, file=sys.stderr, flush=True)
            try:
                limit = 10 * arguments.limit
                answer = started("worker", {**request, "library": library}, limit)
                row: dict[str, Any] = json.loads(answer)
            except subprocess.CalledProcessError as error:
                row = {"failed": f"ended with code {error.returncode}"}
            except subprocess.TimeoutExpired as error:
                row = {"failed": f"no answer in {error.timeout:g} s"}
            if times := row.pop("seconds", None):
                row |= {"seconds": statistics.median(times), "rounds": len(times)}
            rows[library] = row
    return steps, rows


def show(problem: str, steps: int, rows: dict[str, Row]) -> None:
    print(f"\n{problems.NAMES[problem]}, T = {steps}\n")
    table = Table("library", "seconds", "first call", "memory, MiB", "error", "how")
    for name, row in rows.items():
        failed = f"fails: {row['failed']}" if "failed" in row else ""
        if "seconds" not in row:
            table.add(name, *[""] * 4, failed)
            continue
        memory = round(row["bytes"] / 2**20) if "bytes" in row else "?"
        how = f"{row['note']}; then {failed}" if failed else row["note"]
        cells = row["seconds"], row["first_call"], memory, row["error"], how
        table.add(name, *cells)


def installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--problems", nargs="+", choices=problems.NAMES, default=[*problems.NAMES])
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=[*LIBRARIES])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default: a GPU where JAX has one")
    parser.add_argument("--quick", action="store_true", help="small sizes, to try")
    parser.add_argument("--tf32", action="store_true", help="TensorFloat-32 in both frameworks")
    parser.add_argument("--limit", type=float, help="seconds for a library's rounds of a problem")
    arguments = parser.parse_args()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if arguments.device == "cpu":
        os.environ |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        jax.config.update("jax_platforms", "cpu")
    arguments.device = "cpu" if jax.default_backend() == "cpu" else "gpu"
    arguments.limit = arguments.limit or (120.0 if arguments.device == "cpu" else 20.0)
    load = os.getloadavg()[0]
    if load > 0.5 and arguments.device == "cpu":
        print(f"other programs are running (load {load:.1f}): see OMP_WAIT_POLICY above")
    waiting = os.environ.get("OMP_WAIT_POLICY", "default")
    results: dict[str, Any] = {"load": load, "OMP_WAIT_POLICY": waiting}
    for problem in arguments.problems:
        steps, rows = measure(problem, arguments)
        show(problem, steps, rows)
        results[problem] = {"steps": steps, "libraries": rows}
        record(arguments.out, results, [name for name in PACKAGES if installed(name)])


if __name__ == "__main__":
    main()

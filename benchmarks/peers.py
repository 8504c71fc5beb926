"""Hypergradients beside other libraries: seconds, memory, the longest training in 4 GiB, and error.

    python -m benchmarks.peers [--problems cleaning rates decay large] [--libraries foretune higher ...]
                               [--rounds 3] [--device cpu|gpu] [--quick] [--out FILE.json]

The peers and how to install them are in `benchmarks/requirements-peers.txt`. The problems
(`peer_programs/problems.py`) are the same arrays for all; each library is used as it recommends for
exact hypergradients through an unrolled training (one short module each in `peer_programs`). What
does not install, raises, or takes too long is a row that says so.

seconds      one hypergradient, median over the rounds; on a CPU libraries take turns, each in its own
             process; on a GPU they come one after another, since what one holds the next could not.
first call   with compilation and whatever else happens once, in seconds.
memory       what one hypergradient needs at most beyond the data: on a CPU the growth of the process's
             resident memory in a call after the first (exact to some MiB; for JAX at least what its
             compiler plans); on a GPU what PyTorch's allocator held, or the plan of JAX's compiler.
T in 4 GiB   the longest training that fits, extrapolated: a line through the memory over T / 2 and T
             steps; ">" where less than 1 MiB lies between the two, which is taken for 1 MiB. For
             `foretune, Auto`, which keeps to the 4 GiB that it is given, a number that was tried: it
             chose an engine for 100,000 steps, and the compiler says what that needs with its data.
error        |g - g*| / |g*| against float64, the largest among the hyperparameters.

Both frameworks multiply in full float32; `--tf32` lets both use TensorFloat-32 on a GPU.

Measure on a machine that does nothing else. Where it must do more, set OMP_WAIT_POLICY=PASSIVE:
otherwise PyTorch's threads spin while they wait for one that has no core, at up to 50 times the time.
"""

import argparse
import importlib.metadata
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.peer_programs import IN_JAX, LIBRARIES, PACKAGES, problems

HERE = Path(__file__).parent
BUDGET = 4 * 2**30
FLAT = 2**20
Row = dict[str, Any]


class Library:
    """A library's process and what was measured of it for one problem."""

    def __init__(self, name: str, request: Row, limit: float):
        self.name, self.limit, self.row = name, limit, {}
        self.times: list[float] = []
        self.process = start("worker", {**request, "library": name})

    @property
    def alive(self) -> bool:
        """Whether it can be asked; a row says where the process has ended by itself."""
        if (code := self.process.poll()) is not None:
            self.row.setdefault("failed", f"ended with code {code}{' (killed)' * (code == -9)}")
        return "failed" not in self.row

    @property
    def tired(self) -> bool:
        """Whether its rounds took all their time."""
        return sum(self.times) > self.limit

    def send(self, word: str) -> None:
        """Send a request."""
        assert self.process.stdin
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def receive(self) -> Row:
        """Return the answer; a process that does not give one is ended, and its row says why."""
        assert self.process.stdout
        ready, _, _ = select.select([self.process.stdout], [], [], 3 * self.limit)
        line = self.process.stdout.readline() if ready else ""
        if line:
            found = json.loads(line)
        else:
            self.process.kill()
            code = self.process.wait()
            why = f"ended with code {code}" if ready else f"no answer in {3 * self.limit:g} s"
            found = {"failed": why}
        if "failed" in found:
            self.row.setdefault("failed", found["failed"])
        return found

    def ask(self, word: str) -> Row:
        """Send a request and return its answer."""
        self.send(word)
        return self.receive()

    def first(self) -> None:
        """Take the first call."""
        found = self.ask("first")
        self.row |= {"first_call": found.pop("seconds", None), **found}
        progress(self.name, "first call", found.get("failed") or f"{self.row['first_call']:.2f} s")

    def time(self) -> None:
        """Take one round."""
        found = self.ask("time")
        if "seconds" in found:
            self.times.append(found["seconds"])
            self.row["seconds"] = statistics.median(self.times)
            self.row["rounds"] = len(self.times)
        progress(self.name, "round", found.get("failed") or f"{found['seconds']:.3f} s")

    def weigh(self, steps: int) -> None:
        """Take in the answer to "memory"."""
        found = self.receive()
        if "bytes" in found:
            self.row |= found
            self.row["longest"] = longest(found["bytes_half"], found["bytes"], steps)
        progress(self.name, "memory", found.get("failed") or show_bytes(found["bytes"]))

    def end(self) -> None:
        """End its process."""
        self.process.kill()
        self.process.wait()


def longest(half: int, full: int, steps: int) -> float:
    """Return the steps at which a + b T reaches 4 GiB."""
    b = max(full - half, FLAT) / (steps - steps // 2)
    return (BUDGET - (full - b * steps)) / b


def start(module: str, request: Row) -> subprocess.Popen:
    """Start a process of `peer_programs`."""
    known = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), *known])}
    command = [sys.executable, "-m", f"benchmarks.peer_programs.{module}", json.dumps(request)]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def progress(*words: Any) -> None:
    print(f"[{time.strftime('%H:%M:%S')}]", *words, file=sys.stderr, flush=True)


def measure(problem: str, arguments: argparse.Namespace) -> tuple[int, dict[str, Row]]:
    """Return the steps of a problem and the row of each library."""
    steps = problems.make(problem, arguments.device, arguments.quick).steps
    progress(problem, f"T = {steps}: reference in float64")
    with tempfile.TemporaryDirectory() as folder:
        request = {"problem": problem, "device": arguments.device, "quick": arguments.quick}
        request["exact"] = str(Path(folder, "exact.npz"))
        reference = start("reference", request)
        request["tf32"] = arguments.tf32
        libraries = [Library(n, request, arguments.limit) for n in arguments.libraries]
        try:
            if reference.wait():
                raise SystemExit(f"the reference for {problem} failed")
            for library in libraries:
                library.receive()  # it has imported what it needs, or says why not
            take = in_turns if arguments.device == "cpu" else one_by_one
            take(libraries, steps, arguments.rounds)
        finally:
            for library in libraries:
                library.end()
    return steps, {library.name: library.row for library in libraries}


def in_turns(libraries: list[Library], steps: int, rounds: int) -> None:
    for library in libraries:
        if library.alive:
            library.first()
    for _ in range(rounds):
        for library in libraries:
            if library.alive and not library.tired:
                library.time()
    for library in libraries:
        weigh([library], steps)


def one_by_one(libraries: list[Library], steps: int, rounds: int) -> None:
    """Run PyTorch's first, each ended before the next; JAX's then compile for their memory at once."""
    in_jax = [library for library in libraries if library.name in IN_JAX]
    for library in sorted(libraries, key=lambda library: library in in_jax):
        if library.alive:
            library.first()
        for _ in range(rounds):
            if library.alive and not library.tired:
                library.time()
        if library not in in_jax:
            weigh([library], steps)
            library.end()
    weigh(in_jax, steps)


def weigh(libraries: list[Library], steps: int) -> None:
    asked = [library for library in libraries if library.alive]
    for library in asked:
        library.send("memory")
    for library in asked:
        library.weigh(steps)


def show(problem: str, steps: int, rows: dict[str, Row]) -> None:
    print(f"\n{problems.NAMES[problem]}, T = {steps}")
    heads = f"{'seconds':>9} {'first call':>10} {'memory':>10} {'T in 4 GiB':>11} {'error':>8}"
    print(f"{'library':<15} {heads}  how")
    for name, row in rows.items():
        if "seconds" not in row:
            print(f"{name:<15} fails: {row.get('failed')}")
            continue
        memory = show_bytes(row["bytes"]) if "bytes" in row else "?"
        cells = f"{row['seconds']:>9.3f} {row['first_call']:>10.2f} {memory:>10}"
        how = f"{row['note']}; then fails: {row['failed']}" if "failed" in row else row["note"]
        print(f"{name:<15} {cells} {show_longest(row):>11} {row['error']:>8.0e}  {how}", flush=True)


def show_bytes(count: float) -> str:
    return f"{count / 2**20:.0f} MiB"


def show_longest(row: Row) -> str:
    if "reach_steps" in row:
        return f">={row['reach_steps']:,}" if row["reach_bytes"] <= BUDGET else "?"
    if "bytes" not in row:
        return "?"
    flat = row["bytes"] - row["bytes_half"] < FLAT
    return f"{'>' if flat else ''}{row['longest']:,.0f}"


def installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--problems", nargs="+", choices=problems.NAMES, default=[*problems.NAMES])
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=[*LIBRARIES])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default: a GPU where JAX has one")
    parser.add_argument("--quick", action="store_true", help="small sizes, to try")
    parser.add_argument("--tf32", action="store_true", help="TensorFloat-32 in both frameworks")
    parser.add_argument("--limit", type=float, help="seconds for a library's rounds of a problem")
    parser.add_argument("--out", help="write the results to this JSON file")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if arguments.device == "cpu":
        os.environ |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    import jax

    from benchmarks.harness import record

    arguments.device = "cpu" if jax.default_backend() == "cpu" else "gpu"
    arguments.limit = arguments.limit or (120.0 if arguments.device == "cpu" else 20.0)
    load = os.getloadavg()[0]
    if load > 0.5 and arguments.device == "cpu":
        progress(f"other programs are running (load {load:.1f}); see OMP_WAIT_POLICY in the source")
    waiting = os.environ.get("OMP_WAIT_POLICY", "default")
    results: dict[str, Any] = {"load": load, "OMP_WAIT_POLICY": waiting}
    for problem in arguments.problems:
        steps, rows = measure(problem, arguments)
        show(problem, steps, rows)
        results[problem] = {"steps": steps, "libraries": rows}
        if arguments.out:
            record(arguments.out, results, [name for name in PACKAGES if installed(name)])


if __name__ == "__main__":
    main()

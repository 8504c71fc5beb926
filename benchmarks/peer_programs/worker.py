"""The process of one library and one problem: computes, times itself and weighs itself when asked.

    python -m benchmarks.peer_programs.worker '{"library": "higher", "problem": "rates", ...}'

A request is a line with a word, an answer a line of JSON; what libraries print goes to standard error.

    first     build and run once                     {"seconds", "value", "error", "note"}
    time      run once more                          {"seconds"}
    memory    peak memory over T / 2 and T steps     {"bytes_half", "bytes"}; a library that keeps
              (and over a great many)                to a given memory adds "reach_steps", "reach_bytes"
"""

import ctypes
import gc
import importlib
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from . import IN_JAX, LIBRARIES, problems

FAR = 100_000


class Worker:
    """Answers the requests."""

    def __init__(
        self, library: str, problem: str, device: str, quick: bool, tf32: bool, exact: str
    ):
        self.library, self.device = library, device
        self.spec = problems.make(problem, device, quick)
        set_precision(library, tf32)
        self.module = importlib.import_module(f"benchmarks.peer_programs.{LIBRARIES[library]}")
        self.program: Any = None
        self.exact = exact

    def first(self) -> dict[str, Any]:
        """Build the program and run it once."""
        started = time.perf_counter()
        self.program = self.module.make(self.spec, self.library)
        value, grad = self.program.run()
        seconds = time.perf_counter() - started
        error = relative_error(grad, dict(np.load(self.exact)))
        return {"seconds": seconds, "value": value, "error": error, "note": self.program.note}

    def time(self) -> dict[str, Any]:
        """Run it once more."""
        started = time.perf_counter()
        self.program.run()
        return {"seconds": time.perf_counter() - started}

    def memory(self) -> dict[str, Any]:
        """Weigh it over T / 2 and T steps, and over many where that needs no running."""
        half = self.module.make(self.spec.over(self.spec.steps // 2), self.library)
        found = {"bytes_half": self.peak(half), "bytes": self.peak(self.program)}
        if self.program.reach:
            found |= {"reach_steps": FAR, "reach_bytes": self.program.reach(FAR)}
        return found

    def peak(self, program: Any) -> int:
        """Return the most that a program holds beyond its data.

        What an allocator keeps between runs hides from the resident memory: on a CPU, a program with a
        compiler is charged at least what the compiler plans.
        """
        planned = program.compiled_bytes() if program.compiled_bytes else 0
        if self.device == "cpu":
            return max(resident_peak(program.run), planned)
        return planned or cuda_peak(program.run)


def relative_error(grad: dict[str, Any], exact: dict[str, Any]) -> float:
    """Return |g - g*| / |g*|, the largest among the hyperparameters."""
    return max(
        float(np.linalg.norm(grad[name] - exact[name]) / np.linalg.norm(exact[name]))
        for name in exact
    )


def resident_peak(run) -> int:
    """Return by how much a run raises the resident memory of this process, at its highest.

    A first run loads what a library loads once. Then unused memory goes back to the system, and the
    kernel's high-water mark is set back to what is left.
    """
    run()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    run()
    return status("VmHWM") - before


def status(name: str) -> int:
    """Return a figure of this process, in bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{name}:")[1].split()[0])


def cuda_peak(run) -> int:
    """Return what a run holds at most in PyTorch's allocator, beyond what was held before."""
    import torch  # pyright: ignore[reportMissingImports]

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def set_precision(library: str, tf32: bool) -> None:
    """Let both frameworks multiply in float32 in full, or both with ten bits less on a GPU."""
    if library in IN_JAX:
        import jax

        jax.config.update("jax_default_matmul_precision", "tensorfloat32" if tf32 else "highest")
    else:
        import torch  # pyright: ignore[reportMissingImports]

        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32


def reason(e: BaseException) -> str:
    """Return an error in one line."""
    line = (str(e).strip().splitlines() or [""])[0]
    return f"{type(e).__name__}: {line}"[:160]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    warnings.simplefilter("ignore")

    def answer(found: dict[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    try:
        worker = Worker(**json.loads(sys.argv[1]))
    except Exception as e:
        answer({"failed": reason(e)})
        return
    answer({})
    for line in sys.stdin:
        try:
            answer(getattr(worker, line.strip())())
        except Exception as e:
            answer({"failed": reason(e)})


if __name__ == "__main__":
    main()

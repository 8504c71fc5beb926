"""The process of one library and one problem: runs, times and weighs it, and prints one line of JSON.

    python -m benchmarks.peer_programs.worker '{"library": "higher", "problem": "rates", ...}'

What libraries print goes to standard error. The line has "first_call", "seconds" (a list), "value",
"error", "note" and "bytes" (peak memory), as far as it came, and "failed" with the reason where it
ended early.
"""

import ctypes
import gc
import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from . import IN_JAX, LIBRARIES, problems


def measure(found: dict[str, Any], request: dict[str, Any]) -> None:
    """Build the program, run it once and then for the rounds, and weigh it."""
    library, device = request["library"], request["device"]
    spec = problems.make(request["problem"], device, request["quick"])
    set_precision(library, request["tf32"])
    module = importlib.import_module(f"benchmarks.peer_programs.{LIBRARIES[library]}")
    started = time.perf_counter()
    program = module.make(spec, library)
    found["value"], grad = program.run()
    found["first_call"] = time.perf_counter() - started
    found["error"] = relative_error(grad, dict(np.load(request["exact"])))
    found["note"], found["seconds"] = program.note, []
    while len(found["seconds"]) < request["rounds"] and sum(found["seconds"]) < request["limit"]:
        started = time.perf_counter()
        program.run()
        found["seconds"].append(time.perf_counter() - started)
    found["bytes"] = peak(program, device)


def peak(program: Any, device: str) -> int:
    """Return the most that a program holds beyond its data.

    What an allocator keeps between runs hides from the resident memory: on a CPU, a program with a
    compiler is charged at least what the compiler plans.
    """
    planned = program.compiled_bytes() if program.compiled_bytes else 0
    if device == "cpu":
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


def answer(measure: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Measure what the command line asks for, and print one line of JSON, whatever libraries print."""
    to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    try:
        measure(found, json.loads(sys.argv[1]))
    except Exception as e:
        line = (str(e).strip().splitlines() or [""])[0]
        found["failed"] = f"{type(e).__name__}: {line}"[:160]
    to.write(json.dumps(found) + "\n")
    to.close()


if __name__ == "__main__":
    answer(measure)

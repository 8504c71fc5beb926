"""A long stream in real time with checkpoints: does a window cost the same at the end?

    python -m benchmarks.soak [--windows 20000] [--every 10] [--out benchmarks/results/soak-cpu.json]

Prints the seconds for each tenth of the run, the size of the checkpoint directory and the memory of the
process. What grows with the run (its history, in memory and in one file that is appended to) is to cost
no time.
"""

import argparse
import itertools
import resource
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

import foretune as ft
from benchmarks.harness import record


class Watch(ft.Callback):
    """Notes time, memory and disk at each tenth of the run."""

    def __init__(self, directory: Path, windows: int):
        self.directory, self.every = directory, max(windows // 10, 1)
        self.rows: list[dict[str, float]] = []

    def start(self, run: ft.Run) -> None:
        """Start the clock."""
        self.began = time.perf_counter()

    def step(self, run: ft.Run) -> None:
        """Note a tenth."""
        if run.step % self.every:
            return
        now = time.perf_counter()
        files = (path for path in self.directory.rglob("*") if path.is_file())
        row = {
            "windows": run.step,
            "ms per window": 1000 * (now - self.began) / self.every,
            "disk MB": sum(path.stat().st_size for path in files) / 1e6,
            "peak memory MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        }
        print("".join(f"{number:>16.4g}" for number in row.values()), flush=True)
        self.rows.append(row)
        self.began = time.perf_counter()


def soak(windows: int, every: int, directory: Path) -> list[dict[str, float]]:
    """Run the stream, and return what was noted."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=20).astype(np.float32)

    def batch():
        x = rng.normal(size=(32, 20)).astype(np.float32)
        return x, x @ w + 0.1 * rng.normal(size=32).astype(np.float32)

    def error(params, batch):
        return jnp.mean((batch[0] @ params - batch[1]) ** 2)

    tuner = ft.RealTime(
        ft.Training(lambda p, h, b: error(p, b), lambda h: optax.sgd(h["lr"])),
        objective=lambda state, h, b: error(state.params, b),
        constraints={"lr": ft.NonNegative()},
    )
    watch = Watch(directory, windows)
    print("".join(f"{name:>16}" for name in ("windows", "ms per window", "disk MB", "memory MB")))
    tuner.run(
        (batch() for _ in itertools.count()),
        [batch()],
        params=jnp.zeros(20),
        hparams={"lr": jnp.array(0.001)},
        steps=windows,
        window=2,
        callbacks=[
            ft.Checkpoint(directory / "checkpoints", every=every),
            ft.History(directory / "metrics.jsonl"),
            watch,
        ],
    )
    return watch.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--windows", type=int, default=20_000, help="windows of two minibatches")
    parser.add_argument("--every", type=int, default=10, help="windows between two checkpoints")
    parser.add_argument("--out", help="write the results to this JSON file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = soak(arguments.windows, arguments.every, Path(folder))
    first, last = rows[1]["ms per window"], rows[-1]["ms per window"]
    print(f"last tenth / second tenth: {last / first:.2f}")
    if arguments.out:
        record(arguments.out, {"tenths": rows, "last tenth / second tenth": last / first})


if __name__ == "__main__":
    main()

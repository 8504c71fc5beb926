"""What a method of the speech experiment has spent, and what it has reached by then."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np


class Clock:
    """The seconds that a method has spent by the clock `now`, with a bar on a terminal."""

    def __init__(self, limit: float | int, title: str, now: Callable[[], float] = time.monotonic):
        from rich import progress

        self.limit, self._spent, self._since, self._now = limit, 0.0, None, now
        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TextColumn("{task.completed:.0f} of {task.total:.0f} s"),
            progress.TextColumn("{task.fields[found]}"),
        )
        self._bar = progress.Progress(*columns, disable=not sys.stdout.isatty(), transient=True)
        self._task = self._bar.add_task(title, total=limit, found="")

    def __enter__(self) -> "Clock":
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    @property
    def seconds(self) -> float | int:
        """What has been spent."""
        return self._spent + (0.0 if self._since is None else self._now() - self._since)

    @property
    def over(self) -> bool:
        """Whether there is nothing left."""
        return self.seconds >= self.limit

    def spend(self, seconds: float | int) -> None:
        """Count what an earlier run has spent."""
        self._spent += seconds

    def go(self) -> None:
        """Let the time run."""
        if self._since is None:
            self._since = self._now()

    def pause(self) -> None:
        """Let it stand."""
        self._spent, self._since = self.seconds, None

    def show(self, found: str) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=min(self.seconds, self.limit), found=found)


class Curve:
    """The measurements of a method as it goes, in the run's file, and the best of them."""

    def __init__(self, task: Any, series: str, seed: int, kept: Callable[[dict], bool]):
        self.task, self.series, self.seed, self.records = task, series, seed, []

        def stays(record):
            mine = (record["series"], record["seed"]) == (series, seed)
            if mine and kept(record):
                self.records.append(record)
            return not mine or kept(record)

        task.folder.keep_metrics(stays)

    def note(self, step: int, **measured: Any) -> None:
        """Append a line."""
        record = {"series": self.series, "seed": self.seed, "step": step, **measured}
        self.records.append(record)
        with self.task.folder.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")

    @property
    def best(self) -> dict[str, Any] | None:
        """The measurement with the highest validation accuracy."""
        return max(self.measured, key=lambda r: r["validation_accuracy"], default=None)

    @property
    def measured(self) -> list[dict[str, Any]]:
        """The measurements of accuracy within the budget; the first one in any case."""
        found = [r for r in self.records if "validation_accuracy" in r]
        return found[:1] + [r for r in found[1:] if r["seconds"] <= self.task.budget]

    def outcome(self, clock: Clock, steps: int, **more: Any) -> dict[str, Any]:
        """Return what the method has reached."""
        best = self.best or {"validation_accuracy": 0.0, "test_accuracy": 0.0}  # diverged at once
        measured = self.measured
        highest = np.maximum.accumulate([0.0, *(r["validation_accuracy"] for r in measured)])
        return {
            "validation_accuracy": best["validation_accuracy"],
            "test_accuracy": best["test_accuracy"],
            "seconds": clock.seconds,
            "steps": steps,
            "curve": [[r["seconds"], float(a)] for r, a in zip(measured, highest[1:], strict=True)],
            **more,
        }

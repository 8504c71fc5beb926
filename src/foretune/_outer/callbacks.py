"""Callbacks: what happens beside a run. Progress, history, TensorBoard."""

import contextlib
import json
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from .._files.files import append, as_path, locked, make_folder, write_whole
from .._files.records import Record
from .run import Run

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID
    from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]


class Callback:
    """The base of all callbacks; override what you need of `start`, `step` and `end`.

    Each gets the `Run`: `step` and `steps`, `hparams`, `value`, `grad`, `state`, `record`, `history`
    and `best`. `end` is called however the run ends; the last to start is the first to end.

    >>> import foretune as ft
    >>> class Printer(ft.Callback):
    ...     def step(self, run):
    ...         print(run.step, run.record["value"])
    """

    resumes: bool = False
    """Whether `start` may resume an earlier run: it comes before that of others, `step` after."""
    coarse: bool = False
    """Whether one call will do for several steps (of a draw), their records in `run.new`, no state."""

    def start(self, run: Run) -> None:
        """Do what is to be done before the first evaluation."""

    def step(self, run: Run) -> None:
        """Do what is to be done after each evaluation."""

    def end(self, run: Run) -> None:
        """Do what is to be done when the run ends."""


class Progress(Callback):
    """A progress bar: step, value, gradient norm, metrics, time left. Quiet off a terminal.

    >>> import foretune as ft
    >>> progress = ft.Progress()
    """

    coarse = True

    def __init__(self, description: str = "tuning"):
        self.description = description
        self._bar: Bar
        self._task: TaskID

    def start(self, run: Run) -> None:
        from rich import get_console, progress

        columns = (
            progress.TextColumn("{task.description}", markup=False),  # brackets are names' own
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[numbers]}", markup=False),
        )
        visible = sys.stdout.isatty() or get_console().is_jupyter
        self._bar = progress.Progress(*columns, disable=not visible)
        self._task = self._bar.add_task(
            self.description, total=run.steps, completed=run.step, numbers=""
        )
        self._bar.start()

    def step(self, run: Run) -> None:
        names = (name for name in run.record if name not in ("step", "rejected"))
        numbers = "  ".join(f"{name} {_short(run.record[name])}" for name in names)
        self._bar.update(self._task, completed=run.step, numbers=numbers)

    def end(self, run: Run) -> None:
        self._bar.stop()


class History(Callback):
    """Writes each record as a line of JSON, as the run goes.

    A file with records is never overwritten; a run that a `Checkpoint` resumes continues its own.

    >>> import foretune as ft
    >>> history = ft.History("runs/clean/metrics.jsonl")
    """

    coarse = True

    def __init__(self, path: str | Path):
        self.path = as_path(path, "History")
        self._lock = contextlib.ExitStack()

    def start(self, run: Run) -> None:
        make_folder(self.path.parent)
        with contextlib.ExitStack() as stack:  # no other run may have the file
            stack.enter_context(locked(self.path.parent, file=self.path.name))
            self._begin(run)
            self._lock = stack.pop_all()

    def _begin(self, run: Run) -> None:
        """Begin the file, or put that of a resumed run to where it resumes."""
        text = self.path.read_text("utf-8", "replace") if self.path.exists() else ""
        lines = text.splitlines(keepends=True)
        # Of a run that was killed before its first checkpoint there is one record at most.
        if lines and not run.resumed and not (run.begun and len(lines) == 1):
            held = f"{self.path} holds {len(lines)} records of an earlier run"
            raise FileExistsError(f"{held}. Give another path, or its `Checkpoint` to continue it.")
        records = {record["step"]: _line(record) for record in run.history}
        for line in lines:
            if not line.endswith("\n"):  # a kill has cut it
                continue
            try:
                step = _step_of(line, records)
            except (ValueError, TypeError, KeyError) as error:
                raise FileExistsError(
                    f"{self.path} holds the records of another run, not of this."
                ) from error
            if run.resumed and step <= run.step:  # the checkpoint may have lost it
                records.setdefault(step, line)
        write_whole(self.path, "".join(records[step] for step in sorted(records)))

    def step(self, run: Run) -> None:
        append(self.path, "".join(map(_line, run.new)).encode())

    def end(self, run: Run) -> None:
        self._lock.close()


def _line(record: Record) -> str:
    return json.dumps(record) + "\n"


def _step_of(line: str, records: dict[int, str]) -> int:
    """Return the step of a line's record; raise where it is none, or not the one that is known."""
    ours = json.loads(line)
    step = ours["step"]
    theirs = json.loads(records.get(step, line))
    # Other callbacks may have added entries to either. As text, NaN is equal to NaN.
    if any(json.dumps(ours[name]) != json.dumps(theirs[name]) for name in ours.keys() & theirs):
        raise ValueError("another record of this step")
    if type(step) is not int:
        raise TypeError("the step is no whole number")
    return step


class TensorBoard(Callback):
    """Writes the scalars of each record for TensorBoard (needs the package tensorboardX).

    >>> import foretune as ft
    >>> board = ft.TensorBoard("runs/clean/tensorboard")
    """

    coarse = True

    def __init__(self, directory: str | Path):
        self.directory = as_path(directory, "TensorBoard")
        self._writer: SummaryWriter

    def start(self, run: Run) -> None:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

        make_folder(self.directory)
        # What lies beyond the step resumed from is dropped; names differ within a second.
        purge, suffix = run.step or None, f".{secrets.token_hex(4)}"
        self._writer = SummaryWriter(str(self.directory), purge_step=purge, filename_suffix=suffix)

    def step(self, run: Run) -> None:
        for record in run.new:
            for path, number in jax.tree.leaves_with_path(record):
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                if name != "step":
                    self._writer.add_scalar(name, number, record["step"])

    def end(self, run: Run) -> None:
        self._writer.close()


def _short(x: object) -> str:
    if isinstance(x, float):
        return f"{x:.4g}"
    if isinstance(x, dict):
        return "{" + ", ".join(f"{name} {_short(value)}" for name, value in x.items()) + "}"
    return f"[{_short(x[0])}, ...]" if isinstance(x, list) and x else str(x)

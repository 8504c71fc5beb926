"""What a command says: errors in plain words, a finished run's tables, where its page is."""

import contextlib
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .._outer.callbacks import Callback
from .._outer.run import Run
from ._page import read_result
from ._text import shown


def command_line(about: str) -> typer.Typer:
    """Return an empty command line, with what `--help` says of it."""
    return typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help=about,
    )


@contextlib.contextmanager
def plain_errors(debug: bool, resume: Path | None = None) -> Iterator[None]:
    """Say what is wrong in a sentence and exit with 1; after Ctrl-C with 130, after SIGTERM 143."""
    show, status = warnings.showwarning, 130
    warnings.showwarning = lambda message, *_, **__: say(f"foretune: note: {message}")

    def terminate(number: int, frame: FrameType | None) -> None:  # does what Ctrl-C does then
        nonlocal status
        status = 143
        interrupt = signal.getsignal(signal.SIGINT)  # a descent's own, which ends it after a step
        if not callable(interrupt):  # a job in the background may have Ctrl-C ignored
            raise KeyboardInterrupt
        interrupt(signal.SIGINT, frame)

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, terminate) if main else None
    try:
        yield
    except KeyboardInterrupt:
        if resume is not None and resume.exists():
            say(f"foretune: interrupted; the same command continues from {resume}.")
        raise typer.Exit(status) from None
    except (ValueError, OSError, ImportError, ArithmeticError) as error:
        if debug:
            raise
        words = [str(error) or type(error).__name__, *getattr(error, "__notes__", [])]
        say("foretune: " + "\n".join(words))
        raise typer.Exit(1) from None
    except (MemoryError, RuntimeError) as error:
        if debug or not (isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)):
            raise
        say("foretune: out of memory: give fewer rows, steps or units (see --help).")
        raise typer.Exit(1) from None
    finally:
        warnings.showwarning = show
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def say(line: str) -> None:
    """Print a line at once, on standard error: results alone go to standard output."""
    print(shown(line, allowed="\n"), file=sys.stderr, flush=True)


class Lines(Callback):
    """Progress where there is no terminal for a bar: a line for the first step and each tenth."""

    def __init__(self, what: str = "hyper-iterations"):
        self.what = what

    def start(self, run: Run) -> None:
        self._began, self._tenth = time.monotonic(), -1

    def step(self, run: Run) -> None:
        tenth = 10 * run.step // (run.steps or 1)
        if tenth > self._tenth and not sys.stdout.isatty():
            self._tenth = tenth
            seconds = time.monotonic() - self._began
            say(f"  {run.step:,} of {run.steps or 0:,} {self.what}, {seconds:.0f} s")


def _text(value: object) -> Text:  # which is not read as markup
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    return Text(shown(text))


def show_result(page: Path) -> None:
    """Print a finished run's headline and tables, to a log as well, then where its page is."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    result = read_result(page.parent)
    console.print(_text(result["headline"]))
    for content in result["tables"]:
        table = Table(title=_text(content["title"]), title_justify="left")
        for i, name in enumerate(content["columns"]):
            table.add_column(_text(name), justify="right" if i else "left")
        for row in content["rows"]:
            table.add_row(*map(_text, row))
        console.print(table)
    print(page)
    say(f"Open it in a browser: {page.resolve().as_uri()}")

"""What a command says: errors in plain words, a finished run's tables, where its page is."""

import contextlib
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table


@contextlib.contextmanager
def plain_errors(debug: bool, resume: Path | None = None) -> Iterator[None]:
    """Say what is wrong in a sentence and exit with 1, or after an interrupt with 130."""
    show = warnings.showwarning
    warnings.showwarning = lambda message, *_, **__: say(f"note: {message}")
    try:
        yield
    except KeyboardInterrupt:
        if resume is not None and resume.exists():
            say(
                f"interrupted: what there is lies in {resume}; the same command continues from there."
            )
        raise typer.Exit(130) from None
    except (ValueError, OSError, ImportError, ArithmeticError) as error:
        if debug:
            raise
        say("\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", [])]))
        raise typer.Exit(1) from None
    except (MemoryError, RuntimeError) as error:
        if debug or not (isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)):
            raise
        say("out of memory: give fewer rows, steps or units (see --help).")
        raise typer.Exit(1) from None
    finally:
        warnings.showwarning = show


def say(message: str) -> None:
    """Print a sentence on standard error."""
    Console(stderr=True).print(
        f"foretune: {message}", markup=False, highlight=False, soft_wrap=True
    )


def note_finished(folder: Path) -> None:
    """Say so where the folder holds a finished run."""
    if (folder / "result.json").is_file():
        say(f"note: {folder} holds a finished run; with the same settings it is shown again.")


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def show_tables(folder: Path) -> None:
    """Print the result's headline and tables; to a log as well as to a terminal."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    result = json.loads((folder / "result.json").read_text())
    console.print(result["headline"], markup=False, highlight=False)
    for content in result["tables"]:
        table = Table(title=content["title"], title_justify="left")
        for i, name in enumerate(content["columns"]):
            table.add_column(name, justify="right" if i else "left")
        for row in content["rows"]:
            table.add_row(*map(_cell, row))
        console.print(table)

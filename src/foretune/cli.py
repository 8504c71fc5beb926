"""The command line: `foretune clean`, `foretune attribute`, `foretune report`.

Exit status: 0 when done, 1 when something is wrong with what was given (a message on standard error;
with `--debug` the traceback), 2 for a wrong use of the command, 130 after Ctrl-C and 143 after SIGTERM,
which lose nothing: the same command continues.
"""

import enum
import importlib.metadata
import re
from pathlib import Path
from typing import Annotated

import typer

from .report import command_line, plain_errors, show_result, write_page

app = command_line(
    "Hyperparameters by gradients: find wrong labels, explain predictions, read the reports."
)

MOST_STEPS = 1_000_000
"""More steps than this are a slip of the hand: they would take weeks."""
Label = Annotated[str | None, typer.Option(help="The column (or array) of labels.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Train = Annotated[Path, typer.Argument(help="Training rows and labels: .npz, .csv or .parquet.")]
Text = Annotated[list[str] | None, typer.Option(help="A column of text (repeatable).")]
Drop = Annotated[list[str] | None, typer.Option(help="A column to leave out (repeatable).")]
Image = Annotated[str | None, typer.Option(help="Rows are images of this shape, 28x28 or 32x32x3.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Random seed.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="The run's folder.", show_default="in runs/, by file names"),
]
STATUS = (
    "The same command resumes an interrupted run. "
    "Exit status: 0 done, 1 bad input, 2 wrong use, 130 or 143 interrupted."
)
Trusted = Annotated[Path | None, typer.Option("--clean", help="Other rows with trusted labels.")]
Checked = Annotated[
    Path | None, typer.Option(help="A .csv of verified rows: right labels, and --id (or `row`).")
]
Id = Annotated[str | None, typer.Option(help="The column by which verified rows are found.")]
Relabel = Annotated[bool, typer.Option("--relabel", help="Correct labels, leave no row out.")]


class Model(enum.StrEnum):
    """Models of `foretune attribute`."""

    softmax = "softmax"
    mlp = "mlp"


def _version(show: bool) -> bool:
    if show:
        print(importlib.metadata.version("foretune"))
        raise typer.Exit
    return show


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command(
    epilog="Examples:\n\n"
    "`foretune clean train.csv --label species --checked verified.csv`\n\n"
    "`foretune clean reviews.parquet --clean checked.parquet --text review --out suspects`\n\n"
    "`foretune clean train.csv --label species --checked verified.csv --id number --relabel`\n\n"
    "`foretune clean images.npz --clean checked.npz --image 28x28`\n\n"
    "TRAIN and --clean need the same columns. suspects.csv lists the suspected labels, the most "
    "suspicious first; weights.csv has every row, cleaned.csv (or .npz) the rows that are left. "
    + STATUS
)
def clean(
    train: Train,
    clean: Trusted = None,
    checked: Checked = None,
    id: Id = None,
    relabel: Relabel = False,
    out: Out = None,
    label: Label = None,
    text: Text = None,
    drop: Drop = None,
    image: Image = None,
    seed: Seed = 0,
    debug: Debug = False,
) -> None:
    """Find the wrong labels in TRAIN, with the help of a few verified rows or without.

    Writes a ranked list of suspects, all rows' weights, the rows without suspects, and a report.
    """
    out = out or Path("runs") / f"clean-{train.stem}"
    with plain_errors(debug, out):
        from .apps import _files

        settings = _files.Settings(
            train=str(train),
            clean=clean and str(clean),
            checked=checked and str(checked),
            id=id,
            relabel=relabel,
            label=label,
            text=tuple(text or ()),
            drop=tuple(drop or ()),
            image=_shape(image),
            seed=seed,
        )
        page = _files.run(out, settings)
        print(page.parent / "suspects.csv")
        show_result(page)


@app.command(
    epilog="Examples:\n\n"
    "`foretune attribute train.csv wrong.csv --label species`\n\n"
    "`foretune attribute images.npz queries.npz --model mlp --most 8`\n\n"
    "`foretune attribute reviews.parquet asked.parquet --text review --out why`\n\n"
    "Labels are classes. Both files need the same columns. If QUERIES has no labels, what the model "
    "predicts is explained. most.csv lists the rows that helped and harmed each query most, "
    "scores.npz holds the matrix of all scores (queries x rows). " + STATUS
)
def attribute(
    train: Train,
    queries: Annotated[Path, typer.Argument(help="Rows to explain, with or without labels.")],
    out: Out = None,
    label: Label = None,
    text: Text = None,
    drop: Drop = None,
    image: Image = None,
    model: Annotated[
        Model, typer.Option(help="What is trained: softmax regression or a small network.")
    ] = Model.softmax,
    most: Annotated[
        int, typer.Option(min=1, max=1000, help="Helpful and harmful rows to list for each query.")
    ] = 5,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_STEPS, help="Training steps.", show_default="20 epochs, 100 at least"
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=1e-9, help="Learning rate.", show_default="0.3 for softmax, 0.03 for mlp"),
    ] = None,
    seed: Seed = 0,
    debug: Debug = False,
) -> None:
    """Find the rows of TRAIN that helped and harmed the prediction of each row of QUERIES.

    Writes the scores of all rows, a list of those that matter most for each query, and a report.
    """
    out = out or Path("runs") / f"attribute-{train.stem}-{queries.stem}"
    with plain_errors(debug, out):
        from .apps import _explain

        settings = _explain.ExplainSettings(
            train=str(train),
            queries=str(queries),
            label=label,
            text=tuple(text or ()),
            drop=tuple(drop or ()),
            image=_shape(image),
            model=model.value,
            most=most,
            steps=steps,
            rate=rate,
            seed=seed,
        )
        page = _explain.run(out, settings)
        print(page.parent / "most.csv")
        show_result(page)


@app.command(epilog="Example: `foretune report runs/clean-train`")
def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a command or an experiment.")],
    debug: Debug = False,
) -> None:
    """Write a run's page, report.html: one file that opens offline. Unfinished runs have one too."""
    with plain_errors(debug):
        print(write_page(folder))


def _shape(image: str | None) -> tuple[int, ...] | None:
    if image is None:
        return None
    parts = image.lower().split("x")
    if len(parts) not in (2, 3) or not all(re.fullmatch("0*[1-9][0-9]{,5}", p) for p in parts):
        raise typer.BadParameter(f"{image!r}: give height x width, as 28x28 or 32x32x3.")
    return tuple(map(int, parts))

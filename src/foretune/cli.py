"""The command line: `foretune run`, `foretune clean`, `foretune report`.

Exit status: 0 when done, 1 when something is wrong with what was given (a message on standard error;
with `--debug` the traceback), 2 for a wrong use of the command, 130 after an interrupt, which loses
nothing: the same command goes on.
"""

import contextlib
import enum
import importlib.metadata
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Hyperparameters by gradients: find wrong labels, repeat the experiments, read the reports.",
)
experiments = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")
app.add_typer(experiments, name="run", help="Repeat an experiment of the paper.")

Label = Annotated[str | None, typer.Option(help="A file's column (or array) of labels.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="The run's folder.", show_default=False)
]


class Model(enum.StrEnum):
    """Models of `foretune clean`."""

    kernel = "kernel"
    softmax = "softmax"
    mlp = "mlp"


class Method(enum.StrEnum):
    """Methods of `foretune clean`."""

    noise = "noise"
    weights = "weights"


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


@contextlib.contextmanager
def _plain_errors(debug: bool, resume: Path | None = None) -> Iterator[None]:
    from .data import DataError
    from .experiments._folder import RunError
    from .report import ReportError

    ours = (DataError, RunError, ReportError)
    show = warnings.showwarning
    warnings.showwarning = lambda message, *_, **__: _say(f"note: {message}")
    try:
        yield
    except KeyboardInterrupt:
        if resume is not None and resume.exists():
            _say(
                f"interrupted: what there is lies in {resume}; the same command goes on from there."
            )
        raise typer.Exit(130) from None
    except (*ours, ValueError, OSError, ImportError, ArithmeticError) as error:
        if debug:
            raise
        _say("\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", [])]))
        raise typer.Exit(1) from None
    except (MemoryError, RuntimeError) as error:
        if debug or not (isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)):
            raise
        _say("out of memory: give fewer rows, steps or units (see --help).")
        raise typer.Exit(1) from None
    finally:
        warnings.showwarning = show


def _say(message: str) -> None:
    Console(stderr=True).print(
        f"foretune: {message}", markup=False, highlight=False, soft_wrap=True
    )


@experiments.command(
    epilog="Examples:\n\n"
    "`foretune run cleaning` — digits, about a minute on two CPU cores\n\n"
    "`foretune run cleaning --data mnist --seeds 5` — the paper's Table 1, minutes on a GPU\n\n"
    "`foretune run cleaning --data mine.npz --quick` — your data, a first look"
)
def cleaning(
    data: Annotated[
        str, typer.Option(help="digits, mnist, or a .npz, .csv or .parquet file of right labels.")
    ] = "digits",
    label: Label = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Splits to average over.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each training (T).")] = None,
    iterations: Annotated[int | None, typer.Option(min=1, help="Hyper-iterations.")] = None,
    noise: Annotated[float, typer.Option(min=0, max=0.9, help="Share of wrong labels.")] = 0.5,
    quick: Annotated[bool, typer.Option("--quick", help="Seconds instead of minutes.")] = False,
    out: Out = None,
    debug: Debug = False,
) -> None:
    """Data hyper-cleaning: half the training labels are wrong; which ones?

    Oracle, Baseline, and DH-R for four budgets R, as in Table 1 of the paper, beside the default method
    of `foretune clean`. Interrupted, the same command goes on where it was. Ends with the path of a
    report.
    """
    out = out or Path("runs") / f"cleaning-{Path(data).stem}{'-quick' if quick else ''}"
    with _plain_errors(debug, out):
        from .experiments import cleaning as experiment

        usual = experiment.defaults(data, quick)
        settings = experiment.Settings(
            data,
            usual["seeds"] if seeds is None else seeds,
            usual["steps"] if steps is None else steps,
            usual["iterations"] if iterations is None else iterations,
            noise,
            quick,
            label,
        )
        _note_finished(out)
        page = experiment.run(out, settings)
        _show_tables(page.parent)
        print(page)


@experiments.command(
    epilog="Examples:\n\n"
    "`foretune run multitask --quick` — digits, a first look\n\n"
    "`foretune run multitask --data cifar` — the paper's Tables 2 and 4, minutes on a GPU\n\n"
    "`foretune run multitask --data features.npz --per-class 4` — your data"
)
def multitask(
    data: Annotated[
        str,
        typer.Option(
            help="digits, mnist, cifar10, cifar100, cifar (both), or a .npz, .csv or .parquet file."
        ),
    ] = "digits",
    label: Label = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Splits to average over; 5, for CIFAR 10, by default.")
    ] = None,
    per_class: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Labelled rows of a class to train on, and as many to validate; 5, for CIFAR-100 3.",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of a training, folds; 100.")
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(min=1, help="Hyper-iterations, folds; 40.")
    ] = None,
    paper_steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps of a training, single split; 500, for CIFAR 1000."),
    ] = None,
    paper_iterations: Annotated[
        int | None, typer.Option(min=1, help="Hyper-iterations, single split; 60, for CIFAR 100.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A minute instead of many.")] = False,
    out: Out = None,
    debug: Debug = False,
) -> None:
    """Learning task interactions: which classes help each other, from a few rows of each?

    STL, NMTL, HMTL and HMTL-S as in Table 2 of the paper, and with folds, beside output-kernel
    learning, a p-norm method and logistic regression. Interrupted, the same command goes on where it
    was. Ends with the path of a report.
    """
    out = out or Path("runs") / f"multitask-{Path(data).stem}{'-quick' if quick else ''}"
    with _plain_errors(debug, out):
        from .experiments import multitask as experiment

        given = {
            "seeds": seeds,
            "per_class": per_class,
            "steps": steps,
            "iterations": iterations,
            "paper_steps": paper_steps,
            "paper_iterations": paper_iterations,
        }
        asked = {name: value for name, value in given.items() if value is not None}
        usual = experiment.defaults(data, quick)
        settings = experiment.Settings(data=data, quick=quick, label=label, **(usual | asked))
        _note_finished(out)
        page = experiment.run(out, settings)
        _show_tables(page.parent)
        print(page)


@experiments.command(
    epilog="Examples:\n\n"
    "`foretune run phones --quick` — a small network, three minutes on two CPU cores\n\n"
    "`foretune run phones` — the paper's network and 1.5 million frames, on a GPU\n\n"
    "`foretune run phones --data /path/to/TIMIT` — your copy of TIMIT"
)
def phones(
    data: Annotated[
        str,
        typer.Option(help="synthetic, timit (in FORETUNE_DATA), or the folder of a copy of TIMIT."),
    ] = "synthetic",
    frames: Annotated[
        int | None, typer.Option(min=1000, help="Frames of synthetic speech; 1,500,000.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds for each method and seed; 100.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds of each method; 3.")] = None,
    searches: Annotated[
        int | None, typer.Option(min=1, help="Seeds of the random search; 5.")
    ] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Units of a layer; 2000.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Hidden layers; 4.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Frames of a minibatch; 500.")] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Minibatches of a hyper-batch; 200.")
    ] = None,
    cepstral: Annotated[
        bool, typer.Option("--cepstral", help="Cepstral coefficients, not log filter outputs.")
    ] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="40,000 frames, 2 layers of 128 units, 15 seconds for each, one seed."
        ),
    ] = False,
    out: Out = None,
    debug: Debug = False,
) -> None:
    """Phone classification: tune a speech network while it trains.

    Its learning rate, momentum and the weight of an auxiliary task, by random search, Bayesian
    optimization and real-time tuning as in Tables 3 and 5 of the paper, and by this package's
    defaults, each with the same time. Interrupted, the same command goes on
    where it was. Ends with the path of a report.
    """
    out = out or Path("runs") / f"phones-{Path(data).name}{'-quick' if quick else ''}"
    with _plain_errors(debug, out):
        from .experiments import phones as experiment

        if frames is not None and data != "synthetic":
            raise typer.BadParameter("--frames is for synthetic speech; TIMIT is read whole.")
        given = {
            "frames": frames,
            "budget": budget,
            "seeds": seeds,
            "searches": searches,
            "width": width,
            "layers": layers,
            "batch": batch,
            "window": window,
        }
        asked = {name: value for name, value in given.items() if value is not None}
        usual = experiment.QUICK if quick else experiment.Settings()
        _note_finished(out)
        page = experiment.run(out, usual._replace(data=data, cepstral=cepstral, **asked))
        _show_tables(page.parent)
        print(page)


@experiments.command(
    epilog="Examples:\n\n"
    "`foretune run complexity --quick` — a first look, a minute or two on two CPU cores\n\n"
    "`foretune run complexity` — the paper's Appendix A, minutes on a GPU\n\n"
    "`foretune run complexity --network 1353-2000-2000-2000-2000-183 --steps 50 --batch 500` — "
    "15 million weights"
)
def complexity(
    network: Annotated[
        str | None, typer.Option(help="Inputs, hidden layers and classes; 784-200-200-10.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of a training (T); 1000.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Examples of a minibatch; 100.")] = None,
    hyperparameters: Annotated[
        str | None,
        typer.Option(help="Numbers of hyperparameters (m); 2,4,8,16,32,64,256,1024,4096."),
    ] = None,
    forward: Annotated[
        int | None, typer.Option(min=2, help="The largest m for forward mode; 64.")
    ] = None,
    widths: Annotated[
        str | None,
        typer.Option(help="Units of the hidden layers; 50,100,200,400,800,1600,3200."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Times that each is measured; 5.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="20 steps, fewer and smaller points, 3 rounds.")
    ] = False,
    out: Out = None,
    debug: Debug = False,
) -> None:
    """Time and memory of forward and reverse mode, as in Appendix A of the paper.

    Against the number of hyperparameters, of weights and of steps, beside plain training. A program
    that does not fit the device's memory is skipped. Interrupted, the same command goes on where it
    was. Ends with the path of a report.
    """
    name = f"complexity{f'-{network}' if network else ''}{'-quick' if quick else ''}"
    out = out or Path("runs") / name
    with _plain_errors(debug, out):
        from .experiments import complexity as experiment

        given = {
            "network": _numbers(network, "-", "784-200-200-10"),
            "steps": steps,
            "batch": batch,
            "hyperparameters": _numbers(hyperparameters, ",", "2,8,64"),
            "forward": forward,
            "widths": _numbers(widths, ",", "100,200,400"),
            "rounds": rounds,
        }
        asked = {name: value for name, value in given.items() if value is not None}
        usual = experiment.QUICK if quick else experiment.Settings()
        settings = usual._replace(seed=seed, **asked)
        experiment.check(settings)
        _note_finished(out)
        page = experiment.run(out, settings)
        _show_tables(page.parent)
        print(page)


@app.command(
    epilog="Examples:\n\n"
    "`foretune clean train.csv --clean checked.csv --label species`\n\n"
    "`foretune clean reviews.parquet --clean checked.parquet --text review --out suspects`\n\n"
    "`foretune clean images.npz --clean checked.npz --image 28x28`\n\n"
    "Both files need the same columns. suspects.csv lists the labels held to be wrong, the most "
    "suspicious first; weights.csv has every row. Exit status: 0 done, 1 bad input, 2 wrong use, "
    "130 interrupted (the same command resumes)."
)
def clean(
    train: Annotated[
        Path, typer.Argument(help="Training rows and labels: .npz, .csv or .parquet.")
    ],
    clean: Annotated[Path, typer.Option("--clean", help="Rows whose labels were checked.")],
    out: Out = None,
    label: Label = None,
    text: Annotated[list[str] | None, typer.Option(help="A column of text (repeatable).")] = None,
    drop: Annotated[
        list[str] | None, typer.Option(help="A column to leave out (repeatable).")
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Rows are images of this shape, as 28x28 or 32x32x3.")
    ] = None,
    model: Annotated[Model, typer.Option(help="What is trained.")] = Model.kernel,
    method: Annotated[
        Method, typer.Option(help="A matrix of label noise, or the paper's free weights.")
    ] = Method.noise,
    budget: Annotated[
        float | None,
        typer.Option(help="Bound on the sum of weights: a number of rows above 1, or a fraction."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each training.")] = None,
    iterations: Annotated[int | None, typer.Option(min=1, help="Hyper-iterations.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    debug: Debug = False,
) -> None:
    """Find the wrong labels in TRAIN with the help of a few CHECKED rows.

    Writes a ranked list of suspects, the weights of all rows, and a report.
    """
    out = out or Path("runs") / f"clean-{train.stem}"
    with _plain_errors(debug, out):
        from .experiments import clean_file

        _note_finished(out)
        page = clean_file.run(
            out,
            clean_file.Settings(
                str(train),
                str(clean),
                label,
                tuple(text or ()),
                tuple(drop or ()),
                _shape(image),
                model.value,
                method.value,
                budget,
                steps,
                iterations,
                seed,
            ),
        )
        _show_tables(page.parent)
        print(page.parent / "suspects.csv")
        print(page)


@app.command(epilog="Example: `foretune report runs/cleaning-digits`")
def report(
    folder: Annotated[Path, typer.Argument(help="A run's folder.")], debug: Debug = False
) -> None:
    """Write a run's page, report.html: one file that opens offline. Unfinished runs have one too."""
    with _plain_errors(debug):
        from .report import write_page

        print(write_page(folder))


def _note_finished(folder: Path) -> None:
    if (folder / "result.json").is_file():
        _say(f"note: {folder} holds a finished run; with the same settings it is shown again.")


def _shape(image: str | None) -> tuple[int, ...] | None:
    if image is None:
        return None
    parts = image.lower().split("x")
    if not all(part.isdigit() and int(part) > 0 for part in parts) or len(parts) not in (2, 3):
        raise typer.BadParameter(f"{image!r}: give height x width, as 28x28 or 32x32x3.")
    return tuple(map(int, parts))


def _numbers(text: str | None, separator: str, example: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(separator)]
    if not all(part.isdigit() for part in parts):
        raise typer.BadParameter(f"{text!r}: give whole numbers, as {example}.")
    return tuple(map(int, parts))


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _show_tables(folder: Path) -> None:
    """Print the result's headline and tables; to a log as well as to a terminal."""
    import json

    from rich.table import Table

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

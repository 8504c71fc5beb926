"""`python -m experiments`: the experiments of the documentation, from a checkout.

Exit status: 0 when done, 1 when something is wrong with what was given (a message on standard error;
with `--debug` the traceback), 2 for a wrong use of the command, 130 after Ctrl-C and 143 after SIGTERM,
which lose nothing: the same command continues.
"""

import math
import re
from pathlib import Path
from typing import Annotated

import typer

from foretune.cli import MOST_STEPS, Debug, Label, Seed
from foretune.report import command_line, plain_errors, show_result

app = command_line("Repeat the experiments of the documentation.")

MOST_SEEDS = 1000
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="The run's folder; by default in runs/, named after the experiment and its data.",
        show_default=False,
    ),
]


def _number(value: float | None) -> float | None:
    """Refuse nan, which lies in every range."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is not a number.")
    return value


@app.command(
    epilog="Examples:\n\n"
    "`python -m experiments cleaning` — digits, about a minute on two CPU cores\n\n"
    "`python -m experiments cleaning --data mnist --seeds 5` — the paper's Table 1, on a GPU\n\n"
    "`python -m experiments cleaning --data mine.npz --quick` — your data, a first look"
)
def cleaning(
    data: Annotated[
        str, typer.Option(help="digits, mnist, or a .npz, .csv or .parquet file of right labels.")
    ] = "digits",
    label: Label = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_SEEDS, help="Splits to average over; by default 5, for the digits 1."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_STEPS,
            help="Steps of each training; by default 1000, for the digits 500.",
        ),
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_STEPS, help="Hyper-iterations; by default 500, for the digits 150."
        ),
    ] = None,
    noise: Annotated[
        float, typer.Option(min=0, max=0.9, callback=_number, help="Share of wrong labels.")
    ] = 0.5,
    quick: Annotated[
        bool, typer.Option("--quick", help="1 seed, 100 steps, 80 hyper-iterations.")
    ] = False,
    out: Out = None,
    debug: Debug = False,
) -> None:
    """Data hyper-cleaning: half the training labels are wrong; which ones?

    Compares Oracle, Baseline and DH-R for four budgets R, as in Table 1 of the paper, and the default
    method of `foretune clean`. An interrupted run continues with the same command. The last line is
    the path of the report.
    """
    out = out or Path("runs") / f"cleaning-{Path(data).stem}{'-quick' if quick else ''}"
    with plain_errors(debug, out):
        from .cleaning import experiment

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
        show_result(experiment.run(out, settings))


@app.command(
    epilog="Examples:\n\n"
    "`python -m experiments multitask --quick` — digits, a first look\n\n"
    "`python -m experiments multitask --data cifar` — the paper's Tables 2 and 4, minutes on a GPU\n\n"
    "`python -m experiments multitask --data features.npz --per-class 4` — your data"
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
        int | None,
        typer.Option(
            min=1, max=MOST_SEEDS, help="Splits to average over; by default 5, for CIFAR 10."
        ),
    ] = None,
    per_class: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=100_000,
            help="Rows of each class to train on, and as many to validate; "
            "by default 5, for CIFAR-100 3.",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_STEPS, help="Steps of a training with folds; by default 100."),
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_STEPS, help="Hyper-iterations with folds; by default 40."),
    ] = None,
    paper_steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_STEPS,
            help="Steps of a training with a single split; by default 500, for CIFAR 1000.",
        ),
    ] = None,
    paper_iterations: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_STEPS,
            help="Hyper-iterations with a single split; by default 60, for CIFAR 100.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer seeds and steps: takes about a minute.")
    ] = False,
    out: Out = None,
    debug: Debug = False,
) -> None:
    """Learning task interactions: which classes help each other, from a few rows of each?

    Compares STL, NMTL, HMTL and HMTL-S, as in Table 2 of the paper and with folds, with output-kernel
    learning, a p-norm method and logistic regression. An interrupted run continues with the same
    command. The last line is the path of the report.
    """
    out = out or Path("runs") / f"multitask-{Path(data).stem}{'-quick' if quick else ''}"
    with plain_errors(debug, out):
        from .multitask import experiment

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
        show_result(experiment.run(out, settings))


@app.command(
    epilog="Examples:\n\n"
    "`python -m experiments phones --quick` — a small network, three minutes on two CPU cores\n\n"
    "`python -m experiments phones` — the paper's network and 1.5 million frames, on a GPU\n\n"
    "`python -m experiments phones --data /path/to/TIMIT` — your copy of TIMIT"
)
def phones(
    data: Annotated[
        str,
        typer.Option(
            help="synthetic, timit (read from FORETUNE_DATA), or the folder of your copy of TIMIT."
        ),
    ] = "synthetic",
    frames: Annotated[
        int | None,
        typer.Option(
            min=1000, max=100_000_000, help="Frames of synthetic speech; by default 1,500,000."
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=1e7,
            callback=_number,
            help="Seconds for each method and seed; by default 100.",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=MOST_SEEDS, help="Seeds of each method; by default 3.")
    ] = None,
    searches: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_SEEDS, help="Seeds of the random search; by default 5."),
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(min=1, max=100_000, help="Units of each hidden layer; by default 2000."),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, max=100, help="Hidden layers; by default 4.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, max=10_000_000, help="Frames of a minibatch; by default 500."),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000,
            help="Minibatches between two updates of the hyperparameters; by default 200.",
        ),
    ] = None,
    cepstral: Annotated[
        bool,
        typer.Option("--cepstral", help="Use cepstral coefficients instead of log filter outputs."),
    ] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="40,000 frames, 2 layers of 128 units, 15 seconds for each method, 1 seed.",
        ),
    ] = False,
    out: Out = None,
    debug: Debug = False,
) -> None:
    """Phone classification: tune a speech network while it trains.

    Tunes the learning rate, the momentum and the weight of an auxiliary task. Compares random search,
    Bayesian optimization and real-time tuning, as in Tables 3 and 5 of the paper, with this package's
    defaults, in the same time. An interrupted run continues with the same command. The last line is
    the path of the report.
    """
    out = out or Path("runs") / f"phones-{Path(data).name}{'-quick' if quick else ''}"
    with plain_errors(debug, out):
        from .phones import experiment

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
        settings = usual._replace(data=data, cepstral=cepstral, **asked)
        show_result(experiment.run(out, settings))


@app.command(
    epilog="Examples:\n\n"
    "`python -m experiments complexity --quick` — a first look, a minute or two on two CPU cores\n\n"
    "`python -m experiments complexity` — the paper's Appendix A, minutes on a GPU\n\n"
    "`python -m experiments complexity --network 1353-2000-2000-2000-2000-183 --steps 50 "
    "--batch 500` — 15 million weights"
)
def complexity(
    network: Annotated[
        str | None,
        typer.Option(help="Inputs, hidden layers and classes; by default 784-200-200-10."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_STEPS, help="Steps of a training; by default 1000."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, max=10_000_000, help="Examples of a minibatch; by default 100."),
    ] = None,
    hyperparameters: Annotated[
        str | None,
        typer.Option(help="Numbers of hyperparameters; by default 2,4,8,16,32,64,256,1024,4096."),
    ] = None,
    forward: Annotated[
        int | None,
        typer.Option(
            min=2, max=10_000, help="Most hyperparameters for forward mode; by default 64."
        ),
    ] = None,
    widths: Annotated[
        str | None,
        typer.Option(help="Units of the hidden layers; by default 50,100,200,400,800,1600,3200."),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="Times that each program is measured; by default 5."),
    ] = None,
    seed: Seed = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="20 steps, fewer and smaller networks, 3 rounds.")
    ] = False,
    out: Out = None,
    debug: Debug = False,
) -> None:
    """Time and memory of forward and reverse mode, as in Appendix A of the paper.

    Measures them against the numbers of hyperparameters, weights and steps, and compares them with
    plain training. A program that does not fit into the device's memory is skipped. An interrupted
    run continues with the same command. The last line is the path of the report.
    """
    name = f"complexity{f'-{network}' if network else ''}{'-quick' if quick else ''}"
    out = out or Path("runs") / name
    with plain_errors(debug, out):
        from .complexity import experiment

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
        show_result(experiment.run(out, settings))


@app.command(
    epilog="Examples:\n\n"
    "`python -m experiments human --quick` — 3,000 labels of each network, about a minute\n\n"
    "`python -m experiments human` — CIFAR-10N, two networks, two sets of labels\n\n"
    "`python -m experiments human --data mine.npz --checked 0,500` — predictions of your own"
)
def human(
    data: Annotated[
        list[str] | None,
        typer.Option(help=".npz files with log_probs, given and true; by default CIFAR-10N."),
    ] = None,
    checked: Annotated[
        str | None, typer.Option(help="Numbers of verified labels; by default 0,100,500,2000.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_SEEDS, help="Draws of verified labels to average over; by default 5."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="3,000 labels, 0 and 200 of them verified, 1 draw.")
    ] = False,
    out: Out = None,
    debug: Debug = False,
) -> None:
    """Human label noise: which labels of CIFAR-10N are wrong, given a network's predictions?

    Compares `clean_labels`, with and without verified labels, with self-confidence, the margin, and
    softmax regression from predictions to verified labels. An interrupted run continues with the same
    command. The last line is the path of the report.
    """
    out = out or Path("runs") / f"human{'-quick' if quick else ''}"
    with plain_errors(debug, out):
        from .human import experiment

        given = {
            "data": tuple(data) if data else None,
            "checked": _numbers(checked, ",", "0,100,500,2000"),
            "seeds": seeds,
        }
        asked = {name: value for name, value in given.items() if value is not None}
        usual = experiment.QUICK if quick else experiment.Settings()
        show_result(experiment.run(out, usual._replace(**asked)))


@app.command(
    epilog="Examples:\n\n"
    "`python -m experiments language --quick` — a small network, minutes on two CPU cores\n\n"
    "`python -m experiments language` — 1,000 steps, 3 seeds, on a GPU\n\n"
    "`python -m experiments language --data texts/ --target mine --quick` — your texts: a .txt file "
    "for each source, one of them the target"
)
def language(
    data: Annotated[
        str | None,
        typer.Option(
            help="A folder with sources.npz or .txt files; by default text in FORETUNE_DATA.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="A source's name, an .npz file with validation and test, or a text file.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=MOST_SEEDS, help="Seeds of each method; by default 3.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, max=100, help="Layers of the transformer; by default 2.")
    ] = None,
    width: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Width of a layer; by default 64.")
    ] = None,
    heads: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Heads of the attention; by default 2.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, max=100_000, help="Bytes of a window of text; by default 64."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Windows of a minibatch; by default 16.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_STEPS, help="Steps of a training; by default 1000."),
    ] = None,
    outer: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_STEPS, help="Hyper-iterations of the descent; by default 7."),
    ] = None,
    transfer: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=16,
            help="Test the mixtures again in a network this many times as wide, trained this many "
            "times as long; by default 4; 1 for no such test.",
        ),
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, max=64, help="Seeds that are run side by side, on one GPU.")
    ] = 1,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="1 layer of width 32, 200 steps, 1 seed."),
    ] = False,
    out: Out = None,
    debug: Debug = False,
) -> None:
    """A language model: which sources to train on, and how, for the lowest loss on another text?

    Learns the weights of the sources, the schedule of the rate and the constants of AdamW by
    hypergradients, through whole trainings. Compares them with fixed mixtures, shortcuts,
    and searches that have the same time. An interrupted run continues with the same command. The last
    line is the path of the report.
    """
    with plain_errors(debug, out):
        from .language import experiment

        given = {
            "seeds": seeds,
            "layers": layers,
            "width": width,
            "heads": heads,
            "context": context,
            "batch": batch,
            "steps": steps,
            "outer": outer,
            "transfer": transfer,
        }
        asked = {name: value for name, value in given.items() if value is not None}
        usual = experiment.QUICK if quick else experiment.Settings()
        settings = usual._replace(data=data, target=target, **asked)
        name = f"language{f'-{Path(target).stem}' if target else ''}{'-quick' if quick else ''}"
        show_result(experiment.run(out or Path("runs") / name, settings, processes))


@app.command(
    epilog="Examples:\n\n"
    "`python -m experiments fewshot --quick` — a small network, two minutes on two CPU cores\n\n"
    "`python -m experiments fewshot --processes 4` — all methods and sizes of tasks, on a GPU\n\n"
    "`python -m experiments fewshot --data mine.npz` — tested on classes of your own"
)
def fewshot(
    data: Annotated[
        str | None,
        typer.Option(
            help="A .npz file to test on, with x of classes x images x 28 x 28; by default glyphs.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=MOST_SEEDS, help="Seeds of each method; by default 1.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_STEPS, help="Outer steps of each method; by default 4000."),
    ] = None,
    tasks: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Tasks of an outer step; by default 16.")
    ] = None,
    test: Annotated[
        int | None, typer.Option(min=2, max=1_000_000, help="Tasks to test on; by default 1000.")
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="WAYSxSHOTS,...",
            help="Ways and shots of the tasks; by default 5x1,5x5,20x1,20x5.",
            show_default=False,
        ),
    ] = None,
    inner: Annotated[
        str | None,
        typer.Option(
            metavar="STEPS,...",
            help="Inner steps to compare at the first size; by default 1,5,50,200.",
            show_default=False,
        ),
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, max=64, help="Methods that run at the same time.")
    ] = 1,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="5 ways, 1 shot, 30 steps of 4 tasks, a small network, fewer methods."
        ),
    ] = False,
    out: Out = None,
    debug: Debug = False,
) -> None:
    """Few-shot learning: letters of scripts that were not seen, from one or five images of each.

    Learns initial weights and rates by MAML, and a representation whose head is trained to its end.
    Compares them with prototypical networks, first-order MAML and a pretrained network. An interrupted
    run continues with the same command. The last line is the path of the report.
    """
    name = f"fewshot{f'-{Path(data).stem}' if data else ''}{'-quick' if quick else ''}"
    out = out or Path("runs") / name
    with plain_errors(debug, out):
        from .fewshot import experiment

        pairs = _pairs("--sizes", sizes, "5x1,20x5")
        given = {
            "seeds": seeds,
            "steps": steps,
            "tasks": tasks,
            "test": test,
            "sizes": pairs,
            "inner": _numbers(inner, ",", "1,5,50"),
        }
        asked = {name: value for name, value in given.items() if value is not None}
        usual = experiment.QUICK if quick else experiment.Settings()
        show_result(experiment.run(out, usual._replace(data=data, **asked), processes))


@app.command(
    epilog="Examples:\n\n"
    "`python -m experiments distillation --quick` — a small network, minutes on two CPU cores\n\n"
    "`python -m experiments distillation` — one and ten images of each digit, on a GPU"
)
def distillation(
    data: Annotated[str, typer.Option(help="The data; there is only mnist.")] = "mnist",
    each: Annotated[
        str | None, typer.Option(help="Learnt images of each class; by default 1,10.")
    ] = None,
    stages: Annotated[
        str | None,
        typer.Option(help="Inner x outer steps of each stage; by default 10x3000,50x2500,200x300."),
    ] = None,
    width: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Width of a layer; by default 64.")
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option(
            min=1, max=1000, help="Networks that an outer step averages over; by default 4."
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_SEEDS, help="Sets of images to average over; by default 1."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One image of each class, 10 x 120 steps, width 8.")
    ] = False,
    out: Out = None,
    debug: Debug = False,
) -> None:
    """Distilled data: a few learnt images in the place of MNIST's training set.

    Learns images, soft labels and step sizes through whole trainings, each from newly drawn weights.
    Judges them by networks trained from fresh weights. An interrupted run continues with the same
    command. The last line is the path of the report.
    """
    out = out or Path("runs") / f"distillation-{data}{'-quick' if quick else ''}"
    with plain_errors(debug, out):
        from .distillation import experiment

        if data != "mnist":
            raise typer.BadParameter(f"--data {data[:40]}: give mnist.")
        given = {
            "each": _numbers(each, ",", "1,10"),
            "stages": _pairs("--stages", stages, "10x3000,50x2500"),
            "width": width,
            "draws": draws,
            "seeds": seeds,
        }
        asked = {name: value for name, value in given.items() if value is not None}
        usual = experiment.QUICK if quick else experiment.Settings()
        show_result(experiment.run(out, usual._replace(**asked)))


def _pairs(option: str, text: str | None, example: str) -> tuple[tuple[int, ...], ...] | None:
    if text is None:
        return None
    pairs = tuple(_numbers(part, "x", example) or () for part in text.split(","))
    if any(len(pair) != 2 or 0 in pair for pair in pairs):
        raise typer.BadParameter(f"{option} {text[:80]!r}: give {example} say.")
    return pairs


def _numbers(text: str | None, separator: str, example: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(separator)]
    if not all(re.fullmatch("[0-9]{1,9}", part) for part in parts):
        raise typer.BadParameter(f"{text[:80]!r}: give whole numbers, as {example}, below 10^9.")
    return tuple(map(int, parts))


if __name__ == "__main__":
    app(prog_name="python -m experiments")

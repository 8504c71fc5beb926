"""Learning task interactions: Tables 2 and 4 and Figure 3 of Franceschi et al., ICML 2017.

A linear multiclass model with a graph C of class interactions, from very few labelled rows. STL has no
graph and a rho for each class, NMTL one number for all pairs, HMTL one for each pair, HMTL-S the same
with a bound on their sum; all four are tuned by hypergradients, so that they differ only in what is
tied. Each is run in two ways:

single split   as published: half the labelled rows train, the other half validate; C = rho = 0 at
               first, projected Adam, the hyper-iteration with the fewest validation mistakes
folds          `TaskGraphClassifier`'s way: the error of folds of all labelled rows, the scores' scale
               tuned too, and the hyper-iteration chosen by rows that the descent did not see
               ("known groups": C is the graph of the data set's own groups, times one number)

and then trained on all labelled rows. All splits of the data descend as one program.
"""

import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from foretune import Callback, Checkpoint, NonNegative, Progress, Reverse, SymmetricNonNegative
from foretune._files.files import write_whole
from foretune.apps._tables import DataError, read_arrays
from foretune.report import Lines, say, write_page

from ..datasets import Dataset, check_memory, load
from ..runs import Phases, RunFolder
from . import graph
from .baselines import BASELINES, validated
from .classifier import scaled
from .groups import known_groups
from .page import describe

PAPER = {"STL": "none", "NMTL": "uniform", "HMTL": "full", "HMTL-S": "full"}
PLAIN, KNOWN = "no regulariser", "known groups"
SINGLE, FOLDS = "single split", "folds"
INNER, OUTER = 5, 5
"""Folds, and how many descents leave one out to choose the hyper-iteration."""
PAPER_RATE = 1e-3
NAMED = ("digits", "mnist", "cifar10", "cifar100")


class Settings(NamedTuple):
    """What a run is asked to do."""

    data: str = "digits"
    seeds: int = 10
    per_class: int = 5
    steps: int = 100
    iterations: int = 40
    paper_steps: int = 1000
    paper_iterations: int = 100
    quick: bool = False
    label: str | None = None


def defaults(data: str, quick: bool) -> dict[str, int]:
    """Return the number of splits, of labelled rows in each half of a class, and of steps."""
    per_class = 3 if data == "cifar100" else 5
    if quick:
        small = {"seeds": 2, "steps": 40, "iterations": 10}
        return {**small, "paper_steps": 100, "paper_iterations": 20, "per_class": per_class}
    if data.startswith("cifar"):
        usual = {"seeds": 10, "paper_steps": 1000, "paper_iterations": 100}
    else:
        usual = {"seeds": 5, "paper_steps": 500, "paper_iterations": 60}
    return {**usual, "steps": 100, "iterations": 40, "per_class": per_class}


class Splits(NamedTuple):
    """The labelled rows of each split, first those to train on, and its test rows."""

    rows: graph.Rows
    x_test: np.ndarray  # (splits, n_test, d)
    y_test: np.ndarray
    classes: int
    names: list[str]

    @property
    def validation(self) -> np.ndarray:
        """Which of the labelled rows the paper's way validates on."""
        n = self.rows.y.shape[1]
        return np.arange(n) >= n // 2


def make_splits(dataset: Dataset, seeds: int, per_class: int) -> Splits:
    """Return balanced splits: rows of length 1, then centred and in the span of the labelled ones."""
    classes, y, counts = np.unique(dataset.y, return_inverse=True, return_counts=True)
    if len(classes) < 3 or counts.min() < 2 * per_class + 1:
        raise DataError(
            f"{dataset.name} has {len(classes)} classes with {counts.min()} rows in the smallest: the "
            f"experiment needs three classes or more, with {2 * per_class + 1} rows each (--per-class "
            f"{per_class} to train on, as many to validate, and one to test)."
        )
    width = min(dataset.x.shape[1], 2 * per_class * len(classes))
    rows = seeds * counts.min() * len(classes)
    check_memory(f"{seeds:,} splits of {dataset.name}", 4.0 * rows * width)
    length = np.linalg.norm(dataset.x, axis=1, keepdims=True)
    x = dataset.x / np.where(length > 0, length, 1.0)
    found = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        order = [
            rng.permutation(np.flatnonzero(y == k))[: counts.min()] for k in range(len(classes))
        ]
        first, second, rest = (
            np.concatenate([o[part] for o in order])
            for part in (
                slice(per_class),
                slice(per_class, 2 * per_class),
                slice(2 * per_class, None),
            )
        )
        labelled = np.concatenate([first, second])
        z, back = scaled(x[labelled])
        found.append((z, y[labelled], back.scale(x[rest]), y[rest]))
    x, labels, x_test, y_test = (np.stack(part) for part in zip(*found, strict=True))
    names = dataset.class_names or [str(c) for c in classes]
    return Splits(graph.Rows(x, labels), x_test, y_test, len(classes), names)


def bound(classes: int) -> float:
    """Return R of HMTL-S: 0.05 / K for each pair on average."""
    return 0.05 * (classes - 1)


class Measure(Callback):
    """Writes, for each split and hyper-iteration, the error that is descended on and that of `keep`."""

    def __init__(self, folder: RunFolder, series: str, splits: Splits, plan: graph.Plan):
        self.folder, self.series = folder, series
        rows, plan = jax.tree.map(jnp.asarray, (splits.rows, plan))
        nested = plan.outer.shape[1] > 1
        judges = (graph.held_losses, graph.outer_losses if nested else graph.held_mistakes)
        self._both = lambda p, h: [judge(p, h, rows, plan).mean() for judge in judges]
        self._unseen = "outer_error" if nested else "validation_mistakes"

    def start(self, run: Any) -> None:
        """Forget what came after the point that the run is resumed from."""
        self.folder.keep_metrics(
            lambda r: r["series"] != self.series or r["step"] < len(run.history)
        )

    def step(self, run: Any) -> None:
        """Append a line for each split."""
        error, unseen = jax.device_get(self._both(run.state.params, run.hparams))
        with self.folder.metrics.open("a") as file:
            for k, (e, u) in enumerate(zip(error, unseen, strict=True)):
                record = {"series": self.series, "seed": k, "step": run.step}
                record |= {"error": float(e), self._unseen: float(u)}
                file.write(json.dumps(record) + "\n")


def read_stage(path: Path) -> dict[str, np.ndarray] | None:
    """Return what is stored, or None where nothing is, or nothing that can be read."""
    if not path.exists():
        return None
    try:
        return read_arrays(path)
    except DataError as error:
        say(f"note: {error}; it is computed again")
        return None


def begin_anew_if_damaged(directory: Path) -> None:
    """Drop the checkpoints of a descent where what it keeps beside them cannot be read.

    Without that, a resumed descent would choose among its remaining steps only.
    """
    kept = Path(f"{directory}-kept.npz")
    if directory.exists() and read_stage(kept) is None:
        shutil.rmtree(directory)
        kept.unlink(missing_ok=True)


class Runner:
    """Runs the methods on one data set, each once: what is done lies in the folder."""

    def __init__(self, folder: RunFolder, name: str, splits: Splits, settings: Settings):
        self.folder, self.name, self.splits, self.settings = folder, name, splits, settings

    def stage(self, method: str, way: str) -> Path:
        """Return the file of what a method has found."""
        key = f"{self.name}, {method}, {way}".replace(" ", "_").replace("/", "-")
        return self.folder.path / "stages" / f"{key}.npz"

    def accuracy(self, hparams: Any, steps: int, pattern: Any = None) -> np.ndarray:
        """Return the test accuracy of each split after training on all its labelled rows."""
        s = self.splits
        pattern = graph.all_pairs(s.classes) if pattern is None else pattern
        params = graph.train(s.rows, hparams, pattern, steps)
        scores = graph.scores_of(params, jnp.asarray(s.x_test))[:, 0]
        return np.asarray(jnp.mean(jnp.argmax(scores, -1) == s.y_test, -1))

    def once(
        self, method: str, way: str, compute: Callable[[], dict[str, Any]], phases: Phases
    ) -> dict[str, Any]:
        """Return what `compute` found, now or in an earlier run."""
        path = self.stage(method, way)
        stored = read_stage(path)
        if stored is not None:
            return stored
        phases.begin(f"{self.name}, {method}, {way}")
        path.parent.mkdir(exist_ok=True)
        begun = time.monotonic()
        found = compute()
        write_whole(path, lambda file: np.savez(file, **found))
        for done in self.folder.checkpoints.glob(f"{path.stem},_*"):
            shutil.rmtree(done) if done.is_dir() else done.unlink()
        accuracy, seconds = 100 * np.mean(found["accuracy"]), time.monotonic() - begun
        say(f"  test accuracy {accuracy:.2f} %, {seconds:.0f} s")
        return {name: np.asarray(value) for name, value in found.items()}

    def callbacks(self, method: str, way: str, plan: graph.Plan) -> Callable[[str], list[Any]]:
        """Return the callbacks of each phase of a descent."""

        def of_phase(phase):
            series = f"{self.name}, {method}, {way}, {phase}"
            directory = self.folder.checkpoints / series.replace(" ", "_")
            begin_anew_if_damaged(directory)
            return [
                Checkpoint(directory, every=10),
                Measure(self.folder, series, self.splits, plan),
                Progress(series),
                Lines(f"hyper-iterations ({phase})"),
            ]

        return of_phase

    def single(self, method: str) -> dict[str, Any]:
        """Tune as published, on one training and one validation set."""
        s, kind = self.splits, PAPER[method]
        splits, K = len(s.rows.y), s.classes
        plan = graph.joined([graph.single_plan(s.validation)] * splits)
        shape = (splits, 1)
        pairs = {"none": None, "uniform": shape, "full": (*shape, K, K)}[kind]
        total = bound(K) if method == "HMTL-S" else None
        hparams = {"rho": jnp.zeros((*shape, K) if kind == "none" else shape)}
        sets: dict[str, Any] = {"rho": NonNegative()}
        if pairs is not None:
            hparams["C"] = jnp.zeros(pairs)
            each = graph.EachMember(SymmetricNonNegative(total))
            sets["C"] = each if kind == "full" else NonNegative()
        keep, result = graph.descend(
            s.rows,
            plan,
            graph.all_pairs(K),
            hparams,
            sets=sets,
            optimizer=optax.adam(PAPER_RATE),
            judge=graph.held_mistakes,
            steps=self.settings.paper_steps,
            hyper_steps=self.settings.paper_iterations,
            engine=self.engine,
            callbacks=self.callbacks(method, SINGLE, plan)("single"),
        )
        pattern = graph.all_pairs(K)
        return self._kept(keep, result, self.settings.paper_steps, pattern)

    def folds(self, method: str) -> dict[str, Any]:
        """Tune on folds, with the hyper-iteration chosen by what the descent did not see."""
        s = self.splits
        plans = [
            graph.make_plan(y, INNER, OUTER, np.random.default_rng([k, 1]))
            for k, y in enumerate(s.rows.y)
        ]
        plan = graph.joined(plans)
        pattern = known_groups(s.names) if method == KNOWN else graph.all_pairs(s.classes)
        keep, result = graph.tune(
            PAPER.get(method, "uniform"),
            s.rows,
            plan,
            pattern,
            total=bound(s.classes) if method == "HMTL-S" else None,
            steps=self.settings.steps,
            hyper_steps=self.settings.iterations,
            engine=self.engine,
            callbacks=self.callbacks(method, FOLDS, plan),
        )
        return self._kept(keep, result, self.settings.steps, pattern)

    @property
    def engine(self) -> Reverse:
        """Reverse mode: C has K (K + 1) / 2 numbers."""
        return Reverse(unroll=4 if jax.default_backend() == "gpu" else 1)

    def _kept(self, keep: Any, result: Any, steps: int, pattern: Any) -> dict[str, Any]:
        if result.stopped == "interrupted":
            raise KeyboardInterrupt
        C, rho = graph.interactions(keep.hparams, jnp.asarray(pattern))
        return {
            "accuracy": self.accuracy(keep.hparams, steps, pattern),
            "graph": np.asarray(C[:, 0]),
            "rho": np.asarray(rho[:, 0]),
            "step": keep.steps,
        }

    def plain(self, steps: int) -> dict[str, Any]:
        """Train with C = 0 and rho = 0: only the end of the training regularises."""
        zero = {"rho": jnp.zeros((len(self.splits.rows.y), 1))}
        return {"accuracy": self.accuracy(zero, steps), "note": f"nothing, {steps} steps"}

    def baseline(self, which: Any, way: str) -> dict[str, Any]:
        """Validate a baseline in one of the two ways."""
        s, found = self.splits, []
        held = s.validation
        for k, (x, y) in enumerate(zip(*s.rows, strict=True)):
            pairs = [(np.flatnonzero(~held), np.flatnonzero(held))]
            if way == FOLDS:
                fold = graph.make_folds(y, INNER, np.random.default_rng([k, 1]))
                pairs = [
                    (np.flatnonzero(fold != f), np.flatnonzero(fold == f)) for f in range(INNER)
                ]
            scores, _ = validated(which, x.astype(np.float64), y, s.classes, pairs)
            found.append(np.mean(np.argmax(scores(s.x_test[k]), 1) == s.y_test[k]))
        return {"accuracy": np.array(found)}

    def jobs(self) -> dict[tuple[str, str], Callable[[], dict[str, Any]]]:
        """Return what is to be computed, by method and way."""
        settings = self.settings
        jobs: dict[tuple[str, str], Callable[[], dict[str, Any]]] = {
            (PLAIN, SINGLE): partial(self.plain, settings.paper_steps),
            (PLAIN, FOLDS): partial(self.plain, settings.steps),
        }
        for method in PAPER:
            jobs[method, SINGLE] = partial(self.single, method)
            jobs[method, FOLDS] = partial(self.folds, method)
        if known_groups(self.splits.names) is not None:
            jobs[KNOWN, FOLDS] = partial(self.folds, KNOWN)
        for which in BASELINES:
            for way in (SINGLE, FOLDS):
                jobs[which.name, way] = partial(self.baseline, which, way)
        return jobs

    def everything(self, phases: Phases) -> dict[str, dict[str, dict[str, Any]]]:
        """Return what each method found, by method and way."""
        found: dict[str, dict[str, Any]] = {}
        for (method, way), compute in self.jobs().items():
            found.setdefault(method, {})[way] = self.once(method, way, compute, phases)
        return found


def run(out: str | Path, settings: Settings) -> Path:
    """Run the experiment, or what is left of it, and return the report's path."""
    names = ["cifar10", "cifar100"] if settings.data == "cifar" else [settings.data]
    say(f"Learning task interactions on {' and '.join(names)}: which classes help each other?")
    data = [load(name, settings.label) for name in names]
    asked = {name: value for name, value in settings._asdict().items() if value is not None}
    files = ()
    if settings.data not in (*NAMED, "cifar"):
        files = (settings.data,)
    splits = {d.name: make_splits(d, settings.seeds, per_class_of(d.name, settings)) for d in data}
    title = f"Learning task interactions on {' and '.join(splits)}"
    folder = RunFolder(out, kind="multitask", title=title, settings=asked, files=files)
    if folder.result is not None:
        return write_page(folder.path)
    runners = {name: Runner(folder, name, s, settings) for name, s in splits.items()}
    announce(splits, settings)
    stages = [runner.stage(*job) for runner in runners.values() for job in runner.jobs()]
    done = sum(stage.exists() for stage in stages)
    if done:
        say(f"resumed: {done} of {len(stages)} methods are there")
    phases = Phases(len(stages) + 1, done)
    found = {name: runner.everything(phases) for name, runner in runners.items()}
    phases.begin("tables, figures and report")
    folder.write("result.json", describe(folder, found, splits))
    return write_page(folder.path)


def announce(splits: dict[str, Splits], settings: Settings) -> None:
    """Say what the run is about to do: the sizes of its data, and how many hyper-iterations."""
    for name, s in splits.items():
        say(
            f"  {name}: {s.classes} classes, {s.rows.y.shape[1]:,} labelled rows and "
            f"{s.y_test.shape[1]:,} to test; splits: {len(s.y_test)}"
        )
    say(
        f"  hyper-iterations: {settings.paper_iterations:,} over {settings.paper_steps:,} steps with a "
        f"single split, {settings.iterations:,} over {settings.steps:,} steps with folds"
    )


def per_class_of(name: str, settings: Settings) -> int:
    """Return the labelled rows of each class in each half: with both CIFAR sets, each its own."""
    usual = settings.data == "cifar"
    return defaults(name, settings.quick)["per_class"] if usual else settings.per_class

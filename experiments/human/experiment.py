"""Human label noise: which labels of CIFAR-10N are wrong, given a network's predictions?

The labels are people's (Wei et al., ICLR 2022), the predictions those of networks trained on them, each
image by a network that did not see it. `clean_labels` gets them, and 0, 100, 500 or 2,000 verified
labels. Beside it: self-confidence, the margin to the best other class, and softmax regression from the
network's log-probabilities to the verified labels. Files: any `cifar10n/*.npz` of the data folder with
`log_probs`, `given` and `true`, or the paths that are given.
"""

import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score

from foretune.apps import clean_labels
from foretune.report import RunError, say

from ..runs import Phases, RunFolder
from .page import describe

FLOOR = 1e-3


class Settings(NamedTuple):
    """What a run is asked to do."""

    data: tuple[str, ...] = ()
    checked: tuple[int, ...] = (0, 100, 500, 2000)
    seeds: int = 5
    quick: bool = False


QUICK = Settings(checked=(0, 200), seeds=1, quick=True)
QUICK_ROWS = 3000


class Labels(NamedTuple):
    """Labels by people, the true ones, and a network's log-probabilities."""

    name: str
    log_p: np.ndarray
    given: np.ndarray
    true: np.ndarray


def run(out: str | Path, settings: Settings) -> Path:
    """Run the experiment, or what is left of it, and return the report's path."""
    title = "Human label noise"
    say(f"{title}: which labels are wrong, given a network's predictions?")
    files = find(settings)
    folder = RunFolder(
        out, kind="human", title=title, settings=settings._asdict(), files=list(map(str, files))
    )
    if folder.result is not None:
        return folder.page()
    sets = [load(path, settings.quick) for path in files]
    cells = [
        (labels, checked, seed)
        for labels in sets
        for checked in settings.checked
        for seed in range(settings.seeds)
    ]
    left = [cell for cell in cells if folder.read(stage(*cell)) is None]
    if 0 < len(left) < len(cells):
        say(f"resumed: {len(cells) - len(left)} of {len(cells)} cells are there")
    phases = Phases(len(cells) + 1, done=len(cells) - len(left))
    for labels, checked, seed in left:
        phases.begin(f"{labels.name}, {checked:,} verified, seed {seed}")
        folder.write(stage(labels, checked, seed), score(labels, checked, seed))
    phases.begin("tables, figures and report")
    records = [folder.read(stage(*cell)) for cell in cells]
    folder.write_metrics([{k: v for k, v in r.items() if k != "claims"} for r in records])
    folder.write("result.json", describe(folder, records))
    return folder.page()


def stage(labels: Labels, checked: int, seed: int) -> str:
    """Return the file of a cell's scores."""
    return f"stages/{labels.name}-{checked}-{seed}.json"


def find(settings: Settings) -> list[Path]:
    """Return the files of predictions."""
    if settings.data:
        missing = [name for name in settings.data if not Path(name).is_file()]
        if missing:
            raise RunError(f"{missing[0]}: there is no such file.")
        return [Path(name) for name in settings.data]
    folder = Path(os.environ.get("FORETUNE_DATA", ".")) / "cifar10n"
    files = sorted(path for path in folder.glob("*.npz") if path.stem != "features")
    if not files:
        raise RunError(
            f"{folder} has no predictions. Set FORETUNE_DATA to the folder that holds `cifar10n`, or "
            "name .npz files with log_probs (n, classes), given (n) and true (n) by --data. "
            "(Repositories: UCSC-REAL/cifar-10-100n for the labels, "
            "cleanlab/label-error-detection-benchmarks for predictions.)"
        )
    return files


def load(path: Path, quick: bool) -> Labels:
    """Read a file of predictions."""
    with np.load(path) as file:
        lacks = {"log_probs", "given", "true"} - set(file.files)
        if lacks:
            raise RunError(f"{path} lacks {', '.join(sorted(lacks))}; it has {file.files}.")
        log_p, given, true = (file[name] for name in ("log_probs", "given", "true"))
    p = np.maximum(np.exp(log_p.astype(float)), FLOOR)
    rows = slice(QUICK_ROWS if quick else None)
    log_p = np.log(p / p.sum(1, keepdims=True))
    return Labels(path.stem, log_p[rows], given.astype(int)[rows], true.astype(int)[rows])


def score(labels: Labels, checked: int, seed: int) -> dict[str, Any]:
    """Return what each method finds among the rows that were not verified."""
    n, classes = labels.log_p.shape
    if checked >= n:
        raise RunError(f"{checked:,} verified labels, but {labels.name} has {n:,}.")
    verified = np.sort(np.random.default_rng(seed).permutation(n)[:checked])
    rest = np.setdiff1d(np.arange(n), verified)
    given, log_p, i = labels.given[rest], labels.log_p[rest], np.arange(len(rest))
    wrong = given != labels.true[rest]
    others = np.where(np.arange(classes) == given[:, None], -np.inf, log_p)
    doubt = {
        "self-confidence": -log_p[i, given],
        "margin": others.max(1) - log_p[i, given],
    }
    helped = (verified, labels.true[verified]) if checked else ()
    found = clean_labels(labels.given, np.exp(labels.log_p), *helped, random_state=seed)
    doubt["clean_labels"] = found.probability_wrong_[rest]
    if checked:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = LogisticRegression(max_iter=1000)
            model.fit(labels.log_p[verified], labels.true[verified])
        p = np.full(log_p.shape, FLOOR)
        p[:, model.classes_] = model.predict_proba(log_p)
        doubt["softmax regression"] = -p[i, given]
    suspects = found.suspects_[rest]
    return {
        "data": labels.name,
        "checked": checked,
        "seed": seed,
        "wrong": float(wrong.mean()),
        "f1": {name: at_count(d, wrong) for name, d in doubt.items()},
        "f1, all rows": at_count(found.probability_wrong_, labels.given != labels.true),
        "average precision": {
            name: float(average_precision_score(wrong, d)) for name, d in doubt.items()
        },
        "flagged": float(suspects.sum() / wrong.sum()),
        "f1 of the flagged": float(2 * (suspects & wrong).sum() / (suspects.sum() + wrong.sum())),
        "claims": None if found.reliability_ is None else found.reliability_.tolist(),
    }


def at_count(doubt: np.ndarray, wrong: np.ndarray) -> float:
    """Return F1 of the most doubtful labels, as many as are wrong."""
    return float(wrong[np.argsort(-doubt, kind="stable")[: wrong.sum()]].mean())

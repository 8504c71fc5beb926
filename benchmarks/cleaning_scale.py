"""How long cleaning takes, beside cleanlab, and how far flags depend on what should not matter.

    python -m benchmarks.cleaning_scale [--out FILE] [--parts first rows predictions classes same]

`first`: the first fit of a process, 900 rows. `rows`: 50,000 x 20, beside cleanlab with the same forest
by five folds. `predictions`: 1,000,000 rows of 10 classes, and 5,000 of 1,000 classes. `classes`: 4,000
rows of 200 classes with 200 verified ones. `same`: for five seeds, the share of flags that differ
between dense rows and sparse, single-precision and shuffled ones. Each part is a process of its own, so
that its memory is its own. Needs `pip install cleanlab`.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.datasets import load_digits, make_classification
from sklearn.ensemble import RandomForestClassifier
from sklearn.metrics import average_precision_score
from sklearn.model_selection import cross_val_predict

from benchmarks.harness import command_line, record


def noisy(true: Any, rate: float = 0.2) -> np.ndarray:
    """Change some labels to any other class."""
    rng, classes = np.random.default_rng(0), int(true.max()) + 1
    shift = np.where(rng.random(len(true)) < rate, rng.integers(1, classes, len(true)), 0)
    return (true + shift) % classes


def table(n: int, width: int, classes: int) -> Any:
    return make_classification(
        n,
        width,
        n_informative=width // 2,
        n_classes=classes,
        n_clusters_per_class=1,
        random_state=0,
    )


def predictions(n: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return labels, and probabilities that are mostly right."""
    rng = np.random.default_rng(0)
    true = rng.integers(0, classes, n)
    p = 0.2 * rng.random((n, classes), np.float32) ** 3
    p[np.arange(n), true] += 2 * rng.random(n)
    return true, p / p.sum(1, keepdims=True)


def timed(run: Callable, wrong: np.ndarray) -> dict[str, float]:
    """Return the seconds of a run, and how well what it returns ranks wrong labels.

    Processor seconds, summed over the cores, count where other programs run on the machine.
    """
    begun, used = time.perf_counter(), time.process_time()
    doubt = run()
    seconds, used = time.perf_counter() - begun, time.process_time() - used
    return {
        "seconds": seconds,
        "processor seconds": used,
        "average precision": float(average_precision_score(wrong, doubt)),
        "GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def measure(part: str) -> dict:
    """Return the figures of a part."""
    from foretune.apps import LabelCleaner, clean_labels

    def cleaned(x, y, **options):
        return LabelCleaner(random_state=0, progress=False).fit(x, y, **options).probability_wrong_

    if part == "first":
        x, true = (np.asarray(data)[:900] for data in load_digits(return_X_y=True))
        y = noisy(true)
        return {"900 x 64": timed(lambda: cleaned(x, y), y != true)}
    if part == "rows":
        x, true = table(50_000, 20, 4)
        y = noisy(true)
        return {"LabelCleaner": timed(lambda: cleaned(x, y), y != true)}
    if part == "rows, cleanlab":
        from cleanlab.filter import find_label_issues  # pyright: ignore[reportMissingImports]

        x, true = table(50_000, 20, 4)
        y = noisy(true)
        forest = RandomForestClassifier(200, n_jobs=-1, random_state=0)

        def run():
            p: Any = cross_val_predict(forest, x, y, method="predict_proba")
            find_label_issues(y, p, n_jobs=1)
            return 1 - p[np.arange(len(y)), y]

        return {"cleanlab, forest": timed(run, y != true)}
    if part == "classes":
        x, true = table(4_000, 40, 200)
        y, rows = noisy(true), np.arange(200)
        checked = {"checked": rows, "checked_labels": true[rows]}
        return {"200 classes": timed(lambda: cleaned(x, y, **checked), y != true)}
    if part == "predictions":
        found = {}
        for n, classes in ((1_000_000, 10), (5_000, 1_000)):
            true, p = predictions(n, classes)
            y = noisy(true)
            name = f"{n:,} predictions of {classes:,} classes"
            found[name] = timed(
                lambda y=y, p=p, k=classes: clean_labels(y, p, classes=range(k)).probability_wrong_,
                y != true,
            )
        return found
    return {"flags that differ": same()}


def same() -> dict[str, list[float]]:
    """Return the share of flags that differ from those of dense rows, for five seeds."""
    from foretune.apps import LabelCleaner

    x, true = (np.asarray(data)[:600] for data in load_digits(return_X_y=True))
    y = noisy(true)
    found: dict[str, list[float]] = {"sparse": [], "float32": [], "shuffled": []}
    for seed in range(5):

        def suspects(x, y, seed=seed):
            return LabelCleaner(random_state=seed, progress=False).fit(x, y).suspects_

        plain, order = suspects(x, y), np.random.default_rng(seed).permutation(len(y))
        others = {
            "sparse": suspects(sparse.csr_matrix(x), y),
            "float32": suspects(x.astype(np.float32), y),
            "shuffled": suspects(x[order], y[order])[np.argsort(order)],
        }
        for name, flags in others.items():
            found[name].append(float(np.sum(flags != plain) / plain.sum()))
    return found


def main() -> None:
    """Measure each part in a process of its own."""
    parser = command_line(__doc__)
    parts = ["first", "rows", "rows, cleanlab", "classes", "predictions", "same"]
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--alone", help="a part, in this process")
    arguments = parser.parse_args()
    if arguments.alone:
        print(json.dumps(measure(arguments.alone)))
        return
    found = {}
    for part in arguments.parts:
        command = [sys.executable, "-m", "benchmarks.cleaning_scale", "--alone", part]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[part] = json.loads(done.stdout.splitlines()[-1])
        print(part, json.dumps(found[part]), flush=True)
    record(arguments.out, found, packages=("scikit-learn",))


if __name__ == "__main__":
    main()

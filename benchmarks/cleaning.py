"""Finding wrong labels: `LabelCleaner` beside what people use, and the speed of hyper-cleaning.

MNIST, 5,000 training examples with 10, 30 or 50 % wrong labels (symmetric, or each class taken for the
next), and 50, 200, 1000 or 5000 checked examples. Each method gives a mask of suspects; its F1 counts
wrong labels as positive, and its accuracy is that of softmax regression on kept and checked examples.

    python -m benchmarks.cleaning grid --cache DIR [--seeds 5] [--parts everyday]
    python -m benchmarks.cleaning kinds --out kinds.json
    python -m benchmarks.cleaning speed --out speed.json
    python -m benchmarks.cleaning wild --out wild.json       many kinds of data: see wild.py
    python -m benchmarks.cleaning table --out benchmarks/results/cleaning_grid_h200.json

The grid needs `pip install cleanlab`. Masks are kept in the cache, so an interrupted run continues,
and parts can be computed on another machine first (`--parts everyday`).
"""

import argparse
import importlib
import itertools
import json
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import sparse
from sklearn.datasets import load_breast_cancer, load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import foretune as ft
from benchmarks import wild
from benchmarks.harness import record
from experiments.cleaning import experiment as cleaning
from experiments.cleaning.noise import corrupt
from experiments.cleaning.splits import SUSPECT_BELOW, Split, score, split
from experiments.datasets import load
from foretune.apps import LabelCleaner
from foretune.apps._models import Trained, prepared
from foretune.apps._noise import make_folds, train_plain

KINDS, RATES, CHECKS = ("symmetric", "pair"), (0.1, 0.3, 0.5), (50, 200, 1000, 5000)
CLASSES = 10
PARTS = ["everyday", "ours", "published", "same"]
CLEANLAB = ("cleanlab, cross-validated", "cleanlab, clean model", "disagreement, clean model")
OURS = ("LabelCleaner", "hyper-cleaning (paper)")
SAME_MODEL = ("cleanlab, cross-validated, our model", "cleanlab, clean model, our model")


def cell(dataset, kind: str, rate: float, checks: int, seed: int) -> Split:
    s = split(dataset, 0.0, seed)
    rng = np.random.default_rng([seed, KINDS.index(kind), round(100 * rate)])
    given, wrong = corrupt(s.given, rate, rng, kind)
    return s._replace(
        given=given, wrong=wrong, x_checked=s.x_checked[:checks], checked=s.checked[:checks]
    )


def issues(labels: np.ndarray, probabilities: Any) -> np.ndarray:
    from cleanlab.filter import find_label_issues  # pyright: ignore[reportMissingImports]

    return np.asarray(find_label_issues(labels, probabilities, n_jobs=1))


class Masks:
    """Masks of suspects by name, kept in a folder."""

    def __init__(self, folder: str):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, *where, compute):
        """Return the mask of this name and place and its seconds, computed if it is not there."""
        path = self.folder / ("-".join(map(str, (name, *where))).replace(" ", "_") + ".npz")
        if not path.exists():
            begun = time.perf_counter()
            mask = compute()
            np.savez_compressed(path, mask=np.packbits(mask), seconds=time.perf_counter() - begun)
        with np.load(path) as file:
            return np.unpackbits(file["mask"])[:5000].astype(bool), float(file["seconds"])


def everyday(masks: Masks, s: Split, kind, rate, checks, seed) -> dict:
    """cleanlab in its two ways and plain disagreement, with scikit-learn's logistic regression."""
    model = LogisticRegression(max_iter=300)

    def cross_validated():
        folds = StratifiedKFold(5, shuffle=True, random_state=seed)
        return issues(
            s.given, cross_val_predict(model, s.x, s.given, cv=folds, method="predict_proba")
        )

    def clean_probabilities():
        model.fit(s.x_checked, s.checked)
        found = np.zeros((len(s.x), CLASSES))
        found[:, model.classes_] = model.predict_proba(s.x)
        return found

    where = (kind, rate, seed)
    return {
        CLEANLAB[0]: masks.get(CLEANLAB[0], *where, compute=cross_validated),
        CLEANLAB[1]: masks.get(
            CLEANLAB[1], *where, checks, compute=lambda: issues(s.given, clean_probabilities())
        ),
        CLEANLAB[2]: masks.get(
            CLEANLAB[2], *where, checks, compute=lambda: clean_probabilities().argmax(1) != s.given
        ),
    }


class Kernel:
    """LabelCleaner's default model, trained as it is on any labels of one seed's examples."""

    def __init__(self, x: np.ndarray, seed: int):
        self.features, self.z, self.model = prepared("kernel", x, seed)

    def probabilities(self, train, labels, rows) -> np.ndarray:
        """Return the class probabilities of rows after training on others."""
        key, use = jax.random.key(0), np.ones(len(train))
        params = train_plain(self.model, self.z[train], labels, use, CLASSES, 60, key)
        scores = self.model.apply(params, jnp.asarray(self.z[rows]))
        return np.asarray(jax.nn.softmax(scores), np.float64)


def same_model(masks: Masks, s: Split, kind, rate, checks, seed, kernels: dict) -> dict:
    """cleanlab in its two ways, with the probabilities of LabelCleaner's default model."""
    n = len(s.x)

    def cross_validated():
        if (seed, 0) not in kernels:
            kernels[seed, 0] = Kernel(s.x, seed)
        fold = make_folds(s.given, 5, np.random.default_rng(seed))
        found = np.zeros((n, CLASSES))
        for k in range(5):
            train = np.flatnonzero(fold != k)
            rows = np.flatnonzero(fold == k)
            found[rows] = kernels[seed, 0].probabilities(train, s.given[train], rows)
        return issues(s.given, found)

    def clean_model():
        if (seed, checks) not in kernels:  # the checked labels are right in every cell
            kernel = Kernel(np.concatenate([s.x, s.x_checked]), seed)
            rows = np.arange(n, n + checks)
            kernels[seed, checks] = kernel.probabilities(rows, s.checked, np.arange(n))
        return issues(s.given, kernels[seed, checks])

    where = (kind, rate, seed)
    return {
        SAME_MODEL[0]: masks.get(SAME_MODEL[0], *where, compute=cross_validated),
        SAME_MODEL[1]: masks.get(SAME_MODEL[1], *where, checks, compute=clean_model),
    }


def ours(masks: Masks, s: Split, kind, rate, checks, seed) -> dict:
    def default():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # few checked examples may lack a class
            cleaner = LabelCleaner("kernel", random_state=seed)
            return cleaner.fit(s.x, s.given, s.x_checked, s.checked).suspects_

    return {OURS[0]: masks.get(OURS[0], kind, rate, seed, checks, compute=default)}


def published(masks: Masks, dataset, checks: int, seeds: int) -> dict:
    """Hyper-cleaning as published, R = n / 2, T = 300, 200 hyper-iterations.

    All seeds and kinds of noise are one problem: their hypergradients do not mix.
    """
    noises = list(itertools.product(KINDS, RATES))
    path = masks.folder / f"published-{checks}.npz"
    if not path.exists():
        cells = [[cell(dataset, *noise, checks, k) for noise in noises] for k in range(seeds)]
        data = (
            np.stack([row[0].x for row in cells]),
            np.stack([[c.given for c in row] for row in cells]),
        )
        checked = tuple(
            np.stack([getattr(row[0], f) for row in cells]) for f in ("x_checked", "checked")
        )
        n, width = data[0].shape[1:]

        def loss(params, hparams, batch):
            weights = jnp.stack([jnp.stack(w) for w in hparams["weight"]])
            return (
                cleaning.RATE * 2 * jnp.sum(jnp.mean(weights * cleaning.losses(params, *batch), 2))
            )

        problem = ft.Problem(
            ft.Training(loss, optax.sgd(1.0)),
            lambda state, h, batch: jnp.sum(jnp.mean(cleaning.losses(state.params, *batch), 2)),
            init=cleaning.zeros(seeds, len(noises), CLASSES, width),
            batches=ft.FullBatch(data, steps=300),
            validation=checked,
        )
        begun = time.perf_counter()
        result = ft.minimize(
            problem,
            {"weight": [[jnp.full(n, 0.5) for _ in noises] for _ in range(seeds)]},
            steps=200,
            optimizer=optax.adam(0.005),
            take_back=False,
            constraints={
                "weight": [[ft.CappedSimplex(n / 2) for _ in noises] for _ in range(seeds)]
            },
        )
        found = np.asarray(result.hparams["weight"]) < SUSPECT_BELOW
        np.savez_compressed(
            path, mask=found, seconds=(time.perf_counter() - begun) / found[..., 0].size
        )
    with np.load(path) as file:
        mask, seconds = file["mask"], float(file["seconds"])
    return {
        (k, *noise): (mask[k, m], seconds)
        for k in range(len(mask))
        for m, noise in enumerate(noises)
    }


def grid(arguments) -> None:
    dataset, masks, records, kernels = (
        load("mnist"),
        Masks(arguments.cache or "runs/cleaning-grid"),
        [],
        {},
    )
    seeds = range(arguments.seeds)
    parts = set(arguments.parts)
    for checks, kind, rate in itertools.product(CHECKS, KINDS, RATES):
        splits = [cell(dataset, kind, rate, checks, seed) for seed in seeds]
        found: list[dict] = [{} for _ in seeds]
        for k, s in enumerate(splits):
            where = (masks, s, kind, rate, checks, k)
            found[k] |= everyday(*where) if "everyday" in parts else {}
            found[k] |= ours(*where) if "ours" in parts else {}
            found[k] |= same_model(*where, kernels) if "same" in parts else {}
        if "published" in parts or (masks.folder / f"published-{checks}.npz").exists():
            theirs = published(masks, dataset, checks, arguments.seeds)
            for k in seeds:
                found[k][OURS[1]] = theirs[k, kind, rate]
        f1 = {
            name: np.mean(
                [score(f[name][0], s.wrong).f1 for f, s in zip(found, splits, strict=True)]
            )
            for name in found[0]
        }
        print(checks, kind, rate, {name: round(float(v), 3) for name, v in f1.items()}, flush=True)
        names = list(found[0])
        kept = [
            [~s.wrong, np.ones(len(s.wrong), bool), *(~f[name][0] for name in names)]
            for s, f in zip(splits, found, strict=True)
        ]
        accuracy = None
        if arguments.final_steps:
            accuracy = cleaning.final_accuracies(splits, kept, arguments.final_steps)
        for m, name in enumerate(["Oracle", "Baseline", *names]):
            row = {"noise": kind, "rate": rate, "checked": checks, "method": name}
            if accuracy is not None:
                row["accuracy"] = [round(float(a), 4) for a in accuracy[:, m]]
            if name in names:
                row["f1"] = [
                    round(score(f[name][0], s.wrong).f1, 4)
                    for f, s in zip(found, splits, strict=True)
                ]
                row["seconds"] = [round(f[name][1], 2) for f in found]
            records.append(row)
    if records:
        record(arguments.out, {"records": records})


def speed(arguments) -> None:
    """Time DH-1000 of the paper's Table 1, one seed: 500 hyper-iterations of T = 1000."""
    s = split(load("mnist"), 0.5, 0)
    hparams, sets = cleaning.start(1, [1000], len(s.given))
    rows = []
    for unroll in (1, 4, 8):
        problem = cleaning.cleaning_problem([s], [1000], 1000)
        options = {
            "engine": ft.Reverse(unroll=unroll),
            "optimizer": optax.adam(0.005),
            "constraints": sets,
        }
        begun = time.perf_counter()
        ft.minimize(problem, hparams, steps=1, **options)
        compiling = time.perf_counter() - begun
        begun = time.perf_counter()
        ft.minimize(problem, hparams, steps=arguments.iterations, **options)
        seconds = (time.perf_counter() - begun) * 500 / arguments.iterations
        rows.append({"unroll": unroll, "first call s": compiling, "500 iterations s": seconds})
        print(rows[-1], flush=True)
    bytes_read = 5 * s.x.nbytes  # X W, X^T D forward; X W, X alpha, X^T (...) backward
    record(arguments.out, {"rows": rows, "bytes of X per step": bytes_read, "T": 1000})


def docstrings() -> tuple[Any, np.ndarray]:
    """Return SciPy's docstrings as TF-IDF, and the subpackage that each belongs to."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts, labels = [], []
    for name in ("stats", "signal", "special", "linalg", "optimize", "ndimage", "interpolate"):
        module = importlib.import_module(f"scipy.{name}")
        for member in sorted(module.__all__):
            text = (getattr(module, member).__doc__ or "").partition("Examples\n")[0]
            if len(text) > 100:  # the prose, without the name of the function
                texts.append(text.replace(member, ""))
                labels.append(name)
    vectors = TfidfVectorizer(sublinear_tf=True, min_df=2, stop_words="english")
    return vectors.fit_transform(texts), np.array(labels)


def kinds(arguments) -> None:
    """Compare with training on all labels, on tables and text; 30 % of the labels are wrong."""
    sets: dict[str, Any] = {
        "breast cancer (table, 30 columns, 2 classes)": load_breast_cancer(return_X_y=True),
        "wine (table, 13 columns, 3 classes)": load_wine(return_X_y=True),
        "SciPy docstrings (TF-IDF, 7 classes)": docstrings(),
    }
    rows = []
    for name, (x, y) in sets.items():
        for seed in range(arguments.seeds):
            rng = np.random.default_rng(seed)
            order = rng.permutation(len(y))
            test, checked, train = np.split(
                order, [len(y) // 3, len(y) // 3 + max(len(y) // 12, 20)]
            )
            given, wrong = corrupt(y[train], 0.3, rng)
            begun = time.perf_counter()
            cleaner = LabelCleaner("kernel", random_state=seed).fit(
                x[train], given, x[checked], y[checked]
            )
            seconds = time.perf_counter() - begun
            row = {
                "data": name,
                "seed": seed,
                "f1": score(cleaner.suspects_, wrong).f1,
                "LabelCleaner": cleaner.score(x[test], y[test]),
                "seconds": seconds,
                "train, checked, test": [len(train), len(checked), len(test)],
            }
            both = np.concatenate([train, checked])
            for method, use in (("Baseline", np.ones(len(train), bool)), ("Oracle", ~wrong)):
                keep = np.concatenate([use, np.ones(len(checked), bool)])
                labels = np.concatenate([given, y[checked]])[keep]
                plain = LogisticRegression(max_iter=2000)
                scale = StandardScaler(with_mean=not sparse.issparse(x))
                simple = make_pipeline(scale, plain) if not sparse.issparse(x) else plain
                row[f"{method}, logistic regression"] = simple.fit(x[both[keep]], labels).score(
                    x[test], y[test]
                )
                row[f"{method}, our model"] = ours_on(
                    cleaner, x[both], keep, labels, x[test], y[test]
                )
            rows.append(row)
        here = [r for r in rows if r["data"] == name]
        numbers = [k for k, value in here[0].items() if isinstance(value, float)]
        means = {k: round(float(np.mean([r[k] for r in here])), 4) for k in numbers}
        print(name, means, flush=True)
    record(arguments.out, {"rows": rows})


def ours_on(cleaner, x, keep, labels, x_test, y_test) -> float:
    """Return the accuracy of LabelCleaner's model, trained plainly on other labels."""
    index = np.searchsorted(cleaner.classes_, labels)
    features, model, _ = cleaner._final
    z, key = features.transform(x[keep]), jax.random.key(0)
    params = train_plain(model, z, index, np.ones(len(z)), len(cleaner.classes_), 60, key)
    p = Trained(features, model, params).predict_proba(x_test)
    return float(np.mean(cleaner.classes_[np.argmax(p, 1)] == y_test))


def table(arguments) -> None:
    """Print the grid's F1 and accuracy as Markdown, the mean over seeds."""
    records = json.loads(Path(arguments.out).read_text())["results"]["records"]
    names = [*OURS, *CLEANLAB, *SAME_MODEL]
    print_table(records, "f1", names, lambda value: f"{value:.3f}")
    print_table(
        records, "accuracy", ["Oracle", "Baseline", *names], lambda value: f"{100 * value:.2f}"
    )


def print_table(records: list[dict], what: str, names: list[str], show) -> None:
    print(f"\n{what}\n\n| noise | wrong | checked | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 3) + "|")
    for kind, rate, checks in itertools.product(KINDS, RATES, CHECKS):
        here = [r for r in records if (r["noise"], r["rate"], r["checked"]) == (kind, rate, checks)]
        means = {r["method"]: np.mean(r[what]) for r in here if what in r}
        best = max(mean for name, mean in means.items() if name != "Oracle")
        marks = {name: f"**{show(m)}**" if m == best else show(m) for name, m in means.items()}
        shown = " | ".join(marks.get(name, "-") for name in names)
        print(f"| {kind} | {rate:.0%} | {checks} | {shown} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["grid", "kinds", "speed", "table", "wild"])
    parser.add_argument("--cache", help="folder of masks (grid) or probabilities (wild)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="groups of methods to compute"
    )
    parser.add_argument(
        "--data", nargs="+", default=["develop"], help="wild: develop, held-out, or names of data"
    )
    parser.add_argument(
        "--levels",
        nargs="+",
        type=int,
        choices=(0, 1, 2),
        default=[0, 1, 2],
        help="wild: no, few and many checked rows",
    )
    parser.add_argument("--jobs", type=int, default=1, help="wild: cells at a time")
    parser.add_argument(
        "--resume", action="store_true", help="wild: keep the cells that --out has already"
    )
    parser.add_argument(
        "--final-steps", type=int, default=2000, help="of the final models; 0: no accuracies"
    )
    parser.add_argument("--iterations", type=int, default=100, help="speed: iterations to time")
    parser.add_argument(
        "--out",
        default="runs/cleaning.json",
        help="where the JSON goes (or, for table, comes from)",
    )
    arguments = parser.parse_args()
    programs = {"grid": grid, "kinds": kinds, "speed": speed, "table": table, "wild": wild.run}
    programs[arguments.what](arguments)


if __name__ == "__main__":
    main()

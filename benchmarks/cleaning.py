"""Finding wrong labels: `LabelCleaner` beside what people use, and the speed of hyper-cleaning.

MNIST, 5,000 training examples with 10, 30 or 50 % wrong labels (symmetric, or each class taken for the
next), and 50, 200, 1000 or 5000 checked examples. Each method gives a mask of suspects; its F1 counts
wrong labels as positive, and its accuracy is that of softmax regression on kept and checked examples.

    python benchmarks/cleaning.py grid --cache DIR [--seeds 5] [--only cleanlab]
    python benchmarks/cleaning.py speed --out speed.json
    python benchmarks/cleaning.py table --out benchmarks/results/cleaning_grid_h200.json

The grid needs `pip install cleanlab`. Masks are kept in the cache, so that an interrupted run goes on and
the parts that need no accelerator can be computed elsewhere first (`--only cleanlab`).
"""

import argparse
import itertools
import json
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import record
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict

import foretune as ft
from foretune.apps import LabelCleaner
from foretune.apps._models import make_features, make_model
from foretune.apps._noise import START_L2, make_folds, train_plain
from foretune.apps._weights import SUSPECT_BELOW
from foretune.data import corrupt, load
from foretune.experiments import cleaning

KINDS, RATES, CHECKS = ("symmetric", "pair"), (0.1, 0.3, 0.5), (50, 200, 1000, 5000)
CLASSES = 10
CLEANLAB = ("cleanlab, cross-validated", "cleanlab, clean model", "disagreement, clean model")
OURS = ("LabelCleaner", "hyper-cleaning (paper)")
SAME_MODEL = ("cleanlab, cross-validated, our model", "cleanlab, clean model, our model")


def cell(dataset, kind: str, rate: float, checks: int, seed: int) -> cleaning.Split:
    s = cleaning.split(dataset, 0.0, seed)
    rng = np.random.default_rng([seed, KINDS.index(kind), round(100 * rate)])
    given, wrong = corrupt(s.given, rate, rng, kind)
    return s._replace(
        given=given, wrong=wrong, x_checked=s.x_checked[:checks], checked=s.checked[:checks]
    )


def issues(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    from cleanlab.filter import find_label_issues

    return np.asarray(find_label_issues(labels, probabilities, n_jobs=1))


class Masks:
    """Masks of suspects by name, kept in a folder."""

    def __init__(self, folder: str):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, *where, compute):
        path = self.folder / ("-".join(map(str, (name, *where))).replace(" ", "_") + ".npz")
        if not path.exists():
            begun = time.perf_counter()
            mask = compute()
            np.savez_compressed(path, mask=np.packbits(mask), seconds=time.perf_counter() - begun)
        with np.load(path) as file:
            return np.unpackbits(file["mask"])[:5000].astype(bool), float(file["seconds"])


def everyday(masks: Masks, s: cleaning.Split, kind, rate, checks, seed) -> dict:
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


def same_model(masks: Masks, s: cleaning.Split, kind, rate, checks, seed) -> dict:
    """cleanlab in its two ways, with the probabilities of LabelCleaner's default model."""

    def probabilities(features, z, train, labels, rows):
        model = make_model("kernel", features, z)
        l2 = np.full(model.groups, START_L2)
        params = train_plain(model, z[train], labels, l2, CLASSES, 80, jax.random.key(0))
        return np.asarray(jax.nn.softmax(model.apply(params, jnp.asarray(z[rows]))), np.float64)

    def cross_validated():
        features = make_features("kernel", seed).fit(s.x)
        z = features.transform(s.x)
        fold = make_folds(s.given, 5, np.random.default_rng(seed))
        found = np.zeros((len(z), CLASSES))
        for k in range(5):
            found[fold == k] = probabilities(features, z, fold != k, s.given[fold != k], fold == k)
        return issues(s.given, found)

    def clean_model():
        both = np.concatenate([s.x, s.x_checked])
        features = make_features("kernel", seed).fit(both)
        z, n = features.transform(both), len(s.x)
        return issues(
            s.given, probabilities(features, z, np.arange(n, len(z)), s.checked, np.arange(n))
        )

    where = (kind, rate, seed)
    return {
        SAME_MODEL[0]: masks.get(SAME_MODEL[0], *where, compute=cross_validated),
        SAME_MODEL[1]: masks.get(SAME_MODEL[1], *where, checks, compute=clean_model),
    }


def ours(masks: Masks, s: cleaning.Split, kind, rate, checks, seed) -> dict:
    def default():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # few checked examples may lack a class
            return (
                LabelCleaner(random_state=seed).fit(s.x, s.given, s.x_checked, s.checked).suspects_
            )

    return {OURS[0]: masks.get(OURS[0], kind, rate, seed, checks, compute=default)}


def published(masks: Masks, splits: list, kind, rate, checks) -> list[dict]:
    """Hyper-cleaning as published with R = n / 2, all seeds in one problem."""
    R = len(splits[0].given) // 2

    def descend():
        hparams, sets = cleaning.start(len(splits), [R], 2 * R)
        result = ft.minimize(
            cleaning.cleaning_problem(splits, [R], 300),
            hparams,
            steps=200,
            optimizer=optax.adam(0.005),
            constraints=sets,
        )
        (weights,) = result.hparams.values()
        return np.stack(list(weights.values())) < SUSPECT_BELOW

    folder = masks.folder / f"published-{kind}-{rate}-{checks}-{len(splits)}.npz"
    if not folder.exists():
        begun = time.perf_counter()
        found = descend()
        np.savez_compressed(folder, mask=found, seconds=(time.perf_counter() - begun) / len(splits))
    with np.load(folder) as file:
        return [{OURS[1]: (mask, float(file["seconds"]))} for mask in file["mask"]]


def grid(arguments) -> None:
    dataset, masks, records = load("mnist"), Masks(arguments.cache), []
    for kind, rate, checks in itertools.product(KINDS, RATES, CHECKS):
        seeds = range(arguments.seeds)
        splits = [cell(dataset, kind, rate, checks, seed) for seed in seeds]
        found = [everyday(masks, s, kind, rate, checks, k) for k, s in enumerate(splits)]
        print(kind, rate, checks, "everyday methods done", flush=True)
        if arguments.only == "cleanlab":
            continue
        for k, s in enumerate(splits):
            found[k] |= ours(masks, s, kind, rate, checks, k)
            found[k] |= same_model(masks, s, kind, rate, checks, k)
        for k, extra in enumerate(published(masks, splits, kind, rate, checks)):
            found[k] |= extra
        names = list(found[0])
        kept = [
            [~s.wrong, np.ones(len(s.wrong), bool), *(~f[name][0] for name in names)]
            for s, f in zip(splits, found, strict=True)
        ]
        accuracy = cleaning.final_accuracies(splits, kept, 2000)
        for k, s in enumerate(splits):
            where = {"noise": kind, "rate": rate, "checked": checks, "seed": k}
            for m, name in enumerate(["Oracle", "Baseline", *names]):
                row = {**where, "method": name, "accuracy": float(accuracy[k, m])}
                if name in found[k]:
                    mask, seconds = found[k][name]
                    row |= {"f1": cleaning.score(mask, s.wrong).f1, "seconds": seconds}
                records.append(row)
        ours_f1 = np.mean(
            [r["f1"] for r in records[-len(seeds) * len(names) :] if r["method"] == OURS[0]]
        )
        print(kind, rate, checks, f"LabelCleaner F1 {ours_f1:.3f}", flush=True)
    if records:
        record(arguments.out, {"records": records})


def speed(arguments) -> None:
    """Time DH-1000 of the paper's Table 1, one seed: 500 hyper-iterations of T = 1000."""
    s = cleaning.split(load("mnist"), 0.5, 0)
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


def table(arguments) -> None:
    """Print the grid's F1 as Markdown, the mean over seeds."""
    content = json.loads(Path(arguments.out).read_text())
    records = [r for r in content["results"]["records"] if "f1" in r]
    names = [*OURS, *CLEANLAB, *SAME_MODEL]
    print("| noise | wrong | checked | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 3) + "|")
    for kind, rate, checks in itertools.product(KINDS, RATES, CHECKS):
        here = [r for r in records if (r["noise"], r["rate"], r["checked"]) == (kind, rate, checks)]
        means = [np.mean([r["f1"] for r in here if r["method"] == name]) for name in names]
        best = max(means)
        shown = " | ".join(f"**{m:.3f}**" if m == best else f"{m:.3f}" for m in means)
        print(f"| {kind} | {rate:.0%} | {checks} | {shown} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["grid", "speed", "table"])
    parser.add_argument("--cache", default="runs/cleaning-grid", help="folder of masks")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=["cleanlab"], help="the part that needs no accelerator")
    parser.add_argument("--iterations", type=int, default=100, help="speed: iterations to time")
    parser.add_argument(
        "--out",
        default="runs/cleaning.json",
        help="where the JSON goes (or, for table, comes from)",
    )
    arguments = parser.parse_args()
    {"grid": grid, "speed": speed, "table": table}[arguments.what](arguments)


if __name__ == "__main__":
    main()

"""Finding wrong labels on MNIST: `LabelCleaner` beside what people use.

    python -m benchmarks.cleaning [--seeds 5] [--parts everyday] [--cache DIR] [--out FILE.json]

5,000 training examples with 10, 30 or 50 % wrong labels (symmetric, or each class taken for the next),
and 50, 200, 1000 or 5000 trusted examples. Each method gives a mask of suspects; its F1 counts wrong
labels as positive, and its accuracy is that of softmax regression on kept and trusted examples.

It needs `pip install cleanlab`. Masks are kept in the cache, so an interrupted run continues, and parts
can be computed on another machine first (`--parts everyday`). Other kinds of data: `wild.py`.
"""

import itertools
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict

import foretune as ft
from benchmarks.harness import Table, command_line, record
from experiments.cleaning import experiment as cleaning
from experiments.cleaning.noise import corrupt
from experiments.cleaning.splits import Split, score, split
from experiments.datasets import load
from foretune.apps import LabelCleaner
from foretune.apps._models import prepared
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
    """The kernel model of LabelCleaner, trained as it is on any labels of one seed's examples."""

    def __init__(self, x: np.ndarray, seed: int):
        _, self.z, self.model = prepared("kernel", x, seed)

    def probabilities(self, train, labels, rows) -> np.ndarray:
        """Return the class probabilities of rows after training on others."""
        use, key = np.ones(len(train)), jax.random.key(0)
        params = train_plain(self.model, self.z[train], labels, use, CLASSES, 60, key)
        scores = self.model.apply(params, jnp.asarray(self.z[rows]))
        return np.asarray(jax.nn.softmax(scores), np.float64)


def same_model(masks: Masks, s: Split, kind, rate, checks, seed, kernels: dict) -> dict:
    """cleanlab in its two ways, with the probabilities of LabelCleaner's kernel model."""
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
            constraints={
                "weight": [[ft.CappedSimplex(n / 2) for _ in noises] for _ in range(seeds)]
            },
        )
        found = np.asarray(result.hparams["weight"]) < 0.5
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


def scored(splits: list[Split], found: list[dict], final_steps: int) -> dict[str, dict]:
    """Return, by method and seed, F1, seconds and the accuracy of a model without the suspects."""
    names = list(found[0])
    rows: dict[str, dict] = {name: {} for name in ("Oracle", "Baseline", *names)}
    for name in names:
        pairs = [(f[name], s.wrong) for f, s in zip(found, splits, strict=True)]
        rows[name]["f1"] = [round(score(mask, wrong).f1, 4) for (mask, _), wrong in pairs]
        rows[name]["seconds"] = [round(seconds, 2) for (_, seconds), _ in pairs]
    if final_steps:
        kept = [
            [~s.wrong, np.ones(len(s.wrong), bool), *(~f[name][0] for name in names)]
            for s, f in zip(splits, found, strict=True)
        ]
        accuracies = cleaning.final_accuracies(splits, kept, final_steps)
        for m, name in enumerate(rows):
            rows[name]["accuracy"] = [round(float(a), 4) for a in accuracies[:, m]]
    return rows


def main() -> None:
    parser = command_line(__doc__, out="runs/cleaning.json")
    parser.add_argument("--cache", default="runs/cleaning-grid", help="folder of masks")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="methods to run")
    parser.add_argument(
        "--final-steps", type=int, default=2000, help="of the final models; 0: no accuracies"
    )
    arguments = parser.parse_args()
    dataset, masks = load("mnist"), Masks(arguments.cache)
    records, kernels, seeds, parts = [], {}, range(arguments.seeds), set(arguments.parts)
    table = Table("noise", "wrong", "trusted", "method", "F1", "accuracy")
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
        for name, row in scored(splits, found, arguments.final_steps).items():
            where = {"noise": kind, "rate": rate, "checked": checks, "method": name}
            records.append(where | row)
            means = (float(np.mean(row.get(what, np.nan))) for what in ("f1", "accuracy"))
            table.add(*where.values(), *means)
    record(arguments.out, {"records": records})


if __name__ == "__main__":
    main()

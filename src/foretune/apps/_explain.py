"""`foretune attribute`: a file of labelled rows, and one of queries, -> what helped and harmed each.

A model is trained on the rows; the error of a query is the cross-entropy of its label, given or
predicted. `foretune.attribute` says how it moves with the weight of each row.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .. import Minibatches, Problem, Progress, Training, attribute
from .._attribution.attribution import Attribution
from ..report import Lines, RunFolder, picture, say, write_page
from ._columns import is_frame
from ._files import _write_csv, cell
from ._models import make_features, make_model
from ._tables import DataError, Encoder, Table, read_table, with_labels_alike

BATCH, EPOCHS, LEAST = 100, 20, 100
RATES = {"softmax": 0.3, "mlp": 0.03}
MOMENTUM = 0.9
SHOWN, COLUMNS, LONGEST = 20, 6, 400
"""Queries, columns and characters of a cell on the page."""


class Settings(NamedTuple):
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
    trust: bool = False
    seed: int = 0


class Trained(NamedTuple):
    """A problem on the rows, its queries, and what the model says of them."""

    problem: Problem
    hparams: dict[str, Any]
    queries: tuple[np.ndarray, np.ndarray]
    predicted: np.ndarray
    accuracy: float


def run(out: str | Path, settings: Settings) -> Path:
    """Train, attribute, write the lists and the report, and return the report's path."""
    options = settings.label, settings.image, settings.drop
    table = read_table(settings.train, *options)
    queries = read_table(settings.queries, *options, labelled=False)
    if queries.y is not None:
        table, queries = with_labels_alike(table, queries)
    classes, y = np.unique(table.y, return_inverse=True)
    if len(y) >= 20 and len(classes) > len(y) / 2:
        raise DataError(
            f"{table.path}: {len(y):,} rows have {len(classes):,} labels, {str(classes[0])!r} and "
            "others. `foretune attribute` explains classes, of several rows each: name their column by "
            "--label."
        )
    if len(classes) < 2:
        raise DataError(
            f"{table.path}: all rows have the label {str(classes[0])!r}: give two or more."
        )
    asked = None if queries.y is None else _numbered(queries, classes)
    encoder = Encoder(settings.text).fit(table)
    rows, query_rows = encoder.transform(table), encoder.transform(queries)
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
        trust=settings.trust,
        folder=folder.path / "parts",
        callbacks=[Progress("queries"), Lines("queries")],
    )
    found.save(folder.path / "scores.npz")
    write_most(folder.path / "most.csv", found, table, trained, classes, settings.most)
    folder.write(
        "result.json", described(folder, found, table, queries, trained, classes, settings)
    )
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
    rows: Any, y: np.ndarray, query_rows: Any, asked: Any, classes: int, settings: Settings
) -> Trained:
    """Return the training of a model, and its queries."""
    features = make_features(settings.model, settings.seed)
    z = features.fit(rows).transform(rows)
    z_q = features.transform(query_rows)
    model = make_model(settings.model, features, z)
    batch = min(BATCH, len(y))
    steps = settings.steps or max(LEAST, EPOCHS * len(y) // batch)
    key = jax.random.key(settings.seed)

    def loss(params, hparams, examples):
        scores = model.apply(params, examples[0])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, examples[1]))

    problem = Problem(
        Training(loss, lambda h: optax.sgd(h["lr"], MOMENTUM)),
        lambda state, hparams, examples: loss(state.params, hparams, examples),
        init=model.init(key, z.shape[1], classes),
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
    predicted, fitted = (np.argmax(model.apply(state.params, jnp.asarray(x)), 1) for x in (z_q, z))
    labels = predicted if asked is None else asked
    queries = z_q, labels.astype(np.int32)
    return Trained(problem, hparams, queries, predicted, float(np.mean(fitted == y)))


def write_most(
    path: Path, found: Attribution, table: Table, trained: Trained, classes: np.ndarray, most: int
) -> None:
    """Write the most helpful and the most harmful rows of each query, the first first."""
    lines = []
    for k, error in enumerate(found.errors):
        labels = classes[trained.queries[1][k]], classes[trained.predicted[k]]
        query = [k, *map(cell, labels), f"{error:.6g}"]
        for effect, rows in _sides(found, k, most).items():
            lines += [
                [*query, effect, rank, i, cell(table.y[i]), f"{found.scores[k, i]:.6g}"]
                for rank, i in enumerate(rows, start=1)
            ]
    columns = ["query", "label", "predicted", "error", "effect", "rank", "row", "row's label"]
    _write_csv(path, [*columns, "score"], lines)


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
    trained: Trained,
    classes: np.ndarray,
    settings: Settings,
) -> dict[str, Any]:
    """Return the result: the headline, a table of queries, and each beside its rows."""
    labels, predicted = classes[trained.queries[1]], classes[trained.predicted]
    K, n = found.scores.shape
    wrong = int(np.sum(labels != predicted))
    said = f", {wrong:,} of them predicted wrongly" if queries.y is not None else " as predicted"
    order = np.argsort(-found.errors, kind="stable")[:SHOWN]
    comparisons, rows = [], []
    for k in map(int, order):
        sides = _sides(found, k, settings.most)
        rows.append(
            [str(k), str(labels[k]), str(predicted[k]), float(found.errors[k]),
             *(", ".join(map(str, sides[side])) for side in ("helped", "harmed"))]
        )  # fmt: skip
        asked = f"labelled {labels[k]}, predicted {predicted[k]}"
        if queries.y is None or labels[k] == predicted[k]:
            asked = f"predicted {predicted[k]}"
        comparisons.append(
            {
                "title": f"Query {k}: {asked}",
                "note": f"Its error, the cross-entropy of {labels[k]}, is {found.errors[k]:.3g}.",
                "groups": [
                    {"title": "The query", "items": [_item(folder, queries, k, labels[k], None)]},
                    *(
                        {
                            "title": title,
                            "items": [
                                _item(folder, table, i, table.y[i], float(found.scores[k, i]))
                                for i in sides[side]
                            ],
                        }
                        for side, title in (("helped", "Helped most"), ("harmed", "Harmed most"))
                    ),
                ],
            }
        )
    first = f" The {len(order)} with the largest errors are shown." if len(order) < K else ""
    wide = "" if table.image_shape or table.x.shape[1] <= COLUMNS else (
        f" The first {COLUMNS} of {table.x.shape[1]} columns are shown."
    )  # fmt: skip
    return {
        "headline": f"{K:,} queries{said}, explained by {n:,} training rows.",
        "notes": [
            "The score of a row is the derivative of a query's error in the row's weight, through the "
            "whole training: below 0 the row helped, above 0 it harmed. To leave a row out changes the "
            "error by about minus its score.",
            "Rows count from 0, without a header. most.csv has these lists for all queries, "
            f"scores.npz the matrix of all scores, {K:,} x {n:,}.{first}{wide}",
        ],
        "tables": [
            {
                "title": "Queries and the rows that matter most to them",
                "columns": ["query", "label", "predicted", "error", "helped", "harmed"],
                "rows": rows,
            }
        ],
        "comparisons": comparisons,
    }


def _item(
    folder: RunFolder, table: Table, i: int, label: Any, score: float | None
) -> dict[str, Any]:
    """Return a row as the page shows it, its picture written if it is an image."""
    image, row = None, None
    x = table.x.iloc[i] if is_frame(table.x) else table.x[i]
    if table.image_shape:
        kind = "query" if score is None else "row"
        image = f"figures/{kind}-{i}.png"
        if not (folder.path / image).exists():
            picture(folder.path / image, np.asarray(x, float).reshape(table.image_shape))
    elif is_frame(table.x):
        row = {name: _shown(x[name]) for name in table.x.columns[:COLUMNS]}
    else:
        row = {str(j): float(value) for j, value in enumerate(x[:COLUMNS])}
    return {"index": int(i), "label": str(label), "score": score, "image": image, "row": row}


def _shown(value: Any) -> Any:
    if isinstance(value, (int, float, np.integer, np.floating)):
        return float(value)
    text = str(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."

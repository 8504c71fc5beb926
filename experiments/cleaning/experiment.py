"""Data hyper-cleaning: Table 1 and its figure of Franceschi et al. (ICML 2017), and our default.

A balanced data set is split 1 : 1 : 2 into training, checked and test examples (5,000 / 5,000 / 10,000
of MNIST), and half the training labels are changed, each to another class at random. Softmax regression
from zero weights, T steps of full-batch gradient descent with learning rate 0.1 n / R on

    (1/n) sum_i lambda_i loss_i,      0 <= lambda_i <= 1,   sum_i lambda_i <= R,

lambda_0 = R / n, Adam with hyper-learning rate 0.005. DH-R discards examples with lambda_i < 1e-3;
Oracle knows the wrong labels; Baseline keeps all. Each final model is trained on what is kept plus the
checked examples, unweighted. All seeds and all R are one problem, whose hypergradient falls into
theirs: Adam and the projections act on each by itself. No test label is used.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree
from scipy import sparse

from foretune import (
    Callback,
    CappedSimplex,
    Checkpoint,
    FullBatch,
    Problem,
    Progress,
    Reverse,
    Training,
    minimize,
)
from foretune.apps import LabelCleaner
from foretune.apps._columns import Encoder
from foretune.report import Lines, say

from ..datasets import check_memory, load
from ..runs import Phases, RunFolder
from .page import draw, gallery, tables
from .splits import LARGEST, SUSPECT_BELOW, Split, score, split

SHARES = (0.2, 0.3, 0.4, 0.5)
"""R / n: the paper's 1000, 1500, 2000 and 2500 of 5,000."""
RATE = 0.1
FINAL = 4
"""The final training takes this many times T steps."""
SQUARED_LENGTH = 100.0
"""Other data than digits and MNIST are scaled to about the length of MNIST's rows."""


class Settings(NamedTuple):
    """What a run is asked to do."""

    data: str = "digits"
    seeds: int = 5
    steps: int = 1000
    iterations: int = 500
    noise: float = 0.5
    quick: bool = False
    label: str | None = None


def defaults(data: str, quick: bool) -> dict[str, int]:
    """Return seeds, steps and iterations: the paper's, smaller for small data, tiny if quick."""
    if quick:
        return {"seeds": 1, "steps": 100, "iterations": 80}
    if data == "digits":
        return {"seeds": 1, "steps": 500, "iterations": 150}
    return {"seeds": 5, "steps": 1000, "iterations": 500}


def scores_of(params: PyTree, x: Array) -> Array:
    """Return class scores (seeds, models, rows, classes) of stacked linear models."""
    return jnp.einsum("snd,smkd->smnk", x, params["w"]) + params["b"][:, :, None]


def losses(params: PyTree, x: Array, y: Array) -> Array:
    """Return the cross-entropy of each row under each model of its seed.

    Labels are those of a seed, or of each model in a seed.
    """
    scores = scores_of(params, x)
    y = y[:, None] if y.ndim == 2 else y
    return optax.softmax_cross_entropy_with_integer_labels(
        scores, jnp.broadcast_to(y, scores.shape[:3])
    )


def zeros(seeds: int, models: int, classes: int, width: int) -> PyTree:
    """Return the start of stacked linear models."""
    return {
        "w": jnp.zeros((seeds, models, classes, width)),
        "b": jnp.zeros((seeds, models, classes)),
    }


def cleaning_problem(splits: list[Split], budgets: list[int], steps: int) -> Problem:
    """Return the problem of all seeds and budgets; hyperparameters as in `start`."""
    n = len(splits[0].given)
    classes, width = int(splits[0].checked.max()) + 1, splits[0].x.shape[1]
    rates = jnp.asarray([RATE * n / R for R in budgets], jnp.float32)

    def stack(name):
        return jnp.stack([getattr(s, name) for s in splits])  # on the device, once

    def loss(params, hparams, batch):
        weights = jnp.stack([jnp.stack(list(h.values())) for h in hparams.values()], axis=1)
        each = jnp.mean(weights * losses(params, *batch), axis=2)
        return jnp.sum(rates * each)

    def error(state, hparams, batch):
        return jnp.sum(jnp.mean(losses(state.params, *batch), axis=2))

    return Problem(
        dynamics=Training(loss, optax.sgd(1.0)),
        objective=error,
        init=zeros(len(splits), len(budgets), classes, width),
        batches=FullBatch((stack("x"), stack("given")), steps=steps),
        validation=(stack("x_checked"), stack("checked")),
    )


def start(seeds: int, budgets: list[int], n: int) -> tuple[PyTree, PyTree]:
    """Return the weights' start and their constraints, by method and seed."""
    names = [f"seed{k:03d}" for k in range(seeds)]
    order = sorted(budgets)
    hparams = {f"DH-{R:05d}": {name: jnp.full(n, R / n) for name in names} for R in order}
    sets = {f"DH-{R:05d}": dict.fromkeys(names, CappedSimplex(float(R))) for R in order}
    return hparams, sets


class Measure(Callback):
    """Writes accuracies and scores of every method and seed at each hyper-iteration."""

    def __init__(self, folder: RunFolder, splits: list[Split], budgets: list[int]):
        self.folder, self.splits, self.budgets = folder, splits, budgets
        checked = (np.stack([s.x_checked for s in splits]), np.stack([s.checked for s in splits]))
        test = (np.stack([s.x_test for s in splits]), np.stack([s.test for s in splits]))

        @jax.jit
        def accuracies(params, checked, test):
            return tuple(
                jnp.mean(jnp.argmax(scores_of(params, x), -1) == y[:, None], -1)
                for x, y in (checked, test)
            )

        data = jax.device_put((checked, test))
        self._accuracies = lambda params: accuracies(params, *data)

    def start(self, run: Any) -> None:
        """Forget what came after the point that the run is resumed from."""
        self.folder.keep_metrics(lambda record: record["step"] < len(run.history))

    def step(self, run: Any) -> None:
        """Measure, and append a line for each method and seed."""
        measured = (self._accuracies(run.state.params), run.hparams)
        (validation, test), hparams = jax.device_get(measured)  # one transfer for all of them
        lines = []
        for m, (R, of_seed) in enumerate(zip(self.budgets, hparams.values(), strict=True)):
            for k, weights in enumerate(of_seed.values()):
                found = weights < SUSPECT_BELOW
                record = {
                    "series": f"DH-{R}",
                    "seed": k,
                    "step": run.step,
                    "validation_accuracy": float(validation[k, m]),
                    "test_accuracy": float(test[k, m]),
                    **score(found, self.splits[k].wrong)._asdict(),
                }
                lines.append(json.dumps(record) + "\n")
        with self.folder.metrics.open("a") as file:
            file.writelines(lines)


def final_accuracies(splits: list[Split], kept: list[list[np.ndarray]], steps: int) -> np.ndarray:
    """Return test accuracies (seeds, models) of models trained on kept and checked examples."""
    x = np.stack([np.concatenate([s.x, s.x_checked]) for s in splits])
    y = np.stack([np.concatenate([s.given, s.checked]) for s in splits])
    use = np.stack(
        [
            np.stack([np.concatenate([mask, np.ones(len(s.checked), bool)]) for mask in masks])
            for s, masks in zip(splits, kept, strict=True)
        ]
    ).astype(np.float32)
    use /= use.sum(axis=2, keepdims=True)

    def loss(params, hparams, batch):
        x, y, use = batch
        return hparams["rate"] * jnp.sum(use * losses(params, x, y))

    data = (jnp.asarray(x), jnp.asarray(y), jnp.asarray(use))
    problem = Problem(
        dynamics=Training(loss, optax.sgd(1.0)),
        objective=lambda state, h, batch: loss(state.params, h, batch),
        init=zeros(len(splits), use.shape[1], int(y.max()) + 1, x.shape[2]),
        batches=FullBatch(data, steps=steps),
        validation=data,
    )
    _, state = problem.response({"rate": jnp.asarray(RATE)})
    scores = scores_of(state.params, jnp.stack([s.x_test for s in splits]))
    test = jnp.stack([s.test for s in splits])
    return np.asarray(jnp.mean(jnp.argmax(scores, -1) == test[:, None], -1))


def run(out: str | Path, settings: Settings) -> Path:
    """Run the experiment, or what is left of it, and return the report's path."""
    say(
        f"Data hyper-cleaning on {settings.data}: {settings.noise:.0%} of the training labels are "
        "made wrong; which ones?"
    )
    dataset = load(settings.data, settings.label)
    if settings.data not in ("digits", "mnist"):
        scaled = Encoder().fit(dataset.x).transform(dataset.x).wide
        scaled = sparse.csr_matrix(scaled).toarray()
        scaled *= np.sqrt(SQUARED_LENGTH / np.mean(np.sum(scaled**2, axis=1)))
        dataset = dataset._replace(x=scaled.astype(np.float32))
    rows = min(len(dataset.y), LARGEST) * settings.seeds
    check_memory(f"splits of {settings.seeds:,} seeds", 2 * rows * dataset.x[:1].nbytes)
    splits = [split(dataset, settings.noise, seed) for seed in range(settings.seeds)]
    title = f"Data hyper-cleaning on {dataset.name}"
    asked = {name: value for name, value in settings._asdict().items() if value is not None}
    files = ()
    if settings.data not in ("digits", "mnist"):
        files = (settings.data,)
    folder = RunFolder(out, kind="cleaning", title=title, settings=asked, files=files)
    if folder.result is not None:
        return folder.page()
    n = len(splits[0].given)
    budgets = sorted({max(round(share * n), 1) for share in SHARES})
    announce(splits, budgets, settings)
    phases = Phases(3 + settings.seeds)

    phases.begin(
        f"{', '.join(f'DH-{R}' for R in budgets)}, all at once: compiling, then "
        f"{settings.iterations:,} hyper-iterations"
    )
    weights = hyper_clean(splits, budgets, settings, folder)
    found = {f"DH-{R}": [w < SUSPECT_BELOW for w in weights[R]] for R in budgets}
    cleaners = fit_cleaners(splits, phases)
    found["LabelCleaner"] = [cleaner.suspects_ for cleaner in cleaners]
    masks = {
        "Oracle": [~s.wrong for s in splits],
        "Baseline": [np.ones(n, bool) for _ in splits],
        **{name: [~f for f in masks] for name, masks in found.items()},
    }
    phases.begin(f"final trainings: {', '.join(masks)}")
    kept = [[masks[name][k] for name in masks] for k in range(settings.seeds)]
    accuracy = dict(
        zip(masks, final_accuracies(splits, kept, FINAL * settings.steps).T, strict=True)
    )
    own = np.array(
        [np.mean(c.predict(s.x_test) == s.test) for c, s in zip(cleaners, splits, strict=True)]
    )
    scores = {
        name: [score(f, s.wrong) for f, s in zip(masks, splits, strict=True)]
        for name, masks in found.items()
    }
    phases.begin("tables, figures and report")
    figures = draw(folder, budgets, weights[budgets[0]][0], splits[0])
    folder.write(
        "result.json",
        {
            **tables(accuracy, scores, own, settings.seeds),
            "figures": figures,
            "gallery": gallery(folder, cleaners[0], splits[0], dataset),
        },
    )
    return folder.page()


def announce(splits: list[Split], budgets: list[int], settings: Settings) -> None:
    """Say what the run is about to do: the sizes of its data, and how many trainings."""
    first, seeds = splits[0], len(splits)
    say(
        f"  data: {len(first.given):,} training examples ({first.wrong.sum():,} labels wrong), "
        f"{len(first.checked):,} checked, {len(first.test):,} test; {first.x.shape[1]:,} inputs, "
        f"{first.checked.max() + 1} classes; seeds: {seeds}"
    )
    say(
        f"  trainings: {(settings.iterations + 1) * len(budgets) * seeds:,} of {settings.steps:,} "
        f"steps for the hypergradients, {(len(budgets) + 3) * seeds} final ones of "
        f"{FINAL * settings.steps:,} steps, and those of LabelCleaner"
    )


def fit_cleaners(splits: list[Split], phases: Phases) -> list[LabelCleaner]:
    """Return this package's default cleaner, fitted to each seed."""
    cleaners = []
    for seed, s in enumerate(splits):
        phases.begin(f"LabelCleaner, seed {seed + 1} of {len(splits)}: its ensemble, by folds")
        cleaner = LabelCleaner(random_state=seed)
        cleaners.append(cleaner.fit(s.x, s.given, s.x_checked, s.checked))
    return cleaners


def hyper_clean(
    splits: list[Split], budgets: list[int], settings: Settings, folder: RunFolder
) -> dict[int, list[np.ndarray]]:
    """Return the weights of each budget and seed after the descent."""
    hparams, sets = start(len(splits), budgets, len(splits[0].given))
    result = minimize(
        cleaning_problem(splits, budgets, settings.steps),
        hparams,
        steps=settings.iterations,
        engine=Reverse(unroll=4 if jax.default_backend() == "gpu" else 1),
        optimizer=optax.adam(0.005),
        constraints=sets,
        callbacks=[
            Checkpoint(folder.checkpoints, every=max(settings.iterations // 20, 1)),
            Measure(folder, splits, budgets),
            Progress(f"{len(budgets)} budgets x {len(splits)} seeds"),
            Lines(),
        ],
    )
    if result.stopped == "interrupted":
        raise KeyboardInterrupt
    return {
        R: [np.asarray(w) for w in of_seed.values()]
        for R, of_seed in zip(budgets, result.hparams.values(), strict=True)
    }

"""Classes that lean on one another: a linear model with a graph of task interactions.

    J(W, b) = sum_i loss(W x_i + b, y_i) + sum_jk C_jk |w_j - w_k|^2 + sum_k rho_k |w_k|^2

is minimised by T steps of gradient descent with momentum from 0. C (symmetric, >= 0) and rho (>= 0) are
hyperparameters; they descend on the error of rows that the training did not see,

    E = mean over folds of the mean over held-out rows of loss(tau (W x_i + b), y_i),

with the scale tau as one more hyperparameter: a strong regulariser makes small scores,
and without tau the error would blame it for that.

Arrays have two leading axes, splits and members: splits are data sets of their own, the members of a
split are descents on parts of it. No sum runs across either, so all of them descend independently, as
one program.
"""

from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from foretune import (
    AbstractConstraint,
    Callback,
    Checkpoint,
    FullBatch,
    Log,
    Mean,
    Problem,
    SymmetricNonNegative,
    Training,
    minimize,
)
from foretune._files.files import write_whole

MOMENTUM = 0.9
KINDS = ("full", "uniform", "none")
"""C free; C = a times a given pattern, all pairs alike if none is; C = 0, but a rho for each class."""
HYPER_RATE, PAIR_RATE = 0.2, 0.05
"""Of Adam; the second for the C of each pair, in units of where they start."""
MARGIN = 2.0
"""Standard errors by which a step with many hyperparameters must be better to be kept."""
START_RHO, START_C, START_SCALE = 0.05, 0.05, 3.0
"""C starts at START_C / K for each pair."""


class Rows(NamedTuple):
    """The labelled rows of each split."""

    x: Any  # (splits, n, d), mean squared length 1
    y: Any  # (splits, n)


class Plan(NamedTuple):
    """Who is trained on what: masks of the rows."""

    train: Any  # (folds, splits, members, n)
    held: Any  # (folds, splits, members, n): what the fold's model is judged by
    outer: Any  # (splits, members, n): what a member's descent does not see at all


class EachMember(AbstractConstraint):
    """A set for each split and member."""

    inner: AbstractConstraint

    def project(self, x: PyTree) -> PyTree:
        """Return the nearest points."""
        return jax.vmap(jax.vmap(self.inner.project))(x)


def interactions(hparams: PyTree, pattern: Array) -> tuple[Array, Array]:
    """Return C (splits, members, K, K) and rho (splits, members, K).

    A single number for C is the strength of the pattern (K, K).
    """
    rho, K = hparams["rho"], len(pattern)
    rho = rho if rho.ndim == 3 else jnp.broadcast_to(rho[..., None], (*rho.shape, K))
    C = hparams.get("C", jnp.zeros(rho.shape[:2], rho.dtype))
    if C.ndim == 4:
        # the diagonal means nothing: its gradient must be exactly 0, for Adam magnifies rounding
        return C * (1 - jnp.eye(K, dtype=C.dtype)), rho
    return C[..., None, None] * pattern, rho


def all_pairs(classes: int) -> np.ndarray:
    """Return the pattern in which all pairs of classes are alike."""
    return 1.0 - np.eye(classes, dtype=np.float32)


def penalty(w: Array, C: Array, rho: Array) -> Array:
    """Return sum_jk C_jk |w_j - w_k|^2 + sum_k rho_k |w_k|^2 of each member.

    The first sum is 2 tr(W' L W) with the graph's Laplacian L = diag(C 1) - C.
    """
    Lw = jnp.sum(C, -1)[..., None] * w - C @ w
    return jnp.sum(w * (2 * Lw + rho[..., None] * w), axis=(-2, -1))


def scores_of(params: PyTree, x: Array) -> Array:
    """Return class scores (splits, members, n, K)."""
    return jnp.einsum("snd,smkd->smnk", x, params["w"]) + params["b"][:, :, None]


def losses(params: PyTree, hparams: PyTree, x: Array, y: Array) -> Array:
    """Return the cross-entropy of each row (splits, members, n), scaled by tau where there is one."""
    scores = scores_of(params, x)
    if "scale" in hparams:
        scores = hparams["scale"][..., None, None] * scores
    y = jnp.broadcast_to(y[:, None], scores.shape[:-1])
    return optax.softmax_cross_entropy_with_integer_labels(scores, y)


def objective(params: PyTree, hparams: PyTree, batch: PyTree) -> Array:
    """Return J of each member (splits, members)."""
    x, y, use, _, pattern = batch
    C, rho = interactions(hparams, pattern)
    plain = {name: leaf for name, leaf in hparams.items() if name != "scale"}
    return jnp.sum(use * losses(params, plain, x, y), -1) + penalty(params["w"], C, rho)


def training_loss(params: PyTree, hparams: PyTree, batch: PyTree) -> Float[Array, ""]:
    """Return the sum of all J, each times its learning rate."""
    return jnp.sum(batch[3][:, None] * objective(params, hparams, batch))


def held_out(params: PyTree, hparams: PyTree, x: Array, y: Array, held: Array) -> Array:
    """Return the mean loss over the held-out rows (splits, members)."""
    total = jnp.sum(held * losses(params, hparams, x, y), -1)
    return total / jnp.maximum(jnp.sum(held, -1), 1)


def held_out_error(state: Any, hparams: PyTree, batch: PyTree) -> Float[Array, ""]:
    """Return E, summed over splits and members.

    Where all held-out rows are right, E falls for ever with tau: (log tau)^2 / 2, worth as much as one
    row, keeps it finite.
    """
    error = held_out(state.params, hparams, *batch)
    if "scale" in hparams:
        error = error + jnp.log(hparams["scale"]) ** 2 / (2 * batch[1].shape[1])
    return jnp.sum(error)


def final_loss(state: Any, hparams: PyTree, batch: PyTree) -> Float[Array, ""]:
    """Return the training loss at the end."""
    return training_loss(state.params, hparams, batch)


TRAINING = Training(training_loss, optax.sgd(1.0, MOMENTUM))
"""One object, so that a second fit of the same shapes compiles nothing."""


def learning_rate(rows: Rows, classes: int) -> np.ndarray:
    """Return a stable learning rate of each split.

    J sums over rows of mean squared length 1, and a class's curvature comes mostly from its own rows:
    it grows with the size of the largest class.
    """
    largest = np.array([np.bincount(y, minlength=classes).max() for y in np.asarray(rows.y)])
    return np.minimum(0.4 / largest, 30.0 / rows.y.shape[1]).astype(np.float32)


def graph_problem(rows: Rows, plan: Plan, pattern: Any, steps: int) -> Mean:
    """Return the problem of all splits and members, cross-validated over the plan's folds."""
    classes, members = len(pattern), plan.train.shape[2]
    x, y, rate, pattern = map(jnp.asarray, (*rows, learning_rate(rows, classes), pattern))
    start = zeros(len(x), members, classes, x.shape[2])

    def problem_of_fold(k):
        use, held = (jnp.asarray(part[k], jnp.float32) for part in (plan.train, plan.held))
        return Problem(
            TRAINING,
            held_out_error,
            init=start,
            batches=FullBatch((x, y, use, rate, pattern), steps=steps),
            validation=(x, y, held),
        )

    return Mean([problem_of_fold(k) for k in range(len(plan.train))])


def zeros(splits: int, members: int, classes: int, width: int) -> PyTree:
    """Return W = 0, b = 0."""
    return {
        "w": jnp.zeros((splits, members, classes, width)),
        "b": jnp.zeros((splits, members, classes)),
    }


def make_folds(labels: np.ndarray, folds: int, rng: np.random.Generator) -> np.ndarray:
    """Return a fold for each row, each fold with its share of every label."""
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    fold = np.empty(len(labels), int)
    fold[order] = np.arange(len(labels)) % folds
    return fold


def make_plan(y: np.ndarray, folds: int, outer: int, rng: np.random.Generator) -> Plan:
    """Return the plan of one split: member 0 sees all rows, `outer` others leave a fold out."""
    n, members = len(y), outer + 1
    train, held = np.zeros((2, folds, 1, members, n), bool)
    left_out = np.zeros((1, members, n), bool)
    outer_fold = make_folds(y, max(outer, 1), rng)
    for m in range(members):
        seen = np.flatnonzero(outer_fold != m - 1)
        left_out[0, m] = ~np.isin(np.arange(n), seen)
        fold = make_folds(y[seen], folds, rng)
        for k in range(folds):
            train[k, 0, m, seen[fold != k]] = True
            held[k, 0, m, seen[fold == k]] = True
    return Plan(train, held, left_out)


def single_plan(is_validation: np.ndarray) -> Plan:
    """Return the plan of one training and one validation set."""
    held = np.asarray(is_validation, bool)[None, None, None]
    return Plan(~held, held, np.zeros(held.shape[1:], bool))


def joined(plans: list[Plan]) -> Plan:
    """Return the plan of several splits."""
    return Plan(
        np.concatenate([p.train for p in plans], 1),
        np.concatenate([p.held for p in plans], 1),
        np.concatenate([p.outer for p in plans], 0),
    )


class Judged(NamedTuple):
    """A number for each row of each split that is judged by a model which did not see it."""

    values: Any  # (splits, n)
    mask: Any  # (splits, n)

    def mean(self) -> Array:
        """Return the mean of each split."""
        return jnp.sum(self.values * self.mask, -1) / jnp.sum(self.mask, -1)


@eqx.filter_jit
def outer_losses(params: PyTree, hparams: PyTree, rows: Rows, plan: Plan) -> Judged:
    """Return the losses of rows that a member's whole descent did not see, the mean of its folds."""
    each = jax.vmap(lambda p: jnp.sum(plan.outer * losses(p, hparams, *rows), 1))(params)
    return Judged(jnp.mean(each, 0), jnp.any(plan.outer, 1))


@eqx.filter_jit
def held_losses(params: PyTree, hparams: PyTree, rows: Rows, plan: Plan) -> Judged:
    """Return the losses of held-out rows in the folds of member 0: what it descends on."""
    each = jax.vmap(lambda p: losses(p, hparams, *rows)[:, 0])(params)
    return Judged(jnp.sum(plan.held[:, :, 0] * each, 0), jnp.any(plan.held[:, :, 0], 0))


@eqx.filter_jit
def held_mistakes(params: PyTree, hparams: PyTree, rows: Rows, plan: Plan) -> Judged:
    """Return which held-out rows the folds of member 0 get wrong."""
    wrong = jax.vmap(lambda p: jnp.argmax(scores_of(p, rows.x)[:, 0], -1) != rows.y)(params)
    held = plan.held[:, :, 0]
    return Judged(jnp.sum(held * wrong, 0).astype(jnp.float32), jnp.any(held, 0))


class Keep(Callback):
    """Keeps, for each split, the hyperparameters of member 0 that are judged best.

    A later step takes the place of the kept one where its rows are better by `margin` standard errors
    of the mean difference. With a file it continues from there when the run is resumed.
    """

    def __init__(self, judge: Any, margin: float = 0.0, file: str | Path | None = None):
        self.judge, self.margin = judge, margin
        self.file = None if file is None else Path(file)
        self.values: Any = None
        self.steps: Any = None
        self.hparams: Any = None

    def start(self, run: Any) -> None:
        """Take up what was kept, where the run is resumed."""
        if self.file is not None and run.history and self.file.exists():
            with np.load(self.file) as saved:
                self.values, self.steps = saved["values"], saved["steps"]
                self.hparams = {name: jnp.asarray(saved[f"h_{name}"]) for name in run.hparams}

    def step(self, run: Any) -> None:
        """Compare."""
        values, mask = map(np.asarray, self.judge(run.state.params, run.hparams))
        new = jax.tree.map(lambda leaf: leaf[:, :1], run.hparams)
        if self.values is None:
            self.values, self.steps, self.hparams = values, np.zeros(len(values), int), new
        gain = np.ma.masked_array(self.values - values, ~mask)
        error = gain.std(1) / np.sqrt(mask.sum(1))
        better = np.asarray(gain.mean(1) > self.margin * error)
        self.values = np.where(better[:, None], values, self.values)
        self.steps = np.where(better, run.step, self.steps)
        self.hparams = jax.tree.map(
            lambda a, b: jnp.where(better.reshape(-1, *[1] * (a.ndim - 1)), a, b), new, self.hparams
        )
        if self.file is not None:
            kept: Any = {f"h_{name}": np.asarray(leaf) for name, leaf in self.hparams.items()}
            self.file.parent.mkdir(parents=True, exist_ok=True)
            arrays = {"values": self.values, "steps": self.steps, **kept}
            write_whole(self.file, lambda file: np.savez(file, **arrays))


def descend(
    rows: Rows,
    plan: Plan,
    pattern: Any,
    hparams: PyTree,
    *,
    sets: PyTree,
    optimizer: Any,
    judge: Any,
    margin: float = 0.0,
    steps: int,
    hyper_steps: int,
    engine: Any = None,
    callbacks: Any = (),
) -> tuple[Keep, Any]:
    """Descend from `hparams`; return what is kept of each split, and the result of `minimize`."""
    rows, plan = Rows(*map(jnp.asarray, rows)), Plan(*map(jnp.asarray, plan))
    folder = next((c.directory for c in callbacks if isinstance(c, Checkpoint)), None)
    file = None if folder is None else f"{folder}-kept.npz"
    keep = Keep(lambda params, h: judge(params, h, rows, plan), margin, file)
    result = minimize(
        graph_problem(rows, plan, pattern, steps),
        hparams,
        steps=hyper_steps,
        engine=engine,
        optimizer=optimizer,
        constraints=sets,
        callbacks=[*callbacks, keep],
    )
    return keep, result


def tune(
    kind: str,
    rows: Rows,
    plan: Plan,
    pattern: Any,
    *,
    total: float | None = None,
    steps: int,
    hyper_steps: int,
    engine: Any = None,
    callbacks: Any = lambda phase: (),
) -> tuple[Keep, Any]:
    """Tune C, rho and tau: first with one strength for the whole pattern, then as `kind` says.

    The second phase, with many hyperparameters, can over-fit the folds. So a step of it is kept only
    where it is better than what is kept by two standard errors, on rows that the whole descents
    did not see, or, where the plan has no such members, on held-out rows. `callbacks` is a function of
    the phase, "uniform", "full" or "none".
    """
    (splits, members), classes = plan.outer.shape[:2], len(pattern)
    options = {
        "judge": outer_losses if members > 1 else held_losses,
        "steps": steps,
        "hyper_steps": hyper_steps,
        "engine": engine,
    }
    shape = (splits, members)
    keep, result = descend(
        rows,
        plan,
        pattern,
        {
            "C": jnp.full(shape, START_C / classes),
            "rho": jnp.full(shape, START_RHO),
            "scale": jnp.full(shape, START_SCALE),
        },
        sets=dict.fromkeys(("C", "rho", "scale"), Log()),
        optimizer=optax.adam(HYPER_RATE),
        callbacks=callbacks("uniform"),
        **options,
    )
    if kind == "uniform" or result.stopped == "interrupted":
        return keep, result
    hparams = dict(result.hparams)
    sets: dict[str, Any] = {"rho": Log(), "scale": Log()}
    a, rho = hparams.pop("C"), hparams["rho"]
    # sum_k w_k = 0 throughout, so C_jk = a for all pairs is the same as 2 K a more of rho
    most = {"none": 0.0, "full": np.inf if total is None else total / np.sum(pattern)}[kind]
    rho = rho + 2 * classes * jnp.maximum(a - most, 0)
    if kind == "none":
        hparams["rho"] = jnp.broadcast_to(rho[..., None], (*shape, classes))
    else:
        hparams["rho"] = rho
        hparams["C"] = jnp.minimum(a, most)[..., None, None] * jnp.asarray(pattern)
        sets["C"] = EachMember(SymmetricNonNegative(total))
    rates: Any = {"C": optax.adam(PAIR_RATE * START_C / classes), "other": optax.adam(HYPER_RATE)}
    return descend(
        rows,
        plan,
        pattern,
        hparams,
        sets=sets,
        optimizer=optax.partition(
            rates, lambda h: {name: "C" if name == "C" else "other" for name in h}
        ),
        margin=MARGIN,
        callbacks=callbacks(kind),
        **options,
    )


def train(rows: Rows, hparams: PyTree, pattern: Any, steps: int) -> PyTree:
    """Return W and b of each split (members = 1), trained on all its rows."""
    rows, classes = Rows(*map(jnp.asarray, rows)), len(pattern)
    use = jnp.ones((*rows.y.shape[:1], 1, rows.y.shape[1]))
    rate = jnp.asarray(learning_rate(rows, classes))
    problem = Problem(
        TRAINING,
        final_loss,
        init=zeros(len(rows.x), 1, classes, rows.x.shape[2]),
        batches=FullBatch((*rows, use, rate, jnp.asarray(pattern)), steps=steps),
        validation=(*rows, use, rate, jnp.asarray(pattern)),
    )
    plain = {name: leaf for name, leaf in hparams.items() if name != "scale"}
    return problem.response(plain)[1].params

"""Learnt strengths of augmentation on MNIST, beside none, RandAugment and TPE.

    python -m benchmarks.augmentation [--labels 500 2000] [--seeds 3] [--processes 6] [--out FILE.json]
    python -m benchmarks.augmentation --quick

Of the labels, a fifth validates while strengths are sought; then all of them train a convolutional
network anew, from four starts, judged on the test set. Every training is whole: Adam with a cosine,
`--steps` minibatches of 64. Six changes: rotation, shift, scale, shear, brightness, noise.

none          no augmentation.
learnt        `minimize` on the mean of four draws, reverse mode: all six strengths by hypergradients.
RandAugment   n of the six for each image, all at magnitude m of 10, the sign at random: n and m by 20
              random trials.
TPE           Optuna's, on the same six strengths, for as long as `learnt` took, compilation included.

A trial is the mean validation error of the same four draws, as one program. A cell, labels and a seed,
is a process of its own where `--processes` is above 1.
"""

import concurrent.futures
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy.ndimage import map_coordinates
from jaxtyping import Array

import foretune as ft
from benchmarks.harness import Table, command_line, record
from benchmarks.tasks import cross_entropy, mnist_arrays
from experiments.networks import convolutional, dense, linear, strided

NAMES = ("rotation", "shift", "scale", "shear", "brightness", "noise")
RANDAUGMENT = {  # at magnitude 10: radians, half images, logarithm, -, -, standard deviation
    "rotation": 0.52, "shift": 0.66, "scale": 0.3, "shear": 0.3, "brightness": 0.9, "noise": 0.5,
}  # fmt: skip
START, LOWEST, HIGHEST = 0.1, 1e-3, 1.0
SIDE, BATCH, DRAWS, TRIALS, RATE = 28, 64, 4, 20, 3e-3
Hparams = dict[str, Any]


class Scale(NamedTuple):
    """How much is done."""

    steps: int
    iterations: int
    widths: tuple[int, ...]
    test: int


FULL, QUICK = Scale(600, 30, (16, 32), 10_000), Scale(3, 1, (2,), 50)


def changed(strength: Hparams, u: Array, noise_key: Array, image: Array) -> Array:
    """Return an image, changed by amounts that are a strength times a number in u."""
    by = {name: strength[name] * u[i] for i, name in enumerate(NAMES)}
    cos, sin, zero, one = jnp.cos(by["rotation"]), jnp.sin(by["rotation"]), 0.0 * u[0], 1 + 0 * u[0]
    turn = jnp.array([[cos, -sin], [sin, cos]])
    affine = jnp.exp(by["scale"]) * turn @ jnp.array([[one, by["shear"]], [zero, one]])
    places = jnp.stack(jnp.meshgrid(*2 * [jnp.linspace(-1, 1, SIDE)], indexing="ij"))
    shift = strength["shift"] * jnp.array([u[1], u[6]])
    seen = jnp.einsum("ij,jhw->ihw", affine, places) + shift[:, None, None]
    image = map_coordinates(image, [*(seen + 1) * (SIDE - 1) / 2], order=1, mode="constant")
    image = image * (1 + by["brightness"])
    return image + by["noise"] * jax.random.normal(noise_key, image.shape)


def amounts(hparams: Hparams, key: Array) -> tuple[Hparams, Array]:
    """Return the strengths and a number for each: random ones, or RandAugment's signs of n changes."""
    if "n" not in hparams:
        return hparams, jax.random.uniform(key, (7,), minval=-1.0)
    of_sign, of_choice = jax.random.split(key)
    sign = jax.random.rademacher(of_sign, (7,), jnp.float32)
    chosen = jnp.clip(hparams["n"] - jax.random.permutation(of_choice, 6), 0, 1)  # n are 1
    u = sign * jnp.append(chosen, chosen[1])  # two directions of the shift
    return {name: most * hparams["m"] / 10 for name, most in RANDAUGMENT.items()}, u


def augmented(hparams: Hparams, bits: Array, image: Array) -> Array:
    """Return an image changed at random."""
    key, noise_key = jax.random.split(jax.random.wrap_key_data(bits))
    return changed(*amounts(hparams, key), noise_key, image)


def network(weights: Any, images: Array) -> Array:
    """Return the logits."""
    return linear(weights["head"], strided(weights, images[..., None]))


class Cell:
    """The trainings on some labels of MNIST."""

    def __init__(self, labels: int, seed: int, scale: Scale):
        x, y, x_test, y_test = mnist_arrays()
        rows = np.random.default_rng(seed).choice(len(x), labels, replace=False)
        self.x, self.y = self._arrays(x[rows], y[rows])
        self.test = self._arrays(x_test[: scale.test], y_test[: scale.test])
        self.labels, self.scale = labels, scale
        self.key = jax.random.key(seed)
        adam = optax.adam(optax.cosine_decay_schedule(RATE, scale.steps), eps_root=1e-8)
        self.training = ft.Training(self._loss, adam)
        draws = jax.random.split(jax.random.fold_in(self.key, 1), DRAWS)
        self._errors = jax.jit(lambda h: jnp.mean(jax.vmap(lambda k: self._error(h, k))(draws)))
        starts = jax.random.split(jax.random.fold_in(self.key, 2), 4)
        self._judge = jax.jit(
            lambda h, test: jax.vmap(lambda k: self._accuracy(h, k, test))(starts)
        )

    @staticmethod
    def _arrays(x: Any, y: Any) -> tuple[Array, Array]:
        images = np.asarray(x, np.float32).reshape(-1, SIDE, SIDE)
        return jnp.asarray(images / max(1.0, images.max())), jnp.asarray(y, jnp.int32)

    @staticmethod
    def _loss(weights: Any, hparams: Hparams, batch: Any) -> Array:
        images, labels, *bits = batch
        if bits:
            images = jax.vmap(augmented, (None, 0, 0))(hparams, bits[0], images)
        return cross_entropy(network(weights, images), labels)

    def problem(self, key: Array, rows: Array, validation: tuple[Array, Array]) -> ft.Problem:
        """Return a training from a random start on some rows."""
        of_layers, of_head, of_rows, of_bits = jax.random.split(key, 4)
        side = SIDE
        for _ in self.scale.widths:
            side = -(-side // 2)
        weights = convolutional(of_layers, self.scale.widths)
        weights["head"] = dense(of_head, side * side * self.scale.widths[-1], 10)
        chosen = jax.random.choice(of_rows, rows, (self.scale.steps, BATCH))
        bits = jax.random.bits(of_bits, (self.scale.steps, BATCH, 2), jnp.uint32)
        return ft.Problem(
            self.training,
            lambda state, hparams, batch: self._loss(state.params, hparams, batch),
            init=weights,
            batches=ft.Minibatches(
                (self.x, self.y, bits.reshape(-1, 2)),
                jnp.stack([chosen, jnp.arange(chosen.size).reshape(chosen.shape)], 1),
                gather=_gathered,
            ),
            validation=validation,
        )

    def draw(self, key: Array) -> ft.Problem:
        """Return a training on four fifths of the labels, judged by the others."""
        key, of_split = jax.random.split(key)
        rows, n = jax.random.permutation(of_split, self.labels), 4 * self.labels // 5
        return self.problem(key, rows[:n], (self.x[rows[n:]], self.y[rows[n:]]))

    def _error(self, hparams: Hparams, key: Array) -> Array:
        return self.draw(key).response(hparams)[0]

    def _accuracy(self, hparams: Hparams, key: Array, test: tuple[Array, Array]) -> Array:
        _, state = self.problem(key, jnp.arange(self.labels), test).response(hparams)
        return 100 * jnp.mean(jnp.argmax(network(state.params, test[0]), 1) == test[1])

    def error(self, hparams: Hparams) -> float:
        """Return the mean validation error of a trial."""
        return float(self._errors(jax.tree.map(jnp.float32, hparams)))

    def accuracies(self, hparams: Hparams) -> list[float]:
        """Return the test accuracy, in percent, of trainings on all the labels."""
        found = self._judge(jax.tree.map(jnp.float32, hparams), self.test)
        return np.asarray(found, float).tolist()


def _gathered(data: Any, rows: Array) -> tuple[Array, Array, Array]:
    x, y, bits = data
    return x[rows[0]], y[rows[0]], bits[rows[1]]


def learnt(cell: Cell) -> Hparams:
    """Return the strengths by hypergradients."""
    return ft.minimize(
        ft.Mean.of_draws(cell.draw, DRAWS),
        dict.fromkeys(NAMES, jnp.array(START)),  # at 0 the derivative is 0
        key=jax.random.fold_in(cell.key, 3),
        steps=cell.scale.iterations,
        engine=ft.Reverse(),
        optimizer=optax.adam(0.15),
        constraints=dict.fromkeys(NAMES, ft.Log()),
    ).hparams


def randaugment(cell: Cell, seed: int) -> tuple[Hparams, int]:
    """Return n and m, the best of random trials."""
    rng = np.random.default_rng(seed)
    trials = 2 if cell.scale == QUICK else TRIALS
    tried = [{"n": rng.integers(1, 4), "m": rng.uniform(0, 10)} for _ in range(trials)]
    return min(tried, key=cell.error), trials


def tpe(cell: Cell, seed: int, seconds: float) -> tuple[Hparams, int]:
    """Return the strengths that Optuna finds in that time, and the number of trials."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))

    def trial(given):
        at = {name: given.suggest_float(name, LOWEST, HIGHEST, log=True) for name in NAMES}
        return cell.error(at)

    study.enqueue_trial(dict.fromkeys(NAMES, START))
    study.optimize(trial, timeout=seconds)
    return study.best_params, len(study.trials)


def measured(labels: int, seed: int, scale: Scale) -> list[dict[str, Any]]:
    """Return a row for each method."""
    cell, rows = Cell(labels, seed, scale), []

    def row(name: str, find: Callable[[], tuple[Hparams, int]]) -> float:
        began = time.perf_counter()
        found, trials = jax.block_until_ready(find())
        seconds = time.perf_counter() - began
        shown = {key: round(float(value), 4) for key, value in found.items()}
        accuracy = cell.accuracies(found)
        of = {"labels": labels, "seed": seed, "method": name}
        rows.append({**of, "seconds": seconds, "trials": trials, "found": shown, "test": accuracy})
        return seconds

    row("none", lambda: (dict.fromkeys(NAMES, 0.0), 0))
    seconds = row("learnt", lambda: (learnt(cell), scale.iterations + 1))
    row("RandAugment", lambda: randaugment(cell, seed))
    row("TPE", lambda: tpe(cell, seed, seconds))
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--labels", nargs="+", type=int, default=[500, 2000])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=FULL.steps, help="of each training")
    parser.add_argument("--iterations", type=int, default=FULL.iterations, help="of minimize")
    parser.add_argument("--widths", nargs="+", type=int, default=FULL.widths, help="of layers")
    parser.add_argument("--processes", type=int, default=1, help="cells at a time")
    parser.add_argument("--quick", action="store_true", help="small sizes, to try")
    arguments = parser.parse_args()
    scale = FULL._replace(
        steps=arguments.steps, iterations=arguments.iterations, widths=tuple(arguments.widths)
    )
    cells = [(n, seed, scale) for n in arguments.labels for seed in range(arguments.seeds)]
    if arguments.quick:
        cells = [(50, 0, QUICK)]
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share a GPU
    if arguments.processes == 1:
        found = [measured(*cell) for cell in cells]
    else:
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(arguments.processes, spawn) as pool:
            found = [each.result() for each in [pool.submit(measured, *cell) for cell in cells]]
    rows = [row for cell in found for row in cell]
    table = Table("labels", "method", "test accuracy, %", "± over seeds", "seconds", "trials")
    for labels in sorted({row["labels"] for row in rows}):
        for method in ("none", "learnt", "RandAugment", "TPE"):
            own = [r for r in rows if (r["labels"], r["method"]) == (labels, method)]
            means = [statistics.fmean(r["test"]) for r in own]
            error = statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else ""
            seconds, trials = (
                statistics.fmean(r[key] for r in own) for key in ("seconds", "trials")
            )
            table.add(labels, method, statistics.fmean(means), error, seconds, trials)
    record(arguments.out, rows, ["optuna"])


if __name__ == "__main__":
    main()

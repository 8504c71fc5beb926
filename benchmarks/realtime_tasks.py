"""Tasks for trainings of known length: data in three parts, and a network."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.tasks import digits_arrays, layers, mlp, mnist_arrays


class Task(NamedTuple):
    """Data, sizes and a network as init and apply functions."""

    parts: tuple[Any, Any, Any]  # training, validation, test
    batch_size: int
    steps: int
    init: Callable[[Any], Any]
    apply: Callable[[Any, Any], Any]


def _network(*sizes: int) -> tuple[Any, Any]:
    return lambda key: layers(key, *sizes), mlp


def _split(x, y, first: int, second: int, seed: int | None = 0, right: Any = None):
    """Return three parts of shuffled data; the last may have other labels."""
    order = np.arange(len(y)) if seed is None else np.random.default_rng(seed).permutation(len(y))
    x, y, right = x[order], y[order].astype(np.int32), (y if right is None else right)[order]
    test = x[second:], right[second:].astype(np.int32)
    return (x[:first], y[:first]), (x[first:second], y[first:second]), test


def digits() -> Task:
    """64-64-10 on scikit-learn's digits."""
    return Task(_split(*digits_arrays(seed=0), 900, 1200, None), 50, 1000, *_network(64, 64, 10))


def _mnist(labels=None):
    x, y, x_test, y_test = mnist_arrays()
    y = y.astype(np.int32)
    if labels is not None:
        y = labels(y)
    return (x[:50000], y[:50000]), (x[50000:52000], y[50000:52000]), (x_test, y_test)


def mnist() -> Task:
    """784-128-64-10 on MNIST."""
    return Task(_mnist(), 100, 1000, *_network(784, 128, 64, 10))


def noise() -> Task:
    """196-48-10 on MNIST at half its resolution, a fifth of the labels drawn at random."""

    def noisy(y):
        rng = np.random.default_rng(1)
        return np.where(rng.random(len(y)) < 0.2, rng.integers(0, 10, len(y)), y).astype(np.int32)

    def small(part):
        x = part[0].reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(-1, 196)
        return x.astype(np.float32), part[1]

    train, validation, test = map(small, _mnist(noisy))
    train = tuple(array[:20000] for array in train)
    return Task((train, validation, test), 50, 1000, *_network(196, 48, 10))


def _folder(name: str) -> Path:
    where = os.environ.get("FORETUNE_DATA")
    if where is None or not (Path(where) / name).is_dir():
        raise SystemExit(f"this task needs the folder {name} in the one that FORETUNE_DATA names")
    return Path(where) / name


def _features(name: str, classes: int) -> Task:
    with np.load(_folder("cifar") / f"{name}-efficientnet-lite0.npz") as data:
        x, y = data["x"].astype(np.float32), data["y"]
    x = (x - x.mean(0)) / (x.std(0) + 1e-6)
    return Task(_split(x, y, 4000, 4800), 100, 1000, *_network(1280, 64, classes))


def cifar() -> Task:
    """1280-64-10 on features of CIFAR-10's images, by an EfficientNet-Lite0."""
    return _features("cifar10", 10)


def human() -> Task:
    """192-48-10 on such features, with people's labels, 17 % of them wrong; tested on right ones."""
    with np.load(_folder("cifar10n") / "features.npz") as data:
        x, y, right = data["x"].astype(np.float32), data["random"], data["true"]
    return Task(_split(x / x.std(), y, 3500, 4300, right=right), 50, 1000, *_network(192, 48, 10))


def _next_byte(source: np.ndarray, validation: np.ndarray, test: np.ndarray) -> Task:
    """288-96-48: the next byte, of 48 kinds, after six."""
    bytes_, counts = np.unique(source, return_counts=True)
    kinds = np.full(256, 47)
    kinds[bytes_[np.argsort(-counts)][:47]] = np.arange(47)

    def windows(row, count, seed):
        starts = np.random.default_rng(seed).integers(0, len(row) - 7, count)
        found = kinds[row[starts[:, None] + np.arange(7)]].astype(np.int32)
        return found[:, :6], found[:, 6]

    parts = windows(source, 200_000, 0), windows(validation, 2000, 1), windows(test, 10_000, 2)
    init, _ = _network(288, 96, 48)
    return Task(
        parts, 100, 1500, init,
        lambda params, x: mlp(params, jax.nn.one_hot(x, 48).reshape(*x.shape[:-1], -1)),
    )  # fmt: skip


def text() -> Task:
    """The next byte of speeches; tested on speeches of a later time."""
    folder = _folder("text")
    with np.load(folder / "sources.npz") as data:
        source = data["speeches-1930-1974"]
    with np.load(folder / "target-modern-speeches.npz") as data:
        return _next_byte(source, data["validation"], data["test"])


def convolutions() -> Task:
    """Two convolutions of 8 and 16 channels on MNIST at half its resolution, 10,000 images."""

    def small(part):
        return part[0].reshape(-1, 14, 2, 14, 2).mean((2, 4))[..., None].astype(np.float32), part[1]

    train, validation, test = map(small, _mnist())
    train = tuple(array[:10_000] for array in train)

    def init(key):
        first, second, third = jax.random.split(key, 3)
        return {
            "first": jax.random.normal(first, (3, 3, 1, 8)) * (2 / 9) ** 0.5,
            "second": jax.random.normal(second, (3, 3, 8, 16)) * (2 / 72) ** 0.5,
            "head": layers(third, 256, 10),
        }

    def apply(params, x):
        for name in ("first", "second"):
            x = jax.lax.conv_general_dilated(
                x, params[name], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x)
        return mlp(params["head"], x.reshape(x.shape[0], -1))

    return Task((train, validation, test), 50, 1000, init, apply)


def glyphs() -> Task:
    """784-128-41: the script of a letter."""
    with np.load(_folder("glyphs") / "background.npz") as data:
        x, script = data["x"], data["script"]
    _, y = np.unique(script, return_inverse=True)
    x, y = x.reshape(-1, 784).astype(np.float32) / 255, np.repeat(y, x.shape[1])
    return Task(_split(x, y, 16_000, 18_000), 100, 1500, *_network(784, 128, int(y.max()) + 1))


def objects() -> Task:
    """1280-64-100 on features of CIFAR-100's images, by an EfficientNet-Lite0."""
    return _features("cifar100", 100)


def bible() -> Task:
    """The next byte of the King James Bible."""
    with np.load(_folder("text") / "sources.npz") as data:
        source = data["king-james-bible"]
    return _next_byte(source[:800_000], source[800_000:900_000], source[900_000:])


def speech() -> Task:
    """123-96-183: phone states of single frames, from the sample of TIMIT's speakers."""
    from experiments.phones.speech.timit import timit

    corpus = timit(_folder("timit-sample"))
    rng = np.random.default_rng(0)

    def part(name, most):
        rows = corpus.rows(name)
        rows = rng.permutation(rows)[:most]
        return corpus.frames[rows], corpus.states[rows].astype(np.int32)

    parts = part("train", None), part("validation", 2000), part("test", 10_000)
    return Task(parts, 100, 1500, *_network(123, 96, 183))


TASKS: dict[str, Callable[[], Task]] = {
    "digits": digits, "noise": noise, "human": human, "mnist": mnist, "cifar": cifar,
    "text": text, "speech": speech, "convolutions": convolutions,
    "glyphs": glyphs, "objects": objects, "bible": bible,
}  # fmt: skip
HELD_OUT = ("glyphs", "objects", "bible")
"""Nothing is developed on these: one of images, one of features, one of text, set aside unseen."""

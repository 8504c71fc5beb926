"""Tasks of few-shot learning: some classes, a few images of each to learn from, others to be judged by.

The files have `x`, classes x images x 28 x 28, and `script`, one for each class.
"""

import os
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from foretune.report import RunError

VALIDATION = 6  # scripts
Images = UInt8[Array, "classes n h w"]
Pair = tuple[Float[Array, "m h w 1"], Array]


class Size(NamedTuple):
    """Of a task: its classes, and images of each."""

    ways: int
    shots: int
    queries: int

    def __str__(self) -> str:
        return f"{self.ways} ways, {self.shots} shot{'s' * (self.shots > 1)}"


class Letters(NamedTuple):
    """Images by class: to train on, of other scripts to validate, and of others to test."""

    train: Images
    validation: Images
    test: Images


def files(data: str | None) -> tuple[Path, Path]:
    """Return the file of classes to learn from and that of classes to test, or raise."""
    folder = Path(os.environ.get("FORETUNE_DATA", "")) / "glyphs"
    background, test = folder / "background.npz", Path(data or folder / "test.npz")
    for path in (background, test):
        if not path.is_file():
            raise RunError(
                f"{path} is not there. Put background.npz (and test.npz) with `x`, classes x images x "
                "28 x 28, and `script` into the folder glyphs of FORETUNE_DATA."
            )
    return background, test


def read(background: Path, test: Path, seed: int = 0) -> Letters:
    """Return the letters; some scripts of the background are held out for validation."""
    x, scripts = images(background), np.load(background)["script"]
    names = np.unique(scripts)
    held = np.random.default_rng(seed).permutation(names)[: min(VALIDATION, len(names) // 2)]
    out = np.isin(scripts, held)
    return Letters(*map(jnp.asarray, (x[~out], x[out], images(test))))


def images(path: Path) -> np.ndarray:
    """Return the images of a file by class, or raise."""
    try:
        x = np.load(path)["x"]
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{path} has no array `x` that can be read ({error}).") from error
    if x.ndim != 4 or x.dtype != np.uint8:
        raise RunError(
            f"{path}: x is {x.dtype} of shape {x.shape}, expected uint8, classes x images x h x w."
        )
    return x


def check(letters: Letters, size: Size) -> None:
    """Raise where a set has too few classes, or too few images of each."""
    for name, x in letters._asdict().items():
        if len(x) < size.ways or x.shape[1] < size.shots + size.queries:
            raise RunError(
                f"{size} need {size.ways} classes of {size.shots + size.queries} images, and {name} "
                f"has {len(x)} of {x.shape[1]}."
            )


def sampled(key: Array, images: Images, size: Size) -> tuple[Pair, Pair]:
    """Return the support and the query of a random task."""
    ways, shots, queries = size
    class_key, image_key = jax.random.split(key)
    classes = jax.random.permutation(class_key, len(images))[:ways]
    order = jnp.argsort(jax.random.uniform(image_key, (ways, images.shape[1])))
    x = images[classes[:, None], order[:, : shots + queries], ..., None] / jnp.float32(255)

    def flat(x):
        return x.reshape(-1, *x.shape[2:]), jnp.repeat(jnp.arange(ways), x.shape[1])

    return flat(x[:, :shots]), flat(x[:, shots:])

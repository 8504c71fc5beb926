"""The data sets of the experiments.

`digits` is inside scikit-learn. `mnist` is looked for in the folder that the environment variable
FORETUNE_DATA names, then in the user's cache; if it is in neither, it is downloaded there by Pooch.
`cifar10` and `cifar100` are features of images, which cannot be downloaded ready-made: they are looked
for in the same two places.
"""

import gzip
import hashlib
import os
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from foretune._engines.memory import show_bytes
from foretune.apps._optional import needs
from foretune.apps._tables import DataError, read_table
from foretune.report import RunError


def check_memory(what: str, bytes: int | float) -> None:
    """Raise where what a run keeps, of about that many bytes, is more than the machine holds."""
    try:
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # a platform that does not tell
        return
    if bytes > have:
        raise RunError(
            f"{what} need about {show_bytes(int(bytes))} of memory, and this machine has "
            f"{show_bytes(have)}: give smaller numbers."
        )


class Dataset(NamedTuple):
    """Rows, labels, and the shape of an image where a row is one."""

    x: np.ndarray
    y: np.ndarray
    image_shape: tuple[int, ...] | None
    name: str
    class_names: list[str] | None = None


_MNIST = {  # file: (bytes of header, md5 of the raw bytes, md5 of the usual gzip file)
    "train-images-idx3-ubyte": (
        16,
        "6bbc9ace898e44ae57da46a324031adb",
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    ),
    "train-labels-idx1-ubyte": (
        8,
        "a25bea736e30d166cdddb491f175f624",
        "d53e105ee54ea40749a09fcbcd1e9432",
    ),
    "t10k-images-idx3-ubyte": (
        16,
        "2646ac647ad5339dbf082846283269ea",
        "9fb629c4189551a2d022fa330f9573f3",
    ),
    "t10k-labels-idx1-ubyte": (
        8,
        "27ae3e4e09519cfbb04c329615203637",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
}
_MNIST_SOURCE = "https://ossci-datasets.s3.amazonaws.com/mnist/"


def load(name: str, label: str | None = None) -> Dataset:
    """Return `digits`, `mnist`, `cifar10`, `cifar100`, or what is in a file (.npz, .csv, .parquet).

    `label` names the column of labels of a file, where it is not called that itself.

    >>> digits = load("digits")
    >>> digits.x.shape, digits.image_shape
    ((1797, 64), (8, 8))
    """
    if name == "digits":
        with needs("data", "the data set digits"):
            from sklearn.datasets import load_digits

        x, y = map(np.asarray, load_digits(return_X_y=True))
        return Dataset((x / 16).astype(np.float32), y.astype(np.int32), (8, 8), "digits")
    if name == "mnist":
        return _mnist()
    if name in ("cifar10", "cifar100"):
        return _cifar(name)
    if not Path(name).suffix:
        raise DataError(
            f"no data set {name!r}: give digits, mnist, cifar10, cifar100, or the path of a .npz, .csv "
            "or .parquet file."
        )
    table = read_table(name, label)
    return Dataset(table.matrix(), table.y, table.image_shape, Path(name).stem)


def _cifar(name: str) -> Dataset:
    file = f"{name}-efficientnet-lite0.npz"
    folder = Path(os.environ.get("FORETUNE_DATA", "")) / "cifar"
    if "FORETUNE_DATA" not in os.environ or not (folder / file).is_file():
        folder = cache_folder() / "cifar"
    if not (folder / file).is_file():
        raise DataError(
            f"{file} is neither in FORETUNE_DATA/cifar nor in {folder}. It holds features of {name}'s "
            "images by an EfficientNet-Lite0, x (n, 1280) and y (n,), and cannot be downloaded. "
            "Features of your own go by their path, --data features.npz with x and y."
        )
    table = read_table(folder / file)
    if table.y.dtype.kind not in "iu":
        raise DataError(f"{folder / file}: labels have dtype {table.y.dtype}, expected integers.")
    names, found = folder / f"{name}-classes.txt", None
    if names.is_file():
        found = names.read_text(encoding="utf-8", errors="replace").splitlines()
        if len(found) != (count := len(np.unique(table.y))):
            raise DataError(f"{names} has {len(found)} lines, and {file} has {count} classes.")
    return Dataset(np.asarray(table.x, np.float32), table.y.astype(np.int32), None, name, found)


def cache_folder() -> Path:
    """Return the folder of what is downloaded or computed once."""
    with needs("data", "the cache of data"):
        import pooch

    return Path(pooch.os_cache("foretune"))


def _mnist() -> Dataset:
    images, labels = [], []
    for name, (skip, md5, _) in _MNIST.items():
        path = _mnist_file(name)
        try:
            raw = gzip.decompress(path.read_bytes())
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} is damaged ({error}): remove it and try again.") from error
        if hashlib.md5(raw, usedforsecurity=False).hexdigest() != md5:
            raise DataError(f"{path} is not MNIST's file: remove it and try again.")
        (images if skip == 16 else labels).append(np.frombuffer(raw, np.uint8, offset=skip))
    x = np.concatenate(images).reshape(-1, 784).astype(np.float32) / 255
    return Dataset(x, np.concatenate(labels).astype(np.int32), (28, 28), "mnist")


def _mnist_file(name: str) -> Path:
    given = Path(os.environ.get("FORETUNE_DATA", "")) / "mnist" / f"{name}.gz"
    if "FORETUNE_DATA" in os.environ and given.is_file():
        return given
    cache = cache_folder() / "mnist"
    if (cache / f"{name}.gz").is_file():
        return cache / f"{name}.gz"
    import pooch

    try:
        path = pooch.retrieve(
            f"{_MNIST_SOURCE}{name}.gz", f"md5:{_MNIST[name][2]}", f"{name}.gz", cache
        )
    except Exception as error:
        raise DataError(
            f"MNIST is neither in FORETUNE_DATA/mnist nor in {cache}, and it could not be downloaded "
            f"({type(error).__name__}). Put its four idx files, gzipped, into one of the two."
        ) from error
    return Path(path)

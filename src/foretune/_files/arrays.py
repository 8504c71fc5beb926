"""Arrays in a file that says what it belongs to: a `.npz` with a header of JSON.

Each part has a checksum, the header too: what a disk has changed is found when it is read.
"""

import contextlib
import errno
import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from .files import write_whole

HEADER = "header"


class Damaged(ValueError):
    """A file that does not hold what was written to it."""


def save_arrays(
    path: str | Path,
    arrays: Mapping[str, np.ndarray],
    header: Mapping[str, object] | None = None,
    *,
    sync: bool = True,
) -> None:
    """Write arrays by name, and a header of what JSON can say, whole or not at all."""
    text = json.dumps({"header": dict(header or {}), "names": sorted(arrays)})
    parts = {**arrays, HEADER: np.frombuffer(text.encode(), np.uint8)}
    write_whole(path, lambda file: np.savez(file, allow_pickle=False, **parts), sync=sync)


def load_arrays(path: str | Path) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    """Return header and arrays; raise `Damaged` where they are not all, `OSError` for the disk."""
    with _finding_damage(path), zipfile.ZipFile(path) as file:
        names = [name.removesuffix(".npy") for name in file.namelist()]
        arrays = {name: _array(file, name) for name in names}
        text = json.loads(arrays.pop(HEADER).tobytes())
        if sorted(arrays) != text["names"]:
            raise ValueError("it lacks arrays")
        return text["header"], arrays


def load_header(path: str | Path) -> dict[str, object]:
    """Return the header alone; raise as `load_arrays` does."""
    with _finding_damage(path), zipfile.ZipFile(path) as file:
        return json.loads(_array(file, HEADER).tobytes())["header"]


@contextlib.contextmanager
def _finding_damage(path: str | Path) -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        damage = None, errno.EINVAL  # the latter of an offset before the file
        if isinstance(error, OSError) and error.errno not in damage:  # the disk's
            raise
        raise Damaged(f"{path} is damaged ({type(error).__name__}: {error!s:.100}).") from error


def _array(file: zipfile.ZipFile, name: str) -> np.ndarray:
    content = file.read(f"{name}.npy")  # which looks at its checksum
    return np.load(io.BytesIO(content), allow_pickle=False)

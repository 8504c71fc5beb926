"""Arrays in a file that says what it belongs to: a `.npz` with a header of JSON.

Each part has a checksum, the header too: what a disk has changed is found when it is read.
"""

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .files import write_whole

HEADER = "header"


class Damaged(ValueError):
    """A file that does not hold what was written to it."""


class Saved(NamedTuple):
    """What is in a file."""

    header: dict[str, object]
    arrays: dict[str, np.ndarray]


def save_arrays(
    path: str | Path,
    arrays: Mapping[str, np.ndarray],
    header: Mapping[str, object] | None = None,
    *,
    sync: bool = True,
) -> None:
    """Write arrays by name, and a header of what JSON can say, whole or not at all."""
    parts = dict(arrays)
    if header is not None:
        parts[HEADER] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    write_whole(path, lambda file: np.savez(file, allow_pickle=False, **parts), sync=sync)


def load_arrays(path: str | Path) -> Saved:
    """Return what `save_arrays` wrote; raise `Damaged` where it is not that, `OSError` for the disk."""
    return _read(path, None)


def load_header(path: str | Path) -> dict[str, object]:
    """Return the header alone, `{}` where there is none; raise as `load_arrays` does."""
    return _read(path, [HEADER]).header


def _read(path: str | Path, wanted: list[str] | None) -> Saved:
    try:
        with zipfile.ZipFile(path) as file:
            names = [name.removesuffix(".npy") for name in file.namelist()]
            if wanted is not None:
                names = [name for name in names if name in wanted]
            parts = {name: _array(file.read(f"{name}.npy")) for name in names}  # and its checksum
        header = dict(json.loads(parts.pop(HEADER, np.frombuffer(b"{}", np.uint8)).tobytes()))
    except MemoryError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk's
            raise
        raise Damaged(f"{path} is damaged ({type(error).__name__}: {error!s:.100}).") from error
    return Saved(header, parts)


def _array(content: bytes) -> np.ndarray:
    return np.load(io.BytesIO(content), allow_pickle=False)

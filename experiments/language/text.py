"""The text: sources to train on, and a target that is never trained on."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from foretune.report import RunError

LEAST = 10_000
"""Bytes that a source, and either half of the target, has at least."""


class Text(NamedTuple):
    """Sources as one array of bytes, and the target's validation and test bytes."""

    target: str
    names: tuple[str, ...]
    bytes: np.ndarray
    first: np.ndarray
    """Where each source begins in `bytes`."""
    length: np.ndarray
    """How many bytes each has."""
    validation: np.ndarray
    test: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """The share of each source in all the bytes."""
        return self.length / self.length.sum()


def read(data: str | None = None, target: str | None = None) -> Text:
    """Read the sources and the target.

    Args:
        data: a folder with `sources.npz` (an array of bytes by name) or with a `.txt` file for each
            source; by default `text` of the data directory.
        target: the name of a source, which is then the target and no source; an `.npz` file with
            `validation` and `test`; or a text file, halved. By default the folder's `target-*.npz`.
    """
    folder = _folder(data)
    sources = _sources(folder)
    if target is None:
        files = sorted(folder.glob("target-*.npz"))
        if len(files) != 1:
            raise RunError(
                f"{folder} has {len(files)} files target-*.npz: name the target by --target, one of "
                f"{', '.join(sources)}, or a file."
            )
        target = str(files[0])
    if target in sources:
        halves, name = np.array_split(sources.pop(target), 2), target
    else:
        halves, name = _target(Path(target)), Path(target).stem.removeprefix("target-")
    for part, array in (*sources.items(), (f"{name}, validation", halves[0]), (name, halves[1])):
        if len(array) < LEAST:
            raise RunError(f"{part} has {len(array):,} bytes; {LEAST:,} are needed.")
    if len(sources) < 2:
        raise RunError(f"{folder} has {len(sources)} sources beside the target; it needs two.")
    length = np.array([len(source) for source in sources.values()], np.int32)
    first = np.concatenate([[0], np.cumsum(length)[:-1]]).astype(np.int32)
    return Text(
        name, tuple(sources), np.concatenate(list(sources.values())), first, length, *halves
    )


def _folder(data: str | None) -> Path:
    if data is not None:
        if not Path(data).is_dir():
            raise RunError(f"--data {data}: there is no such folder.")
        return Path(data)
    where = os.environ.get("FORETUNE_DATA")
    if where is None or not (Path(where) / "text").is_dir():
        looked = "FORETUNE_DATA is not set" if where is None else f"{where} has no folder text"
        raise RunError(
            f"{looked}: give a folder of text files by --data, one for each source, and the name of "
            "the one that is the target by --target."
        )
    return Path(where) / "text"


def _sources(folder: Path) -> dict[str, np.ndarray]:
    if (folder / "sources.npz").is_file():
        with np.load(folder / "sources.npz") as file:
            return {name: _bytes(file[name], name) for name in sorted(file.files)}
    found = {path.stem: _file(path) for path in sorted(folder.glob("*.txt"))}
    if not found:
        raise RunError(f"{folder} has neither sources.npz nor files *.txt.")
    return found


def _target(path: Path) -> Any:
    if not path.is_file():
        raise RunError(f"--target {path}: neither a source nor a file.")
    if path.suffix != ".npz":
        return np.array_split(_file(path), 2)
    with np.load(path) as file:
        lacks = {"validation", "test"} - set(file.files)
        if lacks:
            raise RunError(f"{path} lacks {', '.join(sorted(lacks))}; it has {file.files}.")
        return [_bytes(file[name], f"{path}, {name}") for name in ("validation", "test")]


def _file(path: Path) -> np.ndarray:
    return np.frombuffer(path.read_bytes(), np.uint8)


def _bytes(array: np.ndarray, name: str) -> np.ndarray:
    if array.dtype != np.uint8 or array.ndim != 1:
        raise RunError(
            f"{name} is {array.dtype} of shape {array.shape}; expected uint8 of shape (n,)."
        )
    return array

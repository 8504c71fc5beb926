"""The finished parts of an attribution in a folder, from which a later call continues.

`attribution.json` says what they belong to, `queries_12.npz` holds a chunk whose first query is 12.
Each is written whole or not at all. One that cannot be read is set aside with a warning, and its
queries are computed again.
"""

import contextlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from .._files.files import RunError, as_path, locked, set_aside, write_whole

NAME = "attribution.json"


class Parts:
    """The parts in a folder; without a folder, none."""

    def __init__(self, folder: Any, fingerprint: Callable[[], dict[str, Any]]):
        self.folder = None if folder is None else as_path(folder, "attribute(folder=...)")
        self._fingerprint = fingerprint
        self._lock = contextlib.ExitStack()

    def __enter__(self) -> "Parts":
        if self.folder is None:
            return self
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked(self.folder))
            self._check_same()
            self._lock = stack.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self._lock.close()

    def _check_same(self) -> None:
        assert self.folder is not None
        ours, path = self._fingerprint(), self.folder / NAME
        if not path.exists():
            if any(self.folder.glob("queries_*.npz")):
                raise RunError(
                    f"{self.folder} holds parts of an attribution, but {NAME}, which says of what, is "
                    "gone. Give another folder, or remove this one to start anew."
                )
            write_whole(path, json.dumps(ours, indent=1))
            return
        try:
            theirs = dict(json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise RunError(
                f"{path} cannot be read ({error!s:.100}). Give another folder, or remove this one to "
                "start anew."
            ) from error
        differs = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
        if differs:
            raise RunError(
                f"{self.folder} holds another attribution; what differs: {', '.join(differs)}. Give "
                "another folder, or remove this one."
            )

    def read(self, scores: Float[np.ndarray, "K n"], errors: Float[np.ndarray, " K"]) -> np.ndarray:
        """Fill in what is there, and return the numbers of the queries that are missing."""
        done = np.zeros(len(errors), bool)
        for path in sorted(self.folder.glob("queries_*.npz")) if self.folder else ():
            try:
                rows, found, E = load(path, "queries", "scores", "errors")
                scores[rows], errors[rows] = found, E
            except OSError as error:
                if error.errno is not None:  # the disk's
                    raise
                self._pass_over(path, error)
            except Exception as error:
                self._pass_over(path, error)
            else:
                done[rows] = True
        return np.flatnonzero(~done)

    def _pass_over(self, path: Path, error: Exception) -> None:
        warnings.warn(
            f"{path} cannot be read ({type(error).__name__}: {error!s:.100}) and is kept as "
            f"{set_aside(path).name}; its queries are computed again.",
            stacklevel=4,
        )

    def write(self, rows: np.ndarray, scores: np.ndarray, errors: np.ndarray) -> None:
        """Write a chunk."""
        if self.folder is not None:
            save(self.folder / f"queries_{rows[0]}.npz", queries=rows, scores=scores, errors=errors)


def load(path: Path, *names: str, **more: Any) -> list[Any]:
    """Return arrays of a `.npz` file, and more, which are as given where the file has none."""
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return [*(arrays[n] for n in names), *(arrays[n] if n in arrays else more[n] for n in more)]


def save(path: str | Path, **arrays: np.ndarray) -> None:
    """Write arrays as a whole `.npz` file."""
    write_whole(path, lambda file: np.savez(file, allow_pickle=False, **arrays))

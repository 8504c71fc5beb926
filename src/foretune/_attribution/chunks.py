"""The finished chunks of an attribution in a folder, from which a later call continues.

`queries_12.npz` holds a chunk whose first query is 12, and says what attribution it belongs to.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from .._files.arrays import Damaged, load_arrays, save_arrays
from .._files.files import RunError, as_path, locked, make_folder, set_aside
from .._problem.warn import warn


class Chunks:
    """The chunks in a folder; without a folder, none."""

    def __init__(self, folder: Path | None, fingerprint: dict[str, object]):
        self.folder, self._fingerprint = folder, fingerprint

    def read(
        self, scores: Float[np.ndarray, "K n"], errors: Float[np.ndarray, " K"]
    ) -> Int[np.ndarray, " missing"]:
        """Fill in what is there, and return the numbers of the queries that are missing."""
        done, own = np.zeros(len(errors), bool), self._fingerprint
        for path in sorted(self.folder.glob("queries_*.npz")) if self.folder else ():
            try:
                header, found = load_arrays(path)
                names = sorted({*own, *header})
                if differs := [name for name in names if own.get(name) != header.get(name)]:
                    what = f"another attribution; what differs: {', '.join(differs)}"
                    raise RunError(f"{self.folder} holds {what}.")
                rows = found["queries"]
                scores[rows], errors[rows] = found["scores"], found["errors"]
                done[rows] = True
            except (Damaged, KeyError, IndexError) as error:
                aside = f"is kept as {set_aside(path).name}; its queries are computed again"
                warn(f"{path} cannot be read ({error!s:.100}) and {aside}.")
        return np.flatnonzero(~done)

    def write(self, rows: np.ndarray, scores: np.ndarray, errors: np.ndarray) -> None:
        """Write a chunk."""
        if self.folder is not None:
            arrays = {"queries": rows, "scores": scores, "errors": errors}
            save_arrays(self.folder / f"queries_{rows[0]}.npz", arrays, self._fingerprint)


@contextlib.contextmanager
def chunks_in(folder: object, fingerprint: Callable[[], dict[str, object]]) -> Iterator[Chunks]:
    """Return the chunks in a folder, which is kept for this call alone; None: no folder."""
    if folder is None:
        yield Chunks(None, {})
        return
    path = as_path(folder, "attribute(folder=...)")
    make_folder(path)
    with locked(path):
        yield Chunks(path, fingerprint())

"""What an attribution returns."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import ArrayLike, Float, Int

from .._files.arrays import Damaged, load_arrays, save_arrays
from .._files.files import as_path
from .._problem.checks import check_count, describe


class Attribution(NamedTuple):
    """The scores of n training examples (or groups of them) for K queries.

    `scores[k, i]` is the derivative of the error of query k in the weight of example i: negative where
    the example helps. `errors[k]` is the error itself, `share` the weight that all examples had.

    >>> import foretune as ft, numpy as np
    >>> found = ft.Attribution(np.array([[0.1, -0.3, 0.0, 0.2]]), np.array([1.0]))
    >>> found.top(2), found.bottom(2)
    (array([[1, 2]]), array([[3, 0]]))
    >>> found.change([3, 0])  # of the error, if these were left out
    array([-0.3])
    """

    scores: Float[np.ndarray, "K n"]
    errors: Float[np.ndarray, " K"]
    share: float = 1.0

    def top(self, k: int) -> Int[np.ndarray, "K k"]:
        """Return the k most helpful examples of each query: the lowest scores, the lowest first."""
        return _first(self.scores, k, "top")

    def bottom(self, k: int) -> Int[np.ndarray, "K k"]:
        """Return the k most harmful examples of each query: the highest scores, the highest first."""
        return _first(-self.scores, k, "bottom")

    def change(self, left_out: ArrayLike | Sequence[int]) -> Float[np.ndarray, " K"]:
        """Return the predicted change of each error without some examples: their numbers, or a mask."""
        chosen, n = np.asarray(left_out), self.scores.shape[1]
        fits = chosen.shape == (n,)  # a mask
        if chosen.dtype != bool:
            fits = chosen.ndim == 1 and np.issubdtype(chosen.dtype, np.integer) and chosen.size
            fits = fits and chosen.min() >= 0 and chosen.max() < n
        if not fits:
            wanted = f"give numbers of examples, from 0 to {n - 1}, or a mask of all {n}"
            raise ValueError(f"change({left_out!r:.60}): {wanted}.")
        if chosen.dtype != bool and len(np.unique(chosen)) < len(chosen):
            raise ValueError(f"change({left_out!r:.60}): an example is left out once, or not.")
        return -self.scores[:, chosen].sum(1)

    def save(self, path: str | Path) -> None:
        """Write it as a NumPy file, `.npz`."""
        arrays = {"scores": self.scores, "errors": self.errors}
        save_arrays(as_path(path, "Attribution.save"), arrays, {"share": self.share})

    @classmethod
    def load(cls, path: str | Path) -> "Attribution":
        """Return what was saved."""
        path = as_path(path, "Attribution.load")
        try:
            header, arrays = load_arrays(path)
            scores, errors, share = arrays["scores"], arrays["errors"], header["share"]
            fits = scores.ndim == 2 and errors.shape == scores.shape[:1]
            fits = fits and all(np.issubdtype(x.dtype, np.floating) for x in (scores, errors))
            if not fits or not isinstance(share, float) or not 0 < share <= 1:
                given = f"scores {describe(scores)}, errors {describe(errors)}"
                raise ValueError(f"{given}, share {share!r:.20}")
            return cls(scores, errors, share)
        except (Damaged, KeyError, ValueError) as error:
            why = f"{type(error).__name__}: {error!s:.100}"
            raise ValueError(f"{path} is no attribution ({why}).") from error

    def __repr__(self) -> str:
        K, n = self.scores.shape
        return f"Attribution of {K} errors to {n} training examples or groups"


def _first(scores: Float[np.ndarray, "K n"], k: int, name: str) -> Int[np.ndarray, "K k"]:
    check_count(k, f"Attribution.{name}({k!r:.60})")
    return np.argsort(scores, axis=1, kind="stable")[:, :k]

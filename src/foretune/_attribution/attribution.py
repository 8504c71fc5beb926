"""What an attribution returns."""

from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from jaxtyping import Float, Int, PyTree

from .._files.files import as_path
from .._problem.checks import check_count
from .._problem.problem import Problem
from .parts import load, save
from .validation import Validation, validate


class Attribution(NamedTuple):
    """The scores of n training examples (or groups of them) for K queries.

    `scores[k, i]` is the derivative of the error of query k in the weight of example i, at the weights
    of the training: negative where the example helps, positive where it harms, 0 where it was not
    trained on. `errors[k]` is the error itself, `keep` the weight that all examples had.

    >>> import foretune as ft, numpy as np
    >>> found = ft.Attribution(np.array([[0.1, -0.3, 0.0, 0.2]]), np.array([1.0]))
    >>> found.top(2), found.bottom(2)
    (array([[1, 2]]), array([[3, 0]]))
    >>> found.change([3, 0])  # of the error, if these were left out
    array([-0.3])
    """

    scores: Float[np.ndarray, "K n"]
    errors: Float[np.ndarray, " K"]
    keep: float = 1.0

    def top(self, k: int) -> Int[np.ndarray, "K k"]:
        """Return the k most helpful examples of each query: the lowest scores, the lowest first."""
        return _first(self.scores, k, "top")

    def bottom(self, k: int) -> Int[np.ndarray, "K k"]:
        """Return the k most harmful examples of each query: the highest scores, the highest first."""
        return _first(-self.scores, k, "bottom")

    def change(self, left_out: Any) -> Float[np.ndarray, " K"]:
        """Return the predicted change of each error where some examples are left out.

        Args:
            left_out: their numbers, or a mask.

        It is minus the sum of their scores: to first order, and for weights of 1.
        """
        try:
            return -self.scores[:, np.asarray(left_out)].sum(1)
        except IndexError as error:
            raise ValueError(
                f"change(left_out): give numbers of examples below {self.scores.shape[1]}, or a mask "
                f"of that length ({error})."
            ) from error

    def save(self, path: str | Path) -> None:
        """Write it as a NumPy file, `.npz`."""
        keep = np.asarray(self.keep)
        save(as_path(path, "Attribution.save"), scores=self.scores, errors=self.errors, keep=keep)

    @classmethod
    def load(cls, path: str | Path) -> "Attribution":
        """Return what was saved."""
        path = as_path(path, "Attribution.load")
        try:
            scores, errors, keep = load(path, "scores", "errors", keep=1.0)
            return cls(scores, errors, float(keep))
        except (KeyError, TypeError, ValueError, EOFError, BadZipFile) as error:
            raise ValueError(
                f"{path} is no attribution: a file that `Attribution.save` wrote is expected "
                f"({type(error).__name__}: {error!s:.100})."
            ) from error

    def validate(
        self,
        problem: Problem,
        hparams: PyTree,
        queries: Any,
        *,
        weights: str = "weight",
        losses: Any = None,
        groups: Any = None,
        subsets: Any = 50,
        drop: Any = 0.5,
        key: Any = None,
        chunk: Any = None,
    ) -> Validation:
        """Train again without random subsets of the examples: do the scores predict the errors?

        Args:
            problem: as given to `attribute`, and so are `hparams`, `queries`, `weights`, `losses` and
                `groups`.
            subsets: how many trainings, each without a part of the examples (or groups) drawn anew.
            drop: that part.
            key: the random key of the draws.
            chunk: how many trainings run side by side; by default as many as memory allows.
        """
        given = problem, hparams, queries, weights, losses, groups
        errors = self.errors if self.keep == 1 else None
        return validate(self.scores, errors, given, subsets, drop, key, chunk)

    def __repr__(self) -> str:
        K, n = self.scores.shape
        return f"Attribution of {K} errors to {n} training examples or groups"


def _first(scores: Float[np.ndarray, "K n"], k: int, name: str) -> Int[np.ndarray, "K k"]:
    check_count(k, f"Attribution.{name}({k!r:.60})")
    return np.argsort(scores, axis=1, kind="stable")[:, :k]

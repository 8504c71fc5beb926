"""Rows of a table, an image set or a sparse matrix -> the inputs of a model.

Columns of comparable range (pixels, counts, one-hot columns) share one scale, others are standardised
one by one; then the whole has mean squared length 1. A rotation onto principal components changes
nothing for a linear model, but makes its curvature nearly diagonal, which `Linear` uses. With
`kernel=True` the components of a Gaussian kernel (Nystroem's approximation) are set beside them.
No label is used.
"""

from typing import Any

import numpy as np
from scipy import sparse
from sklearn.decomposition import PCA, TruncatedSVD
from sklearn.kernel_approximation import Nystroem

Rows = Any
"""What scikit-learn takes for X: an array, a sparse matrix, a data frame, a list. It has no types."""

WIDEST = 1000
"""A linear model keeps this many principal components at most."""
BESIDE_KERNEL, KERNEL_WIDTH = 150, 300
"""With a kernel: the components that the inputs keep, and those that the kernel keeps."""
LANDMARKS = 600
"""Rows that stand for the data in the kernel's approximation."""


class ColumnScale:
    """Brings columns to comparable scale and rows to mean squared length 1; keeps sparse sparse."""

    def fit(self, X: Rows) -> "ColumnScale":
        """Measure the columns."""
        if sparse.issparse(X):  # centring would fill it; its columns keep their weights
            self.centre, self.divisor = 0.0, 1.0
        else:
            spans = np.ptp(X, axis=0)
            spans = spans[spans > 0]
            comparable = len(spans) > 0 and np.quantile(spans, 0.25) >= spans.max() / 2
            deviation = X.std(axis=0)
            self.centre = X.mean(axis=0)
            self.divisor = 1.0 if comparable else np.where(deviation > 0, deviation, 1.0)
        self.length = 1.0
        scaled = self.transform(X)
        squares = scaled.multiply(scaled) if sparse.issparse(scaled) else scaled * scaled
        self.length = float(np.sqrt(squares.sum() / X.shape[0])) or 1.0
        return self

    def transform(self, X: Rows) -> Rows:
        """Scale rows."""
        if sparse.issparse(X):
            return X / self.length
        return (X - self.centre) / self.divisor / self.length


class Features:
    """Scaled rows in principal components, and those of a Gaussian kernel if asked for.

    `blocks` tells for each column of the result which part it belongs to.
    """

    def __init__(self, kernel: bool, random_state: int):
        self.kernel, self.random_state = kernel, random_state

    def fit(self, X: Rows) -> "Features":
        """Learn scale, rotation and kernel from the rows of X."""
        with np.errstate(invalid="ignore", divide="ignore"):  # constant columns explain no variance
            return self._fit(X)

    def _fit(self, X: Rows) -> "Features":
        self.scale = ColumnScale().fit(X)
        scaled = self.scale.transform(X)
        width = BESIDE_KERNEL if self.kernel else WIDEST
        self.rotation = _rotation(scaled, width, self.random_state).fit(scaled)
        parts = [self.rotation.transform(scaled)]
        self.nystroem = None
        if self.kernel:
            self.nystroem = Nystroem(  # mean squared length is 1, so this is the usual bandwidth
                gamma=1.0,
                n_components=min(LANDMARKS, X.shape[0]),
                random_state=self.random_state,
            ).fit(scaled)
            similar = self.nystroem.transform(scaled)
            self.kernel_rotation = _rotation(similar, KERNEL_WIDTH, self.random_state).fit(similar)
            parts.append(self.kernel_rotation.transform(similar))
        self.blocks = np.concatenate([np.full(part.shape[1], i) for i, part in enumerate(parts)])
        return self

    def transform(self, X: Rows) -> np.ndarray:
        """Return the model's inputs for the rows of X."""
        scaled = self.scale.transform(X)
        parts = [self.rotation.transform(scaled)]
        if self.nystroem is not None:
            parts.append(self.kernel_rotation.transform(self.nystroem.transform(scaled)))
        return np.concatenate(parts, axis=1).astype(np.float32)


class Plain:
    """The rows as they are: a user's own model does its own preparation."""

    def transform(self, X: Rows) -> np.ndarray:
        """Return X as a dense float32 array."""
        return np.asarray(X.todense() if sparse.issparse(X) else X, np.float32)


def _rotation(X: Rows, width: int, random_state: int) -> PCA | TruncatedSVD:
    rank = min(width, *X.shape)
    if sparse.issparse(X):
        return TruncatedSVD(max(min(rank, X.shape[1] - 1), 1), random_state=random_state)
    solver = "covariance_eigh" if X.shape[1] <= 2000 else "auto"  # exact, and fast for few columns
    return PCA(rank, svd_solver=solver, random_state=random_state)

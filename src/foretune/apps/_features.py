"""Rows of a table, an image set or a sparse matrix -> the inputs of a model.

Columns of comparable range (pixels, counts, one-hot columns) share one scale, others are standardised
one by one; then the whole has mean squared length 1. A rotation onto principal components changes
nothing for a linear model, but makes its curvature nearly diagonal. No label is used.
"""

import numpy as np
from scipy import sparse
from sklearn.decomposition import PCA, TruncatedSVD

from ._columns import Rows

WIDEST = 1000
"""A linear model keeps this many principal components at most."""


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
        """ColumnScale rows."""
        if sparse.issparse(X):
            return X / self.length
        return (X - self.centre) / self.divisor / self.length


def components(rows: Rows, others: Rows, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows, and other rows in the same way, scaled and in principal components."""
    scale = ColumnScale().fit(rows)
    scaled = scale.transform(rows)
    rotation = _rotation(scaled, WIDEST, seed)
    first, second = rotation.transform(scaled), rotation.transform(scale.transform(others))
    return first.astype(np.float32), second.astype(np.float32)


def _rotation(X: Rows, width: int, seed: int) -> PCA | TruncatedSVD:
    """Return the rotation onto the leading components of X."""
    rank = min(width, *X.shape)
    rotation = TruncatedSVD(max(min(rank, X.shape[1] - 1), 1), random_state=seed)
    if not sparse.issparse(X):
        # exact, and fast for few columns
        solver = "covariance_eigh" if X.shape[1] <= 2000 else "auto"
        rotation = PCA(rank, svd_solver=solver, random_state=seed)
    with np.errstate(invalid="ignore", divide="ignore"):  # constant columns explain no variance
        return rotation.fit(X)

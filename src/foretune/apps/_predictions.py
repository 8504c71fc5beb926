"""`clean_labels`: which labels are wrong, from predictions that you have already."""

from collections.abc import Iterable

import numpy as np

from . import _checks
from ._checks import by_name, listed, plain_labels, positions, verified_rows
from ._label_model import LabelJudgement, judge


class FoundLabels:
    """What `LabelCleaner` and `clean_labels` find; the docstring of the former explains it."""

    classes_: np.ndarray

    def _conclude(self, found: LabelJudgement, members: Iterable[str]) -> None:
        """Set what was found."""
        self.weights_ = found.right
        self.probability_wrong_ = 1 - found.right
        self.suspects_ = found.suspects
        self.ranking_ = np.lexsort((found.right, ~found.suspects))
        self.suggested_ = self.classes_[found.likely]
        self.probabilities_ = found.probabilities
        self.noise_matrix_ = found.noise
        self.noise_rate_, *interval = found.noise_rate
        self.noise_rate_interval_ = tuple(interval)
        self.unflagged_, self.unflagged_interval_ = None, None
        if found.unflagged is not None:
            self.unflagged_, *interval = found.unflagged
            self.unflagged_interval_ = tuple(interval)
        self.ensemble_ = dict(zip(members, found.ensemble.tolist(), strict=True))
        self.reliability_ = found.reliability


class CleanedLabels(FoundLabels):
    """What `clean_labels` returns: the names are those of a fitted `LabelCleaner`."""

    def __repr__(self) -> str:
        low, high = self.noise_rate_interval_
        return (
            f"{type(self).__name__}: {self.suspects_.sum():,} of {len(self.weights_):,} are suspects, "
            f"{low:.1%} to {high:.1%} are expected to be wrong"
        )


def clean_labels(
    labels: object,
    pred_probs: object,
    checked: object = None,
    checked_labels: object = None,
    *,
    classes: object = None,
    random_state: int = 0,
) -> CleanedLabels:
    """Find the wrong labels, given class probabilities by a model that has not seen them.

    What is returned has the attributes of a fitted `LabelCleaner`, but for its model's.

    Parameters
    ----------
    labels : array of n
        The observed labels: numbers, text or dates.
    pred_probs : array (n, classes), or a dict or list of them
        Out-of-fold probabilities: each row by a model that was trained without it. The columns are the
        classes in sorted order, unless `classes` says otherwise, or a data frame whose columns have
        the names of the classes. Several models are combined, by weights that are learnt.
    checked : int array or bool array of n, or None
        Rows whose label has been verified, by number or as a mask. They teach how the predictions err.
    checked_labels : array
        Their right labels.
    classes : array, default=None
        The classes in the order of the columns, where some class has no label at all.
    random_state : int, default=0
        The rows of a large set that are fitted, and the folds of verified rows, follow it.

    Examples
    --------
    >>> import numpy as np
    >>> from foretune.apps import clean_labels
    >>> rng = np.random.default_rng(0)
    >>> true = rng.integers(0, 3, 300)
    >>> p = 0.1 + 0.7 * np.eye(3)[true]  # a good model's predictions
    >>> observed = true.copy()
    >>> observed[:30] = (observed[:30] + 1) % 3
    >>> found = clean_labels(observed, p)
    >>> int(found.suspects_[:30].sum()), int(found.suspects_.sum())
    (30, 30)
    """
    if not isinstance(random_state, int | np.integer) or not 0 <= random_state < 2**32:
        raise ValueError(
            f"random_state={random_state!r:.60}: give a whole number from 0 to 2**32 - 1."
        )
    y = plain_labels(labels, "labels")
    if y.ndim != 1 or not len(y):
        raise ValueError(f"labels have shape {y.shape}: give one label for each row.")
    names = np.unique(y) if classes is None else plain_labels(classes, "classes")
    if names.ndim != 1 or not len(names):
        raise ValueError(f"classes have shape {names.shape}: give a list, a class for each column.")
    if len(np.unique(names)) < len(names):
        raise ValueError(f"classes names a class twice: {listed(names)}. Give each column its own.")
    if len(names) < 2:
        raise ValueError(f"labels has only one class, {listed(names)}: nothing to confuse it with.")
    observed = positions(y, names, "labels", "classes")
    q = {
        name: _checks.probabilities(name, array, names, observed)
        for name, array in by_name(pred_probs, "pred_probs").items()
    }
    true = np.full(len(y), -1)
    rows = verified_rows(checked, checked_labels, len(y))
    if len(rows):
        true[rows] = positions(checked_labels, names, "checked_labels", "labels")
    cleaned = CleanedLabels()
    cleaned.classes_ = names
    cleaned._conclude(judge(np.stack(list(q.values())), observed, true, random_state), q)
    return cleaned

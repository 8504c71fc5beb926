"""`clean_labels`: which labels are wrong, from predictions that you have already."""

from dataclasses import dataclass

import numpy as np

from .._outer.callbacks import Progress
from . import _checks
from ._checks import by_name, check_seed, listed, plain_labels, positions, verified_rows
from ._label_model import judge


@dataclass(frozen=True, repr=False)
class CleanedLabels:
    """What `clean_labels` returns: the names are those of a fitted `LabelCleaner`."""

    weights_: np.ndarray
    """The probability that each label is right; 0 or 1 for verified ones."""
    ranking_: np.ndarray
    """Row numbers, the most suspicious first."""
    suggested_: np.ndarray
    """The most probable label; the right one where it is verified."""
    ensemble_: dict[str, float]
    """The weight of each set of predictions."""
    history_: list[dict[str, object]]
    """The descent of the regularisers, empty where there were too few trusted rows for one."""
    stopped_: str
    """Why it ended."""
    noise_matrix_: np.ndarray
    """p(observed label | true label) as learnt."""
    classes_: np.ndarray
    """The classes, in the order of the columns."""
    reliability_: np.ndarray | None
    """A row for each verified row, judged without it: the probability that its observed label is right,
    and 1 where it is, else 0; None where there were fewer than 20."""

    @property
    def suspects_(self) -> np.ndarray:
        """The labels held to be wrong: a weight below 1/2."""
        return self.weights_ < 0.5

    @property
    def probability_wrong_(self) -> np.ndarray:
        """1 - weight."""
        return 1 - self.weights_

    @property
    def noise_rate_(self) -> float:
        """The mean probability of being wrong."""
        return float(np.mean(self.probability_wrong_))

    @property
    def unflagged_(self) -> float:
        """How many wrong labels are expected among those that are not suspects."""
        return float(self.probability_wrong_[~self.suspects_].sum())

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}: {self.suspects_.sum():,} of {len(self.weights_):,} are suspects, "
            f"{self.unflagged_:.3g} more are expected to be wrong"
        )


def clean_labels(
    labels: object,
    pred_probs: object,
    checked: object = None,
    checked_labels: object = None,
    *,
    classes: object = None,
    progress: bool = True,
    random_state: int = 0,
) -> CleanedLabels:
    """Find the wrong labels, given class probabilities by a model that has not seen them.

    What is returned has the attributes of a fitted `LabelCleaner`, but for its model's.

    Parameters
    ----------
    labels : array of n
        The observed labels, of any type.
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
    progress : bool, default=True
        Show a progress bar when the output is a terminal.
    random_state : int, default=0
        The folds of verified rows follow it.

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
    check_seed(random_state)
    y = plain_labels(labels, "labels")
    if y.ndim != 1 or not len(y):
        raise ValueError(f"labels have shape {y.shape}: give one label for each row.")
    names = np.unique(y) if classes is None else plain_labels(classes, "classes")
    if len(np.unique(names)) < len(names):
        raise ValueError(f"classes names a class twice: {listed(names)}. Give each column its own.")
    if len(names) < 2:
        raise ValueError(f"labels has only one class, {listed(names)}: nothing to confuse it with.")
    observed = positions(y, names, "labels", "classes")
    q = {
        name: _checks.probabilities(name, array, names, observed)
        for name, array in by_name(pred_probs, "pred_probs").items()
    }
    rows = verified_rows(checked, checked_labels, len(y))
    right = np.zeros(0, int)
    if len(rows):
        right = positions(checked_labels, names, "checked_labels", "labels")
    rest = np.setdiff1d(np.arange(len(y)), rows)
    stack = np.stack(list(q.values()))
    found = judge(
        *(stack[:, rest], observed[rest]),
        *(stack[:, rows], right, observed[rows]),
        seed=random_state,
        callbacks=[Progress("weighing the labels")] if progress else (),
    )
    weights, likely = np.empty(len(y)), np.empty(len(y), int)
    weights[rest], likely[rest] = found.right, found.likely
    weights[rows], likely[rows] = observed[rows] == right, right
    return CleanedLabels(
        weights,
        np.argsort(weights, kind="stable"),
        names[likely],
        dict(zip(q, found.ensemble.tolist(), strict=True)),
        [] if found.result is None else found.result.history,
        "no descent" if found.result is None else found.result.stopped,
        found.noise,
        names,
        found.reliability,
    )

"""What is found of labels, by `LabelCleaner` and by `clean_labels`."""

from collections.abc import Iterable

import numpy as np

from ._label_model import LabelJudgement


class FoundLabels:
    """The attributes that both have; the docstring of `LabelCleaner` explains them."""

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

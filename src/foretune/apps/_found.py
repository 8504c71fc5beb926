"""What is found of labels, by `LabelCleaner` and by `clean_labels`."""

from collections.abc import Iterable

import numpy as np

from ._label_model import LabelJudgement


class FoundLabels:
    """The attributes that both have; the docstring of `LabelCleaner` explains them."""

    classes_: np.ndarray

    def _conclude(
        self,
        found: LabelJudgement,
        members: Iterable[str],
        judged: np.ndarray,
        verified: np.ndarray,
        right: np.ndarray,
        observed: np.ndarray,
    ) -> None:
        """Set what was found of the judged rows, and of the verified ones among them.

        Of the latter the right and the observed labels are given.
        """

        def spread(of_judged: np.ndarray, of_verified: np.ndarray) -> np.ndarray:
            shape = (len(judged) + len(verified), *of_judged.shape[1:])
            of_all = np.empty(shape, of_judged.dtype)
            of_all[judged], of_all[verified] = of_judged, of_verified
            return of_all

        self.weights_ = spread(found.right, (observed == right).astype(float))
        self.probability_wrong_ = 1 - self.weights_
        self.suspects_ = self.weights_ < 0.5
        self.noise_rate_ = float(self.probability_wrong_.mean())
        self.unflagged_ = float(self.probability_wrong_[~self.suspects_].sum())
        self.ranking_ = np.argsort(self.weights_, kind="stable")
        self.suggested_ = self.classes_[spread(found.likely, right)]
        one_hot = np.eye(len(self.classes_))[right]
        self.probabilities_ = spread(found.probabilities, one_hot)
        self.noise_matrix_ = found.noise
        self.ensemble_ = dict(zip(members, found.ensemble.tolist(), strict=True))
        self.reliability_ = found.reliability
        self.history_ = [] if found.result is None else found.result.history
        self.stopped_ = "no descent" if found.result is None else found.result.stopped

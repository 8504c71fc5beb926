"""Whether labels sit where the sound is: how well frames tell labels that are shifted in time."""

from collections.abc import Iterable

import numpy as np

from .corpus import Corpus


def alignment(
    corpus: Corpus, shifts: Iterable[int] = range(-4, 5), most: int = 60_000
) -> dict[int, float]:
    """Return the accuracy of a linear classifier of phones, by shift of the labels in frames.

    The classifier (linear discriminant analysis, one frame without its neighbours) is trained and
    tested with labels of k frames later. Where labels are aligned, 0 is best.

    Args:
        corpus: the corpus.
        shifts: which shifts to try.
        most: frames to train on, and to test on, at most.
    """
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    bounds, accuracy = corpus.bounds(), {}
    train, held = (_some(corpus.rows(part), most) for part in ("train", "validation"))
    for shift in shifts:

        def labelled(rows, shift=shift):
            moved = rows + shift
            inside = (moved >= bounds[rows, 0]) & (moved <= bounds[rows, 1])
            rows, moved = rows[inside], moved[inside]
            rows, moved = (r[corpus.states[moved] >= 0] for r in (rows, moved))
            return corpus.frames[rows][:, : corpus.frames.shape[1] // 3], corpus.states[moved] // 3

        if not len(labelled(train)[1]) or not len(labelled(held)[1]):
            raise ValueError(f"alignment: no utterance is as long as a shift of {shift} frames.")
        model = LinearDiscriminantAnalysis().fit(*labelled(train))
        accuracy[int(shift)] = float(model.score(*labelled(held)))
    return accuracy


def _some(rows: np.ndarray, most: int) -> np.ndarray:
    return rows[:: -(-len(rows) // most)]

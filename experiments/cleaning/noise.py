"""Label noise with known answers, to measure how well wrong labels are found."""

import numpy as np


def corrupt(
    labels: np.ndarray, rate: float, rng: np.random.Generator, kind: str = "symmetric"
) -> tuple[np.ndarray, np.ndarray]:
    """Return labels of which a share is wrong, and which ones are.

    Exactly `rate * n` labels, chosen at random, change: to any other class, all equally likely
    ("symmetric"), or to the class that follows ("pair"). Classes are the distinct labels, sorted.

    >>> import numpy as np
    >>> given, wrong = corrupt(np.array([0, 1, 2, 0]), 0.5, np.random.default_rng(0), "pair")
    >>> int(wrong.sum()), bool((given[wrong] == (np.array([0, 1, 2, 0])[wrong] + 1) % 3).all())
    (2, True)
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"rate={rate}: give the share of wrong labels, in [0, 1].")
    if kind not in ("symmetric", "pair"):
        raise ValueError(f"kind={kind!r}: give 'symmetric' or 'pair'.")
    classes, index = np.unique(labels, return_inverse=True)
    n = len(index)
    if len(classes) < 2:
        raise ValueError("labels of one class cannot be confused: give two classes or more.")
    wrong = np.zeros(n, bool)
    wrong[rng.choice(n, round(rate * n), replace=False)] = True
    shift = rng.integers(1, len(classes), n) if kind == "symmetric" else 1
    return classes[np.where(wrong, (index + shift) % len(classes), index)], wrong

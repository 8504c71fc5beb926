"""Warnings that show the user's line, whatever the library's own frames are on the way there."""

import sys
import warnings

LIBRARY = ("foretune", "equinox", "jaxtyping", "beartype")  # which call each other


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the first code outside of the library that led to this call."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in LIBRARY:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)

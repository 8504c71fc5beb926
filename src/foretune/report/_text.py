"""Text from outside, for a terminal, a page or a spreadsheet that must not obey it."""

import unicodedata

_TURNS = "\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Unicode's controls of direction."""


def shown(text: str, allowed: str = "") -> str:
    r"""Return text with its control codes and controls of direction written out.

    Labels, columns and file names are the user's data, and may hold what moves the cursor, colours
    or retitles the window, or turns the direction of what follows.

    >>> print(shown("a \x1b[31mred\tcat"))
    a \x1b[31mred\tcat
    """
    return "".join(
        repr(c)[1:-1]
        if c not in allowed and (unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in _TURNS)
        else c
        for c in text
    )

"""Calls of an `update` that may still run on the device."""

from collections import deque
from typing import NamedTuple

from jaxtyping import Array, Bool, Int, PyTree

from .dropped import Dropped, tell

NONE, WARN = -1, -2  # what a call has for the host instead of the number of a window
RUNS = 8  # of one optimizer at the same time, whose calls are remembered


class Call(NamedTuple):
    """A call, and how it ended."""

    news: Int[Array, ""]  # the number of the window that was at fault, or NONE, or WARN
    dropped: Dropped  # what is said where a derivative was
    batch: PyTree
    validation: PyTree

    @property
    def ended(self) -> bool:
        """Whether it has, so that to look at it is not to wait."""
        return self.news.is_ready()  # pyright: ignore[reportAttributeAccessIssue]


class Pending:
    """The calls of the last runs. A run is known by an array of its last state, which none shares."""

    def __init__(self, most: int):
        self.most = most  # calls of a run; then the first of them is waited for
        self.runs: dict[int, tuple[Bool[Array, ""], deque[Call]]] = {}

    def look(
        self, before: Bool[Array, ""], after: Bool[Array, ""], train: PyTree, call: Call
    ) -> Call | None:
        """Return a call of this run that has ended in a fault, if there is one; warn if one must."""
        _, calls = self.runs.pop(id(before), (None, deque()))
        calls.append(call)
        failed = None
        while failed is None and calls and (len(calls) > self.most or calls[0].ended):
            first = calls.popleft()
            failed = first if (news := int(first.news)) >= 0 else None
            if news == WARN:
                tell(train, first.dropped, stacklevel=3)
        if len(self.runs) >= RUNS:  # the oldest has been given up
            del self.runs[next(iter(self.runs))]
        self.runs[id(after)] = after, calls  # kept, so that no other array gets its id
        return failed

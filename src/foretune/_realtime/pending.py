"""Calls of an `update` that may still run on the device."""

from collections import deque
from typing import NamedTuple

from jaxtyping import Array, Bool, PyTree

from .._problem.arguments import Recent
from .dropped import Dropped, tell

RUNS = 8  # of one optimizer at the same time, whose calls are remembered


class Call(NamedTuple):
    """A call, and how it ended."""

    news: Bool[Array, ""]  # whether there is anything for the host: one number to read
    failed: Bool[Array, ""]  # whether its window is at fault
    dropped: Dropped  # what is said where a derivative was, and the number of the window
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
        self.runs = Recent(RUNS)  # of (the array, the calls) by its id

    def look(
        self, before: Bool[Array, ""], after: Bool[Array, ""], train: PyTree, call: Call
    ) -> Call | None:
        """Return a call of this run that has ended in a fault, if there is one; warn if one must."""
        _, calls = self.runs.pop(id(before), (None, deque()))
        calls.append(call)
        failed = None
        while failed is None and calls and (len(calls) > self.most or calls[0].ended):
            first = calls.popleft()
            if not first.news:
                continue
            if first.failed:
                failed = first
            else:
                tell(train, first.dropped, stacklevel=3)
        self.runs[id(after)] = after, calls  # kept, so that no other array gets its id
        return failed

"""Ctrl-C and SIGTERM as requests to end a run."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Interrupt:
    """Turns the first Ctrl-C, or SIGTERM, into a request; the second acts as usual.

    A program that handles SIGTERM by itself continues to.
    """

    def __init__(self):
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            ours = [signal.SIGINT]
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                ours.append(signal.SIGTERM)
            self._before = {number: signal.signal(number, self._ask) for number in ours}
        return self

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let signals act as usual meanwhile."""
        self.__exit__()
        yield
        self.__enter__()

    def _ask(self, *_):
        self.asked = True
        self.__exit__()

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

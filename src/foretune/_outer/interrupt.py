"""Ctrl-C and SIGTERM as requests to end a run."""

import signal
import threading
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

    def _ask(self, *_):
        self.asked = True
        self.__exit__()

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

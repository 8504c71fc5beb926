"""Callbacks: who is started is ended, bars and files are left in order."""

import signal
import sys

import pytest

import foretune as ft

from .problems import regression


def minimize(*callbacks, steps=2):
    problem, hparams = regression(steps=3)
    return ft.minimize(problem, hparams, steps=steps, callbacks=list(callbacks))


class Noting(ft.Callback):
    def __init__(self, name, events, fails=()):
        self.name, self.events, self.fails = name, events, fails

    def _note(self, hook):
        self.events.append(f"{self.name} {hook}")
        if hook in self.fails:
            raise RuntimeError(f"{hook} of {self.name} failed")

    def start(self, run):
        self._note("start")

    def step(self, run):
        self._note("step")

    def end(self, run):
        self._note("end")


def test_callbacks_that_have_started_are_ended_where_another_does_not_start():
    events, before = [], signal.getsignal(signal.SIGINT)
    callbacks = [Noting("a", events), Noting("b", events, ["start"]), Noting("c", events)]
    with pytest.raises(RuntimeError, match="start of b failed"):
        minimize(*callbacks)
    assert events == ["a start", "b start", "a end"]
    assert signal.getsignal(signal.SIGINT) is before


def test_no_bar_stays_open_where_another_callback_does_not_start(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    bar = ft.Progress()
    with pytest.raises(RuntimeError, match="start of b failed"):
        minimize(bar, Noting("b", [], ["start"]))
    assert not bar._bar.live.is_started


def test_every_callback_is_ended_though_one_fails_to():
    events, before = [], signal.getsignal(signal.SIGINT)
    callbacks = [Noting("a", events), Noting("b", events, ["end"]), Noting("c", events)]
    with pytest.raises(RuntimeError, match="end of b failed"):
        minimize(*callbacks)
    assert [event for event in events if event.endswith("end")] == ["c end", "b end", "a end"]
    assert signal.getsignal(signal.SIGINT) is before


def test_the_error_of_a_run_is_not_lost_where_an_end_fails_too():
    with pytest.raises(RuntimeError, match="end of b failed") as failed:
        minimize(Noting("a", [], ["step"]), Noting("b", [], ["end"]))
    assert str(failed.value.__context__) == "step of a failed"

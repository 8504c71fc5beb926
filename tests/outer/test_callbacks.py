"""Callbacks: who is started is ended, bars and files are left in order."""

import json
import shutil
import signal
import sys

import jax.numpy as jnp
import optax
import pytest

import foretune as ft

from ..problems import penalised, regression, squared_error


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


def test_a_bar_shows_names_with_brackets(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    training = ft.Training(
        lambda p, h, b: penalised(p, {"decay": h["[b]"]}, b), lambda h: optax.sgd(h["a[0]"])
    )
    problem, hparams = regression(
        steps=3, dynamics=training, objective={"a[0]": squared_error, "[b]": squared_error}
    )
    bar = ft.Progress("tuning [b] and [/c]")
    ft.minimize(
        problem, {"a[0]": hparams["lr"], "[b]": hparams["decay"]}, steps=1, callbacks=[bar],
        evaluate=lambda state, h: {"[/c]": jnp.sum(state.params["w"])},
    )  # fmt: skip
    (task,) = bar._bar.tasks
    shown = [column.render(task) for column in bar._bar.columns]
    assert shown[0].plain == "tuning [b] and [/c]"
    assert all(name in shown[-1].plain for name in ("a[0] ", "[b] ", "[/c] "))


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


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_of_records_is_not_overwritten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.touch()  # an empty one may be there
    minimize(ft.History(path))
    before = path.read_text()
    with pytest.raises(FileExistsError, match=r"metrics\.jsonl holds 3 records of an earlier run"):
        minimize(ft.History(path))
    assert path.read_text() == before


@pytest.mark.parametrize("every", [1, 10])
def test_a_resumed_run_goes_on_with_its_own_file(tmp_path, every):
    whole = minimize(steps=5).history
    path = tmp_path / "metrics.jsonl"
    minimize(ft.Checkpoint(tmp_path / "run", every=every, keep=9), ft.History(path), steps=3)
    shutil.rmtree(tmp_path / "run" / "foretune_3")  # killed before the end
    with path.open("a") as file:
        file.write('{"step": 4, "val')  # while it wrote a line
    minimize(ft.Checkpoint(tmp_path / "run"), ft.History(path), steps=5)
    assert lines(path) == whole
    names = [path.name for path in tmp_path.iterdir() if path.name[0] != "."]
    assert sorted(names) == ["metrics.jsonl", "run"]


def test_a_resumed_run_leaves_the_file_of_another_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    minimize(ft.Checkpoint(tmp_path / "run"), steps=2)
    problem, hparams = regression(steps=4)
    ft.minimize(problem, hparams, steps=2, callbacks=[ft.History(path)])
    before = path.read_text()
    with pytest.raises(FileExistsError, match="the records of another run"):
        minimize(ft.Checkpoint(tmp_path / "run"), ft.History(path), steps=3)
    assert path.read_text() == before

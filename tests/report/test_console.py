"""What a command says: progress in a log, the tables of a result, and how to open its page."""

import json
import signal
import subprocess
import sys

import optax
import pytest
import typer

import foretune as ft
from foretune._outer.run import Run
from foretune.report import Lines, ReportError, plain_errors, say, show_result

from ..problems import regression


def test_no_lines_beside_a_bar(monkeypatch, capsys):
    for terminal, expected in ((False, 11), (True, 0)):
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal)
        lines, run = Lines("steps"), Run(40, None, None, dict)
        lines.start(run)
        for step in range(41):
            run.put(step=step)
            lines.step(run)
        assert len(capsys.readouterr().err.splitlines()) == expected


def test_labels_are_shown_as_they_are(tmp_path, capfd):
    """Rich would read them as markup: swallow one, and raise at the other."""
    table = {"title": "[/b] classes", "columns": ["class", "[red]"], "rows": [["[/b]", 1.0]]}
    (tmp_path / "result.json").write_text(json.dumps({"headline": "[b]?", "tables": [table]}))
    show_result(tmp_path / "report.html")
    out = capfd.readouterr().out
    for words in ("[b]?", "[/b] classes", "[red]", "[/b]"):
        assert words in out


HOSTILE = "\x1b]0;mine\x07\x1b[2J\u202etac\x9b31m"
WRITTEN = r"\x1b]0;mine\x07\x1b[2J\u202etac\x9b31m"


def test_control_codes_are_written_out(tmp_path, capfd):
    table = {"title": HOSTILE, "columns": ["class", HOSTILE], "rows": [[HOSTILE, 1.0]]}
    (tmp_path / "result.json").write_text(json.dumps({"headline": HOSTILE, "tables": [table]}))
    show_result(tmp_path / "report.html")
    say(f"{HOSTILE}\n  a second line")
    with pytest.raises(typer.Exit), plain_errors(False):
        raise ValueError(f"column {HOSTILE!s} is not there")
    out, err = capfd.readouterr()
    for text in (out, err):
        assert not set(HOSTILE) & set(text) - set(WRITTEN)
    assert out.count(WRITTEN) >= 3
    assert f"{WRITTEN}\n  a second line\nforetune: column {WRITTEN} is not there\n" in err


def test_a_terminated_command_says_how_to_continue(tmp_path):
    program = """
import pathlib, sys, time
from foretune.report import command_line, plain_errors
app = command_line("test")
@app.command()
def wait(out: pathlib.Path):
    with plain_errors(False, out):
        print("begun", flush=True)
        time.sleep(600)
app()
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as child:
        assert child.stdout.readline() == "begun\n"
        child.terminate()
        _, err = child.communicate()
    assert child.returncode == 143
    assert f"interrupted; the same command continues from {tmp_path}" in err
    assert "Traceback" not in err


class Terminate(ft.Callback):
    """Sends SIGTERM, as a scheduler does, after the first step."""

    def step(self, run):
        if run.step == 1:
            signal.raise_signal(signal.SIGTERM)


def test_sigterm_ends_a_descent_after_its_step(tmp_path):
    problem, hparams = regression(steps=4)
    before = signal.getsignal(signal.SIGTERM)

    def descend():
        result = ft.minimize(
            problem, hparams, steps=5, optimizer=optax.sgd(0.0), callbacks=[Terminate()]
        )
        assert result.stopped == "interrupted"
        assert len(result.history) == 2
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as ended, plain_errors(False, tmp_path):
        descend()
    assert ended.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_where_ctrl_c_is_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(typer.Exit) as ended, plain_errors(False):
            signal.raise_signal(signal.SIGTERM)
        assert ended.value.exit_code == 143
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(typer.Exit) as ended, plain_errors(False):
            signal.raise_signal(signal.SIGINT)
        assert ended.value.exit_code == 130
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("content", ["{", "[]", '{"headline": 3}', '{"tables": [{"rows": 1}]}'])
def test_a_result_that_cannot_be_shown_is_named(tmp_path, content):
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(ReportError, match=r"result\.json is broken"):
        show_result(tmp_path / "report.html")
    (tmp_path / "result.json").write_text("{}")
    show_result(tmp_path / "report.html")

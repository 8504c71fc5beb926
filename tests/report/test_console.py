"""What a command says: progress in a log, the tables of a result, and how to open its page."""

import json
import types
from pathlib import Path

import pytest
import typer

from foretune.report import Lines, plain_errors, say, show_result
from foretune.report._console import how_to_open


@pytest.mark.parametrize(
    ("platform", "opener"), [("linux", "xdg-open"), ("darwin", "open"), ("win32", "start")]
)
def test_how_to_open_a_page(monkeypatch, platform, opener):
    monkeypatch.setattr("sys.platform", platform)
    said = how_to_open(Path("/runs/my run/report.html"))
    assert "Open it in a browser: file:///runs/my%20run/report.html\n" in said
    assert said.endswith(f"or: {opener} '/runs/my run/report.html'")


def test_no_lines_beside_a_bar(monkeypatch, capsys):
    for terminal, expected in ((False, 11), (True, 0)):
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal)
        lines = Lines("steps")
        lines.start(None)
        for step in range(41):
            lines.step(types.SimpleNamespace(step=step, steps=40))
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

"""The documentation is in short sentences, one a line, on lines of a screen's width."""

from pathlib import Path

import pytest

from .prose import LINE, WORDS, faults

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_sentences_and_lines_are_short(page):
    found = [f"{page}:{line}: {fault}" for line, fault in faults(page.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize(
    "text",
    [
        "word " * (LINE // 5),
        "One sentence.\nAnother, e.g. this of Franceschi et al. One.",
        "| " + "word " * WORDS + "| " + "word " * WORDS + "|",
        "```python\n" + "x = 1  # Far too long. " * 20 + "\n```",
        f"[a link](https://example.com/{'x' * LINE})",
        "- An item.\n  More of it.\n- " + "word\n  " * WORDS,
        "    a formula " + "x " * LINE,
        "Is `a. B` one sentence?",
        '<img src="picture.svg" alt="Words. ' + "and words " * WORDS + '">',
    ],
)
def test_what_is_allowed(text):
    assert [*faults(text)] == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Short.\n" + "word " * (LINE // 5 + 1), 2),
        ("\n" + "word\n" * (WORDS + 1), 2),
        ("One sentence. Another.", 1),
        ("One sentence. `code` begins another.", 1),
        ("One sentence (in brackets.) [A link](x.md) begins another.", 1),
        ("| " + "word " * (WORDS + 1) + "|", 1),
        ("- An item.\n- " + "word\n  " * (WORDS + 1), 2),
        ("!!! note\n\n    One sentence. Another.", 3),
        ("```\ncode\n```\nOne sentence. Another.", 4),
    ],
)
def test_what_is_found(text, line):
    assert [number for number, _ in faults(text)] == [line]

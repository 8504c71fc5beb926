"""Counts lines, sentences and words of Markdown: `python tests/docs/prose.py FILES` lists faults.

Outside code, tables and the targets of links, a line has at most 100 characters. Outside code, a
sentence has at most 35 words. A sentence begins on a new line, and may go on over several lines.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

LINE, WORDS = 100, 35
ITEM = re.compile(r"\s*(?:[-*+]|\d+\.)\s+")
ABBREVIATION = r"(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)(?<!\bal)(?<!\bcf)(?<!\b[A-Z])"
END = re.compile(ABBREVIATION + r"[.!?][\"')*\]]*\s+(?=[\"'(*\[]*(?:[A-Z0-9`]|foretune))")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")


def faults(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number of a line, from 1, and what is wrong there."""
    for begin, lines, is_table in blocks(text):
        for number, line in enumerate(lines, begin):
            length = len(re.sub(r"\]\([^)]*\)", "]()", line))
            if length > LINE and not is_table:
                yield number, f"{length} characters"
            if not is_table and (found := END.search(plain(line))):
                rest = plain(line)[found.end() :][:30]
                yield number, f"a sentence begins within the line: {rest!r}"
        parts = re.split(r"(?<!\\)\|", plain(lines[0])) if is_table else [plain(" ".join(lines))]
        for sentence in (sentence for part in parts for sentence in END.split(part)):
            if (words := sum(any(map(str.isalnum, word)) for word in sentence.split())) > WORDS:
                yield begin, f"a sentence of {words} words: {sentence.strip()[:40]!r}"


def blocks(text: str) -> Iterator[tuple[int, list[str], bool]]:
    """Yield each paragraph, item, heading and row: its first line's number, its lines, if a row."""
    begin, block, fence, in_item = 0, [], "", False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        word = line.strip()
        opened = re.match(r"```+|~~~+", word)
        indented = line.startswith("    ") and not block and not in_item
        single = word.startswith(("#", "|", "<", ":::", "!!!", "???"))
        if block and (not word or opened or single or fence or ITEM.match(line)):
            yield begin, block, False
            block = []
        if fence:
            fence = "" if word.startswith(fence) else fence
        elif opened:
            fence = opened[0]
        elif word.startswith("|") or word.startswith("#"):
            yield number, [line], word.startswith("|")
            in_item = False
        elif word and not single and not indented:
            begin, block = (begin, [*block, line]) if block else (number, [line])
            in_item = bool(ITEM.match(block[0])) or (in_item and line.startswith("  "))
        elif word.startswith(("!!!", "???")):
            in_item = True  # what is indented below is text


def plain(line: str) -> str:
    """Return text without marks: code as one word, links as what is shown of them."""
    line = re.sub(r"(`+).+?\1", lambda code: f"`{'x' * bool(code[0])}", line)
    line = LINK.sub(r"\1", LINK.sub(r"\1", line))
    return ITEM.sub("", line, count=1) if ITEM.match(line) else line


if __name__ == "__main__":
    found = [
        f"{path}:{line}: {fault}"
        for path in sys.argv[1:]
        for line, fault in faults(Path(path).read_text(encoding="utf-8"))
    ]
    print("\n".join(found))
    sys.exit(bool(found))

"""The records of a run in a file that is only appended to.

A line holds a checksum of its number and text, then the record as JSON. What a kill has cut off, or a
disk has damaged, is known by it, and costs the records of these lines alone.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .digests import digest
from .files import append, write_whole

Record = dict[str, Any]  # what JSON can say


class Records:
    """The file; `count` is the number of records that are in it."""

    def __init__(self, path: Path):
        self.path, self.count = path, 0

    def read(self, count: int) -> list[Record | None]:
        """Return the first records, with None in the place of one that is damaged or not there."""
        try:
            with self.path.open("rb") as file:
                lines = [file.readline() for _ in range(count)]
        except FileNotFoundError:
            lines = [b""] * count
        return [_record(i, line) for i, line in enumerate(lines)]

    def begin(self, records: list[Record]) -> None:
        """Let the file hold these records, whatever is in it."""
        text = b"".join(map(_line, range(len(records)), records))
        try:
            unchanged = self.path.read_bytes() == text
        except FileNotFoundError:
            unchanged = False
        if not unchanged:
            write_whole(self.path, text)
        self.count = len(records)

    def append(self, records: Iterable[Record]) -> None:
        """Add records, and wait until they are on the disk."""
        lines = [_line(i, record) for i, record in enumerate(records, self.count)]
        append(self.path, b"".join(lines), sync=True)
        self.count += len(lines)


def _line(number: int, record: Record) -> bytes:
    text = json.dumps(record)
    return f"{_checksum(number, text)} {text}\n".encode()


def _record(number: int, line: bytes) -> Record | None:
    checksum, _, text = line.decode("utf-8", "replace").removesuffix("\n").partition(" ")
    whole = line.endswith(b"\n") and checksum == _checksum(number, text)
    return json.loads(text) if whole else None


def _checksum(number: int, text: str) -> str:
    return digest(f"{number} {text}")[:16]

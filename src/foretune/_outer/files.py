"""Writing a file whole or not at all."""

import os
import secrets
from pathlib import Path


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file so that a reader, or a crash, finds the old one or the new one, never a part.

    The content goes into a new file beside it, under a name that nobody can have put there before,
    which then takes the place of `path`. Where `path` is a link, the link is replaced and what it
    points to is left alone.

    >>> import tempfile
    >>> from foretune import report
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "result.json")
    ...     report.write_whole(path, "{}")
    ...     path.read_text(), len(list(Path(folder).iterdir()))
    ('{}', 1)
    """
    path = Path(path)
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with new.open("xb") as file:  # x: a file or link of that name is refused
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise

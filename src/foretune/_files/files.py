"""Writing a file whole or not at all, and a folder that one process has for itself."""

import contextlib
import itertools
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class RunError(ValueError):
    """A run that cannot begin or continue; the message says what to do."""


def write_whole(path: str | Path, content: str | bytes | Callable[[IO[bytes]], Any]) -> None:
    """Write a file so that a reader, or a crash, finds the old one or the new one, never a part.

    The content goes into a new file beside it, under a name that nobody can have put there before,
    which then takes the place of `path`. Where `path` is a link, the link is replaced and what it
    points to is left alone.

    Args:
        path: the file; its folder is there.
        content: text, bytes, or a function that writes to the file it is given.

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
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:  # a full disk names no file
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    with contextlib.suppress(OSError):  # the new name, too, is to outlive a power cut
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def append(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Add to the end of a file, and with `sync` wait until it is on the disk."""
    try:
        with path.open("ab") as file:
            file.write(content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
    except OSError as error:  # a full disk names no file
        raise OSError(error.errno, error.strerror, str(path)) from error


def set_aside(path: Path) -> Path:
    """Rename what is damaged out of the way, and return its new name."""
    names = (f"{path.name}.damaged{k or ''}" for k in itertools.count())
    return path.rename(next(p for p in map(path.with_name, names) if not p.exists()))


class FolderLock:
    """Keeps other processes out of a folder, until it is released or this process ends.

    The lock is the kernel's, on the file `.lock` in the folder, so that it is gone when its owner is,
    however that ended. Within a process a folder may be locked several times. There are no such locks
    on Windows, and on some network disks; then there is none.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with FolderLock(folder):
    ...         sorted(path.name for path in Path(folder).iterdir())
    ['.lock']
    """

    _held: dict[Path, tuple[int, int]] = {}  # noqa: RUF012, shared on purpose
    """For each locked folder, the open file and how many times it is locked."""

    def __init__(self, folder: str | Path):
        self.folder, self._locked = Path(folder), False

    def acquire(self) -> "FolderLock":
        """Lock the folder, or raise `RunError` where another process has it."""
        if self._locked or fcntl is None:
            return self
        key = self.folder.resolve()
        file, times = self._held.get(key, (None, 0))
        if file is None or not _is_at(file, key / ".lock"):  # or that folder has been removed
            file, times = self._open(), 0
        self._held[key], self._at, self._locked = (file, times + 1), (key, file), True
        return self

    def release(self) -> None:
        """Let others have it."""
        if not self._locked:
            return
        self._locked, (key, file) = False, self._at
        held, times = self._held[key]
        if held != file:  # of a folder that has been removed
            return
        self._held[key] = (file, times - 1)
        if times == 1:
            del self._held[key]
            os.close(file)

    __enter__ = acquire

    def __exit__(self, *_: Any) -> None:
        self.release()

    def _open(self) -> int:
        assert fcntl is not None
        file = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(file, 100).decode("ascii", "replace").strip() or "unknown"
            os.close(file)
            raise RunError(
                f"{self.folder} is in use by another process (pid {owner}): wait for it to end, or "
                "give another folder."
            ) from None
        except OSError:  # no locks on this disk
            return file
        with contextlib.suppress(OSError):  # on a full disk it holds, but cannot say whose it is
            os.ftruncate(file, 0)
            os.write(file, f"{os.getpid()}\n".encode())
        return file


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except OSError:
        return False

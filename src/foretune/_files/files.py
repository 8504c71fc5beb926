"""Writing a file whole or not at all, and a folder that one run has for itself."""

import contextlib
import itertools
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

UNFINISHED = re.compile(r"\.(.+)\.[0-9a-f]{16}")  # the name of a file that is being written


class RunError(ValueError):
    """A run that cannot begin or continue; the message says what to do."""


def as_path(given: object, name: str) -> Path:
    """Return the path that the call `name` was given, or raise where it is none."""
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"{name}({given!r:.60}): give a path, as text or `pathlib.Path`.")
    if not str(given):
        raise ValueError(f"{name}(''): the path has no name. Give `\".\"` for the current folder.")
    return Path(given)


def make_folder(folder: Path) -> None:
    """Make a folder, if need be, or raise where it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".foretune-write-test"
        probe.touch()
        probe.unlink(missing_ok=True)  # another process may have
    except OSError as error:
        why = error.strerror or error
        raise OSError(f"cannot write to the folder {folder}: {why}. Give another.") from error


def write_whole(
    path: str | Path, content: str | bytes | Callable[[IO[bytes]], object], *, sync: bool = True
) -> None:
    """Write a file so that a reader, or a crash, finds the old one or the new one, never a part.

    The content goes into a new file beside it, which then takes the place of `path`, or of its link.

    Args:
        path: the file; its folder is there.
        content: text, bytes, or a function that writes to the file it is given.
        sync: whether to wait until it is on the disk, and would outlive a power cut.
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
            if sync:
                os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:  # a full disk names no file
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    if sync:
        with contextlib.suppress(OSError):  # the new name, too, is to outlive a power cut
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def remove_unfinished(folder: Path, is_ours: Callable[[str], bool]) -> None:
    """Remove what a kill has left of `write_whole` to files with our names, under the folder's lock."""
    for path in folder.iterdir():
        match = UNFINISHED.fullmatch(path.name)
        if match and is_ours(match[1]) and path.is_file() and not path.is_symlink():
            path.unlink()


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


@contextlib.contextmanager
def locked(
    folder: str | Path, *, file: str | None = None, reentrant: bool = False
) -> Iterator[None]:
    """Keep all others out of a folder, or of one file in it; raise `RunError` where another has it.

    The lock is the kernel's, on the file `.lock`: it ends with its owner, who may be `reentrant`.
    """
    from filelock import FileLock, Timeout

    path = Path(folder).resolve() / (".lock" if file is None else f".{file}.lock")
    lock = FileLock(path, blocking=False, thread_local=False, is_singleton=reentrant)
    try:
        lock.acquire()
    except Timeout:
        what, kind = (folder, "folder") if file is None else (Path(folder, file), "path")
        raise RunError(
            f"{what} is in use by another run (process {_owner(path)}): wait, or give another {kind}."
        ) from None
    with contextlib.suppress(OSError):  # on a full disk it holds, but cannot say whose it is
        path.write_text(f"{os.getpid()}\n")
    try:
        yield
    finally:
        lock.release()


def _owner(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace").strip()[:20] or "unknown"
    except OSError:
        return "unknown"

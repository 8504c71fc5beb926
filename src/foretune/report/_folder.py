"""The folder of a run.

config.json     what was asked for: title, command, settings, versions, device, date
result.json     tables, figures and gallery, when it is finished
figures/        *.svg, *.png
report.html     the page made of these

A file of JSON ends with a digest of the rest, so that a changed number is not taken for a result.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .._files.digests import digest
from .._files.files import RunError, locked, write_whole
from ._console import say
from ._page import Json, parsed, signed

VERSIONS = ("foretune", "jax", "jaxlib", "optax", "equinox", "numpy", "scikit-learn")


class RunFolder:
    """Opens a run's folder, new or to be resumed, and keeps other processes out until it is closed.

    A folder with a run of the same settings is resumed; other settings, or `files` that have changed,
    are refused, so that two runs never mix. A note says where the run is finished.
    """

    def __init__(
        self, path: str | Path, *, kind: str, title: str, settings: Json, files: Iterable[str] = ()
    ):
        self.path = Path(path)
        digests = {name: digest(Path(name).read_bytes())[:16] for name in files}
        settings = {**settings, "digests": digests} if digests else settings
        if self.path.is_dir() and not (self.path / "config.json").exists():
            # A run that was killed before it had written its settings may leave some files.
            names = sorted(p.name for p in self.path.iterdir())
            foreign = [n for n in names if n != ".lock" and not n.startswith(".config.json.")]
            if foreign:
                listed = ", ".join(foreign[:3])
                raise RunError(f"{self.path} holds other files ({listed}): give a new folder.")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{self.path} cannot be made: {error.strerror}.") from error
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked(self.path, reentrant=True))
            self._open(kind, title, json.loads(json.dumps(settings)))
            self._lock = stack.pop_all()

    def _open(self, kind: str, title: str, settings: Json) -> None:
        """Write the settings, or compare them with those that are there."""
        old = self.read("config.json")
        if old is None:
            installed = {name: importlib.metadata.version(name) for name in VERSIONS}
            old = {
                "kind": kind,
                "title": title,
                "command": command(),
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                "device": device(),
                "versions": {"python": platform.python_version(), **installed},
                "settings": settings,
            }
            self.write("config.json", old)
        theirs = old.get("settings", {}) if isinstance(old, dict) else None
        if not isinstance(theirs, dict):
            raise self._damaged("config.json", "it holds no settings")
        where = f"{self.path} holds a run"
        if (old.get("kind"), theirs) != (kind, settings):
            was, now = (s.get("digests") or {} for s in (theirs, settings))
            changed = [n for n in now if isinstance(was, dict) and was.get(n, now[n]) != now[n]]
            if changed:
                names = " and ".join(changed)
                raise RunError(f"{where} of other data: {names} changed since. Give another --out.")
            names = [n for n in {**theirs, **settings} if theirs.get(n) != settings.get(n)][:4]
            pairs = [f"{n}: {theirs.get(n)!r} there, {settings.get(n)!r} now" for n in names]
            raise RunError(
                f"{where} with other settings ({'; '.join(pairs) or old.get('kind')}). Give it again "
                "with those settings to resume it, or another --out."
            )
        self.figures.mkdir(exist_ok=True)
        if (self.path / "result.json").is_file():
            say(f"foretune: note: {self.path} holds a finished run, which is shown again.")

    def close(self) -> None:
        """Let other processes have the folder."""
        self._lock.close()

    @property
    def figures(self) -> Path:
        """Where figures go."""
        return self.inner("figures")

    def inner(self, name: str) -> Path:
        """Return a folder within this one, or raise where it is a link, which may lead anywhere."""
        path = self.path / name
        if path.is_symlink():
            raise RunError(f"{path} is a link, and a run writes in its own folder: remove it.")
        return path

    @property
    def result(self) -> Json | None:
        """The result of a finished run, or None."""
        result = self.read("result.json")
        if not isinstance(result, dict | None):
            raise self._damaged("result.json", f"it is a {type(result).__name__}")
        return result

    def write(self, name: str, content: object) -> None:
        """Write JSON, whole or not at all."""
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        write_whole(path, signed(content))

    def read(self, name: str) -> Any:
        """Return what `write` wrote, or None."""
        path = self.path / name
        if not path.is_file():
            return None
        try:
            return parsed(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise self._damaged(name, " ".join(str(error).split())) from error

    def _damaged(self, name: str, why: str) -> RunError:
        """Return the error for a file that cannot be used; its advice loses no work."""
        advice = "Remove it, and the same command makes it again from what else is there."
        if name == "config.json":
            advice = "Restore it from a copy, or rename the folder and give the command again."
        return RunError(f"{self.path / name} is damaged ({why}). {advice}")


def command() -> str:
    """Return the command line as a reader would type it."""
    path = Path(sys.argv[0])
    name, words = path.name, ["python", sys.argv[0]]
    if name == "__main__.py":
        name, words = path.parent.name, ["python", "-m", path.parent.name]
    return shlex.join([*(["foretune"] if name in ("foretune", "") else words), *sys.argv[1:]])


def device() -> str:
    """Return the device that JAX uses, in words."""
    import jax

    kind = jax.devices()[0].device_kind
    return f"{kind}, {os.cpu_count()} cores, {platform.machine()}" if kind == "cpu" else kind

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


class RunFolder:
    """Opens a run's folder, new or to be resumed, and keeps other processes out until it is closed.

    A folder with a run of the same settings is resumed; other settings, or `files` that have changed,
    are refused, so that two runs never mix. That the run is finished is said.
    """

    def __init__(
        self, path: str | Path, *, kind: str, title: str, settings: Json, files: Iterable[str] = ()
    ):
        self.path = Path(path)
        digests = {name: digest(Path(name).read_bytes())[:16] for name in files}
        settings = {**settings, "digests": digests} if digests else settings
        config = {
            "kind": kind,
            "title": title,
            "command": command(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": device(),
            "versions": versions(),
            "settings": json.loads(json.dumps(settings)),
        }
        if self.path.is_dir() and not (self.path / "config.json").exists():
            # A run that was killed before it had written its settings may leave some files.
            names = [p.name for p in self.path.iterdir()]
            foreign = [n for n in names if n != ".lock" and not n.startswith(".config.json.")]
            if foreign:
                raise RunError(
                    f"{self.path} holds other files ({', '.join(sorted(foreign)[:3])}): "
                    "give a new folder."
                )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{self.path} cannot be made: {error.strerror}.") from error
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(locked(self.path, reentrant=True))
        try:
            self._open(config)
        except BaseException:
            self.close()
            raise

    def _open(self, config: Json) -> None:
        """Write the settings, or compare them with those that are there."""
        old = self.read("config.json")
        if old is None:
            self.write("config.json", config)
            old = config
        if not isinstance(old, dict) or not isinstance(old.get("settings", {}), dict):
            raise self._damaged("config.json", "it holds no settings")
        if (old.get("kind"), old.get("settings")) != (config["kind"], config["settings"]):
            theirs, ours = old.get("settings") or {}, config["settings"]
            was, now = (s.get("digests") or {} for s in (theirs, ours))
            changed = [n for n in now if isinstance(was, dict) and was.get(n, now[n]) != now[n]]
            if changed:
                raise RunError(
                    f"{self.path} holds a run of other data: {' and '.join(changed)} changed since. "
                    "Give another --out."
                )
            odd = [k for k in {**theirs, **ours} if theirs.get(k) != ours.get(k)]
            shown = "; ".join(f"{k}: {theirs.get(k)!r} there, {ours.get(k)!r} now" for k in odd[:4])
            raise RunError(
                f"{self.path} holds a run with other settings ({shown or old.get('kind')}). Give it "
                "again with those settings to resume it, or another --out."
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
            raise RunError(
                f"{path} is a link, and a run writes in its own folder: remove the link."
            )
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
        """What to say of a file that cannot be used: nothing that would cost what the run has done."""
        advice = "Remove it, and the same command makes it again from what else is there."
        if name == "config.json":
            advice = (
                "Restore it from a copy, or rename the folder and give the command again; metrics and "
                "checkpoints stay where they are."
            )
        return RunError(f"{self.path / name} is damaged ({why}). {advice}")


def command() -> str:
    """Return the command line as a reader would type it."""
    path = Path(sys.argv[0])
    words = ["python", sys.argv[0]]
    if path.name == "__main__.py":
        words = ["python", "-m", path.parent.name]
    if path.name in ("foretune", "") or words[-1] == "foretune":
        words = ["foretune"]
    return shlex.join([*words, *sys.argv[1:]])


def device() -> str:
    """Return the device that JAX uses, in words."""
    import jax

    kind = jax.devices()[0].device_kind
    return f"{kind}, {os.cpu_count()} cores, {platform.machine()}" if kind == "cpu" else kind


def versions() -> dict[str, str]:
    """Return the versions that matter."""
    names = ("foretune", "jax", "jaxlib", "optax", "equinox", "numpy", "scikit-learn")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"python": platform.python_version(), **found}

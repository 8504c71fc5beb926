"""What must hold of the wheel and the source distribution in a folder: `make dist` runs it.

python tests/dist.py dist                     check them
python tests/dist.py dist --lowest apps,data  print the oldest versions that they allow
"""

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
LARGE = 2**20  # bytes: a file of this size is data
# For continuous integration only, and what the build adds.
NOT_IN_SDIST, ADDED = {".ci/run"}, {"PKG-INFO"}


def listed(*options: str) -> set[str]:
    """Return the files under version control, or about to be: no caches, no data, no outputs."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", *options]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {name for name in found if (ROOT / name).is_file()}


def wheel_files(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


def sdist_files(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as sdist:
        members = {m.name.partition("/")[2]: sdist.extractfile(m) for m in sdist if m.isfile()}
        return {name: file.read() for name, file in members.items() if file is not None}


def metadata(wheel: dict[str, bytes]) -> Message:
    name = next(name for name in wheel if name.endswith(".dist-info/METADATA"))
    return Parser().parse(io.StringIO(wheel[name].decode()))


def same(what: str, found: set[str], expected: set[str]) -> None:
    missing, surplus = sorted(expected - found), sorted(found - expected)
    if missing or surplus:
        sys.exit(f"{what}: missing {missing or 'nothing'}, in excess {surplus or 'nothing'}")


def check(folder: Path) -> None:
    (wheel_path,), (sdist_path,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    wheel, sdist = wheel_files(wheel_path), sdist_files(sdist_path)
    files = listed("--others", "--exclude-standard")

    package = {name: data for name, data in wheel.items() if ".dist-info/" not in name}
    source = {name.removeprefix("src/") for name in files if name.startswith("src/foretune/")}
    same("the wheel beside src/foretune", set(package), source)
    for name, data in package.items():
        if data != (ROOT / "src" / name).read_bytes():
            sys.exit(f"{name} in the wheel is not the file in src")
    same("the source distribution beside the repository", set(sdist), files - NOT_IN_SDIST | ADDED)
    large = [name for name, data in (wheel | sdist).items() if len(data) > LARGE]
    if large:
        sys.exit(f"over {LARGE} bytes, so not source: {large}")

    # `python -m build` made the wheel from the source distribution; the repository makes the same.
    with tempfile.TemporaryDirectory() as again:
        command = [sys.executable, "-m", "build", "--wheel", "--outdir", again, str(ROOT)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        if wheel_path.read_bytes() != (Path(again) / wheel_path.name).read_bytes():
            sys.exit("the repository and the source distribution do not build the same wheel")

    print(f"{wheel_path}: {len(wheel)} files, {wheel_path.stat().st_size:,} bytes")
    print("  not Python:", *sorted(name for name in package if not name.endswith(".py")))
    print(f"{sdist_path}: {len(sdist)} files, {sdist_path.stat().st_size:,} bytes")
    uncommitted = sorted(files - listed())
    if uncommitted:
        print("  not committed, and yet in it:", *uncommitted)


def lowest(folder: Path, extras: list[str]) -> list[str]:
    """Return the lower bounds of the dependencies, with those of the extras, as pins."""
    (wheel,) = folder.glob("*.whl")
    pins = []
    for line in metadata(wheel_files(wheel)).get_all("Requires-Dist", []):
        needed = Requirement(line)
        mark = needed.marker
        if mark is None or any(mark.evaluate({"extra": extra}) for extra in extras):
            bounds = [bound.version for bound in needed.specifier if bound.operator == ">="]
            pins += [f"{needed.name}=={version}" for version in bounds]
    return pins


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lowest", metavar="EXTRAS")
    given = parser.parse_args()
    if given.lowest is None:
        check(given.folder)
    else:
        print(*lowest(given.folder, given.lowest.split(",")))

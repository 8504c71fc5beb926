"""A damaged file, whichever and however, costs a warning or an error, never a wrong result.

Each trial damages one file of a copy of a good folder and goes on there. It ends with the results of a
run that nothing happened to, to the bit, or with an error of this library or of the disk that names
the path; then every other file is as it was. Records of steps before the oldest checkpoint cannot be
made again: a warning says which the history lacks.
"""

import collections
import contextlib
import functools
import io
import itertools
import shutil
import warnings

import numpy as np
import pytest
from sklearn.naive_bayes import GaussianNB

from experiments.multitask import experiment as multitask
from experiments.runs import Phases, RunFolder
from foretune._engines import disk as _disk
from foretune.apps import LabelCleaner, _files
from foretune.report import RunError, write_page
from foretune.report._page import ReportError

from . import jobs
from .test_kills import files_of


def flip(place, bits):
    def flipped(path):
        content = bytearray(path.read_bytes())
        if content:
            content[int(place * (len(content) - 1))] ^= bits
        path.write_bytes(content)

    return flipped


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


DAMAGES = {
    "first byte": flip(0, 255),
    "byte at a quarter": flip(0.25, 1),
    "byte in the middle": flip(0.5, 1),
    "byte at three quarters": flip(0.75, 255),
    "last byte": flip(1, 2),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "absent": lambda path: path.unlink(),
    "a folder": replace_by_folder,
    "garbage at its end": lambda path: path.write_bytes(path.read_bytes() + b"\0\xffgarbage"),
}
NAMED = (RunError, ReportError)  # and, exactly or of the disk:
PLAIN = (ValueError, RuntimeError, FileExistsError)


def files_in(folder):
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(paths)}


def fault_of(error, folder):
    """Return what is wrong with an error, if anything."""
    # one without a number is in the library's own words
    of_the_disk = isinstance(error, OSError) and (error.filename or error.errno is None)
    if not (isinstance(error, NAMED) or type(error) in PLAIN or of_the_disk):
        return f"raw {type(error).__name__}: {error!s:.300}"
    if str(folder) not in str(error):
        return f"names no path: {type(error).__name__}: {error!s:.300}"
    return None


def try_all(trials, good, folder, proceed, expected):
    """Make the trials, and fail where one ends in another way than those above."""
    outcomes, wrong = collections.Counter(), []
    for name, damage in trials:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        DAMAGES[damage](folder / name)
        before, fault = files_in(folder), None
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            try:
                found = proceed(folder)
            except Exception as error:
                outcomes["error"] += 1
                fault = fault_of(error, folder)
                after = files_in(folder)
                lost = {k for k in before if after.get(k) != before[k] and not k.endswith(".lock")}
                if fault is None and lost:
                    fault = f"changed {sorted(lost)} though it ended with {error!s:.200}"
            else:
                outcomes["same, with a warning" if noted else "same"] += 1
                said = any("are missing in the history" in str(w.message) for w in noted)
                if found != (without_lost(expected, found) if said else expected):
                    fault = f"silently another result: {found!s:.300}"
        if fault:
            wrong.append(f"{name}, {damage}: {fault}")
    print(f"{len(trials)} corruptions: {dict(outcomes)}, {len(wrong)} wrong")
    assert not wrong, "\n".join(wrong)


def without_lost(expected, found):
    """Return what is expected of a run without the records that it has lost, and has said so."""
    answer, files = expected
    kept = [record for record in answer["history"] if record in found[0]["history"]]
    return answer | {"history": kept}, files


def all_trials(folder):
    return [(name, damage) for name in files_in(folder) for damage in DAMAGES]


QUIET = jobs.Trap(None, "")


# What Orbax gave up reading may end after the loop that it waited in, and says so on standard error.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("job", ["minimize", "real_time"])
def test_checkpoints(tmp_path, chosen, job):
    run = functools.partial(getattr(jobs, job), trap=QUIET)
    run(tmp_path / "good", steps=3, keep=2)

    def proceed(folder):
        return jobs.answer_of(run(folder, steps=4, keep=2)), files_of(folder)

    expected = proceed(tmp_path / "whole")
    some = chosen(all_trials(tmp_path / "good"), 5)
    trials = list(dict.fromkeys([("state/foretune.records", "half"), *some]))
    try_all(trials, tmp_path / "good", tmp_path / "run", proceed, expected)


@pytest.fixture(scope="module")
def cleaned(tmp_path_factory):
    """The folders of a `clean` that was stopped, and of one that is done."""
    folder = tmp_path_factory.mktemp("cleaned")
    jobs.write_tables(folder / "run")
    data = folder / "run-data"
    settings = _files.Settings(str(data / "train.csv"), str(data / "checked.csv"))

    def run(out):
        with contextlib.redirect_stderr(io.StringIO()):
            return _files.run(out, settings)

    def stopped(*_):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_files, "LabelCleaner", functools.partial(LabelCleaner, GaussianNB()))
        with patch.context() as until:
            until.setattr(_files, "write_lists", stopped)
            with pytest.raises(KeyboardInterrupt):
                run(folder / "stopped")
        run(folder / "done")
        yield folder, run


def test_the_folder_of_an_unfinished_run(tmp_path, cleaned, chosen):
    folder, run = cleaned

    def proceed(out):
        run(out)
        return files_of(out)

    expected = files_of(folder / "done")
    names = [name for name in files_in(folder / "stopped") if not name.startswith("checkpoints/")]
    trials = chosen(list(itertools.product(names, DAMAGES)), 2)
    try_all(trials, folder / "stopped", tmp_path / "run", proceed, expected)


def test_the_folder_of_a_finished_run(tmp_path, cleaned, chosen):
    folder, run = cleaned

    def proceed(out):
        page = run(out).read_text()
        assert page == write_page(out).read_text()
        # But for figures, of which one that is not there leaves a note, and the count of records.
        others = ("data:image", 'class="absent"', " of metrics")
        lines = [line for line in page.splitlines() if not any(word in line for word in others)]
        return (out / "result.json").read_bytes(), lines

    expected = proceed(folder / "done")
    names = [name for name in files_in(folder / "done") if not name.startswith("checkpoints/")]
    trials = chosen(list(itertools.product(names, DAMAGES)), 8)
    try_all(trials, folder / "done", tmp_path / "run", proceed, expected)


def test_a_stage_of_an_experiment(tmp_path, chosen):
    """What cannot be read is computed again."""
    numbers = {"accuracy": np.linspace(0, 1, 5), "C": np.eye(3), "note": "kept"}

    def proceed(path):
        with contextlib.redirect_stderr(io.StringIO()):
            folder = RunFolder(path, kind="multitask", title="", settings={})
            runner = multitask.Runner(folder, "iris", None, multitask.Settings())
            found = runner.once("STL", "folds", lambda: numbers, Phases(1))
            folder.close()
        return {name: array.tobytes() for name, array in sorted(found.items())}

    expected = proceed(tmp_path / "good")
    trials = [trial for trial in all_trials(tmp_path / "good") if trial[0].endswith(".npz")]
    try_all(chosen(trials, 3), tmp_path / "good", tmp_path / "run", proceed, expected)


def test_the_chunks_of_an_attribution(tmp_path, chosen):
    """What cannot be read is set aside, and its queries are computed again."""

    def proceed(folder):
        return jobs.answer_of(jobs.attribute(folder, QUIET))

    expected = proceed(tmp_path / "good")
    trials = [trial for trial in all_trials(tmp_path / "good") if trial[0].endswith(".npz")]
    try_all(chosen(trials, 3), tmp_path / "good", tmp_path / "run", proceed, expected)


def test_states_on_a_disk(tmp_path, chosen):
    """Of a call that was stopped after the last segment, before its files are removed."""

    def proceed(folder):
        return jobs.answer_of(jobs.disk(folder, QUIET))

    def stopped(files):
        files.flush()
        raise KeyboardInterrupt

    expected = proceed(tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_disk._Files, "remove", stopped)
        with pytest.raises(KeyboardInterrupt):
            proceed(tmp_path / "good")
    trials = [trial for trial in all_trials(tmp_path / "good") if trial[0].endswith(".foretune")]
    try_all(chosen(trials, 3), tmp_path / "good", tmp_path / "run", proceed, expected)

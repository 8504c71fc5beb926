"""Signals, disks that are full or fail: nothing is lost, all is said."""

import shutil

import pytest

from .jobs import write_tables
from .test_corruptions import NAMED, PLAIN
from .test_kills import files_of, outcome

JOBS = ("minimize", "real_time", "clean")
WRITERS = (*JOBS, "attribute", "disk")
OURS = {kind.__name__ for kind in (*NAMED, *PLAIN)}


def whole_run(server, tmp_path, job, kind="write"):
    """Return the folder of a run, without the run, what it comes to, and its events."""
    folder = tmp_path / "run"
    write_tables(folder)
    end = server.finish(job, folder, kind)
    expected = outcome(end, folder)
    shutil.rmtree(folder)
    return folder, expected, end["events"]


def fault_of(end, folder):
    """Return what is wrong with how a run ended that met an error, if anything."""
    if end["killed"]:
        return f"killed by {end['killed']}: {end['said'][-1000:]}"
    if end.get("code") == 0 or "result" in end:
        return None
    if end.get("code", 1) != 1:
        return f"exit {end['code']}: {end['said']}"
    if "error" in end and end["error"][0] not in OURS and "OSError" not in end["error"]:
        return f"raw {end['error'][0]}: {end['message'][:500]}"
    said = end.get("message") or end["said"].splitlines()[-1]
    return None if str(folder) in said else f"names no path: {said[:500]}"


def assert_all_is_well(wrong, count, what):
    print(f"{count} {what}, {len(wrong)} wrong")
    assert not wrong, "\n".join(f"{at}: {fault}" for at, fault in wrong.items())


@pytest.mark.parametrize(
    ("job", "kind", "action"),
    [
        ("clean", "write", "SIGTERM"),
        ("minimize", "write", "SIGINT"),
    ],
)
def test_signals(server, enough, chosen, tmp_path, job, kind, action):
    """SIGTERM to a command, Ctrl-C to a program of one's own, in the middle of a write."""
    enough(kind == "write")
    folder, expected, events = whole_run(server, tmp_path, job, kind)
    moments, wrong = chosen(range(1, len(events) + 1), 1, 8), {}
    for moment in moments:
        shutil.rmtree(folder, ignore_errors=True)
        end = server.run(job, folder, kind=kind, number=moment, action=action)
        if end.get("code") not in (None, 0, 143) or "Traceback" in end["said"]:
            wrong[moment, str(events[moment - 1])] = end["said"]
        if "error" in end and end["error"][0] != "KeyboardInterrupt":
            wrong[moment, str(events[moment - 1])] = end["trace"]
        try:
            assert outcome(server.finish(job, folder, kind), folder) == expected
        except AssertionError as error:
            wrong[moment, str(events[moment - 1])] = str(error)[:1000]
    assert_all_is_well(wrong, len(moments), f"{action} in a {kind} of {job}")


def try_moments(server, job, folder, expected, moments, **options):
    """Let something happen at each moment, and run again; return what is wrong."""
    wrong = {}
    for moment in moments:
        shutil.rmtree(folder, ignore_errors=True)
        end = server.run(job, folder, **options, number=moment)
        at = moment, options["action"], str(end.get("events", [])[moment - 1 : moment])
        if fault := fault_of(end, folder):
            wrong[at] = fault
        try:
            assert outcome(server.finish(job, folder), folder) == expected
        except AssertionError as error:
            wrong[*at, "then"] = str(error)[:1000]
    return wrong


@pytest.mark.parametrize("job", WRITERS)
@pytest.mark.parametrize("action", ["full", "stays full"])
def test_a_full_disk(server, enough, chosen, tmp_path, job, action):
    enough((job, action) == ("minimize", "stays full"))
    folder, expected, events = whole_run(server, tmp_path, job)
    moments = chosen(range(1, len(events) + 1), 2, 6 if job == "clean" else 20)
    wrong = try_moments(server, job, folder, expected, moments, action=action)
    assert_all_is_well(wrong, len(moments), f"times {job} meets a disk that is full")


@pytest.mark.parametrize("job", WRITERS)
def test_files_that_may_not_grow(server, enough, chosen, tmp_path, job):
    """Where not Python writes, but the libraries below."""
    enough(job == "minimize")
    folder, expected, _ = whole_run(server, tmp_path, job)
    limits, wrong = chosen([0, 16, 100, 200, 400, 1000, 1500, 3000], 1), {}
    for largest in limits:
        shutil.rmtree(folder, ignore_errors=True)
        if fault := fault_of(server.run(job, folder, largest=largest), folder):
            wrong[largest] = fault
        try:
            assert outcome(server.finish(job, folder), folder) == expected
        except AssertionError as error:
            wrong[largest, "then"] = str(error)[:1000]
    assert_all_is_well(wrong, len(limits), f"limits on the size of the files of {job}")


@pytest.mark.parametrize("job", JOBS)
def test_files_that_cannot_be_read(server, enough, chosen, tmp_path, job):
    """Once, while a run is resumed."""
    enough(job == "real_time")
    folder, expected, _ = whole_run(server, tmp_path, job)
    stopped = tmp_path / "stopped"
    server.run(job, folder, kind="evaluation", number=11)
    folder.rename(stopped)
    shutil.copytree(stopped, folder)
    events = server.finish(job, folder, "read")["events"]
    moments, wrong = chosen(range(1, len(events) + 1), 2, 12), {}
    for moment in moments:
        shutil.rmtree(folder)
        shutil.copytree(stopped, folder)
        end = server.run(job, folder, kind="read", number=moment, action="unreadable")
        if fault := fault_of(end, folder):
            wrong[moment, str(events[moment - 1])] = fault
        try:
            assert outcome(server.finish(job, folder), folder) == expected
        except AssertionError as error:
            wrong[moment, "then"] = str(error)[:1000]
    assert files_of(folder)
    assert_all_is_well(wrong, len(moments), f"files that {job} cannot read")

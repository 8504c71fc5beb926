"""Two processes on every folder that the library writes, and runs that are over called again."""

import os
import struct
import time

import pytest

from .test_corruptions import files_in
from .test_disk import fault_of, whole_run
from .test_kills import outcome

# Who writes, and what becomes of a second process: it is refused, or both end as if alone.
WRITERS = {
    "minimize": "refused",
    "real_time": "refused",
    "rehearse": "refused",
    "attribute": "refused",
    "disk": "refused",
    "clean": "refused",
    "explain": "refused",
    "experiment": "refused",
    "history": "refused",
    "board": "both",
    "programs": "both",
    "page": "both",
}
SAMPLE = ("attribute", "history")
ONCE = ("history", "board")  # a run without a checkpoint begins anew


def opened_by(process, pipe):
    """Open a pipe to write, once a process waits for it."""
    for _ in range(6000):
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads yet
            os.kill(process, 0)
            time.sleep(0.02)
    raise TimeoutError(pipe)


def numbers(end):
    assert "result" in end, end
    return end["result"]


@pytest.mark.parametrize("moment", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("job", [job for job, ends in WRITERS.items() if ends == "refused"])
def test_a_second_process_is_refused(server, enough, tmp_path, job, moment):
    """The first waits in the middle of a write, and ends as if alone."""
    enough(job in SAMPLE and moment == 0.6)
    folder, expected, events = whole_run(server, tmp_path, job)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    number = locking(events) + int(moment * (len(events) - locking(events)))
    first = server.start(job, folder, number=number, action=str(pipe))
    file = opened_by(first, pipe)
    second = server.run(job, folder)
    os.close(file)
    said = second.get("message", second["said"])
    assert f"is in use by another run (process {first})" in " ".join(said.split()), second
    assert fault_of(second, tmp_path) is None
    assert outcome(server.wait(first), folder) == expected
    print(f"{job}: a second process is refused at {events[number - 1]}")


def locking(events):
    """Return the number of the event after which the first process has said that it has the folder."""
    return max(k for k, (_, *path) in enumerate(events, 1) if path and path[0].endswith(".lock"))


@pytest.mark.parametrize("job", [job for job, ends in WRITERS.items() if ends == "both"])
def test_both_processes_end_as_if_alone(server, enough, tmp_path, job):
    enough(False)
    alone = numbers(server.run(job, tmp_path / "alone"))
    folder = tmp_path / "both"
    ends = [server.wait(process) for process in [server.start(job, folder) for _ in range(3)]]
    assert [numbers(end) for end in ends] == [alone] * 3
    assert files_in(folder)
    if job == "board":
        count, *_ = map(records, files_in(tmp_path / "alone").values())
        assert [records(file) for file in files_in(folder).values()] == [count] * 3
    assert numbers(server.run(job, folder)) == alone  # with what they left


def records(content):
    """Return the number of records of a file for TensorBoard, each with its length before it."""
    count = 0
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        assert len(content) >= length + 16
        content, count = content[length + 16 :], count + 1
    return count


@pytest.mark.parametrize("job", [job for job in WRITERS if job != "programs"])
def test_a_run_that_is_over_called_again_changes_nothing(server, enough, tmp_path, job):
    enough(job in SAMPLE)
    folder, expected, _ = whole_run(server, tmp_path, job)
    assert outcome(server.run(job, folder), folder)[0] == expected[0]
    before = files_in(folder)
    again = server.run(job, folder)
    after = files_in(folder)
    changed = [name for name in before if after.get(name) != before[name]]
    assert [name for name in changed if not name.endswith(".lock")] == []
    if job == "history":
        assert "of an earlier run" in again["message"]
        return
    assert outcome(again, folder)[0] == expected[0]
    if job not in ONCE:
        assert set(after) == set(before)
        assert outcome(again, folder) == expected

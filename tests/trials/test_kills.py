"""A run that is killed, wherever, and given again until it is done, ends as if nothing had happened."""

import shutil

import pytest

from .jobs import write_tables

# How many of the moments are tried: in a sample, and in all (None: each). At each two processes are
# killed: the run, and the one that resumes it.
MOMENTS = {
    ("minimize", "write"): (1, 40),
    ("minimize", "evaluation"): (1, 10),
    ("real_time", "write"): (1, 30),
    ("real_time", "evaluation"): (0, 8),
    ("rehearse", "write"): (0, 12),
    ("rehearse", "evaluation"): (0, 8),
    ("attribute", "write"): (1, 20),
    ("attribute", "evaluation"): (0, None),
    ("disk", "write"): (1, 30),
    ("experiment", "write"): (0, 12),
    ("clean", "write"): (0, 10),
    ("explain", "write"): (0, 10),
}
AS_IT_MAY = ("config.json", "report.html")  # they name the date and the folder


def files_of(folder):
    """Return what a finished run leaves for its user; a kill may leave files with a dot before."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name[0] != "."]
    left = {str(path.relative_to(folder)): path for path in paths}
    return {
        name: path.read_bytes()
        for name, path in left.items()
        if not name.startswith(("state/", "checkpoints/")) and name not in AS_IT_MAY
    }


def outcome(end, folder):
    """Return the results of a run that is done, to the bit, and its files."""
    assert end["killed"] is None, end
    assert end.get("code") == 0 or "result" in end, end
    return end.get("result"), end.get("stopped"), files_of(folder)


@pytest.mark.parametrize(("job", "kind"), MOMENTS)
def test_kills(server, enough, chosen, tmp_path, job, kind):
    few, most = MOMENTS[job, kind]
    enough(few > 0)
    folder = tmp_path / "run"
    write_tables(folder)
    whole = server.finish(job, folder, kind)
    expected, events = outcome(whole, folder), whole["events"]
    kills, wrong = 0, {}
    moments = chosen(range(1, len(events) + 1), few, most)
    for moment in moments:
        shutil.rmtree(folder)
        first, second = (server.run(job, folder, kind=kind, number=moment) for _ in range(2))
        # Orbax does not always write the same number of files: the last moments may not come.
        assert first["killed"] == "SIGKILL" or len(first["events"]) < moment, first
        kills += sum(end["killed"] == "SIGKILL" for end in (first, second))
        try:
            assert outcome(server.finish(job, folder, kind), folder) == expected
        except AssertionError as error:
            wrong[moment, str(events[moment - 1])] = str(error)[:2000]
    print(f"{job}: {kills} kills at {len(moments)} moments ({kind})")
    assert not wrong, "\n".join(f"{at}: {what}" for at, what in wrong.items())

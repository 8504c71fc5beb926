"""Files are written whole or not at all, and a folder belongs to one process at a time."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from experiments.runs import RunFolder
from foretune._files.files import locked, write_whole
from foretune.report import RunError, write_page
from foretune.report._page import ReportError


def child(program, *arguments):
    """Start Python on a program that can use what is in `foretune._files.files` without JAX."""
    path = [p for p in sys.path if (p and os.path.isdir(os.path.join(p, "foretune", "_files")))]
    load = f"""
        import importlib.util, os, sys
        spec = importlib.util.spec_from_file_location(
            "files", os.path.join({path[0]!r}, "foretune", "_files", "files.py"))
        files = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(files)
    """
    code = textwrap.dedent(load) + textwrap.dedent(program)
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize(
    "failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch, call, failure):
    path = tmp_path / "result.json"
    write_whole(path, "old")

    def fails(*_):
        raise failure

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(type(failure)) as caught:
        write_whole(path, "new")
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]
    assert path.read_text() == "old"
    if isinstance(failure, OSError):
        assert str(caught.value) == f"[Errno 28] No space left on device: '{path}'"


def test_a_writer_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "arrays.npz"
    write_whole(path, lambda file: np.savez(file, a=np.arange(3)))

    def half(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, half)
    assert [file.name for file in tmp_path.iterdir()] == ["arrays.npz"]
    with np.load(path) as arrays:
        assert arrays["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("what", ["bytes(100_000)", "lambda file: file.write(bytes(100_000))"])
def test_a_disk_without_space_is_named(tmp_path, what):
    """Here a limit on the size of files stands for it."""
    pytest.importorskip("resource")
    path = tmp_path / "result.json"
    path.write_text("old")
    limited = child(
        f"""
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            files.write_whole(sys.argv[1], {what})
        except OSError as error:
            print(error)
        """,
        path,
    )
    out, err = limited.communicate()
    assert str(path) in out, err
    assert "too large" in out
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_the_folder_is_synced_as_well(tmp_path, monkeypatch):
    synced, sync = [], os.fsync

    def noted(file):
        synced.append(os.path.isdir(f"/proc/self/fd/{file}"))
        sync(file)

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc to tell a file from a folder")
    monkeypatch.setattr(os, "fsync", noted)
    write_whole(tmp_path / "a", "new")
    assert synced == [False, True]


HOLD = """
    with files.locked(sys.argv[1]):
        print("locked", flush=True)
        sys.stdin.read()
"""
TAKE = "files.locked(sys.argv[1]).__enter__()"


def test_a_lock_holds_on_a_full_disk(tmp_path):
    """It cannot say whose it is; a limit on the size of files stands for the disk."""
    pytest.importorskip("fcntl")
    limit = """
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    """
    owner = child(textwrap.dedent(limit) + textwrap.dedent(HOLD), tmp_path)
    assert owner.stdout.readline() == "locked\n"
    message = r"in use by another run \(process unknown\)"
    with pytest.raises(RunError, match=message), locked(tmp_path):
        pass
    owner.communicate("")


def settings(**more):
    return {"kind": "cleaning", "title": "", "settings": {"a": 1}} | more


def test_a_folder_in_use_is_refused_until_its_owner_is_dead(tmp_path):
    pytest.importorskip("fcntl")
    RunFolder(tmp_path / "run", **settings()).close()
    owner = child(HOLD, tmp_path / "run")
    assert owner.stdout.readline() == "locked\n"
    with pytest.raises(RunError, match=rf"run is in use by another run \(process {owner.pid}\)"):
        RunFolder(tmp_path / "run", **settings())
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    folder = RunFolder(tmp_path / "run", **settings())
    refused = child(TAKE, folder.path)
    assert f"(process {os.getpid()})" in refused.communicate()[1]
    assert refused.returncode == 1
    folder.close()
    free = child(TAKE, folder.path)
    assert free.communicate()[1] == ""


def test_a_process_may_open_its_folder_again(tmp_path):
    pytest.importorskip("fcntl")
    first = RunFolder(tmp_path / "run", **settings())
    second = RunFolder(tmp_path / "run", **settings())
    first.close()
    first.close()
    assert child(TAKE, second.path).communicate()[1] != ""
    second.close()
    assert child(TAKE, second.path).communicate()[1] == ""


def test_a_refused_folder_is_not_kept(tmp_path):
    RunFolder(tmp_path / "run", **settings()).close()
    with pytest.raises(RunError, match="other settings"):
        RunFolder(tmp_path / "run", **settings(settings={"a": 2}))
    assert child(TAKE, tmp_path / "run").communicate()[1] == ""


def test_a_lock_is_not_made_through_a_link(tmp_path):
    pytest.importorskip("fcntl")
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "mine.txt")
    with pytest.raises(OSError, match=r"\.lock"), locked(tmp_path / "run"):
        pass
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_run_that_was_killed_before_its_settings_were_written_begins_anew(tmp_path):
    (tmp_path / "run").mkdir()
    for name in (".lock", ".config.json.0123456789abcdef"):
        (tmp_path / "run" / name).write_text("")
    assert RunFolder(tmp_path / "run", **settings()).read("config.json")["settings"] == {"a": 1}


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"settings": 3}'])
def test_a_damaged_config_costs_nothing(tmp_path, content):
    folder = RunFolder(tmp_path / "run", **settings())
    folder.write_metrics([{"step": 0}])
    folder.close()
    (folder.path / "config.json").write_bytes(content)
    with pytest.raises(RunError, match=r"config\.json is damaged .* rename the folder") as caught:
        RunFolder(folder.path, **settings())
    assert "remove" not in str(caught.value).lower()
    assert "\n" not in str(caught.value)
    assert folder.records() == [{"step": 0}]


def test_a_damaged_result_is_made_again(tmp_path):
    folder = RunFolder(tmp_path / "run", **settings())
    (folder.path / "result.json").write_text('{"headline": ')
    with pytest.raises(
        RunError, match=r"result\.json is damaged .* Remove it, and the same command"
    ):
        _ = folder.result


def test_measurements_that_were_cut_off_are_left_out(tmp_path):
    folder = RunFolder(tmp_path / "run", **settings())
    assert folder.records() == []
    folder.metrics.write_bytes(b'{"step": 0}\n\xff\n3\n{"step": 1}\n{"st')
    assert folder.records() == [{"step": 0}, {"step": 1}]
    folder.keep_metrics(lambda record: record["step"] == 1)
    assert folder.metrics.read_text() == '{"step": 1}\n'


@pytest.mark.parametrize("name", ["config.json", "result.json", "stages/a.json"])
def test_a_changed_digit_is_damage(tmp_path, name):
    with contextlib.closing(RunFolder(tmp_path / "run", **settings())) as folder:
        content = {"headline": "12 of 24", "settings": {"a": 1}, "values": {1: 0.5}}
        folder.write(name, content)
        assert folder.read(name) == content | {"values": {"1": 0.5}}
        path = folder.path / name
        path.write_text(path.read_text().replace("12 of", "13 of"))
        with pytest.raises(RunError, match=rf"{name} is damaged \(its content is not what was"):
            folder.read(name)
        if "/" not in name:
            with pytest.raises(ReportError, match=rf"{name} is broken \(its content is not what"):
                write_page(folder.path)

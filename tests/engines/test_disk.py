"""Reverse mode with states on a disk: the same result, damage that is told, calls that continue."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import foretune as ft
from foretune._engines import disk

from ..problems import assert_trees_close, regression
from .test_schedules import noisy

ROOT = Path(__file__).parents[2]


def left_in(folder):
    """Return the names of files, but for the lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("segment", [3, 4, None])
def test_it_equals_states_on_the_device(segment, tmp_path):
    problem, hparams = regression(steps=9, dtype=np.float64)
    found = ft.ReverseOnDisk(tmp_path / "new", segment=segment)(problem, hparams)
    expected = ft.Reverse()(problem, hparams)
    assert_trees_close(found.grad, expected.grad, 1e-12)
    assert_trees_close(found.value, expected.value, 1e-14)
    assert_trees_close(found.state.params, expected.state.params, 1e-14)
    assert left_in(tmp_path / "new") == []


@pytest.mark.usefixtures("x64")
@pytest.mark.second_tier
def test_keys_counters_starts_and_several_objectives(tmp_path):
    problem, hparams = noisy(trajectory=False)
    found = ft.ReverseOnDisk(tmp_path, segment=4)(problem, hparams)
    assert_trees_close(found.grad, ft.Forward()(problem, hparams).grad, 1e-12)
    assert int(found.state["n"]) == 11


class Killed(Exception):
    pass


def killed_at(monkeypatch, program, call):
    """Raise in place of a call of one of the programs."""
    calls, whole = [], getattr(disk, program)

    def dying(*arguments):
        calls.append(None)
        if len(calls) == call:
            raise Killed
        return whole(*arguments)

    dying.lower = whole.lower
    monkeypatch.setattr(disk, program, dying)


def counted(monkeypatch, program):
    calls, whole = [], getattr(disk, program)

    def counting(*arguments):
        calls.append(None)
        return whole(*arguments)

    counting.lower = whole.lower
    monkeypatch.setattr(disk, program, counting)
    return calls


@pytest.mark.parametrize(("program", "forward", "back"), [("_advance", 3, 5), ("_back", 0, 3)])
def test_a_call_that_was_killed_continues(program, forward, back, tmp_path, monkeypatch):
    problem, hparams = regression(steps=10)
    engine = ft.ReverseOnDisk(tmp_path, segment=2)
    with monkeypatch.context() as patch:
        killed_at(patch, program, 3)
        with pytest.raises(Killed):
            engine(problem, hparams)
    assert left_in(tmp_path)
    with monkeypatch.context() as patch:
        advances, backs = counted(patch, "_advance"), counted(patch, "_back")
        found = engine(problem, hparams)
    assert (len(advances), len(backs)) == (forward, back)  # of five segments
    expected = engine(problem, hparams)
    jax.tree.map(np.testing.assert_array_equal, found.grad, expected.grad)  # to the bit


DYING = """
import os, signal, sys
import foretune as ft
from foretune._engines import disk
from tests.problems import regression

whole, calls = disk._back, []

def dying(*arguments):
    calls.append(None)
    if len(calls) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*arguments)

disk._back = dying
ft.ReverseOnDisk(sys.argv[1], segment=2)(*regression(steps=10))
"""


@pytest.mark.second_tier
def test_a_process_that_was_killed_on_the_way_back_is_continued_by_another(tmp_path, monkeypatch):
    child = subprocess.run([sys.executable, "-c", DYING, str(tmp_path)], cwd=ROOT, check=False)
    assert child.returncode == -signal.SIGKILL
    problem, hparams = regression(steps=10)
    with monkeypatch.context() as patch:
        advances, backs = counted(patch, "_advance"), counted(patch, "_back")
        found = ft.ReverseOnDisk(tmp_path, segment=2)(problem, hparams)
    assert not advances  # all states are there
    # adjoints of three of five segments were to be written, of which `AHEAD` may have waited
    assert 2 <= len(backs) <= 2 + disk.AHEAD
    assert_trees_close(found.grad, ft.Reverse()(problem, hparams).grad, 1e-5)


def test_files_of_other_numbers_are_not_continued(tmp_path, monkeypatch):
    problem, hparams = regression(steps=10)
    engine = ft.ReverseOnDisk(tmp_path, segment=2)
    with monkeypatch.context() as patch:
        killed_at(patch, "_back", 3)
        with pytest.raises(Killed):
            engine(problem, hparams)
    other = {**hparams, "lr": hparams["lr"] * 2}
    assert_trees_close(engine(problem, other).grad, ft.Reverse()(problem, other).grad, 1e-4)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_state_is_computed_again(damage, tmp_path, monkeypatch):
    problem, hparams = regression(steps=10)
    engine = ft.ReverseOnDisk(tmp_path, segment=2)
    with monkeypatch.context() as patch:
        killed_at(patch, "_back", 1)
        with pytest.raises(Killed):
            engine(problem, hparams)
    path = tmp_path / "state_000000004.foretune"
    content = bytearray(path.read_bytes())
    content[150] ^= 1  # in an array
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flip" else content[:-3])
    set_aside = pytest.warns(UserWarning, match="is kept as state_000000004.foretune.damaged")
    advances = counted(monkeypatch, "_advance")
    with contextlib.nullcontext() if damage == "remove" else set_aside:
        found = engine(problem, hparams)
    assert len(advances) == 4  # from the state before it on
    expected = engine(problem, hparams)
    jax.tree.map(np.testing.assert_array_equal, found.grad, expected.grad)
    assert left_in(tmp_path) == [f"{path.name}.damaged"] * (damage != "remove")


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_a_state_that_is_damaged_meanwhile_is_named_with_its_step(damage, tmp_path, monkeypatch):
    problem, hparams = regression(steps=10)
    engine, whole = ft.ReverseOnDisk(tmp_path, segment=2), disk._back
    path = tmp_path / "state_000000004.foretune"

    def meanwhile(*arguments):
        if damage == "remove":
            path.unlink(missing_ok=True)
        else:
            content = path.read_bytes()
            path.write_bytes(content[:150] + b"\0" + content[151:])  # in an array
        return whole(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "_back", meanwhile)
        why = {"flip": "is damaged", "remove": "No such file"}[damage]
        with pytest.raises(OSError, match=f"{path}, the state before step 5 .*{why}.* again"):
            engine(problem, hparams)


def test_a_state_that_could_not_be_written_is_computed_again(tmp_path, monkeypatch):
    """The disk was full for a moment: later states are there, this one is not."""
    problem, hparams = regression(steps=10)
    engine, replace, calls = ft.ReverseOnDisk(tmp_path, segment=2), os.replace, []

    def full_once(*arguments):
        calls.append(None)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        replace(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full_once)
        with pytest.raises(OSError, match=r"cannot write state_000000002.*make room"):
            engine(problem, hparams)
    found = engine(problem, hparams)
    expected = engine(problem, hparams)
    jax.tree.map(np.testing.assert_array_equal, found.grad, expected.grad)


def test_a_disk_that_is_full_stops_the_call(tmp_path, monkeypatch):
    problem, hparams = regression(steps=10)
    engine = ft.ReverseOnDisk(tmp_path, segment=2)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        message = f"cannot write state_.* to {tmp_path} .No space left.*make room"
        with pytest.raises(OSError, match=message) as error:
            engine(problem, hparams)
    assert error.value.errno == 28
    assert left_in(tmp_path) == []  # no part of a file
    assert_trees_close(engine(problem, hparams).grad, ft.Reverse()(problem, hparams).grad, 1e-5)


def killed_on_the_way_back(monkeypatch, folder, problem, hparams):
    engine = ft.ReverseOnDisk(folder, segment=2)
    with monkeypatch.context() as patch:
        killed_at(patch, "_back", 3)
        with pytest.raises(Killed):
            engine(problem, hparams)
    assert left_in(folder)
    return engine


def cubed_error(state, hparams, batch):
    return jnp.mean(jnp.abs(batch[0] @ state.params["w"] - batch[1]) ** 3)


@pytest.mark.parametrize(
    ("change", "other"),
    [
        ({"trajectory": True}, {}),
        ({"objective": cubed_error}, {}),
    ],
)
def test_files_of_another_error_are_not_continued(change, other, tmp_path, monkeypatch):
    problem, hparams = regression(steps=10, **change)
    engine = killed_on_the_way_back(monkeypatch, tmp_path, problem, hparams)
    problem, _ = regression(steps=10, **other)
    found, expected = engine(problem, hparams), ft.Reverse()(problem, hparams)
    assert_trees_close(found.grad, expected.grad, 1e-4)


def test_files_of_another_constant_in_the_error_are_not_continued(tmp_path, monkeypatch):
    weights = jnp.linspace(1.0, 2.0, 20)

    def weighted_by(weights):
        return lambda s, h, b: jnp.mean((weights * (b[0] @ s.params["w"] - b[1])) ** 2)

    problem, hparams = regression(steps=10, objective=weighted_by(weights))
    engine = killed_on_the_way_back(monkeypatch, tmp_path, problem, hparams)
    problem, _ = regression(steps=10, objective=weighted_by(weights[::-1]))
    found, expected = engine(problem, hparams), ft.Reverse()(problem, hparams)
    assert_trees_close(found.grad, expected.grad, 1e-4)


def test_two_calls_do_not_share_a_folder(tmp_path, monkeypatch):
    problem, hparams = regression(steps=10)
    engine, whole = ft.ReverseOnDisk(tmp_path, segment=2), disk._back
    refused = []

    def meanwhile(*arguments):
        if not refused:
            with pytest.raises(ValueError, match=f"{tmp_path} is in use by another run") as error:
                engine(problem, hparams | {"lr": hparams["lr"] * 2})
            refused.append(error)
        return whole(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "_back", meanwhile)
        found = engine(problem, hparams)
    assert refused
    assert_trees_close(found.grad, ft.Reverse()(problem, hparams).grad, 1e-5)


def test_a_state_of_another_call_is_not_read(tmp_path, monkeypatch):
    """Though its checksum is right: as a copy of the folder's files would have it."""
    problem, hparams = regression(steps=10)
    killed_on_the_way_back(
        monkeypatch, tmp_path / "other", problem, hparams | {"lr": jnp.array(0.2)}
    )
    engine = ft.ReverseOnDisk(tmp_path / "mine", segment=2)
    whole = disk._end

    def swapped(*arguments):
        name = "state_000000002.foretune"
        os.replace(tmp_path / "other" / name, tmp_path / "mine" / name)
        return whole(*arguments)

    swapped.lower = whole.lower
    with monkeypatch.context() as patch:
        patch.setattr(disk, "_end", swapped)
        with pytest.raises(OSError, match="it belongs to another call"):
            engine(problem, hparams)


def test_what_it_did_not_write_is_left_alone(tmp_path, monkeypatch):
    problem, hparams = regression(steps=10)
    folder = tmp_path / "states"
    folder.mkdir()
    (tmp_path / "mine.txt").write_text("mine")
    for name in ("notes.foretune", "state_of_mind.foretune", ".notes.0123456789abcdef"):
        (folder / name).write_text(name)
    (folder / "state_000000000.foretune").symlink_to(tmp_path / "mine.txt")
    (folder / ".end.foretune.new").symlink_to(tmp_path / "mine.txt")
    before = left_in(folder)
    with pytest.warns(UserWarning, match="state_000000000.foretune is no file of ReverseOnDisk"):
        ft.ReverseOnDisk(folder, segment=2)(problem, hparams)
    aside = {"state_000000000.foretune": "state_000000000.foretune.damaged"}
    assert left_in(folder) == sorted(aside.get(name, name) for name in before)
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert (folder / "notes.foretune").read_text() == "notes.foretune"


def test_what_a_kill_left_half_written_is_removed(tmp_path):
    problem, hparams = regression(steps=10)
    (tmp_path / ".state_000000002.foretune.0123456789abcdef").write_text("half")
    ft.ReverseOnDisk(tmp_path, segment=2)(problem, hparams)
    assert left_in(tmp_path) == []


def test_the_segment_follows_the_memory(monkeypatch):
    s = {"w": jnp.zeros(250)}  # 1000 bytes
    for free, length in ((2e9, 100), (2e5, 50), (2.0, 1)):
        monkeypatch.setattr(disk, "free_bytes", lambda free=free: free)
        assert ft.ReverseOnDisk("x")._length(10_000, s) == length
    assert ft.ReverseOnDisk("x", segment=30)._length(20, s) == 20


def test_what_it_cannot_do_is_said(tmp_path):
    problem, hparams = regression(steps=4)
    with pytest.raises(TypeError, match=r"jax\.jit.*segments"):
        jax.jit(lambda h: ft.ReverseOnDisk(tmp_path)(problem, h).grad)(hparams)
    with pytest.raises(TypeError, match=r"`ReverseOnDisk\(folder\)\(problem, hparams\)`"):
        ft.ReverseOnDisk(problem)
    with pytest.raises(ValueError, match="the path has no name"):
        ft.ReverseOnDisk("")
    nan = {**hparams, "lr": hparams["lr"] * 1e30}
    with pytest.raises(ft.NonFiniteError):
        ft.ReverseOnDisk(tmp_path)(problem, nan)

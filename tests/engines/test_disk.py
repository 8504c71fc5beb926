"""Reverse mode with states on a disk: the same result, damage that is told, calls that continue."""

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


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("segment", [3, 4, None])
def test_it_equals_states_on_the_device(segment, tmp_path):
    problem, hparams = regression(steps=9, dtype=np.float64)
    found = ft.ReverseOnDisk(tmp_path / "new", segment=segment)(problem, hparams)
    expected = ft.Reverse()(problem, hparams)
    assert_trees_close(found.grad, expected.grad, 1e-12)
    assert_trees_close(found.value, expected.value, 1e-14)
    assert_trees_close(found.state.params, expected.state.params, 1e-14)
    assert not list((tmp_path / "new").iterdir())  # nothing is left behind


@pytest.mark.usefixtures("x64")
@pytest.mark.second_tier
def test_keys_counters_starts_and_several_objectives(tmp_path):
    problem, hparams = noisy(trajectory=False)
    found = ft.ReverseOnDisk(tmp_path, segment=4, store="states")(problem, hparams)
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

    monkeypatch.setattr(disk, program, dying)


def counted(monkeypatch, program):
    calls, whole = [], getattr(disk, program)

    def counting(*arguments):
        calls.append(None)
        return whole(*arguments)

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
    assert list(tmp_path.iterdir())
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
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_is_named_with_its_step(damage, tmp_path, monkeypatch):
    problem, hparams = regression(steps=10)
    engine = ft.ReverseOnDisk(tmp_path, segment=2)
    with monkeypatch.context() as patch:
        killed_at(patch, "_back", 1)
        with pytest.raises(Killed):
            engine(problem, hparams)
    path = tmp_path / "state_000000004.foretune"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flip" else content[:-3])
    why = {"flip": "its checksum is wrong", "cut": "bytes in place of", "remove": "missing"}
    with pytest.raises(
        OSError, match=f"state_000000004.foretune, the state before step 5.*{why[damage]}"
    ):
        engine(problem, hparams)


def test_a_disk_that_is_full_stops_the_call(tmp_path, monkeypatch):
    problem, hparams = regression(steps=10)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        ft.ReverseOnDisk(tmp_path, segment=2)(problem, hparams)


def test_the_segment_follows_the_memory():
    s = {"w": jnp.zeros(250)}  # 1000 bytes
    assert ft.ReverseOnDisk("x", memory="1GB")._length(10_000, s) == 100
    assert ft.ReverseOnDisk("x", memory="100kB")._length(10_000, s) == 50
    assert ft.ReverseOnDisk("x", memory=1)._length(10_000, s) == 1
    assert ft.ReverseOnDisk("x", segment=30, memory=1)._length(20, s) == 20


def test_what_it_cannot_do_is_said(tmp_path):
    problem, hparams = regression(steps=4)
    with pytest.raises(TypeError, match=r"jax\.jit.*segments"):
        jax.jit(lambda h: ft.ReverseOnDisk(tmp_path)(problem, h).grad)(hparams)
    with pytest.raises(TypeError, match="give a folder"):
        ft.ReverseOnDisk(problem)
    with pytest.raises(ValueError, match="store='most'"):
        ft.ReverseOnDisk(tmp_path, store="most")
    nan = {**hparams, "lr": hparams["lr"] * 1e30}
    with pytest.raises(ft.NonFiniteError):
        ft.ReverseOnDisk(tmp_path)(problem, nan)

"""The multitask experiment's folder: what is stored, said, and made of what is damaged."""

import functools
import types

import numpy as np
import pytest

from experiments.multitask import experiment as multitask
from experiments.runs import Phases, RunFolder


@pytest.fixture
def runner(tmp_path):
    rows = multitask.graph.Rows(np.zeros((2, 6, 3)), np.zeros((2, 6), int))
    splits = multitask.Splits(rows, np.zeros((2, 1, 3)), np.zeros((2, 1), int), 3, ["a", "b", "c"])
    folder = RunFolder(tmp_path / "run", kind="multitask", title="", settings={})
    return multitask.Runner(folder, "iris", splits, multitask.Settings(seeds=2))


def found(accuracy):
    return {"accuracy": np.array([accuracy, accuracy]), "note": "nothing"}


def test_a_stage_is_computed_once_and_said(runner, capfd):
    once = functools.partial(runner.once, "p-norm, p = 4/3", "folds", phases=Phases(17, done=3))
    assert once(lambda: found(0.5))["accuracy"].tolist() == [0.5, 0.5]
    assert once(lambda: found(0.7))["accuracy"].tolist() == [0.5, 0.5]
    assert once(lambda: found(0.7))["note"] == "nothing"
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "[4/17] iris, p-norm, p = 4/3, folds"
    assert lines[1].startswith("  test accuracy 50.00 %")
    assert len(lines) == 2


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 cut off", None])
def test_a_damaged_stage_is_computed_again(runner, capfd, damage):
    once = functools.partial(runner.once, "STL", "folds", phases=Phases(17))
    once(lambda: found(0.5))
    path = runner.stage("STL", "folds")
    path.write_bytes(path.read_bytes()[:-40] if damage is None else damage)
    assert once(lambda: found(0.7))["accuracy"].tolist() == [0.7, 0.7]
    assert f"note: {path} cannot be read as .npz" in capfd.readouterr().err
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_stage_whose_writing_fails_is_not_there(runner, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    once = functools.partial(runner.once, "STL", "folds", phases=Phases(17))
    with monkeypatch.context() as patched:
        patched.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            once(lambda: found(0.5))
    assert not any(runner.stage("STL", "folds").parent.iterdir())
    assert once(lambda: found(0.7))["accuracy"].tolist() == [0.7, 0.7]


@pytest.mark.parametrize("kept", ["absent", "damaged", "whole"])
def test_a_descent_without_what_it_kept_begins_anew(runner, kept):
    directory = runner.folder.checkpoints / "iris,_STL,_folds,_none"
    (directory / "10").mkdir(parents=True)
    file = directory.with_name(f"{directory.name}-kept.npz")
    if kept != "absent":
        np.savez(file, values=np.zeros(3))
    if kept == "damaged":
        file.write_bytes(file.read_bytes()[:50])
    multitask.begin_anew_if_damaged(directory)
    assert directory.exists() == file.exists() == (kept == "whole")


@pytest.mark.parametrize("way", ["single", "folds"])
def test_an_interrupted_descent_is_not_stored(runner, monkeypatch, way):
    def interrupted(*_, **__):
        return types.SimpleNamespace(), types.SimpleNamespace(stopped="interrupted")

    for name in ("descend", "tune", "make_plan", "joined"):
        monkeypatch.setattr(multitask.graph, name, interrupted)
    monkeypatch.setattr(multitask.Runner, "callbacks", lambda *_: lambda phase: [])
    compute = functools.partial(getattr(runner, way), "HMTL")
    with pytest.raises(KeyboardInterrupt):
        runner.once("HMTL", way, compute, Phases(1))
    assert not runner.stage("HMTL", way).exists()

"""The experiment of few-shot learning, on letters made up here."""

import json

import jax
import numpy as np
import pytest

from experiments.fewshot import experiment, tasks
from experiments.fewshot import page as page_of
from foretune.report import RunError

SIZE = experiment.QUERIES + 1  # images of a class
TINY = experiment.Settings(
    methods=(experiment.MAML, experiment.PROTOTYPES), sizes=((2, 1),), inner=(), steps=3, tasks=2,
    widths=(2,), test=4, quick=True,
)  # fmt: skip


def letters(path, classes, scripts, images=SIZE, seed=0):
    """Write classes of images with a bright square at a place of each class's own."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 60, (classes, images, 28, 28), dtype=np.uint8)
    for i, (row, column) in enumerate(rng.integers(0, 18, (classes, 2))):
        x[i, :, row : row + 10, column : column + 10] = 255
    np.savez(path, x=x, script=np.arange(classes) % scripts)
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FORETUNE_DATA", str(tmp_path))
    (tmp_path / "glyphs").mkdir()
    letters(tmp_path / "glyphs/background.npz", 12, 4)
    letters(tmp_path / "glyphs/test.npz", 4, 2, seed=1)
    return tmp_path


@pytest.mark.second_tier
def test_a_run_compares_and_continues(folder, monkeypatch):
    page = experiment.run(folder / "out", TINY)
    result = json.loads((folder / "out/result.json").read_text())
    accuracy, by_steps, rates = result["tables"]
    names = [row[0] for row in accuracy["rows"]]
    assert set(names) == {*TINY.methods, "pretrained, own head", "pretrained, nearest mean"}
    assert dict(row[:2] for row in accuracy["rows"])[experiment.MAML] == 5
    assert [row[:2] for row in by_steps["rows"]] == [[experiment.MAML, 5]]
    assert {"layer 1", "head"} <= {row[4] for row in rates["rows"]}
    best = max(row[2] for row in accuracy["rows"] if row[0] in page_of.OURS)
    assert result["headline"].startswith(f"2 ways, 1 shot: {float(best.split()[0]):.1f} %")
    assert "Test task 3" in page.read_text()
    (folder / "out/result.json").unlink()
    monkeypatch.setattr(
        experiment, "found_in", None
    )  # all parts are there: nothing is learnt again
    assert experiment.run(folder / "out", TINY) == page
    other = letters(folder / "mine.npz", 3, 1, seed=2)
    with pytest.raises(RunError, match="settings"):  # of another run
        experiment.run(folder / "out", TINY._replace(data=str(other)))


@pytest.mark.second_tier
def test_classes_of_a_file_are_tested(folder):
    other = letters(folder / "mine.npz", 3, 1, seed=2)
    paths = tasks.files(str(other))
    np.testing.assert_array_equal(tasks.read(*paths).test, np.load(other)["x"])
    cell = experiment.Cell(experiment.PROTOTYPES, 2, 1, 0, 0)
    found = experiment.found_in(cell, TINY._replace(steps=30, tasks=4, test=20), paths)
    assert found["accuracy"][experiment.PROTOTYPES]["mean"] > 0.7


@pytest.mark.second_tier
@pytest.mark.parametrize("method", [experiment.MEANS, experiment.FIRST, experiment.HEAD])
def test_each_method_has_a_gradient_in_all_that_it_learns(method, folder):
    size = tasks.Size(2, 1, 3)
    made = experiment.made(experiment.Cell(method, 2, 1, 3, 0), size, (2,), jax.random.key(0))
    pairs = tasks.sampled(jax.random.key(1), tasks.read(*tasks.files(None)).train, size)
    value, grad, _ = made.engine(made.problem(*pairs), made.start)
    assert np.isfinite(value)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(grad))


def test_a_task_has_each_class_and_no_image_twice(folder):
    x = np.arange(5 * 12, dtype=np.uint8).reshape(5, 12, 1, 1)
    support, query = tasks.sampled(jax.random.key(0), x, tasks.Size(3, 2, 4))
    assert [np.bincount(y).tolist() for _, y in (support, query)] == [[2] * 3, [4] * 3]
    pixels = [np.round(255 * np.asarray(x)).ravel() for x, _ in (support, query)]
    assert len(np.unique(np.concatenate(pixels))) == 18
    for pixel, (_, y) in zip(pixels, (support, query), strict=True):
        assert all(len(np.unique(pixel[y == c] // 12)) == 1 for c in range(3))


def test_scripts_are_held_out(folder):
    found = tasks.read(*tasks.files(None))
    assert (len(found.train), len(found.validation), len(found.test)) == (6, 6, 4)


def test_what_is_missing_is_said(folder, monkeypatch):
    with pytest.raises(RunError, match=r"absent\.npz is not there"):
        experiment.run(folder / "out", TINY._replace(data="absent.npz"))
    np.savez(folder / "odd.npz", x=np.zeros((3, 4)))
    with pytest.raises(RunError, match="expected uint8, classes x images x h x w"):
        experiment.run(folder / "out", TINY._replace(data=str(folder / "odd.npz")))
    with pytest.raises(RunError, match="20 ways, 1 shot need 20 classes of 11 images"):
        experiment.run(folder / "out", TINY._replace(sizes=((20, 1),)))
    monkeypatch.setenv("FORETUNE_DATA", str(folder / "absent"))
    with pytest.raises(RunError, match=r"background\.npz is not there"):
        experiment.run(folder / "out", TINY)

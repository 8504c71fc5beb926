"""The language experiment, on texts made up here."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import foretune as ft
from experiments.language import experiment, methods, mixtures, text
from experiments.language.model import Language, Size, drawn, losses, schedule
from foretune.report import RunError

from ..conftest import setting

TINY = Size(layers=1, width=8, heads=1, context=8, batch=16, steps=40)


@pytest.fixture
def folder(tmp_path):
    """Sources that count upwards, count downwards, and do neither; the target counts upwards."""
    rng = np.random.default_rng(0)
    up = np.arange(20_000) % 26 + 97
    for name, letters in {
        "up": up,
        "down": up[::-1],
        "noise": rng.integers(97, 123, 30_000),
    }.items():
        (tmp_path / f"{name}.txt").write_bytes(letters.astype(np.uint8).tobytes())
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "more.txt").write_bytes(up.astype(np.uint8).tobytes() * 2)
    return tmp_path


def read(folder):
    return text.read(str(folder), str(folder / "target" / "more.txt"))


def test_what_is_read(folder):
    found = read(folder)
    assert found.names == ("down", "noise", "up")
    assert found.target == "more"
    np.testing.assert_allclose(found.sizes, [2 / 7, 3 / 7, 2 / 7])
    assert bytes(found.bytes[found.first[2] :][:3]) == b"abc"
    taken = text.read(str(folder), "up")  # a source as the target is no source
    assert taken.names == ("down", "noise")
    assert len(taken.validation) == len(taken.test) == 10_000


def test_what_is_missing_is_said(folder, monkeypatch):
    monkeypatch.delenv("FORETUNE_DATA", raising=False)
    with pytest.raises(RunError, match="FORETUNE_DATA is not set"):
        text.read()
    with pytest.raises(RunError, match="no such folder"):
        text.read(str(folder / "absent"))
    with pytest.raises(RunError, match=r"name the target by --target, one of down, noise, up"):
        text.read(str(folder))
    with pytest.raises(RunError, match="neither a source nor a file"):
        text.read(str(folder), "sideways")
    (folder / "brief.txt").write_text("brief")
    with pytest.raises(RunError, match="brief has 5 bytes"):
        read(folder)
    (folder / "brief.txt").unlink()
    with pytest.raises(RunError, match="no multiple of --heads 3"):
        experiment.check(experiment.Settings(heads=3), read(folder))


def test_windows_are_drawn_by_the_mixture():
    share = jnp.array([0.5, 0.0, 0.25, 0.25])
    draws = jax.random.randint(jax.random.key(0), (100, 16), 0, 2**30)
    counts = np.array([np.bincount(drawn(share, d), minlength=4) for d in draws])
    assert np.all(np.abs(counts - 16 * np.asarray(share)) <= 1)
    assert np.all(counts[:, 1] == 0)


def test_the_derivative_in_the_mixture_is_that_of_the_expected_loss(folder):
    language = Language(read(folder), TINY, 8, 8)
    params = language.params(jax.random.key(0))
    hparams = language.start(0.01)
    batch = language.batches(jax.random.key(1)).batch(language.batches(jax.random.key(1)).xs[0])
    value, grad = jax.value_and_grad(lambda h: language.loss(params, h, batch))(hparams)
    k = np.asarray(drawn(jnp.full(3, 1 / 3), batch[1][0]))
    each = losses(params, language.sources.windows(k, batch[1][1], TINY.context), TINY.heads)
    np.testing.assert_allclose(value, np.mean(each), rtol=1e-6)
    # of sum_k p_k L_k with p = w / sum w, and L_k from the windows of source k
    expected = [np.sum(each[k == s]) / 16 - np.mean(each) / 3 for s in range(3)]
    np.testing.assert_allclose(grad["sources"], expected, rtol=1e-5, atol=1e-6)
    weighted = jax.value_and_grad(lambda h: language.loss(params, h, batch, evenly=True))(hparams)
    np.testing.assert_allclose(weighted[0], value, rtol=1e-6)
    np.testing.assert_allclose(weighted[1]["sources"], grad["sources"], rtol=1e-5, atol=1e-6)


def test_the_schedule():
    t = np.arange(100)
    plain = schedule(jnp.full(6, 0.1), t, 100)
    assert np.argmax(plain) < 12
    assert plain[-1] < 1e-3
    np.testing.assert_allclose(schedule(jnp.full(6, 0.3), t, 100), 3 * plain, rtol=1e-5)


def test_gradients_are_kept_where_they_fit(folder, monkeypatch):
    files: Any = SimpleNamespace()
    task = methods.Task(Language(read(folder), TINY, 8, 8), files, 2, 3, 1.0)
    assert methods.engine(task) == ft.Reverse(store="gradients")
    monkeypatch.setattr(methods, "MOST_KEPT", 1)  # not even a gradient
    assert methods.engine(task) == ft.Reverse(store="segments")


def test_the_best_of_a_few_is_that_in_the_mean_of_several_trainings(folder):
    language = Language(read(folder), TINY, 8, 8)
    points = [language.start(rate) for rate in (1e-4, 2e-2, 1e-5)]
    best, value, trainings = methods.best_of(language, points, seed=0, times=3)
    assert (best, trainings) == (1, 9)
    each = language.train(3 * [points[1]], 0, [50, 51, 52])[0]
    assert value == pytest.approx(np.mean(each), rel=1e-5)
    assert np.ptp(each) > 1e-4


@pytest.mark.second_tier
def test_shortcuts_find_the_source_that_is_like_the_target(folder):
    language = Language(read(folder), TINY._replace(steps=80), 64, 8)
    found = mixtures.alignment(language, language.start(0.02), seed=0)
    assert all(np.argmax(mixture) == 2 for mixture in found)
    assert found[0][2] < found[2][2]  # a larger step goes further
    for mixture in mixtures.excess_loss(language, language.start(0.02), seed=0):
        np.testing.assert_allclose(mixture.sum(), 1, rtol=1e-5)


@pytest.mark.second_tier
def test_programs_are_kept_where_there_is_a_folder_for_them(tmp_path, monkeypatch):
    pooch = pytest.importorskip("pooch")
    monkeypatch.setattr(pooch, "os_cache", lambda name: str(tmp_path / name))
    with setting(jax_compilation_cache_dir=None):
        experiment.keep_programs()
        kept = jax.config.values["jax_compilation_cache_dir"]
    assert kept == str(tmp_path / "foretune" / "compiled")
    monkeypatch.setitem(sys.modules, "pooch", None)  # not installed
    with setting(jax_compilation_cache_dir=None):
        experiment.keep_programs()
        assert jax.config.values["jax_compilation_cache_dir"] is None


def test_a_run_compares_and_continues(folder, monkeypatch):
    out = folder / "out"
    sizes = {name: getattr(TINY, name) for name in Size._fields}
    settings = experiment.Settings(
        data=str(folder), target="up", seeds=1, outer=2, validation=16, test=16, again=1,
        transfer=2, **sizes,
    )  # fmt: skip
    page = experiment.run(out, settings)
    result = json.loads((out / "result.json").read_text())
    values = {row["method"]: row for row in result["values"]}
    assert {"uniform", "by size", "noise alone", "TPE", "foretune, descent"} <= set(values)
    descent = values["foretune, descent"]
    assert len(descent["values"]) == len(descent["above the end"]) == 3
    # a search has as many trainings as the descent took the time of, the start first
    start = methods.as_arrays(values["uniform"]["hparams"])
    read_again = text.read(str(folder), "up")
    first = methods.train(Language(read_again, settings.size, 16, 16), [start], 0)
    assert values["TPE"]["values"][:1] == pytest.approx(first, rel=1e-4)
    assert values["TPE"]["trainings"] == values["random search"]["trainings"]
    assert "The same mixtures in a longer training" in page.read_text()
    for stage in ("result.json", "stages/TPE-0.json"):
        (out / stage).unlink()
    monkeypatch.setattr("experiments.language.searches.train", None)  # its trials are there
    assert experiment.run(out, settings) == page

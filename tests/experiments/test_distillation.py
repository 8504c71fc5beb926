"""The experiment of distilled data, on images made up here."""

import json

import jax
import numpy as np
import pytest

from experiments.distillation import distil, experiment

TINY = experiment.Settings(
    each=(1,), stages=((2, 3), (3, 2)), width=2, draws=2, batch=8, judges=2, quick=True
)


def images(count, seed):
    """Return images with a bright row at a height of each class's own, and their classes."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % 10
    x = rng.integers(0, 60, (count, 28, 28, 1), dtype=np.uint8)
    for i, c in enumerate(y):
        x[i, 2 * c : 2 * c + 4] = 255
    return x, y.astype(np.int32)


DATA = {name: images(count, i) for i, (name, count) in enumerate(
    {"train": 60, "held": 20, "test": 40}.items()
)}  # fmt: skip


@pytest.mark.second_tier
def test_a_run_compares_and_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "split", lambda name, quick: DATA)
    kinds = {"narrow": distil.perceptron(4), "wide": distil.perceptron(8)}
    monkeypatch.setattr(experiment, "architectures", lambda width: kinds)
    page = experiment.run(tmp_path / "out", TINY)
    result = json.loads((tmp_path / "out/result.json").read_text())
    lengths, others, _ = result["tables"]
    assert [row[:2] for row in lengths["rows"]] == [[1, "2"], [1, "3"]]
    assert others["columns"] == ["network", "learnt", experiment.RANDOM, experiment.NEAREST]
    (record,) = result["values"]
    assert len(record["accuracy"]["3"]) == TINY.judges
    assert "Published with one image of each class" in page.read_text()
    assert (tmp_path / "out/figures/images-1.png").is_file()
    (tmp_path / "out/result.json").unlink()
    monkeypatch.setattr(experiment, "learnt", None)  # all parts are there: nothing is learnt again
    assert experiment.run(tmp_path / "out", TINY) == page


@pytest.mark.second_tier
def test_images_are_learnt_that_teach_a_network():
    network = distil.perceptron(16)
    x, y = distil.chosen(DATA["train"], 1, experiment.RANDOM, 0)
    hparams = distil.start(x, y, 5, 0.01)
    stage = distil.Stage(5, 40)
    learnt, errors = distil.distilled(
        network, DATA["train"], hparams, stage, jax.random.key(0), draws=2, batch=32, rate=0.05
    )
    judged, keys = distil.judge(network, 5), jax.random.split(jax.random.key(1), 4)
    before, after = (judged(h, DATA["test"], keys).mean() for h in (hparams, learnt))
    assert after > before + 0.1
    assert np.mean(errors[-5:]) < np.mean(errors[:5])


def test_real_images_are_chosen_by_class():
    x, y = distil.chosen(DATA["train"], 2, experiment.NEAREST, 0)
    assert y.tolist() == [c for c in range(10) for _ in range(2)]
    one, _ = distil.chosen(DATA["train"], 1, experiment.NEAREST, 0)
    mean = np.mean(DATA["train"][0][::10], 0) / 255
    distances = [np.sum((z / 255 - mean) ** 2) for z in DATA["train"][0][::10]]
    assert np.sum((one[0] - mean) ** 2) == pytest.approx(min(distances), rel=1e-4)
    assert x.max() <= 1


def test_a_network_of_convolutions_learns_from_images():
    network = distil.convolutional_network(2, layers=2)
    weights = network.draw(jax.random.key(0))
    assert network.logits(weights, DATA["train"][0][:3] / np.float32(255)).shape == (3, 10)


def test_more_steps_go_on_with_the_last_rates():
    hparams = distil.start(*distil.chosen(DATA["train"], 1, experiment.RANDOM, 0), 3, 0.1)
    longer = distil.longer(hparams, 5)
    np.testing.assert_allclose(np.exp(longer["log"]), 0.1, rtol=1e-5)
    assert len(longer["log"]) == 5

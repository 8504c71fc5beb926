"""The experiment with human label noise, on predictions made up here."""

import json

import numpy as np
import pytest

from experiments.human import experiment
from foretune.report import RunError


def predictions(path, n=300, seed=0):
    """Write predictions of a network that takes class 0 for class 1 at times; people do as well."""
    rng = np.random.default_rng(seed)
    true = rng.integers(0, 3, n)
    given = np.where((true == 0) & (rng.random(n) < 0.4), 1, true)
    logits = 2 * np.eye(3)[true] + rng.normal(0, 0.8, (n, 3))
    logits[:, 1] += 1.2 * (true == 0)
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    np.savez(path, log_probs=log_p.astype(np.float16), given=given, true=true)
    return str(path)


@pytest.mark.second_tier
def test_a_run_compares_and_continues(tmp_path, monkeypatch):
    data = predictions(tmp_path / "made-up.npz")
    settings = experiment.Settings((data,), checked=(0, 100), seeds=1)
    page = experiment.run(tmp_path / "out", settings)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    without, with_checked = result["values"]
    assert "softmax regression" not in without["f1"]
    assert with_checked["f1"]["clean_labels"] >= with_checked["f1"]["self-confidence"]
    assert "Reliability" in page.read_text()
    (tmp_path / "out" / "result.json").unlink()
    monkeypatch.setattr(experiment, "score", None)  # all cells are there: nothing is scored again
    assert experiment.run(tmp_path / "out", settings) == page


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("FORETUNE_DATA", str(tmp_path))
    with pytest.raises(RunError, match="has no predictions"):
        experiment.run(tmp_path / "out", experiment.Settings())
    np.savez(tmp_path / "odd.npz", log_probs=np.zeros((3, 2)))
    with pytest.raises(RunError, match="lacks given, true"):
        experiment.run(tmp_path / "out", experiment.Settings((str(tmp_path / "odd.npz"),)))
    with pytest.raises(RunError, match="no such file"):
        experiment.run(tmp_path / "out", experiment.Settings(("absent.npz",)))

"""The hyper-cleaning experiment: its tables, its folder, and how it resumes."""

import functools
import json

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_iris
from sklearn.ensemble import RandomForestClassifier
from sklearn.naive_bayes import GaussianNB
from typer.testing import CliRunner

from experiments.__main__ import app
from experiments.cleaning import experiment as cleaning
from experiments.cleaning.splits import split
from experiments.datasets import load
from experiments.runs import RunFolder
from foretune import cli
from foretune.apps import LabelCleaner

runner = CliRunner()


def experiments(*arguments):
    return runner.invoke(app, [str(a) for a in arguments])


@pytest.mark.parametrize("command", ["cleaning", "multitask", "phones", "complexity"])
def test_help(command):
    result = experiments(command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_wrong_use():
    assert experiments("cleaning", "--seeds", "0").exit_code == 2
    unknown = experiments("cleaning", "--data", "nothing")
    assert unknown.exit_code == 1
    assert "give digits, mnist" in unknown.output.replace("\n", " ")


@pytest.mark.parametrize(
    "command",
    [
        "cleaning --seeds 100000000",
        "cleaning --steps 1000000000000",
        "cleaning --iterations 1000000000000",
        "cleaning --noise nan",
        "multitask --seeds 100000000",
        "multitask --per-class 1000000000000",
        "multitask --paper-steps 1000000000000",
        "phones --seeds 100000000",
        "phones --searches 100000000",
        "phones --frames 1000000000000",
        "phones --budget nan",
        "phones --budget inf",
        "phones --layers 1000000000",
        "complexity --steps 1000000000000",
        "complexity --rounds 1000000000",
        "complexity --seed -1",
        "complexity --network 10-100000000000-10",
        "complexity --network 10-\N{SUPERSCRIPT TWO}-10",
    ],
)
def test_absurd_numbers_are_wrong_use(command, tmp_path):
    refused = experiments(*command.split(), "--out", tmp_path / "run")
    assert refused.exit_code == 2, refused.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("cleaning --seeds 1000", "splits of 1,000 seeds need about"),
        ("multitask --seeds 1000", "1,000 splits of digits need about"),
        ("phones --frames 100000000", "100,000,000 frames of speech need about"),
        ("phones --quick --width 100000 --layers 100", "weights and their derivatives need about"),
        ("complexity --network 10-99999999-99999999-10", "weights need about"),
    ],
)
def test_what_no_memory_holds_is_refused_at_once(command, what, tmp_path, monkeypatch):
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 25_000}  # 100 MB
    monkeypatch.setattr("os.sysconf", sizes.__getitem__)
    refused = experiments(*command.split(), "--out", tmp_path / "run")
    assert refused.exit_code == 1, refused.output
    assert what in refused.output
    assert "this machine has 97.7 MiB: give smaller numbers" in refused.output
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    out = tmp_path_factory.mktemp("cleaning") / "run"
    options = ["--quick", "--seeds", 2, "--steps", 50, "--iterations", 60]
    forest = RandomForestClassifier(100, random_state=0)  # the whole ensemble takes minutes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cleaning, "LabelCleaner", functools.partial(LabelCleaner, forest))
        result = experiments("cleaning", *options, "--out", out)
    assert result.exit_code == 0, result.output
    return out


def test_the_experiment(experiment):
    result = json.loads((experiment / "result.json").read_text())
    accuracy, scores = result["values"]["accuracy"], result["values"]["scores"]
    assert list(accuracy) == [
        "Oracle", "Baseline", "DH-87", "DH-130", "DH-174", "DH-218", "LabelCleaner",
    ]  # fmt: skip
    assert all(len(a) == 2 for a in accuracy.values())
    assert np.mean(accuracy["Oracle"]) > np.mean(accuracy["Baseline"])
    assert np.mean([s["f1"] for s in scores["LabelCleaner"]]) > 0.8
    assert scores["DH-87"][0]["true_positives"] > 0
    records = [json.loads(line) for line in (experiment / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == 61 * 4 * 2
    assert {"validation_accuracy", "test_accuracy", "false_positives"} <= set(records[0])
    page = (experiment / "report.html").read_text()
    assert page.count("data:image/svg+xml") == 2
    assert page.count("data:image/png") == 24


def test_stacked_seeds_and_budgets_do_not_mix(tmp_path):
    dataset = load("digits")
    splits = [split(dataset, 0.5, seed) for seed in range(2)]
    settings = cleaning.Settings(seeds=2, steps=20, iterations=5)

    def weights(splits, budgets, name):
        folder = RunFolder(tmp_path / name, kind="cleaning", title=name, settings={})
        return cleaning.hyper_clean(splits, budgets, settings, folder)

    together = weights(splits, [87, 218], "together")
    alone = weights(splits[1:], [218], "alone")
    np.testing.assert_allclose(together[218][1], alone[218][0], atol=2e-5)


def test_an_interrupted_experiment_goes_on(tmp_path, monkeypatch):
    command = ["cleaning", "--quick", "--steps", 20, "--iterations", 12, "--out"]
    step = cleaning.Measure.step

    def interrupting(self, run):
        step(self, run)
        if run.step == 7:
            raise KeyboardInterrupt

    cleaner = functools.partial(LabelCleaner, GaussianNB())
    monkeypatch.setattr(cleaning, "LabelCleaner", cleaner)
    whole = experiments(*command, tmp_path / "whole")
    assert whole.exit_code == 0
    monkeypatch.setattr(cleaning.Measure, "step", interrupting)
    stopped = experiments(*command, tmp_path / "parts")
    assert stopped.exit_code == 130
    assert "continues from" in stopped.output.replace("\n", " ")
    unfinished = runner.invoke(cli.app, ["report", str(tmp_path / "parts")])
    assert unfinished.exit_code == 0
    assert "unfinished" in (tmp_path / "parts" / "report.html").read_text()
    monkeypatch.setattr(cleaning.Measure, "step", step)
    assert experiments(*command, tmp_path / "parts").exit_code == 0
    ends = [json.loads((tmp_path / n / "result.json").read_text()) for n in ("whole", "parts")]
    assert ends[0]["values"] == ends[1]["values"]
    files = [(tmp_path / n / "metrics.jsonl").read_text() for n in ("whole", "parts")]
    assert files[0] == files[1]


def test_your_own_data_in_the_experiment(tmp_path, monkeypatch):
    cleaner = functools.partial(LabelCleaner, GaussianNB())
    monkeypatch.setattr(cleaning, "LabelCleaner", cleaner)
    data = load_iris(as_frame=True).frame
    pd.concat([data] * 2).to_csv(tmp_path / "iris.csv", index=False)
    result = experiments(
        "cleaning", "--data", tmp_path / "iris.csv", "--quick", "--noise", 0.3,
        "--iterations", 5, "--out", tmp_path / "out",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    items = json.loads((tmp_path / "out" / "result.json").read_text())["gallery"]["items"]
    assert items[0]["image"] is None
    assert items[0]["row"]


class TestWhatARunSays:
    """In a log: at once, in plain lines."""

    @pytest.fixture
    def cleaning(self, monkeypatch):
        """The experiment, with one budget and a cleaner that has nothing to compile."""
        from experiments.cleaning import experiment as cleaning

        class Cleaner(cleaning.LabelCleaner):
            interrupted = True

            def __init__(self, random_state):
                pass

            def fit(self, x, given, *checked):
                if self.interrupted:
                    raise KeyboardInterrupt
                self.ranking_ = np.arange(len(given))
                self.suspects_ = self.ranking_ < 20
                self.probability_wrong_, self.suggested_ = np.full(len(given), 0.9), given
                return self

            def predict(self, x):
                return np.zeros(len(x), int)

        monkeypatch.setattr(cleaning, "LabelCleaner", Cleaner)
        monkeypatch.setattr(cleaning, "SHARES", (0.2,))
        return cleaning

    def test_the_cleaning_experiment(self, cleaning, tmp_path, capfd):
        settings = cleaning.Settings(seeds=1, steps=2, iterations=4)
        with pytest.raises(KeyboardInterrupt):
            cleaning.run(tmp_path / "run", settings)
        assert not (tmp_path / "run" / "result.json").exists()
        lines = capfd.readouterr().err.splitlines()
        assert lines[0].startswith("Data hyper-cleaning on digits: 50% of the training labels")
        assert "435 training examples (218 labels wrong), 435 checked, 870 test" in lines[1]
        assert "5 of 2 steps for the hypergradients, 4 final ones of 8 steps" in lines[2]
        assert lines[3].startswith("[1/4] DH-87, all at once: compiling, then 4 hyper-iterations")
        assert [line.partition(",")[0] for line in lines[4:9]] == [
            f"  {k} of 4 hyper-iterations" for k in range(5)
        ]
        assert lines[9].startswith("[2/4] LabelCleaner, seed 1 of 1")
        assert len(lines) == 10
        cleaning.LabelCleaner.interrupted = False  # the same command now finishes it
        cleaning.run(tmp_path / "run", settings)
        out, err = capfd.readouterr()
        assert "[3/4] final trainings: Oracle, Baseline, DH-87, LabelCleaner" in err
        assert "[4/4] tables, figures and report" in err
        assert not out  # which is for results
        assert (tmp_path / "run" / "result.json").exists()

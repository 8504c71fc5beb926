"""The command line: what it writes, what it says, and how it exits."""

import csv
import functools
import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_digits, load_iris
from typer.testing import CliRunner

from foretune import cli
from foretune.apps import LabelCleaner
from foretune.data import corrupt, load, read_table
from foretune.experiments import cleaning
from foretune.experiments._folder import RunError, RunFolder
from foretune.experiments._splits import split

runner = CliRunner()


def foretune(*arguments):
    return runner.invoke(cli.app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def iris(tmp_path_factory):
    folder = tmp_path_factory.mktemp("iris")
    data = load_iris(as_frame=True)
    frame = data.frame.rename(columns={"target": "species"}).sample(frac=1, random_state=0)
    frame["species"] = data.target_names[frame["species"]]
    train, checked = frame[:110].copy(), frame[110:]
    given, wrong = corrupt(train["species"].to_numpy(dtype=str), 0.2, np.random.default_rng(0))
    train["species"] = given
    train.to_csv(folder / "train.csv", index=False)
    checked.to_csv(folder / "checked.csv", index=False)
    return folder, wrong


@pytest.fixture(scope="module")
def cleaned(iris):
    folder, _ = iris
    out = folder / "out"
    result = foretune(
        "clean", folder / "train.csv", "--clean", folder / "checked.csv", "--label", "species",
        "--out", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return out, result


def test_clean_finds_and_lists_the_suspects(iris, cleaned):
    _, wrong = iris
    out, result = cleaned
    rows = list(csv.DictReader((out / "suspects.csv").read_text().splitlines()))
    found = np.array([int(row["row"]) for row in rows])
    assert [int(row["rank"]) for row in rows] == list(range(1, len(rows) + 1))
    confidence = [float(row["confidence"]) for row in rows]
    assert confidence == sorted(confidence, reverse=True)
    assert wrong[found].mean() > 0.8
    assert wrong[found].sum() > 0.8 * wrong.sum()
    assert all(row["given"] != row["suggested"] for row in rows[:5])
    weights = list(csv.DictReader((out / "weights.csv").read_text().splitlines()))
    assert len(weights) == 110
    assert sum(int(row["suspect"]) for row in weights) == len(rows)
    assert "labels are suspicious" in result.output
    assert str(out / "report.html") in result.output.replace("\n", "")


def test_the_run_folder(cleaned):
    out, _ = cleaned
    config = json.loads((out / "config.json").read_text())
    assert config["kind"] == "clean"
    assert config["settings"]["label"] == "species"
    assert {"python", "jax", "foretune"} <= set(config["versions"])
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == list(range(31))
    assert (out / "figures" / "weights.svg").exists()
    page = (out / "report.html").read_text()
    assert "Suspicious labels in train.csv" in page
    assert "virginica" in page


def test_clean_again_gives_the_same_and_other_settings_are_refused(iris, cleaned):
    folder, _ = iris
    out, _ = cleaned
    before = (out / "suspects.csv").read_text()
    command = ["clean", folder / "train.csv", "--clean", folder / "checked.csv", "--out", out]
    again = foretune(*command, "--label", "species")
    assert again.exit_code == 0
    assert (out / "suspects.csv").read_text() == before
    other = foretune(*command, "--label", "species", "--seed", "5")
    assert other.exit_code == 1
    assert "other settings (seed: 0 there, 5 now)" in other.output.replace("\n", " ")


def test_images_have_a_gallery(tmp_path):
    digits = load_digits()
    given, _ = corrupt(digits.target[:200], 0.2, np.random.default_rng(0))
    np.savez(tmp_path / "train.npz", images=digits.images[:200], y=given)
    np.savez(tmp_path / "checked.npz", images=digits.images[200:260], y=digits.target[200:260])
    result = foretune(
        "clean", tmp_path / "train.npz", "--clean", tmp_path / "checked.npz",
        "--out", tmp_path / "out", "--steps", 10, "--iterations", 4,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    gallery = json.loads((tmp_path / "out" / "result.json").read_text())["gallery"]
    assert gallery["items"]
    assert all((tmp_path / "out" / item["image"]).exists() for item in gallery["items"])


@pytest.mark.parametrize(
    ("train", "checked", "message"),
    [
        ("a,label\n1,x\n2,y\n3,x\n", None, "no such file"),
        ("", "a,label\n1,x\n2,y\n", "train.csv is empty"),
        ("a,label\n1,x\n2,y\n3,x\n", "a,label\n1,z\n2,y\n", "labels that y does not have: 'z'"),
        ("a,label\n1,x\n,y\n3,x\n", "a,label\n1,x\n2,y\n", "missing or infinite numbers"),
        ("a,label\n1,x\n2,y\n3,x\n", "a,label\n1,x\n", "1 checked examples for 2 classes"),
        ("a,label\n1,x\n2,x\n3,x\n", "a,label\n1,x\n2,x\n", "only one class, 'x'"),
        ("a,label\n1,x\n2,y\n3,x\n", "b,label\n1,x\n2,y\n", "in one only: a, b"),
    ],
)
def test_bad_files_give_a_message_and_no_traceback(tmp_path, train, checked, message):
    (tmp_path / "train.csv").write_text(train)
    if checked is not None:
        (tmp_path / "checked.csv").write_text(checked)
    arguments = ["clean", tmp_path / "train.csv", "--clean", tmp_path / "checked.csv"]
    result = foretune(*arguments, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert message in result.output.replace("\n", " ")
    assert "Traceback" not in result.output
    assert not isinstance(result.exception, ValueError)
    debug = foretune(*arguments, "--out", tmp_path / "out", "--debug")
    assert debug.exit_code == 1
    assert not isinstance(debug.exception, SystemExit)


def test_wrong_use():
    assert foretune("clean", "a.csv").exit_code == 2
    assert foretune("clean", "a.csv", "--clean", "b.csv", "--image", "28").exit_code == 2
    assert foretune("run", "cleaning", "--seeds", "0").exit_code == 2
    assert foretune("report", "no-such-folder").exit_code == 1
    unknown = foretune("run", "cleaning", "--data", "nothing")
    assert unknown.exit_code == 1
    assert "give digits, mnist" in unknown.output.replace("\n", " ")


@pytest.mark.parametrize("command", [[], ["run"], ["run", "cleaning"], ["clean"], ["report"]])
def test_help(command):
    result = foretune(*command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_as_a_module():
    result = subprocess.run(
        [sys.executable, "-m", "foretune", "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip().count(".") == 2


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    out = tmp_path_factory.mktemp("cleaning") / "run"
    options = ["--quick", "--seeds", 2, "--steps", 50, "--iterations", 60]
    result = foretune("run", "cleaning", *options, "--out", out)
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
    assert np.mean([s["f1"] for s in scores["LabelCleaner"]]) > 0.9
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
    command = ["run", "cleaning", "--quick", "--steps", 20, "--iterations", 12, "--out"]
    step = cleaning.Measure.step

    def interrupting(self, run):
        step(self, run)
        if run.step == 7:
            raise KeyboardInterrupt

    cleaner = functools.partial(LabelCleaner, "softmax", hyper_steps=2, steps=5)
    monkeypatch.setattr(cleaning, "LabelCleaner", cleaner)
    whole = foretune(*command, tmp_path / "whole")
    assert whole.exit_code == 0
    monkeypatch.setattr(cleaning.Measure, "step", interrupting)
    stopped = foretune(*command, tmp_path / "parts")
    assert stopped.exit_code == 130
    assert "goes on from there" in stopped.output.replace("\n", " ")
    unfinished = foretune("report", tmp_path / "parts")
    assert unfinished.exit_code == 0
    assert "unfinished" in (tmp_path / "parts" / "report.html").read_text()
    monkeypatch.setattr(cleaning.Measure, "step", step)
    assert foretune(*command, tmp_path / "parts").exit_code == 0
    ends = [json.loads((tmp_path / n / "result.json").read_text()) for n in ("whole", "parts")]
    assert ends[0]["values"] == ends[1]["values"]
    files = [(tmp_path / n / "metrics.jsonl").read_text() for n in ("whole", "parts")]
    assert files[0] == files[1]


def test_your_own_data_in_the_experiment(tmp_path, monkeypatch):
    cleaner = functools.partial(LabelCleaner, "softmax", hyper_steps=2, steps=5)
    monkeypatch.setattr(cleaning, "LabelCleaner", cleaner)
    data = load_iris(as_frame=True).frame
    pd.concat([data] * 2).to_csv(tmp_path / "iris.csv", index=False)
    result = foretune(
        "run", "cleaning", "--data", tmp_path / "iris.csv", "--quick", "--noise", 0.3,
        "--iterations", 5, "--out", tmp_path / "out",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    items = json.loads((tmp_path / "out" / "result.json").read_text())["gallery"]["items"]
    assert items[0]["image"] is None
    assert items[0]["row"]


def test_run_folders_are_not_mixed(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(RunError, match=r"holds other files \(thesis.tex\)"):
        RunFolder(tmp_path, kind="cleaning", title="", settings={})
    folder = RunFolder(tmp_path / "new", kind="cleaning", title="", settings={"a": 1})
    RunFolder(folder.path, kind="cleaning", title="", settings={"a": 1})
    (folder.path / "config.json").write_text("{")
    with pytest.raises(RunError, match="is damaged"):
        RunFolder(folder.path, kind="cleaning", title="", settings={"a": 1})


def test_an_interrupted_fit_says_so(monkeypatch, iris):
    from foretune.apps import _noise

    original = _noise.minimize

    def interrupted(*arguments, **options):
        return original(*arguments, **options)._replace(stopped="interrupted")

    monkeypatch.setattr(_noise, "minimize", interrupted)
    x, y = load_iris(return_X_y=True)
    with pytest.warns(UserWarning, match="interrupted after 3 evaluations"):
        LabelCleaner("softmax", hyper_steps=2, steps=5, random_state=0).fit(x, y)


def test_what_is_refused_leaves_nothing_behind(iris, tmp_path):
    folder, _ = iris
    command = [
        "clean",
        folder / "train.csv",
        "--clean",
        folder / "checked.csv",
        "--label",
        "species",
    ]
    refused = foretune(*command, "--budget", 500, "--out", tmp_path / "new")
    assert refused.exit_code == 1
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine.txt").write_text("mine")
    assert foretune(*command, "--out", tmp_path).exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert foretune(*command, "--model", "forest").exit_code == 2


def test_a_row_number_is_noted(tmp_path):
    frame = load_iris(as_frame=True).frame[:100]
    frame.to_csv(tmp_path / "train.csv")
    with pytest.warns(UserWarning, match="may be a row number"):
        read_table(tmp_path / "train.csv", label="target")

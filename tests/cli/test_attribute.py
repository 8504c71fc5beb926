"""`foretune attribute`: what it writes, what it says, and how it resumes."""

import csv
import json

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_digits
from typer.testing import CliRunner

import foretune as ft
from foretune import cli
from foretune.apps import _explain

runner = CliRunner()


def foretune(*arguments):
    return runner.invoke(cli.app, [str(a) for a in arguments])


def read(path):
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    data = load_digits()
    np.savez(folder / "train.npz", images=data.images[:150], y=data.target[:150])
    np.savez(folder / "queries.npz", images=data.images[150:160], y=data.target[150:160])
    out = folder / "out"
    files = folder / "train.npz", folder / "queries.npz"
    result = foretune("attribute", *files, "--out", out, "--steps", 40, "--most", 3)
    assert result.exit_code == 0, result.output
    return files, out, result


def test_the_lists(digits):
    _, out, result = digits
    found = ft.Attribution.load(out / "scores.npz")
    assert found.scores.shape == (10, 150)
    rows = read(out / "most.csv")
    assert len(rows) == 10 * 2 * 3
    first = [row for row in rows if row["query"] == "0"]
    assert [int(row["row"]) for row in first[:3]] == found.top(3)[0].tolist()
    assert [int(row["row"]) for row in first[3:]] == found.bottom(3)[0].tolist()
    assert [row["effect"] for row in first] == 3 * ["helped"] + 3 * ["harmed"]
    helped = [row for row in rows if row["effect"] == "helped"]
    assert np.mean([row["label"] == row["row's label"] for row in helped]) > 0.8
    harmed = [row for row in rows if row["effect"] == "harmed"]
    assert np.mean([row["label"] != row["row's label"] for row in harmed]) > 0.5
    assert "10 queries" in result.output
    assert "40 steps" in result.output


def test_the_page_shows_images_beside_each_other(digits):
    _, out, _ = digits
    comparisons = json.loads((out / "result.json").read_text())["comparisons"]
    assert [len(group["items"]) for group in comparisons[0]["groups"]] == [1, 3, 3]
    assert all(
        (out / item["image"]).exists()
        for comparison in comparisons
        for group in comparison["groups"]
        for item in group["items"]
    )
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64") == 10 * 7
    assert "Helped most" in page


def test_the_same_command_shows_it_again_and_other_settings_are_refused(digits):
    files, out, _ = digits
    again = foretune("attribute", *files, "--out", out, "--steps", 40, "--most", 3)
    assert again.exit_code == 0
    assert "finished run" in again.output
    other = foretune("attribute", *files, "--out", out, "--steps", 30, "--most", 3)
    assert other.exit_code == 1
    assert "other settings (steps: 40 there, 30 now)" in other.output.replace("\n", " ")


@pytest.mark.second_tier
def test_an_interrupted_run_continues(digits, tmp_path, monkeypatch):
    files, out, _ = digits
    command = ["attribute", *files, "--out", tmp_path / "out", "--steps", 40, "--most", 3]
    write = _explain.write_most

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(_explain, "write_most", interrupt)
    stopped = foretune(*command)
    assert stopped.exit_code == 130
    assert "the same command continues" in stopped.output.replace("\n", " ")
    monkeypatch.setattr(_explain, "write_most", write)
    (part,) = (tmp_path / "out" / "parts").glob("queries_*.npz")
    written = part.stat().st_mtime_ns
    assert foretune(*command).exit_code == 0
    assert part.stat().st_mtime_ns == written
    assert (tmp_path / "out" / "most.csv").read_text() == (out / "most.csv").read_text()


@pytest.mark.second_tier
def test_tables_with_text_and_queries_without_labels(tmp_path):
    rng = np.random.default_rng(0)
    words = {"dog": "bark bone tail", "cat": "purr milk tail"}
    labels = rng.choice(list(words), 60)
    texts = [" ".join(rng.permutation(words[label].split())) + " <b>" for label in labels]
    frame = pd.DataFrame({"said": texts, "weight": rng.normal(size=60), "kind": labels})
    frame[:50].to_csv(tmp_path / "train.csv", index=False)
    frame[50:].drop(columns="kind").to_csv(tmp_path / "asked.csv", index=False)
    result = foretune(
        "attribute", tmp_path / "train.csv", tmp_path / "asked.csv", "--label", "kind",
        "--text", "said", "--model", "mlp", "--steps", 30, "--out", tmp_path / "out",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = read(tmp_path / "out" / "most.csv")
    assert {row["label"] for row in rows} == {"cat", "dog"}
    assert all(row["label"] == row["predicted"] for row in rows)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "&lt;b&gt;" in page
    assert "bark" in page
    assert "<b>" not in page


@pytest.mark.parametrize(
    ("train", "asked", "message"),
    [
        ("a,label\n1,x\n2,y\n", None, "no such file"),
        ("a,label\n1,x\n2,x\n", "a\n1\n", "2 rows have 1 labels, 'x'"),
        ("a,label\n1,x\n2,y\n", "a,label\n1,z\n", "does not have: 'z'"),
        ("a,label\n1,x\n2,y\n", "b,label\n1,x\n", "in one only: a, b"),
        ("a,b\n1,x\n2,y\n", "a\n1\n", "name it with --label COLUMN"),
        ("a,label\n1,x\n2,y\n", "a,label\n", "has no rows"),
    ],
)
def test_bad_files_give_a_message(tmp_path, train, asked, message):
    (tmp_path / "train.csv").write_text(train)
    if asked is not None:
        (tmp_path / "asked.csv").write_text(asked)
    files = tmp_path / "train.csv", tmp_path / "asked.csv"
    result = foretune("attribute", *files, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert message in result.output.replace("\n", " ")
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_labels_that_are_no_classes(tmp_path):
    frame = pd.DataFrame({"a": np.arange(20.0), "weight": np.linspace(3.3, 4.9, 20)})
    frame.to_csv(tmp_path / "train.csv", index=False)
    result = foretune("attribute", tmp_path / "train.csv", tmp_path / "train.csv", "--label", "weight",
                      "--out", tmp_path / "out")  # fmt: skip
    assert result.exit_code == 1
    assert "20 rows have 20 labels, '3.3' and others" in " ".join(result.output.split())

"""The command line: what it writes, what it says, and how it exits."""

import csv
import functools
import json
import signal
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_digits, load_iris
from sklearn.naive_bayes import GaussianNB
from typer.testing import CliRunner

from experiments.cleaning.noise import corrupt
from foretune import cli
from foretune.apps import LabelCleaner, _ensemble, _files
from foretune.apps._tables import Table, read_table
from foretune.report._folder import RunError, RunFolder

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
    doubt = [float(row["probability_wrong"]) for row in rows]
    assert doubt == sorted(doubt, reverse=True)
    assert wrong[found].mean() > 0.8
    assert wrong[found].sum() > 0.8 * wrong.sum()
    assert all(row["observed"] != row["suggested"] for row in rows[:5])
    train = pd.read_csv(iris[0] / "train.csv")
    own = [float(row["petal length (cm)"]) for row in rows]  # the row's own columns
    np.testing.assert_allclose(own, train["petal length (cm)"][found])
    left = pd.read_csv(out / "cleaned.csv")
    pd.testing.assert_frame_equal(left, train.drop(index=found).reset_index(drop=True)[[*left]])
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
    assert "holds a finished run" in again.output
    other = foretune(*command, "--label", "species", "--seed", "5")
    assert other.exit_code == 1
    assert "other settings (seed: 0 there, 5 now)" in other.output.replace("\n", " ")
    assert "holds a finished run" not in other.output


def test_changed_data_is_named(tmp_path):
    (tmp_path / "a.csv").write_text("1")
    (tmp_path / "b.csv").write_text("2")
    given = {
        "kind": "clean",
        "title": "",
        "files": [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")],
    }
    RunFolder(tmp_path / "run", settings={"rows": 1}, **given).close()
    RunFolder(tmp_path / "run", settings={"rows": 1}, **given).close()
    (tmp_path / "b.csv").write_text("3")
    with pytest.raises(RunError, match=r"other data: \S*b\.csv changed since\. Give another --out"):
        RunFolder(tmp_path / "run", settings={"rows": 2}, **given)


@pytest.fixture
def quick(monkeypatch):
    """Judge by a classifier that is trained at once."""
    cleaner = functools.partial(LabelCleaner, GaussianNB())
    monkeypatch.setattr(_files, "LabelCleaner", cleaner)


@pytest.mark.usefixtures("quick")
def test_clean_needs_no_trusted_rows(iris, tmp_path):
    folder, wrong = iris
    command = ["clean", folder / "train.csv", "--label", "species", "--out", tmp_path / "out"]
    result = foretune(*command)
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader((tmp_path / "out" / "suspects.csv").read_text().splitlines()))
    assert wrong[[int(row["row"]) for row in rows]].mean() > 0.5
    assert (
        "judged without trusted rows, each by models that have not seen its row: estimator ("
        in (tmp_path / "out" / "report.html").read_text()
    )


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("by", ["row", "number"])
def test_verified_rows_are_found_by_row_or_id(iris, tmp_path, by):
    folder, wrong = iris
    train = pd.read_csv(folder / "train.csv")
    train["number"] = [f"{i:03d}" for i in range(110)]  # as it is written, not as a number
    train.to_csv(tmp_path / "train.csv", index=False)
    rows = np.flatnonzero(wrong)[:3]
    verified = pd.DataFrame({"row": rows, "number": train["number"][rows], "species": "setosa"})
    verified.to_csv(tmp_path / "verified.csv", index=False)
    command = [
        *("clean", tmp_path / "train.csv", "--label", "species", "--relabel"),
        *("--checked", tmp_path / "verified.csv", "--out", tmp_path / "out"),
        *(("--id", "number") if by == "number" else ("--drop", "number")),
    ]
    result = foretune(*command)
    assert result.exit_code == 0, result.output
    weights = pd.read_csv(tmp_path / "out" / "weights.csv")
    given = train["species"][rows].to_numpy()
    np.testing.assert_array_equal(weights["weight"][rows], given == "setosa")
    np.testing.assert_array_equal(np.flatnonzero(weights["verified"]), rows)
    suspects = pd.read_csv(tmp_path / "out" / "suspects.csv")
    np.testing.assert_array_equal(suspects["verified"], suspects["row"].isin(rows))
    left = pd.read_csv(tmp_path / "out" / "cleaned.csv", dtype={"number": str})
    assert len(left) == 110
    assert (left["species"][rows] == "setosa").all()
    assert (left["species"] != train["species"]).sum() == weights["suspect"].sum()
    assert ("number" in left) == (by == "number")  # it comes back, though nothing is learnt from it
    if by == "number":
        assert left["number"].tolist() == train["number"].tolist()
        lists = pd.read_csv(tmp_path / "out" / "suspects.csv", dtype=str)
        assert set(lists["number"]) <= set(train["number"])
        items = json.loads((tmp_path / "out" / "result.json").read_text())["gallery"]["items"]
        assert items
        assert all(next(iter(item["row"])) == "number" for item in items)
        assert all(item["row"]["number"] == f"{item['index']:03d}" for item in items)


@pytest.mark.parametrize(
    ("verified", "options", "message"),
    [
        ("row,species\n500,setosa\n", [], "no row whose row is '500'"),
        ("row,species\n5,tulip\n", [], "labels that"),
        ("row,label\n5,setosa\n", [], "need 'row'"),
        ("row,species\n5,setosa\n", ["--id", "number"], "need 'number'"),
        ("number,species\n5,setosa\n", ["--id", "number"], "no column 'number'"),
    ],
)
def test_bad_verified_rows(iris, tmp_path, verified, options, message):
    (tmp_path / "verified.csv").write_text(verified)
    files = (iris[0] / "train.csv", "--checked", tmp_path / "verified.csv")
    out = ("--out", tmp_path / "out")
    result = foretune("clean", *files, "--label", "species", *options, *out)
    assert result.exit_code == 1
    assert message in result.output.replace("\n", " ")


@pytest.mark.usefixtures("quick")
def test_images_have_a_gallery(tmp_path):
    digits = load_digits()
    given, _ = corrupt(digits.target[:200], 0.2, np.random.default_rng(0))
    np.savez(tmp_path / "train.npz", images=digits.images[:200], y=given)
    np.savez(tmp_path / "checked.npz", images=digits.images[200:260], y=digits.target[200:260])
    result = foretune(
        "clean", tmp_path / "train.npz", "--clean", tmp_path / "checked.npz",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    gallery = json.loads((tmp_path / "out" / "result.json").read_text())["gallery"]
    assert gallery["items"]
    assert all((tmp_path / "out" / item["image"]).exists() for item in gallery["items"])
    with np.load(tmp_path / "out" / "cleaned.npz") as left:
        assert left["x"].shape == (len(left["y"]), 8, 8)
        assert len(left["y"]) < 200


@pytest.mark.second_tier
def test_text_of_few_words_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(_ensemble, "TREES", 20)
    words = {"dog": "bark bone tail", "cat": "purr milk tail"}
    labels = np.array(["dog", "cat"] * 30)
    frame = pd.DataFrame({"said": [words[label] for label in labels], "label": labels})
    frame["size"] = np.arange(60)
    frame.loc[:3, "label"] = ["cat", "dog", "cat", "dog"]
    frame.to_csv(tmp_path / "train.csv", index=False)
    result = foretune("clean", tmp_path / "train.csv", "--text", "said", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    items = json.loads((tmp_path / "out" / "result.json").read_text())["gallery"]["items"]
    assert items[0]["row"] == {"said": words[items[0]["suggested"]], "size": items[0]["index"]}


@pytest.mark.parametrize(
    ("train", "checked", "message"),
    [
        ("a,label\n1,x\n2,y\n3,x\n", None, "no such file"),
        ("", "a,label\n1,x\n2,y\n", "train.csv is empty"),
        ("a,label\n1,x\n2,y\n3,x\n", "a,label\n1,z\n2,y\n", "labels that y does not have: 'z'"),
        ("a,label\n1,x\ninf,y\n3,x\n", "a,label\n1,x\n2,y\n", "infinity"),
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
    assert foretune("clean", "a.csv", "--clean", "b.csv", "--image", "28").exit_code == 2
    absurd = foretune("attribute", "a.csv", "b.csv", "--steps=1000000000000")
    assert absurd.exit_code == 2
    assert "--steps" in absurd.output
    assert foretune("clean", "a.csv", "--clean", "b.csv", "--image", "²x2").exit_code == 2
    assert foretune("report", "no-such-folder").exit_code == 1


def test_a_report_of_checkpoints_is_refused(tmp_path):
    result = foretune("report", tmp_path)
    assert result.exit_code == 1
    which = "a folder of `foretune clean`, `foretune attribute` or of an experiment"
    assert which in result.output.replace("\n", " ")


@pytest.mark.parametrize("command", [[], ["clean"], ["attribute"], ["report"]])
def test_help(command):
    result = foretune(*command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_as_a_module():
    result = subprocess.run(
        [sys.executable, "-m", "foretune", "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip().count(".") == 2


def test_run_folders_are_not_mixed(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(RunError, match=r"holds other files \(thesis.tex\)"):
        RunFolder(tmp_path, kind="cleaning", title="", settings={})
    folder = RunFolder(tmp_path / "new", kind="cleaning", title="", settings={"a": 1})
    RunFolder(folder.path, kind="cleaning", title="", settings={"a": 1})
    (folder.path / "config.json").write_text("{")
    with pytest.raises(RunError, match="is damaged"):
        RunFolder(folder.path, kind="cleaning", title="", settings={"a": 1})


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
    refused = foretune(*command, "--text", "none", "--out", tmp_path / "new")
    assert refused.exit_code == 1
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine.txt").write_text("mine")
    assert foretune(*command, "--out", tmp_path).exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_row_number_is_noted(tmp_path):
    frame = load_iris(as_frame=True).frame[:100]
    frame.to_csv(tmp_path / "train.csv")
    with pytest.warns(UserWarning, match="may be a row number"):
        read_table(tmp_path / "train.csv", label="target")


@pytest.mark.usefixtures("quick")
def test_labels_are_listed_as_they_were_written(tmp_path):
    """01 and 1 are two classes, NA a third; the checked ones may be text in another format."""
    rng = np.random.default_rng(0)
    names = np.array(["01", "1", "NA"])
    rows = [(k, rng.normal(3 * k, 0.3), rng.normal()) for k in range(3) for _ in range(15)]
    lines = [f"{x},{z},{names[k]}" for k, x, z in rows]
    (tmp_path / "train.csv").write_text("\n".join(["a,b,label", *lines]) + "\n")
    frame = pd.DataFrame(rows[::5], columns=["label", "a", "b"])
    frame.assign(label=names[frame["label"]]).to_parquet(tmp_path / "checked.parquet")
    result = foretune(
        "clean", tmp_path / "train.csv", "--clean", tmp_path / "checked.parquet",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    weights = list(csv.DictReader((tmp_path / "out" / "weights.csv").read_text().splitlines()))
    assert [row["observed"] for row in weights] == [names[k] for k, _, _ in rows]
    assert {row["suggested"] for row in weights} <= set(names)


def test_a_spreadsheet_runs_nothing_in_the_lists(tmp_path):
    evil = ["=HYPERLINK(A1)", "+1+1", "-x", "@SUM(A1)", "\tx", "\rx"]
    plain = ["a=b", "-1", "+2.5e3", "'x", "", "-.5"]
    labels = np.array([*evil, *plain])
    cleaner = LabelCleaner()
    cleaner.ranking_, cleaner.suspects_ = np.arange(12), np.ones(12, bool)
    cleaner.suggested_ = labels
    cleaner.probability_wrong_, cleaner.weights_ = np.ones(12), np.zeros(12)
    folder = RunFolder(tmp_path / "run", kind="clean", title="", settings={})
    _files.write_lists(folder, cleaner, Table(np.zeros((12, 1)), labels, None, "a.npz"))
    for name in ("suspects.csv", "weights.csv"):
        with (folder.path / name).open(newline="") as file:
            rows = list(csv.DictReader(file))
        for column in ("observed", "suggested"):
            assert [row[column] for row in rows] == [*(f"'{label}" for label in evil), *plain]


@pytest.mark.usefixtures("quick")
def test_a_terminated_clean_is_unfinished_and_can_be_given_again(iris, tmp_path, monkeypatch):
    folder, _ = iris
    command = [
        *("clean", folder / "train.csv", "--clean", folder / "checked.csv", "--label", "species"),
        *("--out", tmp_path / "out"),
    ]
    fit = LabelCleaner.fit

    def terminated(self, *rows):
        signal.raise_signal(signal.SIGTERM)
        return fit(self, *rows)

    with monkeypatch.context() as patched:
        patched.setattr(LabelCleaner, "fit", terminated)
        stopped = foretune(*command)
    assert stopped.exit_code == 143, stopped.output
    assert "the same command continues" in stopped.output.replace("\n", " ")
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {".lock", "config.json", "figures"}
    again = foretune(*command)
    assert again.exit_code == 0, again.output
    assert (tmp_path / "out" / "suspects.csv").exists()


def test_measurements_are_no_classes(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=60), "price": rng.normal(size=60).round(3)})
    frame.to_csv(tmp_path / "prices.csv", index=False)
    result = foretune("clean", tmp_path / "prices.csv", "--label", "price")
    assert result.exit_code == 1
    assert "measurements, not classes" in result.output.replace("\n", " ")

    def check(labels):
        _files.check_classes(Table(np.zeros((len(labels), 1)), np.array(labels), None, "a.csv"))

    with pytest.raises(ValueError, match=r"a\.csv: the labels are 30 different numbers"):
        check([f"{i}.5" for i in range(30)])
    check([f"{i}.0" for i in range(30)])  # whole numbers
    check(["0.5", "1.5"] * 20)  # two classes
    check([f"v{i}" for i in range(30)])

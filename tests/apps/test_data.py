"""Data sets, label noise and tables: right content, and errors that name the file and the cure."""

import gzip
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.cleaning.noise import corrupt
from experiments.datasets import load
from foretune.apps._checks import plain_labels
from foretune.apps._tables import DataError, encoded, read_table, with_labels_alike


def test_digits():
    digits = load("digits")
    assert digits.x.shape == (1797, 64)
    assert digits.x.min() == 0
    assert digits.x.max() == 1
    assert set(digits.y) == set(range(10))


@pytest.mark.skipif(
    not (Path(os.environ.get("FORETUNE_DATA", "none")) / "mnist").is_dir(),
    reason="MNIST is not here: set FORETUNE_DATA to a folder with a subfolder mnist",
)
def test_mnist():
    mnist = load("mnist")
    assert mnist.x.shape == (70_000, 784)
    assert mnist.image_shape == (28, 28)
    assert np.bincount(mnist.y).min() > 6000


def test_mnist_that_is_not_there(tmp_path, monkeypatch):
    pooch = pytest.importorskip("pooch")

    def no_network(*arguments, **options):
        raise ConnectionError("no network")

    monkeypatch.setenv("FORETUNE_DATA", str(tmp_path))
    monkeypatch.setattr(pooch, "retrieve", no_network)
    monkeypatch.setattr(pooch, "os_cache", lambda name: str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"neither in FORETUNE_DATA/mnist nor in .*idx files"):
        load("mnist")


@pytest.mark.parametrize("what", ["not gzip", "cut off", "empty"])
def test_mnist_that_is_damaged(tmp_path, monkeypatch, what):
    cut = gzip.compress(b"not MNIST")[:-4]
    content = {"not gzip": b"not gzip", "cut off": cut, "empty": b""}[what]
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(content)
    monkeypatch.setenv("FORETUNE_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz is (damaged|not MNIST's)"):
        load("mnist")


def test_features_that_cannot_be_used(tmp_path, monkeypatch):
    (tmp_path / "cifar").mkdir()
    path = tmp_path / "cifar" / "cifar10-efficientnet-lite0.npz"
    monkeypatch.setenv("FORETUNE_DATA", str(tmp_path))
    arrays = {"x": np.zeros((4, 2)), "y": np.arange(4) % 2}
    for changes, message in (
        ({"y": np.array([{}] * 4, object)}, "cannot be read as .npz: Object arrays"),
        ({"y": np.zeros(3, int)}, "rows have shape"),
        ({"y": np.array(["a"] * 4)}, "expected integers"),
    ):
        np.savez(path, **(arrays | changes))
        with pytest.raises(DataError, match=f"lite0.npz.*{message}"):
            load("cifar10")
    np.savez(path, **arrays)
    (tmp_path / "cifar" / "cifar10-classes.txt").write_text("cat\n")
    with pytest.raises(DataError, match=r"cifar10-classes\.txt has 1 lines, and .* has 2 classes"):
        load("cifar10")
    (tmp_path / "cifar" / "cifar10-classes.txt").write_text("cat\ndog\n")
    assert load("cifar10").class_names == ["cat", "dog"]


def test_an_unknown_set():
    with pytest.raises(DataError, match="no data set 'imagenet': give digits, mnist"):
        load("imagenet")


@pytest.mark.parametrize("kind", ["symmetric", "pair"])
@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_corruption_changes_exactly_what_it_says(kind, rate):
    labels = np.array(["a", "b", "c", "d"] * 50)
    given, wrong = corrupt(labels, rate, np.random.default_rng(0), kind)
    assert wrong.sum() == round(rate * 200)
    np.testing.assert_array_equal(given != labels, wrong)
    if kind == "pair":
        following = dict(zip("abcd", "bcda", strict=True))
        assert all(following[a] == b for a, b in zip(labels[wrong], given[wrong], strict=True))


def test_corruption_refuses():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="rate=2"):
        corrupt(np.array([0, 1]), 2.0, rng)
    with pytest.raises(ValueError, match="kind='all'"):
        corrupt(np.array([0, 1]), 0.5, rng, "all")
    with pytest.raises(ValueError, match="one class"):
        corrupt(np.array([1, 1]), 0.5, rng)


FRAME = pd.DataFrame(
    {
        "size": [1.0, 2.0, 3.0, 4.0],
        "colour": ["red", "blue", "red", "green"],
        "note": ["a good cat", "a bad dog", "good cat", "bad dog"],
        "label": ["cat", "dog", "cat", "dog"],
    }
)


def write(folder, name, frame=FRAME):
    path = folder / name
    frame.to_csv(path, index=False) if name.endswith(".csv") else frame.to_parquet(path)
    return path


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_frames(tmp_path, name):
    table = read_table(write(tmp_path, name), drop=("note",))
    assert table.y.tolist() == ["cat", "dog", "cat", "dog"]
    unseen = FRAME.assign(colour="purple")
    other = read_table(write(tmp_path, f"b{name[1:]}", unseen), drop=("note",))
    matrix, odd = encoded([table, other])
    assert matrix.shape == (4, 4)  # size, and one column for each colour
    np.testing.assert_allclose(np.diff(matrix[:, 0]), 2 / np.sqrt(5))  # standardised
    np.testing.assert_array_equal(matrix[:, 1:].sum(1), 1)
    np.testing.assert_array_equal(odd[:, 1:], 0)
    np.testing.assert_array_equal(table.matrix(), matrix)


def test_named_text_is_taken_with_all_its_words(tmp_path):
    table = read_table(write(tmp_path, "a.csv"), drop=("colour", "size"))
    (matrix,) = encoded([table], ("note",))
    assert matrix.shape == (4, 5)  # a, bad, cat, dog, good
    assert matrix.nnz == 10


def test_arrays(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, images=np.zeros((3, 4, 4), np.uint8), labels=np.array([1, 2, 1]))
    table = read_table(path)
    assert table.x.shape == (3, 16)
    assert table.image_shape == (4, 4)
    np.savez(path, x=np.zeros((3, 16)), mine=np.array([1, 2, 1]))
    assert read_table(path, label="mine", image_shape=(4, 4)).image_shape == (4, 4)
    with pytest.raises(DataError, match="16 columns, and an image of 5x5 has 25"):
        read_table(path, label="mine", image_shape=(5, 5))


def make(folder, what):
    path = folder / ("a.npz" if what.startswith("npz") else "a.csv")
    match what:
        case "npz pickle":
            np.savez(path, x=np.array([[1], ["a"]], object), y=np.array([1, 2]))
        case "npz keys":
            np.savez(path, pictures=np.zeros((2, 2)), y=np.array([1, 2]))
        case "npz lengths":
            np.savez(path, x=np.zeros((3, 2)), y=np.array([1, 2]))
        case "npz words":
            np.savez(path, x=np.array([["a"], ["b"]]), y=np.array([1, 2]))
        case "npz damaged":
            path.write_bytes(b"not a zip file")
        case "npz cut off":
            np.savez(path, x=np.zeros((3, 2)), y=np.arange(3))
            path.write_bytes(path.read_bytes()[:-30])
        case "npz changed":
            np.savez_compressed(path, x=np.random.default_rng(0).random((50, 9)), y=np.arange(50))
            raw = bytearray(path.read_bytes())
            raw[200:220] = bytes(20)
            path.write_bytes(raw)
        case "npz array":
            with path.open("wb") as file:
                np.save(file, np.zeros(3))
        case "parquet cut off":
            path = write(folder, "a.parquet")
            path.write_bytes(path.read_bytes()[:-30])
        case "empty":
            path.write_bytes(b"")
        case "header":
            path.write_text("a,label\n")
        case "no label":
            path.write_text("a,b\n1,2\n")
        case "missing label":
            path.write_text("a,label\n1,x\n2,\n")
        case "ragged":
            path.write_text('a,label\n1,2\n1,2,3,4\n"')
        case "other":
            path = folder / "a.txt"
            path.write_text("hello")
        case "absent":
            path = folder / "none.csv"
    return path


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("npz pickle", "cannot be read as .npz"),
        ("npz keys", "holds pictures, y: it needs rows under one of x, X, data, images"),
        ("npz lengths", r"rows have shape \(3, 2\) and labels \(2,\)"),
        ("npz words", "expected numbers"),
        ("npz damaged", "cannot be read as .npz"),
        ("npz cut off", "cannot be read as .npz"),
        ("npz changed", "cannot be read as .npz"),
        ("npz array", "cannot be read as .npz"),
        ("parquet cut off", "cannot be read as .parquet"),
        ("empty", "is empty"),
        ("header", "has no rows"),
        ("no label", "columns a, b, none named label.*--label COLUMN"),
        ("missing label", "1 rows without a label, the first is row 1"),
        ("ragged", "cannot be read as .csv"),
        ("other", "give a .npz, .csv or .parquet file"),
        ("absent", "no such file"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, what, message):
    path = make(tmp_path, what)
    with pytest.raises(DataError, match=message) as caught:
        read_table(path)
    assert path.name in str(caught.value)


def test_columns_that_cannot_be_used(tmp_path):
    first = read_table(write(tmp_path, "a.csv"), drop=("note",))
    second = read_table(write(tmp_path, "b.csv", FRAME.drop(columns="size")), drop=("note",))
    with pytest.raises(DataError, match="in one only: size"):
        encoded([first, second])
    with pytest.raises(DataError, match="there is no column 'notes'"):
        encoded([first], ("notes",))
    with pytest.raises(DataError, match="no 'x' to drop"):
        read_table(tmp_path / "a.csv", drop=("x",))


def test_labels_of_a_csv_file_are_text_as_written(tmp_path):
    written = ["007", "01", "1", "None", "NA", "nan", "1.0", " a", "a", "TRUE"]
    lines = [f'{i},NA,"{label}"' for i, label in enumerate(written)]
    (tmp_path / "a.csv").write_text("\n".join(["x,word,label", *lines]))
    table = read_table(tmp_path / "a.csv")
    assert table.y.tolist() == written
    assert table.x["word"].isna().all()  # other columns are read as ever


@pytest.mark.parametrize("empty", ["", '""', "  "])
def test_an_empty_label_is_missing(tmp_path, empty):
    (tmp_path / "a.csv").write_text(f"x,label\n1,NA\n2,{empty}\n3,1\n")
    with pytest.raises(DataError, match=r"a\.csv has 1 rows without a label, the first is row 1:"):
        read_table(tmp_path / "a.csv")


def test_a_row_with_more_cells_than_the_header(tmp_path):
    """pandas would take the first cells for an index, and shift the label's column."""
    (tmp_path / "a.csv").write_text("x,label\n1,cat,5\n2,dog,6\n")
    with pytest.raises(DataError, match=r"a\.csv cannot .* more cells than the first line"):
        read_table(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (pd.array([3, 1, 2], "Int64"), [3, 1, 2]),
        ([1.5, 2.0, 1.5], [1.5, 2.0, 1.5]),
        ([True, False, True], [True, False, True]),
        (["01", "None", "1"], ["01", "None", "1"]),
        (pd.Categorical(["01", "1", "NA"]), ["01", "1", "NA"]),
    ],
)
def test_labels_of_a_parquet_file_keep_their_type(tmp_path, labels, expected):
    frame = pd.DataFrame({"x": [1.0, 2.0, 3.0], "label": labels})
    found = read_table(write(tmp_path, "a.parquet", frame)).y
    assert found.tolist() == expected
    assert found.dtype != object


@pytest.mark.parametrize("labels", [[1.0, np.nan], ["a", ""], [b"a", b""]])
def test_a_missing_label_of_an_array(tmp_path, labels):
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 3)), y=np.array(labels))
    with pytest.raises(DataError, match="1 rows without a label, the first is row 1:"):
        read_table(tmp_path / "a.npz")


def test_labels_of_two_files_are_compared_as_text_where_one_is_text(tmp_path):
    frame = pd.DataFrame({"x": [1.0, 2.0], "label": [1, 2]})
    text = read_table(write(tmp_path, "a.csv", frame))
    numbers = read_table(write(tmp_path, "a.parquet", frame))
    for pair in ((text, numbers), (numbers, text)):
        assert [table.y.tolist() for table in with_labels_alike(*pair)] == [["1", "2"]] * 2
    assert with_labels_alike(numbers, numbers)[0].y.tolist() == [1, 2]


def test_numbers_and_text_among_labels():
    mixed = np.array(["a", 1, "1"], object)
    with pytest.raises(ValueError, match="y has numbers and text, 1 in row 1 and 'a' in row 0"):
        plain_labels(mixed, "y")
    with pytest.raises(ValueError, match="y has 1 rows without a label, the first is row 1"):
        plain_labels(np.array(["a", pd.NA], object), "y")

# ruff: noqa: E501
# fmt: off
"""Files that are not there, damaged, or not what they are said to be."""

import gzip
import io
import json
import os
from pathlib import Path

import numpy as np

from .given import NAN, file, folder


def npz(**arrays):
    raw = io.BytesIO()
    np.savez(raw, **arrays)
    return raw.getvalue()


def compressed(**arrays):
    raw = io.BytesIO()
    np.savez_compressed(raw, **arrays)
    return raw.getvalue()


X, Y = np.random.default_rng(0).normal(size=(6, 4)), np.array([0, 1, 2, 0, 1, 2])
WHOLE = npz(x=X, y=Y)


def flipped(raw, at):
    return raw[:at] + bytes([raw[at] ^ 0xFF]) + raw[at + 1 :]


def table(content, name="train.csv", **options):
    from foretune.apps._tables import read_table

    return read_table(file(name, content), **options).matrix()


def parquet(damage=lambda raw: raw, **columns):
    import pandas as pd

    raw = io.BytesIO()
    pd.DataFrame(columns).to_parquet(raw)
    return table(damage(raw.getvalue()), "train.parquet")


def missing(name):
    from foretune.apps._tables import read_table

    return read_table(folder() / name)


def page(**files):
    """Write the page of a run's folder with these files in it."""
    from foretune.report import write_page

    where = folder()
    for name, content in files.items():
        path = where / (name.replace("_json", ".json") if "_json" in name else "metrics.jsonl")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return write_page(where)


CONFIG = json.dumps({"kind": "clean", "title": "a", "settings": {}})


def result(**content):
    return page(config_json=CONFIG, result_json=json.dumps(content))


def reopened(name, content, **settings):
    """Open a run's folder again, one of whose files is damaged."""
    from foretune.report import RunFolder

    made = RunFolder(folder() / "run", kind="clean", title="", settings={"a": 1})
    made.close()
    (made.path / name).write_bytes(content)
    again = RunFolder(made.path, kind="clean", title="", settings={"a": 1} | settings)
    try:
        return again.result
    finally:
        again.close()


def mnist(content, name="train-images-idx3-ubyte.gz"):
    from experiments.datasets import load

    where = folder()
    (where / "mnist").mkdir()
    (where / "mnist" / name).write_bytes(content)
    before = os.environ.get("FORETUNE_DATA")
    os.environ["FORETUNE_DATA"] = str(where)
    try:
        return load("mnist")
    finally:
        os.environ.pop("FORETUNE_DATA") if before is None else os.environ.update(FORETUNE_DATA=before)


def cifar(content):
    from experiments.datasets import load

    where = folder()
    (where / "cifar").mkdir()
    (where / "cifar" / "cifar10-efficientnet-lite0.npz").write_bytes(content)
    before = os.environ.get("FORETUNE_DATA")
    os.environ["FORETUNE_DATA"] = str(where)
    try:
        return load("cifar10")
    finally:
        os.environ.pop("FORETUNE_DATA") if before is None else os.environ.update(FORETUNE_DATA=before)


def load(name):
    from experiments.datasets import load

    return load(name)


def sound(content):
    from experiments.phones.speech import read_sound

    return read_sound(file("a.wav", content))


def timit(where):
    from experiments.phones.speech import timit

    return timit(where, cache=None)


def report():
    import foretune.report

    return foretune.report


CSV = "a,label\n1,x\n2,y\n3,x\n"
SPHERE = b"NIST_1A\n   1024\nsample_rate -i 16000\nsample_count -i 4\nend_head\n".ljust(1024)
ROWS = [
    # npz
    ("npz: missing", lambda: missing("train.npz"), ValueError, "train.npz: no such file"),
    ("npz: a folder", lambda: missing("."), ValueError, "no such file"),
    ("npz: empty", lambda: table(b"", "train.npz"), ValueError, "train.npz is empty"),
    ("npz: cut off", lambda: table(WHOLE[:-40], "train.npz"), ValueError, "train.npz cannot be read as .npz"),
    ("npz: cut in half", lambda: table(WHOLE[: len(WHOLE) // 2], "train.npz"), ValueError, "train.npz cannot be read as .npz"),
    ("npz: a byte of the data changed", lambda: table(flipped(WHOLE, 200), "train.npz"), ValueError, "train.npz cannot be read as .npz"),
    ("npz: a byte of compressed data changed", lambda: table(flipped(compressed(x=X, y=Y), 150), "train.npz"), ValueError, "train.npz cannot be read as .npz"),
    ("npz: text", lambda: table(CSV, "train.npz"), ValueError, "train.npz cannot be read as .npz"),
    ("npz: a plain array", lambda: table(_npy(X), "train.npz"), ValueError, "train.npz cannot be read as .npz"),
    ("npz: objects, which need pickle", lambda: table(npz(x=X, y=np.array([None] * 6)), "train.npz"), ValueError, "train.npz cannot be read as .npz"),
    ("npz: no labels", lambda: table(npz(x=X), "train.npz"), ValueError, "train.npz holds x", "labels under"),
    ("npz: no rows", lambda: table(npz(y=Y), "train.npz"), ValueError, "train.npz holds y", "rows under"),
    ("npz: nothing", lambda: table(npz(), "train.npz"), ValueError, "train.npz holds nothing"),
    ("npz: another name of labels", lambda: table(WHOLE, "train.npz", label="kind"), ValueError, "labels under kind"),
    ("npz: rows and labels that differ", lambda: table(npz(x=X, y=Y[:3]), "train.npz"), ValueError, "(6, 4)", "(3,)"),
    ("npz: labels of two axes", lambda: table(npz(x=X, y=X), "train.npz"), ValueError, "expected (n, ...) and (n,)"),
    ("npz: rows of text", lambda: table(npz(x=np.full((6, 2), "a"), y=Y), "train.npz"), ValueError, "expected numbers"),
    ("npz: complex rows", lambda: table(npz(x=X * 1j, y=Y), "train.npz"), ValueError, "complex128", "expected numbers"),
    ("npz: NaN in a row", lambda: table(npz(x=np.where(X[2, 1] == X, NAN, X), y=Y), "train.npz"), ValueError, "train.npz contains NaN"),
    ("npz: a label of NaN", lambda: table(npz(x=X, y=np.where(Y == 2, NAN, Y)), "train.npz"), ValueError, "2 rows without a label", "row 2"),
    ("npz: no row at all", lambda: table(npz(x=X[:0], y=Y[:0]), "train.npz"), ValueError, "has no rows"),
    ("npz: images of another shape", lambda: table(WHOLE, "train.npz", image_shape=(3, 3)), ValueError, "4 columns", "3x3"),
    # csv and parquet
    ("csv: missing", lambda: missing("train.csv"), ValueError, "train.csv: no such file"),
    ("csv: empty", lambda: table(""), ValueError, "train.csv is empty"),
    ("csv: bytes", lambda: table(b"\xff\xfe\x00\x01\x02"), ValueError, "train.csv"),
    ("csv: a header alone", lambda: table("a,label\n"), ValueError, "has no rows"),
    ("csv: no label column", lambda: table("a,b\n1,2\n"), ValueError, "--label COLUMN"),
    ("csv: another label column", lambda: table(CSV, label="kind"), ValueError, "no 'kind'"),
    ("csv: a column to drop that is none", lambda: table(CSV, drop=("b",)), ValueError, "no 'b' to drop"),
    ("csv: a row without a label", lambda: table("a,label\n1,x\n2,\n"), ValueError, "row 1", "without a label"),
    ("csv: labels alone", lambda: table("label\nx\ny\n"), ValueError, "no columns beside the labels"),
    ("csv: rows too long", lambda: table("a,label\n1,x,3\n2,y,4\n"), ValueError, "more cells"),
    ("csv: free text", lambda: table("a,label\n" + "".join(f"w{i},x\n" for i in range(60))), ValueError, "all are identifiers"),
    ("csv: an open quote", lambda: table('a,label\n"1,x\n2,y\n'), ValueError, "train.csv"),
    ("csv: another kind of file", lambda: missing_kind(), ValueError, "give a .npz, .csv or .parquet file"),
    ("parquet: text", lambda: table(CSV, "train.parquet"), ValueError, "train.parquet cannot be read as .parquet"),
    ("parquet: cut off", lambda: parquet(lambda raw: raw[:-30], a=X[:, 0], label=Y), ValueError, "train.parquet cannot be read"),
    ("parquet: no label column", lambda: parquet(a=X[:, 0]), ValueError, "--label COLUMN"),
    # gz and others
    ("gz: not gzip", lambda: mnist(b"not gzip"), ValueError, "train-images-idx3-ubyte.gz is damaged"),
    ("gz: empty", lambda: mnist(b""), ValueError, "train-images-idx3-ubyte.gz"),
    ("gz: cut off", lambda: mnist(gzip.compress(b"a" * 9999)[:-9]), ValueError, "train-images-idx3-ubyte.gz is damaged"),
    ("gz: a byte changed", lambda: mnist(flipped(gzip.compress(bytes(range(256)) * 40), 60)), ValueError, "train-images-idx3-ubyte.gz is"),
    ("gz: other data", lambda: mnist(gzip.compress(b"other")), ValueError, "is not MNIST's file"),
    ("cifar: damaged", lambda: cifar(WHOLE[:-30]), ValueError, "cifar10-efficientnet-lite0.npz cannot be read"),
    ("cifar: labels of floats", lambda: cifar(npz(x=X, y=X[:, 0])), ValueError, "expected integers"),
    ("data: a name that is none", lambda: load("imagenet"), ValueError, "no data set 'imagenet'"),
    ("data: a file that is not there", lambda: load("none.csv"), ValueError, "none.csv: no such file"),
    ("sound: text", lambda: sound(b"hello"), ValueError, "neither a RIFF"),
    ("sound: RIFF cut off", lambda: sound(b"RIFF\x00\x00"), ValueError, "not a readable wav"),
    ("sound: SPHERE cut off", lambda: sound(SPHERE), ValueError, "cut off", "of the 4 samples"),
    ("sound: SPHERE without a header", lambda: sound(b"NIST_1A\nabc"), ValueError, "damaged SPHERE header"),
    ("timit: no folder", lambda: timit("/none"), ValueError, "no folder /none"),
    ("timit: an empty folder", lambda: timit(folder()), ValueError, "holds no .wav file"),
    # Runs' folders
    ("report: no folder", lambda: page_of("/none"), ValueError, "/none is not a folder"),
    ("report: an empty folder", lambda: page(), ValueError, "config.json is missing"),
    ("report: an empty config", lambda: page(config_json=""), ValueError, "config.json is broken"),
    ("report: a config cut off", lambda: page(config_json=CONFIG[:20]), ValueError, "config.json is broken"),
    ("report: a config of bytes", lambda: page(config_json=b"\xff\xfe"), ValueError, "config.json is broken"),
    ("report: a config that is a list", lambda: page(config_json="[]"), ValueError, "config.json is broken", "list"),
    ("report: a config nested without end", lambda: page(config_json="[" * 100_000), ValueError, "config.json is broken"),
    ("report: a title that is a number", lambda: page(config_json='{"title": 3}'), ValueError, "title is int"),
    ("report: a result cut off", lambda: page(config_json=CONFIG, result_json='{"tables": ['), ValueError, "result.json is broken"),
    ("report: a result that is a number", lambda: page(config_json=CONFIG, result_json="3"), ValueError, "result.json is broken"),
    ("report: tables that are text", lambda: result(tables="all"), ValueError, "tables is str"),
    ("report: a row too long", lambda: result(tables=[{"title": "t", "columns": ["a"], "rows": [[1, 2]]}]), ValueError, "'t' has a row"),
    ("report: a figure outside", lambda: result(figures=[{"file": "../a.svg"}]), ValueError, "outside the run's folder"),
    ("run folder: a config cut off", lambda: reopened("config.json", b"{"), ValueError, "config.json is damaged"),
    ("run folder: a config of bytes", lambda: reopened("config.json", b"\xff"), ValueError, "config.json is damaged"),
    ("run folder: a config that is a list", lambda: reopened("config.json", b"[]"), ValueError, "config.json is damaged"),
    ("run folder: a result cut off", lambda: reopened("result.json", b"{"), ValueError, "result.json is damaged"),
    ("run folder: a result that is a list", lambda: reopened("result.json", b"[1]"), ValueError, "result.json is damaged"),
    ("run folder: other settings", lambda: reopened("metrics.jsonl", b"", a=2), ValueError, "other settings (a: 1 there, 2 now)"),
    # Figures
    ("picture: a vector", lambda: report().picture(folder() / "a.png", np.zeros(3)), ValueError, "pixels of shape (3,)", "height x width"),
]


def _npy(array):
    raw = io.BytesIO()
    np.save(raw, array)
    return raw.getvalue()


def missing_kind():
    return table(CSV, "train.xlsx")


def page_of(name):
    from foretune.report import write_page

    return write_page(Path(name))

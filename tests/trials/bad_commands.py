# ruff: noqa: E501
# fmt: off
"""The command line, and `python -m experiments`, given the wrong things."""

import numpy as np

from .bad_files import CONFIG, WHOLE, npz
from .given import Refused, WrongUse, command, file, folder

X = np.random.default_rng(0).normal(size=(30, 4))
Y = np.arange(30) % 3
TRAIN, CHECKED = npz(x=X, y=Y), npz(x=X[:9], y=Y[:9])
HUGE = str(10**12)


def clean(*options, train=TRAIN, checked=CHECKED, name="train.npz", out=None):
    from foretune.cli import app

    first, second = file(name, train), file(f"checked-{name}", checked)
    out = out or folder() / "out"
    return command(app, "clean", first, "--clean", second, "--out", out, *options)


def foretune(*arguments):
    from foretune.cli import app

    return command(app, *arguments)


def experiment(*arguments):
    from experiments.__main__ import app

    return command(app, *arguments, *(() if "--out" in arguments else ("--out", folder() / "out")))


def broken_run(**files):
    where = folder()
    for name, content in files.items():
        (where / f"{name}.json").write_text(content)
    return where


LINES = ["a,b,id,label", *(f"{i % 7}.5,{i % 5},{i:03d},{'xy'[i % 2]}" for i in range(30))]


def checked(rows, *options, train=LINES):
    """Clean with verified rows of a file."""
    from foretune.cli import app

    first, second = file("train.csv", "\n".join(train)), file("verified.csv", rows)
    return command(app, "clean", first, "--checked", second, "--out", folder() / "out", *options)


ROWS = [
    ("clean with an empty file of verified rows", lambda: checked(""), Refused, "verified.csv cannot be read as .csv"),
    ("clean with no verified row", lambda: checked("row,label\n"), Refused, "verified.csv has no verified row"),
    ("clean with verified rows without labels", lambda: checked("row,label\n1,\n"), Refused, "verified.csv has no verified row"),
    ("clean with verified rows too long", lambda: checked("row,label\n1,2,x\n"), Refused, "verified.csv cannot be read", "more cells"),
    ("clean with one verified row too long", lambda: checked("row,label\n1,x\n2,x,y\n"), Refused, "verified.csv cannot be read"),
    ("clean with verified rows of bytes", lambda: checked(b"row,label\n1,\xff\n"), Refused, "verified.csv cannot be read"),
    ("clean with two columns of row numbers", lambda: checked("row,row,label\n1,2,x\n"), Refused, "two columns have the name 'row'"),
    ("clean with a row verified twice", lambda: checked("row,label\n1,x\n1,y\n"), Refused, "a row twice"),
    ("clean with a verified row that is none", lambda: checked("row,label\n30,x\n"), Refused, "no row whose row is '30'"),
    ("clean with a verified row below 0", lambda: checked("row,label\n-1,x\n"), Refused, "no row whose row is '-1'"),
    ("clean with a verified label that is none", lambda: checked("row,label\n1,z\n"), Refused, "verified.csv has labels that", "'z'"),
    ("clean with verified rows without the label's column", lambda: checked("row,y\n1,x\n"), Refused, "verified rows need 'row'", "'label'"),
    ("clean with an identifier in other digits", lambda: checked("id,label\n1,x\n", "--id", "id"), Refused, "no row whose id is '1'"),
    ("clean with an identifier that is no column", lambda: checked("key,label\n1,x\n", "--id", "key"), Refused, "has no column 'key'"),
    ("clean with an identifier that is not unique", lambda: checked("b,label\n1,x\n", "--id", "b"), Refused, "'b' is", "in more than one row"),
    ("clean with an identifier and no verified rows", lambda: foretune("clean", file("train.csv", "\n".join(LINES)), "--id", "id"), Refused, "--id id finds the rows of --checked"),
    ("clean with verified rows that are not there", lambda: foretune("clean", file("train.csv", "\n".join(LINES)), "--checked", "/none/v.csv"), Refused, "/none/v.csv"),
    ("clean with two columns of labels", lambda: checked("row,label\n1,x\n", train=["a,label,label", *("1,x,x" for _ in range(9))]), Refused, "train.csv", "two columns have the name 'label'"),
    ("clean with the column of labels left out", lambda: checked("row,label\n1,x\n", "--drop", "label"), Refused, "none named label"),
    ("clean with all rows verified", lambda: checked("\n".join(["row,label", *(f"{i},x" for i in range(30))])), Refused, "nothing left to judge"),
    ("no command", lambda: foretune("scrub"), WrongUse, "scrub"),
    ("clean without files", lambda: foretune("clean"), WrongUse, "train"),
    ("clean of a file that is not there, without checked rows", lambda: foretune("clean", "a.csv"), Refused, "a.csv: no such file"),
    ("clean of files that are not there", lambda: foretune("clean", "/none/a.csv", "--clean", "/none/b.csv"), Refused, "/none/a.csv: no such file"),
    ("clean of a folder", lambda: foretune("clean", "/", "--clean", "/"), Refused, "no such file"),
    ("clean of another kind of file", lambda: clean(name="train.xlsx"), Refused, "give a .npz, .csv or .parquet"),
    ("clean of a damaged file", lambda: clean(train=TRAIN[:-40]), Refused, "train.npz cannot be read"),
    ("clean with damaged checked rows", lambda: clean(checked=CHECKED[:50]), Refused, "checked-train.npz cannot be read"),
    ("clean of an empty file", lambda: clean(train=b""), Refused, "train.npz is empty"),
    ("clean of one class", lambda: clean(train=npz(x=X, y=0 * Y)), Refused, "only one class"),
    ("clean with other columns", lambda: clean(checked=npz(x=X[:, :2], y=Y)), Refused, "in one only: 2, 3"),
    ("clean with other labels", lambda: clean(checked=npz(x=X, y=Y + 5)), Refused, "labels that y does not have"),
    ("clean with NaN", lambda: clean(train=npz(x=np.where(X > 1, np.nan, X), y=Y)), Refused, "contains NaN"),
    ("clean with a negative seed", lambda: clean("--seed", -1), WrongUse, "--seed"),
    ("clean with a seed of 2^32", lambda: clean("--seed", 2**32), WrongUse, "--seed"),
    ("clean of images of one side", lambda: clean("--image", "28"), WrongUse, "28x28"),
    ("clean of images of no side", lambda: clean("--image", "0x4"), WrongUse, "28x28"),
    ("clean of images of text", lambda: clean("--image", "axb"), WrongUse, "28x28"),
    ("clean of images of another size", lambda: clean("--image", "3x3"), Refused, "4 columns"),
    ("clean by a label that is none", lambda: clean("--label", "kind"), Refused, "labels under kind"),
    ("clean by a text that is none", lambda: clean("--text", "a", train=b"a,label\n1,x\n2,y\n3,x\n", checked=b"a,label\n1,x\n2,y\n", name="t.csv"), Refused, "column 'a' as text"),
    ("clean into a folder of others", lambda: clean(out=broken_run(mine="{}")), Refused, "holds other files"),
    ("clean into a file", lambda: clean(out=file("out", "x")), Refused, "out cannot be made"),
    ("clean into /proc", lambda: clean(out="/proc/none"), Refused, "/proc/none cannot be made"),
    ("clean into a damaged run", lambda: clean(out=broken_run(config="{")), Refused, "config.json is damaged"),
    ("clean into a run of other settings", lambda: clean(out=broken_run(config=CONFIG)), Refused, "other settings"),
    ("clean with an option that is none", lambda: clean("--speed", 3), WrongUse, "--speed"),
    ("report of nothing", lambda: foretune("report"), WrongUse, "folder"),
    ("report of no folder", lambda: foretune("report", "/none"), Refused, "/none is not a folder"),
    ("report of an empty folder", lambda: foretune("report", folder()), Refused, "config.json is missing"),
    ("report of a damaged run", lambda: foretune("report", broken_run(config=CONFIG, result="{")), Refused, "result.json is broken"),
    ("report of a file", lambda: foretune("report", file("config.json", CONFIG)), Refused, "is not a folder"),
    # Experiments
    ("an experiment that is none", lambda: experiment("weather"), WrongUse, "weather"),
    ("cleaning of 10^8 seeds", lambda: experiment("cleaning", "--seeds", 100_000_000), WrongUse, "--seeds"),
    ("cleaning of no seeds", lambda: experiment("cleaning", "--seeds", 0), WrongUse, "--seeds"),
    ("cleaning of 10^12 steps", lambda: experiment("cleaning", "--steps", HUGE), WrongUse, "--steps"),
    ("cleaning of 10^12 iterations", lambda: experiment("cleaning", "--iterations", HUGE), WrongUse, "--iterations"),
    ("cleaning of NaN noise", lambda: experiment("cleaning", "--noise", "nan"), WrongUse, "--noise"),
    ("cleaning of all noise", lambda: experiment("cleaning", "--noise", 1.0), WrongUse, "--noise"),
    ("cleaning of data that are none", lambda: experiment("cleaning", "--data", "imagenet"), Refused, "no data set 'imagenet'"),
    ("cleaning of a file that is not there", lambda: experiment("cleaning", "--data", "/none/a.npz"), Refused, "/none/a.npz: no such file"),
    ("cleaning of a damaged file", lambda: experiment("cleaning", "--data", file("a.npz", WHOLE[:-30])), Refused, "a.npz cannot be read"),
    ("cleaning of six rows", lambda: experiment("cleaning", "--quick", "--data", file("a.npz", WHOLE)), Refused, "a.npz"),
    ("cleaning into a damaged run", lambda: experiment("cleaning", "--quick", "--out", broken_run(config="{")), Refused, "config.json is damaged"),
    ("multitask of 10^8 seeds", lambda: experiment("multitask", "--seeds", 100_000_000), WrongUse, "--seeds"),
    ("multitask of one row", lambda: experiment("multitask", "--per-class", 1), WrongUse, "--per-class"),
    ("multitask of too many rows", lambda: experiment("multitask", "--per-class", 1000), Refused, "--per-class 1000"),
    ("multitask of 10^12 steps", lambda: experiment("multitask", "--paper-steps", HUGE), WrongUse, "--paper-steps"),
    ("multitask of data that are none", lambda: experiment("multitask", "--data", "imagenet"), Refused, "no data set 'imagenet'"),
    ("multitask of a damaged file", lambda: experiment("multitask", "--data", file("a.npz", WHOLE[:-30])), Refused, "a.npz cannot be read"),
    ("phones of no folder", lambda: experiment("phones", "--data", "/none"), Refused, "no folder /none"),
    ("phones of an empty folder", lambda: experiment("phones", "--data", folder()), Refused, "holds no .wav file"),
    ("phones of frames of TIMIT", lambda: experiment("phones", "--data", "/none", "--frames", 2000), WrongUse, "--frames is for synthetic"),
    ("phones of 10^12 frames", lambda: experiment("phones", "--frames", HUGE), WrongUse, "--frames"),
    ("phones of NaN seconds", lambda: experiment("phones", "--budget", "nan"), WrongUse, "--budget"),
    ("phones of 10^12 units", lambda: experiment("phones", "--width", HUGE), WrongUse, "--width"),
    ("phones of more memory than there is", lambda: experiment("phones", "--width", 100_000, "--layers", 100), Refused, "memory"),
    ("complexity of one layer", lambda: experiment("complexity", "--network", "784"), Refused, "784"),
    ("complexity of text", lambda: experiment("complexity", "--network", "a-b"), WrongUse, "784-200-200-10"),
    ("complexity of 10^12 units", lambda: experiment("complexity", "--network", f"784-{HUGE}-10"), WrongUse, "below 10^9"),
    ("complexity of no units", lambda: experiment("complexity", "--network", "784-0-10"), Refused, "0"),
    ("complexity of 10^12 steps", lambda: experiment("complexity", "--steps", HUGE), WrongUse, "--steps"),
    ("complexity of no rounds", lambda: experiment("complexity", "--rounds", 0), WrongUse, "--rounds"),
    ("complexity of no hyperparameters", lambda: experiment("complexity", "--hyperparameters", ""), WrongUse, "whole numbers"),
    ("complexity of 0 hyperparameters", lambda: experiment("complexity", "--hyperparameters", "0"), Refused, "hyperparameters"),
    ("complexity of a billion units", lambda: experiment("complexity", "--widths", "999999999"), Refused, "memory"),
]

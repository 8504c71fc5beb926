"""Files that are read cannot run code, and files that are written stay in their folder."""

import ast
import contextlib
import pickle
import shutil
from pathlib import Path

import numpy as np
import optax
import pytest
from typer.testing import CliRunner

import foretune as ft
from experiments.datasets import load
from experiments.phones.speech import corpus as _corpus
from experiments.runs import RunFolder
from foretune import cli
from foretune.apps._shown import cell
from foretune.apps._tables import DataError, read_table
from foretune.report import write_page

from ..problems import regression

SOURCE = Path(ft.__file__).parent


class Trap:
    """An object that makes a file when it is unpickled."""

    def __init__(self, sprung):
        self.sprung = sprung

    def __reduce__(self):
        return Path.touch, (self.sprung,)


@pytest.fixture
def trap(tmp_path):
    sprung = tmp_path / "sprung"
    found = Trap(sprung)
    pickle.loads(pickle.dumps(found))
    assert sprung.exists()  # it would be seen
    sprung.unlink()
    yield found
    assert not sprung.exists()


@pytest.mark.parametrize("name", ["x", "y"])
def test_an_object_array_in_a_table_is_refused(trap, tmp_path, name):
    arrays = {"x": np.zeros((2, 3)), "y": np.zeros(2)} | {name: np.array([trap, trap], object)}
    np.savez(tmp_path / "a.npz", **arrays)
    for read in (read_table, load):
        with pytest.raises(DataError, match=r"a\.npz cannot be read as \.npz: Object arrays"):
            read(str(tmp_path / "a.npz"))


def test_a_pickle_that_is_called_npz_is_refused(trap, tmp_path):
    (tmp_path / "a.npz").write_bytes(pickle.dumps(trap))
    with pytest.raises(DataError, match=r"cannot be read as \.npz"):
        read_table(tmp_path / "a.npz")


def test_an_object_array_among_features_is_refused(trap, tmp_path, monkeypatch):
    (tmp_path / "cifar").mkdir()
    path = tmp_path / "cifar" / "cifar10-efficientnet-lite0.npz"
    np.savez(path, x=np.array([trap], object), y=np.zeros(1))
    monkeypatch.setenv("FORETUNE_DATA", str(tmp_path))
    with pytest.raises(ValueError, match="Object arrays cannot be loaded"):
        load("cifar10")


def test_an_object_array_in_the_cache_of_speech_is_made_again(trap, tmp_path):
    def make():
        part = np.zeros((1, 2), np.float32), ["a"], np.zeros(1, int), np.zeros(1, int)
        return [_corpus.Utterance("1", "who", None, *part)], {}

    _corpus.stored("kind", {}, make, tmp_path)
    (path,) = tmp_path.glob("*.npz")
    np.savez(path, about=np.array(trap, object))
    found, _ = _corpus.stored("kind", {}, make, tmp_path)
    assert found[0].speaker == "who"


def test_a_checkpoint_of_pickles_is_passed_over(trap, tmp_path):
    problem, hparams = regression(steps=4)

    def run():
        ft.minimize(
            problem, hparams, steps=1, optimizer=optax.sgd(0.0),
            callbacks=[ft.Checkpoint(tmp_path / "run")],
        )  # fmt: skip

    run()
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file():
            file.write_bytes(pickle.dumps(trap))
    with (
        pytest.warns(UserWarning, match=r"checkpoint of step \d .* cannot be used"),
        pytest.raises(ValueError, match=r"none of the checkpoints in .* can be read"),
    ):
        run()


@pytest.fixture
def outside(tmp_path):
    """A file that no run's folder may change, whatever links to it."""
    path = tmp_path / "mine.txt"
    path.write_text("mine")
    yield path
    assert path.read_text() == "mine"


def test_a_page_is_not_written_through_a_link(tmp_path, outside):
    pytest.importorskip("jinja2")
    folder = RunFolder(tmp_path / "run", kind="cleaning", title="A run", settings={})
    for name in ("report.html", "report.html.part", ".report.html.new"):
        (folder.path / name).symlink_to(outside)
    page = write_page(folder.path)
    assert not page.is_symlink()
    assert "A run" in page.read_text()


def test_a_runs_files_are_not_written_through_links(tmp_path, outside):
    folder = RunFolder(tmp_path / "run", kind="cleaning", title="", settings={})
    folder.write_metrics([{"step": 0}, {"step": 1}])
    lines = folder.metrics.rename(tmp_path / "lines")
    folder.metrics.symlink_to(lines)
    folder.keep_metrics(lambda record: record["step"] < 1)
    assert folder.metrics.read_text() == '{"step": 0}\n'
    assert lines.read_text() == '{"step": 0}\n{"step": 1}\n'
    for name in ("result.json", ".result.json.new"):
        (folder.path / name).symlink_to(outside)
    folder.write("result.json", {"headline": "done"})
    assert folder.result == {"headline": "done"}
    assert not (folder.path / "result.json").is_symlink()


@pytest.mark.parametrize("name", ["parts", "figures"])
def test_a_link_to_a_folder_is_not_followed(tmp_path, name):
    other = tmp_path / "other"
    other.mkdir()
    np.savez(tmp_path / "a.npz", x=np.eye(6), y=np.arange(6) % 2)
    command = ["attribute", "a.npz", "a.npz", "--steps", "3", "--out", "run"]
    with contextlib.chdir(tmp_path):
        assert CliRunner().invoke(cli.app, command).exit_code == 0
        for path in ("result.json", "report.html"):
            (tmp_path / "run" / path).unlink()
        if (inner := tmp_path / "run" / name).exists():
            shutil.rmtree(inner)
        inner.symlink_to(other)
        refused = CliRunner().invoke(cli.app, command)
    assert refused.exit_code == 1, refused.output
    assert f"{name} is a link" in refused.output.replace("\n", " ")
    assert not list(other.iterdir())


HOSTILE, WRITTEN = "\x1b[2Jc\u202etac", r"\x1b[2Jc\u202etac"


def test_control_codes_are_written_out_on_a_page(tmp_path):
    pytest.importorskip("jinja2")
    folder = RunFolder(tmp_path / "run", kind="clean", title=HOSTILE, settings={HOSTILE: HOSTILE})
    item = {"index": 1, "observed": HOSTILE, "suggested": HOSTILE, "row": {HOSTILE: HOSTILE}}
    table = {"title": HOSTILE, "columns": [HOSTILE], "rows": [[HOSTILE]]}
    figure = {"file": f"{HOSTILE}.svg", "title": HOSTILE, "caption": HOSTILE}
    content = {"headline": HOSTILE, "notes": [HOSTILE], "tables": [table], "figures": [figure]}
    folder.write("result.json", content | {"gallery": {"title": HOSTILE, "items": [item]}})
    (folder.path / "figures" / figure["file"]).write_text("<svg/>")
    page = write_page(folder.path).read_text()
    assert not {"\x1b", "\u202e"} & set(page)
    assert page.count(WRITTEN) >= 10


SIGNS = "=+-@\uff1d\uff0b\uff0d\uff20"


@pytest.mark.parametrize("before", ["", " ", "\t", "\n", "\r", "\u3000", " \n "])
def test_a_spreadsheet_runs_no_cell(before):
    for sign in SIGNS:
        assert cell(f"{before}{sign}SUM(A1)") == f"'{before}{sign}SUM(A1)"
    assert cell(f"{before}-1.5") == f"{before}-1.5"
    assert cell(HOSTILE) == WRITTEN


UNSAFE_MODULES = {"cloudpickle", "dill", "marshal", "pickle", "shelve", "subprocess"}
UNSAFE_CALLS = {"eval", "exec", "joblib.load", "os.popen", "os.system", "torch.load"}


def unsafe(node):
    """Whether a part of a program may run what it reads."""
    match node:
        case ast.Import(names=names):
            return any(name.name.split(".")[0] in UNSAFE_MODULES for name in names)
        case ast.ImportFrom(module=str(module)):
            return module.split(".")[0] in UNSAFE_MODULES
        case ast.Call(func=function, keywords=keywords):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in keywords}
            pickled = given.get("allow_pickle", "False") != "False"
            return pickled or ast.unparse(function) in UNSAFE_CALLS
    return False


def test_the_source_has_no_way_to_run_what_it_reads():
    assert unsafe(ast.parse("np.load(path, allow_pickle=True)").body[0].value)
    paths = sorted(SOURCE.rglob("*.py"))
    assert len(paths) > 50
    for path in paths:
        found = [ast.unparse(n) for n in ast.walk(ast.parse(path.read_text())) if unsafe(n)]
        assert not found, path

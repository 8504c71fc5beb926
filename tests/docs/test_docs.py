"""The documentation's code runs, and every public name is documented with an example."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import foretune as ft

from ..conftest import setting

ROOT = Path(__file__).parents[2]


WITHOUT_CODE = [
    f"docs/{name}.md"
    for name in ("about", "api", "choose", "gallery", "migration", "how/realtime", "how/theory")
]
FIRST = ["README.md"]
PAGES = [
    "README.md",
    *sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")),
]


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.first_tier] if page in FIRST else []) for page in PAGES],
)
def test_code_blocks_run_in_order(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks or page in WITHOUT_CODE or page.startswith("docs/evidence/")
    namespace = {}
    with setting(jax_disable_most_optimizations=True):  # they run for a moment: half the time
        for block in blocks:
            exec(compile(block, page, "exec"), namespace)


def test_every_public_name_is_in_the_reference():
    listed = re.findall(r"^::: foretune\.(\S+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    for module in ("", "apps.", "report."):
        source = (ROOT / "src/foretune" / module.rstrip(".") / "__init__.py").read_text()
        public = {
            f"{module}{name}" for name in re.findall(r"import (\w+) as \1$", source, re.MULTILINE)
        }
        assert public
        assert public <= set(listed), "add it to docs/api.md"


def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocs", reason="the site needs the dependency group `docs`")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "api" / "index.html").is_file()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(page):  # those between pages of the site are checked by its build
    for path, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", (ROOT / page).read_text()):
        assert (ROOT / (path or page)).exists(), path
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (ROOT / (path or page)).read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w-]", "", h.lower().replace(" ", "-")) for h in headings}


def test_every_recorded_figure_has_a_command():
    page = (ROOT / "docs/evidence/experiments.md").read_text()
    recorded = {path.name for path in (ROOT / "benchmarks/results").glob("*.json")}
    assert recorded == set(re.findall(r"`([\w-]+\.json)`", page)) - {"config.json", "result.json"}
    programs = set(re.findall(r"python -m benchmarks\.([a-z]\w*)", page))
    assert [name for name in programs if not (ROOT / f"benchmarks/{name}.py").is_file()] == []


def test_the_citation_has_the_version():
    assert f"\nversion: {ft.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize(
    "name",
    [name for name, public in vars(ft).items() if name[0] != "_" and callable(public)],
)
def test_public_names_are_documented(name):
    public = getattr(ft, name)
    assert public.__doc__
    has_arguments = name in {
        "Training",
        "Problem",
        "Minibatches",
        "FullBatch",
        "Reverse",
        "Forward",
        "Mean",
        "RealTime",
    }
    assert ">>>" in public.__doc__ or not has_arguments


@pytest.mark.parametrize(
    ("name", "least"), [("realtime_jax", 95), ("realtime_equinox", 95), ("realtime_flax", 95)]
)
def test_the_real_time_examples_learn_from_a_bad_start(name, least, capsys, monkeypatch):
    pytest.importorskip("sklearn")
    path = ROOT / "examples" / f"{name}.py"
    monkeypatch.setattr("sys.argv", [str(path), "--steps", "600"])
    exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__"})
    accuracy = re.search(r"test accuracy ([\d.]+) %", capsys.readouterr().out)
    assert float(accuracy[1]) > least


def test_the_digits_example_finds_wrong_labels(capsys, monkeypatch):
    pytest.importorskip("sklearn")
    path = ROOT / "examples" / "digits_cleaning.py"
    monkeypatch.setattr("sys.argv", [str(path), "--iterations", "60", "--steps", "100"])
    namespace = {"__name__": "__main__"}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    found = re.search(r"recall (\d+)%, precision (\d+)%", capsys.readouterr().out)
    assert int(found[1]) > 50
    assert int(found[2]) > 80


def test_the_label_cleaner_example_beats_training_on_all_labels(capsys):
    path = ROOT / "examples" / "label_cleaner.py"
    exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__"})
    accuracies = re.findall(r"test accuracy .*: ([\d.]+)%", capsys.readouterr().out)
    assert float(accuracies[1]) > float(accuracies[0])


@pytest.mark.parametrize(
    ("name", "options", "pattern", "holds"),
    [
        (
            "attribution",
            ["--steps", "100", "--subsets", "5"],
            r"checked digits, (\d+)% are wrong",
            lambda share: share > 40,
        ),
        (
            "attribution_choose",
            [],
            r"random half: ([\d.]+)%\n.*that helps: ([\d.]+)%",
            lambda random, chosen: chosen > random,
        ),
        (
            "attribution_labels",
            [],
            r"attribute: (\d+) of 60.*\nLabelCleaner: (\d+) of 60",
            lambda attributed, cleaned: attributed > 30 and cleaned > 40,
        ),
        ("custom_dynamics", [], r"off by at most ([\d.]+)", lambda off: off < 0.05),
        (
            "drifting_stream",
            ["--steps", "2000"],
            r"quarters: \[([\d.]+), ([\d.]+)",
            lambda quiet, noisy: quiet > noisy,
        ),
        (
            "language_mixture",
            ["--steps", "40", "--iterations", "6"],
            r"test loss, even: ([\d.]+)[^:]*: ([\d.]+)",
            lambda even, learnt: learnt < even,
        ),
        (
            "noisy_text",
            ["--iterations", "20", "--steps", "50"],
            r"alike: ([\d.]+) %[^:]*: ([\d.]+) %",
            lambda alike, tuned: tuned > alike,
        ),
        (
            "maml_sinusoids",
            ["--iterations", "150"],
            r"random +1 step ([\d.]+)[^$]*MAML +1 step ([\d.]+)",
            lambda random, learnt: learnt < random,
        ),
        (
            "learnt_optimizer",
            ["--iterations", "10", "--steps", "5"],
            r"after 5 steps, 16 wide: start ([\d.]+), Reverse ([\d.]+)",
            lambda start, learnt: learnt < start,
        ),
        (
            "augmentation",
            ["--iterations", "1", "--steps", "10", "--labels", "60"],
            r"none: test accuracy ([\d.]+)[^:]*: test accuracy ([\d.]+)",
            lambda none, learnt: learnt > none - 5,
        ),
        (
            "penalties_implicit",
            ["--iterations", "20"],
            r"Implicit +validation ([\d.]+)[^$]*Reverse +validation ([\d.]+)",
            lambda implicit, exact: abs(implicit - exact) < 0.01,
        ),
        (
            "transformer_schedule",
            ["--iterations", "3", "--steps", "20"],
            r"constant rate: ([\d.]+)[^:]*: ([\d.]+)",
            lambda constant, learnt: learnt < constant + 0.01,
        ),
    ],
)
def test_the_other_examples(name, options, pattern, holds, capsys, monkeypatch):
    pytest.importorskip("sklearn")
    path = ROOT / "examples" / f"{name}.py"
    monkeypatch.setattr("sys.argv", [str(path), *options])
    exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__"})
    found = re.search(pattern, capsys.readouterr().out)
    assert found
    assert holds(*map(float, found.groups()))

"""The experiment on time and memory: what it measures, what it skips, and its command."""

import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from typer.testing import CliRunner

from experiments.__main__ import app
from experiments.complexity import experiment as complexity
from experiments.complexity import programs
from experiments.complexity.page import describe
from experiments.runs import RunFolder
from foretune.report import RunError

TINY = complexity.Settings((12, 6, 4), 4, 5, (2, 4), 2, (6,), 2)


def command(*arguments):
    return CliRunner().invoke(app, ["complexity", *map(str, arguments)])


@pytest.fixture
def two_engines(monkeypatch):
    few = {name: programs.ENGINES[name] for name in ("Forward()", "Reverse()")}
    monkeypatch.setattr(programs, "ENGINES", few)


def measure(point, settings=TINY):
    return programs.measure_point(
        point, settings, programs.make_data(settings.network, settings.seed)
    )


class TestPoints:
    def test_the_published_network_and_each_point_once(self):
        points = complexity.points_of(complexity.Settings())
        assert len(points) == len(set(points)) == 9 + 6 + 1
        assert sum(p.weights == 199_210 for p in points) == 10
        sizes = [p.weights * p.steps for p in points]
        assert sizes == sorted(sizes)

    @pytest.mark.parametrize("m", [2, 3, 30])
    def test_there_are_m_hyperparameters(self, m):
        data = programs.make_data(TINY.network, 0)
        problem, hparams = programs.make_problem(programs.Point(TINY.network, m, 4), 5, 0, data)
        assert ravel_pytree(hparams)[0].size == m
        again, _ = programs.make_problem(programs.Point(TINY.network, m, 4), 5, 0, data)
        for a, b in zip(jax.tree.leaves(problem), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(a, b)


class TestMeasure:
    def test_engines_find_the_same(self, monkeypatch):
        names = ["Forward(chunk=1)", "Reverse()", 'Reverse(store="segments")']
        monkeypatch.setattr(programs, "ENGINES", {n: programs.ENGINES[n] for n in names})
        records = measure(programs.Point((12, 6, 4), 4, 4), TINY._replace(forward=4))
        assert [r["series"] for r in records] == [programs.TRAINING, *names]
        assert max(r["difference"] for r in records[1:]) < 1e-4
        assert all(r["seconds"] > 0 and r["bytes"] > 0 and r["trainings"] > 0 for r in records)
        assert records[0]["trainings"] == 1

    @pytest.mark.usefixtures("two_engines")
    def test_what_does_not_fit_is_skipped(self, monkeypatch, tmp_path):
        point = programs.Point((12, 6, 4), 2, 4)
        whole = {r["series"]: r for r in measure(point)}
        sizes = sorted(r["bytes"] for r in whole.values())
        monkeypatch.setattr(programs, "free_bytes", lambda: sizes[1])
        records = {r["series"]: r for r in measure(point)}
        skipped = [name for name, r in records.items() if "skipped" in r]
        assert [whole[name]["bytes"] for name in skipped] == sizes[2:]
        assert "needs" in records[skipped[0]]["skipped"]
        assert "seconds" not in records[skipped[0]]
        folder = RunFolder(tmp_path, kind="complexity", title="", settings={})
        result = describe(folder, TINY, list(records.values()))
        table = next(t for t in result["tables"] if t["title"] == "All points")
        times = {row[0]: row[4] for row in table["rows"]}
        assert [name for name, seconds in times.items() if seconds == "skipped"] == skipped
        assert f"{skipped[0]} at 106 weights, m = 2, T = 4: needs" in table["note"]

    @pytest.mark.usefixtures("two_engines")
    def test_running_out_of_memory_is_no_end(self, monkeypatch, tmp_path):
        def run(self):
            raise RuntimeError(message)

        monkeypatch.setattr(programs.Program, "run", run)
        message = "RESOURCE_EXHAUSTED: Out of memory"
        records = measure(programs.Point((12, 6, 4), 2, 4))
        assert [r["skipped"] for r in records] == ["out of memory"] * 3
        folder = RunFolder(tmp_path, kind="complexity", title="", settings={})
        assert "No program fitted" in describe(folder, TINY, records)["headline"]
        message = "something else"
        with pytest.raises(RuntimeError, match="something else"):
            measure(programs.Point((12, 6, 4), 2, 4))

    @pytest.mark.usefixtures("two_engines")
    def test_the_allocators_peak_counts_where_it_rose(self, monkeypatch, tmp_path):
        peaks = itertools.chain([(50, 60), (50, 90), (50, 90)], itertools.repeat((50, 90)))
        monkeypatch.setattr(programs, "allocated", lambda: next(peaks))
        records = measure(programs.Point((12, 6, 4), 2, 4))
        found = [r["allocator_bytes"] for r in records if "allocator_bytes" in r]
        assert found == [40]
        folder = RunFolder(tmp_path, kind="complexity", title="", settings={})
        tables = describe(folder, TINY, records)["tables"]
        assert tables[-1]["title"] == "The allocator's peak"


def test_slopes_are_those_of_the_measurements(tmp_path):
    def record(series, m, T, trainings, states):
        at = {"network": "12-6-4", "weights": 106, "hyperparameters": m, "steps": T}
        size = {"bytes": states * 8 * 106, "seconds": 0.1 * trainings, "trainings": trainings}
        return {"series": series, **at, **size}

    records = [
        record(series, m, T, trainings, states)
        for m, T in [(2, 1), (2, 4), (4, 4), (10, 4)]
        for series, trainings, states in [
            (programs.TRAINING, 1.0, 2.0),
            ("Forward()", 1 + 1.5 * m, m + 1.0),
            ("Reverse()", 4.0, T + 3.0),
        ]
    ]
    folder = RunFolder(tmp_path, kind="complexity", title="", settings={})
    result = describe(folder, TINY, records)
    slopes = result["values"]["slopes"]
    assert slopes["Forward()"]["trainings_per_hyperparameter"] == pytest.approx(1.5)
    assert slopes["Forward()"]["states_per_hyperparameter"] == pytest.approx(1)
    assert slopes["Forward()"]["states_per_step"] == pytest.approx(0, abs=1e-9)
    assert slopes["Reverse()"]["trainings_per_hyperparameter"] == pytest.approx(0, abs=1e-9)
    assert slopes["Reverse()"]["states_per_step"] == pytest.approx(1)
    assert "costs forward mode 1.50 plain trainings and 1.00 states" in result["headline"]
    assert "4.0 plain trainings for 2 hyperparameters and 4.0 for 10" in result["headline"]


def test_series_are_named_as_a_user_writes_them():
    for name, engine in programs.ENGINES.items():
        assert repr(engine) == name.replace('"', "'")


@pytest.mark.parametrize("name", ["complexity_cpu", "complexity_15M_h200"])
def test_results_of_before_are_read(tmp_path, name):
    root = next(p for p in Path(__file__).parents if (p / "pyproject.toml").exists())
    found = json.loads((root / "benchmarks" / "results" / f"{name}.json").read_text())
    settings = complexity.Settings(**found["settings"])
    settings = settings._replace(network=tuple(settings.network))
    folder = RunFolder(tmp_path, kind="complexity", title="", settings={})
    result = describe(folder, settings, found["records"])
    for table in result["tables"][:2]:
        assert [row[0] for row in table["rows"]] == list(programs.ENGINES)
    assert result["headline"] == found["headline"]
    for table in result["tables"]:  # they fit a log, 110 wide: no name or unit is cut off
        columns = zip(table["columns"], *table["rows"], strict=True)
        assert sum(max(len(str(x)) for x in column) + 3 for column in columns) < 110


class TestCommand:
    options = ("--quick", "--network", "12-6-4", "--steps", 4, "--batch", 5, "--hyperparameters",
               "2,4", "--forward", 2, "--widths", 6, "--rounds", 2)  # fmt: skip

    @pytest.mark.usefixtures("two_engines")
    def test_a_folder_a_page_and_resuming(self, tmp_path, monkeypatch):
        out = tmp_path / "run"
        first = command(*self.options, "--out", out)
        assert first.exit_code == 0, first.output
        said = first.output.splitlines()
        assert said[0].startswith("Time and memory of a hypergradient")
        assert "5,000 random examples of 12 inputs and 4 classes, minibatches of 5" in said[1]
        assert "3 points, 8 programs in all, each compiled and run 3 times" in said[2]
        assert said[3] == "[1/4] 106 weights, 2 hyperparameters, 1 step"
        assert "[3/4] 106 weights, 4 hyperparameters, 4 steps" in said
        assert "[4/4] tables, figures and report" in said
        assert f"Open it in a browser: {(out / 'report.html').as_uri()}" in said
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert len(records) == 3 + 3 + 2  # no forward mode at m = 4
        result = json.loads((out / "result.json").read_text())
        assert [t["title"] for t in result["tables"]] == [
            "Time of a hypergradient",
            "Memory of a hypergradient",
            "All points",
        ]
        units = [{c.partition(", ")[2] for c in t["columns"]} - {""} for t in result["tables"]]
        assert units == [{"trainings"}, {"states"}, {"s", "trainings", "MiB"}]
        assert "Time against weights" in (out / "figures" / "complexity.svg").read_text()
        assert "Time and memory of a hypergradient" in (out / "report.html").read_text()
        # A run of before, whose series had other names, is resumed.
        for path in (out / "stages").iterdir():
            path.write_text(path.read_text().replace('()"', '"'))
        # A point that is lost is measured again, and nothing else.
        before = {p.name: p.read_text() for p in (out / "stages").iterdir()}
        (out / "stages" / "12-6-4-m4-T4.json").unlink()
        (out / "result.json").unlink()
        (out / "metrics.jsonl").write_text('{"cut o')
        second = command(*self.options, "--out", out)
        assert second.exit_code == 0, second.output
        assert "resumed: 2 of 3 points are there\n[3/4] 106 weights" in second.output
        after = {p.name: p.read_text() for p in (out / "stages").iterdir()}
        assert before.keys() == after.keys()
        assert [name for name in before if before[name] != after[name]] == ["12-6-4-m4-T4.json"]
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert len(records) == 8
        assert {r["series"] for r in records} == {"training", "Forward()", "Reverse()"}
        monkeypatch.setattr(complexity, "measure_point", None)  # finished: it is only shown
        third = command(*self.options, "--out", out)
        assert third.exit_code == 0, third.output
        assert "holds a finished run" in third.output

    @pytest.mark.parametrize(
        ("options", "code", "message"),
        [
            (("--steps", 0), 2, "steps"),
            (("--network", "784-x-10"), 2, "'784-x-10': give whole numbers, as 784-200-200-10"),
            (("--network", "784-10"), 1, "one hidden layer or more"),
            (("--network", "784-0-10"), 1, "each 1 or more"),
            (("--hyperparameters", ""), 2, "give whole numbers"),
            (("--hyperparameters", "1,2"), 1, "hyperparameters (1, 2): give one number or more"),
            (("--hyperparameters", "6000"), 1, "5,000 examples to weight"),
            (("--widths", "0"), 1, "widths (0,): give one number or more, each 1 or more"),
            (("--batch", "6000"), 1, "batch 6,000: there are 5,000 examples"),
        ],
    )
    def test_bad_settings_come_before_anything_is_made(self, tmp_path, options, code, message):
        refused = command("--quick", *options, "--out", tmp_path / "run")
        assert refused.exit_code == code
        assert message in " ".join(refused.output.replace("│", " ").split())
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        "change",
        [{"steps": 0}, {"rounds": 0}, {"forward": 1}, {"widths": ()}, {"hyperparameters": ()}],
    )
    def test_and_from_python(self, tmp_path, change):
        with pytest.raises(RunError, match=next(iter(change))):
            complexity.run(tmp_path / "run", TINY._replace(**change))
        assert not (tmp_path / "run").exists()

"""The speech experiment: its embeddings, batches, methods and command."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import foretune as ft
from experiments.__main__ import app
from experiments.phones import experiment as phones
from experiments.phones import methods, model
from experiments.phones.embeddings import context_embeddings
from experiments.phones.speech.corpus import Corpus
from experiments.phones.speech.synthetic import synthetic_speech
from experiments.runs import RunFolder
from foretune.apps._tables import DataError
from foretune.report import RunError


def make_corpus(utterances=30, frames=40, phone_count=6, seed=0):
    """Frames that tell their phone's state, with noise; phones follow one another as 0 1 2 ... do."""
    rng = np.random.default_rng(seed)
    tokens, token, third = [], [], []
    for _ in range(utterances):
        spoken = (
            rng.integers(phone_count) + np.cumsum(rng.choice([1, 1, 2], frames // 4))
        ) % phone_count
        token += [len(tokens) + k // 4 for k in range(frames)]
        third += [k % 4 * 3 // 4 for k in range(frames)]
        tokens += spoken.tolist()
    tokens, token = np.array(tokens, np.int32), np.array(token, np.int32)
    states = 3 * tokens[token] + np.array(third)
    means = rng.normal(size=(3 * phone_count, 123))
    x = means[states] + 2 * rng.normal(size=(len(states), 123))
    return Corpus(
        "made up",
        x.astype(np.float32),
        states.astype(np.int32),
        token,
        tokens,
        frames * np.arange(utterances + 1),
        frames // 4 * np.arange(utterances + 1),
        [f"s{u}" for u in range(utterances)],
        np.arange(utterances) * 3 // utterances,
        [str(k) for k in range(phone_count)],
        {},
    )


@pytest.fixture(scope="module")
def corpus():
    return make_corpus()


TINY = phones.QUICK._replace(
    budget=0.8, width=8, layers=2, batch=10, window=4, sample=50, check=2, patience=3
)


@pytest.fixture
def compiled(corpus, tmp_path):
    """Compile before the clocks run, as the experiment does."""
    speed = methods.measure_speed(make_task(corpus, tmp_path / "warm"), 1)
    assert speed.keys() == {"plain", "RTHO", "foretune"}
    assert min(speed.values()) > 0


class Ticks:
    """A clock that goes on by 0.01 s whenever it is read, however long that takes."""

    def __init__(self):
        self.time = 100.0

    def __call__(self):
        self.time += 0.01
        return self.time


def make_task(corpus, folder, **changes):
    run_folder = RunFolder(folder, kind="phones", title="test", settings={})
    return phones.make_task(corpus, TINY, run_folder)._replace(now=Ticks(), **changes)


class TestEmbeddings:
    def test_size_scale_and_who_is_alike(self, corpus):
        table, kind = context_embeddings(corpus)
        assert table.shape[1] == 300
        assert kind.shape == corpus.states.shape
        rows = corpus.rows("train")
        used = table[kind[rows]]
        assert np.mean(used**2) * 300 / np.count_nonzero(table.any(axis=0)) == pytest.approx(
            1, rel=0.01
        )
        np.testing.assert_allclose(used.mean(axis=0), 0, atol=1e-4)
        phone = corpus.states[rows] // 3
        distance = np.linalg.norm(used[::7, None] - used[None, ::7], axis=2)
        same = phone[::7, None] == phone[None, ::7]
        assert distance[same].mean() < 0.8 * distance[~same].mean()

    def test_only_training_transcripts_count(self, corpus):
        changed = corpus.tokens.copy()
        held = corpus.first_token[np.flatnonzero(corpus.part == 1)[0]]
        changed[held:] = (changed[held:] * 5 + 1) % 6
        first, second = (context_embeddings(c) for c in (corpus, corpus._replace(tokens=changed)))
        np.testing.assert_array_equal(first[0], second[0])
        rows = corpus.rows("train")
        np.testing.assert_array_equal(first[1][rows], second[1][rows])


class TestBatches:
    def test_windows_end_at_the_utterance(self, corpus):
        speech = model.on_device(corpus)
        i = np.array([0, 3, 39, 40, 60])
        x, states, targets = speech.examples(jnp.asarray(i))
        for row, at in zip(np.asarray(x), i, strict=True):
            first = at // 40 * 40
            around = np.clip(np.arange(at - 5, at + 6), first, first + 39)
            np.testing.assert_array_equal(row, corpus.frames[around].ravel())
        np.testing.assert_array_equal(states, corpus.states[i])
        np.testing.assert_array_equal(targets, speech.table[speech.kind[i]])

    def test_minibatches_are_training_frames_and_replayed(self, corpus):
        speech = model.on_device(corpus)
        batches = model.minibatches(speech, jax.random.key(0), 16, 5)
        again = model.minibatches(speech, jax.random.key(0), 16, 5)
        seen = [batches.batch(t) for t in batches.xs]
        for one, two in zip(seen, map(again.batch, again.xs), strict=True):
            np.testing.assert_array_equal(one[0], two[0])
        assert not np.array_equal(seen[0][0], seen[1][0])
        train = {tuple(corpus.frames[r]) for r in corpus.rows("train")}
        middle = np.asarray(seen[0][0])[:, 5 * 123 : 6 * 123]
        assert all(tuple(row) in train for row in middle)

    def test_hypergradients_are_exact(self, corpus):
        speech = model.on_device(corpus)
        params = model.make_params(jax.random.key(0), 8, 2, corpus.classes, 300, 1353)
        problem = ft.Problem(
            model.dynamics,
            model.error,
            params,
            model.minibatches(speech, jax.random.key(1), 10, 6),
            (speech, jnp.asarray(corpus.rows("validation")[:50])),
        )
        hparams = {"eta": jnp.array(0.05), "mu": jnp.array(0.5), "rho": jnp.array(1.6)}
        _, forward, _ = ft.Forward()(problem, hparams)
        _, reverse, _ = ft.Reverse()(problem, hparams)
        for name in hparams:
            np.testing.assert_allclose(forward[name], reverse[name], rtol=2e-4)
        tuner = ft.RealTime.paper(model.dynamics, model.error)
        _, log = tuner.update(tuner.init(params, hparams), problem.batches, problem.validation)
        for name in hparams:
            np.testing.assert_allclose(log["hypergradient"][name], forward[name], rtol=2e-4)

    def test_accuracy_counts_every_frame_once(self, corpus, monkeypatch):
        speech = model.on_device(corpus)
        params = model.make_params(jax.random.key(0), 8, 1, corpus.classes, 300, 1353)
        rows = corpus.rows("test")
        x, states, _ = speech.examples(jnp.asarray(rows))
        expected = np.mean(np.argmax(model.scores(params, x), axis=1) == states)
        for chunk in (7, 10_000):
            monkeypatch.setattr(model, "CHUNK", chunk)
            assert model.accuracy(params, speech, rows) == pytest.approx(expected)


@pytest.mark.usefixtures("compiled")
class TestMethods:
    def test_vanilla_stops_early_and_answers_for_its_best(self, corpus, tmp_path):
        task = make_task(corpus, tmp_path / "run", budget=60.0)
        found = methods.vanilla(task, "Vanilla", 0)
        assert found["stopped"] == "no rise"
        records = [json.loads(line) for line in task.folder.metrics.read_text().splitlines()]
        best = max(records, key=lambda r: r["validation_accuracy"])
        assert found["validation_accuracy"] == best["validation_accuracy"]
        assert found["test_accuracy"] == best["test_accuracy"]
        assert found["steps"] == records[-1]["step"] * task.window
        assert np.all(np.diff([a for _, a in found["curve"]]) >= 0)

    def test_a_diverged_training_ends_at_once(self, corpus, tmp_path):
        task = make_task(corpus, tmp_path / "run", budget=60.0)
        curve = methods.Curve(task, "x", 0, lambda record: False)
        with methods.Clock(60.0, "x", Ticks()) as clock:
            clock.go()
            hparams = {"eta": 1e6, "mu": 0.9, "rho": 4.0}
            found = methods.training(task, hparams, 0, 0, clock, curve)
        assert found["stopped"] == "diverged"
        assert found["validation_accuracy"] == 0.0

    @pytest.mark.parametrize(
        "sampler", [methods.Random, lambda seed: methods.Optuna("TPE", seed)], ids=["RS", "TPE"]
    )
    def test_a_search_resumes_after_its_last_trial(self, corpus, tmp_path, sampler):
        task = make_task(corpus, tmp_path / "run", budget=1.0, patience=1)
        first = methods.search(task, "RS", 0, sampler)
        path = task.folder.path / "trials" / "RS-0.jsonl"
        trials = [json.loads(line) for line in path.read_text().splitlines()]
        assert first["trials"] == len(trials) > 1
        best = max(trials, key=lambda trial: trial["validation_accuracy"])
        assert first["hparams"] == {name: best[name] for name in ("eta", "mu", "rho")}
        assert all(0 <= t["mu"] <= 1 and 0 <= t["rho"] <= 4 and t["eta"] >= 0 for t in trials)
        path.write_text(path.read_text().splitlines()[0] + "\n")  # as if interrupted after one
        second = methods.search(task, "RS", 0, sampler)
        again = [json.loads(line) for line in path.read_text().splitlines()]
        assert again[0] == trials[0]
        assert second["trials"] == len(again) > 1
        records = [json.loads(line) for line in task.folder.metrics.read_text().splitlines()]
        measured = [k for k, t in enumerate(again) if t["stopped"] != "diverged"]
        assert set(measured) <= {r["trial"] for r in records} <= set(range(len(again)))

    def test_trials_that_cannot_be_read_are_named(self, tmp_path):
        path = tmp_path / "RS-0.jsonl"
        assert methods.read_trials(path) == []
        path.write_text('{"eta": 1.0}\n{"eta": 2')
        with pytest.raises(RunError, match=r"RS-0\.jsonl is damaged .* the search begins anew"):
            methods.read_trials(path)

    def test_random_search_draws_as_published(self):
        drawn = [methods.Random(0).ask(k) for k in range(4000)]
        eta, mu, rho = (np.array([d[name] for d in drawn]) for name in ("eta", "mu", "rho"))
        assert np.mean(eta) == pytest.approx(0.1, rel=0.1)
        assert np.std(eta) == pytest.approx(0.1, rel=0.1)
        assert np.mean(mu) == pytest.approx(0.5, abs=0.03)
        assert np.mean(rho) == pytest.approx(2.0, abs=0.1)
        assert (mu.min() >= 0, mu.max() <= 1, rho.max() <= 4) == (True, True, True)

    @pytest.mark.parametrize("start", [methods.KNOWN, methods.NULL], ids=["known", "null"])
    def test_real_time_tuning_learns_from_both_starts(self, corpus, tmp_path, start):
        task = make_task(corpus, tmp_path / "run", budget=1.0, check=10, patience=100)
        found = methods.realtime(task, "RTHO", 0, methods.paper_tuner, start)
        assert found["validation_accuracy"] > 1.5 / corpus.classes
        records = [json.loads(line) for line in task.folder.metrics.read_text().splitlines()]
        assert [r["step"] for r in records] == list(range(1, len(records) + 1))
        for r in records:
            assert r["eta"] >= 0
            assert 0 <= r["mu"] <= 1
            assert r["rho"] >= 0
        assert {"validation_accuracy", "training_accuracy"} <= records[9].keys()

    def test_an_interrupted_real_time_run_goes_on(self, corpus, tmp_path, monkeypatch):
        task = make_task(corpus, tmp_path / "run", budget=1.0, patience=100)
        note = methods.Curve.note

        def interrupted(self, step, **measured):
            note(self, step, **measured)
            if step == 6:
                raise KeyboardInterrupt

        monkeypatch.setattr(methods.Curve, "note", interrupted)
        with pytest.raises(KeyboardInterrupt):
            methods.realtime(task, "RTHO", 0, methods.paper_tuner, methods.KNOWN)
        monkeypatch.setattr(methods.Curve, "note", note)
        found = methods.realtime(task, "RTHO", 0, methods.paper_tuner, methods.KNOWN)
        records = [json.loads(line) for line in task.folder.metrics.read_text().splitlines()]
        assert [r["step"] for r in records] == list(range(1, len(records) + 1))
        assert len(records) > 6
        assert np.all(np.diff([r["seconds"] for r in records]) > 0)
        assert found["steps"] == len(records) * task.window

    def test_what_comes_after_the_budget_does_not_count(self, corpus, tmp_path):
        task = make_task(corpus, tmp_path / "run", budget=10.0)
        curve = methods.Curve(task, "x", 0, lambda record: False)
        for k, (seconds, accuracy) in enumerate([(4.0, 0.2), (9.0, 0.3), (10.5, 0.4)]):
            found = {"validation_accuracy": accuracy, "test_accuracy": accuracy - 0.1}
            curve.note(k, seconds=seconds, **found)
        with methods.Clock(10.0, "x") as clock:
            assert curve.outcome(clock, 0)["validation_accuracy"] == 0.3
        late = methods.Curve(task, "y", 0, lambda record: False)
        late.note(1, seconds=11.0, validation_accuracy=0.5, test_accuracy=0.5)
        assert late.best["validation_accuracy"] == 0.5  # better than nothing

    def test_the_clock_stands_while_it_is_paused(self):
        now = [100.0]
        with methods.Clock(10.0, "x", lambda: now[0]) as clock:
            clock.go()
            now[0] += 3
            clock.pause()
            now[0] += 50
            clock.go()
            now[0] += 4
            assert clock.seconds == 7
            assert not clock.over
            clock.spend(3)
            assert clock.over


def test_an_interrupted_real_time_run_is_not_finished(corpus, tmp_path):
    task = make_task(corpus, tmp_path / "run")
    directory = task.folder.checkpoints / "RTHO-0"
    directory.mkdir(parents=True)

    class Tuner:
        stopped = "interrupted"
        hparams: dict = {}  # noqa: RUF012

        def run(self, *_, **__):
            return self

    with pytest.raises(KeyboardInterrupt):
        methods.realtime(task, "RTHO", 0, Tuner, methods.KNOWN)
    assert directory.exists()


class TestCommand:
    @pytest.fixture
    def run(self, corpus, monkeypatch):
        monkeypatch.setattr(phones, "QUICK", TINY)
        monkeypatch.setattr(phones, "synthetic_speech", lambda frames, cepstral: corpus)
        monkeypatch.setattr(phones.importlib.util, "find_spec", lambda name: None)  # no torch
        return lambda *arguments: CliRunner().invoke(app, ["phones", *arguments])

    def test_all_methods_in_a_table_and_a_page(self, run, tmp_path):
        out = tmp_path / "run"
        first = run("--quick", "--out", str(out))
        assert first.exit_code == 0, first.output
        assert "needs PyTorch" in first.output
        assert "[1/8] Vanilla, seed 0: 0.8 s\n  validation " in first.output
        assert "[8/8] tables, figures and report" in first.output
        result = json.loads((out / "result.json").read_text())
        names = [row[0] for row in result["tables"][0]["rows"]]
        assert names == [name for name in phones.METHODS if name != phones.GP]
        assert [t["title"] for t in result["tables"]] == [
            "Accuracy",
            "Validation accuracy over time",
            "Hyperparameters",
            "Time of a step",
        ]
        files = [figure["file"] for figure in result["figures"]]
        assert "figures/time.svg" in files
        assert "figures/rtho-nt.svg" in files
        assert all((out / file).is_file() for file in files)
        page = (out / "report.html").read_text()
        assert "foretune-NT" in page
        # A stage that is lost is made again, and nothing else.
        before = {p.name: p.read_text() for p in (out / "stages").iterdir()}
        (out / "stages" / "Vanilla-0.json").unlink()
        (out / "result.json").unlink()
        second = run("--quick", "--out", str(out))
        assert second.exit_code == 0, second.output
        after = {p.name: p.read_text() for p in (out / "stages").iterdir()}
        assert before.keys() == after.keys()
        assert all(before[name] == after[name] for name in before if name != "Vanilla-0.json")

    def test_a_batch_larger_than_the_data(self, run, tmp_path):
        refused = run("--quick", "--batch", "100000", "--out", str(tmp_path / "run"))
        assert refused.exit_code == 1
        assert "--batch 100,000: there are 400 frames to train on" in refused.output

    def test_no_timit_and_no_espeak(self, tmp_path, monkeypatch):
        monkeypatch.setenv("FORETUNE_DATA", str(tmp_path))
        missing = CliRunner().invoke(app, ["phones", "--data", "timit", "--quick"])
        assert missing.exit_code == 1
        assert "has no folder timit" in missing.output
        odd = CliRunner().invoke(app, ["phones", "--data", "timit", "--frames", "5000"])
        assert odd.exit_code == 2
        assert "TIMIT is read whole" in " ".join(odd.output.split())
        missing = CliRunner().invoke(app, ["phones", "--data", str(tmp_path / "x")])
        assert missing.exit_code == 1
        assert "no folder" in missing.output
        monkeypatch.setitem(__import__("sys").modules, "espeakng_loader", None)
        with pytest.raises(DataError, match="pip install --group speech"):
            synthetic_speech(1000, cache=None)

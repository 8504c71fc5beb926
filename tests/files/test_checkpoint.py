"""Checkpoints: after SIGKILL, truncation or Ctrl-C a run goes on to the same bits."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft
from foretune._realtime.program import UpdateProgram

from ..problems import penalised, regression, squared_error

CHILD = textwrap.dedent("""
    import json, sys
    import numpy as np, optax
    import foretune as ft
    from tests.problems import regression

    folder, last = sys.argv[1], int(sys.argv[2])

    class Steps(ft.Callback):
        def step(self, run):
            print(run.step, flush=True)
            if run.step == last:
                sys.stdin.read()  # until it is killed

    problem, hparams = regression(steps=4)
    result = ft.minimize(
        problem, hparams, steps=12, optimizer=optax.adam(0.01),
        constraints={"lr": ft.NonNegative()},
        callbacks=[ft.History(folder + "/metrics.jsonl"), ft.Checkpoint(folder + "/state"), Steps()],
    )
    bits = {name: np.asarray(leaf).tobytes().hex() for name, leaf in result.hparams.items()}
    print("result " + json.dumps({"hparams": bits, "history": result.history}))
""")


def start_child(folder, last=-1):
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), str(last)], text=True, cwd=root,
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def result_of(child):
    lines = child.communicate()[0].splitlines()
    assert child.returncode == 0
    return json.loads(lines[-1].removeprefix("result "))


@pytest.mark.second_tier
def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    expected = result_of(start_child(tmp_path / "whole"))
    rng = np.random.default_rng(0)
    folder = tmp_path / "killed"
    for target in (2, 7):
        child = start_child(folder, last=target + 2)  # it does not end before it is killed
        for line in child.stdout:
            if int(line) >= target:
                time.sleep(rng.uniform(0, 0.08))  # at any moment of the step, a save included
                break
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert child.returncode == -signal.SIGKILL
    resumed = result_of(start_child(folder))
    assert resumed == expected
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == expected["history"]


def run(folder, steps=6, callbacks=(), **options):
    problem, hparams = regression(steps=4)
    given = {"optimizer": optax.adam(0.01)} | options
    return ft.minimize(
        problem, hparams, steps=steps, callbacks=[ft.Checkpoint(folder), *callbacks], **given
    )


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: bool(np.array_equal(x, y)), a, b))


@pytest.mark.parametrize("damage", ["truncate", "empty", "flip", "remove"])
@pytest.mark.second_tier
def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, damage):
    expected = run(tmp_path / "whole")
    run(tmp_path / "damaged", steps=4)
    newest = tmp_path / "damaged" / "foretune_4"
    files = [p for p in newest.rglob("*") if p.is_file() and "carry" in str(p)]
    assert files
    for file in files:
        content = file.read_bytes()
        if damage == "truncate":
            file.write_bytes(content[: len(content) // 2])
        elif damage == "empty":
            file.write_bytes(b"")
        elif damage == "flip" and len(content) > 40:
            file.write_bytes(content[:30] + bytes([content[30] ^ 255]) + content[31:])
        elif damage == "remove":
            file.unlink()
    damaged = contents(newest)
    with pytest.warns(UserWarning, match=r"checkpoint of step 4 .* cannot be used"):
        resumed = run(tmp_path / "damaged")
    assert same(resumed.hparams, expected.hparams)
    assert resumed.history == expected.history
    assert contents(tmp_path / "damaged" / "foretune_4.damaged") == damaged


def _below(folder):
    return sorted(folder.rglob("*"))


def names(folder):
    ours = (".lock", "foretune.records")
    return sorted(path.name for path in folder.iterdir() if path.name not in ours)


def contents(folder):
    """Return the files by name, links as what they point to."""
    files = [path for path in _below(folder) if path.is_symlink() or path.is_file()]
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in files
    }


@pytest.mark.second_tier
def test_a_finished_run_can_be_prolonged(tmp_path):
    expected = run(tmp_path / "whole", steps=9)
    run(tmp_path / "parts", steps=3)
    again = run(tmp_path / "parts", steps=3)
    assert len(again.history) == 4
    longer = run(tmp_path / "parts", steps=9)
    assert same(longer.hparams, expected.hparams)
    assert longer.history == expected.history
    assert same(longer.best, expected.best)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.second_tier)]
)
def test_a_signal_saves(tmp_path, number):
    class Interrupt(ft.Callback):
        def step(self, run):
            if run.step == 3:
                os.kill(os.getpid(), number)

    before = signal.getsignal(number)

    stopped = run(tmp_path / "stopped", callbacks=[Interrupt()])
    assert stopped.stopped == "interrupted"
    assert signal.getsignal(number) is before
    resumed, expected = run(tmp_path / "stopped"), run(tmp_path / "whole")
    assert resumed.history == expected.history


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": optax.sgd(0.1)},
        {"constraints": {"lr": ft.NonNegative()}},
    ],
    ids=["optimizer", "constraints"],
)
def test_the_folder_of_another_run_is_refused(tmp_path, options):
    run(tmp_path)
    with pytest.raises(ValueError, match="holds another run, with another problem or optimizer"):
        run(tmp_path, **options)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (
            {"hparams": {"lr": jnp.array(0.2), "decay": jnp.array(0.02)}},
            "the initial hyperparameters",
        ),
        ({"init": {"w": np.ones(3, np.float32), "b": np.float32(0)}}, "the initial parameters"),
        ({"trajectory": True}, "trajectory: False there, True here"),
        (
            {"batches": ft.FullBatch((np.ones((20, 3), np.float32), np.ones(20, np.float32)), 4)},
            "the training data: other numbers",
        ),
        (
            {"validation": (np.ones((20, 3), np.float32), np.ones(20, np.float32))},
            "the validation data: other numbers",
        ),
    ],
)
def test_another_start_or_error_is_refused(tmp_path, change, difference):
    problem, hparams = regression(steps=4)
    given = {"steps": 2, "optimizer": optax.adam(0.01), "callbacks": [ft.Checkpoint(tmp_path)]}
    ft.minimize(problem, hparams, **given)
    hparams = change.pop("hparams", hparams)
    with pytest.raises(ValueError, match=f"holds another run(.|\n)*{difference}"):
        ft.minimize(problem.replace(**change), hparams, **given)


def test_few_checkpoints_are_kept(tmp_path):
    problem, hparams = regression(steps=4)
    ft.minimize(problem, hparams, steps=7, callbacks=[ft.Checkpoint(tmp_path, every=2, keep=3)])
    assert names(tmp_path) == ["foretune_4", "foretune_6", "foretune_7"]


def test_what_foretune_did_not_write_is_left_alone(tmp_path):
    for name in ("2023", "2024", "3", "foretune_notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "diary.txt").write_text(name)
    before = contents(tmp_path)
    problem, hparams = regression(steps=4)
    for steps in (3, 6):
        checkpoint = ft.Checkpoint(tmp_path, keep=1)
        ft.minimize(problem, hparams, steps=steps, callbacks=[checkpoint])
    assert contents(tmp_path).items() >= before.items()
    assert [name for name in names(tmp_path) if name not in ("2023", "2024", "3")] == [
        "foretune_6", "foretune_notes",
    ]  # fmt: skip


@pytest.mark.second_tier
def test_a_flipped_byte_in_the_metadata_is_damage(tmp_path):
    expected = run(tmp_path / "whole", steps=4)
    run(tmp_path / "sound", steps=3)
    name = "foretune_3/meta/metadata"
    text = (tmp_path / "sound" / name).read_bytes()
    # The number of records, what the run belongs to, the step and the name of the digest.
    for i, before in enumerate([b'"records": ', b'"inner steps": "', b'"step": ', b'"dig']):
        at = text.index(before) + len(before)
        folder = tmp_path / str(i)
        shutil.copytree(tmp_path / "sound", folder)
        (folder / name).write_bytes(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])
        with pytest.warns(UserWarning, match=r"checkpoint of step 3 .* cannot be used"):
            resumed = run(folder, steps=4)
        assert resumed.history == expected.history
        assert same(resumed.hparams, expected.hparams)


def flip(path, line):
    """Change a digit in a line of a file."""
    lines = path.read_bytes().splitlines(keepends=True)
    at = lines[line].index(b'"value": ') + 12
    lines[line] = lines[line][:at] + bytes([lines[line][at] ^ 1]) + lines[line][at + 1 :]
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize(
    "damage", ["flip", *(pytest.param(d, marks=pytest.mark.second_tier) for d in ("cut", "remove"))]
)
def test_records_that_are_lost_are_named_and_cost_nothing_else(tmp_path, damage):
    expected = run(tmp_path / "whole", steps=6)
    run(tmp_path / "damaged", steps=4)
    records = tmp_path / "damaged" / "foretune.records"
    if damage == "flip":
        flip(records, 0)
    else:
        records.write_bytes(records.read_bytes()[:1]) if damage == "cut" else records.unlink()
    with pytest.warns(UserWarning, match="records"):
        resumed = run(tmp_path / "damaged", steps=5)
    lost = [0] if damage == "flip" else [0, 1, 2, 3, 4]
    kept = [record for record in expected.history if record["step"] not in lost]
    assert resumed.history == kept[:-1]
    assert "foretune.records.damaged" in names(tmp_path / "damaged") or damage == "remove"
    again = run(tmp_path / "damaged", steps=6)  # without a warning
    assert again.history == kept
    assert same(again.hparams, expected.hparams)


def test_records_are_written_once(tmp_path):
    sizes = []

    class Watch(ft.Callback):
        def step(self, run):
            if run.step:  # the step before has been saved
                sizes.append((tmp_path / "foretune.records").stat().st_size)
                (meta,) = tmp_path.glob(f"foretune_{run.step - 1}/meta/metadata")
                sizes.append(meta.stat().st_size)

    run(tmp_path, steps=12, callbacks=[Watch()])
    records, metas = sizes[4::2], sizes[5::2]
    assert max(np.diff(records)) < 2 * min(np.diff(records))  # a record each time
    assert max(metas) < min(metas) + 40  # none of which is in a checkpoint


def test_what_a_callback_adds_to_a_record_is_kept(tmp_path):
    class Add(ft.Callback):
        def step(self, run):
            run.record["more"] = run.step

    run(tmp_path, steps=3, callbacks=[Add()])
    resumed = run(tmp_path, steps=4, callbacks=[Add()])
    assert [record["more"] for record in resumed.history] == [0, 1, 2, 3, 4]


def test_arrays_of_another_step_are_damage(tmp_path):
    expected = run(tmp_path / "whole", steps=4)
    run(tmp_path / "mixed", steps=3)
    shutil.rmtree(tmp_path / "mixed" / "foretune_3" / "carry")
    shutil.copytree(
        tmp_path / "mixed" / "foretune_2" / "carry", tmp_path / "mixed" / "foretune_3" / "carry"
    )
    with pytest.warns(UserWarning, match=r"its arrays are not those that were saved"):
        resumed = run(tmp_path / "mixed", steps=4)
    assert resumed.history == expected.history


def test_checkpoints_that_are_all_damaged_stay_as_they_are(tmp_path):
    run(tmp_path, steps=3)
    for file in tmp_path.glob("foretune_*/meta/*"):
        file.write_bytes(b"{}")
    before = contents(tmp_path)
    for _ in range(2):
        with (
            pytest.warns(UserWarning, match="cannot be used"),
            pytest.raises(ValueError, match=r"none of the checkpoints .* are left as they are"),
        ):
            run(tmp_path, steps=3)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("item", ["meta", "carry"])
def test_a_disk_that_fails_is_no_damage(tmp_path, item):
    run(tmp_path, steps=3)
    for file in [path for path in _below(tmp_path / "foretune_3" / item) if path.is_file()]:
        file.unlink()
        file.symlink_to(file.name)  # "too many levels of symbolic links"
    before = contents(tmp_path)
    with pytest.raises(OSError, match="symbolic links"):
        run(tmp_path, steps=4)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("error", [PermissionError("not now"), MemoryError("not now")])
def test_an_error_while_reading_passes_on(tmp_path, monkeypatch, error):
    import orbax.checkpoint as ocp

    expected = run(tmp_path / "whole", steps=4)
    run(tmp_path / "parts", steps=3)
    before = contents(tmp_path / "parts")

    def fails(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "restore", fails)
        with pytest.raises(type(error), match="not now"):
            run(tmp_path / "parts", steps=4)
    assert contents(tmp_path / "parts") == before
    assert run(tmp_path / "parts", steps=4).history == expected.history


def test_a_directory_has_a_name():
    with pytest.raises(ValueError, match="the path has no name"):
        ft.Checkpoint("")


def flat_penalised(params, hparams, batch):
    return penalised(params, hparams, (batch[:, :3], batch[:, 3]))


def flat_error(state, hparams, batch):
    return squared_error(state, hparams, (batch[:, :3], batch[:, 3]))


DYNAMICS = ft.Training(flat_penalised, lambda h: optax.sgd(h["lr"], 0.5))


def tune(callbacks, at=lambda point, window: None, **options):
    """Tune over a stream in real time, saying `at(point, window)` where it is."""

    class Watched(UpdateProgram):
        def __call__(self, state, window, validation, donate):
            number = int(state.window) + 1
            at("before the window", number)
            result = super().__call__(state, window, validation, donate)
            at("in the window", number)
            return result

    class Watch(ft.Callback):
        def step(self, run):
            at("callback", run.step)

    def score(record):
        at("score", record["step"])
        return abs(record["step"] - 3)

    def evaluate(state, hparams):
        return {"size": jnp.sum(state.params["w"] ** 2)}

    def stream(name, batch, each):
        for i in itertools.count():
            at(name, i // each + 1)
            yield batch * (1 + 0.1 * np.sin(i)).astype(np.float32)

    rng = np.random.default_rng(0)
    train, validation = rng.normal(size=(2, 8, 4)).astype(np.float32)
    tuner = ft.RealTime(DYNAMICS, flat_error, constraints={"lr": ft.NonNegative()}, **options)
    tuner._program = Watched(tuner.settings)
    return tuner.run(
        stream("training stream", train, 2), stream("validation stream", validation, 1),
        params={"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)},
        hparams={"lr": jnp.array(0.01), "decay": jnp.array(0.02)}, window=2, steps=5,
        callbacks=[*callbacks, Watch()], stop=lambda run: at("stop", run.step), score=score,
        evaluate=evaluate,
    )  # fmt: skip


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("point", "kept"),
    [
        ("training stream", 2),
        ("validation stream", 2),
        ("before the window", 2),
        ("in the window", None),  # the memory of the state before it is taken
        ("score", None),
        ("callback", 3),
        ("stop", 3),
    ],
)
def test_a_second_ctrl_c_leaves_nothing_that_is_not_whole(tmp_path, point, kept):
    def interrupt(here, window):
        if (here, window) == (point, 3):
            raise KeyboardInterrupt

    expected = tune([])
    with pytest.raises(KeyboardInterrupt):
        tune([ft.Checkpoint(tmp_path, every=10)], interrupt)
    assert names(tmp_path) == ["foretune_1", *([] if kept is None else [f"foretune_{kept}"])]
    resumed = tune([ft.Checkpoint(tmp_path, every=10)])
    assert resumed.history == expected.history
    assert same(resumed.state, expected.state)
    assert same(resumed.best, expected.best)


@pytest.mark.second_tier
def test_best_after_a_score_that_failed(tmp_path):
    """A window whose score fails, the best of all, is counted when the run resumes."""
    expected = tune([])
    assert expected.best.step == 3

    def fail(here, window):
        if (here, window) == ("score", 3):
            raise ValueError("no score")

    with pytest.raises(ValueError, match="no score"):
        tune([ft.Checkpoint(tmp_path)], fail)
    resumed = tune([ft.Checkpoint(tmp_path)])
    assert same(resumed.best, expected.best)
    assert resumed.history == expected.history


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"discount": 1.0}, r"discount: 0\.9 there, 1\.0 here"),
        ({"rollback": None}, r"rollback: 1\.5 there, None here"),
    ],
)
@pytest.mark.second_tier
def test_another_constant_of_the_tuner_is_refused(tmp_path, change, difference):
    with pytest.raises(RuntimeError, match="enough"):
        tune([ft.Checkpoint(tmp_path)], stop_in_the_second_window)
    with pytest.raises(ValueError, match=f"holds another run(.|\n)*{difference}"):
        tune([ft.Checkpoint(tmp_path)], **change)


@pytest.mark.second_tier
def test_what_does_not_change_the_result_may_change(tmp_path):
    with pytest.raises(RuntimeError, match="enough"):
        tune([ft.Checkpoint(tmp_path)], stop_in_the_second_window)
    resumed = tune([ft.Checkpoint(tmp_path)], donate=False, chunk=1)
    assert [record["step"] for record in resumed.history] == [1, 2, 3, 4, 5]


def stop_in_the_second_window(here, window):
    if (here, window) == ("callback", 2):
        raise RuntimeError("enough")


def test_a_save_that_is_interrupted_is_not_tried_again(tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    save = ocp.CheckpointManager.save

    def interrupted(self, step, **options):
        save(self, step, **options)
        if step == 2:
            raise KeyboardInterrupt

    expected = run(tmp_path / "whole", steps=4)
    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "parts", steps=4)
    assert run(tmp_path / "parts", steps=4).history == expected.history


class Constants(NamedTuple):
    lr: jax.Array
    decay: jax.Array


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("hparams", "recorded"),
    [
        ({0: 0.01, 1: 0.02}, {"hparams[0]": 0.01, "hparams[1]": 0.02}),
        (Constants(0.01, 0.02), {"hparams.lr": 0.01, "hparams.decay": 0.02}),
        ({"a": (0.01, {2: 0.02})}, {"a": [0.01, {"hparams['a'][1][2]": 0.02}]}),
    ],
)
def test_a_resumed_history_is_equal_whatever_holds_the_hyperparameters(tmp_path, hparams, recorded):
    start = jax.tree.map(jnp.float32, hparams)

    def by_name(h):
        lr, decay = jax.tree.leaves(h)
        return {"lr": lr, "decay": decay}

    tuner = ft.RealTime(
        ft.Training(
            lambda p, h, b: flat_penalised(p, by_name(h), b), lambda h: optax.sgd(by_name(h)["lr"])
        ),
        flat_error,
    )
    batch = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)

    def run(steps, callbacks=()):
        params = {"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}
        return tuner.run(
            [batch] * 6, [batch], params=params, hparams=start, window=2, steps=steps,
            callbacks=callbacks,
        ).history  # fmt: skip

    fresh = run(3)
    assert fresh[0]["hparams"] == jax.tree.map(lambda x: float(np.float32(x)), recorded)
    run(2, [ft.Checkpoint(tmp_path)])
    assert run(3, [ft.Checkpoint(tmp_path)]) == fresh


@pytest.mark.second_tier
def test_a_folder_belongs_to_one_run(tmp_path):
    """The lock goes with its owner, however that ends."""
    script = """if True:
        import sys
        from foretune._files.files import locked
        with locked(sys.argv[1]):
            print("locked", flush=True)
            sys.stdin.read()
    """
    command, pipe = [sys.executable, "-c", script, str(tmp_path)], subprocess.PIPE
    problem, hparams = regression(2)
    options = {"steps": 1, "callbacks": [ft.Checkpoint(tmp_path)]}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match=f"in use by another run .process {child.pid}"):
            ft.minimize(problem, hparams, **options)
        child.kill()
    ft.minimize(problem, hparams, **options)
    ft.minimize(problem, hparams, **options)  # and it is given back when a run ends

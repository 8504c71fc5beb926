"""Checkpoints: after SIGKILL, truncation or Ctrl-C a run goes on to the same bits."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import foretune as ft

from ..problems import regression

CHILD = textwrap.dedent("""
    import json, sys, time
    import numpy as np, optax
    import foretune as ft
    from tests.problems import regression

    class Slow(ft.Callback):
        def step(self, run):
            print(run.step, flush=True)
            time.sleep(0.05)

    problem, hparams = regression(steps=4)
    folder = sys.argv[1]
    result = ft.minimize(
        problem, hparams, steps=12, optimizer=optax.adam(0.01),
        constraints={"lr": ft.NonNegative()},
        callbacks=[ft.History(folder + "/metrics.jsonl"), ft.Checkpoint(folder + "/state"), Slow()],
    )
    bits = {name: np.asarray(leaf).tobytes().hex() for name, leaf in result.hparams.items()}
    print("result " + json.dumps({"hparams": bits, "history": result.history}))
""")


def start_child(folder):
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder)], stdout=subprocess.PIPE, text=True,
        cwd=root, env=environment,
    )  # fmt: skip


def result_of(child):
    lines = child.communicate(timeout=120)[0].splitlines()
    assert child.returncode == 0
    return json.loads(lines[-1].removeprefix("result "))


def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    expected = result_of(start_child(tmp_path / "whole"))
    rng = np.random.default_rng(0)
    folder = tmp_path / "killed"
    for target in (2, 7):
        child = start_child(folder)
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
def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, damage):
    expected = run(tmp_path / "whole")
    run(tmp_path / "damaged", steps=4)
    newest = tmp_path / "damaged" / "4"
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
    with pytest.warns(UserWarning, match=r"checkpoint of step 4 .* cannot be used"):
        resumed = run(tmp_path / "damaged")
    assert same(resumed.hparams, expected.hparams)
    assert resumed.history == expected.history


def test_a_finished_run_can_be_prolonged(tmp_path):
    expected = run(tmp_path / "whole", steps=9)
    run(tmp_path / "parts", steps=3)
    again = run(tmp_path / "parts", steps=3)
    assert len(again.history) == 4
    longer = run(tmp_path / "parts", steps=9)
    assert same(longer.hparams, expected.hparams)
    assert longer.history == expected.history
    assert same(longer.best, expected.best)


def test_ctrl_c_saves(tmp_path):
    class Interrupt(ft.Callback):
        def step(self, run):
            if run.step == 3:
                os.kill(os.getpid(), signal.SIGINT)

    stopped = run(tmp_path / "stopped", callbacks=[Interrupt()])
    assert stopped.stopped == "interrupted"
    resumed, expected = run(tmp_path / "stopped"), run(tmp_path / "whole")
    assert resumed.history == expected.history


def test_warm_starts_resume_too(tmp_path):
    run(tmp_path / "parts", steps=3, warm_start=True)
    resumed = run(tmp_path / "parts", warm_start=True)
    assert resumed.history == run(tmp_path / "whole", warm_start=True).history


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": optax.sgd(0.1)},
        {"constraints": {"lr": ft.NonNegative()}},
        {"warm_start": True},
    ],
    ids=["optimizer", "constraints", "warm start"],
)
def test_the_folder_of_another_run_is_refused(tmp_path, options):
    run(tmp_path)
    with pytest.raises(ValueError, match="holds another run, with another problem or optimizer"):
        run(tmp_path, **options)


def test_another_start_is_refused(tmp_path):
    run(tmp_path)
    problem, hparams = regression(steps=4)
    with pytest.raises(ValueError, match="holds another run"):
        ft.minimize(
            problem, hparams | {"lr": hparams["lr"] * 2}, steps=6, optimizer=optax.adam(0.01),
            callbacks=[ft.Checkpoint(tmp_path)],
        )  # fmt: skip


def test_a_run_that_diverged_goes_on_with_a_smaller_step(tmp_path):
    problem, hparams = regression(steps=100)
    for rate in (-100.0, 0.0):
        options = {"optimizer": optax.sgd(rate), "callbacks": [ft.Checkpoint(tmp_path)]}
        if rate:
            with pytest.raises(ft.NonFiniteError):
                ft.minimize(problem, hparams, steps=50, **options)
        else:
            assert ft.minimize(problem, hparams, steps=50, **options).stopped == "50 steps done"


def test_few_checkpoints_are_kept(tmp_path):
    problem, hparams = regression(steps=4)
    ft.minimize(problem, hparams, steps=7, callbacks=[ft.Checkpoint(tmp_path, every=2, keep=3)])
    assert sorted(int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()) == [4, 6, 7]

"""A run that is over, called again with its checkpoint, changes nothing, whatever ended it."""

import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft

from ..problems import momentum, penalised, regression, squared_error
from .test_checkpoint import contents, same

ROOT = Path(__file__).parents[2]


class Count(ft.Callback):
    """Counts the steps that a process makes."""

    def __init__(self):
        self.steps = []

    def step(self, run):
        self.steps.append(run.step)


def minimized(folder, callbacks=(), **options):
    problem, hparams = regression(steps=4)
    given = {"optimizer": optax.adam(0.01), "steps": 6} | options
    return ft.minimize(problem, hparams, callbacks=[*callbacks, ft.Checkpoint(folder)], **given)


def drawn(folder, callbacks=(), **options):
    problem, hparams = regression(steps=4)
    batches = ft.Minibatches.shuffled(
        problem.batches.data, batch_size=5, steps=4, key=jax.random.key(0)
    )
    problem = problem.replace(batches=batches)
    given = {"optimizer": optax.adam(0.01), "steps": 6} | options
    return ft.minimize(
        lambda key: problem.replace(batches=batches.reshuffled(key)), hparams,
        key=jax.random.key(1), callbacks=[*callbacks, ft.Checkpoint(folder)], **given,
    )  # fmt: skip


def rejected(folder, callbacks=(), **options):
    """Of which the last evaluations are rejected."""
    return minimized(folder, callbacks, optimizer=optax.sgd(-3.0), **options)


def real_time(folder, callbacks=(), count=40, **options):
    rng = np.random.default_rng(0)
    stream = [(x, x @ np.ones(3, np.float32)) for x in rng.normal(size=(count, 8, 3)).astype("f4")]
    params = {"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}
    hparams = {"lr": jnp.array(0.01), "decay": jnp.array(0.02)}
    return ft.RealTime(ft.Training(penalised, momentum), squared_error).run(
        iter(stream), itertools.repeat(stream[0]), params=params, hparams=hparams, window=2,
        callbacks=[*callbacks, ft.Checkpoint(folder)], **options,
    )  # fmt: skip


def at_the_third(calls):
    """A rule of one's own that cannot be asked again: it has seen nothing in another process."""

    def rule(run):
        calls.append(run.step)
        return "enough" if len(calls) == 3 else None

    return rule


RUNS = {"minimize": minimized, "draws": drawn, "rejected": rejected, "real time": real_time}
ENDS = {
    "steps": lambda: {"steps": 4},
    "a rule": lambda: {"steps": 9, "stop": at_the_third([])},
    "patience": lambda: {"steps": 9, "stop": ft.NoImprovement(1), "score": lambda r: r["step"]},
    "the stream": lambda: {"count": 9},
}


@pytest.mark.filterwarnings("ignore:the error or the hypergradient")
@pytest.mark.parametrize(
    ("kind", "end"),
    [  # in the first tier each kind once, with an end of its own
        pytest.param(kind, end, marks=() if end == first else pytest.mark.second_tier)
        for kind, first in zip(RUNS, ENDS, strict=True)
        for end in ENDS
        if end != "the stream" or kind == "real time"
    ],
)
def test_a_run_that_is_over_changes_nothing(kind, end, tmp_path):
    first = RUNS[kind](tmp_path, **ENDS[end]())
    before, count = contents(tmp_path), Count()
    again = RUNS[kind](tmp_path, [count], **ENDS[end]())
    assert again.stopped == first.stopped
    assert again.history == first.history
    for name in ("hparams", "value", "state", "best"):
        assert same(getattr(again, name), getattr(first, name)), name
    assert count.steps == []
    after = contents(tmp_path)
    assert after.pop(".lock") is not None
    assert after == {name: content for name, content in before.items() if name != ".lock"}


KILLED = textwrap.dedent("""
    import os, signal, sys
    import foretune as ft
    from foretune._outer import checkpoint
    from tests.files import test_finished as tests

    class Killed(ft.Checkpoint):
        def end(self, run):  # after the last save, before the result is returned
            os.kill(os.getpid(), signal.SIGKILL)

    ft.Checkpoint = Killed
    tests.RUNS[sys.argv[1]](sys.argv[2], **tests.ENDS["a rule"]())
""")


@pytest.mark.second_tier
@pytest.mark.parametrize("kind", ["minimize", "real time"])
def test_a_kill_between_the_last_save_and_the_return_changes_nothing(kind, tmp_path):
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    child = subprocess.run(
        [sys.executable, "-c", KILLED, kind, str(tmp_path / "killed")], cwd=ROOT, check=False,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert child.returncode == -9
    whole = RUNS[kind](tmp_path / "whole", **ENDS["a rule"]())
    again = RUNS[kind](tmp_path / "killed", **ENDS["a rule"]())
    assert (again.stopped, again.history) == (whole.stopped, whole.history)
    assert same(again.state, whole.state)


@pytest.mark.second_tier
@pytest.mark.parametrize("kind", ["minimize", "real time"])
def test_it_continues_when_more_is_asked_for(kind, tmp_path):
    """More steps, no rule that ends it, or seconds that begin anew."""
    run = RUNS[kind]
    whole = run(tmp_path / "whole", steps=8)
    run(tmp_path / "steps", steps=5, stop=at_the_third([]))
    assert run(tmp_path / "steps", steps=8).history == whole.history
    run(tmp_path / "rule", steps=8, stop=at_the_third([]))
    assert run(tmp_path / "rule", steps=8).history == whole.history
    for _ in range(10):
        result = run(tmp_path / "seconds", steps=8, stop=ft.TimeLimit(0.0))
    assert (result.history, result.stopped) == (whole.history, "8 steps done")

"""Every bad input of the table ends in the error that a user is to see."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from .bad_inputs import table

ROWS = table()
SAMPLE = 60
RAW = ("Tracer", "'NoneType' object", "object has no attribute", "not subscriptable", "unhashable")
"""What Python and JAX say of a slip: never by itself, unless it is the user's function that slips."""
UNCOMPILED = ("hparams", "problem", "sets")


def pytest_generate_tests(metafunc):
    if "index" in metafunc.fixturenames:
        every = 1 if metafunc.config.getoption("trials") == "all" else len(ROWS) // SAMPLE
        chosen = range(0, len(ROWS), every)
        metafunc.parametrize("index", chosen, ids=[ROWS[i].name for i in chosen])


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Return a function that has a row's call made in another process, as a user makes it."""
    folder = tmp_path_factory.mktemp("trials")
    settings = {
        "FORETUNE_TRIALS": str(folder),
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.values["jax_compilation_cache_dir"]),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    log = (folder / "stderr").open("w+")
    child = subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.bad_inputs"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | settings,
    )

    def answer(index):
        print(index, file=child.stdin, flush=True)
        line = child.stdout.readline()
        log.seek(0)
        assert line, f"the process that makes the calls has ended:\n{log.read()[-2000:]}"
        return json.loads(line)

    with log, child:
        yield answer
        child.stdin.close()


def test_a_bad_input_is_named(ask, index):
    row, found = ROWS[index], ask(index)
    name = row.error.__name__
    if issubclass(row.error, Warning):
        assert not found["raised"], found["trace"]
        said = [w["message"] for w in found["warnings"] if name in w["classes"]]
        assert any(all(word in message for word in row.words) for message in said), found
        return
    message = found["message"]
    assert name in found["classes"], found.get("trace", message)
    assert [word for word in row.words if word not in message] == [], message
    if "this happened in" not in message and "JAX says" not in message:
        assert not any(raw in message for raw in RAW), message
    if row.name.startswith(UNCOMPILED) and row.error in (TypeError, ValueError):
        assert found["programs"] == 0, f"compiled before the error: {message}"


def test_names_are_unique():
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names)) >= 300

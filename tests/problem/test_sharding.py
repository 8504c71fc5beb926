"""Several devices and processes give what one device gives.

Devices are a setting of the process, so the work is done by child processes (`devices`): one with
8 simulated devices, and two with two devices each that talk over the loopback interface.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import foretune as ft

from .devices import tasks

ROOT = Path(__file__).parents[2]


def start_child(module, *arguments, devices):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    settings = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": flags}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", f"tests.problem.devices.{module}", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | settings,
    )  # fmt: skip


def reports_of(*children):
    try:
        outputs = [child.communicate(timeout=300) for child in children]
    finally:
        for child in children:
            child.kill()
    for child, (_, errors) in zip(children, outputs, strict=True):
        assert child.returncode == 0, errors[-4000:]
    lines = "".join(output for output, _ in outputs).splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def close(actual, expected):
    for a, b in zip(actual, tasks.as_lists(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.fixture(scope="module")
def alone():
    """The results of one device."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield {
        "hypergradient": ft.Reverse()(tasks.problem(), tasks.hyperparameters())[:2],
        "minimize": tasks.minimized(tasks.problem(), tasks.hyperparameters(), 4),
        "real time": tasks.tuned(tasks.stream(), tasks.VALIDATION).hparams,
    }
    jax.config.update("jax_enable_x64", before)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulated")
    return *reports_of(start_child("simulated", folder, devices=8)), folder


@pytest.mark.second_tier
@pytest.mark.parametrize(
    "name",
    [
        *(f"reverse, {store}" for store in ("states", "everything", "segments", 2)),
        *("forward", "stacked", "folds", "parameters", "tangents", "tangents and data"),
    ],
)
def test_a_hypergradient_on_8_devices_is_that_of_one(simulated, name):
    assert simulated[0]["devices"] == 8
    assert simulated[0][name] < 1e-12


@pytest.mark.second_tier
def test_what_is_split_stays_split(simulated):
    assert simulated[0]["parameters stay split"]
    assert simulated[0]["weights stay split"]
    assert simulated[0]["real time: Z stays split"]


@pytest.mark.second_tier
def test_split_tangents_exchange_the_gradient_alone_and_at_the_end(simulated):
    assert simulated[0]["tangents: in the loop"] == 0
    assert simulated[0]["tangents: at the end"] == [24]  # 18 hyperparameters, a multiple of 8


@pytest.mark.second_tier
def test_split_queries_exchange_nothing(simulated):
    assert simulated[0]["queries"] < 1e-12
    assert simulated[0]["queries and data"] < 1e-12
    assert simulated[0]["queries: exchanged"] == 0


@pytest.mark.second_tier
def test_real_time_tuning_on_8_devices(simulated, alone):
    close(simulated[0]["real time"], alone["real time"])
    assert simulated[0]["real time: compiled"] == 1


@pytest.mark.second_tier
def test_a_run_saved_with_8_devices_goes_on_with_4_and_with_1(simulated, alone):
    report, folder = simulated
    assert report["records"] == 5
    close(report["minimize"], alone["minimize"].hparams)
    resumed = tasks.minimized(tasks.problem(), tasks.hyperparameters(), 4, folder / "8")
    assert len(resumed.history) == 5
    close(tasks.as_lists(resumed.hparams), alone["minimize"].hparams)


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    try:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    except OSError as error:
        pytest.skip(f"no loopback interface to listen on: {error}")
    children = [start_child("processes", port, 2, rank, folder, devices=2) for rank in range(2)]
    return *reports_of(*children), folder


@pytest.mark.second_tier
@pytest.mark.parametrize("name", ["reverse", "forward"])
def test_a_hypergradient_in_two_processes_is_that_of_one(processes, alone, name):
    assert processes[0]["devices"] == 4
    close(processes[0][name], alone["hypergradient"])


@pytest.mark.second_tier
def test_drivers_in_two_processes(processes, alone):
    report, folder = processes
    close(report["minimize"], alone["minimize"].hparams)
    close(report["real time"], alone["real time"])
    assert report["records"] == 5
    assert report["stopped"] == ["another process stopped", 2]
    assert "or less where there is one process" in report["refused"]
    resumed = tasks.minimized(tasks.problem(), tasks.hyperparameters(), 4, folder / "minimize")
    assert resumed.history[-1]["value"] == pytest.approx(report["last value"], rel=1e-10)


def test_bad_input_is_refused():
    one = ft.mesh(data=1)
    assert jax.device_count() == 1
    with pytest.raises(ValueError, match=r"mesh\(data=2\) has 2 devices, but there are 1"):
        ft.mesh(data=2)
    with pytest.raises(ValueError, match="whole number"):
        ft.mesh(data=0)
    with pytest.raises(TypeError, match=r"a mesh is `foretune.mesh"):
        ft.shard(tasks.problem(), 8)
    explicit = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Explicit,))
    with pytest.raises(ValueError, match="engines need `Auto`"):
        ft.shard(tasks.problem(), explicit)
    with pytest.raises(ValueError, match="no 'tangents'"):
        ft.Forward(mesh=one)
    with pytest.raises(TypeError, match="is for a problem"):
        ft.shard(jnp.ones(3), one, params=jax.sharding.PartitionSpec())
    with pytest.raises(TypeError, match=r"PartitionSpec.*\n.*data"):
        ft.shard(tasks.problem(), one, params="data")

"""The choice of an engine: exact, within the budget, explained."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft
from foretune._engines import auto
from foretune._engines.memory import free_bytes, host_bytes

from ..problems import assert_trees_close, regression
from .test_schedules import network

ROOT = Path(__file__).parents[2]


def whole(engine, problem, hparams):
    memory = engine.lower(problem, hparams).compile().memory_analysis()
    return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes


@pytest.fixture(autouse=True)
def forgotten():
    """Nothing was chosen before."""
    auto._CHOICES.clear()


@pytest.mark.usefixtures("x64")
@pytest.mark.second_tier
def test_the_result_is_that_of_an_exact_engine():
    problem, hparams = regression(steps=20, dtype=np.float64)
    found = ft.Auto()(problem, hparams)
    expected = ft.Reverse()(problem, hparams)
    assert_trees_close(found.grad, expected.grad, 1e-10)
    assert_trees_close(found.value, expected.value, 1e-12)
    inside = jax.jit(lambda h: ft.Auto(memory="1GiB")(problem, h).grad)(hparams)
    assert_trees_close(inside, expected.grad, 1e-10)


@pytest.mark.second_tier
def test_it_chooses_inside_jit_where_nothing_was_chosen_before():
    problem, hparams = regression(steps=4)
    found = jax.jit(lambda h: ft.Auto()(problem, h).grad)(hparams)
    assert_trees_close(found, ft.Reverse()(problem, hparams).grad, 1e-5)


@pytest.mark.second_tier
def test_a_key_of_another_generator_is_traced_as_one():
    def grad(key):
        problem, hparams = regression(
            steps=2,
            dynamics=ft.Training(
                lambda w, h, b, key: (
                    h["decay"] * jnp.sum((w["w"] - jax.random.normal(key, (3,))) ** 2)
                ),
                optax.sgd(0.1),
                key=key,
            ),
        )
        return ft.Auto()(problem, {"decay": hparams["decay"]}).grad

    key = jax.random.key(0, impl="rbg")
    assert_trees_close(jax.jit(grad)(key), grad(key), 1e-5)


@pytest.mark.second_tier
def test_budgets_are_respected():
    problem, hparams, state = network(400)
    hparams = hparams | {"shift": jnp.full(32, 0.5)}  # too many for forward mode to be tried
    given = whole(ft.Reverse(store=1), problem, hparams) - 9 * state
    exact = ft.Reverse()(problem, hparams).grad
    stores = []
    for states in (1000, 70, 25):
        budget = int(given + states * state)
        choice = ft.Auto(budget).explain(problem, hparams)
        assert choice.bytes <= budget
        assert whole(choice.engine, problem, hparams) <= budget
        stores.append(choice.engine.store)
        assert_trees_close(ft.Auto(budget)(problem, hparams).grad, exact, 1e-3, 1e-6)
    assert stores[:2] == ["states", "segments"]
    assert stores[2] < 25


@pytest.mark.second_tier
def test_where_reverse_mode_does_not_fit_it_goes_forward():
    problem, hparams, state = network(5000)
    hparams = hparams | {"shift": jnp.full(32, 0.5)}
    choice = ft.Auto(8 * state + 300_000).explain(problem, hparams)
    assert choice.bytes <= 8 * state + 300_000
    assert ft.Auto("1GiB").explain(problem, hparams).engine == ft.Reverse()


def test_few_hyperparameters_go_forward():
    choice = ft.Auto("1GiB").explain(*regression(steps=24))
    assert choice.engine == ft.Forward()
    assert list(choice.compiled) == ["Forward()"]


def test_many_hyperparameters_go_in_reverse():
    problem, hparams, _ = network(30)
    choice = ft.Auto("1GiB").explain(problem, hparams | {"shift": jnp.full(32, 0.5)})
    assert choice.engine == ft.Reverse()
    assert list(choice.compiled) == ["Reverse()"]


def test_it_says_what_it_chose_and_from_what():
    problem, hparams = regression(steps=20)
    choice = ft.Auto("1GiB").explain(problem, hparams)
    text = str(choice)
    assert "<- chosen" in text
    assert "Reverse('segments')" in text
    assert "Forward(1)" in text
    assert "at most 1.0 GiB" in text
    assert ft.Auto("1GiB").explain(problem, hparams) is choice  # remembered


def test_only_what_was_compiled_is_said_to_be_too_large():
    sizes = {"states": 900.0, "segments": 100.0, 2: 800.0, 1: 500.0}
    found = [auto.Candidate(ft.Reverse(store=s), size) for s, size in sizes.items()]
    compiled = {found[3].name: 1500, found[1].name: 700}
    choice = auto.Choice(found[1].engine, 700, 1000.0, 150, found, compiled)
    _, states, segments, two, one, _ = str(choice).splitlines()
    assert states.endswith("its states are too large")  # with the data
    assert one.endswith("too large")
    assert "1.5 KiB" in one
    assert segments.endswith("<- chosen")
    assert two.rstrip().endswith("800 B")


def test_free_memory_is_read_at_each_call(monkeypatch):
    problem, hparams = regression(steps=23)
    two = [auto.Candidate(ft.Reverse(), 1.0), auto.Candidate(ft.Reverse("segments"), 1.0)]
    monkeypatch.setattr(auto, "candidates", lambda *_: (99, two, []))
    monkeypatch.setattr(auto, "flatten", lambda engine: ([], engine))
    sizes = {"states": 4_000_000, "segments": 1_000_000}
    lowered = lambda engine, *_: SimpleNamespace(compile=lambda: engine.store)  # noqa: E731
    monkeypatch.setattr(auto, "compute", SimpleNamespace(lower=lowered))
    monkeypatch.setattr(auto, "program_bytes", sizes.get)
    for free, store in ((5e6, "states"), (2e6, "segments"), (5e6, "segments")):
        monkeypatch.setattr(auto, "free_bytes", lambda free=free: free)
        assert ft.Auto().explain(problem, hparams).engine == ft.Reverse(store=store)
    monkeypatch.setattr(auto, "free_bytes", lambda: 5e5)
    with pytest.raises(MemoryError, match="no exact engine fits"):
        ft.Auto().explain(problem, hparams)
    with pytest.raises(MemoryError, match="no exact engine fits"):  # a budget adds no memory
        ft.Auto("1GiB").explain(problem, hparams)


@pytest.mark.second_tier
def test_all_processes_choose_alike():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "error", "-m", "tests.engines.auto_processes", str(port)]
    settings = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    children = [
        subprocess.Popen(
            [*command, str(rank)], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=settings
        )
        for rank in range(2)
    ]
    try:
        outputs = [child.communicate(timeout=300)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    (one, limit), (two, _) = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert one == two
    assert limit == 2**30  # the least of what they have


def test_memory_of_the_host(tmp_path):
    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    write("proc/meminfo", "MemTotal: 900 kB\nMemFree: 10 kB\nMemAvailable:     600 kB\n")
    assert host_bytes(tmp_path) == 600 * 1024  # most of it holds files, and can be had
    write("sys/fs/cgroup/memory.max", "max\n")
    write("sys/fs/cgroup/memory.current", "300000\n")
    write("sys/fs/cgroup/memory.stat", "anon 7\ninactive_file 100000\nactive_file 5\n")
    assert host_bytes(tmp_path) == 600 * 1024
    write("sys/fs/cgroup/memory.max", "500000\n")  # of a container
    assert host_bytes(tmp_path) == 500_000 - 300_000 + 100_000
    write("sys/fs/cgroup/memory.max", "100000\n")
    assert host_bytes(tmp_path) == 0
    assert host_bytes(tmp_path / "elsewhere") > 0  # not Linux


@pytest.mark.second_tier
def test_a_budget_that_nothing_fits():
    problem, hparams, state = network(50)
    with pytest.raises(MemoryError, match=r"no exact engine fits into .* needs .*Truncated"):
        ft.Auto(state // 2)(problem, hparams)


@pytest.mark.parametrize("memory", ["lots", "4 GX", -1, 0, True, [1], "1.2.3GB"])
def test_bad_budgets(memory):
    with pytest.raises(ValueError, match=r"Auto\(memory="):
        ft.Auto(memory)


def test_units():
    assert auto.parse_bytes("4GiB") == 4 * 2**30
    assert auto.parse_bytes("500 MB") == 500_000_000
    assert auto.parse_bytes("10k") == 10_000
    assert auto.parse_bytes("7b") == auto.parse_bytes(7) == 7
    assert free_bytes() > 0


@pytest.mark.second_tier
def test_in_minimize_and_with_folds():
    problem, hparams = regression(steps=10)
    result = ft.minimize(problem, hparams, engine=ft.Auto(), optimizer=optax.adam(0.01), steps=3)
    assert result.history[-1]["value"] < result.history[0]["value"]
    folds = ft.Mean([regression(steps=10)[0] for _ in range(2)])
    assert_trees_close(
        ft.Auto()(folds, hparams).grad, ft.Reverse()(folds, hparams).grad, 1e-4, 1e-6
    )


def test_a_step_that_one_mode_cannot_differentiate():
    def halved(w):  # a loop of unknown length has no reverse mode
        return jax.lax.while_loop(lambda w: jnp.sum(w**2) > 4.0, lambda w: w / 2, w)

    @jax.custom_vjp
    def doubled(w):
        return 2 * w

    doubled.defvjp(lambda w: (2 * w, None), lambda _, g: (2 * g,))  # and this no forward mode

    class Changing(ft.Dynamics):
        change: Callable

        def init(self, params, hparams):
            return params

        def step(self, state, hparams, batch):
            return self.change(state) * hparams["factor"]

    hparams = {"factor": jnp.array(0.9)}
    for change, engine in ((halved, ft.Forward), (doubled, ft.Reverse)):
        problem = ft.Problem(
            Changing(change),
            lambda s, h, _: jnp.sum(s**2),
            jnp.ones(3),
            ft.FullBatch(None, steps=5),
        )
        assert isinstance(ft.Auto("1GiB").explain(problem, hparams).engine, engine)
        assert np.isfinite(ft.Auto("1GiB")(problem, hparams).grad["factor"])


@pytest.mark.second_tier
def test_it_measures_in_the_precision_that_holds_where_it_is_called():
    with jax.enable_x64(True):
        problem, hparams = regression(dtype=np.float64)
        value, grad, _ = ft.Auto()(problem, hparams)
        assert_trees_close(grad, ft.Reverse()(problem, hparams).grad, 1e-12)
    assert value.dtype == np.float64

"""Attributions that are killed, resumed, short of memory, made again."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import foretune as ft
from foretune._attribution.queries import as_queries
from foretune._attribution.sweep import _pull, _train, fitting
from foretune._attribution.weighted import weighted_problem
from foretune._engines.schedules import Adjoint
from foretune._files.files import RunError
from foretune._problem.problem import validated

from ..compilations import compilations
from .trainings import (
    INDICES,
    QUERIES,
    K,
    N,
    X,
    Y,
    mean_square,
    momentum,
    plain,
    problem_of,
    same,
)


class Kill(ft.Callback):
    def step(self, run):
        raise KeyboardInterrupt


class Steps(ft.Callback):
    def __init__(self):
        self.seen = []

    def start(self, run):
        self.seen.append(run.step)

    step = start


def test_a_killed_attribution_continues(found, tmp_path):
    problem, hparams = plain()
    folder = tmp_path / "chunks"
    with pytest.raises(KeyboardInterrupt):
        ft.attribute(problem, hparams, QUERIES, chunk=1, folder=folder, callbacks=[Kill()])
    assert {path.name for path in folder.iterdir()} == {".lock", "queries_0.npz"}
    steps = Steps()
    same(ft.attribute(problem, hparams, QUERIES, chunk=1, folder=folder, callbacks=[steps]), found)
    assert steps.seen == [1, 2, 3]
    steps = Steps()
    same(ft.attribute(problem, hparams, QUERIES, folder=folder, callbacks=[steps]), found)
    assert steps.seen == [3]


def test_a_damaged_chunk_is_computed_again(found, tmp_path):
    problem, hparams = plain()
    ft.attribute(problem, hparams, QUERIES, chunk=1, folder=tmp_path)
    path = tmp_path / "queries_1.npz"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.warns(UserWarning, match=r"queries_1.npz cannot be read.*computed again"):
        same(ft.attribute(problem, hparams, QUERIES, chunk=1, folder=tmp_path), found)
    assert (tmp_path / "queries_1.npz.damaged").exists()


def test_a_folder_belongs_to_one_attribution(tmp_path):
    problem, hparams = plain()
    ft.attribute(problem, hparams, QUERIES, folder=tmp_path)
    with pytest.raises(RunError, match="what differs: the hyperparameters"):
        ft.attribute(problem, {"lr": jnp.array(0.06)}, QUERIES, folder=tmp_path)
    with pytest.raises(RunError, match="what differs: the queries"):
        ft.attribute(problem, hparams, (QUERIES[0] + 1, QUERIES[1]), folder=tmp_path)
    other = problem.replace(batches=ft.Minibatches((X, Y), INDICES[::-1]))
    with pytest.raises(RunError, match="what differs: the training data"):
        ft.attribute(other, hparams, QUERIES, folder=tmp_path)


@pytest.mark.second_tier
def test_a_budget_of_memory_sets_the_chunk():
    problem, hparams = plain()
    asked = as_queries(problem, QUERIES)
    wanted, point, _ = weighted_problem(problem, hparams, asked, "weight", None, None)
    arrays, structure = validated(wanted, point)
    chosen = functools.partial(fitting, ft.Reverse(), structure, arrays, mesh=None)
    with pytest.raises(MemoryError, match="one query at a time needs") as least:
        chosen(K, 10)
    number, unit = re.search(r"needs ([\d.]+) (\w+),", str(least.value)).groups()
    needed = float(number) * {"B": 1, "KiB": 1024}[unit]
    assert chosen(64, int(1.02 * needed)) == 1
    assert chosen(64, int(1.5 * needed)) in (2, 4, 8, 16, 32)
    assert chosen(64, 2**30) == 64
    steps = Steps()
    ft.attribute(problem, hparams, QUERIES, memory=f"{int(1.02 * needed)}", callbacks=[steps])
    assert steps.seen == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"attribute\(memory='much'\)"):
        ft.attribute(problem, hparams, QUERIES, memory="much")


def test_a_step_back_touches_the_weights_of_its_examples_alone():
    problem, hparams = plain()
    asked = as_queries(problem, QUERIES)
    wanted, point, _ = weighted_problem(problem, hparams, asked, "weight", None, None)
    arrays, structure = validated(wanted, point)
    s_T, memory = jax.eval_shape(functools.partial(_train, ft.Reverse(), structure), arrays)
    rows = functools.partial(jax.tree.map, lambda leaf: jnp.zeros((K, *leaf.shape), leaf.dtype))
    adjoint = Adjoint(
        rows(eqx.filter(s_T, lambda leaf: jnp.issubdtype(leaf.dtype, jnp.inexact))), rows(point)
    )
    program = functools.partial(_pull, ft.Reverse(), structure)
    (loop,) = [
        equation
        for equation in jax.make_jaxpr(program)(arrays, memory, adjoint).jaxpr.eqns
        if equation.primitive.name == "scan"
    ]
    large = {
        equation.primitive.name
        for equation in loop.params["jaxpr"].jaxpr.eqns
        if any(var.aval.shape[-1:] == (N,) for var in equation.outvars)
    }
    assert large == {"scatter-add"}


@pytest.mark.second_tier
def test_a_second_call_compiles_nothing(found):
    problem, hparams = plain()
    with compilations("_train", "_pull") as programs:
        ft.attribute(problem, hparams, jax.tree.map(lambda leaf: leaf[[0, 1, 2, 0, 1]], QUERIES))
    assert programs == ["jit(_pull)"]  # for 5 queries
    with compilations("_train", "_pull") as programs:
        ft.attribute(problem, {"lr": jnp.array(0.04)}, QUERIES)
    assert not programs


def test_a_second_call_traces_no_training():
    calls = []

    def counted(params, hparams, batch):
        calls.append(1)
        return mean_square(params, hparams, batch)

    problem = problem_of(ft.Training(counted, momentum))
    hparams = {"lr": jnp.array(0.05)}
    ft.attribute(problem, hparams, QUERIES)
    calls.clear()
    ft.attribute(problem, hparams, QUERIES)
    assert not calls

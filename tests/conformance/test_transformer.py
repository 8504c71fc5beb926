"""Every exact engine on a small transformer: the same hypergradient."""

import functools

import equinox as eqx
import jax
import numpy as np
import pytest

import foretune as ft
from benchmarks.transformer import language_problem

from ..conftest import setting
from ..problems import assert_trees_close

pytestmark = [
    pytest.mark.second_tier,
    pytest.mark.promotes("optimizers of Optax multiply floats by counts"),
    pytest.mark.usefixtures("x64"),
]
ROWS = {
    "forward": lambda folder: ft.Forward(),
    "everything": lambda folder: ft.Reverse(store="everything"),
    "gradients": lambda folder: ft.Reverse(store="gradients"),
    "states": lambda folder: ft.Reverse(store="states"),
    "segments": lambda folder: ft.Reverse(store="segments"),
    "a number of states": lambda folder: ft.Reverse(store=2),
    "disk": lambda folder: ft.ReverseOnDisk(folder),
    "auto": lambda folder: ft.Auto(),
}


@pytest.fixture(autouse=True)
def quick_compilation():
    """The programs run for a moment: spend no time on optimizing them."""
    with setting(jax_disable_most_optimizations=True):
        yield


def transformer():
    """Return eight sources and ten rates of a transformer with two layers, in float64."""
    sizes = {"layers": 2, "width": 8, "context": 4, "batch": 2, "steps": 10, "heads": 2}
    problem, hparams, _ = language_problem(
        **sizes, warmup=True, dtype=np.float32, eps_root=1e-6, rate=0.01, validation=4
    )

    def wide(leaf):
        return leaf.astype(np.float64) if eqx.is_inexact_array(leaf) else leaf

    return jax.tree.map(wide, (problem, hparams))


@functools.cache
def expected():
    """Return the problem, and its hypergradient by the ordinary transpose."""
    problem, hparams = transformer()
    return problem, hparams, ft.Reverse(store="states", transpose="reverse")(problem, hparams)


@pytest.mark.parametrize("name", ROWS)
def test_engines_agree_with_the_ordinary_transpose(name, tmp_path):
    problem, hparams, right = expected()
    found = ROWS[name](tmp_path)(problem, hparams)
    np.testing.assert_allclose(found.value, right.value, rtol=1e-12)
    assert_trees_close(found.grad, right.grad, 1e-9, 1e-12)

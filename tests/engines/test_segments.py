"""Segments that keep gradients in place of states: the same hypergradient, in less memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft
from foretune._engines import segments
from foretune._engines.auto import candidates
from foretune._engines.segments import lengths_of, states_in_segments
from foretune._engines.split import split_step
from foretune._problem.problem import validated
from foretune._problem.system import make_system

from ..problems import assert_trees_close

SEGMENTS = ft.Reverse(store="segments")
later = functools.partial(pytest.param, marks=pytest.mark.second_tier)


@pytest.fixture
def always(monkeypatch):
    """Split steps whatever their updates cost."""
    monkeypatch.setattr(segments, "WORTH", 0)
    jax.clear_caches()
    yield
    jax.clear_caches()


def loss(params, hparams, batch):
    x, y = batch
    out = jnp.tanh(x @ params["a"]) @ params["b"]
    return jnp.mean((out - y) ** 2) + hparams["l2"] * jnp.sum(params["a"] ** 2)


def with_state(params, hparams, batch, state):
    x, y = batch
    mean = 0.9 * state["mean"] + 0.1 * jnp.mean(x, 0)
    return loss(params, hparams, (x - mean[None], y)), {
        "mean": mean,
        "seen": state["seen"] + len(y),
    }


def with_key(params, hparams, batch, key):
    x, y = batch
    return loss(params, hparams, (x + 0.1 * jax.random.normal(key, x.shape, x.dtype), y))


def adam(h):
    return optax.adam(h["lr"], eps_root=1e-8)


def clipped(h):
    return optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(h["lr"], 0.9))


TRAININGS = {
    "adam": ft.Training(loss, adam),
    "clipped": ft.Training(loss, clipped),
    "state": ft.Training(with_state, adam, has_state=True),
    "key": ft.Training(with_key, adam, key=jax.random.key(3)),
}


def problem(training, steps, rows=6, width=4, **options):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 5)), rng.normal(size=40)
    params = {"a": jnp.asarray(rng.normal(size=(5, width))), "b": jnp.ones(width)}
    state = {"mean": jnp.zeros(5), "seen": jnp.zeros((), int)}
    error = lambda state, h, batch: loss(state.params, {"l2": 0.0}, batch)  # noqa: E731
    made = ft.Problem(
        training,
        error,
        (params, state) if training.has_state else params,
        ft.Minibatches((x, y), rng.integers(0, 40, (steps, rows))),
        (x[:9], y[:9]),
    )
    return made.replace(**options), {"lr": jnp.array(0.05), "l2": jnp.array(0.01)}


@pytest.mark.usefixtures("x64", "always")
@pytest.mark.filterwarnings("ignore:Truncated")
@pytest.mark.second_tier
def test_steps_that_begin_at_a_state_on_the_way():
    made, hparams = problem(TRAININGS["adam"], 60)
    some, all_of_them = (ft.Truncated(40, store=store) for store in ("segments", "states"))
    found, expected = (engine(made, hparams).grad for engine in (some, all_of_them))
    assert_trees_close(found, expected, 1e-10)


@pytest.mark.usefixtures("x64", "always")
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("adam", 23),
        *(later("adam", steps) for steps in (1, 2, 7, 32, 97)),
        *(later(name, 23) for name in ("clipped", "state", "key")),
    ],
)
@pytest.mark.second_tier
def test_the_same_hypergradient(name, steps):
    found, expected = (e(*problem(TRAININGS[name], steps)) for e in (SEGMENTS, ft.Forward()))
    assert_trees_close(found.grad, expected.grad, 1e-11)
    assert_trees_close(found.value, expected.value, 1e-13)
    assert_trees_close(found.state.params, expected.state.params, 1e-12)


@pytest.mark.usefixtures("x64", "always")
@pytest.mark.second_tier
def test_several_objectives_folds_and_frozen_weights():
    other = lambda state, h, batch: jnp.sum(state.params["b"] ** 2)  # noqa: E731
    plain, hparams = problem(TRAININGS["adam"], 23)
    several = plain.replace(objective={"lr": plain.objective, "l2": other})
    folds = ft.Mean(
        [plain.replace(validation=(np.full((4, 5), 0.1 + k), np.ones(4))) for k in range(2)]
    )
    frozen, _ = problem(
        ft.Training(
            loss,
            lambda h: optax.multi_transform(
                {"yes": adam(h), "no": optax.set_to_zero()}, {"a": "yes", "b": "no"}
            ),
        ),
        23,
    )
    for made in (several, folds, frozen):
        expected = ft.Forward()(made, hparams).grad
        assert_trees_close(SEGMENTS(made, hparams).grad, expected, 1e-11)


def parts_of(made, hparams) -> Any:
    system = make_system(made, hparams)
    s = system.initial(hparams)
    return system, s, split_step(system, hparams, s)


@pytest.mark.usefixtures("x64")
@pytest.mark.second_tier
def test_the_parts_of_a_step():
    made, hparams = problem(TRAININGS["adam"], 3)
    system, s, split = parts_of(made, hparams)
    x = jax.tree.map(lambda leaf: leaf[0], system.xs)
    g = split.gradient(s, hparams, x)
    expected = system.step(s, hparams, x)
    assert_trees_close(split.update(s, hparams, x, g), expected, 1e-14)
    assert split.size == 1 + 5 * 4 + 4  # the loss, and the gradient
    rows = 6
    assert split.work == 2 * rows * (5 * 4 * 2 + 4 * 3)  # x @ a and its transpose; h @ b, and two
    # the value is that of an update, the derivative that of the whole step
    wrong = [2 * leaf for leaf in g]
    assert_trees_close(split.known(s, hparams, x, wrong), split.update(s, hparams, x, wrong), 1e-14)
    u = jax.tree.map(jnp.ones_like, expected.params)
    of_step, of_known = (
        jax.vjp(lambda p, f=f: f(s._replace(params=p)).params, s.params)[1](u)
        for f in (lambda s: system.step(s, hparams, x), lambda s: split.known(s, hparams, x, g))
    )
    assert_trees_close(of_known, of_step, 1e-13)


class Descent(ft.Dynamics):
    """A dynamics without a gradient that is marked."""

    def init(self, params, hparams):
        return params

    def step(self, state, hparams, batch):
        return jax.tree.map(
            lambda w, g: w - hparams["lr"] * g, state, jax.grad(loss)(state, hparams, batch)
        )


def whitened(h):
    """An optimizer with a matrix product."""

    def update(updates, state, params=None):
        grads = updates | {"a": updates["a"] @ (updates["a"].T @ updates["a"])}
        return jax.tree.map(lambda g: -h["lr"] * g, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


class Twice(ft.Training):
    """Two gradients in a step, the second after the first one's update."""

    def step(self, state, hparams, batch):
        return super().step(super().step(state, hparams, batch), hparams, batch)


def test_steps_that_are_not_split():
    made, hparams = problem(TRAININGS["adam"], 3)
    assert parts_of(made, hparams)[2] is not None
    assert parts_of(made.replace(trajectory=True), hparams)[2] is None  # an error after each update
    assert parts_of(*problem(ft.Training(loss, whitened), 3))[2] is None
    assert parts_of(*problem(Twice(loss, adam), 3))[2] is None
    own = made.replace(
        dynamics=Descent(), objective=lambda s, h, batch: loss(s, {"l2": 0.0}, batch)
    )
    assert parts_of(own, hparams)[2] is None


def test_work_in_scans_and_convolutions():
    def convolved(params, hparams, batch):
        image, kernel = jnp.ones((2, 3, 8, 8)), params["a"].reshape(1, 1, 5, 4)
        out = jax.lax.conv(image[:, :1], kernel, (1, 1), "SAME")
        return jnp.sum(out**2)

    def repeated(params, hparams, batch):
        step = lambda x, _: (jnp.sin(x @ jnp.ones((4, 4))), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, params["a"], None, length=7)[0])

    forward = 2 * (2 * 1 * 8 * 8) * 20
    work = parts_of(*problem(ft.Training(convolved, adam), 3))[2].work
    assert work >= 2 * forward  # and a transposed one
    assert parts_of(*problem(ft.Training(repeated, adam), 3))[2].work == 7 * 2 * (2 * 5 * 4 * 4)


def temporary(rows, steps):
    made, hparams = problem(TRAININGS["adam"], steps, rows=rows, width=100)
    memory: Any = SEGMENTS.lower(made, hparams).compile().memory_analysis()
    return memory.temp_size_in_bytes / (4 * 3 * 600)  # in states


@pytest.mark.second_tier
def test_less_memory_where_updates_cost_nothing():
    """With 3,000 rows a gradient is 4,300 operations for each number of the state."""
    more = [temporary(rows, 900) - temporary(rows, 100) for rows in (30, 3000)]
    assert more[1] < 0.6 * more[0]
    for split in (False, True):  # what is expected of them; a split one has kept no state twice
        expected = [states_in_segments(steps, 1 / 3, split) for steps in (900, 100)]
        np.testing.assert_allclose(more[split], expected[0] - expected[1], rtol=0.25)


@pytest.mark.second_tier
def test_where_they_are_split():
    for rows, split in ((30, False), (3000, True)):
        made, hparams = problem(TRAININGS["adam"], 10, rows=rows, width=100)
        _, reverses, _ = candidates(*reversed(validated(made, hparams)))
        assert (reverses[0].engine.store == "gradients") is split


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 32, 97, 100, 1000, 9973])
@pytest.mark.parametrize("gradient", [1 / 3, 0.5, 1.0])
def test_lengths(steps, gradient):
    lengths = lengths_of(steps, gradient)
    assert 0 < steps - (lengths.segments - 1) * lengths.length <= lengths.length
    assert 0 < lengths.length - (lengths.blocks - 1) * lengths.block <= lengths.block
    assert 1 <= lengths.block <= segments.BLOCK
    assert lengths.states(gradient) <= 3 * np.sqrt(steps * gradient) + 6

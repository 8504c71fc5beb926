"""What reverse mode stores: all schedules give the same, and hold what they say."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft
from foretune._engines.schedules import binomial_plan
from foretune._engines.segments import segments_of

from ..problems import assert_trees_close, regression

STORES = ["everything", "gradients", "segments", 1, 3]
later = functools.partial(pytest.param, marks=pytest.mark.second_tier)


def by_everything(problem, hparams):
    return ft.Reverse(store="everything")(problem, hparams)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("steps", [1, 7, later(64)])
@pytest.mark.parametrize("store", ["states", *STORES[1:], 7])
def test_all_schedules_give_the_same(store, steps):
    problem, hparams = regression(steps=steps, dtype=np.float64)
    found, expected = ft.Reverse(store=store)(problem, hparams), by_everything(problem, hparams)
    assert_trees_close(found.grad, expected.grad, 1e-12)
    assert_trees_close(found.value, expected.value, 1e-14)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("store", ["segments", 4])
@pytest.mark.second_tier
def test_over_a_thousand_steps(store):
    problem, hparams = regression(steps=1000, dtype=np.float64)
    found, expected = ft.Reverse(store=store)(problem, hparams), by_everything(problem, hparams)
    assert_trees_close(found.grad, expected.grad, 1e-10)
    assert_trees_close(found.grad, ft.Forward()(problem, hparams).grad, 1e-10)


class Noisy(ft.Dynamics):
    """A dynamics with a random key and a counter in its state, whose s_0 depends on lambda."""

    def init(self, params, hparams):
        return {"x": params * hparams["scale"], "key": jax.random.key(0), "n": jnp.zeros((), int)}

    def step(self, state, hparams, batch):
        key, now = jax.random.split(state["key"])
        noise = jax.random.normal(now, state["x"].shape, state["x"].dtype)
        x = state["x"] - hparams["lr"] * (jnp.sin(state["x"]) - batch + 0.1 * noise)
        return {"x": x, "key": key, "n": state["n"] + 1}


@functools.cache
def noisy(trajectory):
    problem = ft.Problem(
        Noisy(),
        {
            "scale": lambda state, h, v: jnp.sum((state["x"] - v) ** 2),
            "lr": lambda state, h, v: jnp.sum(state["x"] ** 4) + h["lr"],
        },
        jnp.linspace(0.0, 1.0, 4),
        np.random.default_rng(0).normal(size=(11, 4)),
        jnp.ones(4),
        trajectory=trajectory,
    )
    return problem, {"scale": jnp.array(0.7), "lr": jnp.array(0.2)}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("store", "trajectory"), [*((store, False) for store in STORES), ("segments", True), (3, True)]
)
@pytest.mark.second_tier
def test_keys_counters_starts_and_several_objectives(store, trajectory):
    problem, hparams = noisy(trajectory)
    found = ft.Reverse(store=store)(problem, hparams)
    expected = ft.Forward()(problem, hparams)
    assert_trees_close(found.grad, expected.grad, 1e-12)
    assert_trees_close(found.value, expected.value, 1e-12)
    assert int(found.state["n"]) == 11


@pytest.mark.second_tier
def test_under_jit():
    problem, hparams = regression(steps=12)
    inside = jax.jit(lambda h: ft.Reverse(3)(problem, h).grad)(hparams)
    assert_trees_close(inside, ft.Reverse(3)(problem, hparams).grad, 1e-5)


@functools.cache
def fewest(steps, states):
    """The steps that must be computed to reverse so many with so many states, the first included."""
    if steps <= 1:
        return 0
    if states == 1:
        return steps * (steps - 1) // 2
    return min(k + fewest(steps - k, states - 1) + fewest(k, states) for k in range(1, steps))


def computed(plan):
    """Return how many steps are computed on the way to the states, the first time included."""
    return int(np.sum(plan.rows.step - plan.rows.at, dtype=np.int64))


def binomial_steps(steps, states):
    """Return r T - beta(c + 1, r - 1), with the least r for which beta(c, r) = C(c + r, c) >= T."""
    r = next(r for r in itertools.count() if math.comb(states + r, states) >= steps)
    return r * steps - (math.comb(states + r, states + 1) if r else 0)


class TestBinomial:
    @pytest.mark.parametrize("states", range(1, 8))
    def test_no_plan_computes_fewer_steps(self, states):
        for steps in range(1, 45):
            plan = binomial_plan(steps, states)
            assert computed(plan) == fewest(steps, states) == binomial_steps(steps, states)

    @pytest.mark.parametrize(
        ("steps", "states"), [(64, 5), (1000, 4), (1000, 30), later(100_000, 60)]
    )
    def test_at_most_so_many_states_and_steps(self, steps, states):
        plan = binomial_plan(steps, states)
        assert plan.top.max() + 1 <= states
        assert computed(plan) == binomial_steps(steps, states)

    @pytest.mark.parametrize("states", [1, 2, 3, 5])
    @pytest.mark.parametrize("steps", [1, 2, 7, 20])
    def test_a_replay_finds_each_state_where_the_plan_says(self, steps, states):
        """Walk through the plan with the number of steps in the place of a state."""
        plan = binomial_plan(steps, states)
        kept = [0] + [None] * (states - 1)
        for t in range(steps - 1, -1, -1):
            row = [int(column[t]) for column in plan.rows]
            step, slot, at, first, count = row
            assert step == t
            assert kept[slot] == at
            for k in range(count):
                kept[slot + k + 1] = kept[slot + k] + int(plan.lengths[first + k])
            assert kept[slot + count] <= t
            assert sum(state is not None for state in kept) <= states


def network(steps, width=32):
    """A problem whose states, of some thousand weights, are its only large arrays."""
    sizes = [width, width, width]
    params = [jnp.full((a, b), 0.1) for a, b in itertools.pairwise(sizes)]

    def loss(params, hparams, batch):
        x = batch
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - jnp.broadcast_to(hparams["shift"], x.shape)) ** 2)

    problem = ft.Problem(
        ft.Training(loss, lambda h: optax.sgd(h["lr"], 0.9)),
        lambda state, h, batch: loss(state.params, h, batch),
        params,
        ft.Minibatches(jnp.ones((10, width)), np.zeros((steps, 2), int)),
        jnp.ones((2, width)),
    )
    state = 2 * 4 * sum(w.size for w in params)
    return problem, {"lr": jnp.array(0.1), "shift": jnp.array(0.5)}, state


def temporary(store, steps):
    problem, hparams, state = network(steps)
    analysis = ft.Reverse(store=store).lower(problem, hparams).compile().memory_analysis()
    return analysis.temp_size_in_bytes / state


class TestMemory:
    def test_segments_grow_with_the_square_root(self):
        assert temporary("segments", 10_000) / temporary("segments", 100) <= 11
        assert temporary("segments", 10_000) < 260  # with gradients, half a state each

    @pytest.mark.second_tier
    def test_binomial_does_not_grow_with_the_steps(self):
        few, many = temporary(10, 200), temporary(10, 100_000)
        # The plan is a few integers a step; the states are c and those in work.
        assert many - few < 100_000 * 30 / network(1)[2]
        assert few < 18

    def test_segments_of(self):
        for steps in [1, 2, 3, 7, 99, 100, 101, 1000]:
            length, count = segments_of(steps)
            assert 0 <= steps - length * count < length
            assert length + count <= 2.3 * math.sqrt(steps) + 2
        assert segments_of(32) == (4, 8)  # equal ones: one program for all


def test_bad_options():
    with pytest.raises(
        ValueError, match=r"store='sqrt'.*'everything', 'gradients', 'states', 'segments'"
    ):
        ft.Reverse(store="sqrt")
    with pytest.raises(ValueError, match="store=0"):
        ft.Reverse(store=0)

"""Rehearsals: any start, the right cost, the performance that was asked for, and resuming."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft
from foretune._constraints.base import check_constraints
from foretune._outer.moves import first_secant, secant_step
from foretune._outer.rehearsals import PERFORMANCE, cut_rows
from foretune._outer.rehearse import plan
from foretune._outer.search import candidates, leading_scale, lowest_on_line

T = 512
X = jax.random.normal(jax.random.key(0), (96, 4))
Y = X @ jnp.array([1.0, -1.0, 2.0, 0.5])
LOG = {"lr": ft.Log()}


def loss(w, h, batch):
    return jnp.mean((batch[0] @ w - batch[1]) ** 2)


def make(steps, key):
    def optimizer(h):
        return optax.sgd(optax.cosine_decay_schedule(h["lr"], steps))

    return ft.Problem(
        ft.Training(loss, optimizer),
        lambda state, h, batch: loss(state.params, h, batch),
        init=jnp.zeros(4),
        batches=ft.Minibatches.shuffled((X, Y), batch_size=8, steps=steps, key=key),
        validation=(X, Y),
    )


def rehearsed(lr=0.01, constraints=None, **options):
    start = {"lr": jnp.array(lr)}
    return ft.rehearse(make, start, steps=T, constraints=constraints or LOG, **options)


@pytest.mark.parametrize(
    "lr", [1e-6, *(pytest.param(lr, marks=pytest.mark.second_tier) for lr in (1e-2, 1e3))]
)
def test_a_start_that_is_off_by_decades(lr):
    """Too low, fair, and diverging in the first steps."""
    key = jax.random.key(3)
    result = rehearsed(lr, key=key)
    value, _ = make(T, key).response(result.hparams)
    plain, _ = make(T, key).response({"lr": jnp.array(lr)})
    assert result.value < 1e-3
    assert not plain < result.value  # nor where the start is not finite
    np.testing.assert_allclose(result.value, value, rtol=1e-5)
    assert result.state.params.shape == (4,)
    assert result.stopped == "performed"


@pytest.mark.second_tier
def test_a_start_at_0():
    result = rehearsed(0.0, {"lr": ft.NonNegative()})
    assert result.value < 1e-3
    assert result.hparams["lr"] > 0


def test_the_history_is_an_account():
    result = rehearsed()
    kinds = [record["trial"] for record in result.history]
    assert kinds[0] == "search"
    assert kinds[-2:] == ["line", "performance"]
    assert kinds[1] == "search"
    assert set(kinds[2:-3]) == {"descent"}
    assert kinds[-3] == "line"
    assert sum(record["cost"] for record in result.history) <= 4
    assert result.history[-1]["length"] == T
    assert result.history[-1]["hparams"] == {"lr": float(result.hparams["lr"])}
    assert int(result.best.step) == len(kinds)


@pytest.mark.parametrize("steps", [1, 20, 100, 1000, 12345])
@pytest.mark.parametrize("cost", [2.0, 3.0, 4.0, 10.0, 60.0])
@pytest.mark.parametrize("scales", [0, 1, 2, 6, 10])
def test_a_plan_is_within_its_cost(steps, cost, scales):
    trials = plan(steps, cost, scales)
    first = next(i for i, trial in enumerate(trials) if trial.kind == PERFORMANCE)
    spent = sum(trial.cost for trial in trials[: first + 1])
    assert trials[-1].steps == steps
    if steps >= 1000:  # else the shortest rehearsals cost more than their share
        assert spent <= cost + 1e-6
        assert cost < 4 or spent > 0.8 * cost


def test_rows_are_cut_to_the_share():
    """As many epochs as the performance has, on rows of its own."""
    problem = cut_rows(make(32, jax.random.key(0)), 0.25, jax.random.key(1))
    rows, counts = np.unique(problem.batches.indices, return_counts=True)
    assert len(rows) == 24
    assert problem.batches.indices.shape == (32, 8)
    assert set(counts) <= {10, 11}  # 32 minibatches of 8, of 24 rows
    whole = make(4, jax.random.key(0))  # no row is seen twice
    assert cut_rows(whole, 0.5, jax.random.key(1)) is whole


@pytest.mark.second_tier
def test_where_the_performance_fails_it_is_repeated_lower():
    """A training that diverges only when it is long."""

    def brittle(steps, key):
        problem = make(steps, key)

        def error(state, h, batch):
            high = jnp.where((h["lr"] > 0.03) & (steps == T), jnp.inf, 0.0)
            return loss(state.params, h, batch) + high

        return problem.replace(objective=error)

    result = ft.rehearse(brittle, {"lr": jnp.array(2e-3)}, steps=T, constraints=LOG)
    kinds = [record["trial"] for record in result.history]
    assert kinds.count("performance") in (2, 3)
    lrs = [record["hparams"]["lr"] for record in result.history if record["trial"] == "performance"]
    np.testing.assert_allclose(lrs[1] / lrs[0], 1 / 3, rtol=1e-4)


@pytest.mark.second_tier
def test_from_a_cost_of_5_on_it_is_never_above_its_start():
    """A training whose rate does harm only when it is long, but not enough to be noticed."""

    def brittle(steps, key):
        problem = make(steps, key)

        def error(state, h, batch):
            high = jnp.where((h["lr"] > 3e-3) & (steps == T), 2.0, 0.0)
            return 100 + loss(state.params, h, batch) + high

        return problem.replace(objective=error)

    start = {"lr": jnp.array(2e-3)}
    of_start, state = brittle(T, jax.random.key(0)).response(start)
    options = {"steps": T, "constraints": LOG}
    assert ft.rehearse(brittle, start, **options, cost=4).value > of_start + 0.5
    result = ft.rehearse(brittle, start, **options, cost=5)
    kinds = [record["trial"] for record in result.history]
    assert kinds[-3:] == ["start", "performance", "performance"]
    assert result.value == of_start
    assert result.hparams == start
    jax.tree.map(np.testing.assert_array_equal, result.state.params, state.params)


@pytest.mark.second_tier
def test_other_scales_are_searched_before_a_refinement():
    """A decay that is far too low and hardly tells in short trainings of few rows."""

    def made(steps, key):
        problem = make(steps, key)

        def error(state, h, batch):
            off = jnp.log10(h["decay"]) + 2  # best at 0.01
            return loss(state.params, h, batch) + jnp.where(steps < T // 4, 0.0, jnp.square(off))

        return problem.replace(objective=error)

    start = {"lr": jnp.array(0.01), "decay": jnp.array(1e-6)}
    sets = {"lr": ft.Log(), "decay": ft.Log()}
    result = ft.rehearse(made, start, steps=T, constraints=sets, cost=45)
    (others,) = (record for record in result.history if record["trial"] == "others")
    assert others["length"] == T // 2
    assert others["cost"] == 3.5
    assert 1e-3 < result.hparams["decay"] < 0.1


@pytest.mark.second_tier
@pytest.mark.filterwarnings("ignore:rehearse. as rehearsals have 16 steps")
def test_nothing_finite_is_an_error():
    def broken(steps, key):
        return make(steps, key).replace(objective=lambda s, h, b: jnp.inf * h["lr"])

    with pytest.raises(ft.NonFiniteError, match="performance"):
        ft.rehearse(broken, {"lr": jnp.array(0.1)}, steps=32, constraints=LOG)


@pytest.mark.second_tier
def test_a_hypergradient_that_is_not_finite_moves_nothing():
    """Adam's root has no derivative where a weight never has a gradient: here the first one."""
    data = X.at[:, 0].set(0.0), Y

    def made(steps, key):
        def optimizer(h):
            return optax.adam(optax.cosine_decay_schedule(h["lr"], steps))

        batches = ft.Minibatches.shuffled(data, batch_size=8, steps=steps, key=key)
        return make(steps, key).replace(dynamics=ft.Training(loss, optimizer), batches=batches)

    with pytest.warns(RuntimeWarning, match="(?s)rehearse is not finite.*eps_root.*move nothing"):
        result = ft.rehearse(made, {"lr": jnp.array(0.01)}, steps=T, constraints=LOG)
    descents = [trial["hparams"]["lr"] for trial in result.history if trial["trial"] == "descent"]
    assert len(set(descents)) == 1
    assert result.value < 3.0


def test_a_run_resumes_to_the_bit(tmp_path):
    class Stop(ft.Callback):
        def step(self, run):
            if run.step == 3:
                raise KeyboardInterrupt

    whole = rehearsed()
    with pytest.raises(KeyboardInterrupt):
        rehearsed(callbacks=[ft.Checkpoint(tmp_path), Stop()])
    resumed = rehearsed(callbacks=[ft.Checkpoint(tmp_path)])
    again = rehearsed(callbacks=[ft.Checkpoint(tmp_path)])
    for result in (resumed, again):
        assert result.history == whole.history
        assert float(result.value) == float(whole.value)
        np.testing.assert_array_equal(result.state.params, whole.state.params)
    with pytest.raises(ValueError, match="trials"):
        rehearsed(callbacks=[ft.Checkpoint(tmp_path)], cost=6)


@pytest.mark.second_tier
def test_more_cost_means_over_draws():
    trials = plan(1024, 32.0, 1)
    assert max(trial.number for trial in trials if trial.kind == "descent") > 1
    result = rehearsed(cost=32)
    assert result.value < 1e-3


@pytest.mark.second_tier
def test_a_large_budget_refines_at_full_length(tmp_path):
    """What the rehearsals cannot tell: the centre of a Box, on which the error of T steps depends."""

    def made(steps, key):
        problem = make(steps, key)

        def error(state, h, batch):
            centre = 0.7 if steps == T else 0.0
            return loss(state.params, h, batch) + jnp.square(h["c"] - centre)

        return problem.replace(objective=error)

    class Stop(ft.Callback):
        def step(self, run):
            if run.record["trial"] == "refinement":
                raise KeyboardInterrupt

    start = {"lr": jnp.array(0.01), "c": jnp.array(0.01)}
    options = {"steps": T, "constraints": LOG | {"c": ft.Box(0.0, 1.0)}, "cost": 45}
    whole = ft.rehearse(made, start, **options)
    kinds = [record["trial"] for record in whole.history]
    assert kinds[-4:] == ["refinement", "choice", "start", "performance"]
    assert kinds.count("refinement") == 7
    assert sum(record["cost"] for record in whole.history) <= 45
    assert 0.2 < whole.hparams["c"] < 0.9  # from 0, where rehearsals had it
    lrs = [r["hparams"]["lr"] for r in whole.history if r["trial"] in ("line", "refinement")]
    assert lrs[2] == pytest.approx(lrs[1] / 3, rel=1e-4)  # from below
    with pytest.raises(KeyboardInterrupt):
        ft.rehearse(made, start, callbacks=[ft.Checkpoint(tmp_path), Stop()], **options)
    resumed = ft.rehearse(made, start, callbacks=[ft.Checkpoint(tmp_path)], **options)
    assert resumed.history == whole.history


@pytest.mark.second_tier
def test_several_hyperparameters_and_objectives():
    def made(steps, key):
        problem = make(steps, key)
        training = ft.Training(
            lambda w, h, batch: loss(w, h, batch) + h["decay"] * jnp.sum(w**2),
            lambda h: optax.sgd(h["lr"], h["momentum"]),
        )
        error = problem.objective
        return problem.replace(
            dynamics=training, objective={"lr": error, "decay": error, "momentum": error}
        )

    start = {"lr": jnp.array(1e-4), "decay": jnp.array(1.0), "momentum": jnp.array(0.0)}
    sets = {"lr": ft.Log(), "decay": ft.NonNegative(), "momentum": ft.Box(0.0, 0.95)}
    result = ft.rehearse(made, start, steps=T, constraints=sets)
    before, _ = made(T, jax.random.key(0)).response(start)
    assert sum(result.value.values()) < 0.2 * sum(before.values())


def test_the_secant_finds_the_root():
    """Of 0.5 h (v - r)^2, the second step ends at r; no step is longer than its size."""
    slope, root = jnp.array([2.0, 0.5]), jnp.array([0.3, -0.4])
    v, secant = jnp.zeros(2), first_secant(jnp.zeros(2))
    for _ in range(2):
        step, secant = secant_step(secant, v, slope * (v - root), 1.0)
        assert jnp.max(jnp.abs(step)) <= 1
        v = v + step
    np.testing.assert_allclose(v, root, atol=1e-6)


def test_candidates_move_one_scale_each():
    sets = {"lr": ft.Log(), "decay": ft.NonNegative(), "m": ft.Box(0.0, 0.9)}
    start = {"lr": jnp.array(0.1), "decay": jnp.zeros(2), "m": jnp.array(0.5)}
    sets = check_constraints(sets, start)
    found = candidates(sets, start, 4, 8.0)
    jax.tree.map(lambda leaf, x: np.testing.assert_array_equal(leaf[0], x), found, start)
    decay, lr = np.asarray(found["decay"]), np.asarray(found["lr"])
    np.testing.assert_allclose(decay[1:5, 0], [1e-5, 1e-3, 1e-1, 1e1], rtol=1e-5)  # of 0: of 0.01
    np.testing.assert_allclose(lr[5:], [1e-4, 1e-2, 1, 100], rtol=1e-5)
    np.testing.assert_allclose(lr[:5], 0.1, rtol=1e-6)
    np.testing.assert_array_equal(decay[5:], 0)
    np.testing.assert_array_equal(found["m"], jnp.full(9, 0.5))


def test_the_scale_that_leads_does_harm_on_both_sides():
    rate = [2.3, 2.3, 0.4, np.inf]
    decay = [1.0, 1.0, 1.1, np.nan]
    assert leading_scale(jnp.array([*decay, *rate]), 4) == 1
    assert leading_scale(jnp.array([*rate, *decay]), 4) == 0
    assert leading_scale(jnp.array([*[np.inf] * 4, *rate]), 4) == 1  # a start that diverges
    assert leading_scale(jnp.full(8, np.inf), 4) == 0


@pytest.mark.parametrize(("middle", "most"), [(0.2, 3), (-0.6, 3), (-1.3, 3), (-1.8, 4)])
def test_the_lowest_place_of_a_line(middle, most):
    """Of a parabola, exactly, and no more than so many places."""
    tried = []

    def error(place):
        tried.append(place)
        return 3.0 + (place - middle) ** 2

    place, value, count = lowest_on_line(error, 4)
    assert place == pytest.approx(middle)
    assert value == min(3.0 + (x - middle) ** 2 for x in tried)
    assert count == len(tried) == len(set(tried)) == most


def test_a_line_that_ends_at_a_cliff():
    place, value, _ = lowest_on_line(lambda place: np.nan if place > 0 else 1.0 - place / 10, 4)
    assert place == pytest.approx(-0.5)  # between the lowest and the one before it
    assert value == 1.0
    assert lowest_on_line(lambda place: np.inf, 4)[1] == np.inf


@pytest.mark.second_tier
def test_no_scale_is_noted():
    with pytest.warns(UserWarning, match="no hyperparameter is a scale"):
        ft.rehearse(make, {"lr": jnp.array(0.05)}, steps=T)


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        (lambda steps: None, TypeError, r"make\(steps, key\)"),
        (lambda steps, key: 3, TypeError, "not a problem"),
        (lambda steps, key: make(7, key), ValueError, "a problem of 7 steps"),
        (make(3, jax.random.key(0)), TypeError, "make"),
    ],
)
def test_what_is_no_make(wrong, error, said):
    with pytest.raises(error, match=said):
        ft.rehearse(wrong, {"lr": jnp.array(0.1)}, steps=T, constraints=LOG)


@pytest.mark.parametrize(
    ("steps", "scales", "cost", "said"),
    [
        (32, 1, 4, r"16 steps or more of 32, all will cost 5.5 trainings without a search"),
        (64, 1, 3.5, r"of 64, all will cost 4 trainings\. "),
        (256, 3, 2, r"of 256, all will cost 1.91 trainings without a search"),
    ],
)
def test_a_training_too_short_for_its_cost_is_said(steps, scales, cost, said, monkeypatch):
    module = sys.modules["foretune._outer.rehearse"]

    def not_begun(*_, **__):
        raise InterruptedError

    monkeypatch.setattr(module, "drive", not_begun)

    def made(steps, key):
        return make(steps, key).replace(
            dynamics=ft.Training(loss, lambda h: optax.sgd(sum(h.values())))
        )

    start = {str(k): jnp.array(0.1) for k in range(scales)}
    with pytest.warns(UserWarning, match=said), pytest.raises(InterruptedError):
        ft.rehearse(made, start, steps=steps, constraints=dict.fromkeys(start, ft.Log()), cost=cost)


def test_a_run_of_another_make_is_not_continued(tmp_path):
    def other(steps, key):
        return make(steps, key).replace(init=jnp.ones(4))

    start = {"lr": jnp.array(0.1)}
    options = {"steps": T, "constraints": LOG, "cost": 2, "callbacks": [ft.Checkpoint(tmp_path)]}
    ft.rehearse(make, start, **options)
    with pytest.raises(ValueError, match="the draw: other numbers"):
        ft.rehearse(other, start, **options)


@pytest.mark.parametrize("cost", [1, 0, -1, float("nan"), float("inf"), 1e9])
def test_a_cost_that_is_none(cost):
    with pytest.raises(ValueError, match="cost="):
        rehearsed(cost=cost)

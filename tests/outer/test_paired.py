"""Descents on draws: points are compared in the same draws, and steps are one program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft

from ..compilations import compilations
from .test_acceptance import Keep

KEY = jax.random.key(3)
START = {"x": jnp.array([3.0, -2.0])}


def bowl(noise):
    """Return draws of |x - c|^2 + b, where c differs little from draw to draw and b much."""

    def draw(key):
        of_centre, of_height = jax.random.split(key)
        centre = noise * jax.random.normal(of_centre, (2,))
        height = 50 * jax.random.normal(of_height)
        return ft.Problem(
            Keep(),
            lambda s, h, v: jnp.sum((s["x"] - v[0]) ** 2) + v[1],
            START,
            ft.FullBatch(None, steps=1),
            (centre, height),
        )

    return draw


class Each(ft.Callback):
    """Wants to see each step."""


def descend(noise=0.1, rate=0.05, steps=60, start=START, **options):
    options = {"optimizer": optax.sgd(rate), "key": KEY} | options
    return ft.minimize(bowl(noise), start, steps=steps, **options)


def test_what_draws_add_to_the_error_does_not_matter():
    """The errors differ by 50 from draw to draw, and what is gained is 13."""
    result = descend()
    assert jnp.sum(result.hparams["x"] ** 2) < 0.02
    paired = [record["paired"] for record in result.history]
    assert paired == sorted(paired, reverse=True)
    np.testing.assert_allclose(paired[0] - paired[-1], 13, rtol=0.05)
    assert result.history[-1]["step"] == 60
    assert int(result.best.step) > 8
    np.testing.assert_allclose(result.best.score, paired[-1], rtol=1e-6)


def test_it_ends_at_its_lowest_point():
    """An optimizer that turns about, and climbs."""
    optimizer = optax.sgd(lambda step: jnp.where(step < 24, 0.05, -0.2))
    result = descend(steps=60, optimizer=optimizer)
    assert jnp.sum(result.hparams["x"] ** 2) < 0.2


def test_a_mean_of_many_draws_is_compared_early():
    """Eight steps, of which the last ones climb."""
    optimizer = optax.sgd(lambda step: jnp.where(step < 4, 0.1, -0.3))
    draw = ft.Mean.of_draws(bowl(0.1), 8)
    result = ft.minimize(draw, START, steps=8, optimizer=optimizer, key=KEY)
    assert jnp.sum(result.hparams["x"] ** 2) < 13 * 0.8**6  # what three steps reach


def test_steps_that_are_too_long_are_shortened():
    result = descend(rate=1.05, steps=120)
    assert jnp.sum(result.hparams["x"] ** 2) < 1


def test_a_plateau_does_not_end_the_descent():
    """Noise decides one comparison after another, and all steps that were asked for are made."""
    result = descend(noise=1.0, rate=1e-3, steps=400, start={"x": jnp.zeros(2)})
    assert len(result.history) == 401
    assert result.history[-1]["step"] == 400


@pytest.mark.usefixtures("x64")
@pytest.mark.second_tier
def test_steps_in_one_program_are_the_steps_one_by_one():
    start = jax.tree.map(lambda leaf: leaf.astype(float), START)
    whole = descend(steps=40, start=start)
    single = descend(steps=40, start=start, callbacks=[Each()])
    assert len(whole.history) == len(single.history) == 41
    for a, b in zip(whole.history, single.history, strict=True):
        assert a.keys() == b.keys()
        np.testing.assert_allclose(list(a.values()), list(b.values()), rtol=1e-10)
    np.testing.assert_allclose(whole.hparams["x"], single.hparams["x"], rtol=1e-10)


@pytest.mark.second_tier
def test_a_run_resumes_to_the_bit(tmp_path):
    class Stop(ft.Callback):
        coarse = True

        def step(self, run):
            if run.step >= 20:
                raise KeyboardInterrupt

    whole = descend()
    with pytest.raises(KeyboardInterrupt):
        descend(callbacks=[ft.Checkpoint(tmp_path / "run"), Stop()])
    for _ in range(2):
        file = ft.History(tmp_path / "metrics.jsonl")
        result = descend(callbacks=[ft.Checkpoint(tmp_path / "run", every=7), file])
        assert result.history == whole.history
        np.testing.assert_array_equal(result.hparams["x"], whole.hparams["x"])
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 61


def test_what_is_not_finite_is_rejected_in_a_program_too():
    def draw(key):
        problem = bowl(0.1)(key)
        return problem.replace(
            objective=lambda s, h, v: (
                jnp.sum((s["x"] - v[0]) ** 2)
                + jnp.where(jnp.any(jnp.abs(s["x"]) > 4), jnp.nan, 0.0)
            )
        )

    with pytest.warns(RuntimeWarning, match=r"at step 1 .*not finite, with .*-1.*rejected") as seen:
        result = ft.minimize(draw, START, steps=40, key=KEY, optimizer=optax.sgd(3.0))
    assert len(seen) == 1
    assert any(record["rejected"] for record in result.history[1:8])
    assert jnp.sum(result.hparams["x"] ** 2) < 13


@pytest.mark.filterwarnings("ignore:the error or the hypergradient")
def test_the_descent_goes_on_from_the_point_before_what_is_not_finite():
    def draw(key):  # not finite beyond 2, which the third step reaches
        problem = bowl(0.0)(key)
        return problem.replace(
            objective=lambda s, h, v: jnp.sum(-s["x"] + 0 * v[0]) + jnp.sum(jnp.sqrt(2.0 - s["x"]))
        )

    seen = []

    class Points(ft.Callback):
        def step(self, run):
            seen.append(float(run.hparams["x"][0]))

    start = {"x": jnp.zeros_like(START["x"])}
    ft.minimize(draw, start, steps=5, key=KEY, optimizer=optax.sgd(0.6), callbacks=[Points()])
    bad = next(i for i, x in enumerate(seen) if x > 2)
    assert bad > 1
    assert seen[bad + 1] == seen[bad - 1]
    assert seen[bad - 1] < seen[bad + 2] < seen[bad]


def test_a_second_run_compiles_nothing():
    draw = bowl(0.1)
    options = {"steps": 30, "optimizer": optax.sgd(0.05)}
    ft.minimize(draw, START, key=KEY, **options)
    with compilations("_steps", "compute", "errors_of", "_moved", "<lambda>") as seen:
        ft.minimize(draw, START, key=jax.random.key(9), **options)
    assert seen == []


@pytest.mark.second_tier
def test_several_objectives_are_not_compared():
    def draw(key):
        problem = bowl(0.1)(key)
        return problem.replace(objective={"x": problem.objective, "y": lambda s, h, v: s["y"] ** 2})

    start = START | {"y": jnp.array(1.0)}
    options = {"steps": 40, "key": KEY, "optimizer": optax.sgd(0.1)}
    result = ft.minimize(draw, start, **options)
    single = ft.minimize(draw, start, **options, callbacks=[Each()])
    assert [r["step"] for r in result.history] == list(range(41))
    for a, b in zip(result.history, single.history, strict=True):
        assert a["value"].keys() == b["value"].keys() == {"x", "y"}
        np.testing.assert_allclose(a["value"]["x"], b["value"]["x"], rtol=1e-4)
    assert "paired" not in result.history[-1]
    assert jnp.sum(result.hparams["x"] ** 2) < 1
    assert result.hparams["y"] < 0.1

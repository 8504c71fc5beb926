"""Trust: what a gradient predicts beside what happens over a step of tuning."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import foretune as ft
from foretune._diagnostics.sensitivity import sensitivity_of
from foretune._diagnostics.slopes import Slope

from ..problems import regression


class Copying(ft.Dynamics):
    """A training whose state is the hyperparameters."""

    def init(self, params, hparams):
        return params

    def step(self, state, hparams, batch):
        return hparams


def response(f, hparams):
    init = jax.tree.map(jnp.zeros_like, hparams)
    return ft.Problem(Copying(), lambda s, h, _: f(s), init, ft.FullBatch(None, steps=1))


def report(f, hparams, **options):
    return ft.trust(response(f, hparams), hparams, **({"verbose": False} | options))


def test_a_smooth_response():
    problem, hparams = regression(steps=20)
    found = ft.trust(problem, hparams, verbose=False)
    assert found.ok
    assert not found.advice
    assert found.engine == ft.Reverse()
    assert found.verdicts == dict.fromkeys(
        ["hparams['decay']", "hparams['lr']", "descent"], "trust"
    )
    assert all(radius == pytest.approx(0.3) for radius in found.radius.values())
    assert found.value == pytest.approx(float(problem.response(hparams)[0]), rel=1e-5)
    for slope in (slope for slope in found.slopes if slope.scale <= 0.1):
        assert slope.predicted == pytest.approx(slope.measured, rel=0.1, abs=3 * slope.noise)
    down = [slope for slope in found.slopes if slope.leaf == "descent"]
    assert all(slope.measured < 0 for slope in down)


def test_predicted_and_measured_changes_are_the_formulas():
    hparams = {"x": jnp.array(2.0), "log": jnp.array(3.0)}
    found = report(
        lambda h: h["x"] ** 2 + jnp.log(h["log"]), hparams, constraints={"log": ft.Log()}
    )
    by_leaf = {slope.leaf: slope for slope in found.slopes if slope.scale == 0.1}
    x, log = by_leaf["hparams['x']"], by_leaf["hparams['log']"]
    assert x.predicted == pytest.approx(4 * 0.2, rel=1e-4)  # 2 x times a tenth of x
    assert x.measured == pytest.approx((2.2**2 - 1.8**2) / 2, rel=1e-4)
    assert log.predicted == pytest.approx(0.1, rel=1e-4)  # in the variable log(x)
    assert log.measured == pytest.approx(0.1, rel=1e-4)


@pytest.mark.second_tier
def test_a_leaf_of_zeros_moves_by_the_scale_itself():
    found = report(lambda h: jnp.sum(h["x"]), {"x": jnp.zeros(3)}, scale=0.5)
    largest = max(abs(slope.measured) for slope in found.slopes if slope.scale == 0.5)
    assert largest == pytest.approx(1.5)
    assert found.ok


def wave(x, slope):
    """A line with waves so short that a step of tuning does not see them."""
    return x + slope / 6000 * jnp.sin(
        6000 * x
    )  # its derivative is 1 + slope at multiples of pi / 3000


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("slope", "verdict"), [(0.5, "trust"), (8.0, "size"), (-8.0, "misleads")])
@pytest.mark.second_tier
def test_verdicts_on_a_chaotic_response(slope, verdict):
    hparams = {"x": jnp.array(2 * np.pi * 1000 / 6000)}
    found = report(lambda h: wave(h["x"], slope), hparams, advice=False)
    assert found.verdicts["hparams['x']"] == verdict
    assert found.ok is (verdict == "trust")
    assert (found.radius["hparams['x']"] > 0.1) is found.ok


@pytest.mark.usefixtures("x64")
@pytest.mark.second_tier
def test_the_engine_that_is_advised_agrees():
    hparams = {"x": jnp.array([1.0, -2.0, 3.0]), "y": jnp.array(2 * np.pi / 60)}
    problem = response(lambda h: jnp.sum(h["x"] ** 2) + wave(h["y"], -20.0), hparams)
    found = ft.trust(problem, hparams, verbose=False)
    assert found.verdicts["hparams['y']"] == "misleads"
    assert found.verdicts["hparams['x']"] == "trust"
    assert isinstance(found.engine, ft.Evolution)
    assert found.advice[0].helps
    assert found.advice[0].name.startswith("engine=Evolution(radius=0.1")
    grad = found.engine(problem, hparams).grad
    np.testing.assert_allclose(grad["y"], 1.0, atol=0.1)
    np.testing.assert_allclose(grad["x"], 2 * hparams["x"], atol=0.3)
    text = str(found)
    assert "misleads" in text
    assert "advice: engine=Evolution" in text


@pytest.mark.usefixtures("x64")
@pytest.mark.second_tier
def test_folds_of_which_one_is_chaotic():
    hparams = {"x": jnp.array(2 * np.pi * 1000 / 6000)}

    def of_fold(k):
        plain = response(None, hparams)
        error = lambda s, h, slope: wave(s["x"], slope)  # noqa: E731
        return plain.replace(objective=error, validation=jnp.where(k == 1, -80.0, 0.0))

    folds = ft.Mean([of_fold(k) for k in range(4)])
    found = ft.trust(folds, hparams, verbose=False)
    assert found.verdicts["descent"] == "misleads"
    assert isinstance(found.engine, ft.RobustMean)
    assert found.advice[0].helps
    assert found.advice[0].name == "engine=RobustMean(Reverse())"
    np.testing.assert_allclose(found.engine(folds, hparams).grad["x"], 1.0, atol=0.01)
    assert found.grad["x"] == found.engine(folds, hparams).grad["x"]


@pytest.mark.parametrize(
    ("predicted", "measured", "noise", "verdict"),
    [
        (1.0, 1.0, 0.0, "trust"),
        (2.0, 1.0, 0.0, "trust"),
        (2.1, 1.0, 0.0, "size"),
        (0.4, 1.0, 0.0, "size"),
        (0.4, 1.0, 0.3, "trust"),  # within two deviations
        (-0.1, 1.0, 0.3, "misleads"),
        (-0.1, 0.5, 0.3, "trust"),  # nothing is seen, and little predicted
        (-9.0, 0.5, 0.3, "misleads"),  # nothing is seen, and much predicted
        (0.0, 0.0, 0.0, "trust"),
        (1.0, np.nan, 0.0, "misleads"),
    ],
)
def test_the_rule(predicted, measured, noise, verdict):
    assert Slope("x", 0.1, predicted, measured, noise).verdict == verdict


def test_several_objectives_have_no_common_descent():
    hparams = {"x": jnp.array(1.0), "y": jnp.array(2.0)}
    problem = response(lambda h: h["x"], hparams).replace(
        objective={"x": lambda s, h, _: s["x"] ** 2, "y": lambda s, h, _: -(s["y"] ** 2)}
    )
    found = ft.trust(problem, hparams, verbose=False)
    assert found.verdicts == {"hparams['x']": "trust", "hparams['y']": "trust"}
    by_leaf = {slope.leaf: slope.measured for slope in found.slopes if slope.scale == 0.1}
    assert by_leaf["hparams['x']"] > 0 > by_leaf["hparams['y']"]


class Growing(ft.Dynamics):
    """s <- h s in the first half of ten steps, then s stays."""

    def init(self, params, hparams):
        return params

    def step(self, state, hparams, batch):
        return jnp.where(batch < 5, hparams["a"], 1.0) * state


def test_sensitivity_names_the_steps():
    problem = ft.Problem(Growing(), lambda s, h, _: jnp.sum(s), jnp.ones(3), jnp.arange(10))
    found = sensitivity_of(problem, {"a": jnp.array(10.0)}, jax.random.key(0))
    np.testing.assert_allclose(found.norms, 10.0 ** np.minimum(np.arange(1, 11), 5), rtol=1e-4)
    assert found.factor == pytest.approx(1e5, rel=1e-4)
    assert (found.first, found.last) == (1, 5)
    assert "1e+05 times" in str(found)
    assert "steps 1 to 5 of 10" in str(found)
    still = sensitivity_of(problem, {"a": jnp.array(0.5)}, jax.random.key(0))
    assert "does not grow" in str(still)


def test_a_step_without_forward_mode_has_no_sensitivity():
    @jax.custom_vjp
    def twice(x):
        return 2 * x

    twice.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))

    class Reversed(Growing):
        def step(self, state, hparams, batch):
            return twice(state) * hparams["a"]

    problem = ft.Problem(Reversed(), lambda s, h, _: jnp.sum(s), jnp.ones(3), jnp.arange(4))
    found = ft.trust(problem, {"a": jnp.array(0.3)}, verbose=False, scale=0.01)
    assert found.sensitivity is None
    assert found.ok


def minibatches(**options):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 3)).astype(np.float32), rng.normal(size=30).astype(np.float32)
    batches = ft.Minibatches.shuffled((x, y), batch_size=6, steps=12, key=jax.random.key(0))
    return regression(batches=batches, **options)


def test_other_minibatches_are_fresh_runs():
    problem, hparams = minibatches()
    found = ft.trust(problem, hparams, verbose=False)
    assert len(set(found.fresh)) == 4
    assert "in 4 other runs" in str(found)


def test_other_draws_are_fresh_runs():
    problem, hparams = minibatches()
    drawn = []

    def draw(key):
        drawn.append(key)
        return problem.replace(
            init=jax.tree.map(lambda w: jax.random.normal(key, w.shape), problem.init)
        )

    key = jax.random.key(5)
    found = ft.trust(draw, hparams, key=key, verbose=False)
    assert found.value == pytest.approx(float(draw(key).response(hparams)[0]), rel=1e-5)
    assert len(set(found.fresh)) == 4
    assert found.value not in found.fresh
    assert len(drawn) == 2  # traced once, and called here
    assert ft.check_hypergradient(draw, hparams, key=key, verbose=False).rows
    with pytest.raises(TypeError, match="give the key too"):
        ft.trust(draw, hparams, verbose=False)


def test_a_run_that_is_far_below_others_is_named():
    problem, hparams = minibatches()

    def draw(key):
        lucky = jnp.all(jax.random.key_data(key) == jax.random.key_data(jax.random.key(5)))
        return problem.replace(
            validation=jax.tree.map(lambda x: jnp.where(lucky, 0.1, 1.0) * x, problem.validation)
        )

    found = ft.trust(draw, hparams, key=jax.random.key(5), verbose=False)
    (advice,) = [a for a in found.advice if a.name == "draws"]
    assert "fitted to it" in str(advice)


@pytest.mark.second_tier
def test_draws_that_are_not_finite_are_counted():
    problem, hparams = minibatches()

    def draw(key):
        here = jnp.all(jax.random.key_data(key) == jax.random.key_data(jax.random.key(5)))
        return problem.replace(
            validation=jax.tree.map(lambda x: jnp.where(here, 1.0, jnp.nan) * x, problem.validation)
        )

    found = ft.trust(draw, hparams, key=jax.random.key(5), verbose=False)
    assert "advice: draws: the error of 4 of 4 other runs is not finite" in str(found)


@pytest.mark.promotes("Adam multiplies floats by a count")
@pytest.mark.second_tier
def test_a_gradient_that_is_not_finite_misleads():
    problem, hparams = regression(optimizer=lambda h: optax.adam(h["lr"]))
    zero = problem.replace(batches=ft.FullBatch((np.zeros((6, 3)), np.ones(6)), steps=4))
    with pytest.raises(ft.NonFiniteError):
        ft.Reverse()(zero, hparams)
    found = ft.trust(zero, {"lr": hparams["lr"], "decay": jnp.array(0.0)}, verbose=False)
    assert found.verdicts["hparams['lr']"] == found.verdicts["descent"] == "misleads"
    assert "First at step 1 of 4" in str(found)
    assert "eps_root" in str(found)
    assert isinstance(found.engine, ft.Evolution)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"scale": -0.1}, ValueError, "scale=-0.1"),
        ({"scale": float("nan")}, ValueError, "scale=nan"),
        ({"directions": 0}, ValueError, "directions=0"),
        ({"constraints": {"lr": ft.Box(0.1, 0.1)}}, ValueError, r"hparams\['lr'\] cannot be moved"),
        ({"constraints": {"rate": ft.Log()}}, ValueError, "names no hyperparameter"),
    ],
)
def test_bad_input_is_named(options, error, words):
    problem, hparams = regression()
    with pytest.raises(error, match=words):
        ft.trust(problem, hparams, verbose=False, **options)

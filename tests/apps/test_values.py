"""Numbers as labels: wrong ones are found, by predictions or by regressors; sample weights."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import make_blobs, make_friedman1
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.utils.estimator_checks import parametrize_with_checks

import foretune as ft
from foretune.apps import LabelCleaner, ValueCleaner, _ensemble, clean_values
from foretune.apps import _noise as noise
from foretune.apps import _value_model as model
from foretune.apps._columns import column_encoder
from foretune.apps._models import prepared
from foretune.apps._regularised import problem_of

from ..conftest import setting


def example(n=300, wrong=30, seed=0, by=2.0):
    """Return values of which the first are wrong, predictions, and the right values."""
    rng = np.random.default_rng(seed)
    f = rng.normal(size=n)
    true = f + 0.2 * rng.normal(size=n)
    given = true.copy()
    given[:wrong] += by
    return given, f, true


def test_wrong_values_are_found_from_predictions():
    given, f, _ = example()
    found = clean_values(given, f)
    assert found.suspects_[:30].mean() > 0.9
    assert found.suspects_[30:].mean() < 0.02
    assert np.all(found.suspects_ == (found.weights_ < 0.5))
    assert np.all(np.diff(found.weights_[found.ranking_]) >= 0)
    assert found.noise_rate_ == pytest.approx(found.probability_wrong_.mean())
    assert 0 < found.unflagged_ < 10
    np.testing.assert_allclose(found.suggested_, f, atol=1e-6)
    assert np.all(found.spread_ > 0)


def test_scale_and_origin_change_nothing():
    given, f, _ = example()
    plain = clean_values(given, f)
    moved = clean_values(1e9 * given - 3e9, 1e9 * f - 3e9)
    np.testing.assert_allclose(moved.weights_, plain.weights_, atol=1e-3)
    np.testing.assert_allclose(moved.spread_, 1e9 * plain.spread_, rtol=1e-3)


def test_several_predictions_are_pooled_and_noise_is_left_out():
    given, f, _ = example()
    other = np.random.default_rng(1).normal(size=300)
    found = clean_values(given, {"good": f, "none": other})
    assert found.ensemble_["predictions['good']"] > 0.9
    assert sum(found.ensemble_.values()) == pytest.approx(1)
    assert found.suspects_[:30].mean() > 0.9
    listed = clean_values(given, [f, other])
    np.testing.assert_array_equal(listed.weights_, found.weights_)


def test_rows_differ_in_how_far_predictions_err():
    rng = np.random.default_rng(0)
    f = np.linspace(-3, 3, 600)
    noise = np.where(f > 0, 1.0, 0.05)
    y = f + noise * rng.normal(size=600)
    y[:300:20] += 1.0  # far for these rows, not for the others
    found = clean_values(y, f)
    assert found.suspects_[:300:20].mean() > 0.9
    assert found.suspects_[300:].mean() < 0.05
    assert np.median(found.spread_[350:]) > 5 * np.median(found.spread_[:250])


def test_checked_rows_say_that_far_values_are_right():
    rng = np.random.default_rng(0)
    f = rng.normal(size=400)
    y = f + 0.3 * rng.standard_t(2, size=400)  # honest outliers
    alone = clean_values(y, f, progress=False)
    helped = clean_values(y, f, np.arange(200), y[:200], progress=False)
    assert helped.stopped_ != "no descent"
    assert np.all(helped.weights_[:200] == 1)
    assert helped.probability_wrong_[200:].mean() < alone.probability_wrong_[200:].mean()
    mask = np.arange(400) < 200
    again = clean_values(y, f, mask, y[:200], progress=False)
    np.testing.assert_array_equal(again.weights_, helped.weights_)


def test_its_hypergradient_is_right():
    given, f, true = example(60, 6)
    with jax.enable_x64(True):
        g = model.local_spread(f[None], given)
        fold = np.arange(20) % 2
        train = (fold[None] != np.arange(2)[:, None]).astype(float)
        known = np.where(given[40:] == true[40:], 1.0, 0.0)
        parts = (f[None, :40], given[:40], g[:, :40], f[None, 40:], true[40:], g[:, 40:])
        rows = model.ValueRows(*map(jnp.asarray, (*parts, given[40:], known, np.ones(40), train)))
        problem = problem_of(model.Values(), rows, model.FITTING._replace(steps=5))
        hparams = {k: jnp.asarray(v, float) for k, v in model.start_hparams(40, 20).items()}
        assert ft.check_hypergradient(problem, hparams)


@pytest.mark.parametrize(
    "y",
    [
        np.ones(40),
        np.r_[np.zeros(38), 1.0, 2.0],
        np.random.default_rng(0).standard_cauchy(40),
        np.exp(3 * np.random.default_rng(0).normal(size=40)),
        np.r_[np.arange(39.0), 1e300],
    ],
    ids=["constant", "nearly constant", "Cauchy", "lognormal", "1e300"],
)
def test_odd_values_give_finite_answers(y):
    found = clean_values(y, np.full(40, np.median(y)))
    for array in (found.weights_, found.suggested_, found.spread_):
        assert np.isfinite(array).all()
    assert found.suspects_.mean() < 0.5


def test_predictions_of_the_same_rows_are_noted():
    given, _, _ = example()
    with pytest.warns(UserWarning, match="out-of-fold"):
        clean_values(given, given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["a", "b", "c"], np.zeros(3)), "values must be numbers.*LabelCleaner"),
        (([1.0, np.nan, 2.0], np.zeros(3)), "values is missing or infinite in 1 rows.*row 1"),
        (([1.0, 2.0, 3.0], [0.0, 1.0]), r"shape \(2,\): 3 values need shape \(3,\)"),
        (([1.0, 2.0, 3.0], {}), "predictions is empty"),
        (([1.0, 2.0], [1.0, 2.0]), "3 rows or more"),
        (([1.0, 2.0, 3.0], np.zeros(3), [0]), "checked and checked_values together"),
        (([1.0, 2.0, 3.0], np.zeros(3), [0, 0], [1, 1]), "names a row twice"),
        (([1.0, 2.0, 3.0], np.zeros(3), [0], [1, 2]), "1 rows are checked"),
        (([1.0, 2.0, 3.0], np.zeros(3), [0, 1, 2], [1, 2, 3]), "every row is checked"),
    ],
)
def test_bad_predictions(arguments, message):
    with pytest.raises(ValueError, match=message):
        clean_values(*arguments)


@pytest.fixture(scope="module")
def shifted():
    x, y = make_friedman1(260, noise=0.3, random_state=0)
    given = y[:200].copy()
    given[:20] += 12
    return x[:200], given, x[200:], y[200:]


@pytest.mark.second_tier
def test_a_pool_of_regressors(shifted):
    x, given, rest, true = shifted
    cleaner = ValueCleaner(random_state=0, progress=False).fit(x, given, rest[:30], true[:30])
    assert cleaner.suspects_[:20].mean() > 0.8
    assert cleaner.suspects_[20:].mean() < 0.05
    assert set(cleaner.ensemble_) == {"ridge", "forest", "boosting"}
    assert cleaner.score(rest[30:], true[30:]) > 0.6
    assert np.mean(np.abs(cleaner.suggested_ - given)[20:]) < 3


def quick(**options):
    return ValueCleaner(LinearRegression(), random_state=0, progress=False, **options)


def test_a_regressor_of_ones_own(shifted):
    x, given, _, _ = shifted
    found, again = (quick().fit(x, given) for _ in range(2))
    assert set(found.ensemble_) == {"estimator"}
    np.testing.assert_array_equal(found.weights_, again.weights_)
    assert found.suspects_[:20].mean() > 0.5


@pytest.mark.second_tier
def test_tables_with_categories_and_missing_values():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=150), "b": rng.choice(["x", "y"], 150)})
    y = frame["a"].to_numpy() + 3 * (frame["b"] == "y") + 0.1 * rng.normal(size=150)
    frame.loc[::10, "a"] = np.nan
    y[5:10] += 20
    cleaner = ValueCleaner(random_state=0, progress=False).fit(frame, y)
    assert cleaner.suspects_[5:10].all()
    assert cleaner.predict(frame[:3]).shape == (3,)
    assert list(cleaner.feature_names_in_) == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"estimator": "forest"}, {}, "estimator='forest'.*regressor"),
        ({"estimator": LogisticRegression()}, {}, "regressor"),
        ({"folds": 1}, {}, "'folds' parameter"),
        ({}, {"y": ["a"] * 20}, "numbers"),
        ({}, {"y": np.r_[np.nan, np.zeros(19)]}, "y is missing or infinite in 1 rows"),
        ({}, {"X_clean": np.ones((2, 2))}, "X_clean and y_clean together"),
        ({}, {"X_clean": np.ones((2, 2)), "y_clean": [1.0]}, "y_clean has shape"),
        ({}, {"sample_weight": -np.ones(20)}, "negative in row 0"),
        ({}, {"sample_weight": np.zeros(20)}, "at least one non-zero"),
        (
            {"estimator": KNeighborsRegressor()},
            {"sample_weight": np.ones(20)},
            "KNeighborsRegressor does not take it",
        ),
    ],
)
def test_bad_input(options, changes, message):
    arguments = {"X": np.ones((20, 2)), "y": np.arange(20.0), **changes}
    with pytest.raises(ValueError, match=message):
        ValueCleaner(**options).fit(**arguments)


def test_rows_of_weight_0_are_judged_and_train_no_regressor(shifted):
    x, given, _, _ = shifted
    weight = np.ones(200)
    weight[:20] = 0
    found = quick().fit(x, given, sample_weight=weight)
    assert found.weights_.shape == (200,)
    assert found.suspects_[:20].mean() > 0.8
    changed = given.copy()
    changed[:10] = 1e5
    scaled = quick().fit(x, changed, sample_weight=weight)
    kept = LinearRegression().fit(x[20:][~found.suspects_[20:]], given[20:][~found.suspects_[20:]])
    np.testing.assert_allclose(found.predict(x), kept.predict(x), atol=1e-6)
    assert scaled.suspects_[:10].all()


def recorded(seen):
    class Recorder(LogisticRegression):
        def fit(self, X, y, sample_weight=None):
            seen.append(sample_weight)
            return super().fit(X, y, sample_weight)

    return Recorder()


def test_label_cleaner_passes_weights_to_a_classifier():
    x, y = make_blobs(60, centers=2, random_state=0)
    weight = np.arange(60) % 3 + 0.0
    seen = []
    cleaner = LabelCleaner(estimator=recorded(seen), random_state=0, progress=False)
    cleaner.fit(x, y, sample_weight=weight)
    assert len(seen) == 6  # five folds and the final model
    assert all(set(np.unique(found)) == {1.0, 2.0} for found in seen)
    assert cleaner.weights_.shape == (60,)
    with pytest.raises(ValueError, match="KNeighborsClassifier does not take it"):
        LabelCleaner(estimator=KNeighborsClassifier()).fit(x, y, sample_weight=weight)


def test_no_class_is_lost_by_its_suspects():
    labels = np.array([0, 0, 0, 1, 1, 1])
    trust = np.array([0.9, 0.8, 0.1, 0.3, 0.2, 0.4])
    np.testing.assert_array_equal(_ensemble.trained_rows(trust, labels, None), [0, 1, 3, 5])
    weight = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    np.testing.assert_array_equal(_ensemble.trained_rows(trust, labels, weight), [0, 1, 3, 4])
    x = np.arange(30.0).reshape(10, 3)  # labels that nothing explains
    cleaner = LabelCleaner(estimator=LogisticRegression(), random_state=0, progress=False)
    cleaner.fit(x, np.r_[np.zeros(8, int), 1, 1])
    assert cleaner.predict_proba(x).shape == (10, 2)


def test_weights_of_pipelines_go_to_the_last_step():
    x, y = make_blobs(60, centers=2, random_state=0)
    members = _ensemble.classifiers_of(x, y, 2, 0)
    weight = np.where(y == 1, 1.0, 1e-6)
    folds = _ensemble.Folds(x, y, np.zeros(60), weight, 0, False, 2)
    rng = np.random.default_rng(0)
    fitted = folds.trained(members["logistic"], np.arange(60), rng, None)
    assert fitted.predict_proba(x)[:, 1].min() > 0.5
    assert _ensemble.check_weight(weight, 60, members["logistic"]) is not None


def test_the_kernel_model_counts_rows_by_their_weight():
    x, y = make_blobs(80, centers=2, cluster_std=2.0, random_state=0)
    options = {"hyper_steps": 2, "steps": 10, "random_state": 0}
    checked = (x[60:], y[60:])
    plain = LabelCleaner("softmax", **options).fit(x[:60], y[:60], *checked)
    ones = LabelCleaner("softmax", **options).fit(
        x[:60], y[:60], *checked, sample_weight=3 * np.ones(60)
    )
    np.testing.assert_allclose(ones.weights_, plain.weights_, atol=1e-4)


def test_labels_of_weight_0_change_nothing_in_the_kernel_model():
    x, y = make_blobs(80, centers=2, cluster_std=2.0, random_state=0)
    _, z, softmax = prepared("softmax", x, 0)
    train = (np.arange(80)[None] % 2 != np.arange(2)[:, None]).astype(np.float32)
    flipped = np.where(np.arange(60) < 20, 1 - y[:60], y[:60])
    weight = noise.mean_one(np.where(np.arange(80) < 20, 0.0, 1.0))
    found = []
    for given in (y[:60], flipped):
        data = noise.Data(*map(jnp.asarray, (z, given, y[60:], train)), weight=weight)
        start = noise.start_noise(softmax, data, 2, 10, jax.random.key(0))
        problem = noise.noise_problem(softmax, data, 2, 10, jax.random.key(0))
        value, _ = problem.response({"noise": jnp.log(start), "l2": jnp.full(1, -9.0)})
        found.append((value, start))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_text_without_a_repeated_word_is_no_error():
    rows = [f"alpha{i} beta{i} gamma{i} delta{i}" for i in range(60)]
    frame = pd.DataFrame({"text": rows, "a": np.arange(60.0)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = column_encoder(frame).fit(frame).transform(frame)
    assert found.shape == (60, 2)
    np.testing.assert_array_equal(found[:, 1], 0)


FAILS = {
    "check_sample_weight_equivalence_on_dense_data": "folds are of rows, repeated or not",
    "check_sample_weight_equivalence_on_sparse_data": "folds are of rows, repeated or not",
}


@pytest.mark.second_tier
@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(
    [
        ValueCleaner(random_state=0, progress=False),
        LabelCleaner(estimator="ensemble", hyper_steps=2, steps=15, random_state=0, progress=False),
    ],
    expected_failed_checks=lambda estimator: FAILS,
)
def test_scikit_learn_conventions(estimator, check, monkeypatch):
    monkeypatch.setattr(_ensemble, "TREES", 20)  # forests of 200 would take a quarter of an hour
    with setting(jax_disable_most_optimizations=True):
        check(estimator)

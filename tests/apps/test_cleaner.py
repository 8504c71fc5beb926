"""LabelCleaner: it finds wrong labels, on any kind of input, and says what is wrong with others."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from sklearn.datasets import load_breast_cancer, load_digits, make_blobs
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.utils.estimator_checks import parametrize_with_checks

import foretune as ft
from experiments.cleaning.noise import corrupt
from foretune.apps import LabelCleaner, _ensemble
from foretune.apps import _noise as noise
from foretune.apps._features import ColumnScale, kernel_components

from ..conftest import setting


def f1(found, wrong):
    return 2 * (found & wrong).sum() / (found.sum() + wrong.sum())


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(y))
    x, y = x[order], y[order]
    observed, wrong = corrupt(y[:600], 0.4, rng)
    return x, y, observed, wrong


@pytest.fixture(scope="module")
def fitted(digits):
    x, y, observed, _ = digits
    cleaner = LabelCleaner(random_state=0, progress=False)
    return cleaner.fit(x[:600], observed, x[600:700], y[600:700])


@pytest.fixture(scope="module")
def blobs():
    x, y = make_blobs(160, centers=3, cluster_std=0.9, random_state=1)
    observed, wrong = corrupt(y[:120], 0.2, np.random.default_rng(0))
    return x[:120], observed, wrong, x[120:], y[120:]


@pytest.fixture
def small(monkeypatch):
    """An ensemble of logistic regression and a small forest, which are trained at once."""
    monkeypatch.setattr(_ensemble, "MOST_KERNEL", 0)
    monkeypatch.setattr(_ensemble, "WIDE", 0)
    monkeypatch.setattr(_ensemble, "TREES", 10)
    return lambda **options: LabelCleaner(**{"random_state": 0, "progress": False} | options)


def quick(**options):
    """A cleaner by a classifier that is trained at once."""
    usual = {"estimator": GaussianNB(), "random_state": 0, "progress": False}
    return LabelCleaner(**usual | options)


@pytest.mark.second_tier
def test_wrong_digits_are_found_and_the_model_beats_training_on_all(digits, fitted):
    x, y, observed, wrong = digits
    assert f1(fitted.suspects_, wrong) > 0.85
    assert wrong[fitted.ranking_[:150]].mean() > 0.95
    assert abs(fitted.noise_rate_ - 0.4) < 0.06
    missed = (wrong & ~fitted.suspects_).sum()
    assert missed / 2 < fitted.unflagged_ < 2 * missed
    everything = LogisticRegression(max_iter=1000)
    everything.fit(x[:700] / 16, np.concatenate([observed, y[600:700]]))
    assert fitted.score(x[700:], y[700:]) > everything.score(x[700:] / 16, y[700:]) + 0.02
    assert np.mean((fitted.suggested_ == y[:600])[fitted.suspects_ & wrong]) > 0.8


@pytest.mark.second_tier
def test_attributes_belong_together(digits, fitted):
    assert fitted.weights_.shape == (600,)
    assert ((fitted.weights_ >= 0) & (fitted.weights_ <= 1)).all()
    np.testing.assert_array_equal(fitted.suspects_, fitted.weights_ < 0.5)
    assert sorted(fitted.ranking_) == list(range(600))
    assert (np.diff(fitted.probability_wrong_[fitted.ranking_]) <= 0).all()
    np.testing.assert_allclose(fitted.probability_wrong_, 1 - fitted.weights_)
    np.testing.assert_allclose(fitted.noise_matrix_.sum(1), 1, rtol=1e-6)
    assert fitted.history_[0]["value"] > min(record["value"] for record in fitted.history_)
    assert set(fitted.ensemble_) == {"logistic", "forest", "boosting", "kernel"}
    np.testing.assert_allclose(fitted.predict_proba(digits[0][:5]).sum(1), 1)


def test_the_same_seed_gives_the_same_weights(blobs, small):
    x, observed, _, trusted_x, trusted = blobs
    weights = [small().fit(x, observed, trusted_x, trusted).weights_ for _ in range(2)]
    np.testing.assert_array_equal(*weights)


def test_labels_of_any_type_rows_of_any_kind(blobs, small):
    x, observed, wrong, trusted_x, trusted = blobs
    names = np.array(["cat", "dog", "red fox"])
    plain = small().fit(x, observed, trusted_x, trusted)
    frames = small().fit(
        pd.DataFrame(x, columns=["a", "b"]),
        pd.Series(names[observed]),
        pd.DataFrame(trusted_x, columns=["a", "b"]),
        pd.Series(names[trusted]),
    )
    assert list(frames.feature_names_in_) == ["a", "b"]
    assert set(frames.predict(pd.DataFrame(x, columns=["a", "b"]))) <= set(names)
    np.testing.assert_allclose(frames.weights_, plain.weights_, atol=1e-6)
    assert f1(plain.suspects_, wrong) > 0.8
    scattered = small().fit(sparse.csr_array(x), observed, sparse.csr_matrix(trusted_x), trusted)
    assert f1(scattered.suspects_, wrong) > 0.6
    assert scattered.predict(sparse.csr_array(x)).shape == (120,)


def test_rare_classes_are_not_swept_away(small):
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(0, 1, (400, 3)), rng.normal(3.5, 1, (30, 3))])
    y = np.repeat([0, 1], [400, 30])
    order = rng.permutation(430)
    x, y = x[order], y[order]
    wrong = rng.random(430) < 0.1
    observed = np.where(wrong, 1 - y, y)
    cleaner = small().fit(x[:350], observed[:350], x[350:], y[350:])
    rare_and_right = (y[:350] == 1) & ~wrong[:350]
    assert cleaner.suspects_[rare_and_right].mean() < 0.3
    assert f1(cleaner.suspects_, wrong[:350]) > 0.7


def test_without_trusted_examples_it_goes_by_the_observed_ones(small):
    data = load_breast_cancer()
    observed, wrong = corrupt(data.target, 0.15, np.random.default_rng(0))
    assert f1(small().fit(data.data, observed).suspects_, wrong) > 0.7


def kernel_data(blobs, **options):
    """Return the kernel model of blobs, and its data in two folds."""
    x, observed, _, trusted_x, trusted = blobs
    z, model = noise.kernel_model(np.concatenate([x, trusted_x]), 0)
    data = noise.Data.of(z, observed, trusted, np.arange(160) % 2, options.get("weight"))
    return model, data


def test_the_kernel_models_hypergradient_is_right(blobs):
    with jax.enable_x64(True):
        model, data = kernel_data(blobs)
        model, data = jax.tree.map(
            lambda a: a.astype(float) if a.dtype == jnp.float32 else a, (model, data)
        )
        problem = noise.noise_problem(model, data, 3, 5)
        hparams = {"noise": 2.0 * jnp.eye(3), "l2": jnp.log(jnp.array([1e-3, 1e-2]))}
        assert ft.check_hypergradient(problem, hparams)


def test_regularisers_of_some_rows_serve_all(blobs, monkeypatch):
    monkeypatch.setattr(noise, "HYPER_STEPS", 2)
    weight = np.linspace(0.5, 1.5, 160)
    model, data = kernel_data(blobs, weight=weight)
    some = data.sample(60, np.random.default_rng(0))
    assert data.sample(120, np.random.default_rng(0)) is data
    assert (some.z.shape[0], len(some.observed), some.train.shape) == (100, 60, (2, 100))
    np.testing.assert_array_equal(some.z[60:], data.z[120:])  # the trusted rows, all of them
    np.testing.assert_allclose(some.weight[60:], weight[120:], rtol=1e-6)
    p, tuned = noise.tune(model, data, some, 3, [])
    assert p.shape == (160, 3)
    # a regulariser beside the mean over 160 rows is that over 100 in proportion
    _, alone = noise.tune(model, some, some, 3, [])
    np.testing.assert_allclose(tuned["l2"], alone["l2"] + np.log(100 / 160), rtol=1e-5)


def test_the_kernel_model_counts_rows_by_their_weight(blobs):
    x, observed, wrong, trusted_x, trusted = blobs
    some = np.where(wrong, 0.0, 3.0)
    values = []
    for labels in (observed, np.where(wrong, (observed + 1) % 3, observed)):
        rows = (x, labels, wrong, trusted_x, trusted)
        model, data = kernel_data(rows, weight=np.r_[some, np.ones(40)])
        start = noise.start_noise(model, data, 3)
        hparams = {"noise": jnp.log(start), "l2": jnp.full(2, -9.0)}
        values.append((noise.noise_problem(model, data, 3, 10).response(hparams)[0], start))
    jax.tree.map(np.testing.assert_array_equal, *values)  # labels of weight 0 change nothing


def test_an_interrupted_fit_is_an_interrupt(blobs, monkeypatch):
    original = noise.minimize

    def interrupted(*arguments, **options):
        return original(*arguments, **options)._replace(stopped="interrupted")

    monkeypatch.setattr(noise, "minimize", interrupted)
    monkeypatch.setattr(noise, "HYPER_STEPS", 1)
    with pytest.raises(KeyboardInterrupt):
        LabelCleaner(random_state=0, progress=False).fit(*blobs[:2])


def test_scales():
    pixels = np.random.default_rng(0).integers(0, 256, (50, 10)).astype(float)
    assert np.isscalar(ColumnScale().fit(pixels).divisor)
    mixed = pixels * np.logspace(0, 5, 10)
    scaled = ColumnScale().fit(mixed)
    assert np.shape(scaled.divisor) == (10,)
    assert (scaled.transform(mixed) ** 2).sum(1).mean() == pytest.approx(1)
    assert np.isfinite(kernel_components(np.ones((5, 3)), 0)[0]).all()


GOOD = (np.arange(40.0).reshape(20, 2), np.arange(20) % 2, np.ones((4, 2)), np.array([0, 1, 0, 1]))


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({3: np.array([0, 1, 0, 7])}, {}, "labels that y does not have: 7; y has 0, 1"),
        ({0: np.full((20, 2), np.nan)}, {}, "contains NaN"),
        ({2: np.full((4, 2), np.inf)}, {}, "X_clean: .*infinity"),
        ({1: np.zeros(20)}, {}, "only one class"),
        ({2: np.ones((4, 3))}, {}, "X_clean: X has 3 features"),
        ({3: np.array([0, 1])}, {}, "y_clean has shape \\(2,\\), and X_clean has 4 rows"),
        ({3: None}, {}, "X_clean and y_clean together"),
        ({}, {"estimator": "kernel"}, "estimator='kernel': give 'ensemble', or a scikit-learn"),
        ({}, {"folds": 1}, "'folds' parameter"),
    ],
)
def test_bad_input(changes, options, message):
    arguments = [changes.get(i, good) for i, good in enumerate(GOOD)]
    with pytest.raises(ValueError, match=message):
        LabelCleaner(**options).fit(*arguments)


@pytest.mark.parametrize("kind", [int, bool, str])
def test_labels_as_objects(blobs, kind):
    x, observed, _, trusted_x, trusted = blobs
    labels, checks = ((y > 0).astype(kind) for y in (observed, trusted))
    plain = quick().fit(x, labels, trusted_x, checks)
    objects = quick().fit(x, labels.astype(object), trusted_x, checks.astype(object))
    np.testing.assert_array_equal(objects.classes_, plain.classes_)
    np.testing.assert_array_equal(objects.weights_, plain.weights_)
    holes = labels.astype(object)
    holes[5] = None
    with pytest.raises(ValueError, match="y has 1 rows without a label, the first is row 5"):
        quick().fit(x, holes)


def test_rows_of_X_that_were_verified(blobs):
    x, observed, wrong, trusted_x, trusted = blobs
    true = make_blobs(160, centers=3, cluster_std=0.9, random_state=1)[1]
    rows = np.arange(0, 120, 4)
    cleaner = quick().fit(x, observed, trusted_x, trusted, checked=rows, checked_labels=true[rows])
    assert cleaner.weights_.shape == (120,)
    np.testing.assert_array_equal(cleaner.suspects_[rows], wrong[rows])
    np.testing.assert_array_equal(cleaner.suggested_[rows], true[rows])
    with pytest.raises(ValueError, match="checked and checked_labels together"):
        quick().fit(x, observed, checked=rows)


def test_a_class_without_trusted_examples_is_noted(blobs):
    x, observed, _, trusted_x, trusted = blobs
    some = trusted < 2
    with pytest.warns(UserWarning, match="no trusted example of 2"):
        quick().fit(x, observed, trusted_x[some], trusted[some])


def test_prediction_before_fitting():
    with pytest.raises(NotFittedError):
        LabelCleaner().predict(np.ones((2, 2)))


def recorded(seen):
    class Recorder(LogisticRegression):
        def fit(self, X, y, sample_weight=None):
            seen.append(sample_weight)
            return super().fit(X, y, sample_weight)

    return Recorder()


def test_weights_are_passed_to_a_classifier():
    x, y = make_blobs(60, centers=2, random_state=0)
    weight = np.arange(60) % 3 + 0.0
    seen = []
    cleaner = quick(estimator=recorded(seen)).fit(x, y, sample_weight=weight)
    assert len(seen) == 6  # five folds and the final model
    assert all(set(np.unique(found)) == {1.0, 2.0} for found in seen)
    assert cleaner.weights_.shape == (60,)
    with pytest.raises(ValueError, match="KNeighborsClassifier does not take it"):
        quick(estimator=KNeighborsClassifier()).fit(x, y, sample_weight=weight)
    with pytest.raises(ValueError, match="negative in row 0"):
        quick().fit(x, y, sample_weight=weight - 1)


def test_weights_of_pipelines_go_to_the_last_step():
    x, y = make_blobs(60, centers=2, random_state=0)
    members = _ensemble.classifiers_of(x, y, 2, 0)
    weight = np.where(y == 1, 1.0, 1e-6)
    folds = _ensemble.Folds(x, y, np.zeros(60), weight, 0, False, 2)
    rng = np.random.default_rng(0)
    fitted = folds.trained(members["logistic"], np.arange(60), rng, None)
    assert fitted.predict_proba(x)[:, 1].min() > 0.5
    assert _ensemble.check_weight(weight, 60, members["logistic"]) is not None


def test_no_class_is_lost_by_its_suspects():
    labels = np.array([0, 0, 0, 1, 1, 1])
    trust = np.array([0.9, 0.8, 0.1, 0.3, 0.2, 0.4])
    folds = _ensemble.Folds(np.zeros((6, 1)), labels, np.arange(6) % 2, None, 0, False, 2)
    np.testing.assert_array_equal(np.flatnonzero(folds.trusted_rows(trust)), [0, 1, 3, 5])
    weighed = folds._replace(weight=np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0]))
    np.testing.assert_array_equal(np.flatnonzero(weighed.trusted_rows(trust)), [0, 1, 3, 4])
    x = np.arange(30.0).reshape(10, 3)  # labels that nothing explains
    cleaner = quick(estimator=LogisticRegression()).fit(x, np.r_[np.zeros(8, int), 1, 1])
    assert cleaner.predict_proba(x).shape == (10, 2)


FAILS = {
    f"check_sample_weight_equivalence_on_{kind}_data": "folds are of rows, repeated or not"
    for kind in ("dense", "sparse")
}


@pytest.mark.second_tier
@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(
    [LabelCleaner(LogisticRegression(), random_state=0, progress=False)],
    expected_failed_checks=lambda _: FAILS,
)
def test_scikit_learn_conventions(estimator, check, monkeypatch):
    monkeypatch.setattr(noise, "HYPER_STEPS", 2)
    with setting(jax_disable_most_optimizations=True):  # many shapes, each compiled
        check(estimator)

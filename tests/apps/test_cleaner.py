"""LabelCleaner: it finds wrong labels, on any kind of input, and says what is wrong with others."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from sklearn.datasets import load_breast_cancer, load_digits, make_blobs
from sklearn.exceptions import NotFittedError
from sklearn.naive_bayes import GaussianNB
from sklearn.utils.estimator_checks import parametrize_with_checks

import foretune as ft
from experiments.cleaning.noise import corrupt
from foretune.apps import LabelCleaner
from foretune.apps import _noise as noise
from foretune.apps._features import ColumnScale, Features
from foretune.apps._models import prepared

from ..conftest import setting


def f1(found, wrong):
    return 2 * (found & wrong).sum() / (found.sum() + wrong.sum())


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(y))
    x, y = x[order], y[order]
    given, wrong = corrupt(y[:600], 0.4, rng)
    return x[:600], given, wrong, x[600:700], y[600:700], x[700:], y[700:]


@pytest.fixture(scope="module")
def fitted(digits):
    x, given, _, x_checked, checked, _, _ = digits
    return LabelCleaner("kernel", random_state=0).fit(x, given, x_checked, checked)


@pytest.fixture(scope="module")
def blobs():
    x, y = make_blobs(160, centers=3, cluster_std=0.9, random_state=1)
    given, wrong = corrupt(y[:120], 0.2, np.random.default_rng(0))
    return x[:120], given, wrong, x[120:], y[120:]


def quick(**options):
    return LabelCleaner(
        **{"estimator": "kernel", "hyper_steps": 3, "steps": 10, "random_state": 0, **options}
    )


def test_wrong_digits_are_found_and_the_model_beats_training_on_all(digits, fitted):
    x, given, wrong, x_checked, checked, x_test, test = digits
    assert f1(fitted.suspects_, wrong) > 0.85
    assert wrong[fitted.ranking_[:150]].mean() > 0.95
    assert abs(fitted.noise_rate_ - 0.4) < 0.06
    missed = (wrong & ~fitted.suspects_).sum()
    assert missed / 2 < fitted.unflagged_ < 2 * missed
    accuracy = fitted.score(x_test, test)
    everything = np.ones(700, bool)
    features, model, _ = fitted._final
    z = features.transform(np.concatenate([x, x_checked]))
    labels = np.concatenate([given, checked])
    baseline = noise.train_plain(model, z, labels, everything, 10, 60, jax.random.key(0))
    scores = model.apply(baseline, jnp.asarray(features.transform(x_test)))
    assert accuracy > np.mean(np.argmax(scores, 1) == test) + 0.02
    right = fitted.suggested_[fitted.suspects_ & wrong]
    assert np.mean(right == load_digits().target[_order()][:600][fitted.suspects_ & wrong]) > 0.8


def _order():
    return np.random.default_rng(0).permutation(1797)


def test_attributes_belong_together(fitted):
    assert fitted.weights_.shape == (600,)
    assert ((fitted.weights_ >= 0) & (fitted.weights_ <= 1)).all()
    np.testing.assert_array_equal(fitted.suspects_, fitted.weights_ < 0.5)
    assert sorted(fitted.ranking_) == list(range(600))
    assert (np.diff(fitted.probability_wrong_[fitted.ranking_]) <= 0).all()
    np.testing.assert_allclose(fitted.probability_wrong_, 1 - fitted.weights_)
    np.testing.assert_allclose(fitted.noise_matrix_.sum(1), 1, rtol=1e-6)
    assert fitted.history_[0]["value"] > min(r["value"] for r in fitted.history_)
    probabilities = fitted.predict_proba(load_digits().data[:5])
    np.testing.assert_allclose(probabilities.sum(1), 1)


def test_the_same_seed_gives_the_same_weights(blobs):
    x, given, _, x_checked, checked = blobs
    weights = [quick().fit(x, given, x_checked, checked).weights_ for _ in range(2)]
    np.testing.assert_array_equal(*weights)


def test_labels_of_any_type_rows_of_any_kind(blobs):
    x, given, wrong, x_checked, checked = blobs
    names = np.array(["cat", "dog", "red fox"])
    plain = quick(hyper_steps=15, steps=20).fit(x, given, x_checked, checked)
    frames = quick(hyper_steps=15, steps=20).fit(
        pd.DataFrame(x, columns=["a", "b"]),
        pd.Series(names[given]),
        pd.DataFrame(x_checked, columns=["a", "b"]),
        pd.Series(names[checked]),
    )
    assert list(frames.feature_names_in_) == ["a", "b"]
    assert set(frames.predict(pd.DataFrame(x, columns=["a", "b"]))) <= set(names)
    np.testing.assert_allclose(frames.weights_, plain.weights_, atol=1e-6)
    assert f1(plain.suspects_, wrong) > 0.8
    scattered = quick(hyper_steps=15, steps=20).fit(
        sparse.csr_array(x), given, sparse.csr_matrix(x_checked), checked
    )
    assert f1(scattered.suspects_, wrong) > 0.6
    assert scattered.predict(sparse.csr_array(x)).shape == (120,)


def test_rare_classes_are_not_swept_away():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(0, 1, (400, 3)), rng.normal(3.5, 1, (30, 3))])
    y = np.repeat([0, 1], [400, 30])
    order = rng.permutation(430)
    x, y = x[order], y[order]
    given = y.copy()
    wrong = rng.random(430) < 0.1
    given[wrong] = 1 - given[wrong]
    cleaner = LabelCleaner("kernel", random_state=0).fit(x[:350], given[:350], x[350:], y[350:])
    rare_and_right = (y[:350] == 1) & ~wrong[:350]
    assert cleaner.suspects_[rare_and_right].mean() < 0.2
    assert f1(cleaner.suspects_, wrong[:350]) > 0.7


def own_init(key, width, classes):
    return {"w": 0.01 * jax.random.normal(key, (width, classes))}


def own_apply(params, x):
    return x @ params["w"]


@pytest.mark.parametrize(
    "model", ["softmax", "mlp", (own_init, own_apply)], ids=["softmax", "mlp", "own"]
)
def test_other_models(blobs, model):
    x, given, wrong, x_checked, checked = blobs
    cleaner = quick(estimator=model, hyper_steps=10, steps=40).fit(x, given, x_checked, checked)
    assert f1(cleaner.suspects_, wrong) > 0.5
    assert cleaner.predict(x).shape == (120,)


def test_without_checked_examples_it_goes_by_the_given_ones():
    data = load_breast_cancer()
    given, wrong = corrupt(data.target, 0.15, np.random.default_rng(0))
    cleaner = LabelCleaner("kernel", random_state=0).fit(data.data, given)
    assert f1(cleaner.suspects_, wrong) > 0.7


def test_forward_mode_gives_the_same(blobs):
    x, given, _, x_checked, checked = blobs
    reverse = quick(estimator="softmax").fit(x, given, x_checked, checked)
    forward = quick(estimator="softmax", engine=ft.Forward()).fit(x, given, x_checked, checked)
    np.testing.assert_allclose(forward.weights_, reverse.weights_, atol=2e-4)


def test_its_hypergradient_is_right(blobs):
    x, given, _, x_checked, checked = blobs
    rows = np.concatenate([x, x_checked])
    _, z, _ = prepared("kernel", rows, 0)
    with jax.enable_x64(True):
        fold = np.concatenate([np.arange(120) % 2, np.arange(40) % 2])
        train = (fold[None] != np.arange(2)[:, None]).astype(float)
        arrays = (z.astype(float), given, checked, train)
        _, _, model = prepared("kernel", rows, 0)
        data = noise.Data(*(jnp.asarray(a) for a in arrays))
        problem = noise.noise_problem(model, data, 3, 5, jax.random.key(0))
        hparams = {"noise": 2.0 * jnp.eye(3), "l2": jnp.log(jnp.array([1e-3, 1e-2]))}
        assert ft.check_hypergradient(problem, hparams)


def test_regularisers_of_some_rows_serve_all(blobs):
    x, given, _, x_checked, checked = blobs
    rows = np.concatenate([x, x_checked])
    _, z, model = prepared("softmax", rows, 0)
    train = (np.arange(160) % 2 != np.arange(2)[:, None]).astype(np.float32)
    weight = jnp.linspace(0.5, 1.5, 160)
    data = noise.Data(*map(jnp.asarray, (z, given, checked, train)), weight=weight)
    some = data.sample(60, np.random.default_rng(0))
    assert data.sample(120, np.random.default_rng(0)) is data
    assert (some.z.shape[0], len(some.observed), some.train.shape) == (100, 60, (2, 100))
    np.testing.assert_array_equal(some.z[60:], data.z[120:])  # the checked rows, all of them
    np.testing.assert_array_equal(some.weight[60:], weight[120:])
    descent, key = noise.Descent(10, 2, None, ()), jax.random.key(0)
    tuned = noise.tune(model, data, 3, descent, key, tuned_on=some)
    assert tuned.probabilities.shape == (160, 3)
    # a regulariser beside the mean over 160 rows is that over 100 in proportion
    alone = noise.tune(model, some, 3, descent, key)
    np.testing.assert_allclose(tuned.l2, alone.l2 * 100 / 160, rtol=1e-5)


def test_the_posterior():
    probabilities = np.array([[0.9, 0.1], [0.5, 0.5]])
    matrix = np.array([[0.8, 0.2], [0.4, 0.6]])
    posterior = noise.true_label(probabilities, matrix, np.array([1, 0]))
    np.testing.assert_allclose(posterior[0], [0.18 / 0.24, 0.06 / 0.24])
    np.testing.assert_allclose(posterior[1], [0.4 / 0.6, 0.2 / 0.6])


def test_scales():
    pixels = np.random.default_rng(0).integers(0, 256, (50, 10)).astype(float)
    assert np.isscalar(ColumnScale().fit(pixels).divisor)
    mixed = pixels * np.logspace(0, 5, 10)
    scaled = ColumnScale().fit(mixed)
    assert np.shape(scaled.divisor) == (10,)
    assert (scaled.transform(mixed) ** 2).sum(1).mean() == pytest.approx(1)
    constant = np.ones((5, 3))
    assert np.isfinite(Features(True, 0).fit(constant).transform(constant)).all()


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
        ({}, {"estimator": "tree"}, "estimator='tree': give 'ensemble', 'pool', 'kernel'"),
        ({}, {"estimator": (np.sum,)}, "give two functions"),
        ({}, {"steps": 0}, "'steps' parameter"),
        ({}, {"folds": 1}, "'folds' parameter"),
    ],
)
def test_bad_input(changes, options, message):
    arguments = [changes.get(i, good) for i, good in enumerate(GOOD)]
    with pytest.raises(ValueError, match=message):
        LabelCleaner(**{"estimator": "softmax", **options}).fit(*arguments)


@pytest.mark.parametrize("kind", [int, bool, str])
def test_labels_as_objects(blobs, kind):
    x, given, _, x_checked, checked = blobs
    labels, checks = ((y > 0).astype(kind) for y in (given, checked))
    plain = quick().fit(x, labels, x_checked, checks)
    objects = quick().fit(x, labels.astype(object), x_checked, checks.astype(object))
    np.testing.assert_array_equal(objects.classes_, plain.classes_)
    np.testing.assert_array_equal(objects.weights_, plain.weights_)
    holes = labels.astype(object)
    holes[5] = None
    with pytest.raises(ValueError, match="y has 1 rows without a label, the first is row 5"):
        quick().fit(x, holes)


@pytest.mark.parametrize("estimator", ["softmax", GaussianNB()], ids=["softmax", "classifier"])
def test_rows_of_X_that_were_verified(blobs, estimator):
    x, given, wrong, x_checked, checked = blobs
    true = make_blobs(160, centers=3, cluster_std=0.9, random_state=1)[1]
    rows = np.arange(0, 120, 4)
    cleaner = quick(estimator=estimator, progress=False)
    cleaner.fit(x, given, x_checked, checked, checked=rows, checked_labels=true[rows])
    assert cleaner.weights_.shape == (120,)
    np.testing.assert_array_equal(cleaner.suspects_[rows], wrong[rows])
    np.testing.assert_array_equal(cleaner.suggested_[rows], true[rows])
    others = np.setdiff1d(np.arange(120), rows)
    apart = quick(estimator=estimator, progress=False).fit(
        x[others], given[others], np.r_[x[rows], x_checked], np.r_[true[rows], checked]
    )
    if estimator == "softmax":  # which does not use the observed labels of trusted rows
        np.testing.assert_allclose(cleaner.weights_[others], apart.weights_, atol=1e-6)
    with pytest.raises(ValueError, match="checked and checked_labels together"):
        quick().fit(x, given, checked=rows)


def test_a_class_without_checked_examples_is_noted(blobs):
    x, given, _, x_checked, checked = blobs
    some = checked < 2
    with pytest.warns(UserWarning, match="no trusted example of 2"):
        quick().fit(x, given, x_checked[some], checked[some])


def test_prediction_before_fitting():
    with pytest.raises(NotFittedError):
        LabelCleaner().predict(np.ones((2, 2)))


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(
    [LabelCleaner("kernel", hyper_steps=2, steps=15, random_state=0)],
    expected_failed_checks=lambda estimator: {
        f"check_sample_weight_equivalence_on_{kind}_data": "folds are of rows, repeated or not"
        for kind in ("dense", "sparse")
    },
)
def test_scikit_learn_conventions(estimator, check):
    with setting(jax_disable_most_optimizations=True):  # many shapes, each compiled
        check(estimator)

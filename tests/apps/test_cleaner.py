"""LabelCleaner: it finds wrong labels, on any kind of input, and says what is wrong with others."""

import types
from datetime import date
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from sklearn.datasets import load_breast_cancer, load_digits, make_blobs
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.utils.estimator_checks import parametrize_with_checks

from experiments.cleaning.noise import corrupt
from foretune.apps import LabelCleaner, _ensemble, _label_cleaner
from foretune.apps._columns import Encoder


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
    """An ensemble of small forests and without boosted trees, which is trained at once."""
    monkeypatch.setattr(_ensemble, "MOST_CLASSES", 0)
    monkeypatch.setattr(_ensemble, "TREES", 20)
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
    assert fitted.unflagged_ is None  # the observed labels of trusted rows are not known
    everything = LogisticRegression(max_iter=1000)
    everything.fit(x[:700] / 16, np.concatenate([observed, y[600:700]]))
    assert fitted.score(x[700:], y[700:]) > everything.score(x[700:] / 16, y[700:]) + 0.02
    assert np.mean((fitted.suggested_ == y[:600])[fitted.suspects_ & wrong]) > 0.8


@pytest.mark.second_tier
def test_attributes_belong_together(digits, fitted):
    assert fitted.weights_.shape == (600,)
    assert ((fitted.weights_ >= 0) & (fitted.weights_ <= 1)).all()
    assert fitted.weights_[fitted.suspects_].max() <= fitted.weights_[~fitted.suspects_].max()
    assert sorted(fitted.ranking_) == list(range(600))
    assert (np.diff(fitted.suspects_[fitted.ranking_].astype(int)) <= 0).all()
    np.testing.assert_allclose(fitted.probability_wrong_, 1 - fitted.weights_)
    np.testing.assert_allclose(fitted.noise_matrix_.sum(1), 1, rtol=1e-6)
    assert set(fitted.ensemble_) == {*("logistic", "forest", "smooth forest", "kernel", "boosting")}
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


def test_columns_of_comparable_range_share_one_scale():
    pixels = np.random.default_rng(0).integers(0, 256, (50, 10)).astype(float)
    assert np.ptp(Encoder().fit(pixels).wide.scale_) == 0
    mixed = Encoder().fit(pixels * np.logspace(0, 5, 10)).transform(pixels * np.logspace(0, 5, 10))
    np.testing.assert_allclose(mixed.wide.std(axis=0), 1)


def test_the_kernels_predictions_without_a_row_are_those_of_a_fit_without_it():
    x, y = make_blobs(40, centers=3, cluster_std=2.0, random_state=0)
    kernel = _ensemble.Kernel()
    kernel.fit(x, y)
    Z, Y = kernel._features(x), np.eye(3)[y]
    errors = []
    for ridge in _ensemble.RIDGES:
        unseen = []
        for i in range(40):
            rest = np.arange(40) != i
            gram = Z[rest].T @ Z[rest] + ridge * np.eye(Z.shape[1])
            unseen.append(Z[i] @ np.linalg.solve(gram, Z[rest].T @ Y[rest]))
        errors.append((np.sum((Y - unseen) ** 2), np.array(unseen)))
    best = np.clip(min(errors, key=lambda pair: pair[0])[1], 1e-3, 1)
    np.testing.assert_allclose(kernel.unseen_, best / best.sum(1, keepdims=True), rtol=1e-4)


def test_counts_are_not_centred_however_they_are_given():
    counts = (np.random.default_rng(0).random((50, 200)) < 0.05).astype(float)
    dense, scattered = (Encoder().fit(X).transform(X) for X in (counts, sparse.csr_matrix(counts)))
    assert sparse.issparse(dense.wide)
    assert (dense.wide != scattered.wide).nnz == 0
    np.testing.assert_allclose(dense.narrow, scattered.narrow, atol=1e-9)
    pixels = counts[:, :20]
    views = [Encoder().fit(X).transform(X) for X in (pixels, sparse.csr_matrix(pixels))]
    np.testing.assert_array_equal(views[0].wide, views[1].wide)


def test_columns_that_matter_come_first(small):
    rng = np.random.default_rng(0)
    y = np.arange(120) % 2
    kinds = np.where(y == 1, "yes", "no")
    frame = pd.DataFrame({"noise": rng.normal(size=120), "kind": kinds, "more": rng.random(120)})
    assert small().fit(frame, y).columns_by_importance()[0] == "kind"
    numbers = pd.DataFrame({"noise": rng.normal(size=120), "level": y + rng.normal(0, 0.1, 120)})
    assert small().fit(numbers, y).columns_by_importance() == ["level", "noise"]
    assert quick().fit(numbers, y).columns_by_importance() == []


GOOD = (np.arange(40.0).reshape(20, 2), np.arange(20) % 2, np.ones((4, 2)), np.array([0, 1, 0, 1]))


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({3: np.array([0, 1, 0, 7])}, {}, "labels that y does not have: 7; y has 0, 1"),
        ({0: np.full((20, 2), np.nan)}, {}, r"contains NaN.*pandas\.DataFrame"),
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


@pytest.mark.parametrize("kind", [int, bool, str, Decimal, lambda y: date(2020, 1, 1 + y)])
def test_labels_as_objects(blobs, kind):
    x, observed, _, trusted_x, trusted = blobs
    labels, checks = (
        np.array([*map(kind, (y > 0).astype(int).tolist())]) for y in (observed, trusted)
    )
    plain = quick().fit(x, labels, trusted_x, checks)
    objects = quick().fit(x, labels.astype(object), trusted_x, checks.astype(object))
    np.testing.assert_array_equal(objects.classes_, plain.classes_)
    np.testing.assert_array_equal(objects.weights_, plain.weights_)
    holes = labels.astype(object)
    holes[5] = None
    with pytest.raises(ValueError, match="y has 1 rows without a label, the first is row 5"):
        quick().fit(x, holes)


def test_labels_of_rows_find_the_verified_ones(blobs):
    X, y = blobs[0][:80], np.asarray(blobs[1])[:80]
    order = np.random.default_rng(0).permutation(80)
    frame = pd.DataFrame(X[order], index=order)
    fit = LabelCleaner(GaussianNB(), random_state=0).fit
    by_label = fit(frame, y[order], checked=frame.index[:10], checked_labels=y[order[:10]])
    by_number = fit(frame, y[order], checked=np.arange(10), checked_labels=y[order[:10]])
    np.testing.assert_array_equal(by_label.weights_, by_number.weights_)
    with pytest.raises(ValueError, match="has the row 99, which is not in the index of X"):
        fit(frame, y, checked=pd.Index([99]), checked_labels=y[:1])
    frame.index = [0] * 80
    with pytest.raises(ValueError, match="has a row twice: give checked as row numbers"):
        fit(frame, y, checked=pd.Index([0]), checked_labels=y[:1])


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


@pytest.mark.parametrize("at", ["judge", "Ensemble"])
def test_an_interrupted_fit_leaves_the_one_before(blobs, monkeypatch, at):
    x, observed, *_ = blobs
    cleaner = quick().fit(x, observed)
    before = {name: id(value) for name, value in vars(cleaner).items()}

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(_label_cleaner, at, interrupted)
    with pytest.raises(KeyboardInterrupt):
        cleaner.fit(x[:60], np.array(["a", "b"])[np.minimum(observed[:60], 1)])
    assert {name: id(value) for name, value in vars(cleaner).items()} == before


@pytest.mark.filterwarnings("ignore:left out")
def test_a_column_that_is_left_out_changes_nothing(blobs, small):
    x, observed, *_ = blobs
    frame = pd.DataFrame(x, columns=["a", "b"]).assign(kind=np.where(x[:, 0] > 0, "u", "v"))
    named = frame.assign(name=[f"n{i}" for i in np.random.default_rng(0).permutation(len(x))])
    plain, other = (small().fit(rows, observed).weights_ for rows in (frame, named))
    np.testing.assert_array_equal(plain, other)


def test_prediction_before_fitting():
    with pytest.raises(NotFittedError):
        LabelCleaner().predict(np.ones((2, 2)))


def test_no_class_is_lost_by_its_suspects():
    x = np.arange(30.0).reshape(10, 3)  # labels that nothing explains
    cleaner = quick(estimator=LogisticRegression()).fit(x, np.r_[np.zeros(8, int), 1, 1])
    assert cleaner.predict_proba(x).shape == (10, 2)


@pytest.mark.second_tier
@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks([LabelCleaner(LogisticRegression(), random_state=0, progress=False)])
def test_scikit_learn_conventions(estimator, check):
    check(estimator)


def test_classes_of_few_rows():
    """Boosted trees leave rare classes out, but not where all are rare."""
    x, y = np.arange(12.0)[:, None], np.arange(12) % 3
    rows = types.SimpleNamespace(plain=x)
    training = _ensemble.Labelled(rows, y, y, 3, 0, True)
    member = _ensemble.Member(HistGradientBoostingClassifier(max_iter=1), "plain")
    assert list(training.trained(member, np.arange(12)).classes_) == [0, 1, 2]

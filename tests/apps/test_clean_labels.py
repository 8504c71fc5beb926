"""Cleaning from predictions, by any classifier, and of tables as people have them."""

import pickle

import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from sklearn.datasets import load_wine, make_blobs
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from foretune.apps import LabelCleaner, _ensemble, _label_model, clean_labels
from foretune.apps._columns import Encoder, columns_by_kind, is_mixed


def predictions(n=400, classes=3, wrong=0.2, seed=0, bias=0.0):
    """Return labels of which some are wrong, predictions, and the true labels.

    `bias` makes the predictions prefer class 0.
    """
    rng = np.random.default_rng(seed)
    true = rng.integers(0, classes, n)
    scores = rng.normal(size=(n, classes)) + 2.5 * np.eye(classes)[true]
    scores[:, 0] += bias
    p = np.exp(scores)
    flipped = rng.random(n) < wrong
    given = np.where(flipped, (true + rng.integers(1, classes, n)) % classes, true)
    return given, p / p.sum(1, keepdims=True), true


def share_found(found, wrong, rows=slice(None)):
    """Return the share of wrong labels among the first, as many as there are."""
    order = np.argsort(-found.probability_wrong_[rows], kind="stable")
    return wrong[rows][order[: wrong[rows].sum()]].mean()


def test_predictions_alone():
    given, p, true = predictions()
    found = clean_labels(given, p)
    wrong = given != true
    assert share_found(found, wrong) > 0.6
    assert np.all(np.diff(found.suspects_[found.ranking_].astype(int)) <= 0)  # suspects come first
    assert np.all((found.suggested_ != given) == found.suspects_)
    low, high = found.noise_rate_interval_
    assert low <= found.noise_rate_ <= high
    assert abs(found.noise_rate_ - wrong.mean()) < 0.06
    assert found.unflagged_ is None  # nothing tells how many are missed
    assert found.unflagged_interval_ is None


@pytest.mark.parametrize("tied", [False, True])
def test_the_gradient_of_the_likelihood_is_right(monkeypatch, tied):
    given, p, true = predictions(60)
    log_q = np.log(np.stack([p, np.sqrt(p) / np.sqrt(p).sum(1, keepdims=True)]))
    known = np.where(np.arange(60) < 20, true, -1)
    observed = np.where(np.arange(60) >= 10, given, -1)
    losses = []

    def minimize(loss, start, **options):
        point = start + np.random.default_rng(0).normal(0, 0.3, start.shape)
        gradient = loss(point)[1]
        for i in range(len(point)):
            step = 1e-5 * np.eye(len(point))[i]
            difference = (loss(point + step)[0] - loss(point - step)[0]) / 2e-5
            losses.append((gradient[i], difference))
        return type("Result", (), {"x": start})

    monkeypatch.setattr(_label_model, "minimize", minimize)
    _label_model.fit(log_q, observed, known, 0.5, tied)
    np.testing.assert_allclose(*np.transpose(losses), rtol=1e-4, atol=1e-4)


def test_suspects_make_the_expected_f1_greatest():
    right = np.array([0.1, 0.95, 0.3, 0.6, 0.99, 0.97])
    y, plain = np.zeros(6, int), np.array([1, 0, 1, 1, 0, 0])

    def expected(m):
        doubt = np.sort(1 - right)[::-1]
        return 2 * doubt[:m].sum() / (m + doubt.sum())

    found = _label_model.most_suspicious(right, y, plain)
    assert len(found) == 1 + np.argmax([expected(m) for m in range(1, 7)]) == 3
    np.testing.assert_array_equal(found, [0, 2, 3])
    fewer = _label_model.most_suspicious(right, y, np.where(np.arange(6) == 3, 1, 0))
    np.testing.assert_array_equal(fewer, [0])  # no more than the models disagree with
    assert not len(_label_model.most_suspicious(np.ones(3), y[:3], plain[:3]))


@pytest.mark.second_tier
def test_checked_rows_correct_predictions_that_lean_to_a_class():
    given, p, true = predictions(n=1500, bias=2.0)
    wrong, rows = given != true, np.arange(200)
    rest = slice(200, None)
    alone = clean_labels(given, p)
    helped = clean_labels(given, p, rows, true[rows])
    assert share_found(helped, wrong, rest) > 0.9
    assert share_found(alone, wrong, rest) > 0.9
    assert np.all(helped.suspects_[rows] == wrong[rows])  # what is checked is known
    assert np.all(helped.suggested_[rows] == true[rows])
    bins = np.mean(helped.probability_wrong_[rest]) - np.mean(wrong[rest])
    assert abs(bins) < 0.1
    assert helped.reliability_.shape == (200, 2)


@pytest.mark.second_tier
def test_intervals_have_the_probability_that_they_say():
    rows, within = np.arange(200), []
    for seed in range(10):
        given, p, true = predictions(n=1500, bias=2.0, seed=seed)
        wrong, found = given != true, clean_labels(given, p, rows, true[rows])
        missed, (low, high) = (wrong & ~found.suspects_)[200:].sum(), found.unflagged_interval_
        within.append(low <= missed <= high)
        low, high = found.noise_rate_interval_
        within.append(low <= wrong.mean() <= high)
    assert np.mean(within) >= 0.85  # of intervals of 95 %, 20


def unsure(kind, n=1500, seed=0):
    """Return labels, predictions and what is wrong: labels go wrong by chance, class or instance."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(0, 2, (n, 5))
    p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    true = (p.cumsum(1) > rng.random((n, 1))).argmax(1)
    other = np.where(np.eye(5)[true] > 0, 0, p)
    if kind == "instance":
        odds = other.max(1) + 1e-6
        flipped = rng.choice(n, n // 5, replace=False, p=odds / odds.sum())
    else:
        flipped = np.flatnonzero(rng.random(n) < 0.2)
    to = {
        "instance": other.argmax(1),
        "class": (true + 1) % 5,
        "chance": (true + rng.integers(1, 5, n)) % 5,
    }
    given = true.copy()
    given[flipped] = to[kind][flipped]
    return given, p, given != true


@pytest.mark.parametrize("kind", ["chance", "class", "instance"])
def test_the_kind_of_noise_is_told_from_the_labels(kind):
    """The ranking is about as good as the one which knows the kind, and best rules differ."""
    found, ideal = [], []
    for seed in range(3):
        given, p, wrong = unsure(kind, seed=seed)
        found.append(average_precision_score(wrong, clean_labels(given, p).probability_wrong_))
        row, K = np.arange(len(given)), 5
        own, rest = p[row, given], np.where(np.eye(K)[given] > 0, 0, p)
        rank = {
            "chance": 1 - own,
            "class": p[row, (given - 1) % K] / np.maximum(own, 1e-9),
            "instance": rest.max(1) - own,
        }
        ideal.append([average_precision_score(wrong, score) for score in rank.values()])
    best = dict(zip(rank, np.mean(ideal, axis=0), strict=True))
    assert max(best, key=lambda k: best[k]) == kind, best
    assert np.mean(found) > best[kind] - 0.05


def test_an_interrupt_ends_it_at_once(monkeypatch):
    given, p, _ = predictions(60)

    def interrupted(*_, **options):
        raise KeyboardInterrupt

    expected = clean_labels(given, p).weights_
    with monkeypatch.context() as patch:
        patch.setattr(_label_model, "minimize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            clean_labels(given, p)
    np.testing.assert_array_equal(clean_labels(given, p).weights_, expected)


@pytest.mark.second_tier
def test_few_checked_rows_do_no_harm():
    given, p, true = predictions(n=600)
    wrong = given != true
    for count in (3, 12):  # too few to tune a regulariser on
        rows = np.zeros(600, bool)
        rows[:count] = True
        helped = clean_labels(given, p, rows, true[rows])
        alone = share_found(clean_labels(given, p), wrong, ~rows)
        assert share_found(helped, wrong, ~rows) > alone - 0.03


def test_a_class_that_no_classifier_could_be_trained_on():
    x = np.random.default_rng(0).normal(size=(20, 2))
    given = np.array(["yes"] * 19 + ["no"])
    with pytest.raises(ValueError, match=r"of each of two classes, not {'no': 1, 'yes': 19}"):
        LabelCleaner(progress=False).fit(x, given)


def test_a_singleton_class_is_not_judged_and_changes_little():
    given, p, _ = predictions()
    without = clean_labels(given, p)
    names = given.copy()
    names[0] = 3
    more = np.column_stack([0.999 * p, np.full(400, 0.001)])
    found = clean_labels(names, more)
    assert not found.suspects_[0]
    assert 0.5 < found.weights_[0] < 1
    assert np.mean(found.suspects_[1:] != without.suspects_[1:]) < 0.02


def test_several_predictions_are_pooled_and_noise_is_left_out():
    given, p, _ = predictions()
    q = np.random.default_rng(1).dirichlet(np.ones(3), 400)
    found = clean_labels(given, {"good": p, "none": q})
    assert found.ensemble_["pred_probs['good']"] > 5 * found.ensemble_["pred_probs['none']"]


def test_of_few_rows_the_pool_stays_nearer_to_an_equal_one():
    ratio = {}
    for n in (20, 2000):
        given, p, _ = predictions(n=n)
        none = np.random.default_rng(1).dirichlet(np.ones(3), n)
        good, bad = clean_labels(given, [p, none]).ensemble_.values()
        ratio[n] = good / bad
    assert ratio[20] < 7 < 15 < ratio[2000]


def test_labels_of_any_type_and_classes_without_labels():
    given, p, _ = predictions()
    names = np.array(["a", "b", "ç"])
    by_name = clean_labels(names[given], p)
    np.testing.assert_array_equal(by_name.weights_, clean_labels(given, p).weights_)
    assert set(by_name.suggested_) <= set(names)
    some = given < 2
    found = clean_labels(given[some], p[some], classes=[0, 1, 2])
    assert len(found.weights_) == some.sum()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda y, p: (y, p[:-1]),
            r"shape \(59, 3\): 60 labels of .* need shape \(60, 3\)",
        ),
        (
            lambda y, p: (y, p[:, :2] / p[:, :2].sum(1, keepdims=True)),
            r"shape \(60, 2\): 60 labels",
        ),
        (
            lambda y, p: (y, p * np.where(np.arange(60) == 7, 0.5, 1)[:, None]),
            "row 7 with a sum",
        ),
        (lambda y, p: (y, np.log(p)), "logarithms"),
        (lambda y, p: (y, 5 * p - 1), "no probabilities.*softmax"),
        (lambda y, p: (y, np.where(np.arange(60)[:, None] == 3, np.nan, p)), "row 3"),
        (lambda y, p: (y, "words"), "must be numbers"),
        (lambda y, p: (y, {}), "empty"),
        (lambda y, p: (y, p, [0, 0], [1, 1]), "twice"),
        (lambda y, p: (y, p, [99], [1]), "99; there are 60"),
        (lambda y, p: (y, p, [1.5], [1]), "row numbers"),
        (lambda y, p: (y, p, [1], [9]), "checked_labels has labels that labels does not have: 9"),
        (lambda y, p: (y, p, [1], None), "together"),
        (lambda y, p: (y, p, [1, 2], [1]), "2 rows are checked"),
        (lambda y, p: (y, p, np.ones(9, bool), [1]), "mask of shape"),
        (lambda y, p: (y, p, np.arange(60), y), "every row is checked"),
        (lambda y, p: (np.zeros(60), p), "only one class"),
        (lambda y, p: ([None, *y[1:]], p), "without a label"),
    ],
)
def test_bad_predictions(change, message):
    given, p, _ = predictions(n=60)
    with pytest.raises(ValueError, match=message):
        clean_labels(*change(given, p))


def test_predictions_of_the_training_rows_themselves_are_noted():
    given, _, _ = predictions(n=60)
    with pytest.warns(UserWarning, match="out-of-fold"):
        clean_labels(given, 0.001 + 0.997 * np.eye(3)[given])
    with pytest.warns(UserWarning, match="out-of-fold"):  # as a forest's are: right, but not sure
        clean_labels(given, 0.1 + 0.7 * np.eye(3)[given])


def test_columns_by_name_and_missing_labels():
    given, p, _ = predictions()
    names = np.array(["a", "b", "c"])
    expected = clean_labels(given, p)
    swapped = pd.DataFrame(p, columns=names)[["c", "a", "b"]]
    found = clean_labels(names[given], swapped)
    np.testing.assert_array_equal(found.weights_, expected.weights_)
    numbered = clean_labels(given, pd.DataFrame(p))
    np.testing.assert_array_equal(numbered.weights_, expected.weights_)
    with pytest.raises(ValueError, match="give a column of that name for each class"):
        clean_labels(names[given], swapped.rename(columns={"a": "index"}))
    with pytest.raises(ValueError, match="1 rows without a label, the first is row 0"):
        clean_labels(np.where(np.arange(len(given)) == 0, np.nan, given), p)
    assert f"{expected.suspects_.sum()} of {len(given)} are suspects" in repr(expected)


@pytest.fixture(scope="module")
def customers():
    """Return a frame with words, dates, text, an identifier and gaps, and its labels."""
    rng = np.random.default_rng(0)
    n = 240
    size, red = rng.normal(size=n), rng.random(n) < 0.5
    true = np.where(size + red > 0.5, "stays", "goes")
    frame = pd.DataFrame(
        {
            "size": np.where(rng.random(n) < 0.1, np.nan, size),
            "colour": pd.Categorical(np.where(red, "red", "blå")),
            "since": pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 999, n), "D"),
            "id": [f"u{i}" for i in range(n)],
            "note": [
                f"a note of number {i % 97} on {'red' if r else 'blue'}" for i, r in enumerate(red)
            ],
        }
    )
    wrong = rng.random(n) < 0.2
    other = np.where(true == "stays", "goes", "stays")
    return frame, np.where(wrong, other, true), true, wrong


def test_columns_of_all_kinds(customers):
    frame, *_ = customers
    assert is_mixed(frame)
    assert not is_mixed(frame[["size"]].fillna(0))
    with pytest.warns(UserWarning, match="'id'.*identifier"):
        kinds = columns_by_kind(frame)
    assert kinds == {
        **{"numbers": ["size"], "dates": ["since"], "categories": ["colour"]},
        **{"text": ["note"], "identifiers": ["id"]},
    }
    with pytest.warns(UserWarning, match="'id'.*identifier"):
        encoder = Encoder().fit(frame)
    views = encoder.transform(frame)
    assert sparse.issparse(views.wide)  # of all words
    assert np.isfinite(views.wide.data).all()
    assert np.isfinite(views.narrow).all()
    new = encoder.transform(frame[:3].assign(colour="green", note=None, since=pd.NaT))
    assert np.isfinite(new.wide.data).all()  # what was not seen is nothing, not an error


@pytest.mark.second_tier
@pytest.mark.filterwarnings("ignore:left out")
def test_a_table_as_it_is(customers):
    frame, given, true, wrong = customers
    cleaner = LabelCleaner(random_state=0)
    cleaner.fit(frame[:200], given[:200], frame[200:], true[200:])
    assert set(cleaner.ensemble_) == {
        *("logistic", "forest", "smooth forest", "kernel", "boosting")
    }
    assert share_found(cleaner, wrong[:200]) > 0.7
    again = pickle.loads(pickle.dumps(cleaner))
    np.testing.assert_array_equal(again.predict(frame[:9]), cleaner.predict(frame[:9]))
    assert cleaner.score(frame, true) > 0.85


def test_any_classifier():
    X, y = make_blobs(150, centers=3, random_state=0, cluster_std=0.6)
    wrong = np.arange(150) < 30
    given = np.where(wrong, (y + 1) % 3, y)
    for estimator in (GaussianNB(), RandomForestClassifier(20, random_state=0)):
        cleaner = LabelCleaner(estimator=estimator, random_state=0)
        cleaner.fit(X, given)
        assert share_found(cleaner, wrong) > 0.7  # by chance 0.2
        np.testing.assert_allclose(cleaner.probabilities_.sum(1), 1, atol=1e-5)
        assert np.mean(cleaner.probabilities_.argmax(1) == y) > 0.8  # as given: 0.8
        assert cleaner.predict_proba(X).shape == (150, 3)
    words = [[("red", "green", "blue")[k]] for k in y]  # X as the classifier takes it
    model = make_pipeline(OneHotEncoder(), LogisticRegression())
    cleaner = LabelCleaner(estimator=model, random_state=0).fit(words, given)
    assert share_found(cleaner, wrong) > 0.9


@pytest.mark.second_tier
@pytest.mark.parametrize("seed", range(5))
def test_the_same_for_dense_sparse_single_precision_and_shuffled_rows(seed, monkeypatch):
    monkeypatch.setattr(_ensemble, "TREES", 50)
    x, true = load_wine(return_X_y=True)
    rng = np.random.default_rng(seed)
    given = np.where(rng.random(len(true)) < 0.2, (true + 1) % 3, true)
    order = rng.permutation(len(true))

    def suspects(x, y):
        return LabelCleaner(random_state=seed, progress=False).fit(x, y).suspects_

    plain = suspects(x, given)
    assert plain.any()
    for other in (sparse.csr_matrix(x), x.astype(np.float32), pd.DataFrame(x)):
        assert np.sum(suspects(other, given) != plain) <= 0.02 * plain.sum()
    shuffled = suspects(x[order], given[order])
    assert np.sum(shuffled != plain[order]) <= 0.02 * plain.sum()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "forest"}, "estimator='forest'.*'ensemble'"),
        ({"estimator": RandomForestClassifier}, "a scikit-learn classifier"),
    ],
)
def test_bad_estimators(options, message):
    with pytest.raises(ValueError, match=message):
        LabelCleaner(**options).fit(np.zeros((4, 2)), [0, 1, 0, 1])

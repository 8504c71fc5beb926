"""Cleaning from predictions, by any classifier, and of tables as people have them."""

import pickle
import warnings

import jax
import jax.numpy as jnp
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

import foretune as ft
from foretune.apps import LabelCleaner, _ensemble, clean_labels
from foretune.apps import _label_model as posterior
from foretune.apps._columns import column_encoder, is_mixed


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


def test_predictions_alone_rank_by_the_best_alternative():
    given, p, _ = predictions()
    found = clean_labels(given, p)
    mine = p[np.arange(400), given]
    other = np.where(np.arange(3) == given[:, None], 0, p).max(1)
    expected = mine / (mine + other)
    np.testing.assert_allclose(found.weights_, expected, atol=2e-3)
    assert np.all(found.suspects_ == (found.weights_ < 0.5))
    assert np.all(np.diff(found.weights_[found.ranking_]) >= 0)
    assert np.all(found.suggested_[found.suspects_] == p.argmax(1)[found.suspects_])
    assert found.noise_rate_ == pytest.approx(found.probability_wrong_.mean())
    assert 0 < found.unflagged_ < 400


@pytest.mark.second_tier
def test_checked_rows_correct_predictions_that_lean_to_a_class():
    given, p, true = predictions(n=1500, bias=2.0)
    wrong, rows = given != true, np.arange(200)
    rest = slice(200, None)
    alone = clean_labels(given, p, progress=False)
    helped = clean_labels(given, p, rows, true[rows], progress=False)
    assert share_found(helped, wrong, rest) > share_found(alone, wrong, rest) + 0.05
    assert np.all(helped.suspects_[rows] == wrong[rows])  # what is checked is known
    assert np.all(helped.suggested_[rows] == true[rows])
    bins = np.mean(helped.probability_wrong_[rest]) - np.mean(wrong[rest])
    assert abs(bins) < 0.1
    assert helped.stopped_ != "no descent"


@pytest.mark.second_tier
def test_few_checked_rows_do_no_harm():
    given, p, true = predictions(n=600)
    wrong = given != true
    for count in (3, 12):  # too few to tune a regulariser on
        rows = np.zeros(600, bool)
        rows[:count] = True
        helped = clean_labels(given, p, rows, true[rows], progress=False)
        alone = share_found(clean_labels(given, p), wrong, ~rows)
        assert share_found(helped, wrong, ~rows) > alone - 0.03


def test_given_labels_count_as_a_thousand_rows_beside_few_checked_ones():
    def rows(n, c):
        return c * np.exp(float(posterior.start_hparams(n, c)["observed"]))

    assert rows(3000, 50) == pytest.approx(1000)
    assert rows(3000, 500) == pytest.approx(1500)  # three times the checked ones
    assert rows(300, 50) == pytest.approx(300)  # no more than there are


@pytest.mark.parametrize("weighed", [False, True])
def test_a_class_that_no_classifier_could_be_trained_on(weighed):
    x = np.random.default_rng(0).normal(size=(20, 2))
    given = np.array(["yes"] * 10 + ["no"] * 10 if weighed else ["yes"] * 19 + ["no"])
    weight = (given == "yes").astype(float) if weighed else None
    rows = "{'no': 0, 'yes': 10}" if weighed else "{'no': 1, 'yes': 19}"
    with pytest.raises(ValueError, match=f"only 'yes' left.*{rows}"):
        LabelCleaner(estimator="ensemble", progress=False).fit(x, given, sample_weight=weight)


def test_a_second_look_counts_as_far_as_its_matrix_accounts_for_errors():
    given = np.array([0, 0, 1, 1])
    right = np.array([[0.9, 0.1, 0.8, 0.6], [0.3, 0.2, 0.9, 0.3]])
    likely = np.array([[0, 1, 1, 1], [2, 1, 1, 0]])
    p = np.full((2, 4, 3), 1 / 3) * np.array([1.0, 2.0])[:, None, None]
    rest = (np.eye(3), np.ones(2))
    first, second = (
        posterior.LabelJudgement(right[i], likely[i], p[i], *rest, share=0.1) for i in range(2)
    )
    for share, part in ((0.4, 0.0), (0.5, 0.25), (0.7, 0.75), (0.9, 1.0)):
        found = posterior.twice(first, second._replace(share=share), given)
        log_odds = np.log(right / (1 - right))
        expected = 1 / (1 + np.exp(-(1 - part) * log_odds[0] - part * log_odds[1]))
        np.testing.assert_allclose(found.right, expected, rtol=1e-12)
        np.testing.assert_array_equal(found.likely != given, expected < 0.5)
        np.testing.assert_array_equal(found.probabilities, p[0])
    sure = first._replace(right=np.array([0.0, 1.0, 0.5, 1.0]))
    assert np.isfinite(posterior.twice(sure, sure, given).right).all()


def test_rows_kept_for_a_second_look_have_each_class_outside_of_each_fold():
    labels = np.array([0] * 12 + [1] * 6 + [2] * 4)
    fold = np.arange(22) % 2
    trust = np.where(np.arange(22) % 3 == 0, 0.1, 0.9)
    trust[12:18] = [0.9, 0.1, 0.9, 0.1, 0.9, 0.1]  # all that would be kept are in one fold
    folds = _ensemble.Folds(np.zeros((22, 1)), labels, fold, None, 0, False, 3)
    keep = folds.with_whole_classes(folds.trusted_rows(trust))
    np.testing.assert_array_equal(keep[:12], trust[:12] >= 0.5)
    assert keep[12:18].all()
    for k in range(2):
        assert (np.bincount(labels[keep & (fold != k)], minlength=3) >= 2).all()


@pytest.mark.second_tier
@pytest.mark.parametrize("noise", ["symmetric", "asymmetric"])
def test_a_second_look_finds_more(noise):
    """Beside the order by the pool's own probabilities, which are of the first look."""
    x, true = load_wine(return_X_y=True)
    rng = np.random.default_rng(1)
    flip = rng.random(len(true)) < 0.3
    shift = rng.integers(1, 3, len(true)) if noise == "symmetric" else 1
    given = np.where(flip, (true + shift) % 3, true)
    found = LabelCleaner(estimator="ensemble", random_state=0, progress=False).fit(x, given)
    pooled = found.probabilities_[np.arange(len(true)), given]
    ours, alone = (average_precision_score(flip, c) for c in (found.probability_wrong_, 1 - pooled))
    assert ours > alone + 0.01
    assert (found.suggested_ != given)[found.suspects_].all()
    assert (found.suggested_ == given)[~found.suspects_].all()


def test_checked_rows_do_not_say_how_far_the_matrix_is_believed():
    """Their given labels are not known: the share of the noise is that of the fit without them."""
    given, p, true = predictions(300, wrong=0.3)
    other = predictions(300, wrong=0.3, bias=1.5)[1]
    q, unknown, nobody = np.stack([p, other]), np.full(50, -1), np.zeros(0, int)
    rest = slice(50, None)
    alone = posterior.judge(q[:, rest], given[rest], q[:, :0], nobody, nobody, seed=0)
    found = posterior.judge(q[:, rest], given[rest], q[:, :50], true[:50], unknown, seed=0)

    def weighed(share):
        return posterior.weighed(found.probabilities, found.noise, given[rest], share).right

    by_alone, by_found = (
        weighed(posterior.accounted(of.probabilities, of.noise, given[rest], np.ones(250)))
        for of in (alone, found)
    )
    np.testing.assert_allclose(found.right, by_alone, rtol=1e-6)
    assert np.abs(by_alone - by_found).max() > 1e-3


def test_several_predictions_are_pooled_and_noise_is_left_out():
    given, p, _ = predictions()
    q = np.random.default_rng(1).dirichlet(np.ones(3), 400)
    found = clean_labels(given, {"good": p, "none": q}, progress=False)
    assert found.ensemble_["pred_probs['good']"] > 5 * found.ensemble_["pred_probs['none']"]


def test_of_few_rows_the_pool_stays_nearer_to_an_equal_one():
    ratio = {}
    for n in (20, 2000):
        given, p, _ = predictions(n=n)
        none = np.random.default_rng(1).dirichlet(np.ones(3), n)
        good, bad = clean_labels(given, [p, none], progress=False).ensemble_.values()
        ratio[n] = good / bad
    assert ratio[20] < 5 < 15 < ratio[2000]


def test_rows_of_weight_0_teach_nothing():
    given, p, _ = predictions(n=300)
    q = np.stack([p, np.sqrt(p) / np.sqrt(p).sum(1, keepdims=True)])
    none, nobody = q[:, :0], np.zeros(0, int)
    alone = posterior.judge(q[:, :200], given[:200], none, nobody, nobody, seed=0)
    others = np.r_[given[:200], np.zeros(100, int)]  # a hundred more, all called class 0
    weight = np.r_[np.full(200, 2.0), np.zeros(100)]
    found = posterior.judge(q, others, none, nobody, nobody, seed=0, weight=weight)
    np.testing.assert_allclose(found.noise, alone.noise, atol=1e-4)
    np.testing.assert_allclose(found.right[:200], alone.right, atol=1e-4)
    counted = posterior.judge(q, others, none, nobody, nobody, seed=0)
    assert np.abs(counted.noise - alone.noise).max() > 0.02


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


def test_the_hypergradient_of_the_regularisers_is_right():
    given, p, true = predictions(n=40)
    logs = np.log(p)[None].astype(np.float32)
    train = (np.arange(12) % 3 != np.arange(3)[:, None]).astype(np.float32)
    weight = np.linspace(0.5, 1.5, 28, dtype=np.float32)
    parts = (logs[:, 12:], given[12:], weight, logs[:, :12], true[:12], given[:12], train)
    start = posterior.start_hparams(28, 12) | {"belief": jnp.asarray(0.3)}
    rows = posterior.LabelRows(*map(jnp.asarray, parts))
    problem = posterior.problem_of(start, rows, steps=5)
    hparams = jax.tree.map(lambda v: v + 0.5, start)
    ft.check_hypergradient(problem, hparams, verbose=False)


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
        encoder = column_encoder(frame)
    encoded = encoder.fit_transform(frame)
    assert np.all(np.isfinite(encoded))
    assert {name for name, *_ in encoder.transformers} == {
        *("numbers", "dates", "categories", "text of note")
    }
    new = frame[:3].assign(colour="green", note=None, since=pd.NaT)
    assert np.all(np.isfinite(encoder.transform(new)))  # what was not seen is nothing, not an error


@pytest.mark.second_tier
@pytest.mark.filterwarnings("ignore:left out")
def test_a_table_as_it_is(customers):
    frame, given, true, wrong = customers
    cleaner = LabelCleaner(random_state=0, progress=False)
    cleaner.fit(frame[:200], given[:200], frame[200:], true[200:])
    assert set(cleaner.ensemble_) == {"kernel", "logistic", "forest", "boosting"}
    assert share_found(cleaner, wrong[:200]) > 0.7
    again = pickle.loads(pickle.dumps(cleaner))
    np.testing.assert_array_equal(again.predict(frame[:9]), cleaner.predict(frame[:9]))
    assert cleaner.score(frame, true) > 0.85


def test_any_classifier():
    X, y = make_blobs(150, centers=3, random_state=0, cluster_std=0.6)
    wrong = np.arange(150) < 30
    given = np.where(wrong, (y + 1) % 3, y)
    for estimator in (GaussianNB(), RandomForestClassifier(20, random_state=0)):
        cleaner = LabelCleaner(estimator=estimator, random_state=0, progress=False)
        cleaner.fit(X, given)
        assert share_found(cleaner, wrong) > 0.7  # by chance 0.2
        np.testing.assert_allclose(cleaner.probabilities_.sum(1), 1, atol=1e-5)
        assert np.mean(cleaner.probabilities_.argmax(1) == y) > 0.8  # as given: 0.8
        assert cleaner.predict_proba(X).shape == (150, 3)
    words = [[("red", "green", "blue")[k]] for k in y]  # X as the classifier takes it
    model = make_pipeline(OneHotEncoder(), LogisticRegression())
    cleaner = LabelCleaner(estimator=model, random_state=0, progress=False).fit(words, given)
    assert share_found(cleaner, wrong) > 0.9


@pytest.mark.second_tier
def test_a_pool_takes_sparse_rows():
    X, y = make_blobs(90, centers=2, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cleaner = LabelCleaner(random_state=0, progress=False)
        cleaner.fit(sparse.csr_matrix(X), y)
    assert set(cleaner.ensemble_) == {"kernel", "logistic", "forest"}


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

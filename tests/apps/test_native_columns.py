"""Words of a data frame as boosted trees take them: categories."""

import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.ensemble import HistGradientBoostingClassifier

from foretune.apps import LabelCleaner, _ensemble
from foretune.apps._columns import column_encoder, native_columns


def words(n=300, columns=4, kinds=40, seed=0):
    """Return a table of words and a number with gaps, and labels of which a tenth is wrong."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, kinds, (n, columns))
    frame = pd.DataFrame({f"w{j}": [f"kind {k}" for k in codes[:, j]] for j in range(columns)})
    frame.insert(0, "size", np.where(rng.random(n) < 0.2, np.nan, rng.normal(size=n)))
    true = (codes[:, 0] % 2).astype(int)
    wrong = rng.random(n) < 0.1
    return frame, np.where(wrong, 1 - true, true)


def encoded(frame):
    """Return the encoder's array, and what makes native columns of it."""
    encoder = column_encoder(frame).fit(frame)
    rows, native = np.asarray(encoder.transform(frame), float), native_columns(encoder)
    assert native is not None
    return encoder, rows, native


def test_columns_of_all_kinds():
    n = 60
    when = pd.Series(pd.Timestamp("2020-01-01") + pd.to_timedelta(np.arange(n), "D"))
    when[3] = pd.NaT
    frame = pd.DataFrame(
        {
            "whole": np.arange(n),
            "colour": np.where(np.arange(n) % 2, "red", "blue"),
            "note": [f"note number {i} of {'red' if i % 2 else 'blue'} paint" for i in range(n)],
            "size": np.where(np.arange(n) < 20, np.nan, np.arange(n) / 7),
            "when": when,
            "town": [None, "Rome", "Oslo", ""] * 15,
            "nothing": pd.Series([None] * n, dtype=object),
        }
    )
    encoder, rows, native = encoded(frame)
    found = native.transform(rows)
    parts = [encoder.output_indices_[name] for name in ("numbers", "dates", "text of note")]
    same = np.concatenate([rows[:, part] for part in parts], axis=1)
    assert found.shape == (n, native.width) == (n, same.shape[1] + 2)
    np.testing.assert_array_equal(found[:, :-2], same)
    size = frame["size"]
    filled = np.stack([frame["whole"], size.fillna(size.median()), size.isna()], axis=1)
    np.testing.assert_array_equal(found[:, :3], filled)
    np.testing.assert_array_equal(found[:, 4], np.arange(n) == 3)
    assert native.categories == [native.width - 2, native.width - 1]
    np.testing.assert_array_equal(found[:, -2], np.arange(n) % 2)
    np.testing.assert_array_equal(found[:4, -1], [np.nan, 1, 0, np.nan])


def test_words_not_seen_are_gaps():
    frame, _ = words()
    encoder, _, native = encoded(frame)
    new = encoder.transform(frame[:3].assign(w1="never seen", w2=None, size=np.nan))
    found = native.transform(np.asarray(new, float))
    assert np.isnan(found[:, [3, 4]]).all()
    assert np.isfinite(found[:, [0, 1, 2, 5]]).all()
    np.testing.assert_array_equal(found[:, 0], frame["size"].median())
    np.testing.assert_array_equal(found[:, 1], 1)


def test_rows_without_words_are_as_they_were():
    assert native_columns(None) is None
    frame = pd.DataFrame({"a": [np.nan, *range(8)], "when": pd.date_range("2020", periods=9)})
    frame["nothing"] = pd.Series([None] * 9, dtype=object)
    assert native_columns(column_encoder(frame).fit(frame)) is None
    x, y = np.random.default_rng(0).normal(size=(80, 3)), np.arange(80) % 2
    assert isinstance(
        _ensemble.classifiers_of(x, y, 2, 0)["boosting"], HistGradientBoostingClassifier
    )


def test_many_kinds_of_words_leave_boosted_trees_in_the_pool():
    frame, y = words()
    _, rows, native = encoded(frame)
    assert rows.shape[1] > _ensemble.WIDE >= native.width == 6
    assert "boosting" not in _ensemble.classifiers_of(rows, y, 2, 0)
    members = _ensemble.classifiers_of(rows, y, 2, 0, native)
    assert members["boosting"][-1].categorical_features == [2, 3, 4, 5]
    many = pd.concat([frame.add_prefix(f"{i} ") for i in range(17)], axis=1)
    assert "boosting" not in _ensemble.classifiers_of(rows, y, 2, 0, encoded(many)[2])


def test_trees_get_codes_and_sample_weights(monkeypatch):
    frame, y = words(120)
    _, rows, native = encoded(frame)
    seen = []

    def fit(self, X, y, sample_weight=None):
        seen.append((X, sample_weight))
        self.classes_ = np.unique(y)
        return self

    monkeypatch.setattr(HistGradientBoostingClassifier, "fit", fit)
    trees = clone(_ensemble.classifiers_of(rows, y, 2, 0, native)["boosting"])
    weight = np.arange(120.0)
    folds = _ensemble.Folds(rows, y, np.zeros(120), weight, 0, False, 2)
    folds.trained(trees, np.arange(120), np.random.default_rng(0), None)
    rows, weight = rows[1:], weight[1:]  # without that of weight 0
    np.testing.assert_array_equal(seen[0][1], weight)
    np.testing.assert_array_equal(seen[0][0][:, :2], rows[:, :2])
    codes = [np.unique(frame[f"w{j}"], return_inverse=True)[1] for j in range(4)]
    np.testing.assert_array_equal(seen[0][0][:, 2:], np.stack(codes, axis=1)[1:])


def test_all_models_get_the_same_rows(monkeypatch):
    frame, y = words(120)
    monkeypatch.setattr(_ensemble, "TREES", 4)
    seen = {}

    def predictions(folds, name, *_):
        seen[name] = folds.rows
        return np.full((len(folds.labels), folds.classes), 1 / folds.classes)

    def kernel(folds, *_):
        return predictions(folds, "kernel")

    monkeypatch.setattr(_ensemble.Folds, "predictions", predictions)
    monkeypatch.setattr(_ensemble, "kernel_probabilities", kernel)
    LabelCleaner(random_state=0, progress=False).fit(frame, y)
    assert set(seen) == {"logistic", "forest", "boosting", "kernel"}
    expected = column_encoder(frame).fit_transform(frame)
    for rows in seen.values():
        np.testing.assert_array_equal(rows, expected)


@pytest.fixture
def small_pool(monkeypatch):
    """Leave the kernel model and most trees out: they are the same in all tables."""
    monkeypatch.setattr(_ensemble, "MOST_KERNEL", 0)
    monkeypatch.setattr(_ensemble, "TREES", 4)


@pytest.mark.second_tier
@pytest.mark.usefixtures("small_pool")
def test_a_table_of_words_is_cleaned():
    frame, y = words(120)
    frame["empty"] = np.nan
    weight = np.where(np.arange(120) < 10, 0.0, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cleaner = LabelCleaner(random_state=0, progress=False, folds=2)
        cleaner.fit(frame, y, sample_weight=weight)
    assert set(cleaner.ensemble_) == {"logistic", "forest", "boosting"}
    new = frame[:5].assign(w0="never seen", size=np.nan)
    again = pickle.loads(pickle.dumps(cleaner))
    np.testing.assert_array_equal(again.predict_proba(new), cleaner.predict_proba(new))
    assert np.isfinite(cleaner.predict_proba(new)).all()


def test_text_without_a_repeated_word_is_no_error():
    rows = [f"alpha{i} beta{i} gamma{i} delta{i}" for i in range(60)]
    frame = pd.DataFrame({"text": rows, "a": np.arange(60.0)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = column_encoder(frame).fit(frame).transform(frame)
    assert found.shape == (60, 2)
    np.testing.assert_array_equal(found[:, 1], 0)

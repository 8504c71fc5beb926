"""Columns of categories and text, as each kind of model takes them."""

import pickle
import warnings

import numpy as np
import pandas as pd
import pytest

from foretune.apps import LabelCleaner, _ensemble
from foretune.apps._columns import Encoder


def words(n=300, columns=4, kinds=40, seed=0):
    """Return a table of words, of which some are missing, and labels that follow from them."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, kinds, (n, columns))
    frame = pd.DataFrame({f"w{j}": [f"v{c}" for c in codes[:, j]] for j in range(columns)})
    frame["size"] = np.where(rng.random(n) < 0.1, np.nan, rng.normal(size=n))
    frame.loc[:4, "w0"] = None
    return frame, (codes[:, 0] < kinds // 2).astype(int)


def test_trees_get_codes_and_linear_models_indicators():
    frame, _ = words(100, columns=2, kinds=3)
    encoder = Encoder().fit(frame)
    views = encoder.transform(frame)
    assert list(encoder.categories) == [0, 1]
    assert views.narrow.shape == (100, 3)  # two codes and a number
    assert views.wide.shape == (100, 4 + 3 + 2)  # missing is a kind; the number, and where it lacks
    lowest = views.narrow[:, 2] == views.narrow[:, 2].min()
    np.testing.assert_array_equal(lowest, frame["size"].isna())  # below all others
    assert encoder.sources == {"w0": [0], "w1": [1], "size": [2]}
    new = encoder.transform(frame[:5].assign(w1="never seen"))
    np.testing.assert_array_equal(new.narrow[:, 1], -1)
    np.testing.assert_array_equal(new.wide[:, -3:], 0)


def test_boosted_trees_know_which_columns_are_codes():
    frame, y = words()
    members = dict(_ensemble.members_of(Encoder().fit(frame), 300, y, 0))
    assert members["boosting"].estimator.categorical_features == [0, 1, 2, 3]
    numbers = Encoder().fit(frame[["size"]].fillna(0.0))
    members = dict(_ensemble.members_of(numbers, 300, y, 0))
    assert members["boosting"].estimator.categorical_features is None


@pytest.mark.second_tier
def test_a_table_of_words_is_cleaned(monkeypatch):
    monkeypatch.setattr(_ensemble, "TREES", 10)
    frame, y = words(120)
    frame["empty"] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cleaner = LabelCleaner(random_state=0, progress=False, folds=2).fit(frame, y)
    new = frame[:5].assign(w0="never seen", size=np.nan)
    again = pickle.loads(pickle.dumps(cleaner))
    np.testing.assert_array_equal(again.predict_proba(new), cleaner.predict_proba(new))
    assert np.isfinite(cleaner.predict_proba(new)).all()


def test_columns_named_as_text_and_missing_whole_numbers():
    said = ["good cat", "bad dog"] * 10
    frame = pd.DataFrame({"said": said, "n": pd.array([1, None] * 10, "Int64")})
    assert Encoder().fit(frame).categories == range(1)
    views = Encoder(("said",)).fit(frame).transform(frame)
    assert views.wide.shape == (20, 4 + 2)  # each word; the number, and where it lacks
    with pytest.raises(ValueError, match="there is no column 'words', only 'said', 'n'"):
        LabelCleaner(text=["words"]).fit(frame, [0, 1] * 10)


def test_text_without_a_repeated_word_is_no_error():
    rows = [f"alpha{i} beta{i} gamma{i} delta{i}" for i in range(60)]
    frame = pd.DataFrame({"text": rows, "a": np.arange(60.0)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = Encoder().fit(frame).transform(frame)
    assert found.wide.shape == (60, 2)
    assert found.wide[:, 1].nnz == 0

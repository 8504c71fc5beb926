"""Arrays with a header, digests, and a folder that one run has for itself."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from foretune._files.arrays import Damaged, load_arrays, load_header, save_arrays
from foretune._files.digests import as_numbers, digest, is_digest, with_numbers
from foretune._files.files import RunError, locked, remove_unfinished

ARRAYS = {
    "scores": np.arange(6.0).reshape(2, 3),
    "rows": np.array([3, 4]),
    "none": np.zeros((0, 2)),
}
HEADER = {"what": "a test", "count": 2}


def test_arrays_and_header_come_back(tmp_path):
    path = tmp_path / "a.npz"
    save_arrays(path, ARRAYS, HEADER)
    header, arrays = load_arrays(path)
    assert header == HEADER == load_header(path)
    assert arrays.keys() == ARRAYS.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, ARRAYS[name])
    save_arrays(path, ARRAYS)
    assert load_arrays(path)[0] == {}
    with np.load(path) as plain:  # which others can read
        assert set(plain) == {*ARRAYS, "header"}


def test_damage_is_found_wherever_it_is(tmp_path):
    path = tmp_path / "a.npz"
    save_arrays(path, ARRAYS, HEADER)
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        try:
            header, arrays = load_arrays(path)
        except Damaged:
            continue
        assert header == HEADER  # a date, or the like
        assert all(np.array_equal(arrays[name], ARRAYS[name]) for name in ARRAYS)
    for content in (b"", whole[: len(whole) // 2], b"text"):
        path.write_bytes(content)
        with pytest.raises(Damaged, match=path.name):
            load_header(path)
    with pytest.raises(FileNotFoundError):
        load_arrays(tmp_path / "none.npz")
    with pytest.raises(IsADirectoryError):
        load_arrays(tmp_path)


def test_digests_tell_numbers_types_and_shapes_apart():
    trees = [
        np.zeros(3), np.zeros(3, np.float32), np.zeros((3, 1)), np.ones(3), jax.random.key(0),
        jax.random.key(1), (), "text", b"more",
    ]  # fmt: skip
    found = [digest(tree) for tree in trees]
    assert len(set(found)) == len(found)
    assert all(map(is_digest, found))
    assert digest({"a": np.zeros(3), "f": len}) == digest([np.zeros(3)])
    assert not is_digest("float32[3]")


def test_numbers_of_keys_and_half_precision_come_back():
    tree = {"key": jax.random.key(3), "x": jnp.arange(3, dtype=jnp.bfloat16), "f": len}
    found = with_numbers(tree, as_numbers(tree))
    assert found["f"] is len
    assert jax.random.key_data(found["key"]).tolist() == jax.random.key_data(tree["key"]).tolist()
    assert found["x"].dtype == jnp.bfloat16


def test_a_folder_is_for_one_run_unless_it_may_be_taken_again(tmp_path):
    message = f"in use by another run .process {os.getpid()}"
    with locked(tmp_path), pytest.raises(RunError, match=message), locked(tmp_path):
        pass
    again = locked(tmp_path, reentrant=True)
    with locked(tmp_path, reentrant=True), again, pytest.raises(RunError), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_only_our_unfinished_files_are_removed(tmp_path):
    names = [".a.txt.0123456789abcdef", ".b.txt.0123456789abcdef", ".a.txt.0123", "a.txt"]
    for name in names:
        (tmp_path / name).touch()
    remove_unfinished(tmp_path, lambda name: name == "a.txt")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])

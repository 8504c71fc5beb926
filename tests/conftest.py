import itertools

import jax
import pytest

_tests_run = itertools.count(1)


@pytest.fixture
def x64():
    """Double precision for the length of a test."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture(autouse=True)
def forget_compiled_programs():
    """Drop compiled programs now and then: each holds memory maps, of which a process has few."""
    yield
    if next(_tests_run) % 25 == 0:
        jax.clear_caches()

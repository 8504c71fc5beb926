import itertools
import os

import jax
import pytest

if jax.__version_info__ < (0, 11):
    # Compiles the tests' many small programs three times faster. XLA aborts at a flag that it does
    # not know, so it is given only to versions that were seen to know it.
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_cpu_use_fusion_emitters=false"
    )

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

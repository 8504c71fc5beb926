import itertools
import os
import shutil
import tempfile
from pathlib import Path

import jax
import pytest

if jax.__version_info__ < (0, 11):
    # Compiles the tests' many small programs three times faster. XLA aborts at a flag that it does
    # not know, so they are given only to versions that were seen to know them.
    os.environ["XLA_FLAGS"] = " ".join(
        [
            os.environ.get("XLA_FLAGS", ""),
            "--xla_cpu_use_fusion_emitters=false",
            "--xla_llvm_disable_expensive_passes=true",
        ]
    )

_tests_run = itertools.count(1)

# Programs compiled in this run of the suite, shared by its workers: a fifth of the time is saved.
_run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
PROGRAMS = Path(tempfile.gettempdir()) / f"foretune-tests-{_run}"
jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):  # the last process of the run
        shutil.rmtree(PROGRAMS, ignore_errors=True)


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

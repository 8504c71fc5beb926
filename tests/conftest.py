"""Tiers of tests, compiled programs that are kept between runs, and settings for groups of tests."""

import contextlib
import hashlib
import itertools
import math
import os
import platform
from pathlib import Path

import hypothesis
import jax
import jaxtyping
import pytest

ROOT = Path(__file__).parents[1]
CORE = (
    "problem", "constraints", "engines", "diagnostics", "outer", "files", "realtime", "attribution",
)  # fmt: skip
# The first tier: these folders, but for tests marked `second_tier`, and tests marked `first_tier`.
FIRST_TIER = (
    *(f"tests/{part}/" for part in (*CORE, "conformance")),
    *(f"src/foretune/_{part}/" for part in CORE),
    "tests/test_imports.py",
)
STRICT = FIRST_TIER[: len(CORE) + 1]
# Whose programs are compiled as users get them by `--tier all`. All others run for a moment.
OPTIMIZED = tuple(
    f"tests/{part}/" for part in ("engines", "realtime", "attribution", "files", "docs")
)

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

# Threads of scikit-learn's trees in several workers wait for one another, six times the work itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")

PROGRAMS, PROGRAMS_BYTES = ROOT / ".pytest_cache/programs", 2 * 2**30
_tests_run = itertools.count(1)


def pytest_addoption(parser):
    parser.addoption(
        "--tier",
        choices=["1", "all"],
        default="all",
        help="1: the core alone, no program optimized; all (default): every test",
    )
    parser.addoption(
        "--trials",
        choices=["sample", "all"],
        default="sample",
        help="tests/trials (kills, damaged files, full disks): a sample (default), or all of them",
    )


def pytest_configure(config):
    first = config.getoption("tier") == "1"
    if not first:  # types and shapes of arguments are looked at: a quarter of the time
        jaxtyping.install_import_hook("foretune", "beartype.beartype")
    hypothesis.settings.register_profile(
        "tier", max_examples=5 if first else 12, deadline=None, derandomize=True, database=None
    )
    hypothesis.settings.load_profile("tier")
    if not hasattr(config, "workerinput"):
        forget_old_programs()
    jax.config.update("jax_compilation_cache_dir", str(PROGRAMS / of_this_machine()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_collection_modifyitems(config, items):
    if config.getoption("tier") == "all":
        return
    tiers = {True: [], False: []}
    for item in items:
        tiers[in_first_tier(item)].append(item)
    config.hook.pytest_deselected(items=tiers[False])
    items[:] = tiers[True]


@pytest.hookimpl(tryfirst=True)  # before fixtures of a module, too
def pytest_runtest_setup(item):
    """Compile most programs with few optimizations: half the time."""
    optimized = item.config.getoption("tier") == "all" and is_under(item, OPTIMIZED)
    jax.config.update("jax_disable_most_optimizations", not optimized)


def in_first_tier(item):
    if item.get_closest_marker("second_tier"):
        return False
    return is_under(item, FIRST_TIER) or item.get_closest_marker("first_tier") is not None


def is_under(item, folders):
    return item.path.is_relative_to(ROOT) and item.path.relative_to(ROOT).as_posix().startswith(
        folders
    )


def of_this_machine():
    """Return a name for what compiled programs depend on, besides JAX's own key."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    cpu = sorted(
        {line for line in lines if line.lower().startswith(("flags", "features", "model"))}
    )
    parts = [jax.__version__, os.environ.get("XLA_FLAGS", ""), platform.machine(), *cpu]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def forget_old_programs():
    """Remove the programs that were made first where all of them take too much room."""
    files = [(path.stat(), path) for path in PROGRAMS.glob("*/*")]
    total = sum(stat.st_size for stat, _ in files)
    for stat, path in sorted(files, key=lambda file: file[0].st_mtime):
        if total <= PROGRAMS_BYTES:
            break
        path.unlink(missing_ok=True)
        total -= stat.st_size


@contextlib.contextmanager
def setting(**settings):
    """Change settings of JAX for a while, in all threads."""
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def x64():
    """Double precision for the length of a test."""
    with setting(jax_enable_x64=True):
        yield


@pytest.fixture(autouse=True)
def no_silent_promotion(request):
    """In the core neither types nor ranks of arrays are promoted, but for `promotes("reason")`."""
    strict = {"jax_numpy_dtype_promotion": "strict", "jax_numpy_rank_promotion": "raise"}
    if not is_under(request.node, STRICT) or request.node.get_closest_marker("promotes"):
        strict = {}
    with setting(**strict):
        yield


@pytest.fixture(autouse=True)
def forget_compiled_programs():
    """Drop compiled programs now and then: each holds memory maps, of which a process has 65,530."""
    yield
    if next(_tests_run) % 25 == 0 and memory_maps() > 20_000:
        jax.clear_caches()


def memory_maps():
    try:
        with open("/proc/self/maps", "rb") as maps:
            return sum(1 for _ in maps)
    except OSError:  # not Linux
        return math.inf

import jax
import pytest


@pytest.fixture
def x64():
    """Double precision for the length of a test."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)

"""What the tests of attributions share."""

import pytest

import foretune as ft

from .trainings import QUERIES, plain


@pytest.fixture(scope="session")
def found():
    """The scores of the plain problem, in single precision."""
    problem, hparams = plain()
    return ft.attribute(problem, hparams, QUERIES)

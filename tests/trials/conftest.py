"""What the trials share: how many are made, and the process that forks runs."""

import pytest

from ..conftest import PROGRAMS, of_this_machine
from .jobs import Server


@pytest.fixture
def chosen(request):
    """Return a function that takes some of a list of trials, evenly; all of them or `most` if asked."""

    def chosen(trials, few, most=None):
        count = few if request.config.getoption("trials") == "sample" else most or len(trials)
        count = min(count, len(trials))
        return [trials[(2 * i + 1) * len(trials) // (2 * count)] for i in range(count)]

    return chosen


@pytest.fixture
def enough(request):
    """Return a function that skips what is not in the sample, unless all are asked for."""

    def enough(in_the_sample):
        if not in_the_sample and request.config.getoption("trials") == "sample":
            pytest.skip("not in the sample: --trials all")

    return enough


@pytest.fixture(scope="session")
def server():
    server = Server(PROGRAMS / of_this_machine())
    yield server
    server.close()

"""Stopping rules: what they take."""

import jaxtyping
import numpy as np
import pytest

import foretune as ft


@pytest.fixture
def untyped():
    """Without run-time checks of annotations, which users do not have."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    "rule",
    [
        lambda wrong: ft.TimeLimit(wrong),
        lambda wrong: ft.NoImprovement(wrong),
    ],
)
@pytest.mark.parametrize("wrong", [float("nan"), -1])
def test_a_number_that_no_rule_can_use(rule, wrong):
    with pytest.raises(ValueError, match=r"(TimeLimit|NoImprovement)\(.*must"):
        rule(wrong)


@pytest.mark.usefixtures("untyped")
def test_numbers_that_rules_take():
    for number in (0, 0.5, np.float32(0.5), float("inf")):
        assert ft.TimeLimit(number).seconds == number
    assert ft.NoImprovement(np.int64(3)).patience == 3

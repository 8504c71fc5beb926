"""Stopping rules: what they take, and that each run is judged by its own history."""

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
        lambda wrong: ft.SmallGradient(wrong),
        lambda wrong: ft.NoImprovement(wrong),
        lambda wrong: ft.Vanished("lr", below=wrong),
        lambda wrong: ft.Vanished("lr", patience=wrong),
    ],
)
@pytest.mark.parametrize("wrong", [float("nan"), -1, "3", None, True, 1j])
def test_a_number_that_no_rule_can_use(rule, wrong):
    with pytest.raises(
        ValueError, match=r"(TimeLimit|SmallGradient|NoImprovement|Vanished)\(.*must"
    ):
        rule(wrong)


@pytest.mark.usefixtures("untyped")
def test_a_name_that_is_no_string():
    with pytest.raises(ValueError, match=r"Vanished\(name=3\)"):
        ft.Vanished(3)


@pytest.mark.usefixtures("untyped")
def test_numbers_that_rules_take():
    for number in (0, 0.5, np.float32(0.5), float("inf")):
        assert ft.TimeLimit(number).seconds == number
        assert ft.SmallGradient(number).norm == number
    assert ft.NoImprovement(np.int64(3)).patience == 3


class FakeRun:
    """A run of which the rule sees the records, one after the other."""

    def __init__(self, rates, resumed_after=0):
        self.records = [{"hparams": {"lr": rate}} for rate in rates]
        self.history = self.records[:resumed_after]

    def reasons(self, rule):
        found = []
        for record in self.records[len(self.history) :]:
            self.history.append(record)
            self.record = record
            found.append(rule(self))
        return found


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("resumed_after", [0, 1, 3])
def test_a_rule_that_has_served_in_a_run_before(resumed_after):
    rule = ft.Vanished("lr", below=0.1, patience=2)
    FakeRun([100.0, 0.0]).reasons(rule)  # its peak and its zeros are not the other run's
    rates = [1.0, 1.0, 0.5, 0.05, 0.05]
    reasons = FakeRun(rates, resumed_after).reasons(rule)
    assert reasons[:-1] == [None] * (4 - resumed_after)
    assert reasons[-1] == "lr has gone to 0"

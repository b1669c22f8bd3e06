"""Which faults an agent says again, to whom, and how old it says they are."""

from __future__ import annotations

import pytest

from _regroup_agent.faults import ANSWERED_S, MAX_ANSWERED, MAX_UNANSWERED, Faults
from regroup.protocol.wire import Fault

COLLECTIVE = Fault("collective", peer="pod-2")


def exited(number: int = 1) -> Fault:
    return Fault("exit", exit_code=-9, ended=number)


@pytest.mark.parametrize(
    ("fault", "answered", "anew", "after_s", "is_said"),
    [
        pytest.param(COLLECTIVE, False, False, 1.0, True, id="not answered: over the next connection for reports"),
        pytest.param(COLLECTIVE, False, True, 1.0, True, id="not answered: to the next operator"),
        pytest.param(COLLECTIVE, True, True, 1.0, False, id="answered: the condition says what has become of it"),
        pytest.param(exited(), False, False, 1.0, True, id="an exit that is not answered"),
        pytest.param(exited(), True, False, 1.0, False, id="answered: the same operator has heard of it"),
        pytest.param(exited(), True, True, 1.0, True, id="answered: the next operator may not have"),
        pytest.param(exited(), True, True, ANSWERED_S - 1, True, id="for ten minutes"),
        pytest.param(exited(), True, True, ANSWERED_S + 1, False, id="and no longer"),
        pytest.param(exited(), False, True, 9000.0, True, id="unless nobody has heard of it"),
    ],
)
def test_what_is_said_again(fault: Fault, answered: bool, anew: bool, after_s: float, is_said: bool) -> None:
    faults = Faults()
    kept = faults.add(fault, 100.0)
    if answered:
        faults.answered(kept, 100.0)
    again = faults.again(100.0 + after_s, anew=anew)
    assert [(one, said.ended, said.observed_ms) for one, said in again] == (
        [(kept, fault.ended, after_s * 1000)] if is_said else []
    )


def test_what_was_refused_is_not_said_again() -> None:
    """An operator that cannot use it would refuse it after each hello."""
    faults = Faults()
    first, second = faults.add(exited(1), 0.0), faults.add(exited(2), 0.0)
    for _ in range(2):
        faults.refused(first)
    assert [kept for kept, _ in faults.again(1.0, anew=True)] == [second]


def test_its_age_is_right_however_often_it_is_said() -> None:
    faults = Faults()
    faults.add(Fault("exit", exit_code=1, ended=1, observed_ms=250.0), 100.0)
    ages = [faults.again(now_s, anew=True)[0][1].observed_ms for now_s in (101.0, 102.0, 104.0)]
    assert ages == [1250.0, 2250.0, 4250.0]


def test_what_is_on_its_way_is_not_said_twice() -> None:
    faults = Faults()
    first, second = faults.add(exited(1), 0.0), faults.add(exited(2), 0.0)
    assert [kept for kept, _ in faults.again(1.0, anew=True, on_their_way={first})] == [second]


def test_oldest_comes_first_and_only_the_newest_are_kept() -> None:
    faults = Faults()
    for number in range(1, 301):
        faults.answered(faults.add(exited(number), 0.0), 0.0)
        faults.add(COLLECTIVE, 0.0)
    said = [fault.ended for _, fault in faults.again(1.0, anew=True)]
    assert [number for number in said if number] == list(range(301 - MAX_ANSWERED, 301))
    assert said.count(0) == MAX_UNANSWERED

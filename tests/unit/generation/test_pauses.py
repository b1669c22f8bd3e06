"""How long a process sleeps between two questions: what that adds to a wait, and what a long wait costs."""

from __future__ import annotations

from typing import Any

import pytest

from regroup.errors import Aborted, PeerLost
from regroup.generation.groups import FORGOTTEN_S
from regroup.generation.pauses import LONGEST_S, SHORTEST_S, pause_s
from regroup.parameter_server import links
from regroup.parameter_server.links import Pauses


@pytest.mark.parametrize(
    ("waited_s", "want_s"),
    [
        pytest.param(0.0, 0.00002, id="the first question comes again soon"),
        pytest.param(0.00128, 0.00002, id="the shortest pause"),
        pytest.param(0.02, 0.0003125, id="a step of 20 ms waits a 64th longer at most"),
        pytest.param(0.064, 0.001, id="the longest pause"),
        pytest.param(60.0, 0.001, id="a long wait asks a thousand times a second"),
    ],
)
def test_pause_follows_the_wait(waited_s: float, want_s: float) -> None:
    assert pause_s(waited_s) == pytest.approx(want_s)


def test_longest_pause_is_the_callers() -> None:
    assert pause_s(60.0, 0.002) == 0.002


def test_no_wait_gets_longer_by_more_than_a_64th() -> None:
    for ends_us in range(0, 100_000, 37):
        ends_s, now_s, num_asked = ends_us / 1e6, 0.0, 0
        while now_s < ends_s:
            now_s += pause_s(now_s)
            num_asked += 1
        assert now_s - ends_s <= max(ends_s / 64, SHORTEST_S) + 1e-12
        assert num_asked <= 64 * 6 + ends_s / LONGEST_S


class Clock:
    """In place of `time`: a sleep takes as long as it says."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.slept.append(duration_s)
        self.now_s += duration_s


class Groups:
    """What `Pauses` uses of the real ones."""

    waited_s = 0.0
    waits_since_s: float | None = None

    def __init__(self) -> None:
        self.sockets, self.is_lost, self.is_aborted = self, False, False

    def check(self) -> None:
        if self.is_aborted:
            raise Aborted("left")

    def lost(self) -> Any:
        return [] if self.is_lost else None

    def who_is_lost(self) -> int:
        return 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(links, "time", clock)
    return clock


def wait(pauses: Pauses, clock: Clock, duration_s: float) -> None:
    ends_s = clock.now_s + duration_s
    while clock.now_s < ends_s:
        pauses.pause(idle=True)


def test_pauses_begin_anew_with_what_comes_and_after_other_work(clock: Clock) -> None:
    groups = Groups()
    pauses = Pauses(groups)  # type: ignore[arg-type]
    wait(pauses, clock, 1.0)
    assert max(clock.slept) == 0.002
    for ends in (False, True):
        if ends:
            pauses.end()
        else:
            pauses.pause(idle=False)
        clock.now_s += 5.0
        pauses.pause(idle=True)
        assert clock.slept[-1] == SHORTEST_S
        wait(pauses, clock, 1.0)
    pauses.end()
    assert groups.waits_since_s is None
    assert groups.waited_s == pytest.approx(3.0, abs=0.02)


def test_wait_for_somebody_who_has_gone_ends(clock: Clock) -> None:
    groups = Groups()
    pauses = Pauses(groups)  # type: ignore[arg-type]
    wait(pauses, clock, 0.1)
    groups.is_lost = True
    began_s = clock.now_s
    with pytest.raises(PeerLost):
        wait(pauses, clock, 10.0)
    assert clock.now_s - began_s == pytest.approx(FORGOTTEN_S, abs=0.01)


def test_wait_ends_with_the_groups(clock: Clock) -> None:
    groups = Groups()
    pauses = Pauses(groups)  # type: ignore[arg-type]
    groups.is_aborted = True
    began_s = clock.now_s
    with pytest.raises(Aborted):
        wait(pauses, clock, 10.0)
    assert clock.now_s - began_s < 0.03

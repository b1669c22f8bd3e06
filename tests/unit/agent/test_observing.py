"""When an observer says that a member is silent: a table of attempts, their answers and the clock."""

from __future__ import annotations

import random

import pytest

from _regroup_agent import events as ev
from _regroup_agent.observing import EVERY_S, MANY, SELDOM_S, Watch
from regroup.protocol import codec, wire
from regroup.protocol.wire import SILENT_S, SUSPECT_S, Observed
from tests.unit.agent.drive import Drive

OTHER = Observed("uid-1", "10.0.0.1", 4001)
THIRD = Observed("uid-2", "10.0.0.2", 4002)


def silent_watch(num_failed: int, at_s: float = 100.0) -> Watch:
    """Return a watch that has been answered once, and not since `at_s`."""
    watch = Watch(OTHER)
    watch.begin(at_s - EVERY_S)
    watch.answered()
    for _ in range(num_failed):
        watch.begin(at_s)
        at_s = watch.failed()
    return watch


@pytest.mark.parametrize(
    ("num_failed", "level"),
    [
        pytest.param(0, 0.0, id="it answers"),
        pytest.param(1, 0.0, id="one packet that is lost is no news"),
        pytest.param(2, SUSPECT_S, id="half a second"),
        pytest.param(5, SUSPECT_S, id="a second and a quarter"),
        pytest.param(6, SILENT_S, id="a second and a half"),
        pytest.param(60, SILENT_S, id="much longer"),
    ],
)
def test_level_follows_the_attempts_that_failed(num_failed: int, level: float) -> None:
    assert silent_watch(num_failed).level == level


def test_who_has_never_answered_is_not_said_to_be_silent() -> None:
    """A firewall that drops what is tried would lose every member of the job."""
    watch = Watch(OTHER)
    for at in range(20):
        watch.begin(at / 2)
        assert watch.failed() == at / 2 + SELDOM_S
    assert (watch.level, watch.silent_s(20.0)) == (0.0, 0.0)


def test_answer_ends_the_silence() -> None:
    watch = silent_watch(5)
    watch.begin(101.25)
    assert watch.answered() == 101.25 + EVERY_S
    assert (watch.level, watch.silent_s(101.3)) == (0.0, 0.0)


def test_attempts_are_as_frequent_only_while_they_decide_something() -> None:
    watch, gaps, at_s = silent_watch(0), [], 100.0
    for _ in range(2 * MANY + 3):
        watch.begin(at_s)
        next_s = watch.failed()
        gaps.append(next_s - at_s)
        at_s = next_s
    assert gaps == [EVERY_S] * (2 * MANY - 1) + [SELDOM_S] * 4


def test_silence_of_an_observer_without_cpu_does_not_grow() -> None:
    """Its loop stood still for 5 s: what it could not try is no silence."""
    watch = silent_watch(3)
    assert watch.silent_s(105.0) == 3 * EVERY_S
    watch.begin(105.0)
    watch.skipped()
    assert (watch.level, watch.silent_s(105.5)) == (SUSPECT_S, 3 * EVERY_S)


@pytest.mark.parametrize("seed", range(20))
def test_pause_of_a_second_is_never_silence(seed: int) -> None:
    """Wherever the pause falls between two attempts, and however late the observer's loop is."""
    rng = random.Random(seed)
    for _ in range(200):
        watch, at_s = silent_watch(0), 100.0
        starts_s = 100.0 + rng.uniform(0.0, 1.0)
        while at_s < starts_s + 3.0:
            watch.begin(at_s)
            # An attempt that begins just before the pause may lose its answer.
            is_heard = not starts_s - 0.002 <= at_s < starts_s + 1.0
            at_s = watch.answered() if is_heard else watch.failed()
            assert watch.level < SILENT_S
            assert watch.silent_s(at_s + 3.0) < SILENT_S
            at_s += rng.choice([0.0, 0.0, rng.uniform(0.0, 0.4)])


@pytest.mark.parametrize("seed", range(5))
def test_silence_that_lasts_is_said_within_two_seconds(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        watch, at_s, cut_s = silent_watch(0), 100.0, 100.0 + rng.uniform(0.0, 1.0)
        while watch.level < SILENT_S:
            watch.begin(at_s)
            at_s = watch.answered() if at_s < cut_s else watch.failed()
        assert SILENT_S <= at_s - cut_s <= EVERY_S + SILENT_S + 1e-9


# --- the core --------------------------------------------------------------------------------------------------------


def test_agent_observes_what_the_newest_generation_says_and_nobody_else() -> None:
    drive = Drive().session().generation(1, observes=(OTHER, THIRD))
    assert drive.of(ev.Observe) == [ev.Observe((OTHER, THIRD))]
    assert drive.generation(2, observes=(OTHER, THIRD)).of(ev.Observe) == []
    assert drive.generation(3, observes=()).of(ev.Observe) == [ev.Observe(())]


def test_silence_is_said_at_each_level_and_again_in_every_report_until_it_is_over() -> None:
    drive = Drive().session().generation(1, observes=(OTHER, THIRD)).wait(0.1)
    for num_failed, age_s in ((2, 0.5), (6, 1.51)):
        watch = silent_watch(num_failed)
        drive.now_s = 100.0 + num_failed * EVERY_S
        drive.feed(ev.Watched((watch, Watch(THIRD)))).wait(0.02)
        assert drive.of(ev.Send)[-1].report.unheard == (wire.Unheard("uid-1", age_s),)
    assert drive.report.unheard == (wire.Unheard("uid-1", 1.52),), "said again"
    watch.begin(drive.now_s)
    watch.answered()
    drive.feed(ev.Watched((watch, Watch(THIRD)))).wait(0.02)
    assert drive.of(ev.Send)[-1].report.unheard == ()


def test_silence_of_who_is_not_observed_any_more_is_forgotten() -> None:
    drive = Drive().session().generation(1, observes=(OTHER,))
    drive.feed(ev.Watched((silent_watch(6),)))
    assert drive.report.unheard
    assert drive.generation(2, observes=(THIRD,)).report.unheard == ()


def test_agent_of_an_earlier_release_is_observed_nowhere_and_observes_nobody() -> None:
    sent = codec.to_json(Drive().report)
    del sent["observedPort"], sent["unheard"]
    report = wire.Report.decode(codec.canonical(sent))
    assert (report.observed_port, report.unheard) == (0, ())

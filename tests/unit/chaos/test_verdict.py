"""What the traces prove: progress after a fault, roll-backs while a holder lived, steps done again, an equal end."""

from __future__ import annotations

import re

import pytest

from chaos import verdict
from chaos.trace import Built, Commit, Done, Evaluated, Trace, Who
from chaos.verdict import Expected, Injected

A, B, C = ("w-0", 10, 1), ("w-1", 11, 1), ("w-2", 12, 1)
A_AGAIN = ("w-0", 10, 2)  # its container was started again: the same process id


def trace(*commits: Commit, built: list[Built] | None = None, saved: list[tuple[float, int]] | None = None) -> Trace:
    return Trace(commits=list(commits), built=built or [], saved=saved or [])


def fault(step: int = 10, generation: int = 1, at_s: float = 5.0) -> Injected:
    return Injected("kill-trainer", "settled", "", at_s, 20.0, step, generation)


@pytest.mark.parametrize(
    ("commit", "proves"),
    [
        pytest.param(Commit(5.1, A, 1, 11), False, id="one step may complete from buffers"),
        pytest.param(Commit(5.1, A, 1, 12), True, id="the one after it cannot"),
        pytest.param(Commit(4.9, A, 2, 12), False, id="before the fault"),
        pytest.param(Commit(5.1, A, 2, 3), True, id="a newer generation, from a checkpoint"),
        pytest.param(Commit(5.1, B, 0, 3), True, id="a script's process that was built after it"),
        pytest.param(Commit(5.1, C, 0, 3), False, id="a script's process that was built before it"),
    ],
)
def test_commit_proves_progress(commit: Commit, proves: bool) -> None:
    assert verdict.proves_progress(commit, fault(), {A: 1.0, B: 5.05, C: 1.0}) is proves


def test_next_commit_is_the_earliest_that_proves_progress() -> None:
    found = verdict.next_commit(trace(Commit(5.1, A, 1, 11), Commit(5.6, B, 2, 11), Commit(5.5, A, 2, 11)), fault())
    assert found == Commit(5.5, A, 2, 11)
    assert verdict.next_commit(trace(Commit(5.1, A, 1, 11)), fault()) is None


def at(at_s: float, bound_s: float, recovered_s: float | None) -> Injected:
    return Injected("kill-trainer", "settled", "", at_s, bound_s, 10, 1, recovered_s)


@pytest.mark.parametrize(
    ("injected", "last_commit_s", "least_s", "overdue_s"),
    [
        pytest.param([], 0.0, 0.0, None, id="no fault explains nothing, and is waited for elsewhere"),
        pytest.param([at(80.0, 25.0, None)], 79.0, 0.0, None, id="within the bound of a fault"),
        pytest.param([at(70.0, 25.0, None)], 69.0, 0.0, 30.0, id="beyond it"),
        pytest.param([at(70.0, 25.0, None)], 99.0, 0.0, 30.0, id="a commit that proves nothing does not count"),
        pytest.param([at(50.0, 25.0, None), at(90.0, 20.0, None)], 49.0, 0.0, None, id="a later fault begins the time anew"),
        pytest.param([at(50.0, 60.0, None), at(70.0, 20.0, None)], 49.0, 0.0, None, id="the longest bound of those counts"),
        pytest.param([at(50.0, 25.0, 1.0)], 90.0, 0.0, None, id="recovered, and commits"),
        pytest.param([at(50.0, 25.0, 1.0)], 60.0, 0.0, 40.0, id="recovered, and then nothing more"),
        pytest.param([at(50.0, 25.0, 1.0)], 60.0, 90.0, None, id="the end may take longer"),
    ],
)  # fmt: skip
def test_wait_is_too_long_when_no_fault_explains_it(
    injected: list[Injected], last_commit_s: float, least_s: float, overdue_s: float | None
) -> None:
    assert verdict.overdue_s(injected, last_commit_s, 100.0, least_s) == overdue_s


@pytest.mark.parametrize(
    ("injected", "more_s"),
    [
        pytest.param([], 0.0, id="nothing was injected"),
        pytest.param([at(90.0, 20.0, 0.5)], 0.0, id="a killed process leaves the operator alone"),
        pytest.param([Injected("kill-operator", "settled", "", 90.0, 60.0, 10, 1, 0.3)], 30.0, id="a leader has 40 s, 10 are over"),
        pytest.param([Injected("kill-operator", "settled", "", 50.0, 60.0, 10, 1, 0.3)], 0.0, id="it has had its time"),
    ],
)  # fmt: skip
def test_fault_while_nobody_leads_waits_for_a_leader_first(injected: list[Injected], more_s: float) -> None:
    assert verdict.leaderless_s(injected, 100.0) == more_s


def test_group_that_goes_on_from_less_than_a_living_process_holds_is_a_roll_back() -> None:
    seen = trace(Commit(1.0, A, 1, 10), Commit(1.0, B, 1, 10), Commit(3.0, C, 2, 4))
    (found,) = verdict.roll_backs(seen, {A: 3.5, B: 2.0, C: 9.0})
    assert (found.generation, found.began_with_step, found.holder, found.holders_step) == (2, 4, "w-0-10", 10)


@pytest.mark.parametrize(
    ("commits", "alive_until_s"),
    [
        pytest.param([Commit(1.0, A, 1, 10), Commit(3.0, B, 2, 4)], {A: 2.9, B: 9.0}, id="the holder was dead by then"),
        pytest.param([Commit(1.0, A, 1, 10), Commit(3.0, B, 2, 11)], {A: 9.0, B: 9.0}, id="nothing is done again"),
        pytest.param([Commit(1.0, A, 1, 10), Commit(3.0, B, 2, 4)], {A: 2.0, A_AGAIN: 9.0}, id="another process with its id lives"),
        pytest.param(
            [Commit(1.0, A, 1, 10), Commit(0.9, B, 1, 9), Commit(3.0, B, 2, 10)], {A: 2.0, B: 9.0},
            id="the step in flight, whose one holder died",
        ),
        pytest.param([Commit(1.0, A, 1, 10), Commit(3.0, B, 2, 11), Commit(3.1, A, 2, 11)], {A: 9.0, B: 9.0}, id="all go on"),
    ],
)  # fmt: skip
def test_no_roll_back(commits: list[Commit], alive_until_s: dict[Who, float]) -> None:
    assert verdict.roll_backs(trace(*commits), alive_until_s) == []


def test_step_in_flight_of_a_living_process_may_not_be_done_again_either() -> None:
    seen = trace(Commit(1.0, A, 1, 10), Commit(0.9, B, 1, 9), Commit(3.0, B, 2, 10))
    assert len(verdict.roll_backs(seen, {A: 9.0, B: 9.0})) == 1


@pytest.mark.parametrize(
    ("commits", "living", "found"),
    [
        pytest.param([Commit(1.0, A, 1, 10, 0), Commit(1.0, B, 1, 10, 1), Commit(3.0, C, 2, 4)], (A, B), 2, id="all parts live"),
        pytest.param([Commit(1.0, A, 1, 10, 0), Commit(1.0, B, 1, 10, 1), Commit(3.0, C, 2, 4)], (A,), 0, id="one part is lost"),
        pytest.param(
            [Commit(1.0, A, 1, 10, 0), Commit(0.9, B, 1, 9, 1), Commit(3.0, C, 2, 10)], (A, B), 1,
            id="the other part could have followed",
        ),
        pytest.param(
            [Commit(1.0, A, 1, 10, 0), Commit(0.9, B, 1, 8, 1), Commit(3.0, C, 2, 9)], (A, B), 0,
            id="the other part belongs to an older state",
        ),
        pytest.param(
            [Commit(1.0, A, 2, 10, 0), Commit(0.9, B, 1, 10, 1), Commit(3.0, C, 3, 9)], (A, B), 0,
            id="the other part is of another history",
        ),
        pytest.param(
            [Commit(1.0, A, 1, 10, 0), Commit(1.0, A_AGAIN, 1, 10, 0), Commit(3.0, C, 2, 4)], (A, A_AGAIN), 0,
            id="one part twice is no whole",
        ),
    ],
)  # fmt: skip
def test_state_of_a_split_model_is_held_as_long_as_each_part_is(
    commits: list[Commit], living: tuple[Who, ...], found: int
) -> None:
    assert len(verdict.roll_backs(trace(*commits), dict.fromkeys((*living, C), 9.0), group_size=2)) == found


def test_script_that_begins_with_less_than_its_newest_checkpoint_was_rolled_back() -> None:
    saved = [(1.0, 5), (2.0, 10), (6.0, 15)]
    good, bad = Built(5.0, A, 4.0, 10), Built(5.0, B, 4.0, 5)
    (found,) = verdict.script_roll_backs(trace(built=[good, bad], saved=saved))
    assert (found.began_with_step, found.holders_step) == (5, 10)


def test_steps_of_a_session_that_are_done_again_are_counted_once_for_all_ranks() -> None:
    seen = trace(
        Commit(1.0, A, 1, 10), Commit(1.1, B, 1, 10),
        Commit(2.0, A, 2, 10), Commit(2.1, B, 2, 10), Commit(2.2, A, 2, 11),
        Commit(3.0, A, 3, 12),
        Commit(4.0, A, 4, 8),
    )  # fmt: skip
    assert verdict.redone_steps(seen) == 1 + 0 + 5


def test_steps_of_a_script_that_are_done_again_are_counted_once_for_all_ranks() -> None:
    built = [Built(0.5, A, 0.1, 0), Built(0.5, B, 0.2, 0), Built(2.5, C, 2.0, 5), Built(2.5, ("w-3", 13, 1), 2.1, 5)]
    seen = trace(
        Commit(1.0, A, 0, 7), Commit(1.1, B, 0, 7), Commit(3.0, C, 0, 5), Commit(3.1, ("w-3", 13, 1), 0, 5), built=built
    )  # fmt: skip
    assert verdict.redone_steps(seen) == 3


EXPECTED = Expected("aa", "dd")


@pytest.mark.parametrize(
    ("done", "samples", "sentences"),
    [
        pytest.param([Done(1.0, A, 3, 1, "aa", "dd")], "dd", 0, id="equal"),
        pytest.param([], "dd", 1, id="nobody finished"),
        pytest.param([Done(1.0, A, 3, 2, "aa", "dd"), Done(1.0, B, 3, 2, "bb", "dd")], "dd", 1, id="one rank differs"),
        pytest.param([Done(1.0, A, 3, 1, "aa", "ee")], "dd", 1, id="other samples in the process"),
        pytest.param([Done(1.0, A, 3, 1, "aa", "dd")], "ee", 1, id="other samples in the status"),
        pytest.param([Done(1.0, A, 3, 1, "aa", "dd")], "", 1, id="no samples in the status"),
        pytest.param([Done(1.0, A, 2, 1, "bb", "dd"), Done(1.0, B, 3, 1, "aa", "dd")], "dd", 0, id="the last generation counts"),
    ],
)  # fmt: skip
def test_end_is_compared_with_that_of_the_run_without_faults(done: list[Done], samples: str, sentences: int) -> None:
    assert len(verdict.differences(done, EXPECTED, samples)) == sentences


WHOLE = Expected("", "dd", {"w[0]": "0x1p+0", "w[1]": "0x1p+1"}, {10: 2.5})
FIRST = Done(1.0, A, 3, 2, "", "dd", {"w[0]": "0x1p+0"})
SECOND = Done(1.0, B, 3, 2, "", "dd", {"w[1]": "0x1p+1"})


@pytest.mark.parametrize(
    ("seen", "sentences"),
    [
        pytest.param(Trace(done=[FIRST, SECOND], evaluated=[Evaluated(A, 10, 2.5)]), [], id="equal"),
        pytest.param(Trace(done=[FIRST]), ["1 elements .* such as w.1."], id="nobody wrote a part"),
        pytest.param(
            Trace(done=[FIRST, Done(1.0, B, 3, 2, "", "dd", {"w[1]": "0x1p+0"})]),
            ["w-1-11 ended with 1 of 1 .* w.1.: 0x1p.0, not 0x1p.1"], id="one part differs",
        ),
        pytest.param(
            Trace(done=[Done(1.0, C, 2, 2, "", "dd", {"w[1]": "0x1p+0"}), FIRST, SECOND]), [], id="the last generation counts",
        ),
        pytest.param(
            Trace(done=[FIRST, Done(1.0, B, 2, 2, "", "dd", {"w[1]": "0x1p+1"})]), [], id="a part written before a death",
        ),
        pytest.param(Trace(done=[FIRST, SECOND], evaluated=[Evaluated(A, 10, 2.0)]), ["after 10 steps to 2.0"], id="other"),
        pytest.param(Trace(done=[FIRST, SECOND], evaluated=[Evaluated(A, 11, 2.5)]), ["after 11 steps"], id="too many"),
    ],
)  # fmt: skip
def test_parts_of_a_split_model_are_compared_with_the_whole(seen: Trace, sentences: list[str]) -> None:
    found = verdict.split_differences(seen, WHOLE)
    assert len(found) == len(sentences), found
    for sentence, pattern in zip(found, sentences, strict=True):
        assert re.search(pattern, sentence), sentence


def test_script_has_no_samples_to_compare() -> None:
    assert verdict.differences([Done(1.0, A, 0, 1, "aa", "")], Expected("aa", ""), None) == []

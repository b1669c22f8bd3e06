"""The same exit at the same place with no step in between ends a job within 30 s; everything else is left to maxRestarts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from _regroup_agent.ending import restart_delay_s
from regroup_operator.model.plan import Crash, Failure
from regroup_operator.plan.failures.crashes import crash_sentence, is_hopeless, note_crashes, place_of, repeats

TAIL = 'Traceback (most recent call last):\n  File "/w/train.py", line 9, in <module>\n    f()\nValueError: step {}'
BOOM = Failure(1000.0, "1", 1, "ValueError: step 3", TAIL.format(3))
SEGV = 'Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n  File "a.py", line 2 in f'


def crashes(at: Sequence[float], failure: Failure = BOOM, *, script: bool = False) -> Crash | None:
    """Return what is known after one failure at each of these times, the n-th in generation n."""
    crash = None
    for number, seconds in enumerate(at, start=1):
        one = replace(failure, at=1000.0 + seconds, generation=number)
        crash = note_crashes(crash, [one], committed_at=None, script=script)
    return crash


@pytest.mark.parametrize(
    ("failure", "place"),
    [
        pytest.param(
            BOOM, "/w/train.py:9 ValueError", id="the innermost frame and the kind of exception, not its numbers"
        ),
        pytest.param(replace(BOOM, tail=""), "ValueError: step 3", id="without a traceback the last line"),
        pytest.param(Failure(0.0, "1", 3), "nothing on stderr", id="exit(3) without a word"),
        pytest.param(Failure(0.0, "1", -9), "", id="killed: somebody else's doing"),
        pytest.param(Failure(0.0, "1", -9, reason="OOMKilled"), "OOMKilled", id="killed for lack of memory"),
        pytest.param(Failure(0.0, "1", -11, "x", SEGV), "a.py:2 x", id="a fatal signal: its newest frame comes first"),
        pytest.param(Failure(0.0, "1", 137, container=True), "", id="a container that was killed"),
        pytest.param(Failure(0.0, "1", None), "", id="not known how"),
    ],
)
def test_place(failure: Failure, place: str) -> None:
    assert place_of(failure) == place


@pytest.mark.parametrize(
    ("at", "told", "hopeless"),
    [
        pytest.param([0], False, False, id="once"),
        pytest.param([0, 5], True, False, id="twice: people are told"),
        pytest.param([0, 5, 14], True, False, id="three times in 14 s: it may pass by itself"),
        pytest.param([0, 16], True, False, id="two in 16 s may be chance"),
        pytest.param([0, 5, 15], True, True, id="three in 15 s"),
        pytest.param([0, 0.1, 0.2, 0.3, 20], True, False, id="what all ranks do at once is one crash"),
        pytest.param([0, 1, 3, 7, 15], True, True, id="the restart delays of a script that fails at once"),
    ],
)
def test_rounds(at: list[float], told: bool, hopeless: bool) -> None:
    crash = crashes(at)
    assert (repeats(crash), is_hopeless(crash)) == (told, hopeless)


@pytest.mark.parametrize(
    ("ends", "rounds"),
    [
        pytest.param([(0, "1", 4), (8, "2", 4)], 1, id="its peer, which was stopped meanwhile"),
        pytest.param([(0, "1", 4), (8, "2", 4), (9, "1", 4)], 2, id="the first one again"),
        pytest.param([(0, "1", 4), (8, "2", 5)], 2, id="the next generation"),
        pytest.param([(0, "1", 0), (8, "2", 0)], 2, id="no generation: each for itself"),
    ],
)
def test_workers_of_one_generation_end_by_one_crash(ends: list[tuple[float, str, int]], rounds: int) -> None:
    """Walk 15683: a script's job failed for one kill, whose last witness was stopped, and one power cut."""
    crash = None
    for seconds, worker, generation in ends:
        one = replace(BOOM, at=1000.0 + seconds, worker=worker, generation=generation)
        crash = note_crashes(crash, [one], committed_at=None, script=False)
    assert crash is not None
    assert len(crash.rounds) == rounds


@pytest.mark.parametrize("starts_s", [0.1, 0.6, 1, 2, 3, 5, 7, 8, 10, 13, 14])
def test_job_ends_within_30_s_of_the_first_crash(starts_s: float) -> None:
    """With the agent's own delays, however long the script takes to its crash, up to 14 s."""
    at, count = [0.0], 1
    while not is_hopeless(crashes(at)):
        at.append(at[-1] + restart_delay_s(count) + starts_s)
        count += 1
        assert at[-1] <= 30.0, at
    assert 15.0 <= at[-1] <= 30.0


def test_another_place_or_exit_begins_anew() -> None:
    crash = crashes([0, 5, 10])
    elsewhere = replace(BOOM, at=1020.0, tail=BOOM.tail.replace("line 9", "line 10"))
    assert not repeats(note_crashes(crash, [elsewhere], committed_at=None, script=False))
    assert not repeats(note_crashes(crash, [replace(BOOM, at=1020.0, exit_code=2)], committed_at=None, script=False))
    assert note_crashes(crash, [Failure(1020.0, "1", -9)], committed_at=None, script=False) is None


def test_committed_step_ends_it() -> None:
    crash = crashes([0, 5])
    assert note_crashes(crash, [], committed_at=1004.0, script=False) == crash, "before the last crash"
    assert note_crashes(crash, [], committed_at=1006.0, script=False) is None
    after = note_crashes(crash, [replace(BOOM, at=1016.0)], committed_at=1006.0, script=False)
    assert not repeats(after)
    assert note_crashes(None, [BOOM], committed_at=1001.0, script=False) is None, "told late, and trained since"


def test_script_whose_rank_was_killed_is_not_blamed_on_its_peers() -> None:
    """The peers' own exits look alike each time, and may be known before the signal that caused them."""
    crash = crashes([0, 5, 10], script=True)
    assert crash is not None
    assert [generation for _, generation in crash.rounds] == [1, 2, 3]
    last = replace(BOOM, at=1016.0, generation=4)
    assert is_hopeless(note_crashes(crash, [last], committed_at=None, script=True))
    for excused in ({1, 2, 3}, {4}, {1, 3}):
        got = note_crashes(crash, [last], committed_at=None, script=True, excused=excused)
        assert not is_hopeless(got), excused
    assert not is_hopeless(crashes([0, 40, 80], script=True)), "each trained for a while"


def test_nothing_grows_without_bound() -> None:
    crash = crashes([n * 0.9 for n in range(500)])
    assert crash is not None
    assert (len(crash.rounds), crash.count) == (4, 500)


def test_sentence_has_exit_count_traceback_and_command() -> None:
    crash = crashes([0, 1, 3, 7, 15.4])
    assert crash is not None
    text = crash_sentence(crash, "Worker 1 ended with exit code 1", "kubectl logs d-worker-1-0")
    assert text.splitlines() == [
        "Worker 1 ended with exit code 1, 5 times in 15 s at the same place, and no step was committed in between.",
        "Traceback (most recent call last):",
        '  File "/w/train.py", line 9, in <module>',
        "    f()",
        "ValueError: step 3",
        "kubectl logs d-worker-1-0",
    ]
    long = replace(BOOM, tail="\n".join("x" * 400 for _ in range(12)))
    assert len(crash_sentence(replace(crash, last=long), "Worker 1", "kubectl")) < 700

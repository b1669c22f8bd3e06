"""What a pattern finds in the lines of a program, and that no pattern keeps the agent from its work."""

from __future__ import annotations

import math
import signal
import time

import pytest

from _regroup_agent.progress_lines import LOOK_S, MAX_KEPT, MAX_SLOW, REST, ProgressPattern, ProgressReader
from _regroup_agent.script_progress import Words
from regroup.protocol.progress_log import MAX_PATTERN, PatternError, compile_pattern

NANOGPT = r"^iter (?P<step>\d+): loss (?P<loss>\S+),"
TQDM = r"(?P<percent>\d+)%\|.*\| (?P<step>\d+)/(?P<total>\d+) \["
CATASTROPHE = r"(?P<step>(a+)+)b"


class Heard:
    """A reader of one stream, what it was told to log, and what it has heard."""

    def __init__(self, pattern: str, clock: list[float] | None = None) -> None:
        self.log: list[str] = []
        self.words: list[Words] = []
        self.pattern = ProgressPattern(
            compile_pattern(pattern), self.log.append, lambda *said: self.words.append(said[2])
        )
        self.reader = self.pattern.reader(0, 1)
        if clock is not None:
            self.reader = ProgressReader(self.pattern, self.words.append, lambda: clock[0])


@pytest.mark.parametrize(
    ("pattern", "output", "want"),
    [
        pytest.param(NANOGPT, b"iter 40: loss 1.8231, time 92.10ms, mfu 3.1%\n", Words(40, loss=1.8231), id="nanoGPT"),
        pytest.param(NANOGPT, b"iter 40: loss nan, time 92.10ms\n", Words(40, loss=math.nan), id="a loss that is no number"),
        pytest.param(TQDM, b"\r 45%|####      | 450/1000 [00:12<00:15, 36.2it/s]\r", Words(450, 1000, 45.0), id="tqdm's bar"),
        pytest.param(NANOGPT, b"iter 1: loss 3,\niter 2: loss 2,\n", Words(2, loss=2.0), id="the newest line counts"),
        pytest.param(NANOGPT, b"iter 1: loss 3,\nsaving\n", Words(1, loss=3.0), id="other lines do not matter"),
        pytest.param(
            r"step (?P<step>\d+)|loss (?P<loss>[\d.]+)",
            b"step 7\nloss 0.5\n",
            Words(7, loss=0.5),
            id="numbers on lines of their own",
        ),
        pytest.param(r"(?P<step>[\d,_]+) of (?P<total>[\d,]+)", b"1,250 of 10,000\n", Words(1250, 10000), id="thousands"),
        pytest.param(r"(?P<percent>[\d.]+ ?%)", b"done 12.5%\n", Words(percent=12.5), id="a percent sign in the group"),
        pytest.param(r"Epoch (?P<step>\w+)", b"Epoch three\n", Words(), id="no number"),
        pytest.param(NANOGPT, "iter 3: loss 1, \xe9\n".encode("latin-1"), Words(3, loss=1.0), id="bytes that are no UTF-8"),
        pytest.param(NANOGPT, b"nothing of that kind\n", None, id="no line matches"),
    ],
)  # fmt: skip
def test_numbers(pattern: str, output: bytes, want: Words | None) -> None:
    heard = Heard(pattern)
    heard.reader.add(output)
    assert repr(heard.words) == repr([] if want is None else [want])


def test_line_in_pieces_is_read_once_it_is_whole() -> None:
    clock = [0.0]
    heard = Heard(NANOGPT, clock)
    for piece in (b"iter 4", b"2: loss 1.5", b", time\nit"):
        heard.reader.add(piece)
    assert heard.words == [Words(42, loss=1.5)]


def test_unfinished_last_line_is_read_when_the_process_has_ended() -> None:
    heard = Heard(NANOGPT)
    heard.reader.add(b"iter 42: loss 1.5, end")
    assert heard.words == []
    heard.reader.end()
    assert heard.words == [Words(42, loss=1.5)]


def test_stream_without_an_end_of_line_takes_bounded_memory() -> None:
    heard = Heard(NANOGPT)
    for _ in range(40):
        heard.reader.add(b"x" * 10_000)
    assert len(heard.reader._kept) == MAX_KEPT


def test_reader_rests_after_a_look_that_took_long() -> None:
    clock = [0.0]
    heard = Heard(NANOGPT, clock)
    find = heard.pattern.find

    def slow(text: str) -> Words | None:
        clock[0] += 0.01
        return find(text)

    heard.pattern.find = slow  # type: ignore[method-assign]
    heard.reader.add(b"iter 1: loss 1,\n")
    clock[0] += 0.01 * REST - 0.001
    heard.reader.add(b"iter 2: loss 1,\n")
    assert [words.step for words in heard.words] == [1]
    clock[0] += 0.002
    heard.reader.add(b"iter 3: loss 1,\n")
    assert [words.step for words in heard.words] == [1, 3]


def test_catastrophic_pattern_is_ended_by_the_alarm_and_given_up() -> None:
    heard = Heard(CATASTROPHE)
    began_s = time.monotonic()
    for _ in range(MAX_SLOW + 2):
        assert heard.pattern.find("a" * 60 + "\n") is None
    assert time.monotonic() - began_s < (MAX_SLOW + 1) * 20 * LOOK_S, "without the alarm one look takes years"
    assert len(heard.log) == 1
    assert "spec.progress.log took longer than 50 ms 3 times" in heard.log[0]
    assert heard.pattern.find("aab\n") is None, "it is not used any more"
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param("(?P<step>", "is no regular expression of Python: missing )", id="syntax"),
        pytest.param("step (\\d+)", "has none of the groups step, percent, loss. ", id="no named group"),
        pytest.param("(?P<total>\\d+)", "has none of the groups step, percent, loss. ", id="a total alone"),
        pytest.param(
            "(?P<steps>\\d+)", "has a group named steps. Name the groups step, total, percent, loss", id="another"
        ),
        pytest.param("(?P<step>\\d+)" + "x" * MAX_PATTERN, "has 1013 characters. Use at most 1000.", id="too long"),
        pytest.param("(" * 990 + "(?P<step>", "is no regular expression of Python: ", id="deep"),
    ],
)
def test_patterns_that_are_refused(text: str, why: str) -> None:
    with pytest.raises(PatternError) as error:
        compile_pattern(text)
    assert str(error.value).startswith(why)

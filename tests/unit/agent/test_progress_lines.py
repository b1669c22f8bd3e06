"""What a pattern finds in the lines of a program, and that no pattern keeps the agent from its work."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable

import pytest

from _regroup_agent.progress_lines import GOOD, LOOK_S, MAX_KEPT, MAX_SLOW, REST, ProgressPattern, ProgressReader
from _regroup_agent.script_progress import Words
from regroup.protocol.progress_log import MAX_PATTERN, PatternError, compile_pattern

NANOGPT = r"^iter (?P<step>\d+): loss (?P<loss>\S+),"
TQDM = r"(?P<percent>\d+)%\|.*\| (?P<step>\d+)/(?P<total>\d+) \["
CATASTROPHE = r"(?P<step>(a+)+)b"


class Due:
    """A call that a reader has asked for."""

    def __init__(self, after_s: float, call: Callable[[], None]) -> None:
        self.after_s, self.call, self.is_cancelled = after_s, call, False

    def cancel(self) -> None:
        self.is_cancelled = True


class Heard:
    """A reader of one stream, what it was told to log, and what it has heard. Looks take no time but on `clock`."""

    def __init__(self, pattern: str) -> None:
        self.log: list[str] = []
        self.words: list[Words] = []
        self.given_up: list[bool] = []
        self.pattern = ProgressPattern(
            compile_pattern(pattern),
            self.log.append,
            lambda *said: self.words.append(said[2]),
            lambda: self.given_up.append(True),
        )
        self.clock = [0.0]
        self.dues: list[Due] = []
        self.reader = ProgressReader(self.pattern, self.words.append, self.later, lambda: self.clock[0])

    def later(self, after_s: float, call: Callable[[], None]) -> Due:
        self.dues.append(Due(after_s, call))
        return self.dues[-1]

    def add(self, data: bytes) -> None:
        """Hand in output after the last rest is over."""
        self.rest()
        self.reader.add(data)

    def rest(self) -> None:
        for due in self.dues[-1:]:
            self.dues.clear()
            if not due.is_cancelled:
                due.call()


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
    heard.add(output)
    assert repr(heard.words) == repr([] if want is None else [want])


def test_line_in_pieces_is_read_once_it_is_whole() -> None:
    heard = Heard(NANOGPT)
    for piece in (b"iter 4", b"2: loss 1.5", b", time\nit"):
        heard.add(piece)
    assert heard.words == [Words(42, loss=1.5)]


def test_unfinished_last_line_is_read_when_the_process_has_ended() -> None:
    heard = Heard(NANOGPT)
    heard.add(b"iter 42: loss 1.5, end")
    assert heard.words == []
    heard.reader.end()
    assert heard.words == [Words(42, loss=1.5)]


def test_stream_without_an_end_of_line_takes_bounded_memory() -> None:
    heard = Heard(NANOGPT)
    for _ in range(40):
        heard.add(b"x" * 10_000)
    assert len(heard.reader._kept) == MAX_KEPT


def test_line_that_has_lost_its_beginning_is_not_read() -> None:
    """`345/99999` would be step 345."""
    line = b"12345/99999 [\n"
    heard = Heard(r"(?P<step>\d+)/(?P<total>\d+) \[")
    heard.add(line + b"x" * (MAX_KEPT - len(line) + 2) + b"\n")
    assert heard.words == []
    heard.add(line)
    assert heard.words == [Words(12345, 99999)]
    heard.add(b"1" * MAX_KEPT)
    heard.add(b"2/99999 [")
    heard.reader.end()
    assert len(heard.words) == 1


def slow(heard: Heard, took_s: float) -> None:
    find = heard.pattern.find

    def slowly(text: str) -> Words | None:
        heard.clock[0] += took_s
        return find(text)

    heard.pattern.find = slowly  # type: ignore[method-assign]


def test_reader_rests_after_a_look_that_took_long() -> None:
    heard = Heard(NANOGPT)
    slow(heard, 0.01)
    heard.reader.add(b"iter 1: loss 1,\n")
    heard.reader.add(b"iter 2: loss 1,\n")
    assert [words.step for words in heard.words] == [1]
    assert [due.after_s for due in heard.dues] == [pytest.approx(0.01 * REST)]


def test_output_of_a_rest_is_read_after_it_without_more_output() -> None:
    heard = Heard(NANOGPT)
    heard.reader.add(b"iter 1: loss 1,\n")
    heard.reader.add(b"iter 2: loss 1,\n")
    heard.rest()
    assert [words.step for words in heard.words] == [1, 2]
    heard.rest()
    assert heard.dues == [], "nothing is due without output"


def test_end_of_the_process_ends_the_rest() -> None:
    heard = Heard(NANOGPT)
    heard.reader.add(b"iter 1: loss 1,\n")
    heard.reader.add(b"iter 2: loss 1,\n")
    heard.reader.end()
    assert [words.step for words in heard.words] == [1, 2]
    assert [due.is_cancelled for due in heard.dues] == [True]


def test_time_in_which_the_agent_does_not_run_makes_no_pattern_slow() -> None:
    """A busy node would end the use of a good pattern."""
    heard = Heard(NANOGPT)
    heard.pattern._pattern = Sleepy()  # type: ignore[assignment]
    for _ in range(MAX_SLOW + 1):
        heard.pattern.find("iter 1\n")
    assert (heard.log, heard.given_up) == ([], [])


class Sleepy:
    """A pattern whose search takes long, and no CPU time."""

    def search(self, line: str) -> None:  # noqa: ARG002
        time.sleep(1.5 * LOOK_S)


def test_slow_looks_far_apart_do_not_end_the_use_of_a_pattern() -> None:
    heard = Heard(CATASTROPHE)
    for _ in range(MAX_SLOW + 1):
        heard.pattern.find("a" * 60 + "\n")
        for _ in range(GOOD):
            heard.pattern.find("step\n")
    assert (heard.log, heard.given_up) == ([], [])


def test_no_alarm_is_left_after_a_look() -> None:
    heard = Heard(NANOGPT)
    before = signal.getsignal(signal.SIGVTALRM)
    assert heard.pattern.find("iter 4: loss 1,\n") == Words(4, loss=1.0)
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0
    assert signal.getsignal(signal.SIGVTALRM) == before


def test_catastrophic_pattern_is_ended_by_the_alarm_and_given_up() -> None:
    heard = Heard(CATASTROPHE)
    began_s = time.process_time()
    for _ in range(MAX_SLOW + 2):
        assert heard.pattern.find("a" * 60 + "\n") is None
    assert time.process_time() - began_s < (MAX_SLOW + 1) * 20 * LOOK_S, "without the alarm one look takes years"
    assert len(heard.log) == 1
    assert "spec.progress.log took longer than 50 ms 3 times" in heard.log[0]
    assert heard.pattern.find("aab\n") is None, "it is not used any more"
    assert heard.given_up == [True]
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0


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

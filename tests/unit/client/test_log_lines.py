"""Log lines for people: whose they are, in which order they come, what a terminal is shown, and how several logs are read."""

from __future__ import annotations

import errno
import random
import sys
import unicodedata
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from regroup_client import log_lines, log_streams
from regroup_client.errors import LostError
from regroup_client.log_lines import (
    Cutter,
    Line,
    Reorder,
    Worker,
    bounded,
    clean,
    duration,
    lines_of,
    merged,
    shown,
    split_time,
)
from regroup_client.log_streams import Choice, Follower, Log, LogsError, read

W0, W1 = Worker(0), Worker(1, 2)
AT = b"2026-01-01T10:00:00.5Z "
AT_NS = 1_767_261_600_500_000_000


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        pytest.param("plain", "plain", id="plain text"),
        pytest.param("a\tb", "a\tb", id="a tab stays"),
        pytest.param("\x1b[1;31mred\x1b[0m", "red", id="colours"),
        pytest.param("\x1b[2J\x1b[Hclear", "clear", id="the cursor"),
        pytest.param("\x1b]0;title\x07text", "text", id="a title"),
        pytest.param("\x1b]52;c;ZWNobw==\x1b\\text", "text", id="the clipboard"),
        pytest.param("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link", id="a link"),
        pytest.param("\x1bP+q544e\x1b\\x", "x", id="a device string"),
        pytest.param("\x1b]0;never ended", "0;never ended", id="a sequence that does not end hides nothing"),
        pytest.param("\x9b31mC1", "C1", id="CSI as one character"),
        pytest.param("\x1bc reset", " reset", id="a reset"),
        pytest.param("end \x1b", "end \\x1b", id="an escape at the end"),
        pytest.param("bell\x07 back\x08\x00", "bell\\x07 back\\x08\\x00", id="controls are written as codes"),
        pytest.param("\u202egnp.exe\u2066", "\\x202egnp.exe\\x2066", id="directions of text"),
        pytest.param("a\u2028b\ufeff", "a\\x2028b\\xfeff", id="separators and what is invisible"),
        pytest.param("\x1b[\x1b[31m31mx", "31mx", id="a sequence that is left by another one"),
    ],
)
def test_clean(raw: str, text: str) -> None:
    assert clean(raw) == text


def test_no_character_of_a_shown_text_is_invisible() -> None:
    fillers = "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180f\u3164\uffa0"
    tags = map(chr, range(0xE0000, 0xE0080))
    of_format = [char for char in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(char) == "Cf"]
    shown_as_they_are = [char for char in (*of_format, *fillers, *tags) if clean(char) == char]
    assert not shown_as_they_are
    assert clean("\u26a0\ufe0f caf\u00e9 \u65e5\u672c") == "\u26a0\ufe0f caf\u00e9 \u65e5\u672c"


def test_nothing_of_any_text_steers_a_terminal() -> None:
    rng = random.Random(7)
    alphabet = ["\x1b", "[", "]", "0", ";", "m", "\x07", "\\", "\x9b", "\x9d", "P", "a", "\r", "\u202e", "\x00", " "]
    for _ in range(20_000):
        text = clean("".join(rng.choices(alphabet, k=rng.randrange(12))))
        assert all(char == "\t" or char.isprintable() for char in text), repr(text)


@pytest.mark.parametrize(
    ("raw", "at_ns", "rest"),
    [
        pytest.param(AT + b"x", AT_NS, b"x", id="UTC"),
        pytest.param(b"2026-01-01T12:00:00.500000000+02:00 x", AT_NS, b"x", id="the node's zone"),
        pytest.param(b"2026-01-01T10:00:00Z", AT_NS - 500_000_000, b"", id="a line without a text"),
        pytest.param(b"no time", 0, b"no time", id="no time"),
        pytest.param(b"2026-99-01T10:00:00Z x", 0, b"2026-99-01T10:00:00Z x", id="no such month"),
    ],
)
def test_split_time(raw: bytes, at_ns: int, rest: bytes) -> None:
    assert split_time(raw) == (at_ns, rest)


@pytest.mark.parametrize(
    ("raw", "rank", "says"),
    [
        pytest.param(b"text", 3, [(3, "text")], id="a worker's only process"),
        pytest.param(b"[rank 5] text", None, [(5, "text")], id="a labelled process"),
        pytest.param(b"[rank 5] text", 3, [(3, "[rank 5] text")], id="a label that a worker's only process wrote"),
        pytest.param(b"[rank 5] 1%\r[rank 6] 2%", 3, [(3, "[rank 6] 2%")], id="a bar with labels of a worker's only process"),
        pytest.param(b"[process 1] text", None, [(None, "[process 1] text")], id="a process without a rank"),
        pytest.param(b"regroup: Connected.", 3, [(None, "regroup: Connected.")], id="the agent"),
        pytest.param(b"text\r", 3, [(3, "text")], id="a line end of Windows"),
        pytest.param(b"", 3, [(3, "")], id="an empty line"),
        pytest.param(b" 10%|#\r 20%|##\r", 0, [(0, " 20%|##")], id="a progress bar"),
        pytest.param(b"[rank 1] 10%\r[rank 0] 5%\r[rank 1] 20%\r[rank 0] done", None, [(1, "20%"), (0, "done")],
                     id="progress bars of two processes"),
        pytest.param(b"\xe2\x82", 0, [(0, "\ufffd")], id="UTF-8 that was cut"),
        pytest.param(b"\xff\xfe caf\xc3\xa9", 0, [(0, "\ufffd\ufffd caf\u00e9")], id="bytes that are no text"),
    ],
)  # fmt: skip
def test_lines_of(raw: bytes, rank: int | None, says: list[tuple[int | None, str]]) -> None:
    found = lines_of(AT + raw, W0, rank)
    assert [(line.rank, line.text) for line in found] == says
    assert {line.at_ns for line in found} == {AT_NS}


def test_long_line_is_cut_and_says_so() -> None:
    assert bounded("x" * 10, 4) == "xxxx … (6 more characters)"
    assert bounded("x" * 5, 4) == "xxxx … (1 more character)"
    assert bounded("x" * 4, 4) == "xxxx"
    (line,) = lines_of(b"x" * 10_000, W0, 0, dropped=5)
    assert line.text.endswith(f"… ({10_000 - log_lines.MAX_SHOWN + 5} more characters)")


def cut(*chunks: bytes) -> list[bytes]:
    cutter = Cutter()
    return [raw for chunk in chunks for raw, _ in cutter.feed(chunk)] + [raw for raw, _ in cutter.end()]


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        pytest.param([b"a\nb\n"], [b"a", b"b"], id="two lines"),
        pytest.param([b"a", b"b\n", b"\n"], [b"ab", b""], id="a line in two parts, and an empty one"),
        pytest.param([b"a\nrest"], [b"a", b"rest"], id="an unfinished line at the end"),
        pytest.param([b"\xe2\x82", b"\xac\n"], ["€".encode()], id="a letter in two parts"),
    ],
)
def test_cutter(chunks: list[bytes], lines: list[bytes]) -> None:
    assert cut(*chunks) == lines


def test_line_without_an_end_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "MAX_RAW", 100)
    cutter = Cutter()
    for _ in range(50):
        assert cutter.feed(b"x" * 10) == []
    assert cutter.feed(b"\nnext\n") == [(b"x" * 100, 400), (b"next", 0)]


def test_progress_bar_without_an_end_keeps_its_time_and_last_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "MAX_RAW", 100)
    cutter = Cutter()
    for percent in range(100):
        cutter.feed((AT if percent == 0 else b"") + b"%d%% of it\r" % percent)
    ((raw, dropped),) = cutter.feed(b"\n")
    assert dropped == 0
    assert [(line.at_ns, line.text) for line in lines_of(raw, W0, 0)] == [(AT_NS, "99% of it")]


def test_progress_bar_is_shown_while_it_is_drawn_but_not_too_often() -> None:
    cutter = Cutter()
    assert cutter.frame(0.0) == []
    cutter.feed(b"1%\r2")
    assert cutter.frame(0.0) == [(b"1%", 0)]
    cutter.feed(b"%\r")
    assert cutter.frame(1.0) == []
    assert cutter.frame(6.0) == [(b"1%\r2%", 0)]
    assert cutter.frame(60.0) == [], "nothing has changed"
    assert cutter.feed(b"\n") == [(b"1%\r2%\r", 0)]


def line(at_ns: int, worker: Worker = W0, text: str = "") -> Line:
    return Line(at_ns, worker, 0, text)


def test_logs_that_end_are_merged_by_time() -> None:
    streams = [[line(1), line(4)], [line(2, W1), line(3, W1), line(9, W1)], []]
    assert [one.at_ns for one in merged(map(iter, streams))] == [1, 2, 3, 4, 9]


def test_clock_that_was_set_back_does_not_turn_a_workers_lines_round() -> None:
    found = list(
        merged([iter([line(5, text="a"), line(2, text="b"), line(6, text="c")]), iter([line(4, W1), line(7, W1)])])
    )
    assert [one.text for one in found if one.worker == W0] == ["a", "b", "c"]
    assert [one.at_ns for one in found] == [4, 5, 2, 6, 7]


def test_followed_lines_wait_for_older_ones_but_not_for_ever() -> None:
    reorder = Reorder(window_s=1.0)
    reorder.add(line(20), 0.0)
    assert reorder.due(0.5) == []
    reorder.add(line(10, W1), 0.5)
    assert [one.at_ns for one in reorder.due(1.0)] == [10, 20]
    reorder.add(line(15, W1), 1.1)
    assert [one.at_ns for one in reorder.due(2.1)] == [15], "too late, but shown"
    reorder.add(line(40), 3.0)
    reorder.add(line(30, W1), 3.0)
    assert [one.at_ns for one in reorder.rest()] == [30, 40]
    assert reorder.rest() == []


def test_followed_lines_that_wait_are_bounded() -> None:
    reorder = Reorder(window_s=1.0, max_held=2)
    for at_ns in range(5):
        reorder.add(line(at_ns), 0.0)
    assert [one.at_ns for one in reorder.due(0.0)] == [0, 1, 2]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1h30m", 5400), ("2d", 172800), ("0s", 0)])
def test_duration(text: str, seconds: int) -> None:
    assert duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "10", "-5s", "5 m", "1m1h", "9" * 30 + "d"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 90s"):
        duration(text)


def test_line_is_shown_with_its_origin() -> None:
    assert shown(Line(AT_NS, W1, 7, "x"), colour=False) == "[1.7] x"
    assert shown(Line(AT_NS, W1, None, "x"), colour=False, time=True) == "10:00:00.500 [1] x"
    assert shown(Line(0, W0, None, "x"), colour=False, time=True) == "[0] x"
    assert shown(Line(AT_NS, W1, 7, "x"), colour=True) == "\x1b[33m[1.7]\x1b[0m x"


# --- logs of several workers -----------------------------------------------------------------------------------------


class Part:
    """What one opening of a log yields, before it ends or fails."""

    def __init__(self, data: bytes, fails: LogsError | None = None) -> None:
        self._data, self._fails = data, fails

    def start(self) -> None:
        """Do nothing."""

    def chunks(self) -> Iterator[bytes]:
        yield self._data
        if self._fails is not None:
            raise self._fails

    def close(self) -> None:
        """Do nothing."""


class Parts:
    """Implements Reader for one log: each look and each opening takes the next answer, and the last one stays."""

    def __init__(self, looks: list[tuple[list[Log], bool] | LogsError], parts: list[Part]) -> None:
        self._looks, self._parts = looks, parts
        self.opened: list[tuple[int | None, int]] = []
        """The tail and the time from which the log was opened."""

    def logs(self) -> tuple[list[Log], bool]:
        look = self._looks[0] if len(self._looks) == 1 else self._looks.pop(0)
        if isinstance(look, LogsError):
            raise look
        return look

    def open(self, log: Log, *, follow: bool, tail: int | None, after_ns: int = 0) -> Part:  # noqa: ARG002
        self.opened.append((tail, after_ns))
        return self._parts[0] if len(self._parts) == 1 else self._parts.pop(0)


def followed(reader: Parts, warn: Callable[[str], None] = print, tail: int | None = None) -> list[str]:
    return [one.text for one in Follower(reader, Choice(), tail, warn, refresh_s=0.02).lines()]


@pytest.mark.parametrize("still_runs", [True, False], ids=["the container runs", "the container ended meanwhile"])
def test_log_whose_connection_broke_goes_on_where_it_was(still_runs: bool) -> None:
    first, second = AT + b"one\n", AT.replace(b":00.5", b":01.5") + b"two\n"
    runs, later = Log("a", W0), Log("a", W0, is_open=still_runs)
    reader = Parts(
        [([runs], False), ([later], False), ([later], False), ([later], True)],
        [Part(first, LogsError("unexpected EOF")), Part(first + second)],
    )
    assert followed(reader) == ["one", "two"]
    assert reader.opened[:2] == [(None, 0), (None, AT_NS)]


def test_follower_outlives_requests_that_fail_for_a_while() -> None:
    said: list[str] = []
    fails = LogsError("The connection was refused.")
    log = Log("a", W0)
    reader = Parts([([log], False), fails, fails, ([log], False), fails, ([log], True)], [Part(AT + b"one\n")])
    assert followed(reader, said.append)[0] == "one"
    assert said == ["The connection was refused. It is tried again for 60 s."] * 2


def test_follower_gives_up_when_requests_have_failed_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_streams, "PATIENCE_S", 0.1)
    reader = Parts([([Log("a", W0)], False), LogsError("The connection was refused.")], [Part(b"one\n")])
    with pytest.raises(LostError, match="refused"):
        followed(reader, lambda _: None)


def test_follower_ends_at_once_where_another_attempt_would_fail_too() -> None:
    reader = Parts([([Log("a", W0)], False), LogsError("The job was deleted.", is_final=True)], [Part(b"one\n")])
    with pytest.raises(LogsError, match="deleted"):
        followed(reader)


class Requests:
    """A reader whose second log cannot be asked for. It notes what is open: a log is before anybody reads it."""

    def __init__(self) -> None:
        self.open_now: list[Requests] = []

    def logs(self) -> tuple[list[Log], bool]:
        return [Log("a", Worker(0)), Log("b", Worker(1))], True

    def open(self, log: Log, **_: Any) -> Requests:
        if log.key == "b":
            raise OSError(errno.EMFILE, "Too many open files")
        return self

    def start(self) -> None:
        self.open_now.append(self)

    def chunks(self) -> Iterator[bytes]:
        yield b""

    def close(self) -> None:
        self.open_now.remove(self)


def test_logs_that_were_asked_for_are_closed_where_another_one_cannot_be_opened() -> None:
    requests = Requests()
    with pytest.raises(LogsError, match="Too many open files"):
        list(read(requests, Choice(), None))
    assert requests.open_now == []

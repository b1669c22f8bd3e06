"""How logs are read for the page: bounded in time and in lines, also if a log does not end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from harness.sample_jobs import NAMESPACE, SampleJobs, resnet
from harness.screenshots import SampleSource
from regroup_cli.page import sources
from regroup_cli.page.sources import Key
from regroup_client.log_lines import Worker
from regroup_client.log_streams import Log, Opened

KEY = Key(NAMESPACE, "resnet50")


@dataclass
class Stuck:
    """Implements Opened: a log of a node that stops within it, unless it is closed before."""

    closed: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        pass

    def chunks(self) -> Iterator[bytes]:
        # Lines come by time, so logs that end are read before one that does not.
        yield b"2026-11-28T%02d:00:00Z begun\n" % (9 if self.closed.is_set() else 10)
        assert self.closed.wait(20), "nobody closes it"

    def close(self) -> None:
        self.closed.set()


@dataclass
class Logs:
    """Implements Reader for logs of which some do not end."""

    stuck: int
    ended: int = 0
    listed: int = 0
    tails: list[int | None] = field(default_factory=list)

    def logs(self) -> tuple[list[Log], bool]:
        self.listed += 1
        return [Log(str(slot), Worker(slot)) for slot in range(self.stuck + self.ended)], False

    def open(self, log: Log, *, follow: bool, tail: int | None, after_ns: int = 0) -> Opened:  # noqa: ARG002
        self.tails.append(tail)
        opened = Stuck()
        if log.worker.slot >= self.stuck:
            opened.closed.set()
        return opened


def tail(monkeypatch: pytest.MonkeyPatch, logs: Logs) -> sources.Tail:
    jobs: Any = SampleJobs([resnet()])
    monkeypatch.setattr(jobs, "logs", lambda *_: logs)
    return sources.tail(SampleSource(jobs), KEY, None)


def test_logs_that_do_not_end_are_closed_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LOGS_S", 0.1)
    found = tail(monkeypatch, Logs(stuck=2, ended=3))
    assert found.late == "The logs of 2 workers were not read to their end within 0.1 s."
    assert [line.text for line in found.lines] == ["begun"] * 5


def test_logs_that_end_are_listed_once_and_share_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    logs = Logs(stuck=0, ended=4)
    assert tail(monkeypatch, logs).late == ""
    assert logs.listed == 1
    assert logs.tails == [sources.MAX_LINES // 4] * 4


def test_a_log_that_is_opened_after_the_end_is_closed_at_once() -> None:
    bounded = sources._Bounded(Logs(stuck=1))
    bounded.close()
    opened = bounded.open(Log("0", Worker(0)), follow=False, tail=1)
    assert list(opened.chunks())
    assert bounded.whole == 0

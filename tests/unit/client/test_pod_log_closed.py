"""A log of a pod that is closed before it is asked for, or while it is."""

from __future__ import annotations

from typing import Any

from regroup_client.pod_logs import _PodLog


class Asked:
    """A request whose answer never comes."""

    def __init__(self) -> None:
        self.closed = 0

    def stream(self) -> Any:
        raise AssertionError("it would wait for an answer")

    def close(self) -> None:
        self.closed += 1


def test_a_closed_log_is_not_asked_for() -> None:
    asked: list[Asked] = []

    def ask() -> Any:
        asked.append(Asked())
        return asked[-1]

    log = _PodLog(ask)
    log.close()
    log.start()
    assert list(log.chunks()) == []
    assert not asked


def test_a_log_that_is_closed_while_it_is_asked_for_is_not_waited_for() -> None:
    asked = Asked()

    def ask() -> Any:
        log.close()
        return asked

    log = _PodLog(ask)
    assert list(log.chunks()) == []
    assert asked.closed == 1

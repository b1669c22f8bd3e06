"""The thread that listens to the agent: what ends it ends the process."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from regroup.generation.watcher import Watcher
from regroup.protocol import local
from regroup.protocol.document import FORCED
from regroup.protocol.document import PLANNED as PLANNED_KIND

NEWER = local.Assignment(2, "uid", FORCED, True, 0, 1, 0, 1, 0, "pod", "127.0.0.1", 1, "", False, "digest")


class Stuck:
    """A target that cannot be aborted."""

    waits_since_s = None

    def abort(self) -> None:
        raise RuntimeError("can't start new thread")


def test_process_that_cannot_leave_a_generation_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Else it would hear nothing more, and hang in the collective that it should have left."""
    killed = threading.Event()
    signals: list[tuple[int, int]] = []

    def kill(pid: int, number: int) -> None:
        signals.append((pid, number))
        killed.set()

    monkeypatch.setattr(os, "kill", kill)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent"))
        listener.listen()
        watcher = Watcher(str(tmp_path / "agent"), local.Attach(1, 0, 1))
        agent, _ = listener.accept()
        watcher.watch(1, Stuck(), settled=True)
        agent.sendall(local.encode(NEWER))
        assert killed.wait(10)
        watcher.close()
        agent.close()
    assert signals == [(os.getpid(), signal.SIGKILL)]
    assert "can't start new thread" in capfd.readouterr().err


PLANNED = replace(NEWER, number=3, kind=PLANNED_KIND)
END = local.FinishLocally(1, 10, 0, 1)


class Group:
    """A group that counts how often it was aborted."""

    waits_since_s = None

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[tuple[Watcher, socket.socket]]:
    """A watcher, and the agent's end of its socket."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent"))
        listener.listen()
        watcher = Watcher(str(tmp_path / "agent"), local.Attach(1, 0, 1, rehearses=True))
        agent, _ = listener.accept()
        yield watcher, agent
        watcher.close()
        agent.close()


Talk = tuple[Watcher, socket.socket]


@pytest.mark.parametrize("before", [(), (PLANNED,), (NEWER,)], ids=["nothing else", "a planned change", "a forced one"])
def test_process_outside_of_a_group_hears_the_end_whatever_was_announced_before(
    talk: Talk, before: tuple[local.Assignment, ...]
) -> None:
    watcher, agent = talk
    agent.sendall(b"".join(local.encode(message) for message in (*before, END)))
    watcher.wait_forced_above(9)  # returns once the end was heard
    assert watcher.wait_above(1) == END


def test_stop_ends_a_process_that_was_told_to_leave_its_loop(talk: Talk) -> None:
    watcher, agent = talk
    agent.sendall(local.encode(local.StopLocally("Failed")) + local.encode(END))
    watcher.wait_forced_above(9)
    assert watcher.wait_above(1) == local.StopLocally("Failed")


@pytest.mark.parametrize("settled", [True, False], ids=["a group that has finished", "one that still forms"])
def test_end_aborts_only_what_still_forms(talk: Talk, settled: bool) -> None:
    """A generation that was announced as the last step was committed never comes to stand: its other ranks have left."""
    watcher, agent = talk
    group = Group()
    watcher.watch(1, group, settled=settled)
    agent.sendall(local.encode(END))
    watcher.wait_forced_above(9)
    assert group.aborted.wait(0.0 if settled else 10.0) is not settled


@pytest.mark.parametrize(
    ("word", "may"),
    [
        pytest.param(local.Answer("rehearse", 0, True, 0), True, id="the agent says so"),
        pytest.param(END, False, id="all steps are committed"),
        pytest.param(local.StopLocally("Failed"), False, id="the job is stopped"),
    ],
)
def test_rehearsal_waits_for_the_agents_word(talk: Talk, word: Any, may: bool) -> None:
    watcher, agent = talk
    agent.sendall(local.encode(word))
    assert watcher.may_rehearse() is may

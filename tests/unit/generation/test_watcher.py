"""The thread that listens to the agent: what ends it ends the process."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from regroup.generation.watcher import Watcher
from regroup.protocol import local
from regroup.protocol.document import FORCED

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

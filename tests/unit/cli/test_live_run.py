"""The terminal of `regroup run`: plain lines with times, or workers' lines above a screen."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest

from regroup_cli import live_run
from regroup_cli.live_run import Lines, Live
from regroup_cli.screen import Screen
from regroup_client.log_lines import Worker


def job(version: int, state: str = "Running", step: int = 1) -> dict[str, Any]:
    status = {
        "summary": {"state": state, "ready": "1/1", "step": str(step)},
        "membership": {"generation": 1, "worldSize": 1, "members": "0"},
    }
    return {"metadata": {"name": "local", "resourceVersion": str(version)}, "status": status}


def test_lines_have_times_and_come_at_most_every_two_seconds() -> None:
    said: list[str] = []
    now_s = [0.0]
    out = Lines(said.append, lambda: now_s[0])
    out.show({"metadata": {"name": "local"}, "status": {}})
    for second, state, step in ((0, "Running", 1), (1, "Running", 2), (2, "Running", 2), (3, "Succeeded", 3)):
        now_s[0] = second
        out.show(job(second, state, step))
    assert [re.sub(r"^\d\d:\d\d:\d\d", "TIME", line).split("  generation")[0] for line in said] == [
        "TIME  Running  1/1 ready",
        "TIME  Running  1/1 ready",
        "TIME  Succeeded  1/1 ready",
    ]


def live(out: io.StringIO) -> Live:
    return Live(Screen(out), in_colour=False)


def test_lines_of_workers_come_above_the_screen() -> None:
    out = io.StringIO()
    shown = live(out)
    shown.show(job(1))
    drawing = out.getvalue().removeprefix("\x1b[?25l")
    assert drawing.startswith("local  Running  1/1 ready\nstep 1\n")
    height = drawing.count("\n")
    out.seek(0)
    out.truncate()
    shown.write(1, Worker(0), b"half")
    assert out.getvalue() == "", "a line is written when it is whole"
    shown.write(1, Worker(0), b" a line\x1b[2J\n")
    assert out.getvalue() == f"\x1b[{height}A\r\x1b[J[0.0] half a line\n{drawing}"
    out.seek(0)
    out.truncate()
    shown.show(job(1))
    assert out.getvalue() == "", "nothing has changed"
    shown.close()
    assert out.getvalue().endswith("\x1b[?25h")


@pytest.mark.parametrize("plain", [True, False])
def test_pipe_gets_lines(plain: bool) -> None:
    assert isinstance(live_run.terminal(print, plain=plain), Lines)

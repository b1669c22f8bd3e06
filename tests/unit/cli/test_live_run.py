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


def test_progress_bar_is_shown_while_it_is_drawn() -> None:
    out, now_s = io.StringIO(), [0.0]
    shown = Live(Screen(out), in_colour=False, clock=lambda: now_s[0])
    shown.show(job(1))
    shown.write(1, Worker(0), b"10%\r")
    for second, data in ((0, b""), (1, b"20%\r"), (6, b""), (6.5, b"30%\r\n")):
        shown.write(1, Worker(0), data)
        now_s[0] = second
        shown.show(job(1))
    assert re.findall(r"\[0\.0\] (\S+)", out.getvalue()) == ["10%", "20%", "30%"]


def test_nothing_is_kept_of_a_worker_whose_lines_are_whole() -> None:
    shown = live(io.StringIO())
    for attempt in range(3):
        shown.write(1, Worker(0, attempt), b"half")
        shown.write(1, Worker(0, attempt), b" a line\n")
    assert not shown._cutters


@pytest.mark.parametrize("plain", [True, False])
def test_pipe_gets_lines(plain: bool) -> None:
    assert isinstance(live_run.terminal(print, plain=plain), Lines)

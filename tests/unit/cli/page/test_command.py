"""The end of the command `ui`."""

from __future__ import annotations

import subprocess
import sys

from regroup_cli.streams import TERMINATED

KILLED_IN_A_REQUEST = """\
import asyncio, os, signal, sys
from types import SimpleNamespace
from regroup_cli.page import command
from regroup_cli.streams import guarded

requests = []

async def request():
    os.kill(os.getpid(), signal.SIGTERM)

async def close():
    print("closed")

async def start(*_):
    requests.append(asyncio.create_task(request()))
    return SimpleNamespace(page=SimpleNamespace(address=str), close=close)

command.start = start
args = SimpleNamespace(title="here"), SimpleNamespace(port=0), lambda _: None
sys.exit(guarded("regroup", lambda: command.run(*args)))
"""


def test_sigterm_ends_the_page_although_a_request_is_served_when_it_comes() -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_IN_A_REQUEST], timeout=30, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (TERMINATED, "closed\n", "")

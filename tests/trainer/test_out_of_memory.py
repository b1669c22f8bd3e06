"""The kernel kills a trainer for its memory: a real cgroup, a real kill, and the agent says so with the numbers."""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from _regroup_agent.memory import CGROUPS
from harness.polling import until
from regroup.protocol import wire
from tests.trainer.agent_edge import OperatorEdge, Worker, generation

LIMIT_BYTES = 160 << 20
EATS = """
import os, subprocess, sys
hog = "held = []\\nwhile True: held.append(bytearray(8 << 20))"
if sys.argv[1] == "itself":
    exec(hog)
subprocess.run([sys.executable, "-c", hog])
sys.exit("DataLoader worker was killed")
"""


@pytest.fixture
def cgroup(tmp_path: Path) -> Iterator[Path]:
    """A cgroup with a memory limit, where one process is killed and not all of them."""
    v2 = (Path(CGROUPS) / "cgroup.controllers").exists()
    made = Path(CGROUPS, "" if v2 else "memory", f"regroup-test-{os.getpid()}-{tmp_path.name}")
    made.mkdir()
    (made / ("memory.max" if v2 else "memory.limit_in_bytes")).write_text(str(LIMIT_BYTES))
    yield made
    for pid in (made / "cgroup.procs").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    until(lambda: not (made / "cgroup.procs").read_text(), "the cgroup's processes are gone")
    made.rmdir()


@pytest.mark.root
@pytest.mark.parametrize(
    ("who", "code", "sentence"),
    [
        ("itself", -9, "Process 0 was killed for lack of memory (OOMKilled: limit 160 MiB, at most 160 MiB used)."),
        (
            "helper",
            1,
            "Process 0 ended with exit code 1 after a process that it had started was killed for lack of memory",
        ),
    ],
)
def test_process_that_is_killed_for_its_memory_is_told_with_the_numbers(
    operator: OperatorEdge, worker: Worker, cgroup: Path, who: str, code: int, sentence: str
) -> None:
    script, python = worker.directory / "train.py", worker.directory / "python"
    script.write_text(EATS)
    # As the kubelet does: the agent is in its container's cgroup from its first instruction.
    python.write_text(f'#!/bin/sh\necho $$ > {cgroup}/cgroup.procs && exec {sys.executable} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    worker.python = str(python)
    worker.start(sys.executable, "-u", str(script), who)
    port = operator.wait_body(wire.Hello).report.store_port
    operator.wait_stream()
    operator.tell(wire.Welcome("Unknown"))
    operator.tell(generation(1, port)[0])
    fault = operator.wait_body(wire.Fault).body
    assert (fault.cause, fault.exit_code, fault.reason) == ("exit", code, "OOMKilled")
    assert fault.message.startswith(sentence), fault.message
    assert fault.detail == "limit 160 MiB, at most 160 MiB used"

"""Nobody reads the container's log: the agent goes on, and says what it had to drop. Real agent, real trainer, a full pipe."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from regroup.protocol import wire
from regroup.protocol.state import Phase
from tests.trainer.agent_edge import OperatorEdge, Worker, generation

LINES = 80_000
"""Of 106 bytes each: twice as much as the agent keeps."""


@dataclass
class Pipe:
    read_fd: int
    write_fd: int
    size: int
    """Bytes that fill it."""


@pytest.fixture
def full_pipe() -> Iterator[Pipe]:
    read_fd, write_fd = os.pipe()
    size = 0
    os.set_blocking(write_fd, False)
    try:
        while True:
            size += os.write(write_fd, b"." * 4096)
    except BlockingIOError:
        os.set_blocking(write_fd, True)  # as a container's is
    yield Pipe(read_fd, write_fd, size)
    os.close(read_fd)


def read_all(fd: int) -> bytes:
    parts = []
    while part := os.read(fd, 1 << 16):
        parts.append(part)
    return b"".join(parts)


def test_agent_whose_log_nobody_reads_answers_pings_and_tells_what_it_dropped(
    operator: OperatorEdge, worker: Worker, full_pipe: Pipe
) -> None:
    worker.log_fd = full_pipe.write_fd
    worker.start_raw(f"noise={LINES}")
    os.close(full_pipe.write_fd)
    operator.wait_body(wire.Hello)
    operator.wait_stream()
    operator.tell(wire.Welcome("Session"))
    worker.wait_noted("noise")  # the trainer is not held up, either: the agent reads what it writes
    ready = operator.wait_phase(Phase.READY)
    command, document = generation(1, ready.report.store_port)
    operator.tell(command)
    operator.tell(wire.DocumentCommand(document))
    operator.wait_body(wire.Progress)
    before = len(operator.heard)
    operator.tell(wire.Ping())
    operator.wait_body(wire.Changed, after=before)

    with ThreadPoolExecutor() as pool:  # somebody reads again
        text = pool.submit(read_all, full_pipe.read_fd)
        operator.tell(wire.Stop("Complete"))
        assert worker.agent is not None
        assert worker.agent.wait(30) == 0
        log = text.result(30)[full_pipe.size :].decode()
    dropped = re.findall(r"^regroup: (\d+) lines dropped, because the log was not read\.$", log, re.M)
    kept = [int(number) for number in re.findall(r"^noise (\d+)$", log, re.M)]
    assert kept == sorted(kept)
    assert len(kept) + sum(map(int, dropped)) >= LINES, "lines are missing that were not counted"
    assert 0 < len(kept) < LINES

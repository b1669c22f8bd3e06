"""The lease between real processes: never two leaders, quick hand-over, a stopped leader that ends when it wakes, a busy one that
stays, and one that hangs and ends."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from harness.polling import until
from regroup_operator.kube.client import Client
from regroup_operator.kube.lease import Elector, LeaseTimes
from regroup_operator.kube.microtime import micro_time
from tests.api.conftest import Api

CANDIDATE = """
import asyncio, os, signal, sys, time
from regroup_operator.kube.client import Client
from regroup_operator.kube.lease import LeaseTimes, boot_clock
from regroup_operator.kube.lease_thread import LeaseThread

def compute(seconds):
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        pass

def hang():
    os.set_blocking(2, False)
    try:
        while True:
            os.write(2, b"x" * 4096)  # and nobody reads the log
    except BlockingIOError:
        os.set_blocking(2, True)
    os.write(2, b"x" * 4096)

async def main(kubeconfig, namespace, name, out, duration, renew, retry, busy, silence):
    times = LeaseTimes(int(duration), float(renew), float(retry))
    elector = LeaseThread(
        lambda: Client.connect(kubeconfig), namespace, "regroup", name, times, silence_s=float(silence)
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, compute, busy)
    loop.add_signal_handler(signal.SIGUSR2, hang)
    loop.add_signal_handler(signal.SIGHUP, time.sleep, 3600)

    async def log():
        with open(out, "a") as file:
            while True:
                if elector.leading:
                    file.write(f"{boot_clock()}\\n")
                    file.flush()
                await asyncio.sleep(0.02)

    async def lead():
        await elector.acquire()
        await elector.hold()

    tasks = [asyncio.create_task(log()), asyncio.create_task(lead())]
    await stop.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await elector.release()

asyncio.run(main(*sys.argv[1:]))
"""
DEADLINE_S = 30.0
SHORT, LONG = ("3", "2", "0.3"), ("20", "15", "0.3")
"""Duration, renew deadline, pause between two tries, in seconds. LONG: waiting the lease out cannot be taken for a hand-over."""
BUSY_S, SILENCE_S = 5.0, 2.0
"""How long a candidate's event loop computes when it is told to: longer than a SHORT lease. How long it may be silent: in the tests
that are about it, else for longer than they take."""


class Candidate:
    """A process that wants to lead and writes down each moment in which it believes that it does."""

    def __init__(
        self, api: Api, namespace: str, name: str, directory: Path, times: Sequence[str], silence_s: float = 60.0
    ) -> None:
        self.log = directory / name
        self.log.touch()
        arguments = [str(api.kubeconfig), namespace, name, str(self.log), *times, str(BUSY_S), str(silence_s)]
        self.process = subprocess.Popen([sys.executable, "-c", CANDIDATE, *arguments], stderr=subprocess.PIPE)

    def moments(self) -> list[float]:
        return [float(line) for line in self.log.read_text().splitlines()]

    def leads(self) -> bool:
        """Whether it said so in the last half second."""
        moments = self.moments()
        return bool(moments) and time.clock_gettime(time.CLOCK_BOOTTIME) - moments[-1] < 0.5

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


def interleaved(first: Candidate, second: Candidate) -> bool:
    """Whether the two ever led at the same time: then their moments are not two separate spans."""
    owners = [owner for _, owner in sorted([(m, 1) for m in first.moments()] + [(m, 2) for m in second.moments()])]
    return sum(a != b for a, b in itertools.pairwise(owners)) > 1


@pytest.fixture
def pair(
    api: Api, namespace: str, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[Candidate, Candidate]]:
    """A leader, and one that waits; their lease is SHORT, or of the parameter, as is how long the leader may be silent."""
    times, silence_s = getattr(request, "param", (SHORT, 60.0))
    first = Candidate(api, namespace, "first", tmp_path, times, silence_s)
    until(first.leads, "the first one leads")
    second = Candidate(api, namespace, "second", tmp_path, times)
    yield first, second
    for candidate in (first, second):
        if candidate.process.poll() is None:
            candidate.process.kill()
        candidate.process.wait()
        assert candidate.process.stderr is not None
        candidate.process.stderr.close()


@pytest.mark.parametrize("pair", [(LONG, 60.0)], ids=["long lease"], indirect=True)
def test_leader_that_ends_hands_over_at_once(pair: tuple[Candidate, Candidate]) -> None:
    first, second = pair
    first.signal(signal.SIGTERM)
    assert first.process.wait(DEADLINE_S) == 0
    ended_s = time.monotonic()
    until(second.leads, "the second one leads")
    assert time.monotonic() - ended_s < float(LONG[0]) / 2, "a released lease is not waited out"
    assert not interleaved(first, second)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("me", "", id="a renewal took effect although its answer was not waited for"),
        pytest.param("other", "other", id="another one has taken it"),
    ],
)
def test_lease_that_changed_since_it_was_seen_is_released_if_it_is_ours(
    api: Api, namespace: str, before: str, after: str
) -> None:
    async def lead_and_release() -> None:
        client = await Client.connect(str(api.kubeconfig))
        elector = Elector(client, namespace, "regroup", "me", LeaseTimes(20, 15.0, 0.3))
        await elector.acquire()
        change = json.dumps({"spec": {"holderIdentity": before, "renewTime": micro_time()}})
        api.done("patch", "lease", "regroup", f"--namespace={namespace}", "--type=merge", f"--patch={change}")
        await elector.release()
        await client.close()

    asyncio.run(lead_and_release())
    lease = api.get("lease", "regroup", f"--namespace={namespace}")
    assert lease["spec"].get("holderIdentity", "") == after


def test_leader_that_is_killed_is_waited_out(pair: tuple[Candidate, Candidate]) -> None:
    first, second = pair
    first.signal(signal.SIGKILL)
    first.process.wait(DEADLINE_S)
    until(second.leads, "the second one leads")
    assert second.moments()[0] - first.moments()[-1] > 1.0, "the first one could still have been there"
    assert not interleaved(first, second)


def test_leader_stopped_past_its_lease_ends_when_it_wakes(pair: tuple[Candidate, Candidate]) -> None:
    first, second = pair
    first.signal(signal.SIGSTOP)
    until(second.leads, "the second one leads")
    first.signal(signal.SIGCONT)
    assert first.process.wait(DEADLINE_S) == 1
    until(second.leads, "the second one goes on leading")
    assert not interleaved(first, second), "it led again after it woke"


def test_leader_whose_event_loop_is_busy_past_its_lease_keeps_it(pair: tuple[Candidate, Candidate]) -> None:
    first, second = pair
    first.signal(signal.SIGUSR1)

    def is_back() -> bool:
        assert first.process.poll() is None, "it ended"
        return any(after - before > BUSY_S for before, after in itertools.pairwise(first.moments()))

    until(is_back, "the first one has computed, and leads")
    assert second.moments() == []
    first.signal(signal.SIGTERM)
    assert first.process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("pair", [(SHORT, SILENCE_S)], ids=["short silence"], indirect=True)
@pytest.mark.parametrize(
    ("how", "is_said"),
    [
        pytest.param(signal.SIGHUP, True, id="it never comes back"),
        pytest.param(signal.SIGUSR2, False, id="it writes a log that nobody reads"),
    ],
)
def test_leader_whose_event_loop_hangs_ends(pair: tuple[Candidate, Candidate], how: int, is_said: bool) -> None:
    first, second = pair
    first.signal(how)
    assert first.process.wait(DEADLINE_S) == 1
    assert first.process.stderr is not None
    said = first.process.stderr.read().decode()
    assert ("The event loop has not begun a turn for 2 s (at " in said) == is_said, said
    until(second.leads, "the second one leads")
    assert not interleaved(first, second)

"""The lease between real processes: never two leaders, quick hand-over, and a stopped leader that ends when it wakes."""

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
import asyncio, signal, sys
from regroup_operator.kube.client import Client
from regroup_operator.kube.lease import Elector, LeaseTimes, boot_clock

async def main(kubeconfig, namespace, name, out, duration, renew, retry):
    client = await Client.connect(kubeconfig)
    elector = Elector(client, namespace, "regroup", name, LeaseTimes(int(duration), float(renew), float(retry)))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

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
    await client.close()

asyncio.run(main(*sys.argv[1:]))
"""
DEADLINE_S = 30.0
SHORT, LONG = ("3", "2", "0.3"), ("20", "15", "0.3")
"""Duration, renew deadline, pause between two tries, in seconds. LONG: waiting the lease out cannot be taken for a hand-over."""


class Candidate:
    """A process that wants to lead and writes down each moment in which it believes that it does."""

    def __init__(self, api: Api, namespace: str, name: str, directory: Path, times: Sequence[str]) -> None:
        self.log = directory / name
        self.log.touch()
        self.process = subprocess.Popen(
            [sys.executable, "-c", CANDIDATE, str(api.kubeconfig), namespace, name, str(self.log), *times]
        )

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
    """A leader, and one that waits; their lease is SHORT, or the parameter."""
    times = getattr(request, "param", SHORT)
    first = Candidate(api, namespace, "first", tmp_path, times)
    until(first.leads, "the first one leads")
    second = Candidate(api, namespace, "second", tmp_path, times)
    yield first, second
    for candidate in (first, second):
        if candidate.process.poll() is None:
            candidate.process.kill()
        candidate.process.wait()


@pytest.mark.parametrize("pair", [LONG], ids=["long lease"], indirect=True)
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

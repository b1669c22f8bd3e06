"""The agents' observers on real kernels: a hundred machines in network namespaces on one switch, with pauses and cuts.

The machines that are observed have no process that could answer: their kernels do, and the one process that holds their ports is
stopped throughout. Their ports on the switch are disabled and enabled, which drops every packet and nothing else.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

import pytest

from _regroup_agent.prober import QuietPort
from cluster import host
from regroup.protocol.wire import SILENT_S, SUSPECT_S

NUM_MACHINES, NUM_OBSERVERS, NUM_PAUSES = 100, 2, 1000
PAUSE_S = 1.0
LATE_S = 0.2
"""A pause that lasted so much longer, because this machine was busy, is not the one that was asked for, and does not count."""
PREFIX = f"rgob{os.getpid() % 10000}"
SWITCH = f"{PREFIX}-sw"
DISABLED, FORWARDING = 0, 3
"""States of a bridge's port."""
SEEN_S = 2.2
"""1.75 s, and what a busy machine adds."""


def run(*words: str, text: str = "") -> None:
    done = subprocess.run(words, input=text, capture_output=True, text=True)
    assert done.returncode == 0, f"`{' '.join(words)}` failed: {done.stderr}"


def namespace(number: int) -> str:
    return f"{PREFIX}-{number}"


def address(number: int) -> str:
    return f"10.77.{number // 200}.{number % 200 + 1}"


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    """A switch, and machines with a cable to it. All of it is inside namespaces of this test's own, which are removed."""
    host.check()
    numbers = range(NUM_MACHINES + NUM_OBSERVERS)
    names = [SWITCH, *map(namespace, numbers)]
    try:
        run("ip", "-batch", "-", text="".join(f"netns add {name}\n" for name in names))
        cables = "".join(
            f"link add p{n} type veth peer name eth0 netns {namespace(n)}\nlink set p{n} master br0 up\n"
            for n in numbers
        )
        run("ip", "-n", SWITCH, "-batch", "-", text=f"link add br0 type bridge\nlink set br0 up\n{cables}")
        for n in numbers:
            text = f"link set lo up\naddr add {address(n)}/16 dev eth0\nlink set eth0 up\n"
            run("ip", "-n", namespace(n), "-batch", "-", text=text)
        yield
    finally:
        subprocess.run(
            ["ip", "-force", "-batch", "-"],
            input="".join(f"netns del {name}\n" for name in names),
            capture_output=True,
            text=True,
        )


def hold_ports(out: Connection) -> None:
    """Bind a quiet port on every machine that is observed, tell which, and do nothing more."""
    libc, ports = ctypes.CDLL(None, use_errno=True), []
    for number in range(NUM_MACHINES):
        with Path("/run/netns", namespace(number)).open() as file:
            assert libc.setns(file.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
        ports.append(QuietPort(address(number)))
    out.send([port.port for port in ports])
    signal.pause()


@contextmanager
def ports() -> Iterator[list[int]]:
    """The machines' ports, held by a process that is stopped."""
    here, there = multiprocessing.Pipe()
    holder = multiprocessing.get_context("fork").Process(target=hold_ports, args=(there,), daemon=True)
    holder.start()
    try:
        assert here.poll(60)
        found: list[int] = here.recv()
        assert holder.pid is not None
        os.kill(holder.pid, signal.SIGSTOP)
        yield found
    finally:
        holder.kill()
        holder.join()


class ObserverProcess:
    """What one observer says, as it says it."""

    def __init__(self, number: int, observed: list[str]) -> None:
        command = [
            "ip",
            "netns",
            "exec",
            namespace(number),
            sys.executable,
            "-m",
            "tests.e2e.observing_process",
            *observed,
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.lines: list[dict[str, float | str]] = []
        assert self._process.stdout is not None
        assert json.loads(self._process.stdout.readline())["uid"] == "", "it says first that it has heard everybody"
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.lines.extend(map(json.loads, self._process.stdout))

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def levels(self, level: float, since_s: float) -> dict[str, float]:
        """Return when this level was first said since a time, by machine."""
        found: dict[str, float] = {}
        for line in self.lines:
            if line["level"] == level and float(line["at_s"]) >= since_s:
                found.setdefault(str(line["uid"]), float(line["at_s"]))
        return found


@pytest.fixture
def observers(network: None) -> Iterator[list[ObserverProcess]]:  # noqa: ARG001
    """Two observers of all machines, each on a machine of its own."""
    found: list[ObserverProcess] = []
    with ports() as held:
        observed = [f"m{number},{address(number)},{port}" for number, port in enumerate(held)]
        try:
            found += [ObserverProcess(NUM_MACHINES + place, observed) for place in range(NUM_OBSERVERS)]
            yield found
        finally:
            for one in found:
                one.end()


def switch(state: int, numbers: range | list[int]) -> tuple[float, float]:
    """Set the switch's ports of these machines; return when that began and ended."""
    began_s = time.monotonic()
    run("bridge", "-n", SWITCH, "-batch", "-", text="".join(f"link set dev p{n} state {state}\n" for n in numbers))
    return began_s, time.monotonic()


def test_thousand_pauses_of_a_second_are_no_silence_and_a_cut_is(observers: list[ObserverProcess]) -> None:
    rng, machines = random.Random(1), range(NUM_MACHINES)
    began_s, num_pauses, lasted = time.monotonic(), 0, list[float]()
    while num_pauses < NUM_PAUSES:
        assert len(lasted) < 3 * NUM_PAUSES // NUM_MACHINES, (
            f"this machine is too busy for pauses of a second: {lasted}"
        )
        off_s, all_off_s = switch(DISABLED, machines)
        time.sleep(max(0.0, all_off_s + PAUSE_S - time.monotonic()))
        _, on_s = switch(FORWARDING, machines)
        lasted.append(round(on_s - off_s, 3))
        time.sleep(rng.uniform(0.4, 0.9))  # an attempt is answered, and the next pause falls elsewhere between two
        if on_s - off_s <= PAUSE_S + LATE_S:
            num_pauses += NUM_MACHINES
            for one in observers:
                assert not one.levels(SILENT_S, off_s), f"a pause of {on_s - off_s:.3f} s is taken for a loss"
    suspected = [len(one.levels(SUSPECT_S, began_s)) for one in observers]
    assert suspected == [NUM_MACHINES] * NUM_OBSERVERS, "the pauses were not even noticed"
    print(
        f"{num_pauses} pauses of {PAUSE_S} s (from the first port to the last {lasted} s): no silence of {SILENT_S} s"
    )

    cut_s, all_cut_s = switch(DISABLED, machines)
    deadline_s = all_cut_s + SEEN_S + 5.0
    while time.monotonic() < deadline_s and not all(len(o.levels(SILENT_S, cut_s)) == NUM_MACHINES for o in observers):
        time.sleep(0.02)
    seen = sorted(at_s - cut_s for one in observers for at_s in one.levels(SILENT_S, cut_s).values())
    assert len(seen) == NUM_MACHINES * NUM_OBSERVERS, (
        f"only {len(seen)} of the machines that are cut off are said to be silent"
    )
    print(f"a cut is said after {seen[0]:.2f} to {seen[-1]:.2f} s, half of them within {seen[len(seen) // 2]:.2f} s")
    assert seen[0] >= SILENT_S - (all_cut_s - cut_s) - 0.01
    assert seen[int(0.9 * len(seen))] <= SEEN_S

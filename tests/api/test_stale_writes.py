"""A leader that is stopped in the middle of a write, and wakes up when another one leads: its write changes nothing, and it ends.

The test keeps one request of the first operator back, on its way to the API server, until the second operator has led for a while.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest

from harness.replica import Replica
from tests.api.conftest import Api
from tests.api.edge import Held
from tests.api.trained import JOB, Kubelet, World, is_pod, is_status, trained


@pytest.fixture(scope="module")
def running(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, Kubelet]]:
    with trained(api, tmp_path_factory.mktemp("stale"), "stale-writes") as both:
        yield both


@pytest.mark.parametrize(
    "woken_first", [True, False], ids=["it wakes while the write is under way", "the answer waits for it"]
)
def test_generation_that_a_stopped_leader_was_writing_never_exists(
    running: tuple[World, Kubelet], woken_first: bool
) -> None:
    world, kubelet = running
    wire, before = world.stand_by(), world.trains(2)["generation"]
    held = wire.hold(lambda r: is_status(r) and json.loads(r.body)["status"]["membership"]["generation"] > before)
    kubelet.kill_a_trainer()
    assert held.arrived.wait(20), "the leader wrote no generation without the dead worker"
    assert held.request is not None
    stale = json.loads(held.request.body)["status"]["membership"]
    stopped = world.take_over()
    after = world.trains(2, before)["generation"]
    if woken_first:
        _wakes_and_ends(stopped)
    assert _let_go(held) == (409, "Conflict")
    if not woken_first:
        _wakes_and_ends(stopped)
    assert world.trains(2)["generation"] >= after
    numbers = [membership["generation"] for membership in world.memberships()]
    assert stale["generation"] in numbers, "the other leader has given the number to a list of its own"
    assert numbers == sorted(numbers), "the status went back"
    uids = {(membership["generation"], membership["uid"]) for membership in world.memberships()}
    assert len(uids) == len(set(numbers)), f"a number was given twice: {sorted(uids)}"
    assert stale["uid"] not in {uid for _, uid in uids}, "what the stopped leader was writing has been written"
    documents = {(note["generation"], note["digest"]) for note in kubelet.noted("assignment")}
    assert len(documents) == len({number for number, _ in documents}), "workers got two documents of one number"


def test_pod_that_a_stopped_leader_was_making_is_made_once(running: tuple[World, Kubelet]) -> None:
    world, kubelet = running
    wire = world.stand_by()
    world.trains(2)
    held = wire.hold(is_pod)
    world.scale(3)
    assert held.arrived.wait(20), "the leader made no third pod"
    stopped = world.take_over()
    kubelet.run(3)
    world.trains(3)
    _wakes_and_ends(stopped)
    assert _let_go(held) == (409, "AlreadyExists")
    assert len(kubelet.pods()) == 3
    assert world.pods_made() == {f"{JOB}-worker-{slot}-0": 1 for slot in range(3)}


def _wakes_and_ends(stopped: Replica) -> None:
    """Let a stopped leader go on: it has to end by itself at once, with the lease as the reason."""
    stopped.process.send_signal(signal.SIGCONT)
    assert stopped.process.wait(5) == 1
    assert "lease" in stopped.log.read_text().splitlines()[-1]


def _let_go(held: Held) -> tuple[int, str]:
    """Let the request through, whether or not its sender still lives; return the API server's status and reason."""
    held.let_go()
    assert held.answered.wait(20)
    assert held.request is not None
    return held.request.status, json.loads(held.request.answer)["reason"]

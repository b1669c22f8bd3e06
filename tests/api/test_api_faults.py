"""The API server and the network to it fail in every way that they have: the job ends up where it would have been.

Each test lets something fail between the leader and the API server while a trainer is killed and the job grows and shrinks. After
it the same workers train, each slot has one pod, no number was given to two lists, and the one failure is counted once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness.polling import until
from regroup_operator.kube.client import WATCH_SILENCE_S
from tests.api.conftest import Api
from tests.api.edge import Edge, Passed
from tests.api.replicas import ca_of
from tests.api.trained import Kubelet, World, is_pod, is_status, trained

LONG = bool(os.environ.get("REGROUP_LONG"))


@pytest.fixture(scope="module")
def running(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, Kubelet]]:
    with trained(api, tmp_path_factory.mktemp("faults"), "api-faults") as both:
        yield both


def is_lease(request: Passed) -> bool:
    return "/leases/" in request.path


def is_write(request: Passed) -> bool:
    """Whether it changes the job or its pods."""
    return is_status(request) or is_pod(request) or (request.method == "DELETE" and "/pods/" in request.path)


def is_deletion(request: Passed) -> bool:
    return request.method == "DELETE" and "/pods/" in request.path


def watches(what: str) -> Callable[[Passed], bool]:
    return lambda request: request.is_watch and request.path.endswith(f"/{what}")


def reads(request: Passed) -> bool:
    return request.method == "GET" and not request.is_watch and not is_lease(request)


def any_call(request: Passed) -> bool:
    """Whatever is not the lease: a leader that cannot renew it ends, which is another test."""
    return not is_lease(request) and not request.is_watch


FAULTS: dict[str, tuple[Callable[[Passed], bool], dict[str, Any]]] = {
    "409 to status writes": (is_status, {"how": "status", "status": 409, "times": 3}),
    "429 with Retry-After": (any_call, {"how": "status", "status": 429, "times": 6}),
    "500 to writes": (is_write, {"how": "status", "status": 500, "times": 4}),
    "503 to everything": (any_call, {"how": "status", "status": 503, "times": 10}),
    "answers of status writes are lost": (is_status, {"how": "lost", "times": 3}),
    "answers of creations are lost": (is_pod, {"how": "lost", "times": 1}),
    "answers of deletions are lost": (is_deletion, {"how": "lost", "times": 1}),
    "connections break before writes": (is_write, {"how": "reset", "times": 4}),
    "a status write is never answered": (is_status, {"how": "never", "times": 1}),
    "a creation is never answered": (is_pod, {"how": "never", "times": 1}),
}


_HANGS = pytest.mark.skipif(not LONG, reason="REGROUP_LONG: a request has 30 s until it is given up")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=_HANGS) if given["how"] == "never" else n for n, (_, given) in FAULTS.items()]
)
def test_job_goes_on_whatever_the_api_server_answers(running: tuple[World, Kubelet], name: str) -> None:
    fits, given = FAULTS[name]
    world, kubelet = running
    faults = []
    goes_on(world, kubelet, lambda wire: faults.append(wire.fail(fits, **given)))
    assert faults[0].hit.is_set(), "nothing has failed"


@pytest.mark.parametrize("what", ["pods", "distributedtrainingjobs"])
def test_watch_that_has_expired_is_begun_anew(running: tuple[World, Kubelet], what: str) -> None:
    world, kubelet = running

    def expire(wire: Edge) -> None:
        fault = wire.fail(watches(what), "expired", times=2)
        wire.turn_to(wire.target)  # ends the watches that are open
        assert fault.hit.wait(30), "nobody watched again"

    goes_on(world, kubelet, expire)


@pytest.mark.skipif(not LONG, reason="REGROUP_LONG: a watch has 90 s in which to say something")
@pytest.mark.parametrize("what", ["pods", "distributedtrainingjobs"])
def test_watch_that_says_nothing_is_given_up(running: tuple[World, Kubelet], what: str) -> None:
    """Of jobs the metadata are listed meanwhile; what is new of pods waits for the next watch."""
    world, kubelet = running
    faults = []

    def silence(wire: Edge) -> None:
        faults.append(wire.fail(watches(what), "silent"))
        wire.turn_to(wire.target)  # ends the watches that are open
        assert faults[0].hit.wait(30), "nobody watched again"

    goes_on(world, kubelet, silence, timeout_s=WATCH_SILENCE_S + 60)
    assert faults[0].over.wait(WATCH_SILENCE_S + 30), "the watch is still open"


@pytest.mark.parametrize("nth", range(1, 13 if LONG else 6))
def test_operator_that_is_killed_after_a_write_is_followed_by_one_that_goes_on(
    running: tuple[World, Kubelet], nth: int
) -> None:
    world, kubelet = running
    world.be_led()
    leader, count, killed = world.leader, [0], threading.Event()

    def kill() -> None:
        count[0] += 1
        if count[0] == nth:
            leader.process.kill()
            killed.set()

    def follow() -> None:
        if killed.wait(60):
            world.be_led()

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    goes_on(world, kubelet, lambda wire: wire.fail(is_write, "then", times=nth, then=kill))
    follower.join(60)
    assert killed.is_set(), f"there were only {count[0]} writes"


def test_outage_of_the_api_server_ends_nothing(running: tuple[World, Kubelet]) -> None:
    """The leader ends itself when it cannot renew its lease; it is started again until the API server is back."""
    world, kubelet = running
    world.be_led()
    before = world.trains(2)
    started = len(kubelet.noted("started"))
    world.wire.go_down()
    assert world.leader.process.wait(20) == 1
    over = threading.Timer(30.0 if LONG else 8.0, world.wire.heal)
    over.start()
    world.be_led()
    over.join()
    assert world.trains(2)["generation"] == before["generation"], "the group was changed"
    assert len(kubelet.noted("started")) == started, "a trainer was restarted"
    goes_on(world, kubelet, lambda _: None)


@pytest.mark.parametrize("off_s", [-3600.0, 240.0], ids=["an hour behind", "four minutes ahead"])
def test_operator_whose_clock_is_off_leads_and_is_followed(
    running: tuple[World, Kubelet], api: Api, off_s: float
) -> None:
    """Leases are compared by the time that they do not change, not by what they say. Further ahead than five minutes its
    certificate would not be valid yet, and tokens of an hour would have expired."""
    world, kubelet = running
    world.be_led()
    world.leader.stop()
    world.start_again(clock_off_s=off_s)
    world.be_led()
    leader, _ = world.leader, world.stand_by()
    goes_on(world, kubelet, lambda _: None)
    assert world.leader is leader, "it has ended"
    assert abs(world.lease_off_s() - off_s) < 60, "the clock is not off"
    assert world.leader.agent_call(ca_of(api))[0] == 401, "agents do not trust its certificate"
    stopped = world.take_over()
    stopped.process.kill()
    before = world.trains(2)["generation"]
    kubelet.kill_a_trainer()
    world.trains(2, before)
    assert abs(world.lease_off_s()) < 60


def goes_on(world: World, kubelet: Kubelet, break_it: Callable[[Edge], object], timeout_s: float = 60.0) -> None:
    """Kill a trainer, grow and shrink while something fails; judge what came of it. `timeout_s`: for each change."""
    world.be_led()
    before = world.trains(2)["generation"]
    failures = counted(world)
    try:
        break_it(world.wire)
        kubelet.kill_a_trainer()
        world.trains(2, before, timeout_s)
        world.scale(3)
        kubelet.run(3)
        world.trains(3, before, timeout_s)
        world.scale(2)
        world.trains(2, before, timeout_s)
    finally:
        world.wire.heal()
    until(lambda: len(kubelet.pods()) == 2, "two pods", timeout_s=30, every_s=0.2)
    kubelet.forget()
    world.be_led()
    until(lambda: counted(world) == failures + 1, f"{failures + 1} failures are counted", timeout_s=10, every_s=0.2)
    assert {name.split("-")[2] for name in kubelet.pods()} == {"0", "1"}
    numbers = [membership["generation"] for membership in world.memberships()]
    assert numbers == sorted(numbers), "the status went back"
    uids = {(membership["generation"], membership["uid"]) for membership in world.memberships()}
    assert len(uids) == len(set(numbers)), f"a number was given twice: {sorted(uids)}"
    documents = {(note["generation"], note["digest"]) for note in kubelet.noted("assignment")}
    assert len(documents) == len({number for number, _ in documents}), "workers got two documents of one number"


def counted(world: World) -> int:
    return int((world.status().get("restarts") or {}).get("processes", 0))

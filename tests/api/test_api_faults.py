"""The API server and the network to it fail in every way that they have: the job ends up where it would have been.

Each test lets something fail between the leader and the API server while a trainer is killed and the job grows and shrinks. After
it the same workers train, each slot has one pod, no number was given to two lists, and the one failure is counted once.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from harness.polling import until
from regroup_operator.kube.client import WATCH_SILENCE_S
from tests.api.conftest import Api
from tests.api.edge import Edge, Passed
from tests.api.replicas import ca_of
from tests.api.trained import Kubelet, World, is_pod, is_status, trained
from tests.builders.jobs import make_job
from tests.long import LONG, only_long


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
    "429 with Retry-After to status writes": (is_status, {"how": "status", "status": 429, "times": 3}),
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


SLOW = (
    "429 with Retry-After to status writes",
    "500 to writes",
    "answers of deletions are lost",
    "connections break before writes",
)
"""Others nearly contain them."""
assert set(SLOW) <= FAULTS.keys()
_HANGS = only_long("a request has 30 s until it is given up")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=_HANGS if given["how"] == "never" else pytest.mark.slow if name in SLOW else ())
        for name, (_, given) in FAULTS.items()
    ],
)
def test_job_goes_on_whatever_the_api_server_answers(running: tuple[World, Kubelet], name: str) -> None:
    fits, given = FAULTS[name]
    world, kubelet = running
    faults = []
    goes_on(world, kubelet, lambda wire: faults.append(wire.fail(fits, **given)))
    assert faults[0].hit.wait(10), "nothing has failed"
    assert not world.wire.hasty, "the server had asked for more time"


@pytest.mark.parametrize("what", ["pods", "distributedtrainingjobs"])
def test_watch_that_has_expired_is_begun_anew(running: tuple[World, Kubelet], what: str) -> None:
    world, kubelet = running

    def expire(wire: Edge) -> None:
        fault = wire.fail(watches(what), "expired", times=2)
        wire.turn_to(wire.target)  # ends the watches that are open
        assert fault.hit.wait(30), "nobody watched again"

    goes_on(world, kubelet, expire)


@only_long("a watch has 90 s in which to say something")
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


def writes(last: int, *, fast: tuple[int, ...]) -> list[Any]:
    """Return rows for the writes up to `last`; some of them for `make test`, too."""
    return [pytest.param(nth, marks=() if nth in fast else pytest.mark.slow) for nth in range(1, last + 1)]


@pytest.mark.parametrize("nth", writes(12 if LONG else 5, fast=(1, 5)))
def test_operator_that_is_killed_after_a_write_is_followed_by_one_that_goes_on(
    running: tuple[World, Kubelet], nth: int
) -> None:
    world, kubelet = running
    world.be_led()
    with killed(world, is_write, nth) as count:
        goes_on(world, kubelet, count)


@pytest.mark.parametrize("nth", writes(5 if LONG else 4, fast=(1, 3)))
def test_job_starts_as_ever_if_its_operator_is_killed_after_a_write(
    running: tuple[World, Kubelet], api: Api, namespace: str, nth: int
) -> None:
    """The writes are its Service, its ConfigMap, its first status and its pods. It has no agents: it waits for them."""
    world, _ = running
    world.be_led()
    with untrained(api, namespace, f"starts-{nth}") as job:
        with killed(world, job.writes, nth) as count:
            count(world.wire)
            job.create()
            until(lambda: job.is_at("Pending", 2), "two pods", timeout_s=60, every_s=0.1)
        assert api.get("service", job.name, f"--namespace={namespace}")["spec"]["clusterIP"] == "None"
        assert api.get("configmap", f"{job.name}-regroup", f"--namespace={namespace}")["data"]["ca.crt"] == ca_of(api)
        job.scale(3)  # the operator that follows has looked at the job once this is done
        until(lambda: job.is_at("Pending", 3), "three pods", timeout_s=60, every_s=0.1)
        assert world.pods_made(job.name) == {f"{job.name}-worker-{slot}-0": 1 for slot in range(3)}


@pytest.mark.parametrize("nth", range(1, 5 if LONG else 3))
def test_job_is_suspended_as_ever_if_its_operator_is_killed_after_a_write(
    running: tuple[World, Kubelet], api: Api, namespace: str, nth: int
) -> None:
    """The writes are a status, the deletions of its two pods, and a status."""
    world, _ = running
    world.be_led()
    with untrained(api, namespace, f"pauses-{nth}") as job:
        job.create()
        until(lambda: job.is_at("Pending", 2), "two pods", timeout_s=60, every_s=0.1)
        with killed(world, job.writes, nth) as count:
            count(world.wire)
            job.suspend(True)
            until(lambda: job.is_at("Suspended", 0), "no pods", timeout_s=60, every_s=0.1)
        assert world.pods_made(job.name).total() == 2
        job.suspend(False)
        until(lambda: job.is_at("Pending", 2), "two pods again", timeout_s=60, every_s=0.1)
        assert world.pods_made(job.name).total() == 4


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


@pytest.mark.parametrize(
    "off_s",
    [pytest.param(-3600.0, id="an hour behind", marks=pytest.mark.slow), pytest.param(240.0, id="four minutes ahead")],
)
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


def test_job_that_vanishes_while_its_watch_has_expired_is_forgotten(
    running: tuple[World, Kubelet], api: Api, namespace: str
) -> None:
    """kopf lists anew then, and reports no DELETED. The operator finds out when it compares what it knows with a list. The job is
    suspended: nothing of it is written any more, and no write is answered with 404."""
    world, _ = running
    world.be_led()
    world.leader.stop()
    world.start_again(settings={"RESYNC_SECONDS": "3"})
    world.be_led()
    with untrained(api, namespace, "vanishes") as job:
        job.create(suspended=True)
        until(lambda: job.is_at("Suspended", 0), "it is suspended", timeout_s=60, every_s=0.1)
        known = until(lambda: num_jobs(world), "jobs")
        fault = world.wire.fail(watches("distributedtrainingjobs"), "expired", times=1000)
        try:
            world.wire.turn_to(world.wire.target)  # ends the watches that are open
            assert fault.hit.wait(30), "nobody watched again"
            job.delete()
            left = fault.times
            until(lambda: fault.times < left - 1, "kopf has listed since then", timeout_s=30)
        finally:
            world.wire.heal()
        until(lambda: num_jobs(world) == known - 1, "the job is forgotten", timeout_s=15)
    world.leader.stop()
    world.be_led()


def goes_on(world: World, kubelet: Kubelet, break_it: Callable[[Edge], object], timeout_s: float = 60.0) -> None:
    """Kill a trainer, grow and shrink while something fails; judge what came of it. `timeout_s`: for each change."""
    world.be_led()
    before = world.trains(2)["generation"]
    failures, pods, made = counted(world), uids_of(kubelet), world.pods_made()
    try:
        break_it(world.wire)
        kubelet.kill_a_trainer()
        world.trains(2, before, timeout_s)
        world.scale(3)
        kubelet.run(3)
        world.trains(3, before, timeout_s)
        world.scale(2)
        world.trains(2, before, timeout_s)
        until(lambda: len(kubelet.pods()) == 2, "two pods", timeout_s=timeout_s, every_s=0.2)
    finally:
        world.wire.heal()
    kubelet.forget()
    world.be_led()
    until(
        lambda: counted(world) == failures + 1,
        f"{failures + 1} failures are counted",
        timeout_s=30,
        every_s=0.2,
        details=lambda: f"{world.status().get('restarts')} {world.status().get('incidents')}",
    )
    assert uids_of(kubelet) == pods, "a pod was replaced"
    assert [name.split("-")[2] for name in (world.pods_made() - made).elements()] == ["2"], (
        "more pods were made than one"
    )
    numbers = [membership["generation"] for membership in world.memberships()]
    assert numbers == sorted(numbers), "the status went back"
    uids = {(membership["generation"], membership["uid"]) for membership in world.memberships()}
    assert len(uids) == len(set(numbers)), f"a number was given twice: {sorted(uids)}"
    documents = {(note["generation"], note["digest"]) for note in kubelet.noted("assignment")}
    assert len(documents) == len({number for number, _ in documents}), "workers got two documents of one number"


def uids_of(kubelet: Kubelet) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in kubelet.pods().items()}


def counted(world: World) -> int:
    return int((world.status().get("restarts") or {}).get("processes", 0))


def num_jobs(world: World) -> float:
    """Return how many jobs the leader knows."""
    return sum(map(float, re.findall(r"^regroup_jobs\{.*\} (\S+)$", world.leader.page("/metrics")[1], re.MULTILINE)))


@contextmanager
def killed(world: World, fits: Callable[[Passed], bool], nth: int) -> Iterator[Callable[[Edge], object]]:
    """Yield what begins to count: the leader is killed after the nth write that fits, and another one is started. The block ends
    when that one leads."""
    leader, count, is_killed = world.leader, [0], threading.Event()

    def kill() -> None:
        count[0] += 1
        if count[0] == nth:
            leader.process.kill()
            is_killed.set()

    def follow() -> None:
        if is_killed.wait(60):
            world.be_led()

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    yield lambda wire: wire.fail(fits, "then", times=nth, then=kill)
    follower.join(60)
    assert is_killed.is_set(), f"there were only {count[0]} writes"


@dataclass(frozen=True)
class Untrained:
    """A job beside the one that trains: of two workers, and nobody runs its pods. Its name is no other test's."""

    api: Api
    namespace: str
    name: str

    def create(self, *, suspended: bool = False) -> None:
        elastic = {"minReplicas": 1, "maxReplicas": 3}
        job = make_job(self.name, replicas=2, elasticPolicy=elastic, runPolicy={"suspend": suspended})
        job["metadata"]["namespace"] = self.namespace
        self.api.done("create", "--filename=-", document=job)

    def delete(self) -> None:
        self.api.done("delete", "dtj", self.name, f"--namespace={self.namespace}", "--ignore-not-found")

    def scale(self, workers: int) -> None:
        self.api.done("scale", "dtj", self.name, f"--replicas={workers}", f"--namespace={self.namespace}")

    def suspend(self, suspended: bool) -> None:
        patch = f"--patch={json.dumps({'spec': {'runPolicy': {'suspend': suspended}}})}"
        self.api.done("patch", "dtj", self.name, f"--namespace={self.namespace}", "--type=merge", patch)

    def is_at(self, state: str, pods: int) -> bool:
        """Whether the status is of the newest spec and says so, and the job has so many pods."""
        job = self.api.get("dtj", self.name, f"--namespace={self.namespace}")
        status = job["status"]
        is_current = status.get("observedGeneration") == job["metadata"]["generation"]
        if not is_current or status["summary"]["state"] != state:
            return False
        return len(self.api.get("pods", f"--namespace={self.namespace}")["items"]) == pods

    def writes(self, request: Passed) -> bool:
        """Whether it changes the job, or makes or deletes something of it. Its events are not counted, nor is a dry run."""
        if request.method == "GET" or f"/namespaces/{self.namespace}/" not in request.path:
            return False
        if request.method == "POST":
            kind = request.path.rsplit("/", 1)[1]
            return kind != "events" and "name" in json.loads(request.body)["metadata"]
        return True


@contextmanager
def untrained(api: Api, namespace: str, name: str) -> Iterator[Untrained]:
    """A job for as long as the block lasts, once it is created."""
    job = Untrained(api, namespace, name)
    try:
        yield job
    finally:
        job.delete()
        api.done("delete", "pods", "--all", "--force", "--grace-period=0", f"--namespace={namespace}")

"""The registry: sessions and streams of all agents, and what was told on them."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from regroup.protocol.state import Busy, Phase
from regroup.protocol.wire import Changed, Command, Draining, Ping, Progress, ProgressRequest, Report, Stop, Welcome
from regroup_operator.endpoint.registry import MAX_LINES, PROGRESS_PLAN_S, Registry, Stream
from regroup_operator.model.pace import progress_factor
from regroup_operator.model.reach import suspects_itself
from regroup_operator.model.records import Pod
from regroup_operator.queue import Schedule
from tests.unit.endpoint.reports import hello, make_report

POD = Pod("team", "digits-worker-0-0", "pod-uid", "digits", "job-uid", 0, 0)


class Setting:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.enqueued: list[tuple[str, str]] = []
        self.later: list[tuple[tuple[str, str], float]] = []
        self.registry = Registry(lambda: self.now_s, self.enqueued.append, lambda key, s: self.later.append((key, s)))

    def session(self) -> object:
        return self.registry.sessions([POD])["pod-uid"]


def lines(stream: Stream) -> list[Command | None]:
    async def read() -> list[Command | None]:
        out: list[Command | None] = []
        while not stream._lines.empty():
            line = await stream.get()
            out.append(None if line is None else Command.decode(line))
        return out

    return asyncio.run(read())


def test_everything_that_an_agent_does_enqueues_its_job() -> None:
    world = Setting()
    world.registry.report(POD, hello())
    stream = world.registry.open(POD)
    world.registry.report(POD, make_report(Progress(1)))
    world.registry.close(POD, stream)
    assert (world.enqueued, world.later) == ([("team", "digits")] * 4, [])


TRAINING: dict[str, Any] = {"phase": "training", "generation": 1, "heard": 1, "entered": 1, "adopted": 1}


@pytest.mark.parametrize(
    ("report", "at_once"),
    [
        pytest.param(make_report(Progress(7), step=7, **TRAINING), False, id="only another step"),
        pytest.param(make_report(Progress(7, first_step_ms=3.0), step=7, **TRAINING), True, id="the first of a generation"),
        pytest.param(make_report(Progress(7), **TRAINING | {"generation": 2, "heard": 2}), True, id="of another generation"),
        pytest.param(make_report(Progress(7), **TRAINING | {"phase": "broken"}), True, id="its group is broken"),
        pytest.param(
            make_report(Progress(7, checkpoint={"generation": 1, "step": 5, "directory": "d"}), **TRAINING),
            True,
            id="a new checkpoint",
        ),
        pytest.param(make_report(Progress(7), **TRAINING, busy=(Busy("save", "a", 1.0),)), True, id="it saves"),
        pytest.param(make_report(Changed(), **TRAINING), True, id="no progress"),
    ],
)  # fmt: skip
def test_progress_alone_is_planned_for_a_little_later(report: Report, at_once: bool) -> None:
    world = Setting()
    world.registry.report(POD, hello())
    world.registry.open(POD)
    world.registry.report(POD, make_report(Progress(6), **TRAINING))
    world.enqueued.clear()
    world.registry.report(POD, report)
    key = ("team", "digits")
    assert (world.enqueued, world.later) == (([key], []) if at_once else ([], [(key, PROGRESS_PLAN_S)]))


def test_answer_to_a_question_is_planned_for_at_once() -> None:
    world = Setting()
    world.registry.report(POD, hello())
    world.registry.open(POD)
    world.registry.report(POD, make_report(Progress(6), **TRAINING))
    world.registry.tell(POD.uid, POD.job_uid, 1, ProgressRequest())
    world.enqueued.clear()
    world.registry.report(POD, make_report(Progress(6), **TRAINING))
    assert len(world.enqueued) == 1


def test_of_500_jobs_whose_workers_report_50_times_a_second_none_is_planned_more_than_every_two_seconds() -> None:
    now_s, schedule, planned = 0.0, Schedule(), Counter[tuple[str, str]]()
    registry = Registry(
        lambda: now_s, schedule.add, lambda key, wait_s: schedule.add_at(key, now_s + wait_s), lambda _: 1.0
    )
    pods = [
        replace(POD, uid=f"{job}/{slot}", job=f"j{job}", job_uid=f"u{job}", slot=slot)
        for job in range(500)
        for slot in range(2)
    ]

    def work() -> None:
        while (key := schedule.take(now_s)) is not None:
            planned[key] += 1
            schedule.done(key)

    for pod in pods:
        registry.report(pod, replace(hello(), pod_uid=pod.uid))
        registry.open(pod)
        registry.report(pod, replace(make_report(Progress(1), **TRAINING), pod_uid=pod.uid))
    work()
    planned.clear()
    for step in range(2, 202):
        now_s += 0.02
        for pod in pods:
            registry.report(pod, replace(make_report(Progress(step), step=step, **TRAINING), pod_uid=pod.uid))
        work()
    assert len(planned) == 500
    assert set(planned.values()) <= {1, 2}, "in four seconds"


@pytest.mark.parametrize(("num_jobs", "factor"), [(0, 1.0), (50, 1.0), (120, 2.4), (500, 10.0), (5000, 10.0)])
def test_agents_report_less_often_where_there_are_many_jobs(num_jobs: int, factor: float) -> None:
    assert progress_factor(num_jobs) == factor


def test_jobs_count_as_long_as_one_of_their_streams_is_open() -> None:
    registry = Registry(lambda: 0.0, lambda _: None, lambda *_: None, lambda num_jobs: 10.0 * num_jobs)
    peer = replace(POD, uid="peer", slot=1)
    stranger = replace(POD, uid="stranger", job="other", job_uid="other-job")
    streams = []
    for pod in (POD, peer, stranger):
        registry.report(pod, replace(hello(), pod_uid=pod.uid, job_uid=pod.job_uid))
        streams.append(registry.open(pod))
    again = registry.open(POD)  # the stream before it is replaced, and its end says nothing
    registry.close(POD, streams[0])
    assert (registry.num_jobs, registry.progress_factor) == (2, 20.0)
    registry.close(POD, again)
    assert registry.num_jobs == 2, "its peer is there"
    registry.close(peer, streams[1])
    registry.close(stranger, streams[2])
    assert registry.num_jobs == 0


def test_job_among_many_is_planned_for_as_seldom_as_it_reports() -> None:
    later: list[float] = []
    registry = Registry(lambda: 0.0, lambda _: None, lambda _, wait_s: later.append(wait_s), lambda _: 4.0)
    registry.report(POD, hello())
    registry.open(POD)
    for step in (6, 7):
        registry.report(POD, make_report(Progress(step), step=step, **TRAINING))
    assert later == [4.0 * PROGRESS_PLAN_S]
    assert registry.sessions([POD])["pod-uid"].report_every_s == 4.0


def test_dropped_report_is_counted_and_enqueues_nothing() -> None:
    world = Setting()
    world.registry.report(POD, hello(incarnation=2))
    assert not world.registry.report(POD, make_report(incarnation=1))
    assert (world.registry.dropped_reports, len(world.enqueued)) == (1, 1)


def test_stream_of_a_newer_boot_ends_the_one_before() -> None:
    world = Setting()
    world.registry.report(POD, hello())
    old = world.registry.open(POD)
    world.registry.report(POD, hello(boot="second"))
    new = world.registry.open(POD)
    assert lines(old) == [None]
    world.registry.close(POD, old)  # its handler ends late: the new one stays
    assert world.registry.sessions([POD])["pod-uid"].connected
    assert world.registry.num_connected() == 1
    world.registry.close(POD, new)
    assert not world.registry.sessions([POD])["pod-uid"].connected


def test_told_is_remembered_for_the_stream_only() -> None:
    world = Setting()
    world.registry.report(POD, hello())
    world.registry.tell("pod-uid", "job-uid", 1, Ping())  # without a stream nothing happens
    stream = world.registry.open(POD)
    for body in (Welcome("Session"), ProgressRequest(), Stop("Released")):
        world.registry.tell("pod-uid", "job-uid", 4, body)
    session = world.registry.sessions([POD])["pod-uid"]
    assert (session.told_tier, session.told_stop, session.asked_at_s) == ("Session", True, 100.0)
    told = lines(stream)
    assert [type(c.body) for c in told if c] == [Welcome, ProgressRequest, Stop]
    assert {(c.job_uid, c.pod_uid, c.incarnation, c.generation) for c in told if c} == {("job-uid", "pod-uid", 1, 4)}


def test_commands_carry_what_the_agent_has_heard_where_the_status_is_older() -> None:
    """It was restored from a backup; an agent refuses what comes from before the newest that it has heard (FENCE)."""
    world = Setting()
    world.registry.report(POD, hello(heard=7))
    stream = world.registry.open(POD)
    for newest in (4, 9):
        world.registry.tell("pod-uid", "job-uid", newest, Ping())
    assert [c.generation for c in lines(stream) if c] == [7, 9]


def test_what_was_not_answered_is_known_from_the_first_time_it_was_asked() -> None:
    world = Setting()
    world.registry.report(POD, hello())
    world.registry.open(POD)
    for now_s in (100.0, 101.0):
        world.now_s = now_s
        world.registry.tell("pod-uid", "job-uid", 1, Ping())
    session = world.registry.sessions([POD])["pod-uid"]
    assert (session.asked_at_s, session.unanswered_since_s) == (101.0, 100.0)
    world.registry.report(POD, make_report(Changed()))
    assert world.registry.sessions([POD])["pod-uid"].unanswered_since_s is None


def test_closed_stream_knows_the_newest_step_of_its_job_only() -> None:
    world = Setting()
    peer, stranger = replace(POD, uid="peer"), replace(POD, uid="stranger", job_uid="other-job")
    for pod in (POD, peer, stranger):
        world.registry.report(pod, replace(hello(), pod_uid=pod.uid, job_uid=pod.job_uid))
    stream = world.registry.open(POD)
    world.registry.report(peer, replace(make_report(Progress(12)), pod_uid="peer"))
    world.registry.report(stranger, replace(make_report(Progress(99)), pod_uid="stranger", job_uid="other-job"))
    world.registry.close(POD, stream)
    assert world.registry.sessions([POD])["pod-uid"].closed_step == 12


def test_agents_of_pods_that_are_gone_are_forgotten() -> None:
    world = Setting()
    world.registry.report(POD, hello())
    stream = world.registry.open(POD)
    world.registry.forget(lambda _: False)
    assert world.registry.knows("pod-uid", "boot")  # its stream is open: it is not gone yet
    world.registry.close(POD, stream)
    world.registry.forget(lambda _: False)
    assert not world.registry.knows("pod-uid", "boot")


def test_agent_that_was_turned_away_is_remembered_until_it_can_be_understood() -> None:
    world = Setting()
    world.registry.refuse(POD, "Protocol version 2 is not supported.")
    world.registry.refuse(POD, "Protocol version 2 is not supported.")
    assert world.registry.refusals([POD]) == {"pod-uid": "Protocol version 2 is not supported."}
    assert len(world.enqueued) == 1
    world.registry.report(POD, hello())
    assert world.registry.refusals([POD]) == {}
    world.registry.refuse(POD, "Protocol version 2 is not supported.")
    world.registry.refuse(other := pods(2)[1], "Protocol version 2 is not supported.")
    world.registry.forget(lambda _: False)
    assert world.registry.refusals([POD, other]) == {}
    assert world.registry._pods == {}, "nor is anything else kept of pods that are gone"


def test_leader_that_ends_closes_all_streams() -> None:
    world = Setting()
    world.registry.report(POD, hello())
    stream = world.registry.open(POD)
    world.registry.close_all()
    assert lines(stream) == [None]


def test_stream_that_nobody_reads_ends_and_holds_no_more_than_its_bound() -> None:
    world = Setting()
    world.registry.report(POD, hello())
    stream = world.registry.open(POD)
    for _ in range(MAX_LINES):
        world.registry.tell(POD.uid, POD.job_uid, 1, Ping())
    assert stream._lines.qsize() == MAX_LINES
    world.registry.tell(POD.uid, POD.job_uid, 1, Ping())
    assert lines(stream) == [None]


def test_who_is_asked_to_leave_is_known_until_its_container_starts_again_or_its_pod_is_gone() -> None:
    world = Setting()
    key = ("team", "digits")

    def leaving(job_uid: str | None) -> list[str]:
        return [pod.uid for pod, _ in world.registry.leaving(key, job_uid)]

    world.registry.report(POD, hello())
    assert leaving(None) == []
    world.registry.report(POD, make_report(Draining(20.0)))
    assert (leaving(None), leaving("another"), leaving("job-uid")) == (["pod-uid"], ["pod-uid"], [])
    world.registry.report(POD, hello(boot="second"))
    assert leaving(None) == []
    world.registry.report(POD, make_report(Draining(20.0), boot="second"))
    world.registry.forget(lambda _: False)
    assert leaving(None) == []


def pods(number: int) -> list[Pod]:
    return [replace(POD, name=f"digits-worker-{slot}-0", uid=f"uid-{slot}", slot=slot) for slot in range(number)]


def test_many_that_lose_their_stream_at_once_are_out_of_reach_until_they_call_again() -> None:
    world, explained = Setting(), set[str]()
    world.registry = Registry(
        lambda: world.now_s, world.enqueued.append, lambda _, __: None, should_call=lambda pod: pod.uid not in explained
    )
    agents = pods(100)
    for pod in agents:
        world.registry.report(pod, replace(hello(), pod_uid=pod.uid))
    streams = {pod.uid: world.registry.open(pod) for pod in agents}
    for pod in agents[:19]:
        world.registry.close(pod, streams[pod.uid])
    assert world.registry.out_of_reach() == 0, "a rack"
    world.registry.close(agents[19], streams["uid-19"])
    world.now_s += 1.0
    assert world.registry.out_of_reach() == 20
    explained.add("uid-3")
    assert world.registry.out_of_reach() == 20, "they were counted a moment ago"
    world.now_s += 1.0
    assert world.registry.out_of_reach() == 0, "of one the pod is gone, or its node is not ready"
    for pod in agents[20:40]:
        world.registry.close(pod, streams[pod.uid])
    assert world.registry.out_of_reach() == 0, "whose pods are gone may be among them: they are counted in a moment"
    world.now_s += 1.0
    assert world.registry.out_of_reach() == 39
    for pod in agents[:25]:
        world.registry.open(pod)
    world.now_s += 1.0
    assert world.registry.out_of_reach() == 0


def test_who_has_stopped_is_not_out_of_reach() -> None:
    world = Setting()
    world.registry = Registry(
        lambda: world.now_s, world.enqueued.append, lambda _, __: None, should_call=lambda _: True
    )
    for pod in pods(30):
        world.registry.report(pod, replace(hello(phase=Phase.STOPPED), pod_uid=pod.uid))
        world.registry.close(pod, world.registry.open(pod))
    assert world.registry.out_of_reach() == 0


def test_nothing_is_kept_of_who_is_out_of_reach_and_gone() -> None:
    world = Setting()
    world.registry.report(POD, hello())
    world.registry.close(POD, world.registry.open(POD))
    assert len(world.registry._closed) == 1
    world.registry.forget(lambda _: False)
    assert world.registry._closed == {}


@pytest.mark.parametrize(
    ("out_of_reach", "connected", "want"),
    [
        pytest.param(19, 0, False, id="a rack, and nothing else"),
        pytest.param(20, 80, True, id="a fifth of all"),
        pytest.param(20, 81, False, id="less than that"),
        pytest.param(400, 3600, False, id="a tenth of thousands"),
        pytest.param(4000, 0, True, id="all"),
    ],
)
def test_when_the_operator_suspects_itself(out_of_reach: int, connected: int, want: bool) -> None:
    assert suspects_itself(out_of_reach, connected) is want


def test_progress_of_a_pod_in_another_namespace_is_not_a_jobs() -> None:
    """Whoever may make pods writes any UID into an ownerReference; a job's own are in its namespace."""
    world = Setting()
    world.registry.report(POD, hello())
    stream = world.registry.open(POD)
    world.registry.report(POD, make_report(Progress(12), **TRAINING))
    stranger = replace(POD, namespace="elsewhere", uid="stranger")
    world.registry.report(stranger, replace(hello(), pod_uid="stranger"))
    world.registry.open(stranger)
    world.registry.report(
        stranger, replace(make_report(Progress(10**9), **TRAINING | {"generation": 9, "heard": 9}), pod_uid="stranger")
    )
    assert world.registry.num_jobs == 2
    world.registry.close(POD, stream)
    assert world.registry.sessions([POD])["pod-uid"].closed_step == 12
    assert world.registry.num_jobs == 1

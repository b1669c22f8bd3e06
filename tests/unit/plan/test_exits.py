"""What counts against maxRestarts, and what does not: a lost node, and in tier Script the peers of a lost rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from regroup.protocol.state import Phase
from regroup_operator.api.members import MemberId
from regroup_operator.api.status import POD_CAUSES, SeenExits
from regroup_operator.model.plan import Clock, JobMemory, ScriptMemory
from regroup_operator.model.pod_row import PodRow
from regroup_operator.model.records import AgentSession, Observation, Pod, ProcessExit
from regroup_operator.plan.failures.exits import (
    MAX_LEFT,
    FailedNodes,
    KnownExits,
    avoided_nodes,
    count_created,
    excused_generations,
    exit_key,
    exits_status,
    see_failures,
)
from tests.builders.plan import after, make_current, make_pod, make_session, remembered, uid_of

CLOCK = Clock(100.0, 1e9)
ALL = (make_pod(0), make_pod(1), make_pod(2))
STOPPED = make_session(2, connected=False, closed_at_s=99.0)


def exited(slot: int, generation: int = 1, at_s: float = 99.0) -> AgentSession:
    ended = ProcessExit(at_s, 1, 0, 1, "connection closed by peer", generation)
    return make_session(slot, exits=(ended,), num_exits=1)


@pytest.mark.parametrize(
    ("tier", "pods", "sessions", "counted"),
    [
        pytest.param("Script", ALL, [exited(0), exited(1, at_s=98.0), exited(2)], ["1"], id="the first of a generation"),
        pytest.param("Script", ALL, [exited(0), exited(1, generation=2)], ["0", "1"], id="one of each generation"),
        pytest.param("Script", ALL[:2], [exited(0), exited(1)], [], id="a member's pod is gone"),
        pytest.param(None, ALL[:2], [exited(0), exited(1)], [], id="it is gone before the tier is known"),
        pytest.param("Script", (*ALL[:2], make_pod(2, terminating=True)), [exited(0)], [], id="a member's pod is deleted"),
        pytest.param("Script", (*ALL[:2], make_pod(2, node_ready=False)), [exited(0)], [], id="a member's node is lost"),
        pytest.param("Script", ALL, [exited(0), STOPPED], [], id="a member's agent stopped"),
        pytest.param("Script", ALL, [exited(0), make_session(2, rebooted_at_s=99.0)], [], id="a member's agent is another one"),
        pytest.param("Script", ALL, [exited(0), make_session(2, rebooted_at_s=-5.0)], ["0"], id="but was so from the start"),
        pytest.param("Session", ALL, [exited(0), exited(1)], ["0", "1"], id="session: survivors do not exit, each counts"),
        pytest.param(None, ALL, [exited(0), exited(1)], ["0", "1"], id="not known yet: each counts"),
    ],
)  # fmt: skip
def test_exits_that_count(
    tier: str | None, pods: tuple[Pod, ...], sessions: list[AgentSession], counted: list[str]
) -> None:
    obs = Observation(pods, {s.pod_uid: s for s in sessions})
    seen = see_failures(obs, JobMemory(), CLOCK, tier=tier, current=make_current())
    assert [f.worker for f in seen.failures] == counted
    again = see_failures(obs, after(seen), CLOCK, tier=tier, current=make_current())
    assert again.failures == ()


@pytest.mark.parametrize("pods", [ALL, ALL[:2]], ids=["a new pod", "and a member's pod is gone"])
@pytest.mark.parametrize("tier", ["Script", None])
def test_worker_that_can_never_run_is_seen_in_every_tier(tier: str | None, pods: tuple[Pod, ...]) -> None:
    """An agent tells of it once, and starts nothing any more: the job waited for ever."""
    ended = ProcessExit(99.0, 0, 0, 2, generation=1, reason="CannotRun", detail="2 processes, 1 GPU")
    obs = Observation(pods, {uid_of(1): make_session(1, exits=(ended,), num_exits=1)})
    memory = JobMemory(script=ScriptMemory(failed=1))
    seen = see_failures(obs, memory, CLOCK, tier=tier, current=make_current())
    assert [(f.worker, f.reason) for f in seen.failures] == [("1", "CannotRun")]


def numbered(slot: int, *numbers: int) -> AgentSession:
    ended = tuple(ProcessExit(99.0, 1, 0, -9, "", 1, number=number) for number in numbers)
    return make_session(slot, exits=ended, num_exits=len(ended))


KEY = exit_key(ALL[0])
OTHER_POD = exit_key(replace(ALL[0], uid="another-pod-of-the-same-name"))


@pytest.mark.parametrize(
    ("newest", "session", "counted"),
    [
        pytest.param({}, numbered(0, 1), 1, id="nothing was counted"),
        pytest.param({KEY: 1}, numbered(0, 1), 0, id="counted by the operator before"),
        pytest.param({KEY: 1}, numbered(0, 1, 2, 3), 2, id="two of three are new"),
        pytest.param({OTHER_POD: 1}, numbered(0, 1), 1, id="an earlier pod of that name"),
    ],
)  # fmt: skip
def test_exit_that_is_said_to_another_operator_counts_once(
    newest: dict[str, int], session: AgentSession, counted: int
) -> None:
    obs = Observation(ALL, {session.pod_uid: session}, term_started_s=99.5)
    known = KnownExits(SeenExits(newest=newest))
    seen = see_failures(obs, JobMemory(), CLOCK, tier="Session", current=make_current(), known_exits=known)
    assert len(seen.failures) == counted
    again = see_failures(obs, after(seen), CLOCK, tier="Session", current=make_current(), known_exits=known)
    assert again.failures == ()


def test_script_of_which_an_exit_has_counted_counts_none_of_its_peers_at_the_next_operator() -> None:
    obs = Observation(ALL, {s.pod_uid: s for s in (numbered(0, 1), numbered(1, 1))})
    known = KnownExits(SeenExits(newest={KEY: 1}, generation=1))
    seen = see_failures(obs, JobMemory(), CLOCK, tier="Script", current=make_current(), known_exits=known)
    assert seen.failures == ()
    assert exits_status(known, obs, seen.script.failed, "Script", counted=False) == SeenExits(
        newest={KEY: 1, exit_key(ALL[1]): 1}, generation=1
    )


@pytest.mark.parametrize(
    ("known", "sessions", "counted", "newest"),
    [
        pytest.param({}, [make_session(0)], False, None, id="no exits"),
        pytest.param({}, [numbered(0, 1, 2)], True, {KEY: 2}, id="the newest counts"),
        pytest.param({KEY: 2}, [numbered(0, 1, 2)], False, None, id="all that there are: nothing is written"),
        pytest.param({KEY: 2}, [], True, {KEY: 2}, id="who has not called yet keeps his"),
        pytest.param({KEY: 2}, [numbered(0, 1)], True, {KEY: 2}, id="who has not reported all of them again, too"),
        pytest.param({OTHER_POD: 5}, [], False, None, id="a pod that is gone is no reason to write"),
        pytest.param({OTHER_POD: 5}, [], True, {}, id="but is left out with the next write"),
    ],
)
def test_status_says_which_exits_were_seen(
    known: dict[str, int], sessions: list[AgentSession], counted: bool, newest: dict[str, int] | None
) -> None:
    obs = Observation(ALL, {s.pod_uid: s for s in sessions})
    got = exits_status(KnownExits(SeenExits(newest=known)), obs, 0, "Session", counted=counted)
    assert got == (None if newest is None else SeenExits(newest=newest))


def test_exit_that_is_told_after_the_next_generation_was_announced() -> None:
    """The generation lost a pod when it was the newest."""
    memory = after(see_failures(Observation(ALL[:2], {}), JobMemory(), CLOCK, tier="Script", current=make_current()))
    late = exited(0)
    seen = see_failures(
        Observation(ALL, {late.pod_uid: late}), memory, CLOCK, tier="Script", current=make_current(number=2)
    )
    assert seen.failures == ()


@pytest.mark.parametrize(
    ("gone", "left"),
    [
        pytest.param(make_session(2, Phase.TRAINING, 1, closed_at_s=98.0), (1,), id="its stream ended"),
        pytest.param(make_session(2, Phase.TRAINING, 1), (), id="it is there"),
        pytest.param(make_session(2, Phase.STARTING, 0, closed_at_s=98.0), (), id="it was in none yet"),
    ],
)
@pytest.mark.parametrize("tier", ["Script", None])
def test_worker_whose_loss_is_known_only_after_the_next_generation_was_announced(
    gone: AgentSession, left: tuple[int, ...], tier: str | None
) -> None:
    """A node lost its power: the peers fail at once, and it is called lost only seconds later (walk 24966)."""
    obs = Observation(ALL, {s.pod_uid: s for s in (make_session(0), make_session(1), gone)})
    current = make_current((0, 1), number=2)
    memory = after(see_failures(obs, JobMemory(), CLOCK, tier=tier, current=current))
    assert memory.script.left == left
    assert excused_generations([], memory.script.left, tier) == set(left)
    assert see_failures(obs, memory, CLOCK, tier=tier, current=current).script == memory.script, (
        "nothing new to remember"
    )


def test_generations_that_were_left_are_bounded_and_stay_the_newest() -> None:
    gone = {uid_of(s): make_session(s, Phase.TRAINING, s + 1, closed_at_s=98.0) for s in range(MAX_LEFT + 5)}
    obs = Observation((), gone)
    memory = after(see_failures(obs, JobMemory(), CLOCK, tier="Script", current=make_current(number=50)))
    assert len(memory.script.left) == MAX_LEFT
    assert memory.script.left[-1] == 50
    assert see_failures(obs, memory, CLOCK, tier="Script", current=make_current(number=50)).script == memory.script


@pytest.mark.parametrize(
    ("tier", "excused"),
    [
        pytest.param("Script", {2, 3}, id="script: a peer ended by a signal, or went with its pod"),
        pytest.param(None, {3}, id="not known yet: the signal may be the script's own crash"),
        pytest.param("Session", set(), id="session: survivors do not exit"),
    ],
)
def test_generations_whose_exits_are_excused(tier: str | None, excused: set[int]) -> None:
    killed = make_session(0, exits=(ProcessExit(99.0, 1, 0, -9, "", 2),), num_exits=1)
    assert excused_generations([killed, exited(1)], (3,), tier) == excused


BEFORE = make_pod(0, boot_id="first")


@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        pytest.param({"last_exit_code": 1}, 1, id="the agent failed"),
        pytest.param({"last_exit_code": 137, "last_exit_reason": "Error"}, 1, id="the agent was killed"),
        pytest.param({"last_exit_code": 137, "last_exit_reason": "OOMKilled"}, 1, id="for its memory"),
        pytest.param({"last_exit_code": 0}, 0, id="it ended as it should"),
        pytest.param({"last_exit_code": 255, "last_exit_reason": "Unknown"}, 0, id="power cut and back, containerd"),
        pytest.param({"last_exit_code": 255, "last_exit_reason": "Error"}, 0, id="power cut and back, CRI-O"),
        pytest.param({"last_exit_code": 137, "last_exit_reason": "ContainerStatusUnknown"}, 0, id="the kubelet lost sight of it"),
        pytest.param({"last_exit_code": 143, "boot_id": "second"}, 0, id="an orderly reboot of the node"),
        pytest.param({"last_exit_code": 1, "boot_id": ""}, 1, id="nodes may not be read any more"),
        pytest.param({"last_exit_code": 143, "terminating": True}, 0, id="the pod is deleted"),
        pytest.param({"last_exit_code": 2, "phase": "Failed", "container_restarts": 0}, 1, id="the pod ended by itself"),
        pytest.param(
            {"last_exit_code": 2, "phase": "Failed", "container_restarts": 0, "terminating": True}, 0, id="in its grace period"
        ),
    ],
)  # fmt: skip
def test_container_that_restarts(changes: dict[str, Any], counted: int) -> None:
    looked = after(see_failures(Observation((BEFORE,), {}), JobMemory(), CLOCK))
    seen = see_failures(Observation((replace(BEFORE, **{"container_restarts": 1} | changes),), {}), looked, CLOCK)
    assert len(seen.failures) == counted


def test_flapping_node_costs_no_restart_and_a_crash_after_its_boot_does() -> None:
    memory, counts = after(see_failures(Observation((BEFORE,), {}), JobMemory(), CLOCK)), []
    lives = [(255, "first"), (255, "first"), (143, "second"), (1, "second"), (255, "second")]
    for restarts, (code, boot_id) in enumerate(lives, start=1):
        pod = replace(BEFORE, container_restarts=restarts, last_exit_code=code, boot_id=boot_id)
        seen = see_failures(Observation((pod,), {}), memory, CLOCK)
        memory = after(seen)
        counts.append(len(seen.failures))
    assert counts == [0, 0, 0, 1, 0]


def test_boot_that_is_seen_before_the_container_restarts_is_remembered_until_then() -> None:
    memory = after(see_failures(Observation((BEFORE,), {}), JobMemory(), CLOCK))
    booted = replace(BEFORE, boot_id="second")
    memory = after(see_failures(Observation((booted,), {}), memory, CLOCK))
    seen = see_failures(Observation((replace(booted, container_restarts=1, last_exit_code=143),), {}), memory, CLOCK)
    assert seen.failures == ()
    gone = see_failures(Observation((), {}), after(seen), CLOCK)
    assert gone.counted == {}, "who is gone is forgotten"


SLOT_1 = MemberId(1, 1)


@pytest.mark.parametrize(
    ("pods", "given", "cause"),
    [
        pytest.param((make_pod(0), make_pod(1, phase="Failed")), {}, "PodFailed", id="its pod failed"),
        pytest.param((make_pod(0), make_pod(1, phase="Failed", status_reason="Evicted")), {}, None, id="evicted"),
        pytest.param(
            (make_pod(0), make_pod(1, terminating=True, disruption="PreemptionByScheduler")), {}, None, id="preempted"
        ),
        pytest.param((make_pod(0), make_pod(1, node_ready=False)), {}, "NodeNotReady", id="its node is off"),
        pytest.param((make_pod(0), make_pod(1, terminating=True)), {}, "Deleted", id="somebody deletes it"),
        pytest.param((make_pod(0),), {"members": [MemberId(1, 0)]}, "Deleted", id="a member's pod is gone"),
        pytest.param(
            (make_pod(0), make_pod(1, terminating=True, disruption="EvictionByEvictionAPI")), {"leaving": {uid_of(1)}}, None,
            id="evicted, and hands over",
        ),
        pytest.param((make_pod(0), make_pod(1)), {"leaving": {uid_of(1)}}, None, id="its pod is there and asked to leave"),
        pytest.param((make_pod(0), make_pod(1)), {"leaving": {uid_of(0)}}, "Unresponsive", id="another one's is"),
        pytest.param(
            (make_pod(0), make_pod(1)), {"leaving": {uid_of(1)}, "members": [MemberId(1, 0)]}, None, id="a member hands over"
        ),
        pytest.param((make_pod(0), make_pod(1)), {"released": {uid_of(1)}}, None, id="it was scaled away"),
        pytest.param((make_pod(0),), {}, None, id="nobody had the slot"),
    ],
)  # fmt: skip
def test_replacements_that_count(pods: tuple[Pod, ...], given: dict[str, Any], cause: str | None) -> None:
    counted = count_created([SLOT_1], pods, **given)[0]
    assert counted == ({} if cause is None else {cause: 1})
    assert counted.keys() <= set(POD_CAUSES)


def test_replacement_of_an_evicted_pod_that_is_gone_is_told_by_what_is_remembered() -> None:
    given: dict[str, Any] = {"members": [MemberId(1, 2)], "disrupted": {1: PodRow(2, 3, 90.0, "Preempted")}}
    assert count_created([MemberId(1, 4)], (make_pod(0),), **given)[0] == {}
    newer = make_pod(1, 4, phase="Failed")
    assert count_created([MemberId(1, 5)], (make_pod(0), newer), **given)[0] == {"PodFailed": 1}
    assert count_created([MemberId(1, 5)], (make_pod(0),), **given)[0] == {"Deleted": 1}, "the one after it"
    old = make_pod(1, 0, node_ready=False)
    released = count_created([SLOT_1], (make_pod(0), old), released={old.uid}, members=[MemberId(1, 2)])[0]
    assert released == {"Deleted": 1}, "who was released on a node without power lingers"


def failed_pods(*nodes: str) -> FailedNodes:
    """Return what is known after pods of slot 0 failed one after the other on these nodes."""
    seen = see_failures(Observation((), {}), JobMemory(), CLOCK)
    for attempt, node in enumerate(nodes):
        pod = make_pod(0, attempt, phase="Failed", node=node, last_exit_code=137)
        seen = see_failures(Observation((pod,), {}), after(seen), CLOCK)
    return seen.nodes


@pytest.mark.parametrize(
    ("nodes", "now_s", "avoided"),
    [
        pytest.param(["a"], 100.0, {}, id="one failure may be the pod's"),
        pytest.param(["a", "a"], 100.0, {0: ("a",)}, id="two in a row on one node"),
        pytest.param(["a", "b", "a"], 100.0, {}, id="on different nodes"),
        pytest.param(["a", "a", "b", "b"], 100.0, {0: ("b",)}, id="the last node only"),
        pytest.param(["a", "a"], 3699.0, {0: ("a",)}, id="as long as failures count"),
        pytest.param(["a", "a"], 3700.0, {}, id="and no longer: it may be repaired"),
    ],
)
def test_avoided_nodes(nodes: list[str], now_s: float, avoided: dict[int, tuple[str, ...]]) -> None:
    assert avoided_nodes(failed_pods(*nodes), now_s, 3600.0) == avoided


def of_init(failures: int, **changes: Any) -> Pod:
    return make_pod(
        0, phase="Pending", init_failures=failures, **{"init_failed": "setup", "init_exit_code": 3, **changes}
    )


def test_failures_of_an_init_container_count_once_each() -> None:
    memory, found = remembered(), []
    for number in (0, 1, 1, 2, 4):
        pod = of_init(number) if number else make_pod(0, phase="Pending")
        seen = see_failures(Observation((pod,)), memory, CLOCK)
        memory = after(seen)
        found.append([(f.init, f.exit_code, f.container) for f in seen.failures])
    one = ("setup", 3, True)
    assert found == [[], [one], [], [one], [one, one]]


@pytest.mark.parametrize(
    ("pod", "memory"),
    [
        pytest.param(of_init(2, init_failed="", init_exit_code=None), remembered(), id="run again"),
        pytest.param(of_init(2, init_exit_code=255), remembered(), id="its node restarts"),
        pytest.param(of_init(2, terminating=True), remembered(), id="the pod is deleted"),
        pytest.param(of_init(2), JobMemory(), id="an earlier operator has counted them"),
    ],
)
def test_ends_of_an_init_container_that_do_not_count(pod: Pod, memory: JobMemory) -> None:
    assert see_failures(Observation((pod,)), memory, CLOCK).failures == ()

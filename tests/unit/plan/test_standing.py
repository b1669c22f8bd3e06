"""How each worker stands in the newest generation: a table of conditions, clocks and pods."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from regroup.protocol.document import PLANNED
from regroup.protocol.state import Phase
from regroup.protocol.wire import Draining
from regroup_operator.api.members import MemberId
from regroup_operator.model.records import AgentSession, Observation, Pod, ProcessExit, Settings
from regroup_operator.model.worker import Current, Standing, Worker
from regroup_operator.plan.facts.stalls import SCRIPT_ANSWER_S
from regroup_operator.plan.facts.standing import GroupView, assess
from tests.builders.plan import make_current, make_fault, make_pod, make_progress, make_seal, make_session

NOW_S = 100.0


def stand(
    pod: Pod | None,
    session: AgentSession | None,
    current: Current | None = None,
    *,
    others: tuple[AgentSession, ...] = (),
    tier: str | None = "Session",
    released: frozenset[str] = frozenset(),
    term_started_s: float = 0.0,
    processes: int = 1,
    admitted_by_s: float = 0.0,
    waiting: frozenset[str] = frozenset(),
    **more: Any,
) -> Worker:
    """Return worker 0 of a generation of three; the others train unless said otherwise."""
    peers = others or (make_session(1, Phase.TRAINING, 1), make_session(2, Phase.TRAINING, 1))
    sessions = {s.pod_uid: s for s in (*peers, *((session,) if session else ()))}
    workers = assess(
        GroupView(
            obs=Observation(
                (*((pod,) if pod else ()), make_pod(1), make_pod(2)),
                sessions,
                term_started_s=term_started_s,
                admitted_by_s=admitted_by_s,
                waiting=waiting,
            ),
            current=current or make_current(),
            tier=tier,
            released=released,
            processes=processes,
            now_s=NOW_S,
            disconnect_s=5.0,
            settings=Settings(),
            **more,
        )
    )
    return workers[0]


G2 = make_current(number=2, adopted=False)
G2_PLANNED = make_current(number=2, adopted=False, kind=PLANNED)
G2_LAUNCHES = make_current(number=2, adopted=False, launches=True, incarnations={"uid-0.0": 4})
UNKNOWN = make_current(number=2, adopted=False, has_document=False, incarnations={})


def killed_in(generation: int) -> dict[str, Any]:
    """Return what a session knows of a process that its agent killed on the operator's word."""
    message = "Process 0 is killed."
    ended = ProcessExit(90.0, 1, 0, -9, generation=generation, hung=message)
    return {"fault": make_fault("hung", message=message, exit_code=-9), "exits": (ended,), "num_exits": 1}


@pytest.mark.parametrize(
    ("session", "current", "want", "why"),
    [
        pytest.param(make_session(0, Phase.TRAINING, 1), None, Standing.TRAINING, "", id="trains"),
        pytest.param(make_session(0, Phase.FORMING, 2), G2, Standing.FORMING, "", id="forms"),
        pytest.param(make_session(0, Phase.ADOPTING, 2), G2, Standing.FORMING, "", id="adopts"),
        pytest.param(make_session(0, Phase.FINISHED, 1), None, Standing.FINISHED, "", id="has finished"),
        pytest.param(make_session(0, Phase.BROKEN, 1), None, Standing.BROKEN, "CollectiveFailed", id="lost its group"),
        pytest.param(
            make_session(0, Phase.READY, entered=1), None, Standing.DIED, "ProcessExited",
            id="entered once and waits again: its process was restarted",
        ),
        pytest.param(
            make_session(0, Phase.STARTING, entered=1), None, Standing.DIED, "ProcessExited",
            id="entered once and starts: a process of it ended",
        ),
        pytest.param(
            make_session(0, Phase.READY, session=False, entered=1), None, Standing.DIED, "ProcessExited",
            id="its agent was restarted",
        ),
        pytest.param(
            make_session(0, Phase.READY, entered=1, rebooted_at_s=1.0), None, Standing.DIED, "ContainerRestarted",
            id="another agent in the same pod: its container was started again",
        ),
        pytest.param(
            make_session(0, Phase.READY, entered=1, rebooted_at_s=1.0, fault=make_fault("exit", exit_code=1)), None,
            Standing.DIED, "ProcessExited", id="a process of the new agent ended later",
        ),
        pytest.param(
            make_session(0, Phase.TRAINING, 1), G2, Standing.PENDING, "", id="still trains in the generation before"
        ),
        pytest.param(
            make_session(0, Phase.BROKEN, 1), G2, Standing.PENDING, "",
            id="left the one before broken and has not entered the newest: a fault of old (FENCE)",
        ),
        pytest.param(
            make_session(0, Phase.BROKEN, 1), G2_PLANNED, Standing.PENDING, "",
            id="the old group broke while a planned one is pending: it enters that",
        ),
        pytest.param(make_session(0, Phase.READY), G2, Standing.PENDING, "", id="joiner that has not entered"),
        pytest.param(
            make_session(0, Phase.STARTING), G2, Standing.DIED, "ProcessExited", id="joiner that lost its process before entering"
        ),
        pytest.param(
            make_session(0, Phase.STARTING), UNKNOWN, Standing.STARTING, "", id="the same under another operator is waited for"
        ),
        pytest.param(
            make_session(0, Phase.STARTING, incarnation=5), G2_LAUNCHES, Standing.STARTING, "",
            id="its first process of this generation starts, session known",
        ),
        pytest.param(
            make_session(0, Phase.STARTING, incarnation=6), G2_LAUNCHES, Standing.DIED, "ProcessExited",
            id="its second process of this generation starts",
        ),
        pytest.param(
            make_session(0, Phase.READY, incarnation=6), G2_LAUNCHES, Standing.PENDING, "",
            id="its second process waits: it enters by itself",
        ),
        pytest.param(
            make_session(0, Phase.STARTING, 2, session=False), G2, Standing.STARTING, "",
            id="script starts with this generation's environment",
        ),
        pytest.param(
            make_session(0, Phase.STARTING, 1, session=False, entered=1), G2_LAUNCHES, Standing.STARTING, "",
            id="script whose old processes are being ended",
        ),
        pytest.param(
            make_session(0, Phase.READY, 1, session=False, entered=1), make_current(launches=True), Standing.DIED,
            "ProcessExited", id="script whose process ended",
        ),
        pytest.param(
            make_session(0, Phase.BROKEN, 1, session=False), make_current(launches=True), Standing.BROKEN,
            "CollectiveFailed", id="script that ends the siblings of a lost process",
        ),
        pytest.param(
            make_session(0, Phase.BROKEN, 2, session=False, entered=2, **killed_in(2)), replace(G2, adopted=True),
            Standing.BROKEN, "Hung", id="script that ends the siblings of a process that hung",
        ),
        pytest.param(
            make_session(0, Phase.BROKEN, 2, session=False, entered=2, **killed_in(1)), replace(G2, adopted=True),
            Standing.BROKEN, "CollectiveFailed", id="its process hung in the generation before",
        ),
        pytest.param(
            make_session(0, Phase.STARTING, entered=2, **killed_in(2)), replace(G2, adopted=True), Standing.DIED, "Hung",
            id="its process hung in a generation that trained, and was killed",
        ),
        pytest.param(
            make_session(0, Phase.STARTING, entered=2, **killed_in(2)), G2, Standing.DIED, "Overdue",
            id="its process did not come to the store in time, and was killed: no hang",
        ),
        pytest.param(
            make_session(0, Phase.STARTING, entered=1, **killed_in(1)), G2, Standing.DIED, "Overdue",
            id="its process did not leave the one before in time, and was killed: no hang",
        ),
        pytest.param(
            make_session(0, Phase.STOPPED, 1, entered=1), None, Standing.LOST, "Stopped", id="stopped without having been told"
        ),
        pytest.param(
            make_session(0, Phase.STOPPED, 1, entered=1, draining=Draining(0.0)), None, Standing.LOST, "Drained",
            id="stopped at the end of its grace period",
        ),
        pytest.param(
            make_session(0, Phase.STOPPED, 1, entered=1, told_outcome="Complete"), None, Standing.FINISHED, "Stopped",
            id="stopped as told",
        ),
    ],
)  # fmt: skip
def test_standing_of_a_connected_member(session: AgentSession, current: Current | None, want: str, why: str) -> None:
    got = stand(make_pod(0), session, current)
    assert (got.standing, got.why) == (want, why)
    assert got.since_s == session.condition_at_s


def gone(**changes: Any) -> AgentSession:
    """A member whose stream closed 4 s ago at step 10."""
    return make_session(0, Phase.TRAINING, 1, **{"connected": False, "closed_at_s": 96.0, "closed_step": 10, **changes})


def peers(step: int, at_s: float, generation: int = 1) -> tuple[AgentSession, ...]:
    progress: dict[str, Any] = {
        "progress": make_progress(step),
        "progress_generation": generation,
        "progress_at_s": at_s,
        "progress_told_s": at_s,
    }
    return (make_session(1, Phase.TRAINING, 1, **progress), make_session(2, Phase.TRAINING, 1))


def of_slot_2(session: AgentSession) -> AgentSession:
    """The same told by another member."""
    return replace(session, pod_uid=make_session(2).pod_uid)


def asked(since_s: float, **changes: Any) -> AgentSession:
    """A member with an open stream that has not answered since."""
    return make_session(0, Phase.TRAINING, 1, unanswered_since_s=since_s, **changes)


def stalled(at_s: float, step_s: float = 0.1) -> tuple[AgentSession, ...]:
    """The peers of a group whose newest progress is of `at_s`."""
    first, second = peers(10, at_s)
    return (replace(first, step_s=step_s), second)


BROKEN_PEER = (
    make_session(1, Phase.BROKEN, 1, fault=make_fault("collective"), fault_generation=1),
    make_session(2, Phase.TRAINING, 1),
)


@pytest.mark.parametrize(
    ("session", "others", "want", "lost_at_s"),
    [
        pytest.param(gone(closed_at_s=98.5), (), Standing.SILENT, 100.5, id="5 s less 3 s of probes after its stream closed"),
        pytest.param(gone(closed_at_s=98.0), (), Standing.LOST, None, id="lost at that moment"),
        pytest.param(gone(), peers(12, 99.0), Standing.SILENT, 104.0, id="two steps further is proof of life"),
        pytest.param(gone(), peers(11, 99.0), Standing.LOST, None, id="one step may complete from buffers"),
        pytest.param(gone(), peers(12, 94.0), Standing.LOST, None, id="old progress is none"),
        pytest.param(gone(), peers(12, 99.0, generation=0), Standing.LOST, None, id="progress of an older generation is none"),
        pytest.param(gone(closed_at_s=99.9), BROKEN_PEER, Standing.LOST, None, id="closed stream and a peer's fault: at once"),
        pytest.param(
            gone(closed_at_s=99.9), (BROKEN_PEER[0], of_slot_2(peers(15, 96.0)[0])), Standing.LOST, None,
            id="the same where steps of before are told only now",
        ),
        pytest.param(
            gone(closed_at_s=99.9), (BROKEN_PEER[0], of_slot_2(peers(15, 99.0)[0])), Standing.SILENT, 104.0,
            id="unless they may be later",
        ),
        pytest.param(
            gone(closed_at_s=99.9), (make_session(1, Phase.BROKEN, 1, fault=make_fault("witness"), fault_generation=1),),
            Standing.SILENT, 101.9, id="a refusal is no fault of a peer",
        ),
    ],
)  # fmt: skip
def test_standing_of_a_silent_member(session: AgentSession, others: Any, want: str, lost_at_s: float | None) -> None:
    got = stand(make_pod(0), session, others=others)
    assert (got.standing, got.lost_at_s) == (want, lost_at_s)
    assert got.why == ("Disconnected" if want == Standing.LOST else "")
    assert not got.available


@pytest.mark.parametrize(
    ("session", "others", "want", "lost_at_s"),
    [
        pytest.param(asked(99.4), stalled(98.0), Standing.SILENT, 104.4, id="no answer for half a second while steps are overdue"),
        pytest.param(asked(99.6), stalled(98.0), Standing.TRAINING, None, id="it may still answer"),
        pytest.param(asked(99.4), stalled(99.0), Standing.TRAINING, None, id="steps are committed: alive"),
        pytest.param(asked(90.0), stalled(98.0), Standing.SILENT, 103.0, id="counted from the newest progress"),
        pytest.param(asked(95.0), stalled(93.0), Standing.LOST, None, id="lost after disconnectSeconds without an answer"),
        pytest.param(asked(95.0), stalled(93.0, step_s=3.0), Standing.TRAINING, None, id="slow steps are not overdue yet"),
        pytest.param(asked(90.0), peers(10, 90.0), Standing.TRAINING, None, id="how long a step takes is not known: it has longer"),
        pytest.param(
            asked(95.0, connected=False, closed_at_s=99.9), stalled(93.0), Standing.LOST, None,
            id="the stream closes at last: it was silent for longer",
        ),
    ],
)  # fmt: skip
def test_standing_of_a_member_that_does_not_answer(
    session: AgentSession, others: Any, want: str, lost_at_s: float | None
) -> None:
    got = stand(make_pod(0), session, others=others)
    assert (got.standing, got.lost_at_s) == (want, lost_at_s)
    if want == Standing.LOST:
        assert (got.why, got.last_seen_s) == ("Unresponsive" if session.connected else "Disconnected", 93.0)


@pytest.mark.parametrize(
    ("adopted", "unanswered_s", "want"),
    [
        pytest.param(True, SCRIPT_ANSWER_S - 1, Standing.STARTING, id="its node is busy, its processes are well"),
        pytest.param(True, SCRIPT_ANSWER_S, Standing.LOST, id="it hangs"),
        pytest.param(False, 5.0, Standing.LOST, id="a generation that does not start is not waited for so long"),
    ],
)
def test_standing_of_a_script_whose_agent_does_not_answer(adopted: bool, unanswered_s: float, want: str) -> None:
    session = make_session(0, Phase.STARTING, 1, session=False, unanswered_since_s=NOW_S - unanswered_s)
    got = stand(make_pod(0), session, make_current(adopted=adopted, launches=True), tier="Script")
    assert (got.standing, got.available) == (want, want == Standing.STARTING)


def test_progress_keeps_a_member_that_has_not_called_this_operator() -> None:
    """It trains: no synchronous step completes without every rank. What was said again after a reconnect proves nothing."""
    kept = stand(make_pod(0), None, others=stalled(99.0), term_started_s=70.0)
    assert (kept.standing, kept.lost_at_s) == (Standing.SILENT, 104.0)
    resaid = stand(make_pod(0), None, others=peers(10, 99.0), term_started_s=70.0)
    assert (resaid.standing, resaid.why) == (Standing.LOST, "NeverConnected")


@pytest.mark.parametrize(
    ("given", "want"),
    [
        pytest.param({}, (Standing.LOST, 90.0), id="the grace of the term is over"),
        pytest.param({"admitted_by_s": 130.0}, (Standing.SILENT, 130.0), id="not all agents can have been admitted yet"),
        pytest.param({"admitted_by_s": 80.0}, (Standing.LOST, 90.0), id="few agents"),
        pytest.param({"waiting": frozenset({"uid-0.0"})}, (Standing.SILENT, 105.0), id="its agent waits to be admitted"),
        pytest.param({"waiting": frozenset({"uid-1.0"})}, (Standing.LOST, 90.0), id="another agent does"),
    ],
)  # fmt: skip
def test_member_that_has_not_called_a_new_leader(given: dict[str, Any], want: tuple[str, float]) -> None:
    got = stand(make_pod(0), None, others=peers(10, 60.0), term_started_s=70.0, **given)
    assert (got.standing, got.since_s if got.standing == Standing.LOST else got.lost_at_s) == want


@pytest.mark.parametrize(
    ("given", "since_s"),
    [
        pytest.param({}, 85.0, id="it has not called since the term began"),
        pytest.param({"waiting": frozenset({"uid-0.0"})}, 100.0, id="its agent has called, and waits to be admitted"),
        pytest.param(
            {"waiting": frozenset({"uid-0.0"}), "term_started_s": 75.0}, 95.0, id="but not beyond the grace of the term"
        ),
    ],
)
def test_since_when_nothing_is_known_of_a_member(given: dict[str, Any], since_s: float) -> None:
    got = stand(make_pod(0), None, **{"term_started_s": 85.0} | given)
    assert (got.standing, got.since_s) == (Standing.SILENT, since_s)


@pytest.mark.parametrize(
    ("pod", "session", "term_started_s", "want", "why"),
    [
        pytest.param(None, None, 0.0, Standing.LOST, "PodDeleted", id="the API has the pod no more"),
        pytest.param(make_pod(phase="Failed"), make_session(0, Phase.TRAINING, 1), 0.0, Standing.LOST, "PodFailed", id="failed"),
        pytest.param(
            make_pod(phase="Failed"), make_session(0, Phase.TRAINING, 1, draining=Draining(0.0)), 0.0, Standing.LOST, "Drained",
            id="the kubelet has evicted it",
        ),
        pytest.param(
            make_pod(), make_session(0, Phase.STOPPED, 1, connected=False, draining=Draining(0.0)), 0.0, Standing.LOST, "Drained",
            id="its agent has exited after SIGTERM",
        ),
        pytest.param(
            make_pod(phase="Failed"), make_session(0, Phase.FINISHED, 1), 0.0, Standing.LOST, "PodFailed",
            id="failed after it had finished: its state is gone",
        ),
        pytest.param(make_pod(phase="Succeeded"), None, 0.0, Standing.LOST, "PodFailed", id="ended without a word"),
        pytest.param(
            make_pod(node_ready=False), make_session(0, Phase.TRAINING, 1), 0.0, Standing.TRAINING, "",
            id="NotReady proves nothing (LOST)",
        ),
        pytest.param(make_pod(), None, 85.0, Standing.SILENT, "", id="never called in this young term: unknown"),
        pytest.param(make_pod(), None, 80.0, Standing.LOST, "NeverConnected", id="never called in 20 s"),
        pytest.param(
            make_pod(terminating=True), make_session(0, Phase.TRAINING, 1), 0.0, Standing.TRAINING, "", id="terminating, trains on"
        ),
    ],
)  # fmt: skip
def test_standing_by_the_pod(
    pod: Pod | None, session: AgentSession | None, term_started_s: float, want: str, why: str
) -> None:
    got = stand(pod, session, term_started_s=term_started_s)
    assert (got.standing, got.why, got.id) == (want, why, MemberId(0, 0))


@pytest.mark.parametrize(
    ("session", "tier", "current", "available"),
    [
        pytest.param(make_session(3), "Session", "g", True, id="session: attached and ready"),
        pytest.param(make_session(3, Phase.TRAINING, 1), "Session", "g", True, id="session: in a group"),
        pytest.param(make_session(3, Phase.STARTING), "Session", "g", False, id="session: not all attached"),
        pytest.param(make_session(3, Phase.READY, session=False), "Session", "g", False, id="session: no process yet"),
        pytest.param(
            make_session(3, Phase.READY, session=False), None, None, True, id="first generation: agent connected"
        ),
        pytest.param(make_session(3, Phase.STARTING, 1, session=False), "Script", "g", True, id="script: runs"),
        pytest.param(make_session(3, connected=False), "Session", "g", False, id="without a stream"),
        pytest.param(None, "Session", "g", False, id="without a session"),
        pytest.param(make_session(3, unanswered_since_s=96.0), "Session", "g", True, id="it may still answer"),
        pytest.param(
            make_session(3, unanswered_since_s=95.0), "Session", "g", False, id="its stream is open, and it is frozen"
        ),
    ],
)
def test_availability(session: AgentSession | None, tier: str | None, current: str | None, available: bool) -> None:
    got = assess(
        GroupView(
            obs=Observation((make_pod(3),), {session.pod_uid: session} if session else {}, term_started_s=0.0),
            current=make_current() if current else None,
            tier=tier,
            released=frozenset(),
            processes=1,
            now_s=NOW_S,
            disconnect_s=5.0,
            settings=Settings(),
        )
    )[-1]
    assert (got.standing, got.available) == (Standing.OUTSIDE, available)


def test_released_pod_is_never_available_again() -> None:
    assert not stand(make_pod(0), make_session(0), released=frozenset({"uid-0.0"})).available


def test_terminating_member_is_available_until_it_is_gone() -> None:
    """It may be the only holder of the state; that it is leaving is `draining`."""
    got = stand(make_pod(0, terminating=True), make_session(0, Phase.BROKEN, 1))
    assert (got.available, got.draining) == (True, True)


def test_two_pods_of_a_slot_are_two_workers() -> None:
    got = assess(
        GroupView(
            obs=Observation(
                (make_pod(0), make_pod(0, 1)),
                {"uid-0.0": make_session(0, Phase.TRAINING, 1), "uid-0.1": make_session(0, attempt=1)},
                term_started_s=0.0,
            ),
            current=make_current((0,)),
            tier="Session",
            released=frozenset(),
            processes=1,
            now_s=NOW_S,
            disconnect_s=5.0,
            settings=Settings(),
        )
    )
    assert [(w.id, w.standing) for w in got] == [((0, 0), Standing.TRAINING), ((0, 1), Standing.OUTSIDE)]


@pytest.mark.parametrize(
    ("pod", "why"),
    [
        pytest.param({"last_exit_code": 255, "last_exit_reason": "Unknown"}, "NodeRestarted", id="its node lost power"),
        pytest.param(
            {"last_exit_code": 137, "last_exit_reason": "OOMKilled"}, "OOMKilled", id="the kernel killed the agent"
        ),
        pytest.param(
            {"last_exit_code": 137, "last_exit_reason": "Error"}, "ContainerRestarted", id="somebody killed it"
        ),
    ],
)
def test_pod_says_why_its_container_was_started_again(pod: dict[str, Any], why: str) -> None:
    session = make_session(0, Phase.READY, entered=1, rebooted_at_s=1.0)
    worker = stand(make_pod(0, container_restarts=1, **pod), session)
    assert (worker.standing, worker.why) == (Standing.DIED, why)


@pytest.mark.parametrize(
    ("session", "until_s"),
    [
        pytest.param(make_session(0, Phase.TRAINING, 1), inf, id="it can be reached: until it tells"),
        pytest.param(make_session(0, Phase.READY, adopted_to=1, seal=make_seal(1)), None, id="it has told"),
        pytest.param(make_session(0, Phase.FORMING, 1), None, id="it has never adopted: it holds nothing"),
        pytest.param(gone(closed_at_s=90.0), 125.0, id="it cannot be reached: until its pod is given up"),
        pytest.param(gone(closed_at_s=60.0), None, id="that was too long ago"),
        pytest.param(make_session(0, Phase.TRAINING, 1, unanswered_since_s=95.0), 130.0, id="it does not answer"),
        pytest.param(None, None, id="another operator's term is long over"),
    ],
)
def test_how_long_a_worker_is_waited_for_to_tell_what_it_holds(
    session: AgentSession | None, until_s: float | None
) -> None:
    """Rule BEST: the alternative is an older state."""
    assert stand(make_pod(0), session).silent_until_s == until_s

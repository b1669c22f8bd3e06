"""Who observes whom, and when observers prove that a member is lost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from regroup.protocol.state import Phase
from regroup_operator.model.records import AgentSession, Observation, Pod, Settings, Silence
from regroup_operator.model.worker import Standing, Worker
from regroup_operator.plan.facts.observers import MAX_OBSERVED, see_silences, who_observes
from regroup_operator.plan.facts.standing import GroupView, assess
from tests.builders.plan import make_current, make_pod, make_progress, make_session, make_worker, uid_of

NOW_S = 100.0


def member(slot: int, node: str, **session: Any) -> Worker:
    changes = {"observed_port": 7000 + slot} | session
    return make_worker(slot, pod=make_pod(slot, node=node), session=make_session(slot, Phase.TRAINING, 1, **changes))


def spread(*nodes: str) -> list[Worker]:
    """Return a worker on each of these nodes, in their order."""
    return [member(slot, node) for slot, node in enumerate(nodes)]


def observers_of(workers: list[Worker]) -> dict[int, list[int]]:
    """Return by slot who observes it."""
    slots = {w.pod.uid: w.id.slot for w in workers if w.pod}
    out: dict[int, list[int]] = {w.id.slot: [] for w in workers}
    for uid, observes in who_observes(workers).items():
        for one in observes:
            out[slots[one.pod_uid]].append(slots[uid])
    return {slot: sorted(found) for slot, found in out.items()}


@pytest.mark.parametrize(
    ("workers", "want"),
    [
        pytest.param(spread("a"), {0: []}, id="alone"),
        pytest.param(spread("a", "a", "a"), {0: [], 1: [], 2: []}, id="one node: regroup run"),
        pytest.param(spread("", "", ""), {0: [], 1: [], 2: []}, id="nodes are not known"),
        pytest.param(spread("a", "b"), {0: [1], 1: [0]}, id="two workers: the operator is the second observer"),
        pytest.param(spread("a", "b", "c"), {0: [1, 2], 1: [0, 2], 2: [0, 1]}, id="three"),
        pytest.param(spread("a", "b", "c", "d"), {0: [1, 2], 1: [2, 3], 2: [0, 3], 3: [0, 1]}, id="a ring"),
        pytest.param(
            spread("a", "a", "b", "b", "c", "c"), {0: [2, 4], 1: [3, 5], 2: [0, 4], 3: [1, 5], 4: [0, 2], 5: [1, 3]},
            id="two on each node",
        ),
        pytest.param(
            [*spread("a", "b", "c"), member(3, "d", observed_port=0)], {0: [1, 2], 1: [0, 2], 2: [0, 1], 3: []},
            id="an agent that can be observed nowhere observes nobody",
        ),
        pytest.param(
            [*spread("a", "b"), make_worker(2, pod=make_pod(2, node="c"), session=None)], {0: [1], 1: [0], 2: []},
            id="an agent that has not called yet",
        ),
    ],
)  # fmt: skip
def test_who_observes_whom(workers: list[Worker], want: dict[int, list[int]]) -> None:
    assert observers_of(workers) == want


@pytest.mark.parametrize(("num_nodes", "per_node"), [(3, 8), (5, 1), (40, 4), (625, 8)])
def test_everybody_observes_two_from_two_other_nodes_and_is_observed_by_two(num_nodes: int, per_node: int) -> None:
    workers = spread(*(f"n{at % num_nodes}" for at in range(num_nodes * per_node)))
    nodes = {w.id.slot: w.pod.node for w in workers if w.pod}
    for slot, observers in observers_of(workers).items():
        assert len({nodes[slot], *(nodes[other] for other in observers)}) == 3
    assert set(Counter(len(o) for o in who_observes(workers).values())) == {2}


def test_nobody_observes_more_than_its_share_of_a_crowded_node() -> None:
    workers = spread(*["a"] * 100, "b", "c")
    observes = who_observes(workers)
    assert {len(observes[uid_of(slot)]) for slot in (100, 101)} == {MAX_OBSERVED}


def test_observed_addresses_are_those_that_the_agents_report() -> None:
    (one, _) = who_observes(spread("a", "b", "c"))[uid_of(0)]
    assert (one.pod_uid, one.host, one.port) == (uid_of(1), "10.0.0.1", 7001)


# --- verdicts --------------------------------------------------------------------------------------------------------


def says(slot: int, of: int = 0, age_s: float = 1.5, **changes: Any) -> AgentSession:
    """An observer that has just said that it hears nothing of worker `of`."""
    silence = Silence(uid_of(of), NOW_S - age_s, age_s)
    values: dict[str, Any] = {"heard_at_s": NOW_S, "unheard": (silence,), "observed_port": 7000 + slot} | changes
    return make_session(slot, Phase.TRAINING, 1, **values)


def hears(slot: int, **changes: Any) -> AgentSession:
    return make_session(slot, Phase.TRAINING, 1, **{"heard_at_s": NOW_S, "observed_port": 7000 + slot} | changes)


SUSPECT = make_session(0, Phase.TRAINING, 1, heard_at_s=98.0, unanswered_since_s=99.0, observed_port=7000)


def stand(
    suspect: AgentSession | None, *others: AgentSession, pods: tuple[Pod, ...] = (), tier: str = "Session"
) -> Worker:
    """Return worker 0 of a generation of it and those that observe it, each on a node of its own unless `pods` says otherwise."""
    slots = [int(s.pod_uid.removeprefix("uid-").split(".")[0]) for s in others]
    there = pods or tuple(make_pod(slot) for slot in (0, *slots))
    sessions = {s.pod_uid: s for s in (*others, *((suspect,) if suspect else ()))}
    silences = see_silences(there, sessions, there)
    view = GroupView(
        current=make_current((0, *slots)), tier=tier, obs=Observation(there, sessions, term_started_s=0.0),
        released=frozenset(), processes=1, now_s=NOW_S, disconnect_s=5.0, settings=Settings(), unheard=silences.proven,
    )  # fmt: skip
    return assess(view)[0]


def with_progress(session: AgentSession, at_s: float) -> AgentSession:
    return make_session(
        2, Phase.TRAINING, 1, heard_at_s=NOW_S, unheard=session.unheard, observed_port=7002,
        progress=make_progress(8), progress_generation=1, progress_at_s=at_s, progress_told_s=NOW_S, step_s=30.0,
    )  # fmt: skip


SHORT = 1.25
ON_ONE_NODE = (make_pod(0), make_pod(1, node="x"), make_pod(2, node="x"))
WITH_THE_SUSPECT = (make_pod(0), make_pod(1, node="node-0"), make_pod(2))


@pytest.mark.parametrize(
    ("suspect", "others", "pods", "want"),
    [
        pytest.param(SUSPECT, (says(1), says(2)), (), "Unheard", id="two on different nodes"),
        pytest.param(SUSPECT, (says(1), says(2, age_s=SHORT)), (), "", id="the second one not for long enough"),
        pytest.param(SUSPECT, (says(1), hears(2)), (), "", id="the second one hears it"),
        pytest.param(SUSPECT, (says(1), says(2, of=1)), (), "", id="each of another one"),
        pytest.param(SUSPECT, (says(1), says(2), hears(3)), (), "Unheard", id="who does not observe it does not matter"),
        pytest.param(SUSPECT, (says(1), says(2, connected=False, closed_at_s=99.9)), (), "", id="the second one is away itself"),
        pytest.param(SUSPECT, (says(1), says(2), hears(3)), (*ON_ONE_NODE, make_pod(3)), "", id="two on one node are one"),
        pytest.param(SUSPECT, (says(1), says(2), hears(3)), (*WITH_THE_SUSPECT, make_pod(3)), "", id="one on its own node"),
        pytest.param(
            SUSPECT, (says(1), says(2)), (make_pod(0, node=""), make_pod(1), make_pod(2)), "", id="its node is not known"
        ),
        pytest.param(
            make_session(0, Phase.TRAINING, 1, heard_at_s=98.6, unanswered_since_s=99.0), (says(1), says(2)), (), "",
            id="its own word has come since",
        ),
        pytest.param(
            make_session(0, Phase.TRAINING, 1, heard_at_s=98.0), (says(1), says(2)), (), "", id="it has not been asked"
        ),
        pytest.param(
            make_session(0, Phase.TRAINING, 1, heard_at_s=98.0, unanswered_since_s=99.6), (says(1), says(2)), (), "",
            id="it may still answer",
        ),
        pytest.param(SUSPECT, (says(1), with_progress(says(2), 98.7)), (), "", id="a step was committed since"),
        pytest.param(SUSPECT, (says(1), with_progress(says(2), 98.4)), (), "Unheard", id="a step was committed before"),
        pytest.param(
            make_session(0, Phase.TRAINING, 1, heard_at_s=90.0, connected=False, closed_at_s=99.0),
            (says(1), says(2)), (), "Unheard", id="its stream has closed already",
        ),
        pytest.param(
            make_session(0, Phase.FINISHED, 1, heard_at_s=90.0, unanswered_since_s=99.0), (says(1), says(2)), (), "Unheard",
            id="it has finished, and the others have not",
        ),
        pytest.param(
            make_session(0, Phase.TRAINING, 1, heard_at_s=97.0, unanswered_since_s=98.5), (says(1),), (), "Unheard",
            id="two workers: the operator is the second observer",
        ),
        pytest.param(
            make_session(0, Phase.TRAINING, 1, heard_at_s=97.0, unanswered_since_s=98.6), (says(1),), (), "",
            id="two workers: the operator has asked too late",
        ),
        pytest.param(
            make_session(0, Phase.TRAINING, 1, heard_at_s=97.0, unanswered_since_s=98.5), (says(1), says(2)), ON_ONE_NODE,
            "Unheard", id="all others on one node: the operator is the second observer",
        ),
        pytest.param(
            make_session(0, Phase.TRAINING, 1, heard_at_s=97.0, unanswered_since_s=98.5), (says(1), hears(2)), (), "",
            id="where two can observe, the operator is none",
        ),
    ],
)  # fmt: skip
def test_verdict_of_observers(
    suspect: AgentSession, others: tuple[AgentSession, ...], pods: tuple[Pod, ...], want: str
) -> None:
    got = stand(suspect, *others, pods=pods)
    assert (got.standing == Standing.LOST, got.why) == (bool(want), want)
    if want:
        assert (got.last_seen_s, got.since_s, got.available) == (98.5, 100.0, False)


def test_script_is_judged_by_its_observers_too() -> None:
    suspect = make_session(0, Phase.STARTING, 1, session=False, heard_at_s=50.0, unanswered_since_s=99.0)
    assert stand(suspect, says(1), says(2), tier="Script").why == "Unheard"


def test_worker_that_has_not_called_this_operator_is_not_judged() -> None:
    assert stand(None, says(1), says(2)).why == "NeverConnected"


def test_silence_is_looked_at_again_when_a_question_has_had_its_time() -> None:
    pods = tuple(make_pod(slot) for slot in range(3))
    sessions = {s.pod_uid: s for s in (SUSPECT, says(1), says(2))}
    silences = see_silences(pods, sessions, pods)
    assert sorted(silences.due_s(sessions)) == [99.5, 100.0, 100.5]
    assert silences.suspected == {uid_of(0): 98.5}


def test_nothing_is_computed_of_a_job_in_which_everybody_answers() -> None:
    pods = tuple(make_pod(slot) for slot in range(3))
    silences = see_silences(pods, {s.pod_uid: s for s in (hears(0), hears(1), hears(2))}, pods)
    assert (silences.suspected, silences.proven, silences.due_s({})) == ({}, {}, [])

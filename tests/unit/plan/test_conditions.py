"""Phase, conditions and columns: what people read is true."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from regroup_operator.api.status import Progress, Samples
from regroup_operator.model.plan import JobCondition, Verdict
from regroup_operator.model.records import Settings
from regroup_operator.model.waits import UntilEvent
from regroup_operator.model.worker import Announce, Current, Decision, Keep, Standing, Wait, Worker
from regroup_operator.plan.report.conditions import (
    Course,
    Workforce,
    duration,
    phase_of,
    summary,
    training_conditions,
    worker_conditions,
)
from tests.builders.plan import make_current, make_pod, make_session, make_worker

A, B, C = make_worker(0), make_worker(1), make_worker(2)
KEEP = Keep(UntilEvent.CHANGE)
FORCED, PLANNED = Announce("forced", (A,), "r", "m"), Announce("planned", (A,), "r", "m")
FORMING = make_current(adopted=False)
PENDING_POD = make_worker(0, Standing.OUTSIDE, pod=make_pod(phase="Pending"))


def wait(reason: str) -> Wait:
    return Wait(reason, "", UntilEvent.MORE_WORKERS)


@pytest.mark.parametrize(
    ("current", "decision", "workers", "trained", "want"),
    [
        pytest.param(None, wait("TooFewReady"), [PENDING_POD], False, "Pending", id="no pod runs"),
        pytest.param(None, wait("TooFewReady"), [A, PENDING_POD], False, "Starting", id="a pod runs"),
        pytest.param(None, FORCED, [A], False, "Starting", id="the first generation is announced"),
        pytest.param(FORMING, KEEP, [A, B], False, "Starting", id="nobody has adopted ever"),
        pytest.param(FORMING, FORCED, [A, B], False, "Starting", id="a fault before anybody trained"),
        pytest.param(make_current(), KEEP, [A, B], True, "Running", id="all have adopted"),
        pytest.param(make_current(), PLANNED, [A, B], True, "Running", id="a planned change interrupts nobody"),
        pytest.param(replace(FORMING, kind="planned"), KEEP, [A, B], True, "Running", id="pending: the old group trains"),
        pytest.param(make_current(), FORCED, [A, B], True, "Recovering", id="a fault"),
        pytest.param(FORMING, KEEP, [A, B], True, "Recovering", id="forming after a fault"),
        pytest.param(make_current(), wait("Settling"), [A, make_worker(1, Standing.BROKEN)], True, "Recovering", id="broken"),
        pytest.param(make_current(), wait("TooFewMembers"), [A], True, "Waiting", id="too few"),
        pytest.param(FORMING, wait("NoWitness"), [A], True, "Waiting", id="no witness"),
        pytest.param(make_current(), wait("ReplacingFirst"), [A, B], True, "Running", id="a drain that waits"),
        pytest.param(make_current(), KEEP, [A, make_worker(1, Standing.SILENT)], True, "Running", id="silent, not lost"),
    ],
)  # fmt: skip
def test_phase(current: Current | None, decision: Decision, workers: list[Worker], trained: bool, want: str) -> None:
    assert phase_of(current=current, decision=decision, workers=workers, trained=trained, ended=None) == want


@pytest.mark.parametrize(
    ("worker", "want"),
    [
        pytest.param(make_worker(1, Standing.SILENT, session=make_session(1, connected=False, closed_at_s=1.0)), "Recovering",
                     id="a worker cannot be reached and nobody steps"),
        pytest.param(B, "Running", id="the script takes its time between two steps"),
        pytest.param(make_worker(1, Standing.SILENT, session=None), "Running", id="has not called this operator yet"),
        pytest.param(make_worker(1, Standing.SILENT, session=make_session(1, connected=False)), "Running",
                     id="said hello, opens its stream"),
    ],
)  # fmt: skip
def test_phase_of_a_group_that_stalls(worker: Worker, want: str) -> None:
    got = phase_of(
        current=make_current(),
        decision=KEEP,
        workers=[A, worker],
        trained=True,
        ended=None,
        stalled=True,
    )
    assert got == want


@pytest.mark.parametrize("ended", ["Succeeded", "Failed"])
def test_phase_of_a_job_that_has_ended(ended: str) -> None:
    assert phase_of(current=make_current(), decision=None, workers=[], trained=True, ended=ended) == ended


def conditions(
    *workers: Worker, ended: str | None = None, now_s: float = 100.0, refusals: dict[str, str] | None = None
) -> list[JobCondition]:
    return worker_conditions(
        Workforce(
            workers=workers,
            replicas=3,
            ended=ended,
            now_s=now_s,
            settings=Settings(),
            endpoint="regroup.ns.svc:8443",
            refusals=refusals or {},
        )
    )


def stuck(reason: str, **changes: Any) -> Worker:
    pod = make_pod(2, phase="Pending", waiting_reason=reason, waiting_message="no such image", running_since_s=None)
    return make_worker(2, Standing.OUTSIDE, pod=replace(pod, **changes), session=None)


@pytest.mark.parametrize(
    ("workers", "status", "reason", "says"),
    [
        pytest.param((A, B, C), "True", "AllRunning", "3 of 3 worker pods run.", id="all run"),
        pytest.param((A, B), "False", "Starting", "2 of 3 worker pods run.", id="one is missing"),
        pytest.param((A, B, stuck("ErrImagePull")), "False", "ErrImagePull",
                     "2 of 3 worker pods run; digits-worker-2-0 cannot start: no such image", id="an image that does not exist"),
        pytest.param((A, B, stuck("CrashLoopBackOff", phase="Running")), "False", "CrashLoopBackOff",
                     "2 of 3 worker pods run; digits-worker-2-0 cannot start", id="a container that crashes again and again"),
        pytest.param((A, B, stuck("ContainerCreating")), "False", "Starting", "2 of 3 worker pods run.", id="an ordinary wait"),
        pytest.param((A, B, stuck("", unschedulable="0/3 nodes are available")), "False", "Unschedulable",
                     "digits-worker-2-0: 0/3 nodes are available", id="no room"),
        pytest.param((A, B, stuck("", init_failed="setup", init_failures=4, init_exit_code=3)), "False", "InitContainerFailed",
                     "digits-worker-2-0: init container setup has ended with exit code 3.", id="an init container that fails"),
        pytest.param((A, B, stuck("", init_failed="setup", init_exit_code=1, init_message="ERROR: no app.")), "False",
                     "InitContainerFailed", "setup has ended with exit code 1: ERROR: no app.", id="its words"),
        pytest.param((A, B, stuck("", unset_since_s=39.0)), "False", "NotSetUp",
                     "digits-worker-2-0: its kubelet has not set the pod up for 60 s (volumes, network, host name). See its "
                     "events: kubectl describe pod --namespace=default digits-worker-2-0", id="a Secret that is missing"),
        pytest.param((A, B, stuck("", unset_since_s=41.0)), "False", "Starting", "2 of 3", id="a volume that is being attached"),
        pytest.param((A, B, make_worker(2, pod=make_pod(2, phase="Failed"))), "False", "Starting", "2 of 3", id="a dead pod"),
        pytest.param(
            (A, B, make_worker(2, Standing.SILENT, pod=make_pod(2, node_ready=False), session=None)), "False", "Starting",
            "2 of 3", id="one on a node that is off is none",
        ),
    ],
)  # fmt: skip
def test_pods_ready(workers: tuple[Worker, ...], status: str, reason: str, says: str) -> None:
    got = conditions(*workers)[0]
    assert (got.type, got.status, got.reason) == ("PodsReady", status, reason)
    assert says in got.message


def unheard(since_s: float, standing: str = Standing.OUTSIDE) -> Worker:
    return make_worker(2, standing, session=None, pod=make_pod(2, running_since_s=since_s))


@pytest.mark.parametrize(
    ("worker", "status", "reason"),
    [
        pytest.param(C, "True", "AllConnected", id="all are there"),
        pytest.param(unheard(81.0), "False", "Connecting", id="running for 19 s"),
        pytest.param(unheard(80.0), "False", "NoHello", id="running for 20 s"),
        pytest.param(
            unheard(90.0, Standing.SILENT), "True", "AllConnected", id="a member since before this operator: unknown"
        ),
    ],
)
def test_agents_connected(worker: Worker, status: str, reason: str) -> None:
    got = conditions(A, B, worker)[1]
    assert (got.type, got.status, got.reason) == ("AgentsConnected", status, reason)


GONE = make_worker(0, Standing.SILENT, session=make_session(0, connected=False))


@pytest.mark.parametrize(
    ("others", "nodes", "since_s", "hint"),
    [
        pytest.param((), ["node-2"], 80.0, "Check egress NetworkPolicy, DNS and service mesh. If the nodes are very busy, the "
                     "agents may only be slow.", id="nobody has called"),
        pytest.param((A,), ["node-2"], 80.0, "Other agents are connected: node node-2 is busy and the agent is only slow, or "
                     "there the way to the operator is closed.", id="one on another node is connected"),
        pytest.param((A,), ["node-0"], 80.0, "Other agents on the same nodes are connected: node node-0 is probably busy, and the "
                     "agent is only slow.", id="one on the same node is connected"),
        pytest.param((A,), ["node-0", "node-2"], 80.0, "Other agents are connected: 2 nodes are busy and the agents are only",
                     id="nobody is connected on one of two nodes"),
        pytest.param((A, B), ["node-0", "node-1"], 80.0, "Other agents on the same nodes are connected: 2 nodes are probably busy, "
                     "and the agents are only slow.", id="one is connected on each node"),
        pytest.param((GONE,), ["node-0"], 80.0, "Check egress NetworkPolicy, DNS", id="the one on the same node has gone"),
        pytest.param((A,), [""], 80.0, "Other agents are connected: its node is busy", id="a pod without a known node"),
        pytest.param((A,), ["node-0"], -20.0, "Read the log of pod digits-worker-2-0, and check egress NetworkPolicy, DNS",
                     id="too long for a busy node"),
    ],
)  # fmt: skip
def test_agent_that_is_only_slow_is_told_from_a_network_that_is_closed(
    others: tuple[Worker, ...], nodes: list[str], since_s: float, hint: str
) -> None:
    late = [
        make_worker(slot, Standing.OUTSIDE, session=None, pod=make_pod(slot, running_since_s=since_s, node=node))
        for slot, node in enumerate(nodes, 2)
    ]
    assert hint in conditions(*others, *late)[1].message


def test_agent_that_was_turned_away_is_said_with_its_reason() -> None:
    refusals = {"uid-2.0": "Protocol version 2 is not supported; this operator supports 1.", "other": "x"}
    got = conditions(A, B, unheard(0.0), refusals=refusals)[1]
    assert (got.status, got.reason) == ("False", "Refused")
    assert got.message == "1 of 3 agents was rejected: Protocol version 2 is not supported; this operator supports 1."


def test_worker_conditions_of_a_job_that_has_ended_complain_of_nothing() -> None:
    assert {(c.status, c.reason) for c in conditions(ended="Failed")} == {("False", "Ended")}
    assert {(c.status, c.reason) for c in conditions(ended="Suspended")} == {("False", "Suspended")}


def said(phase: str, *workers: Worker, **given: Any) -> dict[str, JobCondition]:
    values: dict[str, Any] = {
        "decision": KEEP,
        "current": make_current(),
        "replicas": 3,
        "failure": None,
    }
    return {c.type: c for c in training_conditions(Course(phase=phase, workers=workers, **values | given))}


def test_training_and_degraded() -> None:
    got = said("Running", A, B, C)
    assert (got["Training"].status, got["Training"].message) == ("True", "Generation 1 trains with 3 workers.")
    assert (got["Degraded"].status, got["Degraded"].reason) == ("False", "AsWanted")
    assert said("Running", A, B, C, replicas=5)["Degraded"].message == "3 of 5 workers train."
    silent = make_worker(2, Standing.SILENT)
    assert said("Running", A, B, silent)["Degraded"].reason == "SilentWorkers"
    waits = said(
        "Waiting", A, decision=Wait("NoWitness", "It waits.", UntilEvent.HOLDER), note="Worker 2 holds step 9."
    )
    assert waits["Training"].message == "It waits. Worker 2 holds step 9."


@pytest.mark.parametrize(
    ("phase", "current", "status", "reason", "says"),
    [
        pytest.param("Starting", None, "False", "NotStarted", "Training has not begun.", id="nobody trains yet"),
        pytest.param(
            "Starting", FORMING, "False", "NotStarted", "Training has not begun.", id="the first generation forms"
        ),
        pytest.param(
            "Recovering", make_current(), "True", "NotTraining", "0 of 3 workers train;", id="the others regroup"
        ),
        pytest.param(
            "Waiting", make_current((0, 1)), "True", "NotTraining", "0 of 3 workers train;", id="too few are left"
        ),
        pytest.param(
            "Running", make_current((0, 1)), "True", "FewerMembers", "2 of 3 workers train.", id="trains smaller"
        ),
    ],
)
def test_degraded_counts_only_who_trains(
    phase: str, current: Current | None, status: str, reason: str, says: str
) -> None:
    got = said(phase, A, B, C, current=current)["Degraded"]
    assert (got.status, got.reason) == (status, reason)
    assert got.message.startswith(says)


@pytest.mark.parametrize(
    ("members", "reason", "says"),
    [
        pytest.param((0, 2), "OOMKilled", "2 of 3 workers train. Worker 1 was too big.", id="while it is missing"),
        pytest.param((0, 1, 2), "AsWanted", "3 of 3 workers train.", id="not once all train"),
    ],
)
def test_degraded_names_the_worker_that_was_out_of_memory(members: tuple[int, ...], reason: str, says: str) -> None:
    got = said("Running", A, B, C, current=make_current(members), memory="Worker 1 was too big.")["Degraded"]
    assert (got.reason, got.message) == (reason, says)


@pytest.mark.parametrize("phase", ["Starting", "Running", "Recovering", "Waiting"])
def test_crash_that_repeats_is_quoted_while_it_does(phase: str) -> None:
    got = said(phase, A, B, C, crash="Worker 1 ended twice.\nValueError: boom")["Degraded"]
    assert (got.status, got.reason, got.message) == ("True", "Crashing", "Worker 1 ended twice.\nValueError: boom")


@pytest.mark.parametrize("members", [(0, 1, 2), (0, 1)], ids=["all train", "one is missing, too"])
def test_degraded_says_who_leaves_and_is_needed(members: tuple[int, ...]) -> None:
    got = said("Running", A, B, C, current=make_current(members), leaving="Worker 1 is asked to leave.")["Degraded"]
    assert (got.status, got.reason, got.message) == ("True", "Leaving", "Worker 1 is asked to leave.")


@pytest.mark.parametrize(
    ("phase", "hang", "reason"),
    [
        pytest.param("Running", "Step 9 takes long.", "NoProgress", id="a hang holds up who leaves, too"),
        pytest.param("Recovering", "", "NotTraining", id="nobody trains"),
        pytest.param("Waiting", "", "NotTraining", id="nor here"),
        pytest.param("Starting", "", "NotStarted", id="nobody has trained"),
    ],
)
def test_degraded_says_what_is_worse_than_a_worker_that_leaves(phase: str, hang: str, reason: str) -> None:
    assert said(phase, A, B, C, hang=hang, leaving="Worker 1 is asked to leave.")["Degraded"].reason == reason


def test_end() -> None:
    done = said("Succeeded", A, B, C)
    assert done["Complete"].message == "The script has returned in all 3 workers of generation 1."
    assert "Failed" not in done
    failed = said("Failed", A, failure=Verdict("RepeatedCrash", "Worker 0 ended with exit code 1."), crash="again")
    assert (failed["Failed"].status, failed["Failed"].reason) == ("True", "RepeatedCrash")
    assert failed["Failed"].message == "Worker 0 ended with exit code 1."
    assert failed["Degraded"].status == "False"


def columns(**given: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "phase": "Running", "refused": None, "ready": 2, "replicas": 3,
        "progress": Progress(step=500, total_steps=2000, loss=0.123456, samples_per_second=100.0),
        "samples": Samples(committed=50_000),
    }  # fmt: skip
    return summary(**values | given).to_dict()


def test_columns() -> None:
    assert columns() == {
        "state": "Running",
        "ready": "2/3",
        "step": "500",
        "progress": "25%",
        "loss": "0.1235",
        "eta": "25m",
    }
    assert columns(phase="Waiting")["eta"] == ""
    assert columns(refused="InvalidTemplate")["state"] == "InvalidTemplate"
    assert columns(progress=None, samples=None) == {
        "state": "Running",
        "ready": "2/3",
        "step": "",
        "progress": "",
        "loss": "",
        "eta": "",
    }
    assert columns(progress=Progress(step=0, total_steps=10))["progress"] == "0%"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (60, "1m"),
        (3599, "59m59s"),
        (3600, "1h"),
        (4320, "1h12m"),
        (172800, "2d"),
        (187200, "2d4h"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text

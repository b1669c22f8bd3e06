"""From the API's pod to the record that the plan reads."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from harness.polling import until_async
from regroup_operator.kube.client import NODES, Client, Resource, error_of
from regroup_operator.kube.pods import GONE_S, Agents, PodStore, Taint, slim_node, slim_pod, tolerations_of

POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "digits-worker-3-1",
        "namespace": "team",
        "uid": "pod-uid",
        "resourceVersion": "812",
        "annotations": {"regroup.dev/spec-digest": "0123456789ab"},
        "labels": {"regroup.dev/job-name": "digits", "regroup.dev/role": "worker", "regroup.dev/slot": "3"},
        "ownerReferences": [
            {
                "apiVersion": "regroup.dev/v1alpha1",
                "kind": "DistributedTrainingJob",
                "name": "digits",
                "uid": "job-uid",
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    },
    "spec": {"nodeName": "node-2", "containers": [{"name": "trainer", "image": "localhost/trainer:dev"}]},
    "status": {
        "phase": "Running",
        "podIP": "10.1.2.3",
        "podIPs": [{"ip": "10.1.2.3"}],
        "conditions": [{"type": "PodScheduled", "status": "True"}],
        "initContainerStatuses": [
            {"name": "regroup-agent", "restartCount": 0, "state": {"terminated": {"exitCode": 0}}},
        ],
        "containerStatuses": [
            {"name": "sidecar", "restartCount": 7, "state": {"running": {}}},
            {
                "name": "trainer",
                "restartCount": 2,
                "state": {"running": {"startedAt": "2025-11-21T13:00:00Z"}},
                "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
            },
        ],
    },
}


def changed(**status: Any) -> dict[str, Any]:
    pod = copy.deepcopy(POD)
    pod["status"].update(status)
    return pod


def trainer(state: dict[str, Any], restarts: int = 2) -> dict[str, Any]:
    return changed(containerStatuses=[{"name": "trainer", "restartCount": restarts, "state": state}])


def test_trainer_of_another_name_is_the_one_of_the_annotation() -> None:
    """A webhook has put a container of its own beside the template's only one."""
    pod = copy.deepcopy(POD)
    pod["metadata"]["annotations"]["regroup.dev/trainer-container"] = "main"
    pod["spec"]["containers"] = [
        {"name": "proxy", "resources": {"limits": {"memory": "1Gi"}}},
        {"name": "main", "resources": {"limits": {"memory": "2Gi"}}},
    ]
    pod["status"]["containerStatuses"][1]["name"] = "main"
    read = slim_pod(pod, None, 50.0)
    assert read is not None
    assert (read.container_restarts, read.last_exit_code, read.memory_limit) == (2, 137, "2Gi")


def test_running_worker_is_read_whole() -> None:
    pod = slim_pod(POD, None, 50.0)
    assert pod is not None
    assert (pod.namespace, pod.name, pod.uid) == ("team", "digits-worker-3-1", "pod-uid")
    assert (pod.job, pod.job_uid, pod.slot, pod.attempt) == ("digits", "job-uid", 3, 1)
    assert (pod.phase, pod.ip, pod.node, pod.node_ready) == ("Running", "10.1.2.3", "node-2", True)
    assert (pod.container_restarts, pod.last_exit_code, pod.running_since_s) == (2, 137, 50.0)
    assert (pod.terminating, pod.waiting_reason, pod.unschedulable) == (False, "", "")
    assert pod.spec_digest == "0123456789ab"


@pytest.mark.parametrize(
    ("owners", "name"),
    [
        pytest.param([], "digits-worker-3-1", id="a pod that nobody controls is not a worker, whatever its labels say"),
        pytest.param(
            [{**POD["metadata"]["ownerReferences"][0], "controller": False}],
            "digits-worker-3-1",
            id="an owner that is not the controller proves nothing",
        ),
        pytest.param(
            [{**POD["metadata"]["ownerReferences"][0], "kind": "Job", "apiVersion": "batch/v1"}],
            "digits-worker-3-1",
            id="another kind of controller is not ours",
        ),
        pytest.param(
            [{**POD["metadata"]["ownerReferences"][0], "apiVersion": "other.dev/v1alpha1"}],
            "digits-worker-3-1",
            id="our kind of another group is not ours",
        ),
        pytest.param(POD["metadata"]["ownerReferences"], "digits-3", id="a name without slot is not a worker"),
        pytest.param(
            POD["metadata"]["ownerReferences"], "other-worker-3-1", id="a name of another job is not this job's worker"
        ),
    ],
)
def test_pod_that_is_not_a_jobs_worker_is_nothing(owners: list[dict[str, Any]], name: str) -> None:
    pod = copy.deepcopy(POD)
    pod["metadata"].update(ownerReferences=owners, name=name)
    assert slim_pod(pod, None, 0.0) is None


def test_running_time_counts_from_the_first_sight_and_anew_after_a_restart() -> None:
    first = slim_pod(trainer({"running": {}}), None, 10.0)
    again = slim_pod(trainer({"running": {}}), first, 20.0)
    restarted = slim_pod(trainer({"running": {}}, restarts=3), again, 30.0)
    stopped = slim_pod(trainer({"terminated": {"exitCode": 1}}, restarts=3), restarted, 40.0)
    other = copy.deepcopy(POD)
    other["metadata"]["uid"] = "another-uid"
    assert [p.running_since_s for p in (first, again, restarted, stopped) if p] == [10.0, 10.0, 30.0, None]
    assert stopped is not None
    assert stopped.last_exit_code == 1
    replaced = slim_pod(other, again, 50.0)
    assert replaced is not None
    assert replaced.running_since_s == 50.0


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        pytest.param(trainer({"waiting": {"reason": "ContainerCreating"}}), "", id="creating is no trouble"),
        pytest.param(trainer({"waiting": {"reason": "PodInitializing"}}), "", id="initialising is no trouble"),
        pytest.param(
            trainer({"waiting": {"reason": "ErrImagePull", "message": "no such image"}}), "ErrImagePull", id="image"
        ),
        pytest.param(
            changed(
                initContainerStatuses=[{"name": "regroup-agent", "state": {"waiting": {"reason": "ImagePullBackOff"}}}],
                containerStatuses=[{"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}],
            ),
            "ImagePullBackOff",
            id="an init container's trouble is the pod's",
        ),
    ],
)
def test_abnormal_wait_is_told(pod: dict[str, Any], reason: str) -> None:
    slim = slim_pod(pod, None, 0.0)
    assert slim is not None
    assert slim.waiting_reason == reason


def test_pod_before_its_first_status_is_pending_without_node() -> None:
    pod = copy.deepcopy(POD)
    pod["status"] = {"phase": "Pending"}
    pod["spec"] = {}
    pod["metadata"]["deletionTimestamp"] = "2025-11-21T13:00:00Z"
    slim = slim_pod(pod, None, 0.0)
    assert slim is not None
    assert (slim.phase, slim.ip, slim.node, slim.terminating) == ("Pending", "", "", True)


def test_unschedulable_pod_says_why() -> None:
    why = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
    slim = slim_pod(changed(phase="Pending", conditions=[condition]), None, 0.0)
    assert slim is not None
    assert (slim.unschedulable, slim.unscheduled_reason) == (why, "Unschedulable")


@pytest.mark.parametrize(
    ("status", "disrupted"),
    [
        pytest.param({"reason": "Evicted", "phase": "Failed"}, "Evicted", id="the node ran out of memory or disk"),
        pytest.param(
            {"conditions": [("DisruptionTarget", "True", "EvictionByEvictionAPI")]}, "Evicted", id="kubectl drain"
        ),
        pytest.param({"conditions": [("DisruptionTarget", "True", "DeletionByTaintManager")]}, "Evicted", id="a taint"),
        pytest.param(
            {"conditions": [("DisruptionTarget", "True", "PreemptionByScheduler")]}, "Preempted", id="preemption"
        ),
        pytest.param({"conditions": [("DisruptionTarget", "False", "PreemptionByScheduler")]}, "", id="called off"),
        pytest.param({"reason": "Preempting", "phase": "Failed"}, "Preempted", id="by the kubelet, for a critical pod"),
        pytest.param({"conditions": [("DisruptionTarget", "True", "DeletionByPodGC")]}, "", id="its node is gone"),
        pytest.param(
            {"reason": "Terminated", "conditions": [("DisruptionTarget", "True", "TerminationByKubelet")]},
            "",
            id="node shutdown",
        ),
    ],
)
def test_who_ended_a_pod_from_outside(status: dict[str, Any], disrupted: str) -> None:
    conditions = [{"type": kind, "status": said, "reason": why} for kind, said, why in status.get("conditions", ())]
    slim = slim_pod(changed(**{**status, "conditions": conditions}), None, 0.0)
    assert slim is not None
    assert (slim.disrupted, slim.num_ends - slim.container_restarts) == (disrupted, int(disrupted != ""))


@pytest.mark.parametrize(
    ("ended", "unseen"),
    [
        ({"exitCode": 255, "reason": "Unknown"}, True),
        ({"exitCode": 255, "reason": "Error"}, True),
        ({"exitCode": 137, "reason": "ContainerStatusUnknown"}, True),
        ({"exitCode": 137, "reason": "OOMKilled"}, False),
        ({"exitCode": 1, "reason": "Error"}, False),
    ],
)
def test_end_of_a_container_that_nobody_saw_is_told_apart(ended: dict[str, Any], unseen: bool) -> None:
    status = {"name": "trainer", "restartCount": 3, "state": {"running": {}}, "lastState": {"terminated": ended}}
    pod = slim_pod(changed(containerStatuses=[status]), None, 0.0)
    assert pod is not None
    assert (pod.last_exit_reason, pod.end_unseen) == (ended["reason"], unseen)


def test_node_is_read_with_its_boot() -> None:
    node = {"metadata": {"name": "n"}, "status": {"nodeInfo": {"bootID": "b"}, "conditions": []}}
    assert slim_node(node, None, 5.0).boot_id == "b"


@pytest.mark.parametrize(
    ("conditions", "ready", "starts"),
    [
        ([{"type": "Ready", "status": "True"}], True, False),
        ([{"type": "Ready", "status": "False"}], False, True),
        ([{"type": "Ready", "status": "Unknown"}], False, False),
        ([{"type": "MemoryPressure", "status": "True"}], False, False),
        ([], False, False),
    ],
)
def test_node_is_ready_only_if_it_says_so(conditions: list[dict[str, str]], ready: bool, starts: bool) -> None:
    item = {"metadata": {"name": "n"}, "status": {"conditions": conditions}}
    first = slim_node(item, None, 5.0)
    assert (first.ready, first.unready_since_s, first.starts) == (ready, None if ready else 5.0, starts)
    assert slim_node(item, first, 9.0) == first


def test_slot_and_attempt_are_those_of_the_name_whatever_its_labels_say() -> None:
    labels = POD["metadata"]["labels"] | {"regroup.dev/slot": "0", "regroup.dev/attempt": "9"}
    pod = slim_pod({**POD, "metadata": POD["metadata"] | {"labels": labels}}, None, 0.0)
    assert pod is not None
    assert pod.id == (3, 1)


def test_agent_of_a_pod_that_has_just_vanished_is_still_heard() -> None:
    """Deleted by force, its processes live for two seconds; no decision sees the pod any more."""
    now_s = 100.0
    store = PodStore(cast("Client", None), clock=lambda: now_s)
    agents, copy = Agents(store), store.informers[0].copy
    copy.replace([POD], "1")
    assert store.pod("team", "digits-worker-3-1") is agents.pod("team", "digits-worker-3-1") is not None
    copy.replace([], "2")
    assert (store.pod("team", "digits-worker-3-1"), len(store.uids())) == (None, 0)
    gone = agents.pod("team", "digits-worker-3-1")
    assert gone is not None
    assert gone.uid == "pod-uid"
    again = {**POD, "metadata": POD["metadata"] | {"uid": "another"}}
    copy.replace([again], "3")
    found = agents.pod("team", "digits-worker-3-1")
    assert found is not None
    assert found.uid == "another", "the pod that there is comes first"
    copy.replace([], "4")
    now_s += GONE_S + 0.1
    assert agents.pod("team", "digits-worker-3-1") is None
    other = {**POD, "metadata": POD["metadata"] | {"name": "digits-worker-4-0"}}
    copy.replace([other], "5")
    copy.replace([], "6")
    assert len(store._gone) == 1, "what is older is forgotten"


def test_which_agents_should_call() -> None:
    """Where nothing is known that keeps them from it, an agent that does not call is out of the operator's reach."""

    def node_of(status: str) -> dict[str, Any]:
        conditions = [{"type": "Ready", "status": status}]
        return {
            "metadata": {"name": "node-2", "resourceVersion": "1"},
            "spec": {},
            "status": {"conditions": conditions},
        }

    def should_call(pod: dict[str, Any] | None, ready: str = "True") -> bool:
        store = PodStore(cast("Client", None), clock=lambda: 100.0)
        store.nodes.num_lists = 1
        store.nodes.copy.replace([node_of(ready)], "1")
        store.informers[0].copy.replace([POD], "1")
        known = store.pod("team", "digits-worker-3-1")
        assert known is not None
        store.informers[0].copy.replace([] if pod is None else [pod], "2")
        return store.should_call(known)

    assert should_call(POD)
    assert not should_call(None), "its pod is gone"
    assert not should_call(POD, ready="Unknown"), "its node is lost"
    assert not should_call({**POD, "metadata": POD["metadata"] | {"uid": "another"}}), "another pod has its name"
    assert not should_call({**POD, "metadata": POD["metadata"] | {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
    assert not should_call(changed(phase="Failed"))
    assert not should_call(trainer({"waiting": {"reason": "CrashLoopBackOff"}})), (
        "its container waits to be started again"
    )


ENDS = "team/ends"


def node(*keys: str, name: str = "node-2", effect: str = "NoSchedule") -> dict[str, Any]:
    taints = [{"key": key, "effect": effect} for key in keys]
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": name, "resourceVersion": "1"}, "spec": {"taints": taints}, "status": ready}


def placed(on: str = "node-2", tolerations: list[dict[str, Any]] | None = None, uid: str = "pod-uid") -> dict[str, Any]:
    spec = {**POD["spec"], "nodeName": on, "tolerations": tolerations or []}
    return {**POD, "metadata": POD["metadata"] | {"uid": uid}, "spec": spec}


def asked(store: PodStore) -> str:
    pod = store.pod("team", "digits-worker-3-1")
    assert pod is not None
    return pod.notice


def watching(*pods: dict[str, Any], nodes: tuple[dict[str, Any], ...] = (node(),)) -> PodStore:
    """Return a store that knows these nodes and pods."""
    store = PodStore(cast("Client", None), clock=lambda: 100.0, drain_taints=[ENDS, "team/other"])
    store.nodes.num_lists = 1
    store.nodes.copy.replace(list(nodes), "1")
    store.informers[0].copy.replace(list(pods), "1")
    return store


def test_taint_that_announces_the_end_of_its_node_asks_a_pod_to_leave_until_it_is_gone() -> None:
    store, changed = watching(placed()), list[tuple[str, str]]()
    store.on_change(changed.append)
    assert asked(store) == ""
    store.nodes.copy.replace([node(ENDS)], "2")
    assert (asked(store), changed) == ("its node node-2 has taint team/ends", [("team", "digits")])
    store.nodes.copy.replace([node()], "3")
    assert (asked(store), len(changed)) == ("", 2)


@pytest.mark.parametrize("key", ["node.kubernetes.io/unschedulable", "somebody/else"])
def test_node_that_is_cordoned_or_has_another_taint_is_not_left(key: str) -> None:
    store, changed = watching(placed()), list[tuple[str, str]]()
    store.on_change(changed.append)
    store.nodes.copy.replace([node(key)], "2")
    assert (asked(store), changed) == ("", [])


@pytest.mark.parametrize("effect", ["NoSchedule", "PreferNoSchedule", "NoExecute"])
def test_any_effect_counts(effect: str) -> None:
    store = watching(placed())
    store.nodes.copy.replace([node(ENDS, effect=effect)], "2")
    assert asked(store) != ""


@pytest.mark.parametrize(
    ("toleration", "stays"),
    [
        pytest.param({"key": ENDS, "operator": "Exists"}, True, id="by its key"),
        pytest.param({"key": ENDS, "value": "spot"}, True, id="and value"),
        pytest.param({"key": ENDS, "value": "else"}, False, id="another value"),
        pytest.param({"key": ENDS, "operator": "Exists", "effect": "NoSchedule"}, True, id="and effect"),
        pytest.param({"key": ENDS, "operator": "Exists", "effect": "NoExecute"}, False, id="another effect"),
        pytest.param({"operator": "Exists"}, False, id="everything: that is said to be placed, not to stay"),
        pytest.param({"key": "team/other", "operator": "Exists"}, False, id="another key"),
    ],
)
def test_pod_that_tolerates_the_taint_by_its_key_stays(toleration: dict[str, Any], stays: bool) -> None:
    store = watching(placed(tolerations=[toleration]))
    tainted = node(ENDS)
    tainted["spec"]["taints"][0]["value"] = "spot"
    store.nodes.copy.replace([tainted], "2")
    assert (asked(store) == "") == stays


def test_pod_that_is_placed_on_a_tainted_node_is_not_asked_again_and_again() -> None:
    """Its successor would be placed there, too. Another taint, or the same one once more, is a new notice."""
    unplaced = placed()
    del unplaced["spec"]["nodeName"]
    store = watching(unplaced, nodes=(node(ENDS),))
    store.informers[0].copy.replace([placed()], "2")
    assert asked(store) == ""
    store.nodes.copy.replace([node(ENDS, "team/other")], "2")
    assert asked(store).endswith("taint team/other")
    store.nodes.copy.replace([node()], "3")
    store.nodes.copy.replace([node(ENDS)], "4")
    assert asked(store).endswith("taint team/ends")


def test_pod_that_was_there_before_the_operator_is_asked() -> None:
    assert asked(watching(placed(), nodes=(node(ENDS),))) != ""


def test_pod_is_asked_if_the_nodes_are_heard_of_later() -> None:
    store = watching(placed(), nodes=())
    store.nodes.copy.replace([node(ENDS)], "2")
    assert asked(store) != ""


def test_nothing_is_kept_of_a_pod_that_is_gone() -> None:
    store = watching(placed())
    assert len(store._places) == 1
    store.informers[0].copy.replace([placed(uid="another")], "2")
    store.nodes.copy.replace([node(ENDS)], "2")
    assert asked(store) != ""
    store.informers[0].copy.replace([], "3")
    assert store._places == {}


def test_without_the_right_to_read_nodes_there_is_no_notice_of_a_taint() -> None:
    store = watching(placed(), nodes=())
    assert asked(store) == ""
    assert tolerations_of(placed(tolerations=[{"key": ENDS}]), [ENDS]) == (Taint(ENDS, "", ""),)


class Api:
    """The API server with a pod and its node, which is silent and has a taint. `answers`: the status of each request for nodes in
    turn, then `last`."""

    def __init__(self, answers: list[int]) -> None:
        self.answers, self.last, self.num_asked = answers, 403, 0

    async def list(self, resource: Resource, *_: object, **__: object) -> dict[str, Any]:
        if resource != NODES:
            return {"metadata": {"resourceVersion": "1"}, "items": [placed()]}
        self.num_asked += 1
        status = self.answers.pop(0) if self.answers else self.last
        if status != 200:
            raise error_of(status, b"")
        silent = {"conditions": [{"type": "Ready", "status": "Unknown"}]}
        return {"metadata": {"resourceVersion": "1"}, "items": [{**node(ENDS), "status": silent}]}

    async def watch(self, *_: object, **__: object) -> AsyncIterator[dict[str, Any]]:
        await asyncio.Event().wait()
        yield {}


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param([], id="from the start"),
        pytest.param([503, 0], id="no verdict at the start"),
        pytest.param([403, 503], id="no verdict in between"),
    ],
)
def test_nodes_that_may_be_read_later_are_read_then(
    answers: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("regroup_operator.kube.pods.RETRY_S", 0.0)
    monkeypatch.setattr("regroup_operator.kube.pods.FORBIDDEN_S", 0.0)
    api = Api(answers)
    store, changed = PodStore(cast("Client", api), clock=lambda: 100.0, drain_taints=[ENDS]), list[tuple[str, str]]()

    async def scenario() -> None:
        running = asyncio.create_task(store.run())
        await asyncio.wait_for(store.synced(), 10.0)
        store.on_change(changed.append)
        before = store.pod("team", "digits-worker-3-1")
        assert before is not None
        assert (before.node_ready, before.notice) == (True, ""), "nothing is known of its node"
        asked_before = api.num_asked
        await until_async(lambda: api.num_asked >= asked_before + 3, "further requests", every_s=0.0)
        api.last = 200
        await until_async(lambda: changed, "a change", every_s=0.0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())
    pod = store.pod("team", "digits-worker-3-1")
    assert pod is not None
    assert (pod.node_ready, pod.node_unready_since_s) == (False, 100.0)
    assert (pod.notice, changed) == ("its node node-2 has taint team/ends", [("team", "digits")])
    assert sum("may not be read" in message for message in caplog.messages) == 1


@pytest.mark.parametrize(
    ("conditions", "deleted", "notice"),
    [
        ([("True", "PreemptionByScheduler")], False, "its condition DisruptionTarget says PreemptionByScheduler"),
        ([("True", "")], False, "its condition DisruptionTarget says Unknown"),
        ([("False", "PreemptionByScheduler")], False, ""),
        ([("True", "EvictionByEvictionAPI")], True, ""),
    ],
)
def test_condition_that_announces_the_end_of_a_pod_is_a_notice(
    conditions: list[tuple[str, str]], deleted: bool, notice: str
) -> None:
    said = [{"type": "DisruptionTarget", "status": status, "reason": why} for status, why in conditions]
    pod = changed(conditions=said)
    pod["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleted else {}
    slim = slim_pod(pod, None, 0.0)
    assert slim is not None
    assert slim.notice == notice


def test_pod_of_a_role_is_no_worker_and_may_not_speak_as_one() -> None:
    """Whoever may write its template could give it a token for the endpoint."""
    store = PodStore(cast("Client", None), clock=lambda: 100.0)
    agents, memory = Agents(store), store.informers[0].copy
    board = {**POD, "metadata": POD["metadata"] | {"name": "digits-board-0-0", "uid": "role-uid"}}
    memory.replace([POD, board], "1")
    key = ("team", "digits")
    assert [p.uid for p in store.list(key, "job-uid")] == ["pod-uid"]
    assert [(p.uid, p.place) for p in store.roles(key, "job-uid")] == [("role-uid", "board-0")]
    assert store.uids() == {"pod-uid"}
    assert agents.pod("team", "digits-board-0-0") is None
    memory.replace([POD], "2")
    assert agents.pod("team", "digits-board-0-0") is None
    assert store.roles(key, "job-uid") == ()


DONE, FAILED = {"terminated": {"exitCode": 0}}, {"terminated": {"exitCode": 3}}
RUNS: dict[str, Any] = {"running": {}}
WAITS = {"waiting": {"reason": "PodInitializing"}}


@pytest.mark.parametrize(
    ("init", "containers", "exit_code", "runs"),
    [
        pytest.param((), (RUNS, RUNS), None, True, id="all run"),
        pytest.param((DONE,), (RUNS,), None, True, id="after its init container"),
        pytest.param((FAILED,), (WAITS,), 3, False, id="its init container has failed"),
        pytest.param((), (DONE, FAILED), 3, False, id="one has ended well, the other has failed"),
        pytest.param((), (RUNS, DONE), 0, False, id="one has ended"),
        pytest.param((), (RUNS, WAITS), None, False, id="one waits"),
        pytest.param((FAILED,), (RUNS,), None, True, id="a sidecar restarts"),
        pytest.param((FAILED,), ({"terminated": {"exitCode": 4}},), 4, False, id="a sidecar is ended with the pod"),
    ],
)
def test_container_that_stands_for_the_pod_of_a_role(
    init: tuple[Any, ...], containers: tuple[Any, ...], exit_code: int | None, runs: bool
) -> None:
    pod = {**POD, "metadata": POD["metadata"] | {"name": "digits-board-0-0"}, "status": {"phase": "Running"}}
    for kind, states in (("initContainerStatuses", init), ("containerStatuses", containers)):
        pod["status"][kind] = [{"name": f"c{i}", "restartCount": 0, "state": state} for i, state in enumerate(states)]
    slim = slim_pod(pod, None, 5.0)
    assert slim is not None
    assert (slim.last_exit_code, slim.running_since_s is not None) == (exit_code, runs)


ENDED_3 = {"terminated": {"exitCode": 3}}


@pytest.mark.parametrize(
    ("setup", "want"),
    [
        pytest.param({"restartCount": 0, "state": {"running": {}}}, ("", 0, None), id="runs for the first time"),
        pytest.param({"restartCount": 0, "state": ENDED_3}, ("setup", 1, 3), id="has failed"),
        pytest.param(
            {"restartCount": 0, "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ENDED_3},
            ("setup", 1, 3),
            id="waits for its next start",
        ),
        pytest.param(
            {"restartCount": 1, "state": {"running": {}}, "lastState": ENDED_3}, ("setup", 1, 3), id="runs again"
        ),
        pytest.param({"restartCount": 1, "state": ENDED_3}, ("setup", 2, 3), id="has failed again"),
        pytest.param(
            {"restartCount": 2, "state": {"terminated": {"exitCode": 0}}, "lastState": ENDED_3},
            ("", 2, None),
            id="has succeeded",
        ),
    ],
)
def test_init_container_that_fails(setup: dict[str, Any], want: tuple[str, int, int | None]) -> None:
    agent = {"name": "regroup-agent", "restartCount": 0, "state": {"terminated": {"exitCode": 0}}}
    later = {"name": "later", "restartCount": 0, "state": {"waiting": {"reason": "PodInitializing"}}}
    raw = changed(
        phase="Pending", containerStatuses=[], initContainerStatuses=[agent, {"name": "setup", **setup}, later]
    )
    pod = slim_pod(raw, None, 0.0)
    assert pod is not None
    assert (pod.init_failed, pod.init_failures, pod.init_exit_code) == want


@pytest.mark.parametrize(
    ("message", "want"),
    [
        pytest.param("", "", id="none"),
        pytest.param(
            "Looking in indexes\nERROR: no app\nnotice: update pip\n\n", "ERROR: no app", id="pip and its notices"
        ),
        pytest.param("a\n  \x1b[31mb \n \n", "[31mb", id="the last line, without what steers terminals"),
        pytest.param("x" * 3000, "x" * 497 + "...", id="bounded"),
    ],
)
def test_last_line_of_an_init_container_is_kept(message: str, want: str) -> None:
    setup = {"name": "setup", "restartCount": 0, "state": {"terminated": {"exitCode": 1, "message": message}}}
    pod = slim_pod(changed(phase="Pending", containerStatuses=[], initContainerStatuses=[setup]), None, 0.0)
    assert pod is not None
    assert pod.init_message == want


def test_native_sidecar_is_no_init_container() -> None:
    raw = changed(initContainerStatuses=[{"name": "proxy", "restartCount": 0, "state": ENDED_3}])
    raw["spec"]["initContainers"] = [{"name": "proxy", "restartPolicy": "Always"}]
    pod = slim_pod(raw, None, 0.0)
    assert pod is not None
    assert pod.init_failed == ""


def test_native_sidecar_that_runs_beside_an_init_container_hides_no_failure_and_adds_none() -> None:
    proxy = {"name": "proxy", "restartCount": 5, "state": {"running": {}}, "lastState": ENDED_3}
    setup = {"name": "setup", "restartCount": 1, "state": ENDED_3}
    raw = changed(phase="Pending", containerStatuses=[], initContainerStatuses=[proxy, setup])
    raw["spec"]["initContainers"] = [{"name": "proxy", "restartPolicy": "Always"}, {"name": "setup"}]
    pod = slim_pod(raw, None, 0.0)
    assert pod is not None
    assert (pod.init_failed, pod.init_failures, pod.init_exit_code) == ("setup", 2, 3)


def test_pod_that_its_kubelet_has_not_set_up_is_dated_by_the_first_sight() -> None:
    """A volume whose Secret is missing, or a host name that is too long: containers only say ContainerCreating."""
    waits = changed(phase="Pending", conditions=[{"type": "PodReadyToStartContainers", "status": "False"}])
    first = slim_pod(waits, None, 10.0)
    later = slim_pod(waits, first, 20.0)
    ready = slim_pod(changed(conditions=[{"type": "PodReadyToStartContainers", "status": "True"}]), later, 30.0)
    assert first is not None
    assert later is not None
    assert ready is not None
    assert (first.unset_since_s, later.unset_since_s, ready.unset_since_s) == (10.0, 10.0, None)

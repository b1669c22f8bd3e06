"""The pod that reads a job's checkpoints: what it mounts and where, and what its status means for the user."""

from __future__ import annotations

from typing import Any

import pytest

from regroup_client import reader_pod
from regroup_client.errors import PullError
from regroup_client.reader_pod import Reader, Volume

CLAIMED = {"name": "v", "persistentVolumeClaim": {"claimName": "mine", "readOnly": False}}


def make_job(pod: dict[str, Any] | None = None, **checkpoint: Any) -> dict[str, Any]:
    template = {"containers": [{"name": "trainer", "image": "torch"}], **(pod or {})}
    spec: dict[str, Any] = {"template": {"spec": template}}
    spec |= {"checkpoint": checkpoint} if checkpoint else {}
    return {
        "apiVersion": "regroup.dev/v1alpha1",
        "kind": "DistributedTrainingJob",
        "metadata": {"name": "train", "namespace": "team-a", "uid": "1"},
        "spec": spec,
    }


def mounted(path: str, **mount: Any) -> dict[str, Any]:
    trainer = {"name": "trainer", "image": "torch", "volumeMounts": [{"name": "v", "mountPath": path, **mount}]}
    return {"containers": [{"name": "side", "image": "x"}, trainer], "volumes": [CLAIMED]}


@pytest.mark.parametrize(
    ("job", "want"),
    [
        pytest.param(make_job(volumeClaim="mine"), Volume("mine"), id="a claim"),
        pytest.param(make_job(mounted("/data"), path="/data/run/1"), Volume("mine", "run/1"), id="a path in a volume"),
        pytest.param(make_job(mounted("/data"), path="/data/"), Volume("mine"), id="the volume itself"),
        pytest.param(
            make_job(mounted("/data", subPath="a"), path="/data/b"), Volume("mine", "a/b"), id="below a subPath"
        ),
        pytest.param(make_job(), "has no spec.checkpoint", id="no checkpoints"),
        pytest.param(make_job(mounted("/data"), path="/database"), "is on no volume claim", id="beside the volume"),
        pytest.param(
            make_job(mounted("/data") | {"volumes": [{"name": "v", "nfs": {}}]}, path="/data"),
            "is on no volume claim",
            id="NFS",
        ),
    ],
)
def test_volume_of_a_job(job: dict[str, Any], want: Volume | str) -> None:
    if isinstance(want, Volume):
        assert reader_pod.volume_of(job) == want
        return
    with pytest.raises(PullError, match=want):
        reader_pod.volume_of(job)


def holder(node: str, phase: str, claim: str = "mine") -> dict[str, Any]:
    volumes = [{"name": "x", "emptyDir": {}}, {"name": "y", "persistentVolumeClaim": {"claimName": claim}}]
    return {
        "metadata": {"name": "train-worker-0-0"},
        "spec": {"nodeName": node, "volumes": volumes},
        "status": {"phase": phase},
    }


@pytest.mark.parametrize(
    ("modes", "pods", "want"),
    [
        pytest.param(["ReadWriteMany"], [holder("a", "Running")], "", id="every node may mount it"),
        pytest.param(["ReadWriteOnce"], [holder("a", "Running")], "a", id="only the node of the running job"),
        pytest.param(
            ["ReadWriteOnce"], [holder("", "Pending"), holder("b", "Pending")], "b", id="a pod that starts holds it"
        ),
        pytest.param(
            ["ReadWriteOnce"], [holder("a", "Failed"), holder("b", "Succeeded")], "", id="ended pods hold nothing"
        ),
        pytest.param(["ReadWriteOnce"], [holder("a", "Running", "other")], "", id="another claim"),
        pytest.param(["ReadWriteOncePod"], [holder("a", "Running")], None, id="one pod, which has it"),
        pytest.param(["ReadWriteOncePod"], [], "", id="one pod, and nobody has it"),
    ],
)
def test_node_of_a_claim(modes: list[str], pods: list[dict[str, Any]], want: str | None) -> None:
    claim = {"metadata": {"name": "mine"}, "spec": {"accessModes": modes}}
    if want is None:
        with pytest.raises(PullError, match="train-worker-0-0 has it"):
            reader_pod.only_node(claim, pods)
        return
    assert reader_pod.only_node(claim, pods) == want


def test_pod_reads_only_and_ends_with_the_job_or_by_itself() -> None:
    pod = reader_pod.manifest(make_job(volumeClaim="mine"), Volume("mine", "a"), Reader("train-pull-1", "node-2"))
    spec, container = pod["spec"], pod["spec"]["containers"][0]
    assert [one["uid"] for one in pod["metadata"]["ownerReferences"]] == ["1"]
    assert "controller" not in pod["metadata"]["ownerReferences"][0], "the operator takes what it controls for a worker"
    assert (spec["activeDeadlineSeconds"], spec["restartPolicy"], spec["automountServiceAccountToken"]) == (
        21600,
        "Never",
        False,
    )
    assert container["volumeMounts"] == [
        {"name": "checkpoint", "mountPath": "/checkpoint", "readOnly": True, "subPath": "a"}
    ]
    assert "node-2" in str(spec["affinity"])


@pytest.mark.parametrize(
    ("pod", "trainer", "user", "want"),
    [
        pytest.param({}, {}, None, {"runAsUser": 65534}, id="nobody, where the template names no user"),
        pytest.param({"runAsUser": 0, "runAsGroup": 0}, {}, None, {"runAsUser": 65534}, id="not root"),
        pytest.param(
            {"runAsUser": 7, "runAsGroup": 8, "fsGroup": 9},
            {},
            None,
            {"runAsUser": 7, "runAsGroup": 8, "fsGroup": 9},
            id="the job's",
        ),
        pytest.param({"runAsUser": 7}, {"runAsUser": 6}, None, {"runAsUser": 6}, id="the container's comes first"),
        pytest.param({"runAsUser": 7, "runAsGroup": 8}, {}, 5, {"runAsUser": 5}, id="the one that was given"),
    ],
)
def test_pod_runs_as_the_jobs_user(
    pod: dict[str, Any], trainer: dict[str, Any], user: int | None, want: dict[str, Any]
) -> None:
    template = {
        "securityContext": pod,
        "containers": [{"name": "trainer", "image": "torch", "securityContext": trainer}],
    }
    made = reader_pod.manifest(
        make_job(template, volumeClaim="mine"), Volume("mine"), Reader("train-pull-1", user=user)
    )
    assert made["spec"]["securityContext"] == want | {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def with_status(phase: str = "Pending", state: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    containers = [] if state is None else [{"name": "reader", "state": state}]
    return {"metadata": {"name": "train-pull-1"}, "status": {"phase": phase, "containerStatuses": containers, **status}}


NO_PYTHON = {"reason": "StartError", "exitCode": 128, "message": 'exec: "python3": not found'}
NOT_PLACED = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available.",
}


@pytest.mark.parametrize(
    ("pod", "want"),
    [
        pytest.param(with_status(), False, id="new"),
        pytest.param(with_status(state={"waiting": {"reason": "ContainerCreating"}}), False, id="is made"),
        pytest.param(
            with_status(state={"waiting": {"reason": "ErrImagePull"}}), False, id="a registry that may come back"
        ),
        pytest.param(with_status("Running", {"running": {}}), True, id="runs"),
        pytest.param(
            with_status("Failed", {"terminated": NO_PYTHON}),
            "not found. The job's image must have python3.",
            id="no python3",
        ),
        pytest.param(
            with_status("Failed", reason="Evicted", message="no memory"),
            "ended at once: Evicted: no memory.",
            id="evicted",
        ),
        pytest.param(
            with_status(state={"waiting": {"reason": "InvalidImageName", "message": "bad: x"}}),
            "cannot start: InvalidImageName: bad: x.",
            id="a name that no registry has",
        ),
    ],
)
def test_start_of_the_pod(pod: dict[str, Any], want: bool | str) -> None:
    if isinstance(want, bool):
        assert reader_pod.is_ready(pod) is want
        return
    with pytest.raises(PullError) as refused:
        reader_pod.is_ready(pod)
    assert want in str(refused.value)


@pytest.mark.parametrize(
    ("pod", "events", "node", "want"),
    [
        pytest.param(
            with_status(conditions=[NOT_PLACED]),
            [],
            "",
            "Unschedulable: 0/3 nodes are available. Make room",
            id="no room",
        ),
        pytest.param(
            with_status(conditions=[NOT_PLACED]),
            [],
            "b",
            "on node b only, where a pod has it, and there is no room",
            id="no room there",
        ),
        pytest.param(
            with_status(state={"waiting": {"reason": "ContainerCreating"}}),
            [
                {"type": "Normal", "message": "Scheduled"},
                {"type": "Warning", "reason": "FailedMount", "message": "no such\nshare"},
            ],
            "",
            "in 9 s: FailedMount: no such share. Try again",
            id="the volume, which only an event names",
        ),
        pytest.param(
            with_status(state={"waiting": {"reason": "ImagePullBackOff", "message": "back-off"}}),
            [{"type": "Warning", "reason": "Failed", "message": "x"}],
            "",
            "ImagePullBackOff: back-off.",
            id="the image",
        ),
        pytest.param(with_status(), [], "", "no kubelet has begun with it.", id="nothing"),
    ],
)
def test_pod_that_does_not_start_in_time(
    pod: dict[str, Any], events: list[dict[str, Any]], node: str, want: str
) -> None:
    said = reader_pod.late(pod, events, Reader("train-pull-1", node), 9.0)
    assert want in said
    assert said.startswith("The pod train-pull-1, which reads the checkpoints, did not start in 9 s: ")

"""The worker's pod: the user's template with the agent in it, and nothing of the user's lost."""

from __future__ import annotations

from typing import Any

import pytest

from regroup.protocol import env
from regroup_operator.api import parse_job, worker_digest
from regroup_operator.api.names import MAX_JOB_NAME
from regroup_operator.render import RenderSettings, dry_run_pod, worker_pod
from tests.builders.jobs import Change, Manifest, stored_job, trainer, with_pod, with_spec, with_trainer

SETTINGS = RenderSettings(
    operator_url="https://regroup.regroup-system.svc:8443",
    agent_image="example/operator:1",
    agent_image_pull_secrets=("agent-pull", "both"),
)


def render(*changes: Change, avoid_nodes: tuple[str, ...] = ()) -> Manifest:
    raw = stored_job()
    for change in changes:
        change(raw)
    return worker_pod(parse_job(raw), 2, 1, settings=SETTINGS, avoid_nodes=avoid_nodes)


def container(pod: Manifest) -> Manifest:
    found: Manifest = next(c for c in pod["spec"]["containers"] if c["name"] == "trainer")
    return found


def environment(pod: Manifest) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container(pod)["env"]}


def mounts(pod: Manifest) -> dict[str, str]:
    return {mount["mountPath"]: mount["name"] for mount in container(pod)["volumeMounts"]}


def test_pod_is_named_labelled_and_owned_by_the_job() -> None:
    metadata = render()["metadata"]
    assert metadata["name"] == "digits-worker-2-1"
    assert metadata["labels"] == {
        "app.kubernetes.io/name": "regroup",
        "app.kubernetes.io/instance": "digits",
        "app.kubernetes.io/component": "worker",
        "app.kubernetes.io/managed-by": "regroup",
        "regroup.dev/job-name": "digits",
        "regroup.dev/role": "worker",
        "regroup.dev/slot": "2",
        "regroup.dev/attempt": "1",
    }
    assert metadata["ownerReferences"] == [
        {
            "apiVersion": "regroup.dev/v1alpha1",
            "kind": "DistributedTrainingJob",
            "name": "digits",
            "uid": "1f4a-uid",
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]


def with_template_metadata(metadata: Manifest) -> Manifest:
    raw = stored_job()
    raw["spec"]["template"]["metadata"] = metadata
    return raw


def test_users_labels_and_annotations_are_kept_and_ours_added() -> None:
    own = {"labels": {"team": "a", "app.kubernetes.io/name": "digits"}, "annotations": {"note": "b"}}
    metadata = render(lambda job: job["spec"]["template"].update(metadata=own))["metadata"]
    assert metadata["labels"].items() >= {**own["labels"], "regroup.dev/slot": "2"}.items()
    assert metadata["annotations"] == {
        "kubectl.kubernetes.io/default-container": "trainer",
        "note": "b",
        "regroup.dev/spec-digest": worker_digest(parse_job(with_template_metadata(own))),
    }


def test_trainer_runs_the_agent_with_the_original_command_behind_it() -> None:
    made = container(render(with_trainer(args=["--epochs", "3"])))
    assert made["command"] == ["python3", "-I", "/regroup/bin/agent.pyz", "--", "python", "train.py"]
    assert made["args"] == ["--epochs", "3"]
    assert made["image"] == "example/trainer:1"


@pytest.mark.parametrize(
    ("given", "agents"),
    [
        pytest.param(
            {"limits": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": 1}},
            {"limits": {"cpu": "8", "memory": "64Gi"}},
            id="limits: Guaranteed stays Guaranteed",
        ),
        pytest.param(
            {"limits": {"cpu": "8", "memory": "64Gi"}, "requests": {"cpu": "1", "memory": "8Gi"}},
            {"requests": {"cpu": "1", "memory": "8Gi"}, "limits": {"cpu": "8", "memory": "64Gi"}},
            id="requests below them",
        ),
        pytest.param(
            {"limits": {"memory": "64Gi"}, "requests": {"cpu": "4"}},
            {"requests": {"cpu": "4"}, "limits": {"memory": "64Gi"}},
            id="one limit",
        ),
        pytest.param(
            {"requests": {"memory": "100Mi"}},
            {"requests": {"memory": "100Mi"}},
            id="requests alone: a LimitRange's min",
        ),
        pytest.param({"limits": {"nvidia.com/gpu": 1}}, {}, id="devices alone: the namespace's defaults"),
        pytest.param({}, {}, id="none: BestEffort stays BestEffort"),
    ],
)
def test_agents_container_has_the_trainers_cpu_and_memory(given: dict[str, Any], agents: dict[str, Any]) -> None:
    assert render(with_trainer(resources=given))["spec"]["initContainers"][0]["resources"] == agents


def test_agent_comes_first_and_is_restricted_by_itself() -> None:
    agent, other = render(with_pod(initContainers=[{"name": "data"}]))["spec"]["initContainers"]
    assert other == {"name": "data"}
    assert (agent["image"], agent["command"]) == (
        "example/operator:1",
        ["cp", "/regroup/agent.pyz", "/regroup/bin/agent.pyz"],
    )
    assert agent["resources"] == {}, "the trainer has none"
    assert agent["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_pull_secrets_are_joined_without_repetition() -> None:
    spec = render(with_pod(imagePullSecrets=[{"name": "both"}]))["spec"]
    assert spec["imagePullSecrets"] == [{"name": "both"}, {"name": "agent-pull"}]


def test_environment_is_complete_and_comes_before_the_users() -> None:
    pod = render(
        with_spec(processesPerWorker=2, recovery={"disconnectSeconds": 9, "maxRestarts": 4}),
        with_trainer(env=[{"name": "MINE", "value": "$(REGROUP_POD_NAME)"}]),
    )
    assert environment(pod) == {
        env.ELASTIC: "1",
        env.NAMESPACE: {"fieldRef": {"fieldPath": "metadata.namespace"}},
        env.POD_NAME: {"fieldRef": {"fieldPath": "metadata.name"}},
        env.POD_UID: {"fieldRef": {"fieldPath": "metadata.uid"}},
        env.POD_IP: {"fieldRef": {"fieldPath": "status.podIP"}},
        env.OPERATOR_URL: "https://regroup.regroup-system.svc:8443",
        env.CA_FILE: "/var/run/secrets/regroup/ca.crt",
        env.TOKEN_FILE: "/var/run/secrets/regroup/token",
        env.STATE_DIR: "/regroup/state",
        env.JOB_NAME: "digits",
        env.JOB_UID: "1f4a-uid",
        env.PROCESSES: "2",
        env.FRAMEWORK: "PyTorch",
        env.MAX_WORLD_SIZE: "10",
        env.MAX_RESTARTS: "4",
        env.GRACE_SECONDS: "25",
        "MINE": "$(REGROUP_POD_NAME)",
    }
    assert container(pod)["env"][-1]["name"] == "MINE"


def test_worker_of_a_group_knows_its_position() -> None:
    job = parse_job(stored_job(workersPerGroup=2, replicas=4, elasticPolicy={"minReplicas": 2, "maxReplicas": 6}))
    for slot, attempt, position in ((0, 0, "0"), (3, 0, "1"), (3, 7, "1"), (4, 0, "0")):
        given = environment(worker_pod(job, slot, attempt, settings=SETTINGS))
        assert (given[env.WORKERS_PER_GROUP], given[env.GROUP_POSITION]) == ("2", position)


@pytest.mark.parametrize(("grace", "agents"), [(None, "25"), (120, "100"), (5, "5"), (0, "0")])
def test_agents_grace_is_within_the_pods(grace: int | None, agents: str) -> None:
    pod = render(with_pod(**{} if grace is None else {"terminationGracePeriodSeconds": grace}))
    assert environment(pod)[env.GRACE_SECONDS] == agents


def test_token_is_bound_to_the_membership_audience() -> None:
    pod = render()
    volume = next(v for v in pod["spec"]["volumes"] if v["name"] == mounts(pod)["/var/run/secrets/regroup"])
    token, bundle = volume["projected"]["sources"]
    assert token == {"serviceAccountToken": {"audience": "regroup", "expirationSeconds": 3600, "path": "token"}}
    assert bundle == {"configMap": {"name": "digits-regroup", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}
    assert pod["spec"]["automountServiceAccountToken"] is False


def test_agents_state_is_on_disk() -> None:
    pod = render()
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes[mounts(pod)["/regroup/state"]]["emptyDir"] == {}


def test_memory_snapshot_is_a_volume_of_the_pod_in_memory() -> None:
    pod = render(with_spec(memorySnapshot={"sizeLimit": "2Gi", "everySeconds": 30}))
    volume = next(v for v in pod["spec"]["volumes"] if v["name"] == "regroup-snapshot")
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert "/regroup/snapshot" in mounts(pod)
    variables = environment(pod)
    assert variables[env.SNAPSHOT_DIR] == "/regroup/snapshot"
    assert (variables[env.SNAPSHOT_BYTES], variables[env.SNAPSHOT_EVERY_SECONDS]) == (str(2 << 30), "30")
    assert not any(v["name"] == "regroup-snapshot" for v in render()["spec"]["volumes"])


@pytest.mark.parametrize(
    ("checkpoint", "directory", "mounted"),
    [
        pytest.param({"volumeClaim": "ckpt", "everySeconds": 60, "keep": 2}, "/regroup/checkpoint", True, id="a claim"),
        pytest.param({"path": "/data/ckpt", "everySeconds": 60, "keep": 2}, "/data/ckpt", False, id="a path"),
    ],
)
def test_checkpoint_directory_reaches_the_trainer(checkpoint: Manifest, directory: str, mounted: bool) -> None:
    own_volume = [{"name": "data", "mountPath": "/data"}]
    pod = render(with_spec(checkpoint=checkpoint), with_trainer(volumeMounts=own_volume))
    found = environment(pod)
    assert env.RESUME_FROM not in found
    resumed = render(
        with_spec(checkpoint=checkpoint | {"resumeFrom": "step-7.g1-ab"}), with_trainer(volumeMounts=own_volume)
    )
    assert environment(resumed)[env.RESUME_FROM] == f"{directory}/step-7.g1-ab"
    assert (found[env.CHECKPOINT_DIR], found[env.CHECKPOINT_EVERY_SECONDS]) == (directory, "60")
    assert ("/regroup/checkpoint" in mounts(pod)) is mounted
    claims = [v["persistentVolumeClaim"] for v in pod["spec"]["volumes"] if "persistentVolumeClaim" in v]
    assert claims == ([{"claimName": "ckpt"}] if mounted else [])


def test_shared_memory_is_added_unless_the_template_mounts_it() -> None:
    assert mounts(render())["/dev/shm"] == "regroup-shm"
    own = render(with_trainer(volumeMounts=[{"name": "mine", "mountPath": "/dev/shm"}]))
    assert mounts(own)["/dev/shm"] == "mine"
    assert "regroup-shm" not in [volume["name"] for volume in own["spec"]["volumes"]]


def test_template_keeps_what_it_says_itself() -> None:
    spec = render(
        with_pod(
            automountServiceAccountToken=True,
            subdomain="mine",
            terminationGracePeriodSeconds=7,
            restartPolicy="OnFailure",
            nodeSelector={"gpu": "h200"},
        )
    )["spec"]
    assert (spec["automountServiceAccountToken"], spec["subdomain"], spec["restartPolicy"]) == (
        True,
        "mine",
        "OnFailure",
    )
    assert (spec["terminationGracePeriodSeconds"], spec["nodeSelector"]) == (7, {"gpu": "h200"})


@pytest.mark.parametrize(
    ("change", "spread"),
    [
        pytest.param(with_pod(), True, id="no opinion"),
        pytest.param(with_pod(affinity={"podAntiAffinity": {"x": []}}), False, id="its own anti-affinity"),
        pytest.param(with_pod(topologySpreadConstraints=[{"maxSkew": 2}]), False, id="its own spread"),
    ],
)
def test_workers_prefer_different_nodes_unless_the_template_decides(change: Change, spread: bool) -> None:
    constraints = render(change)["spec"].get("topologySpreadConstraints", [])
    assert ([c.get("whenUnsatisfiable") for c in constraints] == ["ScheduleAnyway"]) is spread


def test_avoided_nodes_are_a_preference_beside_what_the_template_requires() -> None:
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in "ab"]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    mine = {"weight": 5, "preference": terms[0]}
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [mine]}
    pod = render(with_pod(affinity={"nodeAffinity": required | preferred}), avoid_nodes=("n1", "n2"))
    others = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in ("n1", "n2")]
    assert pod["spec"]["affinity"]["nodeAffinity"] == {
        **required,
        "preferredDuringSchedulingIgnoredDuringExecution": [
            mine,
            {"weight": 100, "preference": {"matchFields": others}},
        ],
    }


def test_avoided_node_is_required_of_nobody_and_outweighs_our_spread() -> None:
    """The node that failed is often the only one without a worker: as strong a preference for it would bring the pod back."""
    spec = render(avoid_nodes=("n1",))["spec"]
    assert "requiredDuringSchedulingIgnoredDuringExecution" not in spec["affinity"]["nodeAffinity"]
    assert "topologySpreadConstraints" not in spec
    assert "affinity" not in render()["spec"]


def test_dry_run_pod_differs_from_a_worker_in_its_name_only() -> None:
    job = parse_job(stored_job())
    dry, worker = dry_run_pod(job, settings=SETTINGS), worker_pod(job, 0, 0, settings=SETTINGS)
    assert dry["metadata"].pop("generateName") == "digits-dry-run-"
    assert worker["metadata"].pop("name") == "digits-worker-0-0"
    assert dry == worker


def test_worker_has_a_name_in_the_dns() -> None:
    """The Service gives <hostname>.<subdomain> an address; a label of the DNS has at most 63 characters."""
    pod = worker_pod(parse_job(stored_job("a" * MAX_JOB_NAME)), 4999, 9999, settings=SETTINGS)
    assert pod["spec"]["hostname"] == pod["metadata"]["name"]
    assert pod["spec"]["subdomain"] == "a" * MAX_JOB_NAME
    assert len(pod["spec"]["hostname"]) <= 63


def test_pod_of_a_job_that_wants_no_names_has_none_but_its_templates() -> None:
    plain = render(with_spec(network={"podNames": False}))
    assert plain["spec"].keys() & {"hostname", "subdomain"} == set()
    own = render(
        with_spec(network={"podNames": False}), lambda job: job["spec"]["template"]["spec"].update(hostname="mine")
    )
    assert own["spec"]["hostname"] == "mine"
    key = "regroup.dev/spec-digest"
    assert plain["metadata"]["annotations"][key] != render()["metadata"]["annotations"][key], (
        "it is made anew before the start"
    )


@pytest.mark.parametrize(("user", "agents"), [(0, 65532), (1000, None), (None, None)])
def test_agent_is_copied_by_a_user_that_is_not_root(user: int | None, agents: int | None) -> None:
    """The init container inherits the pod's user, and says runAsNonRoot."""

    def change(job: dict[str, Any]) -> None:
        job["spec"]["template"]["spec"]["securityContext"] = {} if user is None else {"runAsUser": user}

    assert render(change)["spec"]["initContainers"][0]["securityContext"].get("runAsUser") == agents


@pytest.mark.parametrize(
    ("change", "changes"),
    [
        pytest.param(with_trainer(image="example/trainer:2"), True, id="image"),
        pytest.param(lambda job: job["spec"]["template"].update(metadata={"labels": {"a": "b"}}), True, id="label"),
        pytest.param(with_spec(processesPerWorker=2), True, id="processes"),
        pytest.param(with_trainer(resources={"limits": {"nvidia.com/gpu": 2}}), True, id="GPUs"),
        pytest.param(with_spec(checkpoint={"volumeClaim": "ckpt"}), True, id="checkpoint"),
        pytest.param(with_spec(memorySnapshot={"sizeLimit": "1Gi"}), True, id="memory snapshot"),
        pytest.param(with_spec(progress={"log": "(?P<step>\\d+)"}), True, id="pattern of the progress"),
        pytest.param(with_spec(elasticPolicy={"minReplicas": 2, "maxReplicas": 6}), True, id="maxReplicas"),
        pytest.param(lambda job: job["spec"].pop("elasticPolicy"), True, id="fixed size"),
        pytest.param(with_spec(recovery={"maxRestarts": 9}), True, id="maxRestarts"),
        pytest.param(with_spec(replicas=4), False, id="replicas of an elastic job"),
        pytest.param(with_spec(elasticPolicy={"minReplicas": 1, "maxReplicas": 5}), False, id="minReplicas"),
        pytest.param(
            with_spec(recovery={"windowSeconds": 9, "rejoinSeconds": 9, "disconnectSeconds": 9}),
            False,
            id="the operator's own times",
        ),
    ],
)
def test_digest_changes_with_what_the_pod_is_made_from(change: Change, changes: bool) -> None:
    """The plan compares digests, not pods: the one must differ exactly when the other does."""
    before, after = render(), render(change)
    digests = [pod["metadata"]["annotations"].pop("regroup.dev/spec-digest") for pod in (before, after)]
    assert (before != after) is changes
    assert (digests[0] != digests[1]) is changes


def test_pattern_of_the_progress_reaches_the_agent_as_it_was_written() -> None:
    """The kubelet takes $(NAME) for a variable, and $$ for a dollar sign."""
    pod = render(with_spec(progress={"log": "^(?P<step>\\d+)$(HOME)?$$"}))
    values = {one["name"]: one.get("value") for one in pod["spec"]["containers"][0]["env"]}
    assert values["REGROUP_PROGRESS_LOG"] == "^(?P<step>\\d+)$$(HOME)?$$$$"
    assert "REGROUP_PROGRESS_LOG" not in str(render())


def test_digest_grows_with_a_job_of_fixed_size() -> None:
    def fixed(job: Manifest) -> None:
        del job["spec"]["elasticPolicy"]

    three, four = render(fixed), render(fixed, with_spec(replicas=4))
    key = "regroup.dev/spec-digest"
    assert three["metadata"]["annotations"][key] != four["metadata"]["annotations"][key]


def test_digest_changes_with_each_field_of_the_memory_snapshot_and_not_without_one() -> None:
    def digest(**snapshot: Any) -> str:
        pod = render(with_spec(memorySnapshot={"sizeLimit": "1Gi", **snapshot}))
        return str(pod["metadata"]["annotations"]["regroup.dev/spec-digest"])

    assert len({digest(), digest(sizeLimit="2Gi"), digest(everySeconds=60)}) == 3
    plain = render()["metadata"]["annotations"]["regroup.dev/spec-digest"]
    assert plain == "19e05d800858", "else an upgrade of the operator would make the pods of waiting jobs anew"


@pytest.mark.parametrize(
    ("recovery", "want"),
    [
        pytest.param({}, {}, id="absent"),
        pytest.param({"gracefulStop": {}}, {env.STOP_SECONDS: "60"}, id="the defaults"),
        pytest.param({"gracefulStop": {"signal": "SIGUSR1", "seconds": 300}},
                     {env.STOP_SECONDS: "300", env.STOP_SIGNAL: "SIGUSR1"}, id="a signal"),
    ],
)  # fmt: skip
def test_agent_is_told_how_a_script_ends(recovery: dict[str, Any], want: dict[str, str]) -> None:
    pod = render(with_spec(recovery=recovery))
    (container,) = pod["spec"]["containers"]
    told = {one["name"]: one.get("value") for one in container["env"]}
    assert {name: told[name] for name in (env.STOP_SECONDS, env.STOP_SIGNAL) if name in told} == want
    is_plain = pod["metadata"]["annotations"]["regroup.dev/spec-digest"] == "19e05d800858"
    assert is_plain == (not want), "pods that differ have the same digest, or an upgrade makes pods anew"


def test_digest_is_that_of_the_job_not_of_the_pod_or_the_installation() -> None:
    job = parse_job(stored_job())
    other = RenderSettings(operator_url="https://elsewhere:1", agent_image="example/operator:2")
    pods = (worker_pod(job, 0, 0, settings=SETTINGS), worker_pod(job, 3, 7, settings=other, avoid_nodes=("n1",)))
    assert len({pod["metadata"]["annotations"]["regroup.dev/spec-digest"] for pod in pods}) == 1


def test_rendering_does_not_change_the_job() -> None:
    raw = stored_job()
    before = stored_job()
    worker_pod(parse_job(raw), 0, 0, settings=SETTINGS, avoid_nodes=("n1",))
    assert raw == before
    assert trainer(raw)["command"] == ["python", "train.py"]


def test_agents_of_an_elastic_job_look_for_checkpoints() -> None:
    fixed = stored_job()
    del fixed["spec"]["elasticPolicy"]
    assert environment(render()).get(env.ELASTIC) == "1"
    assert env.ELASTIC not in environment(worker_pod(parse_job(fixed), 0, 0, settings=SETTINGS))

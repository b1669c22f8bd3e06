"""`parse_job`: a good job is read, each mistake gets its one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from regroup.protocol import env
from regroup_operator.api import (
    JobSpec,
    JobStatus,
    SpecError,
    StatusError,
    parse_job,
    parse_stored,
    processes_per_worker,
    template,
    worker_digest,
)
from regroup_operator.api.job import TEMPLATE_CHANGED, template_digest
from tests.builders.jobs import (
    BAD_SPECS,
    SWAPS,
    Change,
    make_job,
    role,
    stored_job,
    trainer,
    with_pod,
    with_spec,
    with_trainer,
)


def test_good_job_is_read_with_the_defaults_of_the_design() -> None:
    job = parse_job(stored_job(checkpoint={"volumeClaim": "ckpt"}, status={"phase": "Running"}))
    assert (job.key, job.uid, job.spec_generation, job.resource_version) == (
        ("default", "digits"),
        "1f4a-uid",
        2,
        "7",
    )
    assert (job.spec.replicas, job.min_replicas, job.max_replicas, job.elastic) == (3, 2, 5, True)
    assert job.spec.checkpoint is not None
    assert (job.spec.checkpoint.every_seconds, job.spec.checkpoint.keep) == (300, 3)
    recovery = job.spec.recovery
    assert (recovery.max_restarts, recovery.window_seconds) == (10, 3600)
    assert (recovery.disconnect_seconds, recovery.rejoin_seconds) == (5, 0)
    assert job.status.phase == "Running"


def test_fixed_size_job_has_equal_bounds() -> None:
    raw = make_job(replicas=4)
    del raw["spec"]["elasticPolicy"]
    job = parse_job(raw)
    assert (job.min_replicas, job.max_replicas, job.elastic) == (4, 4, False)


def test_pods_of_a_job_without_groups_keep_the_digest_of_older_operators() -> None:
    even = {"minReplicas": 2, "maxReplicas": 4}
    plain = parse_job(make_job(replicas=4, elasticPolicy=even))
    one, two = (parse_job(make_job(replicas=4, elasticPolicy=even, workersPerGroup=size)) for size in (1, 2))
    assert worker_digest(plain) == worker_digest(one) != worker_digest(two)


def test_pod_template_is_a_copy() -> None:
    raw = make_job()
    parse_job(raw).pod_template()["spec"]["containers"].clear()
    assert trainer(raw)["name"] == "trainer"


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (
            {"action": "Retry", "signals": ["SIGKILL"]},
            "onExit[0].action (Retry) is refused: should be 'Fail', 'Restart' or",
        ),
        ({"action": "Fail", "signals": ["SIGFOO"]}, "onExit[0].signals[0] (SIGFOO) is refused: should be 'SIGHUP', "),
        ({"action": "Fail", "reasons": ["Error"]}, "onExit[0].reasons[0] (Error) is refused: should be 'OOMKilled', "),
        (
            {"action": "Fail", "exitCodes": {"values": [256]}},
            "onExit[0].exitCodes.values[0] (256) is refused: should be less",
        ),
        (
            {"action": "Fail", "exitCodes": {"values": [-9]}},
            "onExit[0].exitCodes.values[0] (-9) is refused: should be greater",
        ),
        (
            {"action": "Fail", "exitCodes": {"values": []}},
            "onExit[0].exitCodes.values is refused: list should have at least 1",
        ),
        ({"action": "Fail", "codes": [2]}, "onExit[0].codes is not a field of the resource."),
        ({"signals": ["SIGKILL"]}, "onExit[0].action is missing. Add it."),
    ],
)
def test_rule_that_says_what_is_not_there_is_refused(rule: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_job(make_job(recovery={"onExit": [rule]}))
    assert str(refused.value).startswith(f"spec.recovery.{words}")


def test_rules_for_failures_change_no_pod() -> None:
    rules = [{"action": "Fail", "exitCodes": {"values": [2]}}, {"action": "Ignore", "reasons": ["Preempted"]}]
    job = parse_job(make_job(recovery={"onExit": rules}))
    assert [rule.action for rule in job.spec.recovery.on_exit] == ["Fail", "Ignore"]
    assert worker_digest(job) == worker_digest(parse_job(make_job()))


@pytest.mark.parametrize(("change", "sentence"), BAD_SPECS.values(), ids=BAD_SPECS.keys())
def test_bad_spec_gets_the_sentence_of_the_api_server(change: Change, sentence: str) -> None:
    raw = make_job()
    change(raw)
    with pytest.raises(SpecError) as refused:
        parse_job(raw)
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        pytest.param(
            with_spec(replica=3),
            "spec.replica is not a field of the resource. Remove it or correct its spelling.",
            id="unknown field",
        ),
        pytest.param(
            lambda job: job["spec"]["template"].update(specs={}),
            "spec.template.specs is not a field of the resource. Remove it or correct its spelling.",
            id="unknown field beside the pod's spec",
        ),
        pytest.param(
            with_spec(replicas="3"),
            "spec.replicas (3) is refused: should be a valid integer. Correct the value.",
            id="a number as text",
        ),
        pytest.param(
            with_spec(replicas=0),
            "spec.replicas (0) is refused: should be greater than or equal to 1. Correct the value.",
            id="no workers",
        ),
        pytest.param(lambda job: job["spec"].pop("template"), "spec.template is missing. Add it.", id="no template"),
        pytest.param(lambda job: job.pop("spec"), "spec is missing. Give at least spec.template.", id="no spec"),
    ],
)
def test_bad_shape_gets_one_sentence(change: Change, sentence: str) -> None:
    raw = make_job()
    change(raw)
    with pytest.raises(SpecError) as refused:
        parse_job(raw)
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("change", "part"),
    [
        pytest.param(
            lambda job: job["spec"]["template"].update(metadata={"labels": {"regroup.dev/slot": "1"}}),
            "labels under regroup.dev/",
            id="our label",
        ),
        pytest.param(
            lambda job: job["spec"]["template"].update(metadata={"annotations": {"regroup.dev/spec-digest": "1"}}),
            "annotations under regroup.dev/",
            id="our annotation",
        ),
        pytest.param(with_pod(volumes=[{"name": "regroup-state"}]), "volume names", id="our volume"),
        pytest.param(with_pod(initContainers=[{"name": "regroup-agent"}]), "regroup-agent", id="our init container"),
        pytest.param(
            with_pod(activeDeadlineSeconds=60), "Set spec.runPolicy.activeDeadlineSeconds", id="deadline of a pod"
        ),
        pytest.param(
            with_trainer(volumeMounts=[{"name": "x", "mountPath": "/regroup/bin"}]), "/regroup/bin", id="our path"
        ),
        pytest.param(
            with_trainer(command=["sh", "-c", "exec torchrun --nnodes 1 t.py"]), "torchrun", id="launcher in a shell"
        ),
        pytest.param(
            lambda job: (
                with_spec(framework="TensorFlow")(job),
                with_trainer(env=[{"name": "TF_CONFIG", "value": "{}"}])(job),
            ),
            "env name TF_CONFIG is reserved, because Regroup sets it for every process with spec.framework TensorFlow",
            id="environment of the framework",
        ),
        pytest.param(with_spec(checkpoint={"path": "/ckpt/a"}), "(/ckpt/a) is not on a volume", id="path not mounted"),
        pytest.param(
            lambda job: (
                with_spec(memorySnapshot={"sizeLimit": "3Gi"})(job),
                with_trainer(resources={"limits": {"memory": "2Gi"}})(job),
            ),
            "spec.memorySnapshot.sizeLimit (3Gi) does not fit into the memory limit of container trainer (2Gi)",
            id="snapshot larger than the memory",
        ),
        pytest.param(
            with_trainer(resources={"limits": {"nvidia.com/gpu": "half"}}), "(half)", id="GPU limit not a number"
        ),
    ],
)
def test_what_collides_with_the_rendered_pod_is_refused(change: Change, part: str) -> None:
    raw = make_job()
    change(raw)
    with pytest.raises(SpecError) as refused:
        parse_job(raw)
    assert part in str(refused.value)
    assert str(refused.value).endswith(".")


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        ("(?P<step>", "spec.progress.log ((?P<step>) is no regular expression of Python: missing ), unterminated"),
        (r"step (\d+)", r"spec.progress.log (step (\d+)) has none of the groups step, percent, loss."),
        (
            r"(?P<lr>\d+)",
            r"spec.progress.log ((?P<lr>\d+)) has a group named lr. Name the groups step, total, percent, loss;",
        ),
    ],
)
def test_pattern_of_the_progress_that_finds_nothing_is_refused(log: str, sentence: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_job(make_job(progress={"log": log}))
    assert str(refused.value).startswith(sentence)
    assert str(refused.value).endswith(".")


@pytest.mark.parametrize(
    ("resume_from", "part"),
    [
        ("/regroup/checkpoint", "(/regroup/checkpoint) is no checkpoint. Give what status.checkpoint.directory"),
        ("step-7", "(step-7) is no checkpoint"),
        ("../other/step-7.g1-ab", "is no checkpoint"),
        ("/other/step-7.g1-ab", "(/other/step-7.g1-ab) is not on a volume"),
        ("/regroup/checkpoint/../x/step-7.g1-ab", "(/regroup/x/step-7.g1-ab) is not on a volume"),
    ],
)
def test_what_cannot_be_resumed_from_is_refused(resume_from: str, part: str) -> None:
    raw = make_job(checkpoint={"volumeClaim": "ckpt", "resumeFrom": resume_from})
    with pytest.raises(SpecError) as refused:
        parse_job(raw)
    assert part in str(refused.value)


@pytest.mark.parametrize(
    ("resume_from", "path"),
    [
        ("step-7.g1-ab", "/regroup/checkpoint/step-7.g1-ab"),
        ("/regroup/checkpoint/a/step-7.g1-ab", "/regroup/checkpoint/a/step-7.g1-ab"),
        ("/data/step-7.g1-ab", "/data/step-7.g1-ab"),
    ],
)
def test_checkpoint_to_begin_with_has_a_path_in_the_worker(resume_from: str, path: str) -> None:
    raw = make_job(checkpoint={"volumeClaim": "ckpt", "resumeFrom": resume_from})
    trainer(raw)["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
    checkpoint = parse_job(raw).spec.checkpoint
    assert checkpoint is not None
    assert checkpoint.resume_path == path


def test_checkpoint_path_below_a_mount_is_accepted() -> None:
    raw = make_job(checkpoint={"path": "/data/ckpt"})
    trainer(raw)["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
    assert parse_job(raw).spec.checkpoint is not None


@pytest.mark.parametrize(
    ("field", "limit", "want"),
    [
        pytest.param(None, None, 1, id="neither: one"),
        pytest.param(None, 8, 8, id="the GPU limit"),
        pytest.param(None, "4", 4, id="the GPU limit as text"),
        pytest.param(2, 8, 2, id="the field wins"),
        pytest.param(None, 0, 1, id="no GPU still needs a process"),
    ],
)
def test_processes_per_worker(field: int | None, limit: int | str | None, want: int) -> None:
    raw = make_job()
    if field is not None:
        raw["spec"]["processesPerWorker"] = field
    if limit is not None:
        trainer(raw)["resources"] = {"limits": {"nvidia.com/gpu": limit}}
    assert processes_per_worker(parse_job(raw)) == want


@pytest.mark.parametrize(
    ("limits", "want"),
    [
        ({"amd.com/gpu": 4}, 4),
        ({"gpu.intel.com/i915": "2"}, 2),
        ({"gpu.intel.com/xe": 2, "gpu.intel.com/i915_monitoring": 1}, 2),
        ({"nvidia.com/mig-3g.40gb": 2}, 2),
        ({"nvidia.com/gpu.shared": 3}, 3),
        ({"habana.ai/gaudi": 8}, 8),
        ({"example.com/fpga": 8, "cpu": 4}, 1),
    ],
)
def test_devices_of_other_vendors_count(limits: dict[str, Any], want: int) -> None:
    raw = make_job()
    trainer(raw)["resources"] = {"limits": limits}
    assert processes_per_worker(parse_job(raw)) == want


def test_two_kinds_of_devices_are_one_sentence() -> None:
    raw = make_job()
    trainer(raw)["resources"] = {"limits": {"nvidia.com/gpu": 2, "amd.com/gpu": 2}}
    with pytest.raises(
        SpecError, match=r"several kinds of GPUs \(amd.com/gpu, nvidia.com/gpu\).* Set spec.processesPerWorker"
    ):
        parse_job(raw)


def test_job_that_has_trained_keeps_its_processes() -> None:
    """Its template has changed since: the API server lets one kind of GPU take the place of another."""
    raw = stored_job(status={"membership": {**MEMBERSHIP, "members": "0-2", "worldSize": 3}})
    trainer(raw)["resources"] = {"limits": {"amd.com/gpu": 8}}
    assert processes_per_worker(parse_job(raw)) == 1


TEMPLATE_RULE = {"volumeMounts": [{"name": "x", "mountPath": "/regroup/x"}]}
"""What breaks a rule that only Python checks: as if that were newer than the job."""


def started(**status: Any) -> dict[str, Any]:
    return stored_job(status={"startTime": "2026-01-01T00:00:00Z", "membership": MEMBERSHIP, **status})


@pytest.mark.parametrize(("before", "change"), [swap[:2] for swap in SWAPS.values()], ids=SWAPS.keys())
def test_template_that_the_api_server_let_change_is_seen(before: Change, change: Change) -> None:
    raw = started()
    before(raw)
    raw["status"]["templateDigest"] = template_digest(raw)
    kept = parse_stored(raw)
    assert (kept.refusal, kept.template_changed) == (None, False)
    change(raw)
    job = parse_stored(raw)
    assert (str(job.refusal), job.template_changed) == (TEMPLATE_CHANGED, True)
    trainer(raw).update(TEMPLATE_RULE)
    also = parse_stored(raw)
    assert "/regroup" in str(also.refusal)
    assert also.template_changed, "whatever else is wrong, no pod is made from it"
    del raw["status"]["startTime"], raw["status"]["templateDigest"]
    assert not parse_stored(raw).template_changed, "before the start it may change"


def test_digest_is_of_the_templates_alone() -> None:
    """The resource's rules see each change of the declared fields around them, and a newer schema may add a default there."""
    raw = started()
    with_spec(roles=[role()])(raw)
    before = template_digest(raw)
    raw["spec"]["roles"][0]["replicas"] = 2
    raw["spec"]["replicas"] = 4
    assert template_digest(raw) == before


def test_started_job_that_breaks_a_newer_rule_goes_on_and_says_so() -> None:
    raw = started(acceptedSpec={"replicas": 3, "elasticPolicy": {"minReplicas": 1, "maxReplicas": 4}})
    trainer(raw).update(TEMPLATE_RULE)
    with pytest.raises(SpecError):
        parse_job(raw)
    job = parse_stored(raw)
    assert "/regroup" in str(job.refusal)
    assert (job.max_replicas, job.spec.replicas) == (4, 3)
    assert job.pod_template() == raw["spec"]["template"]


def test_started_job_goes_on_by_the_spec_that_was_accepted() -> None:
    """An edit that no rule of the API server refused: the operator knows better."""
    raw = started(acceptedSpec={"replicas": 3, "recovery": {"maxRestarts": 7}})
    raw["spec"]["recovery"] = {"maxRestarts": -1}
    job = parse_stored(raw)
    assert (job.spec.recovery.max_restarts, job.refusal is not None) == (7, True)


@pytest.mark.parametrize(
    ("accepted", "found"),
    [
        pytest.param({"replicas": 3, "recovery": {"maxRestarts": 2_000_000}}, 2_000_000, id="a bound that became lower"),
        pytest.param({"replicas": 3, "recovery": {"spares": 1, "maxRestarts": 4}, "workersPerGroup": 2}, 4, id="fields together"),
        pytest.param({"replicas": 3, "gone": 1, "recovery": {"gone": 2}}, 10, id="fields that are gone"),
    ],
)  # fmt: skip
def test_started_job_whose_accepted_spec_breaks_a_newer_rule_goes_on_by_it(
    accepted: dict[str, Any], found: int
) -> None:
    """As if this operator were stricter than the one that accepted the spec."""
    raw = started(acceptedSpec=accepted)
    raw["spec"] |= accepted
    job = parse_stored(raw)
    assert job.refusal is not None
    assert (job.spec.replicas, job.spec.recovery.max_restarts) == (3, found)
    assert job.spec.run_policy.clean_pod_policy == "None"
    assert job.spec.template.spec.containers[0].name == "trainer"
    assert (processes_per_worker(job), len(worker_digest(job))) == (1, 12)


def test_spec_without_rules_is_the_spec() -> None:
    raw = stored_job(
        recovery={"onExit": [{"action": "Fail", "exitCodes": {"values": [2]}}]},
        checkpoint={"path": "/ckpt"},
        roles=[{"name": "eval", "template": {"spec": {"containers": [{"name": "eval", "image": "e:1"}]}}}],
    )["spec"]
    assert JobSpec.without_rules(raw) == JobSpec.model_validate(raw)


def test_job_that_has_not_started_is_refused() -> None:
    raw = stored_job(runPolicy={"suspend": True})
    trainer(raw).update(TEMPLATE_RULE)
    job = parse_stored(raw)
    assert "/regroup" in str(job.refusal)
    assert job.spec.run_policy.suspend


def test_job_whose_gpus_are_not_known_is_refused_and_has_a_digest() -> None:
    raw = stored_job()
    trainer(raw)["resources"] = {"limits": {"nvidia.com/gpu": 2, "amd.com/gpu": 2}}
    job = parse_stored(raw)
    assert "several kinds of GPUs" in str(job.refusal)
    assert (processes_per_worker(job), len(worker_digest(job))) == (1, 12)


@pytest.mark.parametrize("spec", [None, {}, {"replicas": -1}])
def test_spec_of_other_fields_than_the_schema_cannot_be_read_before_the_start(spec: Any) -> None:
    raw = stored_job() | {"spec": spec}
    with pytest.raises(SpecError):
        parse_stored(raw)


def test_unreadable_status_names_its_field() -> None:
    with pytest.raises(StatusError, match=r"status\.phase \(Odd\)"):
        parse_job(stored_job(status={"phase": "Odd"}))


def test_status_of_a_newer_version_survives_reading_and_writing() -> None:
    status = {"membership": {**MEMBERSHIP, "future": {"a": 1}}, "later": True}
    assert parse_job(stored_job(status=status)).status.to_dict().items() >= {"later": True}.items()
    assert parse_job(stored_job(status=status)).status.to_dict()["membership"]["future"] == {"a": 1}


def test_copy_has_the_fields_that_are_named_and_no_others() -> None:
    status = parse_job(stored_job(status={"phase": "Running", "later": True})).status
    assert status.with_fields(phase=None).to_dict() == {**JobStatus().to_dict(), "later": True}
    with pytest.raises(AssertionError, match="fase"):
        status.with_fields(fase="Running")


MEMBERSHIP = {"generation": 1, "uid": "u", "kind": "forced", "digest": "d", "worldSize": 3, "members": "0-2"}


def test_reserved_names_are_those_of_the_protocol() -> None:
    assert frozenset(env.RESERVED) == template.RESERVED_ENV
    assert set(env.RESERVED_PREFIXES) == set(template.RESERVED_ENV_PREFIXES)
    assert frozenset(env.ALLOWED) == template.ALLOWED_ENV


def test_environment_of_another_framework_is_the_users() -> None:
    raw = make_job(framework="JAX")
    trainer(raw)["env"] = [{"name": "TF_CONFIG", "value": "{}"}, {"name": "DMLC_NUM_WORKER", "value": "1"}]
    assert parse_job(raw).spec.framework == "JAX"


def test_pods_of_another_framework_are_made_anew_before_the_start() -> None:
    one, other = (parse_job(make_job(framework=name)) for name in ("PyTorch", "JAX"))
    assert worker_digest(one) != worker_digest(other)


@pytest.mark.parametrize("framework", ["PyTorch", "JAX", "None"])
def test_framework_that_lists_no_members_has_roles_and_sizes_as_any(framework: str) -> None:
    raw = make_job(framework=framework, replicas=300, elasticPolicy={"minReplicas": 2, "maxReplicas": 300})
    with_spec(roles=[role("ps")])(raw)
    assert parse_job(raw).max_replicas == 300

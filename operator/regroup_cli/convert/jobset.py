"""The rules for a JobSet of jobset.x-k8s.io/v1alpha2, and for the Jobs in it. TrainJobs are made of such Jobs, too."""

from __future__ import annotations

import re
from typing import Any

from regroup_cli.convert.draft import Draft, keep_marks, take_metadata
from regroup_cli.convert.findings import Field
from regroup_cli.convert.kubeflow import ALL_TIME_S, take_manager
from regroup_cli.convert.launch import take_launch
from regroup_cli.convert.pod import role_template, take_pod
from regroup_operator.api import SpecError

_TRAINERS = ("worker", "workers", "node", "nodes", "trainer", "train")
"""Names of the replicated job that trains, where there are several."""
_FRAMEWORKS = {"TF_CONFIG": "TensorFlow", "JAX_COORDINATOR_ADDRESS": "JAX", "DMLC_TRACKER_URI": "XGBoost"}
"""Frameworks by a variable that only they read."""
_JOBS_RETRIES = 6
"""Default of a Job's backoffLimit."""
_ACTIONS = {"FailJob": "Fail", "Ignore": "Ignore", "Count": "Restart"}


def convert(document: Field, draft: Draft) -> None:
    """Convert a JobSet."""
    take_metadata(document, draft)
    spec = document.at("spec")
    jobs = list(spec.at("replicatedJobs").items())
    if not jobs:
        raise SpecError("spec.replicatedJobs is empty. Add the one that trains.")
    trainer = next((one for name in _TRAINERS for one in jobs if one.at("name").value == name), None)
    if trainer is None:
        trainer = max(jobs, key=lambda one: num_pods(one))  # the first of the largest
    draft.framework = _framework_of(trainer, draft.framework)
    trainer.at("name").unneeded("It is the replicated job that trains: its pods are the job's workers.")
    trainer.at("groupName").unneeded("It groups replicated jobs for policies.")
    trainer.at("dependsOn").dropped(
        "Regroup starts workers and roles together. Let the program wait, or add an init container."
    )
    take_retries(spec.at("failurePolicy"), trainer.at("template", "spec"), draft)
    draft.put("replicas", take_job(trainer, draft))
    draft.spec["template"] = take_pod(trainer.at("template", "spec", "template"), draft, ())
    for one in jobs:
        if one is not trainer:
            draft.spec.setdefault("roles", []).append(_role(one, spec.at("successPolicy")))
    take_set(spec, draft, num_jobs=len(jobs))
    take_launch(draft, trainer.at("template", "spec", "template", "spec", "containers"))


def num_pods(replicated: Field) -> int:
    """Return the number of pods of a replicated job."""
    job = replicated.at("template", "spec")
    return replicated.at("replicas").count(1) * job.at("parallelism").count(1)


def take_job(replicated: Field, draft: Draft) -> int:
    """Convert a replicated job but for its pods' template, and return the number of its pods."""
    job = replicated.at("template", "spec")
    count = num_pods(replicated)
    replicated.at("replicas").mapped("spec.replicas, with parallelism")
    job.at("parallelism").mapped("spec.replicas, with the replicas of the replicated job")
    completions = job.at("completions")
    if completions and completions.value != job.at("parallelism").count(1):
        completions.changed("All workers train together, so there are as many as parallelism says.")
    else:
        completions.unneeded("All workers train together.")
    job.at("completionMode").unneeded("Regroup gives each worker a stable slot.")
    job.at("activeDeadlineSeconds").changed("It is spec.runPolicy.activeDeadlineSeconds, which counts over restarts.")
    draft.put("runPolicy.activeDeadlineSeconds", job.at("activeDeadlineSeconds").value)
    job.at("ttlSecondsAfterFinished").unneeded("The Job goes with its JobSet.")
    job.at("podReplacementPolicy").unneeded("Regroup starts a new pod once the old one cannot write any more.")
    for kind in ("labels", "annotations"):
        for name, value in keep_marks(replicated.at("template", "metadata", kind), f"metadata.{kind}").items():
            draft.metadata.setdefault(kind, {}).setdefault(name, value)
    for name in ("creationTimestamp", "name", "namespace"):
        replicated.at("template", "metadata", name).unneeded("There is no Job.")
    return count


def take_retries(policy: Field, job: Field, draft: Draft) -> None:
    """Convert the retries of a Job and of its JobSet, and the rules on failures."""
    sets, limit = policy.at("maxRestarts"), job.at("backoffLimit")
    if sets or limit:
        number = (limit.count(_JOBS_RETRIES) + 1) * (sets.count(0) + 1) - 1
        sentence = (
            f"spec.recovery.maxRestarts is {number}, in a window of a year: retries of the Job, times restarts of the JobSet. Lost "
            "nodes and deleted pods do not count."
        )
        sets.changed(sentence)
        limit.changed(sentence)
        draft.put("recovery.maxRestarts", number)
        draft.put("recovery.windowSeconds", ALL_TIME_S)
    policy.at("restartStrategy").unneeded("Regroup keeps the pods, and starts again only what failed.")
    for one in policy.at("rules").items():
        one.dropped("Rules of spec.recovery.onExit are by exit code, signal or reason of a process. Write one there.")
    rules: list[dict[str, Any]] = []
    for one in job.at("podFailurePolicy", "rules").items():
        codes, action = one.at("onExitCodes"), _ACTIONS.get(one.at("action").text())
        if codes and action is not None:
            one.mapped(f"spec.recovery.onExit[{len(rules)}]")
            values = {
                "operator": codes.at("operator").value or "In",
                "values": [code.value for code in codes.at("values").items()],
            }
            rules.append({"action": action, "exitCodes": values})
        elif one.at("onPodConditions") and action == "Ignore":
            one.unneeded("Pods that are evicted or deleted do not count.")
        else:
            one.dropped("spec.recovery.onExit has no such rule. Its reasons, such as Evicted, may do.")
    draft.put("recovery.onExit", rules or None)


def take_set(spec: Field, draft: Draft, *, num_jobs: int) -> None:
    """Convert what a JobSet says of all its Jobs."""
    draft.take(spec.at("suspend"), "runPolicy.suspend")
    draft.take(spec.at("ttlSecondsAfterFinished"), "runPolicy.ttlSecondsAfterFinished")
    take_manager(spec.at("managedBy"), draft)
    network = spec.at("network")
    names = network.at("enableDNSHostnames")
    names.changed("It is spec.network.podNames. A worker's name is <pod>.<job>, as in job-worker-0-0.job.")
    draft.put("network.podNames", names.value)
    network.at("subdomain").dropped("The subdomain is the job's name.")
    network.at("publishNotReadyAddresses").unneeded("Workers reach each other by IP address.")
    success = spec.at("successPolicy")
    if num_jobs == 1 and success.at("operator").value == "Any":
        success.changed("The job is Complete once its program has returned 0 in every worker.")
    else:
        success.unneeded(
            "The job is Complete once its program has returned 0 in every worker, and its required roles have ended."
        )
    startup = spec.at("startupPolicy")
    if num_jobs == 1 or startup.at("startupPolicyOrder").value == "AnyOrder":
        startup.unneeded("All pods are made at once.")
    else:
        startup.dropped("Workers and roles are made at once.")
    spec.at("coordinator").dropped(
        "No label names a coordinator. A process reads MASTER_ADDR and MASTER_PORT, or its framework's names."
    )
    for one in spec.at("volumeClaimPolicies").items():
        one.dropped("Regroup makes no volume claims. Make the claim, and mount it in spec.template.")


def _role(replicated: Field, success: Field) -> dict[str, Any]:
    """Return a role for a replicated job that does not train."""
    source = replicated.at("name").text()
    name = re.sub("[^a-z0-9]", "", source.lower())[:12]
    if not name[:1].isalpha() or name == "worker":
        name = f"r{name}"[:12]
    to = f"spec.roles[{name}]"
    replicated.at("name").mapped(f"{to}.name") if name == source else replicated.at("name").changed(f"It is {to}.name.")
    replicated.at("groupName").unneeded("It groups replicated jobs for policies.")
    replicated.at("dependsOn").dropped(
        "Regroup starts workers and roles together. Let the program wait, or add an init container."
    )
    targets = [one.value for one in success.at("targetReplicatedJobs").items()]
    required = not targets or source in targets
    if required and not targets and success.at("operator").value == "Any":
        required = False
    job = replicated.at("template", "spec")
    count = num_pods(replicated)
    for one in (replicated.at("replicas"), job.at("parallelism")):
        one.mapped(f"{to}.replicas")
    for other in ("completions", "completionMode", "ttlSecondsAfterFinished", "podReplacementPolicy"):
        job.at(other).unneeded("Each pod of a role runs to its end.")
    template = role_template(job.at("template"), to)
    limit = job.at("backoffLimit")
    if template["spec"].get("restartPolicy") == "Never" and limit.count(_JOBS_RETRIES) > 0:
        template["spec"]["restartPolicy"] = "OnFailure"
        job.at("template", "spec", "restartPolicy").changed("It is OnFailure: a container that fails starts again.")
    limit.changed(
        "A container of a role that fails starts again without a limit; restartPolicy Never lets it fail the job."
    )
    made: dict[str, Any] = {"name": name, "replicas": count}
    if required:
        made["requiredForCompletion"] = True
    return {**made, "template": template}


def _framework_of(replicated: Field, default: str) -> str:
    """Return the framework of a template, by the variables that it sets."""
    for container in replicated.at("template", "spec", "template", "spec", "containers").items():
        for one in container.at("env").items():
            if one.at("name").text() in _FRAMEWORKS:
                return _FRAMEWORKS[one.at("name").text()]
    return default

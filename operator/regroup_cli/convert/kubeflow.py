"""The rules that the jobs of kubeflow.org share: runPolicy, replica specs, restart policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from regroup_cli.convert.draft import NO_GANG, Draft
from regroup_cli.convert.findings import Field
from regroup_cli.convert.pod import TO, take_pod, take_same
from regroup_operator.api import SpecError

ALL_TIME_S = 31_536_000
"""The longest window of spec.recovery, a year: Kubeflow counts over the whole life of a job."""
OWN_CONTROLLERS = ("kubeflow.org/training-operator", "kubeflow.org/mpi-operator", "trainer.kubeflow.org/trainjob-controller",
                   "jobset.sigs.k8s.io/jobset-controller")  # fmt: skip
_SIGNALS = ["SIGHUP", "SIGINT", "SIGQUIT", "SIGILL", "SIGTRAP", "SIGABRT", "SIGBUS", "SIGFPE", "SIGKILL", "SIGUSR1", "SIGSEGV",
            "SIGUSR2", "SIGPIPE", "SIGALRM", "SIGTERM", "SIGXCPU", "SIGXFSZ", "SIGSYS"]  # fmt: skip
BY_EXIT_CODE: list[dict[str, Any]] = [
    {"action": "Restart", "signals": _SIGNALS},
    {"action": "Fail", "exitCodes": {"operator": "NotIn", "values": [0]}},
]
"""Rules of spec.recovery.onExit for restartPolicy ExitCode: codes up to 127 are permanent, those of a signal are not."""
HPA = (
    "A HorizontalPodAutoscaler of your own can scale the job: its scaleTargetRef names the DistributedTrainingJob, whose scale "
    "subresource writes spec.replicas."
)


@dataclass(frozen=True)
class Replicas:
    """The replicas of one type, such as Worker."""

    name: str
    source: Field
    count: int


def take_run_policy(policy: Field, draft: Draft) -> None:
    """Convert spec.runPolicy."""
    for name in ("cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "suspend"):
        if policy.at(name).value == "":
            policy.at(name).known()
        else:
            draft.take(policy.at(name), f"runPolicy.{name}")
    take_manager(policy.at("managedBy"), draft)
    take_backoff(policy.at("backoffLimit"), draft)
    scheduling = policy.at("schedulingPolicy")
    scheduling.at("minAvailable").dropped(NO_GANG)
    scheduling.at("minResources").dropped(NO_GANG)
    scheduling.at("queue").dropped(
        "It is a queue of the gang scheduler, and Regroup makes no pod groups. Kueue's label kueue.x-k8s.io/queue-name stays."
    )
    scheduling.at("scheduleTimeoutSeconds").dropped(
        "spec.runPolicy.startDeadlineSeconds is near: it fails a job that has not begun to train after so many seconds."
    )


def take_manager(manager: Field, draft: Draft) -> None:
    """Convert the name of the controller that looks after the job."""
    if manager.value in OWN_CONTROLLERS:
        manager.unneeded("It names the source's own controller.")
    else:
        draft.take(manager, "runPolicy.managedBy")


def take_backoff(limit: Field, draft: Draft) -> None:
    """Convert the number of retries in the whole life of a job."""
    if limit:
        number = limit.count(0)
        limit.changed(
            f"It is spec.recovery.maxRestarts ({number}) in a window of a year. Lost nodes and deleted pods do not count."
        )
        draft.put("recovery.maxRestarts", number)
        draft.put("recovery.windowSeconds", ALL_TIME_S)


def take_priority(policy: Field, draft: Draft) -> None:
    """Convert the priority class of the pod group, once the template is there."""
    name = policy.at("schedulingPolicy", "priorityClass").changed("It is the priorityClassName of each pod.")
    if name:
        draft.spec["template"]["spec"].setdefault("priorityClassName", name)


def replicas_of(specs: Field, names: Sequence[str]) -> dict[str, Replicas]:
    """Return the replicas by their type, in the order of `names`. A type in another case counts, as it does in Kubeflow."""
    found = {}
    for key, one in specs.fields():
        name = next((name for name in names if name.lower() == key.lower()), None)
        if name is not None:
            found[name] = Replicas(name, one, one.at("replicas").count(1))
    return {name: found[name] for name in names if name in found}


def take_workers(all_types: Sequence[Replicas], draft: Draft, container_names: Sequence[str], *, default: str) -> None:
    """Make the workers of the job from the replicas of one or several types. Those of the first one have the first ranks.

    `default` is the restart policy of a type without one.
    """
    types = [one for one in all_types if one.count > 0]
    if not types:
        raise SpecError(f"{all_types[0].source if all_types else 'The job'} has no replicas. Correct it.")
    names = " and ".join(one.name for one in types)
    for one in types:
        one.source.at("replicas").mapped(f"spec.replicas, the sum of {names}" if len(types) > 1 else "spec.replicas")
    draft.put("replicas", sum(one.count for one in types))
    first = types[0]
    draft.spec["template"] = take_pod(first.source.at("template"), draft, container_names)
    for one in types[1:]:
        take_same(one.source.at("template"), first.source.at("template"), first.name)
    if len(types) > 1:
        first.source.at("template").note(
            f"{TO} is that of {names}: Regroup tells its workers apart by their rank only, and each may become rank 0."
        )
    take_restart_policies(types, draft, default)


def take_restart_policies(types: Sequence[Replicas], draft: Draft, default: str) -> None:
    """Convert the restart policies of replicas that become workers."""
    policies = [str(one.source.at("restartPolicy").value or default) for one in types]
    for policy, one in zip(policies, types):
        source = one.source.at("restartPolicy")
        if policy == "ExitCode":
            source.changed(
                "spec.recovery.onExit has its rules: a process that ended by a signal starts again, and any other exit code fails "
                "the job."
            )
            draft.put("recovery.onExit", BY_EXIT_CODE)
        elif policy == "Never" and set(policies) == {"Never"}:
            sentence = (
                "spec.recovery.maxRestarts is 0: a process that fails fails the job. A higher number lets it recover."
            )
            source.changed(sentence) if source else source.note(f"It is Never by default. {sentence}")
            draft.put("recovery.maxRestarts", 0)
        elif policy == "Never":
            source.changed("All workers have one policy: a process that fails starts again.")
        else:
            source.unneeded("A process that fails starts again in its pod, and spec.recovery bounds how often.")

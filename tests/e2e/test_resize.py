"""3 -> 5 -> 2 while training, by kubectl and by an autoscaler: survivors keep their processes, a change costs half a second.

Two joiners may join one after the other. While the second starts its pod and imports torch it takes the CPU from the change
that the first one makes: that change is printed, and not judged. The last change of a resize always is.
"""

from __future__ import annotations

from typing import Any

from cluster.kubectl import Kubectl, wait_until
from tests.e2e.external_metric import NAME, external_metric
from tests.e2e.shared import WORKERS, SharedJobs
from tests.long import only_long

PAUSE_S = 0.5


def test_resized_in_place(shared_jobs: SharedJobs) -> None:
    (job,) = shared_jobs.take("elastic")
    pauses: list[float] = []
    others: list[float] = []
    for resize, workers, replicas in ((job.patch_replicas, WORKERS, 5), (job.scale, 5, 2)):
        before = job.training(workers=workers, steps=20)
        old = before.commits[-1].generation
        resize(replicas)
        after = job.changed(
            before,
            lambda p, r=replicas: int(p[0].rsplit("-", 2)[1]) >= r,  # type: ignore[misc]
            workers=replicas,
            survivors=min(WORKERS, replicas),
            generations=(1, 2) if replicas == 5 else (1, 1),  # two joiners may join one after the other
            redone=0,
        )
        for generation in [g for g in after.generations() if g > old]:
            pause_s = after.gap_s(generation) - after.median_step_s(old)  # a generation may last for a single step
            (others if after.starting_at(after.first_of(generation).t) else pauses).append(round(pause_s, 3))
    print(f"kubectl patch, kubectl scale: pause at each change, s: {pauses}; while another pod started: {others}")
    assert len(pauses) >= 2
    assert max(pauses) <= PAUSE_S, pauses
    wait_until(
        lambda: len([p for p in job.pods() if "deletionTimestamp" not in p["metadata"]]) == 2,
        "the workers that left have no pods",
        timeout_s=30,
    )


@only_long("it writes the scale subresource, as `kubectl scale` does above")
def test_horizontal_pod_autoscaler_grows_and_shrinks_the_job_in_place(
    shared_jobs: SharedJobs, operator: Kubectl
) -> None:
    """Kubernetes' own autoscaler, by a metric of one for each worker: it reads and writes the scale subresource only."""
    (job,) = shared_jobs.take("elastic")
    with external_metric(operator, job.namespace, WORKERS) as metric:
        operator.apply(_autoscaler(job.namespace, job.name))
        try:
            before = job.training(steps=10)
            wait_until(lambda: metric.num_reads >= 1, "the autoscaler reads the metric", timeout_s=60)
            for replicas, workers in ((5, WORKERS), (2, 5)):
                metric.value = replicas
                before = job.changed(
                    before,
                    lambda p, r=replicas: int(p[0].rsplit("-", 2)[1]) >= r,  # type: ignore[misc]
                    workers=replicas,
                    survivors=min(workers, replicas),
                    generations=(1, 2) if replicas == 5 else (1, 1),
                    redone=0,
                )
            said = operator.get("--namespace", job.namespace, "horizontalpodautoscaler", job.name)["status"]
            assert {c["type"]: c["status"] for c in said["conditions"]}["ScalingActive"] == "True"
            assert said["desiredReplicas"] == 2
        finally:
            operator.run("--namespace", job.namespace, "delete", "horizontalpodautoscaler", job.name)


def _autoscaler(namespace: str, job: str) -> dict[str, Any]:
    target = {"apiVersion": "regroup.dev/v1alpha1", "kind": "DistributedTrainingJob", "name": job}
    average = {"metric": {"name": NAME}, "target": {"type": "AverageValue", "averageValue": "1"}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": job, "namespace": namespace},
        "spec": {
            "scaleTargetRef": target,
            "minReplicas": 1,
            "maxReplicas": 5,
            "metrics": [{"type": "External", "external": average}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
        },
    }

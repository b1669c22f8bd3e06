"""3 -> 5 -> 2 while training: survivors keep their processes, the change costs at most half a second.

Two joiners may join one after the other. While the second starts its pod and imports torch it takes the CPU from the change
that the first one makes: that change is printed, and not judged. The last change of a resize always is.
"""

from __future__ import annotations

from cluster.kubectl import wait_until
from tests.e2e.shared import WORKERS, SharedJobs

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

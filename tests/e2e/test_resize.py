"""3 -> 5 -> 2 while training: survivors keep their processes, the change costs at most half a second.

Two joiners may join one after the other. While the second starts its pod and imports torch it takes the CPU from the change
that the first one makes: that change is printed, and not judged. The last change of a resize always is.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.traced_job import TracedJob

PAUSE_S = 0.5


@pytest.mark.parametrize("how", ["patch", "scale"])
def test_resized_in_place(jobs: Callable[..., TracedJob], how: str) -> None:
    job = jobs(elastic=(2, 5), environment={"STEPS": 100000})
    resize = job.patch_replicas if how == "patch" else job.scale
    pauses: list[float] = []
    others: list[float] = []
    for replicas in (5, 2):
        before = job.training(workers=job.get()["spec"]["replicas"], steps=20)
        old = before.commits[-1].generation
        resize(replicas)
        after = job.changed(
            before,
            lambda p, r=replicas: int(p[0].rsplit("-", 2)[1]) >= r,  # type: ignore[misc]
            workers=replicas,
            survivors=min(3, replicas),
            generations=(1, 2) if replicas == 5 else (1, 1),  # two joiners may join one after the other
            redone=0,
        )
        for generation in [g for g in after.generations() if g > old]:
            pause_s = after.gap_s(generation) - after.median_step_s(generation)
            (others if after.starting_at(after.first_of(generation).t) else pauses).append(round(pause_s, 3))
    print(f"kubectl {how}: pause at each change, s: {pauses}; while another pod started: {others}")
    assert len(pauses) >= 2
    assert max(pauses) <= PAUSE_S, pauses
    pods = {p["metadata"]["name"] for p in job.pods() if "deletionTimestamp" not in p["metadata"]}
    assert len(pods) == 2

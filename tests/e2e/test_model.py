"""A trained model, bitwise the same with kills and resizes as without."""

from __future__ import annotations

from collections.abc import Callable

from tests.e2e.training import TracedJob

STEPS = 700


def test_exact_run_with_faults_equals_a_fixed_size_run_without(jobs: Callable[..., TracedJob]) -> None:
    settings = {"STEPS": STEPS, "REDUCTION": "exact"}
    job = jobs("faulty", elastic=(2, 5), environment=settings)
    job.training(workers=3, steps=10)
    job.kill_rank(0)
    job.training(workers=3, steps=10)
    job.patch_replicas(5)
    job.training(workers=5, steps=10)
    job.kill_rank(3)
    job.training(workers=5, steps=10)
    job.scale(2)
    job.training(workers=2, steps=10)
    faulty_status = job.wait(240, "the faulty run does not end", state="Succeeded")
    calm = jobs("calm", replicas=2, elastic=None, environment={**settings, "STEP_SECONDS": 0})
    calm_status = calm.wait(240, "the calm run does not end", state="Succeeded")
    ours, theirs = job.trace().done, calm.trace().done
    assert {d["parameters"] for d in ours} == {d["parameters"] for d in theirs}
    assert len({d["parameters"] for d in ours}) == 1
    assert min(float(str(d["accuracy"])) for d in ours) >= 0.90  # the tour trains longer and asks for 0.97
    assert faulty_status["samples"] == calm_status["samples"]
    assert len(faulty_status["incidents"]) >= 4
    assert not calm_status.get("incidents")

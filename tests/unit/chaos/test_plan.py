"""The seed decides everything: the same faults each time, each of them possible in the job that takes them."""

from __future__ import annotations

import re

import pytest

from chaos import plan
from chaos.kinds import KINDS, SCRIPT, SESSION
from chaos.local import REPOSITORY
from chaos.plan import SHAPES, SPLIT, Scenario, faults, scenario, steps_for
from regroup.parallel.schedules import SCHEDULES

SEEDS = range(200)


def test_seed_gives_the_same_job_and_faults_again() -> None:
    for seed in SEEDS:
        job = scenario(seed)
        assert job == scenario(seed)
        assert faults(seed, 25, job) == faults(seed, 25, job)
    assert len({str(faults(seed, 25, scenario(seed))) for seed in SEEDS}) == len(SEEDS)


def test_shorter_run_of_a_seed_has_the_first_of_its_faults() -> None:
    for seed in SEEDS:
        job = scenario(seed)
        assert [f.kind for f in faults(seed, 5, job)] == [f.kind for f in faults(seed, 40, job)][:5]


def test_every_size_tier_and_kind_comes_up() -> None:
    jobs = [scenario(seed) for seed in SEEDS]
    assert {(j.tier, j.processes, j.elastic) for j in jobs} == {
        (tier, processes, elastic)
        for tier in ("Session", "Script")
        for processes in (1, 2)
        for elastic in (True, False)
    }
    for cluster in (False, True):
        drawn = {f.kind for s in SEEDS for f in faults(s, 25, scenario(s, cluster=cluster), cluster=cluster)}
        assert drawn == {k.name for k in KINDS.values() if (k.cluster if cluster else k.local)}


@pytest.mark.parametrize("cluster", [False, True], ids=["local", "cluster"])
def test_drawn_faults_fit_their_job(cluster: bool) -> None:
    for seed in SEEDS:
        job = scenario(seed, cluster=cluster)
        drawn = faults(seed, 25, job, cluster=cluster)
        assert len(drawn) == 25
        for fault in drawn:
            kind = KINDS[fault.kind]
            assert job.tier in kind.tiers
            assert job.elastic or not kind.elastic_only
            assert kind.cluster if cluster else kind.local
            assert kind.lasts == (fault.lasts_s > 0)
            assert fault.lasts_s <= (25.0 if kind.name in ("stop-api", "power-off") else 10.0)


def test_every_moment_comes_up_and_the_last_faults_meet_the_end() -> None:
    drawn = [faults(seed, 25, scenario(seed)) for seed in SEEDS]
    late = {plan.END, plan.FINISHING}
    assert {f.moment for of in drawn for f in of} == {
        plan.SETTLED,
        plan.FORMING,
        plan.ADOPTING,
        plan.CHECKPOINT,
        plan.SCALING,
    } | late
    for of in drawn:
        assert [f.moment in late for f in of] == [False] * 22 + [True] * 3
        assert of[0].moment == plan.SETTLED, "nothing changes yet that a fault could meet"
        left = [f.delay_s if f.moment == plan.END else -1.0 for f in of[22:]]
        assert left == sorted(left, reverse=True), "the one that comes last in the job is the last"


def test_fault_is_aimed_at_checkpoints_that_can_be_seen_only() -> None:
    aimed = {job.tier for job, of in ((scenario(s), faults(s, 25, scenario(s))) for s in SEEDS)
             if any(f.moment == plan.CHECKPOINT for f in of)}  # fmt: skip
    assert aimed == {SESSION}, "what a script saves is its own"


def test_faults_of_make_test_are_of_every_kind_moment_and_sort_of_job() -> None:
    found = re.search(
        r"-m chaos --seed (\d+) --faults 40 --per-job 10$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE
    )
    assert found is not None
    first = int(found[1])
    jobs = [scenario(seed) for seed in range(first, first + 4)]
    drawn = [f for seed, job in enumerate(jobs, first) for f in faults(seed, 10, job)]
    assert {f.moment for f in drawn} == set(plan.MOMENTS) - {plan.RECOVERING}
    # The job may end before a fault that is aimed at its last moments.
    assert {f.kind for f in drawn if f.moment != plan.FINISHING} == {k.name for k in KINDS.values() if k.local}
    damage = [i for job in range(4) for i, f in enumerate(drawn[10 * job :][:10]) if f.kind == "damage-checkpoint"]
    assert max(damage) >= 5, "before that there may be no two checkpoints"
    assert {j.tier for j in jobs} == {SESSION, SCRIPT}
    assert {j.processes for j in jobs} == {1, 2}
    assert {j.elastic for j in jobs} == {True, False}


def test_seed_of_a_whole_model_stands_for_what_it_stood_for() -> None:
    assert str(scenario(1000)) == "Session tier, 4 workers of 1, 2 to 5 workers"
    assert str(scenario(42193)) == "Script tier, 2 workers of 2, 1 to 5 workers"
    assert {scenario(seed).shape for seed in SEEDS} == {None}


def test_split_jobs_are_of_every_shape_size_and_kind_of_fault() -> None:
    seeds = range(50 * len(SHAPES))
    jobs = [scenario(seed, model=SPLIT) for seed in seeds]
    assert [job.shape for job in jobs] == [SHAPES[seed % len(SHAPES)] for seed in seeds]
    for shape in SHAPES:
        sizes = {job.workers // shape.workers_per_group for job in jobs if job.shape == shape}
        assert sizes == set(range(1, shape.most_groups + 1))
    assert {shape.schedule for shape in SHAPES} == {"", *SCHEDULES}
    assert all(("pipeline" in shape.mesh) == bool(shape.schedule) for shape in SHAPES)
    assert not any(job.evaluate_every for job in jobs if job.shape and job.shape.schedule), "it cannot be called"
    assert {(job.elastic, job.evaluate_every > 0) for job in jobs} == {
        (a, b) for a in (True, False) for b in (True, False)
    }
    drawn = {f.kind for seed, job in enumerate(jobs) for f in faults(seed, 25, job)}
    assert drawn == {k.name for k in KINDS.values() if k.local}


def test_split_job_is_of_whole_groups() -> None:
    for seed in SEEDS:
        job = scenario(seed, model=SPLIT)
        assert job.shape is not None
        for workers in (job.workers, job.min_workers or job.workers, job.max_workers):
            assert workers % job.workers_per_group == 0
        assert (job.min_workers or 1) <= job.workers <= job.max_workers


def test_a_few_faults_all_come_before_the_end() -> None:
    assert all(f.moment not in (plan.END, plan.FINISHING) for f in faults(1, 8, scenario(1)))


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_target_is_one_of_the_candidates_and_its_neighbour_another(count: int) -> None:
    for seed in SEEDS:
        for fault in faults(seed, 5, scenario(seed)):
            first, second = fault.pick(count), fault.pick(count, beside=1)
            assert 0 <= first < count
            assert 0 <= second < count
            assert (first != second) == (count > 1)


@pytest.mark.parametrize(
    ("kind", "replaced", "script", "lasts_s", "bound_s"),
    [
        pytest.param("kill-trainer", False, False, 0.0, 20.0, id="a kill: time to form"),
        pytest.param("kill-agent", False, False, 0.0, 20.0, id="an agent that the others can do without"),
        pytest.param("kill-agent", True, False, 0.0, 50.0, id="an agent whose replacement has to import"),
        pytest.param("stop-agent", False, False, 4.0, 29.0, id="a frozen agent: its time, then its silence"),
        pytest.param("kill-trainer", False, True, 0.0, 50.0, id="a script: every process starts again"),
    ],
)
def test_bound_says_what_may_take_how_long(
    kind: str, replaced: bool, script: bool, lasts_s: float, bound_s: float
) -> None:
    assert KINDS[kind].limit_s(replaced=replaced, script=script, lasts_s=lasts_s) == bound_s


def test_steps_leave_room_for_faults_and_for_an_end() -> None:
    assert steps_for(1) > 100
    assert steps_for(50) > steps_for(25)


def test_job_is_described_in_words() -> None:
    assert str(Scenario(SCRIPT, 2, 3, None)) == "Script tier, 3 workers of 2, fixed size"
    assert str(Scenario(SCRIPT, 1, 3, 1)) == "Script tier, 3 workers of 1, 1 to 5 workers"
    split = Scenario(SESSION, 1, 4, 2, SHAPES[1], 10)
    assert (
        str(split)
        == "Session tier, 4 workers of 1, 2 to 6 workers, shard=2, 2 workers a group, evaluated every 10 steps"
    )
    piped = Scenario(SESSION, 2, 3, None, SHAPES[6])
    assert str(piped) == "Session tier, 3 workers of 2, fixed size, pipeline=2 interleaved, 1 workers a group"

"""The noise scale in real processes: equal on all ranks after a kill, known to a rank that joins, and reported."""

from __future__ import annotations

from regroup.protocol import env, local
from tests.trainer.agent_double import AgentDouble
from tests.trainer.elastic_kit import assert_one_state, finish, start


def test_noise_scale_survives_a_kill_and_goes_to_who_joins(job: AgentDouble) -> None:
    settings = {"TEST_NOISE": "1", env.MAX_WORLD_SIZE: "3"}
    start(job, 3, **settings)
    job.wait_step(1, 10, range(3))
    job.kill(1)
    job.announce([0, 2], lost=[job.workers[1].pod_uid])
    job.wait_step(2, 20, [0, 2])
    job.start(3, TEST_INIT="13", **settings)
    job.wait_attached(3)
    job.announce([0, 2, 3])
    job.wait_step(3, 30, [0, 2, 3])
    ends = finish(job, [0, 2, 3])
    assert_one_state(ends)
    known, second, joined = (end["noise"] for end in ends)
    assert known == second
    assert joined, "the one that joined has committed something"
    assert all(known[step] == value for step, value in joined.items()), "from its first step on"
    values = list(known.values())
    assert all(value is not None and value > 0 for value in values[20:])
    # An average over a hundred steps that began anew would jump: that of one step is far off.
    starts = {g: job.workers[0].messages(local.AdoptedLocally, g)[0].start_step for g in (2, 3)}
    for step in starts.values():
        before, after = known[str(step - 1)], known[str(step)]
        assert 0.5 * before < after < 2 * before
    reports = [m for m in job.workers[0].messages(local.Committed) if str(m.step - 1) in known]
    assert reports
    assert all(report.noise_scale == known[str(report.step - 1)] for report in reports)

"""A hand-over: both pods of one slot in one generation, so that there are more ranks than virtual workers (rule HANDOVER)."""

import pytest

from regroup.protocol import local
from regroup.protocol.document import PLANNED
from tests.trainer.agent_double import AgentDouble
from tests.trainer.elastic_kit import STEPS, assert_one_state, finish, run_alone, start

FAST = {"TEST_LAYER": "batchnorm", "TEST_MICROBATCH": "48"}
"""One virtual worker: then `fast` has the bits of a run alone, too, its running statistics with them."""
EXACT = {"TEST_REDUCTION": "exact", "TEST_MICROBATCH": "24", "TEST_ZERO_GRAD": "1"}


@pytest.mark.parametrize(
    ("settings", "processes", "killed"),
    [
        pytest.param(FAST, 1, False, id="fast, running statistics, the old pod leaves at a cut"),
        pytest.param(EXACT, 2, True, id="exact, two processes a pod, the old pod is killed"),
    ],
)
def test_successor_of_the_only_pod_goes_on_with_its_bits(
    job: AgentDouble, settings: dict[str, str], processes: int, killed: bool
) -> None:
    old, new = range(processes), range(processes, 2 * processes)
    start(job, processes, **settings)
    reference = run_alone(job, TEST_STEPS=str(STEPS), **settings)
    for slot in new:
        job.start(slot, **settings).slot = job.workers[slot - processes].slot
    job.wait_attached(*new)
    job.announce([*old, *new], PLANNED)
    job.first_commit(2, [*old, *new])
    reached = max(m.step for slot in new for m in job.workers[slot].messages(local.Committed, 2))
    job.wait_step(2, reached + 3, new)
    said = {slot: {m.empty for m in job.workers[slot].messages(local.Committed, 2)} for slot in [*old, *new]}
    assert said == {slot: {slot % 2 == 1} for slot in said}, "every other rank has an empty share, and says so"
    if killed:
        for slot in old:
            job.kill(slot)
        job.announce(new, lost=[job.workers[slot].pod_uid for slot in old])
    else:
        job.announce(new, PLANNED)
    job.first_commit(3, new)
    job.stop("Released", old)
    ends = finish(job, list(new))
    assert_one_state(ends)
    for end in ends:
        assert end["losses"].items() <= reference["losses"].items()
        assert end["hash"] == reference["hash"]
    assert [job.workers[slot].messages(local.AdoptedLocally)[0].rolled_back for slot in new] == [False] * processes

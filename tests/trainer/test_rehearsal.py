"""A joiner whose model compiles for long: it rehearses before it is ready, and nobody waits for it. Real processes over gloo."""

import itertools

import pytest

from regroup.protocol import local
from regroup.protocol.document import PLANNED
from tests.trainer.agent_double import AgentDouble
from tests.trainer.elastic_kit import PACE_S, assert_one_state, finish, start

COMPILE_S = 3.0
"""Of the joiner's first forward alone: the others have no compiled model."""
BUSY_S = 1.0
"""What a step of PACE_S, the change of groups and a busy machine take together, at most."""


@pytest.mark.parametrize("rehearse", [True, False])
def test_others_wait_for_a_joiners_compilation_only_without_a_rehearsal(job: AgentDouble, rehearse: bool) -> None:
    start(job, 2)
    job.wait_step(1, 3, range(2))
    job.start(2, TEST_COMPILE=str(COMPILE_S), TEST_REHEARSE="" if rehearse else "0")
    job.wait_attached(2)
    job.announce(range(3), PLANNED)
    job.first_commit(2, range(3))
    told = job.wait(lambda: job.workers[2].messages(local.Attach), "attach of the joiner")
    assert [attach.rehearses for attach in told] == ([True, False] if rehearse else [False])
    commits = [h.at_s for h in job.workers[0].heard if isinstance(h.message, local.Committed)]
    longest_s = max(later - earlier for earlier, later in itertools.pairwise(commits))
    assert_one_state(finish(job, [0, 1, 2]))
    print(f"longest time between two commits while a worker joins that compiles for {COMPILE_S:g} s: {longest_s:.2f} s")
    if rehearse:
        assert longest_s < PACE_S + BUSY_S
    else:
        assert longest_s >= COMPILE_S

"""Which exits of tier Script count: a lost rank takes the processes of its peers with it."""

from __future__ import annotations

import pytest

from regroup_operator.model.plan import Clock, Memory
from regroup_operator.model.records import Observation, Pod, ProcessExit, Session
from regroup_operator.plan.failures import see_failures
from tests.builders.plan import make_current, make_pod, make_session

CLOCK = Clock(100.0, 1e9)
ALL = (make_pod(0), make_pod(1), make_pod(2))


def exited(slot: int, generation: int = 1, at_s: float = 99.0) -> Session:
    ended = ProcessExit(at_s, 1, 0, 1, "connection closed by peer", generation)
    return make_session(slot, exits=(ended,), num_exits=1)


@pytest.mark.parametrize(
    ("tier", "pods", "sessions", "counted"),
    [
        pytest.param("Script", ALL, [exited(0), exited(1, at_s=98.0), exited(2)], ["1"], id="the first of a generation"),
        pytest.param("Script", ALL, [exited(0), exited(1, generation=2)], ["0", "1"], id="one of each generation"),
        pytest.param("Script", ALL[:2], [exited(0), exited(1)], [], id="a member's pod is gone"),
        pytest.param("Script", (*ALL[:2], make_pod(2, terminating=True)), [exited(0)], [], id="a member's pod is deleted"),
        pytest.param("Script", (*ALL[:2], make_pod(2, node_ready=False)), [exited(0)], [], id="a member's node is lost"),
        pytest.param("Session", ALL, [exited(0), exited(1)], ["0", "1"], id="session: survivors do not exit, each counts"),
        pytest.param(None, ALL, [exited(0), exited(1)], ["0", "1"], id="not known yet: each counts"),
    ],
)  # fmt: skip
def test_exits_that_count(tier: str | None, pods: tuple[Pod, ...], sessions: list[Session], counted: list[str]) -> None:
    obs = Observation(pods, {s.pod_uid: s for s in sessions})
    seen = see_failures(obs, Memory(), CLOCK, tier=tier, current=make_current())
    assert [f.worker for f in seen.failures] == counted
    again = see_failures(obs, seen.memory, CLOCK, tier=tier, current=make_current())
    assert again.failures == ()

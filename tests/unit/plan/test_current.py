"""When a job's tier is known: what its script is shows only once it runs."""

from __future__ import annotations

from typing import Any

import pytest

from regroup.protocol.state import Group, Phase
from regroup_operator.api.members import MemberId
from regroup_operator.model.plan import Issued
from regroup_operator.model.records import AgentSession
from regroup_operator.plan.facts.current import SCRIPT_AFTER_S, corrected_slots, decide_tier, read_current
from tests.builders.plan import make_pod, make_session, make_status, uid_of

STATUS = {"membership": {"generation": 1, "members": "0-1"}}
NOW_S = 100.0


def worker(
    slot: int, phase: str = Phase.STARTING, generation: int = 1, ran_s: float = 5.0, **changes: object
) -> AgentSession:
    given: dict[str, Any] = {"session": False, "condition_at_s": NOW_S - ran_s, **changes}
    return make_session(slot, phase, generation, **given)


YOUNG, OLD, GONE = worker(0), worker(0, ran_s=SCRIPT_AFTER_S), worker(1, Phase.DONE)
FORMED = worker(1, group=Group.FORMED)


@pytest.mark.parametrize(
    ("status", "sessions", "want"),
    [
        pytest.param({}, [worker(0, Phase.READY, 0), worker(1, Phase.READY, 0)], None, id="nothing runs yet"),
        pytest.param(STATUS, [OLD, YOUNG], None, id="a process is young"),
        pytest.param(STATUS, [OLD, worker(1, ran_s=SCRIPT_AFTER_S)], "Script", id="all have run for long"),
        pytest.param(
            STATUS, [worker(0, group=Group.FORMED), FORMED], "Script", id="all have passed init_process_group"
        ),
        pytest.param(STATUS, [YOUNG, FORMED], None, id="one has not passed it"),
        pytest.param(STATUS, [OLD, GONE], "Script", id="one has exited 0, the other runs for long"),
        pytest.param(STATUS, [YOUNG, GONE], None, id="one has exited 0, the other is young"),
        pytest.param(STATUS, [OLD], None, id="a member has not called"),
        pytest.param(STATUS, [OLD, worker(1, ran_s=99.0, connected=False)], None, id="a member cannot be reached"),
        pytest.param(STATUS, [OLD, worker(1, generation=0, ran_s=99.0)], None, id="a member runs an earlier one"),
        pytest.param(STATUS, [OLD, worker(1, session=True)], "Session", id="one has attached"),
        pytest.param(STATUS | {"tier": "Script"}, [OLD, worker(1, session=True)], "Session", id="one attaches late"),
        pytest.param(STATUS | {"tier": "Script"}, [], "Script", id="it stays known"),
    ],
)
def test_decide_tier(status: dict[str, object], sessions: list[AgentSession], want: str | None) -> None:
    assert decide_tier(make_status(status), sessions, NOW_S, on_torch=True) == want


@pytest.mark.parametrize(
    ("status", "sessions", "want"),
    [
        pytest.param({}, [], None, id="there is no generation"),
        pytest.param(STATUS, [YOUNG, worker(1)], "Script", id="at once"),
        pytest.param(STATUS, [YOUNG, worker(1, session=True)], "Session", id="the library is there all the same"),
    ],
)  # fmt: skip
def test_framework_without_torch_runs_scripts(
    status: dict[str, object], sessions: list[AgentSession], want: str | None
) -> None:
    assert decide_tier(make_status(status), sessions, NOW_S, on_torch=False) == want


def test_order_and_positions_of_groups_come_back_from_the_status() -> None:
    older = {"generation": 1, "uid": "g1", "members": "0,3,2,1.1"}
    newest = {"generation": 2, "uid": "g2", "kind": "forced", "members": "2-3,0,5", "older": [older]}
    got = read_current(make_status({"membership": newest}), [make_pod(0), make_pod(2)], Issued(), 0.0, per_group=2)
    assert got is not None
    assert got.members == (MemberId(2, 0), MemberId(3, 0), MemberId(0, 0), MemberId(5, 0))
    assert got.older[0].pod_uids == (uid_of(0), "gone/3.0", uid_of(2), "gone/1.1")
    assert got.older[0].positions == (0, 1, 0, 1)


def test_slot_whose_newest_pod_is_of_another_template_begins_anew() -> None:
    pods = [
        make_pod(slot, attempt, spec_digest=of) for slot, attempt, of in ((0, 3, "old"), (1, 2, "old"), (1, 3, "new"))
    ]
    assert corrected_slots([*pods, make_pod(2)], "new") == {0}

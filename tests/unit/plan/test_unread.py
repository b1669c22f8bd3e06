"""A script without the library reads no checkpoint: a job that names one does not begin anew in silence."""

from __future__ import annotations

from typing import Any

import pytest

from regroup.protocol.state import Group, Phase
from regroup_operator.api.spec import CheckpointPolicy
from regroup_operator.model.plan import Clock
from regroup_operator.model.records import AgentSession, Settings
from regroup_operator.model.worker import Current, Standing
from regroup_operator.plan.facts.current import SCRIPT_AFTER_S
from regroup_operator.plan.failures.unread import judge_unread
from tests.builders.plan import make_current, make_job, make_session, make_worker
from tests.unit.plan.test_job import MEMBERSHIP, TRAINING, plan

NOW_S = 1000.0
WAIT_S = Settings().start_timeout_s
NAME = "step-1008.g3-5f0c1a2b"
RESUMES = CheckpointPolicy(volume_claim="ckpt", resume_from=NAME)
GROUP = make_current((0, 1), number=2)


def runs(phase: str = Phase.STARTING, generation: int = 2, ran_s: float = 60.0, **changes: Any) -> AgentSession:
    return make_session(0, phase, generation, **{"session": False, "condition_at_s": NOW_S - ran_s, **changes})


@pytest.mark.parametrize(
    ("session", "tier", "fails", "due_s"),
    [
        pytest.param(runs(group=Group.FORMED), "Script", True, None, id="it has passed init_process_group"),
        pytest.param(runs(Phase.DONE), "Script", True, None, id="it has ended"),
        pytest.param(runs(ran_s=WAIT_S), "Script", True, None, id="it has run for as long as a start may take"),
        pytest.param(runs(), "Script", False, NOW_S - 60.0 + WAIT_S, id="a slow build may attach yet (adr/0004)"),
        pytest.param(runs(Phase.DONE, 1), "Script", False, None, id="the member of an earlier generation"),
        pytest.param(runs(ran_s=WAIT_S), "Session", False, None, id="a session has attached"),
        pytest.param(runs(ran_s=WAIT_S), None, False, None, id="nobody knows yet what the other members run"),
    ],
)
def test_script_that_reads_no_checkpoint_fails_the_job(
    session: AgentSession, tier: str | None, fails: bool, due_s: float | None
) -> None:
    members = (make_worker(0, Standing.STARTING, session=session), make_worker(1, Standing.LOST, session=None))

    def judge(checkpoint: CheckpointPolicy | None = RESUMES, current: Current | None = GROUP) -> Any:
        return judge_unread(
            checkpoint=checkpoint, tier=tier, current=current, members=members, start_timeout_s=WAIT_S, now_s=NOW_S
        )

    verdict, due = judge()
    assert (verdict is not None, due) == (fails, due_s)
    if verdict is not None:
        assert (verdict.reason, NAME in verdict.message) == ("ResumeFromUnread", True), verdict
    for nothing in (judge(None), judge(CheckpointPolicy(volume_claim="ckpt")), judge(RESUMES, None)):
        assert nothing == (None, None)


@pytest.mark.parametrize("resumes", [True, False])
def test_script_that_has_ended_without_the_checkpoint_has_not_succeeded(resumes: bool) -> None:
    checkpoint = {"volumeClaim": "ckpt"} | ({"resumeFrom": NAME} if resumes else {})
    ended = tuple(
        make_session(slot, Phase.DONE, 1, session=False, entered=1, adopted_to=1, condition_at_s=0.0) for slot in (0, 1)
    )
    job = make_job().with_replicas(2).with_spec(checkpoint=checkpoint)
    status = TRAINING | {"tier": "Script"}
    assert plan(job.with_status(status), sessions=ended).written["phase"] == ("Failed" if resumes else "Succeeded")


def test_job_is_looked_at_when_its_script_has_run_for_long_enough() -> None:
    silent = tuple(
        make_session(slot, Phase.STARTING, 1, session=False, adopted_to=1, condition_at_s=10.0) for slot in (0, 1)
    )
    job = make_job().with_replicas(2).with_spec(checkpoint={"volumeClaim": "ckpt", "resumeFrom": NAME})
    job = job.with_status({**TRAINING, "tier": None, "membership": MEMBERSHIP})
    now_s = 10.0 + SCRIPT_AFTER_S
    early = plan(job, sessions=silent, clock=Clock(now_s, 1_800_000_000.0))
    assert early.written["tier"] == "Script"
    while early.written["phase"] != "Failed":
        assert early.due_s is not None
        assert now_s < early.due_s <= 10.0 + WAIT_S
        now_s = early.due_s
        early = plan(job.with_status(early.written), sessions=silent, clock=Clock(now_s, 1_800_000_000.0))
    assert now_s == 10.0 + WAIT_S

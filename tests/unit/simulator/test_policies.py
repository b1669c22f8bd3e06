"""The judge of what a job's spec says of its end: it accepts what the policy allows, and finds an operator that does otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from regroup_operator.api import Job, JobStatus
from regroup_operator.api.spec import RunPolicy
from regroup_operator.model.plan import Verdict, seconds_of
from regroup_operator.model.records import Pod
from regroup_operator.plan.failures import failures, on_exit, pod_ends
from regroup_operator.plan.failures.roles import role_verdict
from regroup_operator.plan.lifecycle import lifecycle, run_policy
from regroup_operator.plan.lifecycle.run_policy import overdue
from regroup_operator.plan.pods import pods
from tests.simulator.faults import LEAVING, Fault
from tests.simulator.policies import Policy
from tests.simulator.setting import SHORT_STEPS, Setting
from tests.simulator.strikes import CODES
from tests.simulator.walk import Walk

Change = Callable[[pytest.MonkeyPatch], None]

PLAIN = Setting(
    seed=1, replicas=3, minimum=1, fixed=False, processes=1, script=False, known=True, total_steps=1_000_000,
    step_s=0.5, checkpoint_every=0, term_grace_s=20.0, quick=True,
)  # fmt: skip
SLOW = replace(PLAIN, quick=False)
SHORT = replace(PLAIN, total_steps=20)
BESIDE = replace(PLAIN, roles=2)
EXITS = Fault("exit-code", after_s=3.0, size=CODES.index(42))
KILL = Fault("kill", after_s=3.0)
SHUTDOWN = Fault("reboot", after_s=3.0, at=4, turns=1)
"""Of the first node. The pod of another place ends with the fault."""
NO_IMAGES = Fault("lose-images", calm=False, for_s=150.0)
REFUSED = Fault("refuse-pods", calm=False, for_s=150.0)
SUSPENDED = [Fault("suspend", after_s=10.0, calm=False, for_s=40.0), Fault("scale", after_s=45.0)]
"""The second fault comes after it was resumed: what lasts ends with the last fault."""
BY_ITSELF = replace(KILL, turns=5)
"""A pod of a role ends with each fault: with this one by its own exit code."""


def changed(module: object, name: str, value: Callable[..., Any]) -> Change:
    return lambda monkeypatch: monkeypatch.setattr(module, name, value)


def with_deadlines(add_s: int) -> Callable[..., Any]:
    """Return `overdue` of an operator whose deadlines are over so much later."""

    def late(policy: RunPolicy, *known: Any, **given: Any) -> tuple[Verdict | None, float | None]:
        names = ("active_deadline_seconds", "start_deadline_seconds")
        said = {name: getattr(policy, name) for name in names}
        later = {name: value + add_s for name, value in said.items() if value is not None}
        return overdue(policy.model_copy(update=later), *known, **given)

    return late


def as_written(status: JobStatus) -> float | None:
    """Return when the job was resumed, as an operator believes that does not know what it is about to write."""
    said = status.condition("Suspended")
    return seconds_of(said.last_transition_time) if said is not None and said.reason == "Resumed" else None


def any_failed(_: object, of_roles: tuple[Any, ...]) -> Verdict | None:
    return Verdict("RoleFailed", "A pod has failed.") if any(p.phase == "Failed" for p in of_roles) else None


def by_code(job: Job, of_roles: tuple[Pod, ...]) -> Verdict | None:
    """Judge pods of roles as an operator does that does not know the shutdown of a node."""
    return role_verdict(job, [replace(pod, disruption="") for pod in of_roles])


ACTIVE = replace(PLAIN, policy=Policy(active_s=20))
STARTS = replace(SLOW, policy=Policy(start_s=60))
RULED = replace(PLAIN, policy=Policy(rules="a code fails"))
IMAGES = replace(SLOW, policy=Policy(rules="images fail"))
NEVER = replace(BESIDE, policy=Policy(never=True))
NEVER_OF_THREE = replace(NEVER, roles=3)
DELETED = replace(SHORT, policy=Policy(ttl_s=20))
KEPT = replace(SHORT, policy=Policy(cleans="Running"))
CLEANED = replace(SHORT, policy=Policy(cleans="All"))


@pytest.mark.parametrize(
    ("setting", "fault", "end"),
    [
        pytest.param(ACTIVE, KILL, "DeadlineExceeded", id="it runs for too long"),
        pytest.param(STARTS, NO_IMAGES, "StartDeadlineExceeded", id="it does not start in time"),
        pytest.param(STARTS, KILL, "", id="it starts in time"),
        pytest.param(RULED, EXITS, "ExitRule", id="a rule fails the job"),
        pytest.param(RULED, replace(EXITS, size=CODES.index(43)), "", id="no rule names the code"),
        pytest.param(IMAGES, NO_IMAGES, "ExitRule", id="a rule fails a job whose pods cannot start"),
        pytest.param(NEVER, BY_ITSELF, "RoleFailed", id="a role's pod fails by itself"),
        pytest.param(NEVER, KILL, "", id="a role's pod is evicted"),
        pytest.param(NEVER_OF_THREE, SHUTDOWN, "", id="a role's pod ends with its node's shutdown"),
        pytest.param(DELETED, KILL, "Succeeded", id="it is deleted some time after its end"),
        pytest.param(CLEANED, KILL, "Succeeded", id="its pods are deleted at its end"),
        pytest.param(KEPT, KILL, "Succeeded", id="its pods stay with their logs"),
        pytest.param(SLOW, REFUSED, "", id="its pods are refused for a while"),
        pytest.param(SLOW, NO_IMAGES, "", id="its image cannot be pulled for a while"),
    ],
)
def test_end_that_the_policy_asks_for_is_right(setting: Setting, fault: Fault, end: str) -> None:
    walk = Walk(setting, [fault])
    outcome = walk.run()
    assert not outcome.sort, outcome
    assert outcome.end == end
    assert outcome.hits == [fault.kind]
    assert walk.world.store.is_deleted == (setting.policy.ttl_s is not None)


DEADLINES_LATE = changed(lifecycle, "overdue", with_deadlines(60))
DEADLINES_EARLY = changed(lifecycle, "overdue", with_deadlines(-10))
FORGETS = changed(lifecycle, "has_begun", lambda status: status.membership is not None and status.membership.adopted)
LATE_RESUMPTION = changed(run_policy, "resumed_at", lambda status, _: as_written(status))
NO_RULE = changed(on_exit, "first_match", lambda *_: None)
FIRST_RULE = changed(on_exit, "first_match", lambda *_: 0)
NOT_BLOCKED = changed(failures, "blocked_pod", lambda *_, **__: None)
NO_ROLE_FAILS = changed(failures, "role_verdict", lambda *_: None)
ANY_ROLE_FAILS = changed(failures, "role_verdict", any_failed)
SHUTDOWN_FAILS = changed(failures, "role_verdict", by_code)
NEVER_EXPIRES = changed(lifecycle, "expiry_s", lambda *_: None)
EXPIRES_AT_ONCE = changed(lifecycle, "expiry_s", lambda *_: 0.0)
CLEARS_NOTHING = changed(pods, "_clears", lambda *_: False)
CLEARS_ALL = changed(pods, "_clears", lambda *_: True)
NO_PAUSE = changed(pods, "held_until", lambda _: {})
NO_SURPLUS = changed(pods, "surplus", lambda *_: ())


@pytest.mark.parametrize(
    ("setting", "fault", "change", "sort"),
    [
        pytest.param(ACTIVE, KILL, DEADLINES_LATE, "not failed", id="a deadline that is missed"),
        pytest.param(ACTIVE, KILL, DEADLINES_EARLY, "failed", id="a deadline that comes early"),
        pytest.param(STARTS, NO_IMAGES, DEADLINES_LATE, "not failed", id="a late start"),
        pytest.param(STARTS, NO_IMAGES, DEADLINES_EARLY, "failed", id="a start in time"),
        pytest.param(STARTS, replace(KILL, after_s=70.0), FORGETS, "failed", id="a start that was long ago"),
        pytest.param(RULED, EXITS, NO_RULE, "not failed", id="a rule that is not applied"),
        pytest.param(RULED, KILL, FIRST_RULE, "failed", id="a rule that matches all"),
        pytest.param(IMAGES, NO_IMAGES, NOT_BLOCKED, "not failed", id="pods that wait on"),
        pytest.param(NEVER, BY_ITSELF, NO_ROLE_FAILS, "not failed", id="a role that may fail"),
        pytest.param(NEVER, KILL, ANY_ROLE_FAILS, "failed", id="a role that may not be evicted"),
        pytest.param(NEVER_OF_THREE, SHUTDOWN, SHUTDOWN_FAILS, "failed", id="a node that is shut down"),
        pytest.param(DELETED, KILL, NEVER_EXPIRES, "not deleted", id="a job that stays"),
        pytest.param(DELETED, KILL, EXPIRES_AT_ONCE, "deleted", id="a job that is deleted early"),
        pytest.param(CLEANED, KILL, CLEARS_NOTHING, "outlives", id="pods that stay"),
        pytest.param(KEPT, KILL, CLEARS_ALL, "not kept", id="pods that are deleted early"),
        pytest.param(SLOW, REFUSED, NO_PAUSE, "too many pods", id="pods without a pause"),
        pytest.param(SLOW, REFUSED, NO_SURPLUS, "too many pods", id="failed pods that all stay"),
    ],
)
def test_operator_that_does_otherwise_is_found(
    setting: Setting, fault: Fault, change: Change, sort: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    assert Walk(setting, [fault]).run().sort == sort


@pytest.mark.parametrize(
    ("rounds", "minimum", "sort", "end"),
    [
        pytest.param(pod_ends.ROUNDS, 1, "", "PodsEndAgain", id="all pods are refused for ten minutes"),
        pytest.param(pod_ends.ROUNDS - 1, 1, "failed", "PodsEndAgain", id="too early"),
        pytest.param(pod_ends.ROUNDS, 3, "", "PodsEndAgain", id="of a job that can do without none"),
    ],
)
def test_job_whose_pods_are_refused_again_and_again_fails_and_no_sooner(
    rounds: int, minimum: int, sort: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is healed before the second fault, whose moment does not come."""
    monkeypatch.setattr(pod_ends, "ROUNDS", rounds)
    setting = replace(SLOW, minimum=minimum, total_steps=SHORT_STEPS, step_s=5.0)
    faults = [Fault("refuse-pods", calm=False, for_s=700.0), Fault("kill", calm=False, moment=LEAVING)]
    outcome = Walk(setting, faults).run()
    assert (outcome.sort, outcome.end) == (sort, end), outcome


def test_deadline_of_before_a_suspension_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Walk(ACTIVE, SUSPENDED).run().sort
    LATE_RESUMPTION(monkeypatch)
    assert Walk(ACTIVE, SUSPENDED).run().sort == "failed"


def test_end_that_must_fail_the_job_is_counted() -> None:
    assert Walk(RULED, [EXITS]).run().num_due == 1


def test_pods_that_the_kubelet_refuses_come_later_and_later_and_start_once_it_takes_them() -> None:
    """By plan/pods/early.py: at once, at once, and after 10, 20, 40, 80 s more."""
    walk = Walk(replace(SLOW, replicas=1), [REFUSED])
    made_s: list[float] = []
    was = walk.world.pods.on_create

    def made(slot: int) -> None:
        made_s.append(walk.world.now_s)
        was(slot)

    walk.world.pods.on_create = made
    outcome = walk.run()
    assert not outcome.sort, outcome
    pauses_s = [b - a for a, b in pairwise(made_s)]
    slack_s = walk.world.pace.container_s[1] + 1.0
    assert [
        least_s <= pause_s < least_s + slack_s for least_s, pause_s in zip((0, 10, 20, 40, 80), pauses_s, strict=True)
    ] == [True] * 5

"""What the API server says of a job's pods: verdicts become conditions and events, trouble becomes another try."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from regroup_operator.api import RegroupError, SpecError, UnavailableError
from regroup_operator.maker import TELL_AGAIN_S, TOLD_AFTER
from regroup_operator.model.ports import AlreadyExists
from tests.builders.plan import make_job
from tests.simulator.world import World


def say(world: World, method: str, error: Exception | None, slots: set[int] | None = None) -> list[tuple[Any, ...]]:
    """Have a method of the Workers port raise (for some slots); return the list of its calls."""
    calls: list[tuple[Any, ...]] = []
    real = getattr(type(world.pods), method)

    async def call(*args: Any) -> Any:
        calls.append(args[1:])
        if error is not None and (slots is None or args[1] in slots):
            raise error
        return await real(world.pods, *args)

    setattr(world.pods, method, call)
    return calls


def test_template_that_is_refused_makes_no_pod_and_is_tried_again_when_it_changes(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(2), start=False)
    calls = say(world, "validate", SpecError("spec.template is not a pod: no.", reason="InvalidTemplate"))
    world.start_operator()
    world.advance(60)
    accepted = world.condition("Accepted")
    assert (accepted["status"], accepted["reason"], accepted["message"]) == (
        "False", "InvalidTemplate", "spec.template is not a pod: no.",
    )  # fmt: skip
    assert (world.names(), len(calls), [n.reason for n in world.notes]) == ([], 1, ["InvalidTemplate"])
    assert world.status["summary"]["state"] == "InvalidTemplate"
    say(world, "validate", None)
    world.scale(3)
    world.advance(0.1)
    assert (world.condition("Accepted")["status"], world.phase) == ("True", "Running")


def test_condition_names_the_options_of_a_launcher_that_are_ignored(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(2), start=False)
    command = ["torchrun", "--max-restarts", "3", "train.py"]
    world.store.change_spec(lambda spec: spec["template"]["spec"]["containers"][0].update(command=command))
    world.start_operator()
    world.advance(5)
    accepted = world.condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("True", "Valid")
    assert "Regroup ignores options of torchrun in the command: --max-restarts (" in accepted["message"]


def reserved_mount(spec: dict[str, Any]) -> None:
    """The API server has no rule against it."""
    spec["template"]["spec"]["containers"][0]["volumeMounts"] = [{"name": "x", "mountPath": "/regroup/x"}]


def two_kinds_of_gpus(spec: dict[str, Any]) -> None:
    """How many processes a worker has is not known."""
    spec.pop("processesPerWorker")
    limits = {"nvidia.com/gpu": 1, "amd.com/gpu": 1}
    spec["template"]["spec"]["containers"][0]["resources"] = {"limits": limits}


ONLY_PYTHON = pytest.mark.parametrize("mistake", [reserved_mount, two_kinds_of_gpus])


def edit(world: World, change: Callable[[dict[str, Any]], None]) -> None:
    world.store.change_spec(change)
    world.dirty()


def waiting(tmp_path: Path, **policy: Any) -> World:
    """Return a world with three pods, of which one waits for a node."""
    world = World(tmp_path, make_job().with_replicas(3).fixed().with_spec(runPolicy=policy), start=False)
    world.pods.pending = {2}
    world.start_operator()
    world.settle()
    assert len(world.names()) == 3
    return world


@ONLY_PYTHON
def test_deadline_of_the_start_holds_for_a_job_that_an_edit_broke(tmp_path: Path, mistake: Any) -> None:
    world = waiting(tmp_path, startDeadlineSeconds=60, ttlSecondsAfterFinished=30)
    edit(world, mistake)
    world.advance(30)
    accepted = world.condition("Accepted")
    assert (accepted["status"], accepted["reason"], world.phase) == ("False", "InvalidSpec", "Pending")
    assert (world.status["summary"]["state"], [n.reason for n in world.notes].count("InvalidSpec")) == (
        "InvalidSpec",
        1,
    )
    world.until(lambda: world.phase == "Failed", limit_s=60)
    failed = world.condition("Failed")
    assert failed["reason"] == "StartDeadlineExceeded"
    assert accepted["message"].split(".")[0] in failed["message"]
    world.until(lambda: world.store.is_deleted, limit_s=60)


@ONLY_PYTHON
def test_job_that_an_edit_broke_is_suspended_and_starts_once_it_is_corrected(tmp_path: Path, mistake: Any) -> None:
    world = waiting(tmp_path)
    right = world.store.view["spec"]["template"]
    edit(world, mistake)
    world.pods.pending = set()
    world.advance(60)
    assert world.generation == 0
    world.suspend(True)
    world.until(lambda: world.phase == "Suspended", limit_s=60)
    assert (world.names(), world.condition("Accepted")["reason"]) == ([], "InvalidSpec")
    world.suspend(False)
    world.advance(30)
    assert world.names() == []
    edit(world, lambda spec: spec.update(template=right))
    world.until(lambda: world.phase == "Running", limit_s=60)
    assert world.condition("Accepted")["status"] == "True"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        pytest.param(
            SpecError("Service digits does not belong to this job.", reason="NameTaken"),
            "NameTaken",
            id="a name is taken",
        ),
        pytest.param(RegroupError("services is forbidden: exceeded quota."), "CreateFailed", id="a quota is full"),
    ],
)
def test_job_whose_service_cannot_be_made_says_so_and_starts_once_it_can(
    tmp_path: Path, error: Exception, reason: str
) -> None:
    world = World(tmp_path, make_job().with_replicas(2), start=False)
    calls = say(world, "prepare", error)
    validations = say(world, "validate", None)
    world.start_operator()
    world.advance(30)
    accepted = world.condition("Accepted")
    assert (accepted["status"], accepted["reason"], accepted["message"]) == ("False", reason, str(error))
    assert ([n.reason for n in world.notes], world.names(), world.status["summary"]["state"]) == ([reason], [], reason)
    assert (len(calls), len(validations)) == (6, 1)  # at 0, 1, 3, 7, 15, 23 s
    say(world, "prepare", None)
    world.advance(8)
    assert (world.phase, world.condition("Accepted")["status"]) == ("Running", "True")


def test_service_that_cannot_be_made_without_an_answer_is_raised_and_told_in_the_end(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(1), start=False)
    say(world, "prepare", UnavailableError("failed calling webhook."))
    operator = world.start_operator()
    for _ in range(TOLD_AFTER - 1):
        with pytest.raises(UnavailableError):
            world.reconcile(operator)
    assert (world.names(), world.status) == ([], {})
    world.reconcile(operator)
    assert (world.condition("Accepted")["reason"], world.names()) == ("CreateFailed", [])


def test_template_that_cannot_be_tried_is_no_reason_for_silence(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(1), start=False)
    for method in ("validate", "create"):
        say(world, method, UnavailableError("failed calling webhook."))
    operator = world.start_operator()
    for _ in range(TOLD_AFTER - 1):
        with pytest.raises(UnavailableError):
            world.reconcile(operator)
    world.advance(10)
    assert [n.note for n in world.notes] == ["failed calling webhook."]
    assert world.phase == "Pending"


def test_job_that_has_started_gets_its_pods_back_although_its_service_cannot_be_looked_at(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(2))
    world.advance(1, step_every_s=0.1)
    say(world, "prepare", RegroupError("services is forbidden."))
    for uid in list(world.pods.by_uid):
        world.vanish(uid)
    world.advance(1)
    assert world.names() == ["0-1", "1-1"]


def test_pods_that_wait_for_a_node_are_kept_although_the_service_cannot_be_looked_at(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(2), start=False)
    world.pods.pending = {0, 1}
    world.start_operator()
    world.settle()
    say(world, "prepare", RegroupError("services is forbidden."))
    world.dirty()
    world.advance(10)
    assert (world.names(), world.pods.deleted) == (["0-0", "1-0"], [])
    assert [n.note for n in world.notes] == ["services is forbidden."]


def test_job_that_has_ended_needs_nothing_made(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(1), total_steps=3)
    world.advance(3, step_every_s=0.1)
    assert world.phase == "Succeeded"
    calls = say(world, "prepare", None)
    world.dirty()
    world.settle()
    assert calls == []


def test_job_that_trains_recovers_although_its_config_map_cannot_be_written(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(2).elastic(1, 2))
    world.advance(1, step_every_s=0.1)
    calls = say(world, "prepare", RegroupError('ConfigMap "digits-regroup" is invalid: field is immutable'))
    world.kill_process(world.uid(1))
    world.advance(10, step_every_s=0.1)
    assert (world.phase, world.generation > 1, world.condition("Accepted")["status"]) == ("Running", True, "True")
    assert [n.note for n in world.notes if n.reason == "CreateFailed"] == [
        'ConfigMap "digits-regroup" is invalid: field is immutable'
    ]
    assert len(calls) == 4, "a report is no reason to try again"


def test_template_of_a_started_job_is_not_tried_again(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(2))
    world.advance(0.1)
    calls = say(world, "validate", SpecError("A newer rule.", reason="InvalidTemplate"))
    world.scale(3)
    world.advance(3, step_every_s=0.1)
    assert (calls, world.members) == ([], "0-2")


def test_pod_that_is_refused_holds_up_no_other_and_is_tried_less_and_less_often(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(3).elastic(2, 3), start=False)
    calls = say(world, "create", RegroupError("exceeded quota: gpus"), {0, 2})
    world.start_operator()
    world.settle()
    assert ([slot for slot, *_ in calls], world.names()) == ([0], []), "a refusal ends the round"
    for _ in range(50):
        world.dirty()
        world.settle()
    assert len(calls) == 1, "a look is no reason to try again"
    world.advance(1)
    assert ([slot for slot, *_ in calls], world.names()) == ([0, 1, 2, 0], ["1-0"]), "what was not tried comes first"
    world.advance(60)
    assert 4 <= [slot for slot, *_ in calls].count(0) <= 6  # 1, 2, 4 .. s apart
    assert [n.note for n in world.notes if n.reason == "CreateFailed"] == ["exceeded quota: gpus"]
    say(world, "create", None)
    world.advance(31)
    assert world.names() == ["0-0", "1-0", "2-0"]


def test_lost_worker_is_seen_in_time_although_a_pod_is_refused_since_long(tmp_path: Path) -> None:
    """Silence is decided at the plan's own deadline; nothing else happens that would lead to a look."""
    world = World(tmp_path, make_job().with_replicas(4).elastic(1, 4), start=False)
    say(world, "create", RegroupError("exceeded quota: gpus"), {3})
    world.start_operator()
    world.until(lambda: world.phase == "Running")
    world.advance(100, step_every_s=0.5)
    uid = world.uid(1)
    world.power_off(uid)
    world.cut_off(uid)
    world.advance(7, step_every_s=None)
    assert world.members == "0,2"


def test_refusal_is_told_again_after_a_while_only(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(1), start=False)
    say(world, "create", SpecError("No.", reason="PodSecurity"), {0})
    world.start_operator()
    world.advance(TELL_AGAIN_S - 1)
    assert [n.reason for n in world.notes] == ["PodSecurity"]
    world.advance(40)
    assert [n.reason for n in world.notes] == ["PodSecurity", "PodSecurity"]


def test_without_an_answer_the_next_worker_waits_and_people_are_told_when_it_lasts(tmp_path: Path) -> None:
    """Each try may take a time-out's length: at most one between two plans."""
    world = World(tmp_path, make_job().with_replicas(3), start=False)
    calls = say(world, "create", UnavailableError("failed calling webhook."))
    world.start_operator()
    world.settle()
    assert [slot for slot, *_ in calls] == [0]
    world.advance(2.5)
    assert [slot for slot, *_ in calls] == [0, 1, 2], "no slot starves behind another"
    assert world.notes == []
    world.advance(30)
    assert {n.reason for n in world.notes} == {"CreateFailed"}
    say(world, "create", None)
    world.advance(31)
    assert world.phase == "Running"


def refused_by_the_kubelet(world: World) -> list[float]:
    """From now on every new pod has failed before it ran; return the times at which they are made."""
    made: list[float] = []
    real = type(world.pods).create

    async def create(job: Any, slot: int, attempt: int, avoid_nodes: tuple[str, ...]) -> bool:
        made.append(world.now_s)
        done: bool = await real(world.pods, job, slot, attempt, avoid_nodes)
        for uid, pod in world.pods.by_uid.items():
            if pod.running_since_s is None:
                world.pods.by_uid[uid] = replace(
                    pod, phase="Failed", status_reason="UnexpectedAdmissionError", status_message="Allocate failed."
                )
        return done

    world.pods.create = create  # type: ignore[method-assign]
    return made


def test_pods_that_fail_before_they_run_come_less_and_less_often(tmp_path: Path) -> None:
    """The kubelet refuses them: each is made, has failed, and another one is due."""
    world = World(tmp_path, make_job().with_replicas(1), start=False)
    world.pods.pending = {0}
    made = refused_by_the_kubelet(world)
    world.start_operator()
    world.advance(60)
    assert [at_s - made[0] for at_s in made] == [0, 1, 11, 31]
    condition = world.condition("PodsReady")
    assert condition["reason"] == "UnexpectedAdmissionError"
    said = "digits-worker-0-3 failed before it ran: UnexpectedAdmissionError: Allocate failed; the next one is made at "
    assert condition["message"].startswith(f"0 of 1 worker pods run; {said}")
    assert [n.reason for n in world.notes] == ["UnexpectedAdmissionError"]  # once, and not for each pod


@pytest.mark.parametrize("window_s", [3600, 60], ids=["usual window", "short window"])
def test_pods_that_never_run_fail_the_job_in_the_end(tmp_path: Path, window_s: int) -> None:
    """They were made every five minutes for ever."""
    job = make_job().with_replicas(1).with_spec(recovery={"windowSeconds": window_s})
    world = World(tmp_path, job, start=False)
    world.pods.pending = {0}
    made = refused_by_the_kubelet(world)
    world.start_operator()
    world.advance(610)
    assert world.phase == "Pending"
    world.advance(10)
    assert [at_s - made[0] for at_s in made] == [0, 1, 11, 31, 71, 151, 311, 611]
    failed = world.condition("Failed")
    assert (world.phase, failed["reason"]) == ("Failed", "PodsEndAgain")
    assert "which failed before it ran: UnexpectedAdmissionError: Allocate failed." in failed["message"]


def test_pods_that_never_run_fail_no_job_that_trains_without_them(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(2).elastic(1, 2))
    world.advance(1, step_every_s=0.1)
    world.pods.pending = {1}
    made = refused_by_the_kubelet(world)
    world.terminate(world.uid(1))
    world.advance(700, step_every_s=10.0)
    assert (len(made), world.phase) == (8, "Running")


def test_corrected_template_begins_the_count_anew(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(1), start=False)
    world.pods.pending = {0}
    made = refused_by_the_kubelet(world)
    world.start_operator()
    world.advance(320)
    assert len(made) == 7
    world.store.change_spec(lambda spec: spec["template"]["spec"]["containers"][0].update(image="example/trainer:2"))
    world.dirty()
    world.advance(320)
    assert (len(made), world.phase) == (14, "Pending")


def test_pod_of_the_slot_that_ran_long_ago_is_no_reason_for_more_tries(tmp_path: Path) -> None:
    """The pod of a node without power stays, terminating, with a container that ran."""
    world = World(tmp_path, make_job().with_replicas(2).elastic(1, 2))
    world.advance(1, step_every_s=0.1)
    uid = world.uid(1)
    world.power_off(uid)
    world.cut_off(uid)
    world.node_not_ready(uid)
    world.pods.pending = {1}
    made = refused_by_the_kubelet(world)
    world.advance(60, step_every_s=0.5)
    assert uid in world.pods.by_uid
    assert 4 <= len(made) <= 7


def test_many_refusals_at_once_are_one_event(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(3), start=False)

    async def create(job: Any, slot: int, *_: Any) -> None:
        raise RegroupError(f"{job.name}-worker-{slot}-0 is forbidden.")

    world.pods.create = create  # type: ignore[method-assign, assignment]
    world.start_operator()
    world.advance(60)
    assert [n.note for n in world.notes] == ["digits-worker-0-0 is forbidden."]


def test_deletion_that_is_refused_is_no_reason_for_more_tries(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(3).elastic(1, 3))
    world.advance(1, step_every_s=0.1)
    calls = say(world, "delete", RegroupError("pods is forbidden."))
    world.scale(2)
    world.advance(10, step_every_s=0.1)
    assert (world.members, [n.reason for n in world.notes].count("DeleteFailed")) == ("0-1", 1)
    assert len(calls) <= 5  # at 0, 1, 3, 7 s, and once more where the release took a moment
    say(world, "delete", None)
    world.advance(16, step_every_s=0.1)
    assert world.names() == ["0-0", "1-0"]


def test_status_write_whose_answer_is_lost_counts_nothing_twice(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(2).elastic(1, 2))
    world.advance(1, step_every_s=0.1)
    operator = world.operator
    assert operator is not None
    world.kill_process(world.uid(1))
    world.store.loses_answers = True
    with pytest.raises(UnavailableError):
        world.settle()
    world.store.is_down = False
    announced = world.generation
    world.dirty()
    world.advance(1, step_every_s=0.1)
    assert world.status["restarts"]["processes"] == 1
    assert (announced, world.training()) == (2, "0-0,1-0")
    assert [n.note for n in world.notes if n.note.startswith("Generation 2:")]


def test_deletion_comes_before_creation(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(2).elastic(1, 5))
    world.advance(0.1)
    order: list[str] = []
    for method in ("create", "delete"):
        real = getattr(type(world.pods), method)

        async def call(*args: Any, method: str = method, real: Any = real) -> Any:
            order.append(method)
            return await real(world.pods, *args)

        setattr(world.pods, method, call)
    uid = world.uid(1)
    world.power_off(uid)
    world.cut_off(uid)
    world.advance(7, step_every_s=None)
    world.node_not_ready(uid)
    world.advance(5, step_every_s=0.1)
    assert order == ["create", "delete"]
    assert world.members == "0,1.1"


def test_name_of_a_pod_that_is_going_is_not_waited_for(tmp_path: Path) -> None:
    world = World(tmp_path, make_job().with_replicas(1), start=False)
    real = type(world.pods).create

    async def create(job: Any, slot: int, attempt: int, avoid_nodes: tuple[str, ...]) -> bool:
        if attempt < 2:
            raise AlreadyExists(f"Pod digits-worker-{slot}-{attempt} is still terminating.")
        return await real(world.pods, job, slot, attempt, avoid_nodes)

    world.pods.create = create  # type: ignore[method-assign]
    world.start_operator()
    world.advance(0.1)
    assert (world.names(), world.members) == (["0-2"], "0.2")

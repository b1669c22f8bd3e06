"""Liveness: no trace of faults leaves a job that waits for ever. Each test is a trace that did, with the bound that it meets now.

The property (protocol.md, "What must hold"): a job with at least minReplicas agents that answer commits within a stated
bound, whatever has happened before. tests/simulator looks for more of them at random.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from _regroup_agent import events as ev
from regroup.protocol import wire
from regroup_operator.model.records import Settings
from regroup_operator.plan.facts.stalls import SCRIPT_ANSWER_S, SCRIPT_ASK_EVERY_S
from regroup_operator.plan.generation.lateness import ENTER_S, ONLY_HOLDER, SETBACK_S
from tests.builders.plan import JobBuilder, make_job
from tests.simulator import hazards
from tests.simulator.pace import Pace
from tests.simulator.trainers import Group, Trainer
from tests.simulator.world import FOREVER, World

SETTINGS = Settings()
RESTART_S = SETTINGS.form_timeout_s + SETTINGS.late_timeout_s
"""Until a worker that hangs has been restarted in place: the generation that it does not enter, then its own bound."""
REPLACE_S = RESTART_S + SETTINGS.late_timeout_s
MARGIN_S = 10.0


def elastic(replicas: int, minimum: int = 1) -> JobBuilder:
    return make_job().with_replicas(replicas).elastic(minimum, 5).with_recovery(maxRestarts=1000)


def fixed(replicas: int) -> JobBuilder:
    return make_job().with_replicas(replicas).fixed().with_recovery(maxRestarts=1000)


def running(tmp_path: Path, job: JobBuilder, **given: Any) -> World:
    """Return a world whose job has committed five steps."""
    world = World(tmp_path, job, **{"known_session": True} | given)
    world.advance(3.0)
    world.step(5)
    return world


def trains_within(world: World, seconds: float, workers: str) -> None:
    """Let time pass until these workers train; a step has to be committed, too."""
    world.until(lambda: world.training() == workers, limit_s=seconds, step_every_s=0.5)
    count = len(world.ledger.committed)
    world.step()
    assert len(world.ledger.committed) > count


def restart_slowly(world: World, slot: int) -> None:
    """Kill a worker's process; the new one attaches when `attach` is called."""
    agent = world.agents[world.uid(slot)]
    world.slow.add((agent.name, 0))
    world.kill_process(agent.uid)


def attach(world: World, slot: int) -> None:
    world.agents[world.uid(slot)].trainers[0].attach()


def test_word_that_a_generation_was_never_entered_ends_the_wait_for_it(tmp_path: Path) -> None:
    """HEARD, WORDS. Worker 1 trains alone and dies; the next generation names worker 0, whose process dies before it enters.
    Worker 1 comes back and asks for a witness of that generation: worker 0, which has heard a newer one, is it."""
    world = running(tmp_path, elastic(2))
    restart_slowly(world, 0)
    world.settle()
    world.step(3)
    world.scale(1)
    world.settle()
    restart_slowly(world, 1)
    world.settle()
    world.slow.clear()
    trainer = world.agents[world.uid(0)].trainers[0]
    trainer.frozen = True
    trainer.attach()
    world.advance(0.1)
    assert world.members == "0"
    restart_slowly(world, 0)
    world.advance(0.1)
    attach(world, 1)
    trains_within(world, 2.0, "1-0")
    assert len(world.status["membership"]["older"]) == 0


def test_holder_outside_a_group_is_brought_in(tmp_path: Path) -> None:
    """BEST. Scaled to one, worker 0 adopts generation 2, dies and is back before the operator looks again: it holds nothing.
    Worker 1, well and not a member any more, holds what generation 1 committed."""
    world = running(tmp_path, elastic(2))
    world.scale(1)
    world.settle()
    assert world.operator is not None
    world.operator.pause()
    world.step()
    assert world.training() == "0-0"
    world.kill_process(world.uid(0))
    world.advance(1.0)
    world.operator.go_on()
    for agent in world.agents.values():
        agent.flush()
    world.dirty()
    trains_within(world, 5.0, "1-0")  # the world itself asserts that nobody rolls back


@pytest.mark.parametrize(
    ("job", "slot"),
    [pytest.param(elastic(1), 0, id="one worker"), pytest.param(fixed(2), 0, id="fixed size")],
)
def test_stream_that_ends_before_the_document_is_told_both_again(tmp_path: Path, job: JobBuilder, slot: int) -> None:
    world = running(tmp_path, job)
    agent = world.agents[world.uid(slot)]
    read = agent.read

    def until_the_generation() -> bool:
        heard = agent.core._worker.heard
        done = read()
        newest = agent.core._worker.generation
        if newest is not None and newest.hosts_store and newest.number > heard:
            agent.read = read  # type: ignore[method-assign]
            agent.disconnect()
        return done

    agent.read = until_the_generation  # type: ignore[method-assign]
    world.kill_process(agent.uid)
    world.until(lambda: world.generation == 2, limit_s=10)
    trains_within(world, 5.0, ",".join(f"{slot}-0" for slot in range(len(world.agents))))


def never_arrives(trainer: Any) -> None:
    """The process enters and hangs before it meets the others (NCCL's initialisation, for example)."""
    trainer._answered = lambda _answer: None


@pytest.mark.parametrize(
    ("job", "workers", "bound_s"),
    [
        pytest.param(elastic(3), "0-0,1-0", SETTINGS.form_timeout_s, id="elastic: the others go on"),
        pytest.param(fixed(3), "0-0,1-0,2-0", RESTART_S, id="fixed size: it is restarted in place"),
    ],
)
def test_process_that_hangs_while_it_forms(tmp_path: Path, job: JobBuilder, workers: str, bound_s: float) -> None:
    world = running(tmp_path, job)
    never_arrives(world.agents[world.uid(2)].trainers[0])
    world.kill_process(world.uid(1))
    trains_within(world, bound_s + MARGIN_S, workers)


@pytest.mark.parametrize(
    ("job", "workers", "bound_s"),
    [
        pytest.param(elastic(3), "0-0,1-0", SETTINGS.form_timeout_s, id="elastic: the others go on"),
        pytest.param(fixed(3), "0-0,1-0,2-0", RESTART_S, id="fixed size: it is restarted in place"),
    ],
)
def test_process_that_is_stopped_before_it_enters(
    tmp_path: Path, job: JobBuilder, workers: str, bound_s: float
) -> None:
    world = running(tmp_path, job)
    world.agents[world.uid(2)].trainers[0].frozen = True
    world.kill_process(world.uid(1))
    trains_within(world, bound_s + MARGIN_S, workers)
    generation, steps = world.generation, len(world.ledger.committed)
    world.advance(600, 0.5)
    assert world.training() == "0-0,1-0,2-0"
    assert world.generation <= generation + 2
    assert len(world.ledger.committed) > steps + 1100


@pytest.mark.parametrize("step_s", [0.5, 2.0])
def test_joiner_whose_process_is_stopped_is_restarted_when_it_is_missed_again(tmp_path: Path, step_s: float) -> None:
    """Walk 11782: planned generations with it and forced ones without it followed each other, for 17 minutes."""
    world = running(tmp_path, elastic(2))
    world.scale(3)
    world.on_moment = lambda moment, uid: moment == "attached" and uid == world.uid(2)
    world.advance(MARGIN_S, step_s)
    world.on_moment = None
    world.agents[world.uid(2)].trainers[0].stop()
    again_s = SETTINGS.planned_timeout_s + SETBACK_S[0] + ENTER_S
    trains_within(world, again_s + MARGIN_S, "0-0,1-0,2-0")
    assert world.names() == ["0-0", "1-0", "2-0"], "no pod was replaced"


def test_cut_link_at_fixed_size_has_one_of_the_two_replaced(tmp_path: Path) -> None:
    world = running(tmp_path, fixed(3))
    world.network.cut_links.add(frozenset({world.uid(0), world.uid(2)}))
    world.kill_process(world.uid(1))
    trains_within(world, SETTINGS.late_timeout_s + MARGIN_S, "0-0,1-0,2-1")


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("job", [elastic(3), elastic(3, 2), elastic(5, 2)])
def test_worker_without_any_link_goes_and_all_others_train_on(tmp_path: Path, job: JobBuilder, bad: int) -> None:
    """CLIQUE: each report names one peer, and of the first pair the wrong one went: worker 0 trained alone beside four healthy
    ones, or nobody did for a minute."""
    world = running(tmp_path, job)
    slots = range(world.replicas)
    world.network.cut_links |= {frozenset({world.uid(bad), world.uid(slot)}) for slot in slots if slot != bad}
    hazards.meet_cut_links(world)
    others = ",".join(f"{slot}-0" for slot in slots if slot != bad)
    trains_within(world, 2.0, others)
    steps = len(world.ledger.committed)
    world.advance(90, 0.5)  # after a minute it is planned in again
    assert world.training() == others
    assert len(world.ledger.committed) > steps + 175


@pytest.mark.parametrize("late", [0, 1], ids=["the newcomer hears first", "the holder hears first"])
def test_holder_that_a_newcomer_cannot_reach_trains_on(tmp_path: Path, late: int) -> None:
    """CLIQUE: of the two the one that holds the state stays, whichever hears of the broken link first; and the other is
    asked less and less often."""
    world = running(tmp_path, elastic(1))
    world.scale(2)
    world.settle()
    uids = [world.uid(0), world.uid(1)]
    world.network.cut_links.add(frozenset(uids))
    hears_later(world.agents[uids[late]].trainers[0])
    world.advance(30, 0.5)
    generation, steps = world.generation, len(world.ledger.committed)
    world.advance(300, 0.5)
    assert world.training() == "0-0"
    assert len(world.ledger.committed) >= steps + 590
    assert world.generation <= generation + 8


def break_what_trains(world: World) -> None:
    """Of each group that trains every collective fails, before it has committed a step."""
    for group in list(world.groups.values()):
        if len(group.adopted) == group.world_size and not group.is_broken:
            group.break_up(None)


def test_groups_that_break_before_each_commit_come_less_and_less_often_and_the_job_ends(tmp_path: Path) -> None:
    """145 generations in 30 s, no commit and no message: that was seen with processes that all lived on."""
    world = running(tmp_path, elastic(2))
    generation, began_s = world.generation, world.now_s
    while not world.has_ended:
        break_what_trains(world)
        world.advance(0.05)
        assert world.now_s < began_s + 300
    assert world.now_s > began_s + 45
    assert world.generation <= generation + 21
    failed = world.condition("Failed")
    assert failed["reason"] == "NoStepCommitted"
    assert "generations in a row committed no step, although no process ended: Connection closed" in failed["message"]


def test_groups_that_have_broken_many_times_train_on_once_they_can(tmp_path: Path) -> None:
    world = running(tmp_path, elastic(2))
    until_s = world.now_s + 20
    while world.now_s < until_s:
        break_what_trains(world)
        world.advance(0.05)
    world.until(lambda: world.training() == "0-0,1-0", limit_s=6.0)
    world.step(5)
    world.advance(60, 0.5)
    assert world.phase == "Running"
    # The count begins anew: the next fault costs no pause.
    world.kill_process(world.uid(1))
    trains_within(world, 3.0, "0-0,1-0")


def hears_later(trainer: Trainer) -> None:
    """The process notices a moment after its peer that its group is broken."""
    world, failed = trainer.agent.world, trainer.failed

    def later(group: Group, peer_rank: int | None) -> None:
        world.after(0.05, lambda: failed(group, peer_rank))

    trainer.failed = later  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("replicas", "minimum", "after"),
    [
        pytest.param(3, 1, 1, id="to one"),
        pytest.param(3, 2, 2, id="to two, the fewest it may have"),
        pytest.param(2, 2, 3, id="one joins the fewest it may have"),
    ],
)
def test_size_that_changes_as_the_last_step_commits_does_not_keep_the_job_from_its_end(
    tmp_path: Path, replicas: int, minimum: int, after: int
) -> None:
    """FINISH: finished ranks ignore the planned generation, and are too few or too many for it."""
    world = World(tmp_path, elastic(replicas, minimum), total_steps=20, known_session=True)
    world.advance(3.0)
    world.step(19)
    world.scale(after)

    def commit_first(status: dict[str, Any]) -> None:
        if status["membership"]["generation"] == 1:
            world.store.before_write = commit_first
            return
        for group in world.groups.values():
            done = group.commit_step()
            if done is not None:
                world.ledger.group_committed(done)

    world.store.before_write = commit_first
    world.until(lambda: world.generation == 2, limit_s=5.0)
    for _ in range(2):  # the plans that come later say the same
        world.advance(1.0)
        assert world.phase == "Succeeded"
        assert (
            world.condition("Complete")["message"]
            == f"The script has returned in all {replicas} workers of generation 1."
        )


@pytest.mark.parametrize(
    ("before", "after", "pause_s"),
    [pytest.param(3, 2, 0.0, id="one leaves"), pytest.param(2, 3, 3.0, id="one joins, after its imports")],
)
def test_size_that_changes_two_steps_before_the_end_does_not_keep_the_job_from_it(
    tmp_path: Path, before: int, after: int, pause_s: float
) -> None:
    """FINISH, CUTALL: the change comes with the last step but one, and those who are in it commit the last."""
    world = World(tmp_path, elastic(before, 2), total_steps=20, known_session=True)
    world.advance(3.0)
    world.step(18)
    world.scale(after)
    world.advance(pause_s)
    world.step(3)
    world.advance(2.0)
    assert world.phase == "Succeeded"
    assert world.ledger.committed[-1] == (2, 20)
    assert world.condition("Complete")["message"] == f"The script has returned in all {after} workers of generation 2."


def test_agent_that_is_frozen_behind_an_open_stream_is_replaced(tmp_path: Path) -> None:
    """Its kernel answers for it. Fixed size: nobody can do without it."""
    world = running(tmp_path, fixed(3))
    world.agents[world.uid(2)].stop()
    world.kill_process(world.uid(1))
    trains_within(world, SETTINGS.form_timeout_s + SETTINGS.replace_after_s + MARGIN_S, "0-0,1-0,2-1")


def test_agent_that_is_turned_away_is_replaced(tmp_path: Path) -> None:
    """It speaks another version of the protocol: its pod would keep the slot for ever."""
    world = running(tmp_path, fixed(3))
    uid = world.uid(2)
    world.unreachable.add(uid)
    world.agents[uid].disconnect()
    assert world.operator is not None
    world.operator.registry.refuse(world.pods.by_uid[uid], "Protocol version 1 is not spoken here.")
    world.advance(SETTINGS.replace_after_s + 5 + MARGIN_S)  # the group stops with it
    trains_within(world, MARGIN_S, "0-0,1-0,2-1")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("script", ["session", "plain", "plain, and the others exit"])
def test_node_without_power_costs_one_generation(tmp_path: Path, seed: int, script: str) -> None:
    """The streams of its workers end seconds apart: a generation with a dead member was announced between them."""
    kind, _, exits = script.partition(", ")
    pace = Pace(random.Random(seed), probe_late_s=(0.0, 3.0))
    world = World(tmp_path, elastic(4), num_nodes=2, pace=pace, script=kind, backs_off=bool(exits))
    world.advance(60.0, 0.5)
    before = world.generation
    hazards.node_off(world, "node-0", FOREVER)
    world.advance(30.0, 0.5)
    assert (world.generation, world.members) == (before + 1, "1,3"), world.notes


def test_holder_is_not_restarted_while_the_job_waits_for_capacity(tmp_path: Path) -> None:
    """Two are needed; one is lost, its successor hangs and goes, and no node has room. Nobody else has the state."""
    world = running(tmp_path, fixed(2))
    world.advance(5.0, 0.5)
    holder, newest = world.agents[world.uid(0)].trainers[0], world.ledger.committed[-1]
    world.on_moment = lambda moment, _: moment == "heard" and world.generation == 2
    world.terminate(world.uid(1))
    world.advance(20.0)
    world.on_moment = None
    world.agents[world.uid(1, 1)].trainers[0].stop()
    world.power_off(world.uid(1))
    world.pods.pending.add(1)
    world.vanish(world.uid(1, 1))
    world.advance(900.0, 5.0)
    assert holder.alive
    assert world.condition("Training")["status"] == "False"
    world.vanish(world.uid(1))
    world.pods.pending.clear()
    for uid, pod in list(world.pods.by_uid.items()):
        if pod.phase == "Pending":
            world.run_pod(uid)
    world.until(lambda: world.training().count(",") == 1, SETTINGS.form_timeout_s + MARGIN_S)
    assert world.ledger.rolled_back == 0
    world.step()
    assert world.ledger.committed[-1][1] == newest[1] + 1


def test_agent_of_a_script_that_hangs_behind_an_open_stream_is_replaced(tmp_path: Path) -> None:
    """No step of a script is overdue: nobody asked, and the job waited for the word of an agent that hung (walk 18508)."""
    world = World(tmp_path, fixed(2), script="plain")
    world.advance(40.0, 0.5)
    world.agents[world.uid(1)].stop()
    limit_s = SCRIPT_ASK_EVERY_S + SCRIPT_ANSWER_S + SETTINGS.replace_after_s + MARGIN_S
    world.until(lambda: world.members == "0,1.1", limit_s, step_every_s=0.5)


def test_checkpoint_that_two_read_in_turn_is_tried_every_thirty_seconds(tmp_path: Path) -> None:
    """One is wanted and two are there: neither set was the one that had refused, and a generation came every five seconds."""
    job = make_job().with_replicas(2).elastic(1, 5).with_spec(checkpoint={"volumeClaim": "digits"})
    world = World(tmp_path, job, known_session=True, checkpoint_every=5)
    world.until(lambda: world.training() == "0-0,1-0")
    world.advance(10.0, 0.5)
    world.disk.hide(FOREVER)
    world.scale(1)
    for uid in list(world.agents):
        world.kill_process(uid)
    world.advance(90.0, 0.5)
    before = world.generation
    for _ in range(24):
        world.advance(5.0, 0.5)
        assert world.condition("Training")["reason"] == "CheckpointUnreadable"
    assert world.generation - before in range(4, 10)
    world.heal()
    world.until(lambda: world.training() != "", 31.0, step_every_s=0.5)


def test_planned_generation_that_never_forms_comes_to_an_end_where_no_other_can_take_its_place(tmp_path: Path) -> None:
    """Two are needed; one leaves, and of the other's processes one enters and one hangs. Nobody was late (walk 29214)."""
    world = World(tmp_path, fixed(2), processes=2, known_session=True)
    world.until(lambda: world.training() == "0-0,1-0")
    world.step(5)
    leaver, hangs = world.uid(1), world.agents[world.uid(0)].trainers[1]
    world.on_moment = lambda moment, _: moment == "heard" and world.generation == 2
    world.terminate(leaver)
    world.advance(20.0, 0.5)
    world.on_moment = None
    assert world.generation == 2
    hangs.stop()
    world.until(lambda: leaver not in world.agents, 40.0)
    world.until(
        lambda: world.training() == "0-0,1-1", 2 * SETTINGS.late_timeout_s + ONLY_HOLDER * SETTINGS.late_timeout_s
    )


def test_drain_of_the_only_worker_hands_its_state_over(tmp_path: Path) -> None:
    world = running(tmp_path, elastic(1))
    world.terminate(world.uid(0))
    world.advance(10, 0.5)
    assert world.training() == "0-1"
    assert max(step for _, step in world.ledger.committed) > 20
    assert "RolledBack" not in [note.reason for note in world.notes]


def test_member_that_calls_a_new_operator_late_is_in_the_generation_that_names_it(tmp_path: Path) -> None:
    """A joiner was ready before it called: the status named it, the document did not (seen in tests/api/test_stale_writes.py)."""
    world = running(tmp_path, elastic(2))
    world.kill_operator()
    world.scale(3)
    late = world.agents[world.uid(1)]
    late.next_call_s = world.now_s + 8.0
    world.start_operator()
    trains_within(world, 10.0, "0-0,1-0,2-0")
    assert (world.generation, world.members) == (2, "0-2")


def restore(world: World, backup: dict[str, Any]) -> None:
    """The API's storage comes from a backup, and another operator leads."""
    world.kill_operator()
    world.store.replace_status(backup)
    world.start_operator()


def test_restored_status_reuses_no_number(tmp_path: Path) -> None:
    """The API's storage comes from a backup: the status names an older generation than the agents have heard."""
    world = running(tmp_path, elastic(3))
    backup = world.store.read()["status"]
    for slot in (0, 1, 0):
        world.kill_process(world.uid(slot))
        world.advance(5, 0.5)
    assert world.generation > backup["membership"]["generation"]
    restore(world, backup)
    trains_within(world, 30.0, "0-0,1-0,2-0")


def test_agents_that_have_heard_of_more_than_a_restored_status_answer(tmp_path: Path) -> None:
    """Its pings were of an older generation and refused: everybody counted as unreachable, for ever (walk 18152)."""
    world = running(tmp_path, elastic(3))
    backup = world.store.read()["status"]
    world.kill_process(world.uid(0))
    world.advance(5, 0.5)
    world.agents[world.uid(1)].stop()
    world.kill_process(world.uid(0))
    world.settle()
    restore(world, backup)
    trains_within(world, SETTINGS.term_grace_s + 10.0, "0-0,2-0")


def test_joiner_in_a_generation_that_a_restored_status_does_not_know_joins(tmp_path: Path) -> None:
    """It waited in it for ever, alone; nobody else had heard of it (walk 17626)."""
    world = running(tmp_path, elastic(2))
    backup = world.store.read()["status"]
    world.on_moment = lambda moment, _: moment == "entered" and world.generation == 2
    world.scale(3)
    world.advance(10.0, 0.5)
    world.on_moment = None
    assert world.training() == "0-0,1-0"
    restore(world, backup)
    trains_within(world, 10.0, "0-0,1-0,2-0")


def test_long_steps_are_waited_for(tmp_path: Path) -> None:
    """Steps of 25 s: everybody is busy when one dies. The generation waits for them instead of leaving them out."""
    world = running(tmp_path, elastic(4))
    for _ in range(3):
        world.advance(25.0)
        world.step()
    trainers = [world.agents[world.uid(slot)].trainers[0] for slot in range(3)]
    for trainer in trainers:
        trainer.frozen = True
    world.kill_process(world.uid(3))
    world.advance(24.0)
    for trainer in trainers:
        trainer.frozen = False
        if trainer.group is not None and trainer.group.is_broken:
            trainer.group = None
        trainer.go_on()
    trains_within(world, 5.0, "0-0,1-0,2-0,3-0")
    assert world.generation <= 3  # one without the lost process, one with it


def test_slot_that_comes_back_after_a_scale_down_is_no_restart(tmp_path: Path) -> None:
    world = running(tmp_path, elastic(3))
    world.scale(2)
    world.advance(10, 0.5)
    world.scale(3)
    world.advance(10, 0.5)
    assert world.training() in ("0-0,1-0,2-0", "0-0,1-0,2-1")
    assert world.status["restarts"]["pods"] == 0
    world.vanish(world.uid(1))
    world.advance(10, 0.5)
    assert world.status["restarts"]["pods"] == 1


def test_restart_kills_what_has_not_entered_and_spares_the_rest(tmp_path: Path) -> None:
    """Of two processes one hangs: its sibling, which waits in the new group, keeps its process and its state."""
    world = running(tmp_path, fixed(2), processes=2)
    agent = world.agents[world.uid(1)]
    agent.trainers[1].frozen = True
    sibling = agent.trainers[0]
    world.kill_process(world.uid(0))
    trains_within(world, RESTART_S + MARGIN_S, "0-0,1-0")
    assert agent.trainers[0] is sibling
    assert [note for note in world.notes if note.reason == "WorkerRestarted"]


def test_worker_that_is_late_and_cannot_be_killed_is_replaced(tmp_path: Path) -> None:
    world = running(tmp_path, fixed(3))
    agent = world.agents[world.uid(1)]
    agent.trainers[0].frozen = True
    agent.exited = lambda *_args, **_given: None  # type: ignore[method-assign]
    world.kill_process(world.uid(0))
    trains_within(world, REPLACE_S + MARGIN_S, "0-0,1-1,2-0")
    assert world.status["restarts"]["pods"] == 1, "its agent is there, and was not asked to leave"


def test_restart_is_a_command_like_any_other(tmp_path: Path) -> None:
    """FENCE: of an older generation it is refused."""
    world = running(tmp_path, elastic(2))
    world.kill_process(world.uid(0))
    world.advance(5, 0.5)
    agent, pod = world.agents[world.uid(1)], world.pods.by_uid[world.uid(1)]
    old = wire.Command(pod.job_uid, pod.uid, agent.core._worker.saved.incarnation, 1, wire.Restart("late."))
    agent.handle(ev.Commanded(old))
    world.settle()
    assert agent.trainers[0].alive


def test_only_holder_that_hangs_while_the_job_grows_is_restarted_as_a_hang_is(tmp_path: Path) -> None:
    """The planned generation hides the hang from plan/failures/hangs.py. The joiner cannot train without the state; the
    holder is asked for it once, not again and again, and restarted after what `hangSeconds` allows to a worker alone with the
    state."""
    world = running(tmp_path, make_job().with_replicas(1).elastic(1, 5).with_recovery(hangSeconds=30))
    world.agents[world.uid(0)].trainers[0].stop()
    world.scale(2)
    world.advance(100.0, step_every_s=0.5)
    assert world.condition("Training")["reason"] == "NoWitness"
    trains_within(world, SETTINGS.planned_timeout_s + 90.0 + MARGIN_S, "0-0,1-0")
    assert world.generation <= 6
    assert [note.reason for note in world.notes].count("RolledBack") == 1


def test_process_that_hangs_in_adopting_is_noticed_although_its_sibling_has_adopted(tmp_path: Path) -> None:
    """DEADLINE. The agent's file names what one process has adopted: the generation counted as adopted, and nobody was late."""
    world = running(tmp_path, elastic(2), processes=2)
    hangs = world.agents[world.uid(1)].trainers[1]
    hangs.adopt = lambda *_: hangs.stop()  # type: ignore[method-assign]
    world.scale(3)
    world.advance(5.0, step_every_s=0.5)
    assert not world.status["membership"]["adopted"]
    world.until(
        lambda: bool(world.training()), SETTINGS.adopt_timeout_s + 3 * SETTINGS.form_timeout_s, step_every_s=0.5
    )


def test_evaluation_that_nobody_declared_and_a_lost_pod_cost_no_committed_step(tmp_path: Path) -> None:
    """DEADLINE. All holders come late together: they were restarted together, and training began anew at step 0."""
    world = running(tmp_path, elastic(4))
    busy = [world.agents[world.uid(slot)].trainers[0] for slot in (0, 1, 2)]
    for trainer in busy:
        trainer.frozen = True
    world.vanish(world.uid(3))
    world.advance(SETTINGS.late_timeout_s + 40.0)
    for trainer in busy:
        trainer.frozen = False
        trainer.go_on()
    world.until(lambda: bool(world.training()), MARGIN_S, step_every_s=0.5)
    assert world.ledger.rolled_back == 0


def test_script_that_ends_well_without_training_fails_its_job(tmp_path: Path) -> None:
    """It ends with exit code 0 before its session: it was started again for ever, and the job said Starting."""
    world = World(tmp_path, make_job().with_replicas(2).elastic(1, 5), known_session=True)
    world.slow_start_s = 1e9
    world.settle()

    def ends() -> None:
        for slot in (0, 1):
            trainer = world.agents[world.uid(slot)].trainers[0]
            trainer.agent.exited(trainer, 0)
        world.after(2.0, ends)

    world.after(2.0, ends)
    world.until(lambda: world.has_ended, 60.0)
    failed = world.condition("Failed")
    assert failed["reason"] == "RepeatedCrash"
    assert "exit code 0 before its last step was committed" in failed["message"]


def test_pods_of_a_slot_whose_starts_hang_do_not_pile_up(tmp_path: Path) -> None:
    """A volume that imports need hangs everywhere: every two minutes the slot had one pod more, and none was ever released."""
    world = World(tmp_path, fixed(2), known_session=True, pace=Pace(start_s=(5.0, 5.0)))
    world.until(lambda: world.training() == "0-0,1-0")
    world.step(5)
    world.slow_start_s = 1e9
    world.kill_process(world.uid(1))
    world.advance(400.0)
    assert len([name for name in world.names() if name.startswith("1-")]) <= 2, world.names()
    assert "1-0" in world.names()


def test_start_that_hangs_is_measured_by_the_starts_of_pods_that_are_gone(tmp_path: Path) -> None:
    """What a job's only pod had told of starts went with it: its successor had twenty minutes (walk 10574)."""
    world = World(tmp_path, fixed(1), known_session=True, pace=Pace(start_s=(5.0, 5.0)))
    world.until(lambda: world.training() == "0-0")
    world.step(5)
    world.slow_start_s = 1e9
    world.vanish(world.uid(0))
    world.until(lambda: bool(world.names()) and world.names() != ["0-0"])
    world.advance(10.0)
    world.slow_start_s = 0.0
    world.until(lambda: world.training() == "0-1", 2 * SETTINGS.late_timeout_s + MARGIN_S)


def test_start_that_hangs_is_measured_by_the_starts_that_another_operator_saw(tmp_path: Path) -> None:
    """Every process dies, the operator with them, and the next ones hang at their start (walk 12668)."""
    world = World(tmp_path, fixed(1), known_session=True, pace=Pace(start_s=(5.0, 5.0)))
    world.until(lambda: world.training() == "0-0")
    world.step(5)
    world.slow_start_s = 1e9
    world.kill_process(world.uid(0))
    world.settle()
    world.kill_operator()
    world.start_operator()
    world.advance(10.0)
    world.slow_start_s = 0.0
    world.until(lambda: world.training() == "0-0", SETTINGS.late_timeout_s + MARGIN_S)


def test_start_that_takes_longer_than_its_bound_comes_to_an_end_in_the_end(tmp_path: Path) -> None:
    world = World(tmp_path, elastic(2), known_session=True)
    world.slow_start_s = SETTINGS.start_timeout_s + 100.0
    world.until(lambda: bool(world.training()), 4 * SETTINGS.start_timeout_s, step_every_s=5.0)


@pytest.mark.parametrize("explained", [False, True], ids=["nothing explains it", "their containers have ended"])
def test_operator_that_cannot_reach_most_agents_replaces_nobody_at_first(explained: bool) -> None:
    """Its own network is the likelier cause. Those who can be reached go on without the others."""
    world = World(None, make_job().with_replicas(30).elastic(1, 30))
    assert world.operator is not None
    world.operator.registry._should_call = lambda _: not explained
    world.until(lambda: len(world.training().split(",")) == 30, step_every_s=0.5)
    for slot in range(25):
        world.cut_off(world.uid(slot))
    world.kill_process(world.uid(29))
    world.advance(60.0, 0.5)
    assert len(world.training().split(",")) == (30 if explained else 5)
    assert len(world.pods.deleted) == (25 if explained else 0)

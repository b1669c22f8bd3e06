"""Every wait of the plan without a time (model/waits.py) is brought about, read by a user, and ended by its event.

The type of `Wait.until` and `Keep.until` lets nobody add one without naming that event; here each of them is real.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from regroup.protocol import wire
from regroup.protocol.state import StatePair
from regroup_operator.model.waits import UntilEvent
from regroup_operator.model.worker import Current, Decision, Keep, Situation, Wait
from regroup_operator.plan.generation import generation
from regroup_operator.plan.generation.decision import next_generation
from tests.builders.plan import JobBuilder, make_job
from tests.simulator.bound import NAMED
from tests.simulator.world import World

SOON_S = 60.0
FIXED = make_job().with_replicas(2).fixed()
ROOT = Path(__file__).parents[3]

End = Callable[[], None]


def run_pod(world: World, slot: int, attempt: int = 0) -> None:
    world.pods.pending.clear()
    world.run_pod(world.uid(slot, attempt))


def first_workers(world: World) -> End:
    """The second of two pods does not get a node."""
    world.pods.pending.add(1)
    world.start_operator()
    return lambda: run_pod(world, 1)


def more_workers(world: World) -> End:
    """A pod is lost, and there is no node for another one."""
    trains(world)
    world.pods.pending.add(1)
    world.vanish(world.uid(1))
    return lambda: run_pod(world, 1, 1)


def holder(world: World) -> End:
    """The only worker with the newest state cannot be reached; another one is ready."""
    trains(world, slots=1)
    world.scale(2)
    world.pods.pending.add(1)
    world.advance(1.0)
    gone = world.uid(0)
    world.power_off(gone)
    world.cut_off(gone)
    run_pod(world, 1)
    return lambda: world.vanish(gone)


def replacement(world: World) -> End:
    """A pod leaves, the job cannot do without it, and there is no node for another one."""
    trains(world)
    world.pods.pending.add(1)
    world.terminate(world.uid(1))
    return lambda: run_pod(world, 1, 1)


def last_steps(world: World) -> End:
    """A rank has committed the last step and the other takes its time."""
    trains(world)
    group = next(group for group in world.groups.values() if group.trains)
    world.total_steps = group.step = group.step + 1
    last = StatePair(group.number, group.step)
    group.ranks[1].committed(group, last)

    def end() -> None:
        group.ranks[0].committed(group, last)
        world.ledger.group_committed((last.generation, last.step))

    return end


def adopted_report(world: World) -> End:
    """What says that a generation is adopted is lost; all that follows it arrives."""
    registry = world.start_operator().registry
    take = registry.report
    lost = mock.patch.object(
        registry, "report", lambda pod, report: isinstance(report.body, wire.Adopted) or take(pod, report)
    )
    lost.start()
    world.until(lambda: world.training() != "")

    def end() -> None:
        lost.stop()
        world.agents[world.uid(0)].disconnect()  # and repeats it with its next hello (rule RESAY)

    return end


def change(world: World) -> End:
    """Everybody who is wanted trains."""
    trains(world)
    return lambda: world.kill_process(world.uid(1))


def trains(world: World, slots: int = 2) -> None:
    if slots == 1:
        world.scale(1)
    world.start_operator()
    world.until(lambda: world.training().count(",") + 1 == slots and world.training() != "")
    world.step(3)


@dataclass(frozen=True)
class Case:
    bring_about: Callable[[World], End]
    job: JobBuilder = FIXED
    given: Mapping[str, Any] = field(default_factory=dict)
    lasts_s: float = 400.0


CASES = {
    UntilEvent.FIRST_WORKERS: Case(first_workers),
    UntilEvent.MORE_WORKERS: Case(more_workers),
    UntilEvent.HOLDER: Case(holder, make_job().with_replicas(2).elastic(1, 5)),
    UntilEvent.REPLACEMENT: Case(replacement, lasts_s=10.0),  # a pod on its way out ends by itself
    UntilEvent.LAST_STEPS: Case(last_steps, lasts_s=2.0),  # a step that takes longer is overdue
    UntilEvent.ADOPTED_REPORT: Case(adopted_report, lasts_s=100.0),  # each second is a step
    UntilEvent.CHANGE: Case(change, lasts_s=100.0),
}


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> list[Decision]:
    """What was decided about membership, in order."""
    seen: list[Decision] = []

    def decide(current: Current | None, known: Situation) -> Decision:
        seen.append(next_generation(current, known))
        return seen[-1]

    monkeypatch.setattr(generation, "next_generation", decide)
    return seen


@pytest.mark.parametrize("event", UntilEvent)
def test_wait_without_a_time_lasts_is_read_and_ends_with_its_event(
    tmp_path: Path, decisions: list[Decision], event: UntilEvent
) -> None:
    case = CASES[event]
    world = World(tmp_path, case.job, start=False, **{"known_session": True, **case.given})
    end = case.bring_about(world)
    world.advance(case.lasts_s, step_every_s=1.0)
    wait = decisions[-1]
    assert isinstance(wait, Wait | Keep)
    assert wait.until == event
    lasting = event.value
    assert (wait.reason if isinstance(wait, Wait) else "") == lasting.reason
    kind, status, reason = lasting.reads
    assert (world.condition(kind)["status"], world.condition(kind)["reason"]) == (status, reason)
    end()
    if event == UntilEvent.LAST_STEPS:
        world.advance(2.0)
        assert world.phase == "Succeeded"
        return
    world.advance(SOON_S, step_every_s=1.0)
    assert decisions[-1] == Keep(UntilEvent.CHANGE)
    assert world.training() != ""
    assert world.now_s - world.ledger.last_commit_s < 2.0


def test_protocol_has_the_same_table() -> None:
    text = (ROOT / "docs/design/protocol.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    begins = rows.index(["until", "lacks", "ends when", "read as"])
    table = [tuple(row) for row in rows[begins + 2 : begins + 2 + len(UntilEvent)]]
    waits = [(event.name, event.value) for event in UntilEvent]
    assert table == [(name, w.lacks, w.ended_by, f"{w.reads[0]}={w.reads[1]}, {w.reads[2]}") for name, w in waits]


def test_job_with_enough_agents_stands_still_for_a_holder_or_a_checkpoint_only() -> None:
    """What the simulator lets a job wait for beside capacity and quota."""
    holders = {event.value.reason for event in UntilEvent if event.value.lacks == "a holder that cannot be reached"}
    assert set(NAMED) == holders | {"CheckpointUnreadable"}

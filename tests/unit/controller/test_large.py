"""What a plan costs grows with the workers, not with their square: one job may have thousands.

Counted are the interpreter's instructions of each plan, which are the same on every machine, over the life of a job in the
simulator: it starts, grows, loses processes, hands over, shrinks and ends. UIDs compare in the interpreter here, so that a search
in a list of them counts, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import pytest

from regroup.protocol.document import PLANNED
from regroup.protocol.state import Phase
from regroup_operator import controller
from regroup_operator.model.plan import JobPlan
from regroup_operator.model.worker import Standing
from regroup_operator.plan.facts.facts import Inputs
from regroup_operator.plan.generation.target import overtaking
from regroup_operator.plan.job import plan_job
from tests.builders.plan import (
    make_bounds,
    make_current,
    make_job,
    make_older,
    make_pod,
    make_session,
    make_worker,
    uid_of,
)
from tests.simulator import cluster
from tests.simulator import world as simulator
from tests.simulator.world import World

FEW, MANY = 60, 240
GROWTH = 1.3
"""A plan of four times as many workers costs at most so many times four. Quadratic work would cost four times that."""
STEP_S = 0.5
R = TypeVar("R")


class Uid(str):
    """A UID that is compared in the interpreter, where that is counted."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str.__eq__(self, other)

    __hash__ = str.__hash__


@dataclass
class Cost:
    """Instructions of the dearest plan since it was last asked for."""

    dearest: int = 0
    stages: dict[str, int] = field(default_factory=dict)

    def stage(self, name: str) -> None:
        """Note what the plans of a stage of the job's life have cost."""
        self.stages[name], self.dearest = self.dearest, 0


def counting(call: Callable[[], R]) -> tuple[R, int]:
    """Return what a call returns, and the instructions that it took."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = call()
    finally:
        sys.settrace(before)
    return result, count


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cost]:
    cost = Cost()

    def plan(inputs: Inputs) -> JobPlan:
        planned, count = counting(lambda: plan_job(inputs))
        cost.dearest = max(cost.dearest, count)
        return planned

    with monkeypatch.context() as patch:
        patch.setattr(controller, "plan_job", plan)
        patch.setattr(cluster.Pods, "uid_type", Uid)
        patch.setattr(simulator, "MAX_TURNS", 100_000)
        yield cost


def trains(world: World) -> int:
    return len(world.training().split(",")) if world.training() else 0


def life(workers: int, cost: Cost) -> None:
    """Take a job through what can happen to it; half of what is named below happens to half of its workers."""
    half = workers // 2
    world = World(None, make_job().with_replicas(half).elastic(1, workers).with_recovery(maxRestarts=1000), num_nodes=4)
    world.until(lambda: trains(world) > 0, step_every_s=STEP_S)
    cost.stage("starts")
    world.scale(workers)
    world.until(lambda: trains(world) == workers, step_every_s=STEP_S)
    cost.stage("grows")
    for slot in range(0, workers, 2):
        world.kill_process(world.uid(slot))
    world.until(lambda: trains(world) == workers, step_every_s=STEP_S)
    cost.stage("loses processes")
    for slot in range(1, workers, 2):
        world.terminate(world.uid(slot))
    world.until(lambda: world.generation > 3 and trains(world) == workers, step_every_s=STEP_S)
    cost.stage("hands over")
    for slot in range(half, workers):
        uid = next(uid for uid, pod in world.pods.by_uid.items() if pod.slot == slot)
        world.lose_power(world.agents[uid])
    world.advance(10.0, STEP_S)
    cost.stage("loses machines")
    world.scale(half)
    world.until(lambda: trains(world) == half, step_every_s=STEP_S)
    cost.stage("shrinks")
    world.total_steps = world.ledger.committed[-1][1] + 5
    world.until(lambda: world.has_ended, step_every_s=STEP_S)
    cost.stage("ends")


def test_plan_costs_as_much_more_as_there_are_more_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = {}
    for workers in (FEW, MANY):
        with counted(monkeypatch) as cost:
            life(workers, cost)
        stages[workers] = cost.stages
    print(stages)
    growth = {name: round(stages[MANY][name] / stages[FEW][name] / (MANY / FEW), 2) for name in stages[FEW]}
    assert max(growth.values()) <= GROWTH, growth


def test_newer_generation_that_takes_the_place_of_a_planned_one_costs_as_much_more() -> None:
    """In the simulator a generation forms at once, so that this is not reached there: half of the workers trains, the other half
    has arrived, and one of those leaves."""
    counts = {}
    for workers in (FEW, MANY):
        half = workers // 2
        pods = [make_pod(slot, uid=Uid(uid_of(slot)), terminating=slot == workers - 1) for slot in range(workers)]
        members = tuple(
            make_worker(s, Standing.PENDING, pod=pods[s], session=make_session(s, Phase.TRAINING, 1))
            if s < half
            else make_worker(s, Standing.FORMING, pod=pods[s], session=make_session(s, Phase.ARRIVED, 2))
            for s in range(workers)
        )
        older = make_older(1, *(pods[slot].uid for slot in range(half)))
        current = make_current(range(workers), number=2, kind=PLANNED, adopted=False, older=(older,))
        got, counts[workers] = counting(partial(overtaking, current, members, make_bounds(workers, 1), 100.0))
        assert got is not None
        assert len(got.members) == workers - 1
    assert counts[MANY] / counts[FEW] / (MANY / FEW) <= GROWTH, counts

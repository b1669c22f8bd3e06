"""What ranks do with the state that a generation continues from, where it lies in memory snapshots. The wire is a list."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regroup.data import SamplePlan
from regroup.generation.adopter import Adopter
from regroup.generation.adoption import Arrival
from regroup.generation.groups import Gathering
from regroup.protocol import env
from regroup.protocol.document import Document, Member, OlderGeneration, Store
from regroup.protocol.local import AdoptedLocally
from regroup.protocol.state import StatePair
from regroup.state.durable import Durable
from regroup.state.memory import Memory
from regroup.state.training import TrainingState

HELD = StatePair(1, 9)
LIVE, BACKUP, LAST = "live", "backup", "last"


def nothing(*_: object) -> None:
    pass


class Rank:
    """One process of one worker that arrives with the weight `value`: live, or in its worker's memory snapshot."""

    def __init__(self, number: int, holds: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.value, directory = number + 1.0, directory / str(number)
        directory.mkdir()
        monkeypatch.setenv(env.SNAPSHOT_DIR, str(directory))
        monkeypatch.setenv(env.JOB_UID, "job")
        self.model = torch.nn.Linear(2, 1)
        self.state, memory = self._process()
        if holds != LIVE:
            memory.take() if holds == BACKUP else memory.take_last()
            memory.settle()
            self.model.weight.data.zero_()
            self.state, memory = self._process(is_fresh=True)
        plan = SamplePlan(0, 100, 10, 5, 1)
        self.number = number
        self.adopter = Adopter(self.state, plan, torch.device("cpu"), Durable(self.state, plan), memory)

    def _process(self, *, is_fresh: bool = False) -> tuple[TrainingState, Memory]:
        state = TrainingState(self.model, torch.optim.SGD(self.model.parameters(), lr=0.1), {})
        memory = Memory(state, SamplePlan(0, 100, 10, 5, 1), nothing, 0)
        if not is_fresh:
            self.model.weight.data.fill_(self.value)
            state.named(HELD, HELD.generation)
        memory.committed()
        return state, memory

    def arrival(self) -> Arrival:
        return Arrival.from_json(self.adopter.arrival(HELD.generation, None, False, None).to_json())

    def adopt(self, gathering: Gathering) -> AdoptedLocally:
        size = len(gathering.arrivals)
        number, cpu = gathering.document.number, torch.device("cpu")
        groups: Any = SimpleNamespace(rank=self.number, world_size=size, generation=number, device=cpu)
        return self.adopter.adopt(groups, gathering, 0.0, None)


@pytest.mark.parametrize(
    ("holds", "source", "values"),
    [
        pytest.param((LIVE, LIVE), 0, (1.0, 2.0), id="two that live keep what they hold"),
        pytest.param((LAST, LAST), 0, (1.0, 1.0), id="snapshots of one name may differ: one is read, the other rank receives"),
        pytest.param((LIVE, LAST), 0, (1.0, 1.0), id="who lives is the source of who would have to read"),
        pytest.param((LAST, LIVE), 1, (2.0, 2.0), id="whatever their ranks are"),
        pytest.param((BACKUP, BACKUP), 0, (1.0, 1.0), id="backups, where nobody lives"),
    ],
)  # fmt: skip
def test_all_hold_a_state_of_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wire: list[torch.Tensor], holds: tuple[str, str], source: int,
    values: tuple[float, float],
) -> None:  # fmt: skip
    ranks = [Rank(number, one, tmp_path, monkeypatch) for number, one in enumerate(holds)]
    arrivals = tuple(rank.arrival() for rank in ranks)
    assert [(a.state, a.state_adopted, a.from_snapshot, a.is_backup) for a in arrivals] == [
        (HELD, HELD.generation, one != LIVE, one == BACKUP) for one in holds
    ]
    members = tuple(Member(i, uid, uid, 1, "127.0.0.1", 1) for i, uid in enumerate("ab"))
    # With backups nobody is a witness of generation 1, and the set is all that is left of it.
    older = (OlderGeneration(1, "u1", ("a", "b")),)
    document = Document(2, "u2", "job", "forced", members, Store("127.0.0.1", 1, "a"), older=older)
    in_order = sorted(ranks, key=lambda rank: rank.number != source)
    said = {rank.number: rank.adopt(Gathering(document, arrivals)) for rank in in_order}
    assert wire == []
    assert tuple(sorted(set(rank.model.weight.flatten().tolist())) for rank in ranks) == tuple(
        [value] for value in values
    )
    own = [number == source or holds == (LIVE, LIVE) for number in (0, 1)]
    assert [said[number].source for number in (0, 1)] == ["self" if one else "ab"[source] for one in own]
    assert {one.state for one in said.values()} == {HELD}
    assert [(rank.state.pair, rank.state.adopted) for rank in ranks] == [(HELD, 2)] * 2


def test_process_with_a_state_of_its_own_does_not_offer_its_workers_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(0, LAST, tmp_path, monkeypatch)
    assert rank.arrival().from_snapshot
    rank.state.named(StatePair(1, 12), 1)
    assert rank.arrival() == Arrival(StatePair(1, 12), 1, 1, strides=rank.state.strides())

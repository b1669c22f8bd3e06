"""A random walk of kills, growth, shrinking and changes of mind, with a fixed seed: the group always comes back, as one state.

What each single rule prevents is in test_traces.py. This found what nobody had thought of: a rank in a hundred that waited
for ever for a send which gloo had forgotten as its connection closed.
"""

import random
from pathlib import Path

import pytest

from harness.processes import alive
from regroup.protocol import local
from regroup.protocol.document import FORCED, PLANNED
from tests.long import LONG
from tests.trainer.agent_double import AgentDouble
from tests.trainer.elastic_kit import assert_one_state, finish, run_alone
from tests.trainer.zygote import Zygote

MOVES = 30 if LONG else 8
STEPS = 40 * MOVES
"""At 0.1 s a step more than the moves take; who is slow ends a little before the last move."""


class Walk:
    """One walk: the moves, and what an operator would put into the document after each."""

    def __init__(self, job: AgentDouble, seed: int) -> None:
        self.job = job
        self.random = random.Random(seed)

    def living(self) -> list[int]:
        return sorted(slot for slot, worker in self.job.workers.items() if alive(worker.pid))

    def announce(self, slots: list[int], kind: str = FORCED) -> None:
        workers = {worker.pod_uid: worker for worker in self.job.everyone}
        adopted = [
            document.number
            for document in self.job.documents
            if all(workers[m.pod_uid].messages(local.AdoptedLocally, document.number) for m in document.members)
        ]
        current = list(self.job.workers.values())
        lost = [w.pod_uid for w in self.job.everyone if w not in current or not alive(w.pid)]
        older = range(max(adopted), self.job.documents[-1].number + 1)
        self.job.announce(slots, kind, older=older, lost=lost, hosts=self.random.choice(slots))

    def kill_one(self) -> None:
        slot = self.random.choice(self.living())
        self.job.kill(slot)
        self.job.wait_exit(slot)

    def move(self) -> None:
        """Do one thing, sometimes two or three before the group has settled."""
        kind = self.random.choice([PLANNED, FORCED])
        choice = self.random.random()
        if choice < 0.4 and len(self.living()) > 1:
            self.kill_one()
            self.announce(self.living())
            if self.random.random() < 0.4:
                self.announce(self.living())  # while the group forms
            if self.random.random() < 0.4 and len(self.living()) > 1:
                self.kill_one()
                self.announce(self.living())
        elif choice < 0.7 and len(self.living()) < 4:
            slot = next(s for s in range(5) if s not in self.living())
            self.job.start(slot)
            self.job.wait_attached(slot)
            self.announce(self.living(), kind)
        elif choice < 0.85:
            living = self.living()
            self.announce(sorted(self.random.sample(living, self.random.randrange(1, len(living) + 1))), kind)
        else:
            self.announce(self.living(), kind)

    def settle(self) -> None:
        """Wait until the newest generation commits. One that lacks the holder of the newest state refuses: then all are asked."""
        document = self.job.documents[-1]
        slots = [member.slot for member in document.members]

        def settled() -> bool:
            workers = [self.job.workers[slot] for slot in slots]
            reached = all(w.messages(local.Committed, document.number) for w in workers)
            return reached or self.refused(slots)

        self.job.wait(settled, f"a step of generation {document.number} on slots {slots}")
        if self.refused(slots):
            self.announce(self.living())
            self.settle()

    def step(self) -> int:
        """Return the newest step that anybody has committed."""
        newest: int = max(m.step for worker in self.job.everyone for m in worker.messages(local.Committed))
        return newest

    def refused(self, slots: list[int]) -> bool:
        number = self.job.documents[-1].number
        left = [m for slot in slots for m in self.job.workers[slot].messages(local.Left)]
        return any(m.cause == "witness" and m.left_up_to == number for m in left)


@pytest.mark.parametrize(
    ("seed", "environment"),
    [(1, {"TEST_EVAL": "1", "TEST_BEFORE": "1"}), (2, {"TEST_REDUCTION": "exact"})],
    ids=["fast, with blocks before the loop and in it", "exact"],
)
def test_group_comes_back_as_one_state_from_any_sequence(
    tmp_path: Path, zygote: Zygote, seed: int, environment: dict[str, str]
) -> None:
    script = Path(__file__).parent / "small_job.py"
    job = AgentDouble(tmp_path, zygote, script, {"TEST_STEPS": str(STEPS), "TEST_PACE": "0.1", **environment})
    try:
        walk = Walk(job, seed)
        for slot in range(3):
            job.start(slot)
        job.wait_attached(0, 1, 2)
        job.announce(range(3))
        walk.settle()
        for _ in range(MOVES):
            if walk.step() > STEPS - 40:
                break
            walk.move()
            walk.settle()
        walk.announce(walk.living())
        ends = finish(job, walk.living())
        if environment.get("TEST_REDUCTION") == "exact":
            ends.append(run_alone(job, TEST_STEPS=str(STEPS), **environment))
    finally:
        job.close()
    assert len(job.documents) >= 5  # `same_model` of assert_one_state: the user's object, after all of these
    assert_one_state(ends)
    losses: dict[tuple[int, int], set[float]] = {}
    for message in (m for worker in job.everyone for m in worker.messages(local.Committed)):
        assert message.steps_redone <= 1
        if message.loss is not None:
            losses.setdefault((message.generation, message.step), set()).add(message.loss)
    assert all(len(values) == 1 for values in losses.values())  # one step is one thing on all of a generation's ranks

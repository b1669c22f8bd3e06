"""A process that enters and leaves generations with GPUs: which communicator ends how, and which GPUs are refused.

The backend is a fake that behaves as the real one was seen to (`fake_nccl`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from regroup import accelerator, cannot_run
from regroup.data import SamplePlan
from regroup.errors import PeerLost, UsageError
from regroup.generation import backends, regrouper
from regroup.generation.adoption import Arrival
from regroup.generation.groups import Gathering, Groups
from regroup.generation.regrouper import Regrouper
from regroup.layout import Layout
from regroup.protocol.document import Document
from regroup.protocol.local import FormedLocally, Left
from regroup.protocol.state import StatePair
from tests.builders.generations import make_assignment, make_document

from .fake_nccl import FakeNccl
from .nccl_kit import SOON_S, Watcher, make_groups, make_regrouper


def handed_over(document: Document) -> Document:
    """Return the generation in which the second worker takes the first one's slot."""
    first, second = document.members
    return replace(document, members=(first, replace(second, slot=first.slot)))


@pytest.mark.parametrize(
    ("leaves", "how"),
    [
        pytest.param(Regrouper.leave_at_cut, ("regroup-end", ""), id="a planned change: in order"),
        pytest.param(Regrouper.leave, ("", "regroup-abort"), id="a forced one: at once"),
    ],
)
def test_which_changes_end_a_communicator_in_order(leaves: Callable[[Regrouper], None], how: tuple[str, str]) -> None:
    fake, watcher = FakeNccl(), Watcher()
    joined = make_regrouper(watcher)
    joined.groups = make_groups(fake)
    leaves(joined)
    # Before the next generation is heard of: a rank that leaves the job ends it as well.
    backends.wait_ended(timeout_s=SOON_S)
    assert (fake.shut_down_in, fake.aborted_in) == how
    joined.close()
    backends.wait_ended(timeout_s=SOON_S)
    assert (fake.shut_down_in, fake.aborted_in) == how


def test_connecting_has_the_time_of_an_adoption(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator gives a generation that has formed longer than one that forms: NCCL's setup of many ranks takes longer."""
    watcher = Watcher()
    told_before: list[type[Any]] = []

    class Formed(Groups):
        def form(self, *_: Any) -> Any:
            return Gathering(make_document(7000), ())

        def connect(self) -> None:
            told_before.extend(type(message) for message in watcher.sent)
            raise PeerLost("not connected", 1)

    monkeypatch.setattr(regrouper, "Groups", Formed)
    joined = make_regrouper(watcher)
    joined._enter(make_assignment(make_document(7000), 1))
    assert told_before == [FormedLocally]
    assert isinstance(watcher.sent[-1], Left)
    assert watcher.sent[-1].peer_rank == 1


HELD, GPUS = StatePair(1, 5), ("machine/GPU-1", "machine/GPU-1", "machine/GPU-2")


class Entered(NamedTuple):
    """`raised`: by the rank, and "" for nothing; the others are what its agent is told."""

    raised: str
    cannot_run: list[str]
    left: list[Left]


def enter(monkeypatch: pytest.MonkeyPatch, document: Document, states: Sequence[StatePair | None]) -> Entered:
    """Rank 1 enters a generation in which rank 0 computes on its GPU. `states`: what each rank holds."""
    entered = Entered("", [], [])
    watcher = Watcher()
    watcher.sent = entered.left

    class Formed(Groups):
        def form(self, arrival: Arrival, *_: Any) -> Any:
            assert arrival.gpu == GPUS[1]
            return Gathering(document, tuple(replace(arrival, state=s, gpu=gpu) for s, gpu in zip(states, GPUS)))

        def connect(self) -> None:
            raise AssertionError("NCCL hangs here, or fails")

    monkeypatch.setattr(regrouper, "Groups", Formed)
    monkeypatch.setattr(accelerator, "identity", lambda _: GPUS[1])
    monkeypatch.setattr(cannot_run, "_tell_agent", entered.cannot_run.append)
    try:
        make_regrouper(watcher)._enter(make_assignment(document, 1))
    except UsageError as error:
        return entered._replace(raised=str(error))
    return entered


@pytest.mark.parametrize("where", ["in the process", "in its worker's memory", "in parts"])
def test_rank_says_which_gpu_it_computes_on_wherever_its_state_is(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(accelerator, "identity", lambda _: GPUS[0])
    adopter, snapshot = make_regrouper(Watcher())._adopter, SimpleNamespace(state=HELD, adopted=1, is_last=False)
    newest = snapshot if where == "in its worker's memory" else None
    adopter._memory = SimpleNamespace(newest=newest, last=None, held=())  # type: ignore[assignment]
    if where == "in parts":
        adopter._plan = SamplePlan(0, 96, 12, 2, 4, layout=Layout((("shard", 2),)))
    keeper: Any = SimpleNamespace(kept=tuple)
    arrival = adopter.arrival(0, None, False, keeper)
    assert (arrival.gpu, arrival.from_snapshot) == (GPUS[0], newest is not None)


TWO = make_document(7000)


@pytest.mark.parametrize(
    ("document", "states", "cause", "words"),
    [
        pytest.param(
            TWO, (None, None), "CannotRun", "Rank 0 in worker 0 (pod w-0) and rank 1 in worker 1 (pod w-1)", id="two workers"
        ),
        pytest.param(
            make_document(7000, processes=[2], hosts=["127.0.0.1"]), (None, None), "CannotRun",
            "Rank 0 and rank 1, both in worker 0 (pod w-0), compute on the same GPU (GPU-1), and NCCL needs one for each process.",
            id="two processes of a worker",
        ),
        pytest.param(TWO, (HELD, HELD), "CannotRun", "Rank 0 in worker 0", id="each has trained: nobody is new"),
        pytest.param(
            handed_over(TWO), (None, None), "collective", "Rank 0 in worker 0 (pod w-0) and rank 1 in worker 0", id="a hand-over"
        ),
        pytest.param(handed_over(TWO), (HELD, None), "collective", "Rank 0 in worker 0", id="a hand-over while all train"),
    ],
)  # fmt: skip
def test_ranks_on_one_gpu_are_refused_before_their_gpus_connect(
    monkeypatch: pytest.MonkeyPatch, document: Document, states: Sequence[StatePair | None], cause: str, words: str
) -> None:
    """NCCL 2.28 was seen to fail each rank in each generation, for ever. A worker that takes over has its predecessor's GPU for a
    moment only."""
    entered = enter(monkeypatch, document, states)
    if cause == "CannotRun":
        assert entered.raised.startswith(words)
        assert (entered.cannot_run, entered.left) == ([entered.raised], [])
    else:
        assert (entered.raised, entered.cannot_run, [left.cause for left in entered.left]) == ("", [], [cause])
        assert entered.left[0].message.startswith(words)


@pytest.mark.parametrize(
    ("states", "fails", "peer_rank"),
    [
        pytest.param((HELD, None), True, None, id="the new one"),
        pytest.param((None, HELD), False, 0, id="one that trains"),
        pytest.param((None, None, HELD), True, None, id="one of two new ones, beside one that trains"),
    ],
)
def test_rank_that_joins_on_a_gpu_that_is_taken_fails_alone(
    monkeypatch: pytest.MonkeyPatch, states: Sequence[StatePair | None], fails: bool, peer_rank: int | None
) -> None:
    """The others train without it, as they did before."""
    entered = enter(monkeypatch, make_document(7000, len(states)), states)
    assert ("compute on the same GPU" in entered.raised) == fails
    assert entered.cannot_run == [], "the job goes on"
    assert [(left.cause, left.peer_rank) for left in entered.left] == ([] if fails else [("collective", peer_rank)])

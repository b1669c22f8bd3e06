"""When a script may grow that waits for its next checkpoint. Ids are sentences."""

from __future__ import annotations

from typing import Any

import pytest

from regroup.protocol.state import Phase
from regroup_operator.api.spec import ElasticPolicy
from regroup_operator.model.records import Settings
from regroup_operator.model.worker import Announce, Keep, Situation, Standing, Worker
from regroup_operator.plan.facts.saved import GROW_WITHIN_S, newest_save_s, save_words, waits_for_save
from regroup_operator.plan.generation.decision import next_generation
from tests.builders.plan import make_bounds, make_current, make_pod, make_session, make_worker

NOW_S = 100.0


def member(slot: int, saved_at_s: float | None = None) -> Worker:
    return make_worker(slot, session=make_session(slot, Phase.STARTING, 1, session=False, saved_at_s=saved_at_s))


def policy(grow_at: Any = "Checkpoint") -> ElasticPolicy:
    return ElasticPolicy(min_replicas=1, max_replicas=8, grow_at=grow_at)


@pytest.mark.parametrize(
    ("saved", "want"),
    [
        pytest.param([None, None], True, id="none has been seen"),
        pytest.param([NOW_S, None], False, id="one has just been completed"),
        pytest.param([None, NOW_S - GROW_WITHIN_S], False, id="the second member's agent has seen it"),
        pytest.param([NOW_S - GROW_WITHIN_S - 0.1, None], True, id="it is too old"),
        pytest.param([20.0, NOW_S - 1], False, id="the newest counts"),
    ],
)
def test_growth_waits_for_a_checkpoint(saved: list[float | None], want: bool) -> None:
    members = [member(slot, at_s) for slot, at_s in enumerate(saved)]
    assert waits_for_save(policy(), "Script", members, NOW_S) is want


@pytest.mark.parametrize(
    ("saved", "want"),
    [
        pytest.param([60.0, NOW_S], True, id="the second node shows an old checkpoint late"),
        pytest.param([None, NOW_S], False, id="the first has seen none"),
        pytest.param([40.0, NOW_S], False, id="the first has seen none in this generation"),
        pytest.param([NOW_S, 60.0], False, id="the first has just seen one"),
    ],
)
def test_first_member_is_believed(saved: list[float | None], want: bool) -> None:
    members = [member(slot, at_s) for slot, at_s in enumerate(saved)]
    assert waits_for_save(policy(), "Script", members, NOW_S, since_s=50.0) is want


@pytest.mark.parametrize(
    ("given", "tier"),
    [
        pytest.param(policy("Now"), "Script", id="it is not asked for"),
        pytest.param(policy(), "Session", id="a session loses nothing"),
        pytest.param(policy(), None, id="the tier is not known yet"),
        pytest.param(None, "Script", id="a job of fixed size"),
    ],
)
def test_growth_waits_for_nothing(given: ElasticPolicy | None, tier: str | None) -> None:
    assert not waits_for_save(given, tier, [member(0)], NOW_S)


def test_a_worker_that_has_not_called_has_seen_nothing() -> None:
    assert newest_save_s([make_worker(0, session=None), member(1, 7.0)]) == 7.0
    assert newest_save_s([make_worker(0, session=None)]) is None


def decides(*workers: Worker, replicas: int = 3) -> Any:
    """Return the members of the next generation while growth is held, None: the newest one stays."""
    current = make_current([w.id.slot for w in workers if w.is_member])
    bounds = make_bounds(replicas, 1, session=False)
    got = next_generation(
        current, Situation(workers=workers, bounds=bounds, now_s=NOW_S, settings=Settings(), holds_growth=True)
    )
    if isinstance(got, Keep):
        return None
    assert isinstance(got, Announce), got
    return [str(w.id) for w in got.members]


LOST = make_worker(1, Standing.LOST, pod=None, session=None, why="PodDeleted")
JOINS = make_worker(2, Standing.OUTSIDE, since_s=0.0)
LEAVES = make_worker(1, pod=make_pod(1, terminating=True))


def test_only_growth_is_held() -> None:
    assert decides(member(0), member(1), JOINS) is None
    assert decides(member(0), LOST, JOINS) == ["0", "2"], "a loss is not, and who waits takes the place"
    assert decides(member(0), member(1), replicas=1) == ["0"], "a smaller size is not"
    assert decides(member(0), LEAVES, JOINS) == ["0", "2"], "a drain is not"


def test_words() -> None:
    assert save_words([member(0, 1.0)], 1, "/ckpt") == (
        "1 more worker is ready and joins after the script's next checkpoint (spec.elasticPolicy.growAt)."
    )
    assert save_words([member(0)], 2, "/ckpt").endswith(
        " None has been seen in /ckpt since the agents of its first two workers began to look."
    )

"""When an elastic job grows."""

from __future__ import annotations

from typing import Any

import pytest

from regroup_operator.api.status import Growth
from regroup_operator.model.plan import Clock, timestamp
from regroup_operator.plan.facts.size import Size, decide_size
from tests.builders.plan import make_job

WALL = 1_800_000_000.0
CLOCK = Clock(1000.0, WALL)


def size(
    replicas: int,
    known: Growth | None,
    cooldown: int = 60,
    minimum: int = 1,
    policy: dict[str, Any] | None = None,
    **given: Any,
) -> Size:
    limits = {"minReplicas": minimum, "maxReplicas": 9, "growthCooldownSeconds": cooldown}
    policy = limits | (policy or {})
    job = make_job().with_replicas(replicas).with_spec(elasticPolicy=policy).build()
    return decide_size(job, known, CLOCK, **{"runs": True} | given)


def changed(replicas: int, ago_s: float) -> Growth:
    return Growth(replicas=replicas, changed_at=timestamp(WALL - ago_s))


@pytest.mark.parametrize(
    ("replicas", "known", "want"),
    [
        pytest.param(3, None, Growth(replicas=3), id="the first size"),
        pytest.param(3, Growth(replicas=3), Growth(replicas=3), id="nothing has changed"),
        pytest.param(5, Growth(replicas=3), changed(5, 0), id="the first growth comes at once"),
        pytest.param(5, changed(3, 60), changed(5, 0), id="the time is over"),
        pytest.param(2, changed(3, 1), changed(2, 0), id="it shrinks at once"),
    ],
)
def test_size_is_what_is_wanted(replicas: int, known: Growth | None, want: Growth) -> None:
    assert size(replicas, known) == Size(replicas, replicas, want)


def test_growth_waits_and_says_until_when() -> None:
    got = size(5, changed(3, 50))
    assert (got.replicas, got.growth, got.due_s) == (3, changed(3, 50), 1010.0)
    assert got.words == (
        f"the job grows from 3 to 5 workers at {timestamp(WALL + 10)} (spec.elasticPolicy.growthCooldownSeconds)"
    )


def test_minimum_that_was_raised_is_reached_at_once() -> None:
    got = size(5, changed(2, 50), minimum=4)
    assert (got.replicas, got.growth) == (4, changed(4, 0))


def test_clock_that_was_set_back_does_not_make_the_time_longer() -> None:
    assert size(5, changed(3, -3600)).due_s == 1060.0


@pytest.mark.parametrize("known", [None, changed(3, 1)])
def test_job_that_does_not_run_has_nothing_to_interrupt(known: Growth | None) -> None:
    assert size(5, known, runs=False) == Size(5, 5, Growth(replicas=5))


def test_without_the_field_there_is_no_record() -> None:
    assert size(5, changed(3, 1), cooldown=0) == Size(5, 5)
    assert decide_size(make_job().with_replicas(5).fixed().build(), None, CLOCK, runs=True) == Size(5, 5)


@pytest.mark.parametrize(
    ("policy", "minimum", "replicas", "want"),
    [
        pytest.param({"sizes": [2, 4, 8]}, 2, 8, 8, id="a size of the list"),
        pytest.param({"sizes": [2, 4, 8]}, 2, 7, 4, id="the next size below"),
        pytest.param({"sizes": [8, 2, 4]}, 2, 3, 2, id="the order of the list does not matter"),
        pytest.param({"sizes": [4, 16]}, 4, 9, 4, id="a size above maxReplicas is never reached"),
        pytest.param({"sizeMultipleOf": 3}, 3, 9, 9, id="a multiple"),
        pytest.param({"sizeMultipleOf": 3}, 3, 8, 6, id="the multiple below"),
        pytest.param({}, 1, 7, 7, id="every number without a list"),
    ],
)
@pytest.mark.parametrize("cooldown", [0, 60])
def test_size_is_the_largest_permitted_one(
    policy: dict[str, Any], minimum: int, replicas: int, want: int, cooldown: int
) -> None:
    got = size(replicas, None, cooldown, minimum, policy)
    assert (got.replicas, got.wanted) == (want, want)


def test_number_between_two_sizes_changes_nothing() -> None:
    """An autoscaler may write 4 and 5 in turn: neither the size nor the time of its last change moves."""
    before = changed(4, 1)
    for replicas in (4, 5, 6, 7):
        assert size(replicas, before, policy={"sizes": [2, 4, 8]}, minimum=2) == Size(4, 4, before)


def test_list_that_no_longer_has_the_present_size_takes_effect_at_once() -> None:
    got = size(4, changed(3, 1), policy={"sizes": [2, 4]}, minimum=2)
    assert (got.replicas, got.wanted) == (2, 4)

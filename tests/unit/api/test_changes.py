"""`check_change`: what a started job must keep, in the API server's words."""

from __future__ import annotations

import copy

import pytest

from regroup_operator.api import Job, SpecError, check_change, parse_job
from tests.builders.jobs import BAD_CHANGES, BAD_FROM_THE_BEGINNING, GOOD_CHANGES, SWAPS, Change, stored_job, with_spec


def versions(before: Change, change: Change, *, started: bool = True) -> tuple[Job, Job]:
    raw = stored_job(status={"startTime": "2026-01-01T00:00:00Z"} if started else None)
    before(raw)
    changed = copy.deepcopy(raw)
    change(changed)
    return parse_job(raw), parse_job(changed)


BAD = BAD_CHANGES | SWAPS


@pytest.mark.parametrize(("before", "change", "sentence"), BAD.values(), ids=BAD.keys())
def test_bad_change_gets_the_sentence_of_the_api_server(before: Change, change: Change, sentence: str) -> None:
    with pytest.raises(SpecError) as refused:
        check_change(*versions(before, change))
    assert str(refused.value) == sentence


@pytest.mark.parametrize(("before", "change"), [rule[:2] for rule in BAD_CHANGES.values()], ids=BAD_CHANGES.keys())
def test_everything_may_change_before_the_start(before: Change, change: Change) -> None:
    check_change(*versions(before, change, started=False))


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize(
    ("before", "change", "sentence"), BAD_FROM_THE_BEGINNING.values(), ids=BAD_FROM_THE_BEGINNING.keys()
)
def test_what_never_changes(before: Change, change: Change, sentence: str, started: bool) -> None:
    with pytest.raises(SpecError) as refused:
        check_change(*versions(before, change, started=started))
    assert str(refused.value) == sentence


@pytest.mark.parametrize("change", GOOD_CHANGES.values(), ids=GOOD_CHANGES.keys())
def test_good_change_is_taken(change: Change) -> None:
    check_change(*versions(with_spec(), change))

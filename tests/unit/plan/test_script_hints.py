"""What is behind a failure of an unmodified script: an early return, another size, a file that was written in part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from regroup_operator.api.members import MemberId
from regroup_operator.model.plan import Clock, Crash, Failure
from regroup_operator.model.worker import Current
from regroup_operator.plan.failures.restarts import exit_words
from regroup_operator.plan.failures.script_hints import crash_hints, steady_size, with_returned
from tests.builders.plan import make_current, make_status

NOW = 1_800_000_000.0  # 2027-01-15T08:00:00Z
LOST_PEER = Failure(NOW, "0", 1, "RuntimeError: Connection closed by peer", pod="d-worker-0-0", generation=1)
REFUSES = Failure(NOW, "0", 1, "AssertionError: world size 1", generation=2)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        pytest.param([], "ended with exit code 1", id="none"),
        pytest.param([1], "ended with exit code 1, after the script had returned 0 in worker 1", id="one"),
        pytest.param(
            [1, 2, 4], "ended with exit code 1, after the script had returned 0 in workers 1-2,4", id="several"
        ),
    ],
)
def test_sentence_names_the_members_that_returned_first(returned: list[int], says: str) -> None:
    members = [MemberId(slot, 0) for slot in returned]
    (failure,) = with_returned((LOST_PEER,), make_current(range(5)), members)
    assert exit_words(failure) == f"Worker 0 (pod d-worker-0-0) {says}"


def test_failure_of_an_earlier_generation_follows_from_no_return_in_the_newest() -> None:
    (failure,) = with_returned((LOST_PEER,), make_current(number=2), [MemberId(1, 0)])
    assert failure.returned == ""


@pytest.mark.parametrize(
    ("training", "announced_s", "want"),
    [
        pytest.param(None, 0.0, 5, id="nothing is said"),
        pytest.param(("True", "2027-01-15T07:59:22Z"), 0.0, 3, id="it has trained for 38 s"),
        pytest.param(("True", "2027-01-15T07:59:23Z"), 0.0, 5, id="for less"),
        pytest.param(("True", "2027-01-15T07:00:00Z"), 63.0, 5, id="the generation before has"),
        pytest.param(("False", "2027-01-15T07:00:00Z"), 0.0, 5, id="it does not train"),
    ],
)
def test_size_at_which_the_script_trained(training: tuple[str, str] | None, announced_s: float, want: int) -> None:
    status: dict[str, Any] = {}
    if training is not None:
        status["conditions"] = [{"type": "Training", "status": training[0], "lastTransitionTime": training[1]}]
    assert steady_size(5, make_status(status), make_current(announced_at_s=announced_s), Clock(100.0, NOW)) == want


def hints(last: Failure, current: Current, steady: int) -> str:
    return crash_hints(Crash("p", ((NOW, 1),), last), current, steady)


def test_crash_at_another_size_names_both_and_the_fields() -> None:
    got = hints(REFUSES, make_current((0,), number=2), 2)
    assert got.startswith("The script trained with 2 workers before, and fails with 1.")
    assert "spec.elasticPolicy.minReplicas" in got
    assert hints(REFUSES, make_current((0, 1)), 2) == "", "the size is the same"
    assert hints(REFUSES, make_current((0,)), 0) == "", "it has not trained yet"


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
        "RuntimeError: unexpected EOF, expected 4096 more bytes. The file might be corrupted.",
        "EOFError: Ran out of input",
        "_pickle.UnpicklingError: pickle data was truncated",
        "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
    ],
)
def test_file_that_was_written_in_part_is_named(line: str) -> None:
    current = make_current((0, 1))
    assert "was not written to its end" in hints(replace(REFUSES, last_line=line), current, 2)
    assert "was not written to its end" in hints(replace(REFUSES, tail=f"Traceback\n{line}"), current, 2)


def test_source_text_that_ends_too_early_is_no_file_of_the_scripts() -> None:
    assert hints(replace(REFUSES, last_line="SyntaxError: unexpected EOF while parsing"), make_current((0, 1)), 2) == ""

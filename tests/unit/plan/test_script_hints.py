"""What is behind a failure of an unmodified script: an early return, a file that was written in part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from regroup_operator.api.members import MemberId
from regroup_operator.model.plan import Crash, Failure
from regroup_operator.plan.failures.restarts import exit_words
from regroup_operator.plan.failures.script_hints import crash_hint, with_returned
from tests.builders.plan import make_current

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


def hint(last: Failure) -> str:
    return crash_hint(Crash("p", ((NOW, 1),), last))


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
    assert "was not written to its end" in hint(replace(REFUSES, last_line=line))
    assert "was not written to its end" in hint(replace(REFUSES, tail=f"Traceback\n{line}"))


def test_source_text_that_ends_too_early_is_no_file_of_the_scripts() -> None:
    assert hint(replace(REFUSES, last_line="SyntaxError: unexpected EOF while parsing")) == ""

"""How many steps a generation does again."""

import pytest

from regroup.elastic.reporter import Attempts


def generation(attempts: Attempts, *indices: int, commits: bool = True) -> int:
    """Begin steps in a new generation; return how many of them it says it does again."""
    attempts.begin_generation()
    for index in indices:
        attempts.begin(index)
        if commits and index == indices[0]:
            attempts.told(index)
    return attempts.redone


@pytest.mark.parametrize(
    ("continues_at", "want"),
    [
        pytest.param(11, 0, id="after the step that was in flight: it was committed"),
        pytest.param(10, 1, id="at the step in flight"),
        pytest.param(8, 3, id="further back: what was rolled back counts"),
        pytest.param(20, 0, id="further on: the others were ahead"),
    ],
)
def test_steps_that_were_begun_before_are_counted(continues_at: int, want: int) -> None:
    attempts = Attempts()
    assert generation(attempts, *range(11)) == 0
    assert generation(attempts, continues_at, continues_at + 1) == want


def test_generation_that_commits_nothing_leaves_the_count_to_the_next() -> None:
    attempts = Attempts()
    generation(attempts, *range(11))
    assert generation(attempts, 8, commits=False) == 3
    assert generation(attempts, 8, 9) == 3
    assert generation(attempts, 9) == 1

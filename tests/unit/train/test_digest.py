"""The hash of a split model is of an attempt in which the whole model group took part, or it is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

import regroup
from regroup.generation.living import Apart
from regroup.train import digest


class Attempt:
    """One attempt at a block: `ends`, or another rank dies in it; in both cases nothing is raised after it."""

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: Any, *_: object) -> bool:
        return kind is None or issubclass(kind, Apart)


class Repeats:
    """A job whose block is repeated: another rank died at the end of each attempt but the last one."""

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts

    def collective(self, _name: str) -> Iterator[Attempt]:
        return (Attempt() for _ in range(self._attempts))


@pytest.mark.parametrize(
    ("found", "want"),
    [
        pytest.param(["ab"], "ab", id="undisturbed"),
        pytest.param(["of anything", "ab"], "ab", id="repeated"),
        pytest.param(["of anything", Apart()], None, id="a rank of this one's group has died"),
    ],
)
def test_hash_of_an_attempt_that_was_cut_off_counts_for_nothing(
    monkeypatch: pytest.MonkeyPatch, found: list[str | Apart], want: str | None
) -> None:
    coming = iter(found)

    def digest_of(_model: torch.nn.Module, _team: Any) -> str:
        one = next(coming)
        if isinstance(one, Apart):
            raise one
        return one

    monkeypatch.setattr(digest, "digest_of", digest_of)
    job = cast(regroup.Job, Repeats(len(found)))
    assert digest.digest_together(torch.nn.Linear(1, 1), job) == want

"""What ranks tell each other once a step."""

import math
import re
from typing import Any

import pytest

from regroup.parallel.strategy import Word
from regroup.transaction.header import WIDTH, Header, Row


def row(step: int = 4, **values: Any) -> Row:
    fields: dict[str, Any] = {
        "loss_sum": 1.0, "weight": 2.0, "knows_newer": False, "sample_hash": 3, "snapshotted": step
    }  # fmt: skip
    return Row(step=step, **{**fields, **values})


@pytest.mark.parametrize(
    "value",
    [
        row(),
        row(sample_hash=2**64 - 1, word=Word(2**63 - 1, 2**33 - 1, 2**33)),
        row(loss_sum=-0.1, weight=1e300, knows_newer=True, word=Word(changed=True)),
        row(word=Word(late=True)),
        row(loss_sum=math.inf),
    ],
    ids=["plain", "largest hashes", "newer and changed", "late", "infinite loss"],
)
def test_row_survives_packing_into_int64(value: Row) -> None:
    packed = value.pack()
    assert len(packed) == WIDTH
    assert all(-(2**63) <= number < 2**63 for number in packed)
    assert Row.unpack(packed) == value


def test_sample_hashes_add_up_modulo_two_to_the_64() -> None:
    assert Header((row(sample_hash=2**64 - 1), row(sample_hash=3))).sample_hash == 2


def test_group_leaves_only_when_all_ranks_know() -> None:
    """H11 CUTALL: a planned change that one rank has not heard does not stop a healthy group."""
    assert not Header((row(knows_newer=True), row(knows_newer=False))).all_know_newer
    assert Header((row(knows_newer=True), row(knows_newer=True))).all_know_newer


def test_only_what_every_rank_would_keep_is_reported() -> None:
    """H8 ACK: the oldest snapshotted step of all."""
    assert Header((row(snapshotted=7), row(snapshotted=5))).reportable_step == 5


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ((row(), row()), None),
        ((row(total=100), row(total=600)), "100, 600"),
        ((row(4), row(5)), "different steps"),
        (
            (row(word=Word(1)), row(word=Word(1)), row(word=Word(3))),
            "Parameters or buffers before step 4 differ .* rank 2:",
        ),
        (
            (row(word=Word(1, 7)), row(word=Word(1, 8))),
            r"optimizer's settings .* rank 1\. A scheduler belongs in the `state`",
        ),
    ],
    ids=["equal ranks", "another number of steps", "another step", "other parameters", "other settings"],
)
def test_disagreement_is_a_sentence(rows: tuple[Row, ...], word: str | None) -> None:
    got = Header(rows).disagreement()
    assert (got is None) if word is None else (got is not None and re.search(word, got) is not None)

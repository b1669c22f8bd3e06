"""What ranks tell each other once a step."""

import math
import re
from typing import Any

import pytest

from regroup.parallel.equal import Hashes
from regroup.parallel.strategy import Word
from regroup.transaction.header import WIDTH, Header, Row


def row(step: int = 4, **values: Any) -> Row:
    fields: dict[str, Any] = {
        "loss_sum": 1.0, "weight": 2.0, "knows_newer": False, "sample_hash": 3
    }  # fmt: skip
    return Row(step=step, **{**fields, **values})


@pytest.mark.parametrize(
    "value",
    [
        row(),
        row(sample_hash=2**64 - 1, hashes=Hashes(2**63 - 1, 2**33 - 1, 5), word=Word(2**33)),
        row(loss_sum=-0.1, weight=1e300, knows_newer=True, word=Word(changed=True)),
        row(word=Word(late=True)),
        row(word=Word(norm_squared=0.5, order=2**63 - 1)),
        row(loss_sum=math.inf),
        row(snapshotted=-1, wants_snapshot=True),
        row(snapshotted=12),
        row(busy_ns=2**62, work_ns=2**61),
        row(word=Word(own_norm_squared=1e-300)),
        row(ended=True, wants_checkpoint=True),
    ],
    ids=[
        "plain",
        "largest hashes",
        "newer and changed",
        "late",
        "model group",
        "infinite loss",
        "snapshot is due",
        "snapshot",
        "times",
        "noise",
        "data ended",
    ],
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


def test_only_what_every_rank_has_committed_is_reported() -> None:
    """Rule ACK: who commits step 7 has committed 6, whatever its snapshot holds."""
    assert Header((row(7, snapshotted=3), row(7))).reportable_step == 7


@pytest.mark.parametrize(
    ("held", "want"),
    [
        ((None, None), None),
        ((7, 5), 5),
        ((7, None), 7),
        ((7, -1), None),
    ],
    ids=["no worker takes any", "the oldest", "only a worker's first process takes any", "one worker has none yet"],
)
def test_snapshots_cover_what_every_worker_has(held: tuple[int | None, ...], want: int | None) -> None:
    assert Header(tuple(row(9, snapshotted=step) for step in held)).snapshot_step == want


@pytest.mark.parametrize(
    ("held", "group_size", "want"),
    [
        pytest.param((4, 6), 1, None, id="not split: each has all of the state"),
        pytest.param((4, 6), 2, 4, id="one part is older"),
        pytest.param((4, 6, 6, -1), 2, 6, id="each part is somewhere"),
        pytest.param((-1, 6, -1, 6), 2, None, id="a part is nowhere"),
        pytest.param((None, None), 2, None, id="none are taken"),
    ],
)
def test_newest_step_whose_snapshots_make_up_a_whole(
    held: tuple[int | None, ...], group_size: int, want: int | None
) -> None:
    rows = tuple(row(9, snapshotted=step) for step in held)
    assert Header(rows, group_size).whole_snapshot_step == want


def test_all_take_a_snapshot_once_it_is_due_for_the_slowest() -> None:
    due, not_due = row(snapshotted=3, wants_snapshot=True), row(snapshotted=3)
    assert Header((due, row(), due)).takes_snapshot, "a rank that takes none has no say"
    assert not Header((due, not_due)).takes_snapshot
    assert not Header((row(), row())).takes_snapshot


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ((row(), row()), None),
        ((row(total=100), row(total=600)), "100, 600"),
        ((row(4), row(5)), "different steps"),
        (
            (row(hashes=Hashes(1)), row(hashes=Hashes(1)), row(hashes=Hashes(3))),
            "In step 4 .* parameters or buffers differ between rank 0 and rank 2:",
        ),
        (
            (row(hashes=Hashes(1, 7)), row(hashes=Hashes(1, 8))),
            r"optimizer's settings .* rank 1\. Pass schedulers in the `state`",
        ),
    ],
    ids=["equal ranks", "another number of steps", "another step", "other parameters", "other settings"],
)
def test_disagreement_is_a_sentence(rows: tuple[Row, ...], word: str | None) -> None:
    got = Header(rows).disagreement()
    assert (got is None) if word is None else (got is not None and re.search(word, got) is not None)


@pytest.mark.parametrize(
    ("orders", "odd"),
    [((3, 3, 7, 7), None), ((3, 5, 7, 7), "rank 1 "), ((3, 3, 3, 0), "rank 3 ")],
    ids=["groups may differ", "the first group", "the second group"],
)
def test_ranks_of_a_model_group_run_the_same_modules(orders: tuple[int, ...], odd: str | None) -> None:
    got = Header(tuple(row(word=Word(order=order)) for order in orders), 2).disagreement()
    assert (got is None) if odd is None else (got is not None and f"{odd}ran other split modules" in got)

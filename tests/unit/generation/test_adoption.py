"""Whose state a generation continues from: the traces H2, H3, H4, H5 and MAD of docs/design/protocol.md, on the real code."""

import json
from dataclasses import replace
from itertools import product

import pytest

from regroup.generation.adoption import (
    Arrival,
    Block,
    Copy,
    Fallback,
    Refuse,
    beginner,
    decide,
    odd_strides,
    shared_gpu,
)
from regroup.protocol.document import Document, Member, MemberSeal, OlderGeneration, Store
from regroup.protocol.state import StatePair


def document(
    number: int,
    members: str,
    older: dict[int, str] | None = None,
    *,
    lost: str = "",
    seals: tuple[MemberSeal, ...] = (),
    processes: int = 1,
) -> Document:
    """Generation `number` of workers named by letters; `older`: number -> its workers."""
    return Document(
        number=number,
        uid=f"uid{number}",
        job_uid="job",
        kind="forced",
        members=tuple(Member(i, uid, uid, 1, "127.0.0.1", processes) for i, uid in enumerate(members)),
        store=Store("127.0.0.1", 1, members[0]),
        older=tuple(OlderGeneration(n, f"uid{n}", tuple(uids)) for n, uids in (older or {}).items()),
        seals=seals,
        lost=tuple(lost),
    )


def holds(generation: int, step: int, adopted: int | None = None, agent: int | None = None) -> Arrival:
    """A rank with a valid state; adopted where it was last committed, unless said."""
    state_adopted = generation if adopted is None else adopted
    return Arrival(StatePair(generation, step), state_adopted, state_adopted if agent is None else agent)


def empty(agent: int = 0) -> Arrival:
    """A rank without a state; its worker's processes had adopted `agent`."""
    return Arrival(None, 0, agent)


def backup(generation: int, step: int, agent: int | None = None) -> Arrival:
    """A rank whose state was read from its worker's memory snapshot."""
    return replace(holds(generation, step, agent=agent), from_snapshot=True, is_backup=True)


def seal(
    uid: str,
    left: int,
    state: tuple[int, int] | None,
    adopted: int,
    state_adopted: int | None = None,
    *,
    is_backup: bool = False,
) -> MemberSeal:
    pair = None if state is None else StatePair(*state)
    held_in = 0 if pair is None else adopted if state_adopted is None else state_adopted
    return MemberSeal(uid, left, pair, adopted, held_in, is_backup)


@pytest.mark.parametrize(
    ("doc", "arrivals", "want"),
    [
        pytest.param(
            document(1, "ab"), [empty(), empty()], Fallback(None, False), id="first generation: disk or nothing"
        ),
        pytest.param(
            document(2, "ab", {1: "abc"}),
            [holds(1, 5), holds(1, 6)],
            Copy(1, StatePair(1, 6), False),
            id="a rank that committed one step more is the source",
        ),
        pytest.param(
            document(2, "abc", {1: "ab"}),
            [holds(1, 6), holds(1, 6), empty()],
            Copy(0, StatePair(1, 6), False),
            id="a joiner copies from the lowest rank that has it",
        ),
        pytest.param(
            document(3, "ab", {2: "b", 1: "ab"}),
            [holds(1, 7), holds(2, 7)],
            Copy(1, StatePair(2, 7), False),
            id="H2 STATE: same step of an older generation is another state, and is replaced",
        ),
        pytest.param(
            document(3, "ab", {2: "b", 1: "ab"}),
            [holds(1, 9), holds(2, 7)],
            Copy(1, StatePair(2, 7), False),
            id="STATE: generation first, a higher step of an older one loses",
        ),
        pytest.param(
            document(3, "bc", {2: "abc", 1: "ab"}, lost="a"),
            [holds(1, 3, agent=1), empty()],
            Copy(0, StatePair(1, 3), False),
            id="H3 TORN: interrupted in mid-copy, b offers what it held before",
        ),
        pytest.param(
            document(2, "b", {1: "a"}),
            [empty()],
            Refuse,
            id="H4 WITNESS: a joiner alone, while the only holder may train on, refuses",
        ),
        pytest.param(
            document(3, "b", {2: "ab", 1: "ab"}),
            [holds(1, 5)],
            Copy(0, StatePair(1, 5), False),
            id="WITNESS: b never adopted 2, so 2 never stepped; b is a witness of 1",
        ),
        pytest.param(
            document(3, "b", {2: "ac", 1: "abc"}),
            [holds(1, 5)],
            Refuse,
            id="WITNESS: 2 may have stepped without b",
        ),
        pytest.param(
            document(3, "c", {2: "abc", 1: "a"}, lost="a"),
            [empty()],
            Refuse,
            id="H4 COPIES: c never adopted 2, but b may have copied what a had",
        ),
        pytest.param(
            document(3, "c", {2: "abc", 1: "a"}, lost="ab"),
            [empty()],
            Fallback(None, True),
            id="COPIES: b is lost, too",
        ),
        pytest.param(
            document(3, "c", {2: "abc", 1: "a"}, lost="a", seals=(seal("b", 2, None, 1),)),
            [empty()],
            Fallback(None, True),
            id="COPIES: b says that it left 2 with nothing",
        ),
        pytest.param(
            document(3, "c", {2: "abc", 1: "a"}, lost="a", seals=(seal("b", 2, (1, 5), 2),)),
            [empty()],
            Refuse,
            id="COPIES: b says that it left 2 with a copy",
        ),
        pytest.param(
            document(4, "ab", {3: "a", 2: "b", 1: "ab"}),
            [holds(1, 5), holds(1, 5)],
            Copy(0, StatePair(1, 5), False),
            id="WITNESS: neither 2 nor 3 was adopted by its only member",
        ),
        pytest.param(
            document(3, "b", {2: "a", 1: "ab"}, seals=(seal("a", 2, (1, 5), 1),)),
            [holds(1, 5)],
            Copy(0, StatePair(1, 5), False),
            id="H5 SEAL: a left 2 without adopting it",
        ),
        pytest.param(
            document(3, "b", {2: "a", 1: "ab"}, seals=(seal("a", 1, (1, 5), 1),)),
            [holds(1, 5)],
            Refuse,
            id="SEAL: a promise up to 1 says nothing about 2",
        ),
        pytest.param(
            document(3, "b", {2: "a", 1: "ab"}, seals=(seal("a", 2, (2, 9), 2),)),
            [holds(1, 5)],
            Refuse,
            id="SEAL: a holds a newer state of 2 and is not a member",
        ),
        pytest.param(
            document(4, "b", {3: "ab", 2: "ab"}, seals=(seal("a", 3, (2, 9), 2),)),
            [holds(2, 9, agent=2)],
            Copy(0, StatePair(2, 9), False),
            id="SEAL: a's state of 2 is no newer than what is here",
        ),
        pytest.param(
            document(2, "b", {1: "a"}, lost="a"),
            [empty()],
            Fallback(None, True),
            id="H5 LOST: the last holder's pod is gone: roll back, and say so",
        ),
        pytest.param(
            document(2, "b", {1: "a"}, seals=(seal("a", 1, None, 1),)),
            [empty()],
            Fallback(None, True),
            id="LOST: adopted it, state gone, said by a seal, is a proof like a deleted pod",
        ),
        pytest.param(
            document(3, "bc", {2: "ab", 1: "c"}, lost="a"),
            [empty(agent=2), holds(1, 4)],
            Copy(1, StatePair(1, 4), True),
            id="LOST: b is here and its copy of 2 is gone, a's pod too: 1 is next",
        ),
        pytest.param(
            document(3, "bc", {2: "ab", 1: "bc"}),
            [empty(agent=2), holds(1, 4)],
            Refuse,
            id="MAD: b adopted 2 and lost it, so it is no witness that 2 never stepped; a may hold it",
        ),
        pytest.param(
            document(3, "bc", {2: "ab", 1: "bc"}),
            [empty(agent=1), holds(1, 4)],
            Copy(1, StatePair(1, 4), False),
            id="MAD: b entered 2 without adopting it, so 2 never stepped",
        ),
        pytest.param(
            document(2, "a", {1: "a"}, processes=2),
            [empty(agent=1), holds(1, 8, agent=1)],
            Copy(1, StatePair(1, 8), False),
            id="a crashed process copies from its sibling in the same pod",
        ),
        pytest.param(
            document(3, "ab", {1: "ab"}, seals=(seal("a", 1, (1, 9), 1),)),
            [empty(agent=1), holds(1, 5)],
            Copy(1, StatePair(1, 5), False),
            id="a member that is here speaks for itself: its older seal does not count",
        ),
        pytest.param(
            document(9, "ab", {8: "c"}, lost="c"),
            [holds(3, 5), empty()],
            Fallback(Copy(0, StatePair(3, 5), True), True),
            id="all of the older list is gone: the survivor's older state competes with the disk",
        ),
        pytest.param(
            document(2, "a", {1: "ab"}),
            [backup(1, 5)],
            Refuse,
            id="H8 BACKUP: b may have committed more than a's snapshot holds",
        ),
        pytest.param(
            document(2, "a", {1: "ab"}, lost="b"),
            [backup(1, 5)],
            Fallback(Copy(0, StatePair(1, 5), True), True),
            id="BACKUP: b is gone: a's snapshot competes with the disk",
        ),
        pytest.param(
            document(2, "ab", {1: "ab"}),
            [backup(1, 5), backup(1, 7)],
            Fallback(Copy(1, StatePair(1, 7), True), True),
            id="BACKUP: all processes ended at once: the newest snapshot",
        ),
        pytest.param(
            document(2, "ab", {1: "ab"}),
            [backup(1, 5), holds(1, 9)],
            Copy(1, StatePair(1, 9), False),
            id="BACKUP: a survivor's state is newer than any snapshot",
        ),
        pytest.param(
            document(2, "ab", {1: "ab"}),
            [backup(1, 9), holds(1, 8)],
            Copy(0, StatePair(1, 9), False),
            id="BACKUP: a died after it had committed 9 and copied it, before b committed 9",
        ),
        pytest.param(
            document(2, "ab", {1: "ab"}),
            [replace(holds(1, 9), from_snapshot=True), holds(1, 9)],
            Copy(1, StatePair(1, 9), False),
            id="of one state a process that lives is the source, not what would have to be read",
        ),
        pytest.param(
            document(3, "b", {2: "a", 1: "ab"}, seals=(seal("a", 2, (2, 190), 2, is_backup=True),)),
            [holds(1, 100)],
            Refuse,
            id="BACKUP: a can be reached and has a snapshot of a newer generation than b's state",
        ),
        pytest.param(
            document(3, "b", {2: "ac", 1: "b"}, seals=(seal("a", 2, (2, 5), 2, is_backup=True),)),
            [replace(backup(2, 9), agent_adopted=2)],
            Refuse,
            id="BACKUP: a's older snapshot is no witness either, and c may hold more",
        ),
        pytest.param(
            document(3, "b", {2: "ac", 1: "b"}, seals=(seal("a", 2, (2, 5), 2),)),
            [replace(backup(2, 9), agent_adopted=2)],
            Copy(0, StatePair(2, 9), False),
            id="BACKUP: a's live state is a witness, and the snapshot here is newer",
        ),
    ],
)
def test_decide(doc: Document, arrivals: list[Arrival], want: object) -> None:
    got = decide(doc, arrivals)
    if want is Refuse:
        assert isinstance(got, Refuse), got
        assert got.reason.endswith(("waiting for it.", "to be deleted.")), got.reason
    else:
        assert got == want


@pytest.mark.parametrize(
    ("doc", "arrivals", "want"),
    [
        pytest.param(
            document(2, "bcd", {1: "abcd"}, lost="a"),
            [holds(1, 5), empty(1), empty(1)],
            Copy(0, StatePair(1, 5), False),
            id="the server is lost: its standby",
        ),
        pytest.param(
            document(2, "acd", {1: "abcd"}, lost="b"),
            [holds(1, 6), empty(1), empty(1)],
            Copy(0, StatePair(1, 6), False),
            id="the standby is lost: the server, with a version that nobody has acknowledged",
        ),
        pytest.param(
            document(2, "cbda", {1: "abcd"}),
            [empty(1), holds(1, 5), empty(1), holds(1, 6)],
            Copy(3, StatePair(1, 6), False),
            id="both are there: whoever is newer, whatever ranks they have now",
        ),
        pytest.param(
            document(2, "abc", {1: "abcd"}),
            [holds(1, 5), holds(1, 5), empty(1)],
            Copy(0, StatePair(1, 5), False),
            id="a worker is cut off: it holds nothing that is waited for",
        ),
        pytest.param(
            document(2, "bcd", {1: "abcd"}),
            [holds(1, 5), empty(1), empty(1)],
            Copy(0, StatePair(1, 5), False),
            id="the server is cut off and has not heard: it commits nothing without its standby",
        ),
        pytest.param(
            document(2, "cd", {1: "abcd"}, lost="ab"),
            [empty(1), empty(1)],
            Fallback(None, True),
            id="both are lost: the checkpoint",
        ),
        pytest.param(
            document(2, "cd", {1: "abcd"}, lost="a"),
            [empty(1), empty(1)],
            "pod UIDs b",
            id="the server is lost and the standby cut off: it is waited for",
        ),
        pytest.param(
            document(2, "cd", {1: "abcd"}, lost="a", seals=(seal("b", 1, (1, 5), 1),)),
            [empty(1), empty(1)],
            "held by the worker with pod UID b",
            id="the server is lost and the standby is no member: it is waited for",
        ),
        pytest.param(
            document(2, "bc", {1: "abcd"}, lost="a", seals=(seal("d", 1, None, 1),)),
            [empty(1), empty(1)],
            Fallback(None, True),
            id="a worker that is no member says that it holds nothing, and that proves its loss",
        ),
        pytest.param(
            document(2, "cd", {1: "abcd"}, lost="ab"),
            [holds(0, 3, adopted=1), empty(1)],
            Copy(0, StatePair(0, 3), False),
            id="a worker that still has what generation 1 began with: nothing was committed in it",
        ),
    ],
)
def test_decide_under_a_parameter_server(doc: Document, arrivals: list[Arrival], want: object) -> None:
    """Only server and standby of a generation hold what it committed; of the other members each has said that it holds nothing."""
    got = decide(doc, arrivals)
    if isinstance(want, str):
        assert isinstance(got, Refuse)
        assert want in got.reason
    else:
        assert got == want


def test_refusal_names_the_workers_it_waits_for() -> None:
    got = decide(document(3, "b", {2: "ac", 1: "abc"}, lost="c"), [holds(1, 5)])
    assert isinstance(got, Refuse)
    assert "generation 2" in got.reason
    assert "pod UIDs a)" in got.reason


def test_a_state_is_never_left_behind_unless_it_is_proven_gone() -> None:
    """Two workers of generation 2, all combinations: whoever decides to go on has the newest state that can exist."""
    options = [None, holds(1, 3, agent=1), holds(2, 5), empty(agent=1), empty(agent=2)]
    for a, b, a_lost in product(options, options, (False, True)):
        here = [(uid, arrival) for uid, arrival in (("a", a), ("b", b)) if arrival is not None]
        if not here or (a_lost and a is not None):
            continue
        doc = document(3, "".join(uid for uid, _ in here), {2: "ab", 1: "ab"}, lost="a" if a_lost else "")
        got = decide(doc, [arrival for _, arrival in here])
        present = [arrival.state for _, arrival in here if arrival.state is not None]
        if isinstance(got, Copy):
            assert got.state == max(present)
        if len(here) == 1 and not a_lost and here[0][1].agent_adopted == 2 and not present:
            assert isinstance(got, Refuse)  # the other one may hold 2


@pytest.mark.parametrize(
    ("torn", "reader", "want"),
    [
        pytest.param([False, False, False], 1, 1, id="the reader, as it was made"),
        pytest.param([False, True, False], 1, 0, id="a copy was cut off in the reader's tensors"),
        pytest.param([True, True, False], 0, 2, id="one is whole"),
        pytest.param([True, True], 0, None, id="none is"),
    ],
)
def test_job_without_a_state_begins_with_whole_tensors(torn: list[bool], reader: int, want: int | None) -> None:
    arrivals = [Arrival.from_json(Arrival(None, 0, 0, torn=one).to_json()) for one in torn]
    assert beginner(arrivals, reader) == want


@pytest.mark.parametrize(
    ("strides", "size", "want"),
    [
        pytest.param([7, 7, 7], 1, None, id="all lie alike"),
        pytest.param([7, 7, 8], 1, (0, 2), id="one is channels_last"),
        pytest.param([7, 8, 7, 8], 2, None, id="the parts of a model group may"),
        pytest.param([7, 8, 7, 9], 2, (1, 3), id="not those of one inner index"),
    ],
)
def test_ranks_whose_parameters_lie_in_different_orders(
    strides: list[int], size: int, want: tuple[int, int] | None
) -> None:
    arrivals = [Arrival.from_json(Arrival(None, 0, 0, strides=one).to_json()) for one in strides]
    assert odd_strides(arrivals, size) == want


@pytest.mark.parametrize(
    ("gpus", "want"),
    [
        pytest.param(["m/GPU-1", "m/GPU-2", "n/GPU-1"], None, id="each has its own"),
        pytest.param(["", "", ""], None, id="on the CPU, or free to share"),
        pytest.param(["m/GPU-1", "m/GPU-2", "m/GPU-2", "m/GPU-1"], (1, 2), id="the first pair"),
        pytest.param(["m/GPU-1", "", "m/GPU-1"], (0, 2), id="one rank between them says nothing"),
    ],
)
def test_ranks_on_one_gpu(gpus: list[str], want: tuple[int, int] | None) -> None:
    assert shared_gpu([Arrival.from_json(Arrival(None, 0, 0, gpu=one).to_json()) for one in gpus]) == want


@pytest.mark.parametrize(
    "arrival",
    [
        Arrival(None, 0, 0),
        Arrival(
            StatePair(2, 7), 2, 3, block=Block(7, 1, "eval", complete=True), ended=True, from_snapshot=True, is_backup=True,
            group_size=2, pending=((3, StatePair(2, 7)),), record=[1, None], seed=5,
            snapshots=(StatePair(2, 6), StatePair(1, 4)), strides=9, gpu="GPU-0/1",
        ),
    ],
    ids=["nothing", "all"],
)  # fmt: skip
def test_arrival_is_the_same_after_it_was_gathered(arrival: Arrival) -> None:
    assert Arrival.from_json(json.loads(json.dumps(arrival.to_json()))) == arrival

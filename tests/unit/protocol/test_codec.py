"""JSON in, messages out: strict in what is needed, lenient in what is not known, one sentence for what is wrong."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Optional

import pytest

from regroup.protocol import codec, local, wire
from regroup.protocol.codec import ProtocolError, Registry
from regroup.protocol.document import CheckpointRef, Document, Member, MemberSeal, OlderGeneration, Store
from regroup.protocol.state import Busy, Condition, Seal, StatePair


@dataclass(frozen=True)
class Inner:
    a: int


@dataclass(frozen=True)
class Sample:
    TYPE = "sample"
    number: int
    text: str
    rate: float = 0.5
    flag: bool = False
    maybe: Optional[int] = None  # noqa: UP045 (the protocol is written for Python 3.9)
    pair: Optional[StatePair] = None  # noqa: UP045
    inner: Optional[Inner] = None  # noqa: UP045
    names: tuple[str, ...] = ()
    counts: dict[str, int] = dataclasses.field(default_factory=dict)


GOOD: dict[str, Any] = {"number": 1, "text": "t"}


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        pytest.param([], "Sample must be a JSON object, not list.", id="a list"),
        pytest.param({"text": "t"}, "Sample.number is missing.", id="a missing field"),
        pytest.param({**GOOD, "number": None}, "Sample.number is missing.", id="null is missing"),
        pytest.param({**GOOD, "number": "1"}, "Sample.number must be an integer, not str.", id="a string for a number"),
        pytest.param({**GOOD, "number": True}, "Sample.number must be an integer, not bool.", id="true is no integer"),
        pytest.param({**GOOD, "number": 1.0}, "Sample.number must be an integer, not float.", id="1.0 is no integer"),
        pytest.param({**GOOD, "text": 1}, "Sample.text must be a string, not int.", id="a number for a string"),
        pytest.param({**GOOD, "rate": "x"}, "Sample.rate must be a number, not str.", id="a string for a float"),
        pytest.param({**GOOD, "rate": True}, "Sample.rate must be a number, not bool.", id="true is no float"),
        pytest.param({**GOOD, "flag": 1}, "Sample.flag must be true or false, not int.", id="1 is not true"),
        pytest.param({**GOOD, "pair": [1]}, "Sample.pair must be a list of 2 values.", id="half a pair"),
        pytest.param(
            {**GOOD, "pair": [1, "x"]}, "Sample.pair must be an integer, not str.", id="a pair of other things"
        ),
        pytest.param({**GOOD, "inner": {}}, "Sample.inner.a is missing.", id="the path leads inside"),
        pytest.param(
            {**GOOD, "names": ["a", 2]}, "Sample.names[1] must be a string, not int.", id="the index is named"
        ),
        pytest.param({**GOOD, "names": "ab"}, "Sample.names must be a list, not str.", id="a string is no list"),
        pytest.param(
            {**GOOD, "counts": {"x": "y"}}, "Sample.counts.x must be an integer, not str.", id="a dict's value"
        ),
        pytest.param({**GOOD, "counts": []}, "Sample.counts must be a JSON object, not list.", id="a list is no dict"),
    ],
)
def test_what_is_wrong_is_one_sentence(data: Any, sentence: str) -> None:
    with pytest.raises(ProtocolError) as error:
        codec.from_json(Sample, data)
    assert str(error.value) == sentence


def test_unknown_fields_are_ignored_and_whole_numbers_are_floats_too() -> None:
    got = codec.from_json(Sample, {**GOOD, "rate": 2, "fromTheFuture": {"x": [1]}, "pair": [3, 4]})
    assert got == Sample(1, "t", 2.0, pair=StatePair(3, 4))
    assert isinstance(got.rate, float)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_number_that_is_none_is_not_said(value: float) -> None:
    """A loss may become NaN: that must not end the job with an error of JSON."""
    assert codec.line(wire.Progress(step=3, loss=value)) == codec.line(wire.Progress(step=3))


@pytest.mark.parametrize("text", ["NaN", '{"a": Infinity}', "-Infinity", "{", b"\xff", "[" * 100_000])
def test_text_that_is_not_json(text: str | bytes) -> None:
    with pytest.raises(ProtocolError, match="The message is not JSON"):
        codec.parse(text)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        pytest.param({}, "A message must be a JSON object with a string field `type`.", id="no type"),
        pytest.param({"type": 1}, "A message must be a JSON object with a string field `type`.", id="a number as type"),
        pytest.param({"type": "x"}, "Unknown message type 'x'; known: sample.", id="an unknown type"),
    ],
)
def test_registry_says_what_it_knows(data: Any, sentence: str) -> None:
    with pytest.raises(ProtocolError) as error:
        Registry(Sample).decode(data)
    assert str(error.value) == sentence


SEAL = Seal(3, StatePair(2, 9), 3, 2)
DOCUMENT = Document(
    number=4,
    uid="u4",
    job_uid="job",
    kind="forced",
    members=(Member(0, "w-0-0", "a", 1, "10.0.0.1", 2), Member(2, "w-2-0", "c", 5, "10.0.0.3", 2)),
    store=Store("10.0.0.3", 4001, "c"),
    older=(OlderGeneration(3, "u3", ("a", "gone/1.0")),),
    lost=("gone/1.0",),
    reason="MemberLost",
)
CHECKPOINT = CheckpointRef(3, 10, "step-10")
BODIES: list[Any] = [
    wire.Hello(1, 2, 3), wire.Changed(), wire.Adopted(3, "self", StatePair(1, 3), 2.0, True),
    wire.Progress(3, 0.25, 24, "d", 10, 100.0, 5.0, 1, {"generation": 1, "step": 2, "directory": "x"}),
    wire.ScriptProgress(3, wire.REPORTED, 40, 60, 66.5, 0.5, 0.25, 5.0, 2.0, 9.5, 12.5),
    wire.Fault("exit", "m", 3, 0, -9, last_line="last", peer="peer", peer_rank=1, observed_ms=2.0),
    wire.Draining(3.0), wire.Finished(10),
    wire.Stacks((wire.ProcessStack(0, 4, "outside", 61.5, "load (train.py:4)", "load (train.py:4) < main", "eval"),)),
]  # fmt: skip
COMMANDS: list[Any] = [
    wire.Welcome("Session"), wire.DocumentCommand(DOCUMENT), wire.Prune(("a", "b")), wire.ProgressRequest(), wire.Ping(),
    wire.Restart("it is late."),
    wire.DumpStacks(), wire.Kill((4, 5), "hangs"),
    wire.Finish(3, 10, 2, 4, CHECKPOINT), wire.Finish(3, 10, 0, 4),
    wire.Stop("Complete"), wire.Generation(2, "u", "planned", True, 4, 8, 2, 1, "h", 1, "p", False, "digest", "Resized"),
]  # fmt: skip
ASSIGNMENT = local.Assignment(
    2, "u", "forced", True, 1, 4, 1, 2, 0, "pod", "h", 1, "p", True, "digest", DOCUMENT, "MemberLost"
)
LOCAL: list[Any] = [
    local.Attach(1, 0, 2), local.Entering(3), local.Arrived(3), local.FormedLocally(3, 1.0),
    local.AdoptedLocally(3, 9, "self", StatePair(2, 9), 1.0, True),
    local.Committed(3, 9, 8, 0.5, 1, "d", 10, 3.0, 1.0, 1, {"step": 1}),
    local.Left(3, None, 0, 5, "witness", "m", 1), local.Snapshotted(StatePair(2, 9), 2, True), local.FinishedLocally(3, 10),
    local.TakeStore(3), local.Observed(0, 3, "formed"), local.Stepped(0, 3, 10, 0.5), local.Held(0, 3), local.Hold(), local.Go(),
    local.CannotRun(0, 3, "torch 2.10 is too old."),
    local.Answer("entering", 3, True, 2, "m"), ASSIGNMENT, local.PruneLocally(("a",)), local.StopLocally("Complete"),
    local.BusyLocally("pause", "eval", 60.0), local.DumpStacksLocally(), local.FinishLocally(3, 10, 2, 4, CHECKPOINT),
    local.Stack("outside", None, "load (train.py:4)", "load (train.py:4) < main", "thread MainThread:"),
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda b: b.TYPE)
def test_report_survives_its_json(body: Any) -> None:
    report = wire.Report(
        "job", "pod", "boot", Condition(1, 2, "ready", busy=(Busy("pause", "eval", 60.0, 1.5),)), SEAL, 5, body
    )
    assert wire.Report.decode(codec.line(report)) == report


@pytest.mark.parametrize("body", COMMANDS, ids=lambda b: b.TYPE)
def test_command_survives_its_json(body: Any) -> None:
    command = wire.Command("job", "pod", 1, 2, body)
    assert wire.Command.decode(codec.line(command)) == command


@pytest.mark.parametrize("message", LOCAL, ids=lambda m: m.TYPE)
def test_local_message_survives_its_json(message: Any) -> None:
    registry = local.TO_TRAINER if type(message) in local.TO_TRAINER._classes.values() else local.FROM_TRAINER
    assert registry.decode_line(local.encode(message)) == message


def test_every_message_is_in_these_tests() -> None:
    tried = {m.TYPE for m in (*BODIES, *COMMANDS)} | {m.TYPE for m in LOCAL}
    known = {*wire.REPORTS._classes, *wire.COMMANDS._classes, *local.FROM_TRAINER._classes, *local.TO_TRAINER._classes}
    assert tried == known


# --- the document --------------------------------------------------------------------------------------------------


def test_digest_is_of_the_content_only() -> None:
    """Golden: a digest that changed would part operators and agents of two releases."""
    again = codec.from_json(Document, json.loads(json.dumps(codec.to_json(DOCUMENT))))
    assert again == DOCUMENT
    assert again.digest() == DOCUMENT.digest() == "ffb4eb12a537d6c89f0df06a493907d47babc4bd35d05dcde11da8ddd3a25d00"


def test_seal_in_a_document_says_whether_it_is_a_backup() -> None:
    """Rule BACKUP: who reads the document must not take a snapshot for a witness."""
    sealed = dataclasses.replace(DOCUMENT, seals=(MemberSeal("a", 3, StatePair(2, 9), 3, 2, is_backup=True),))
    again = codec.from_json(Document, json.loads(json.dumps(codec.to_json(sealed))))
    assert again.seals == sealed.seals
    live = dataclasses.replace(sealed, seals=(dataclasses.replace(sealed.seals[0], is_backup=False),))
    assert live.digest() != sealed.digest()


def test_digest_differs_with_anything_that_is_agreed_on() -> None:
    changed: dict[str, Any] = {"number": 5, "members": DOCUMENT.members[:1], "older": (), "lost": ()}
    names = [f.name for f in dataclasses.fields(DOCUMENT) if f.name not in ("store", "seals", "lineage", "checkpoint")]
    other = [dataclasses.replace(DOCUMENT, **{name: changed.get(name, "x")}) for name in names]
    assert len({d.digest() for d in other} | {DOCUMENT.digest()}) == len(other) + 1


def test_document_of_workers_without_groups_says_nothing_of_positions() -> None:
    text = json.dumps(codec.to_json(dataclasses.replace(DOCUMENT, seals=(MemberSeal("a", 1, None, 0),), silent=("d",))))
    assert "osition" not in text
    assert [DOCUMENT.older[0].position(uid) for uid in ("a", "gone/1.0")] == [0, 0]


def test_positions_survive_the_wire() -> None:
    older = dataclasses.replace(DOCUMENT.older[0], positions=(0, 1))
    seal = MemberSeal("e", 1, None, 0, position=1)
    sent = dataclasses.replace(DOCUMENT, older=(older,), seals=(seal,), silent=("d",), silent_positions=(1,))
    again = codec.from_json(Document, json.loads(json.dumps(codec.to_json(sent))))
    assert again == sent
    assert [again.older[0].position(uid) for uid in ("a", "gone/1.0")] == [0, 1]
    with pytest.raises(KeyError):
        again.older[0].position("b")


@pytest.mark.parametrize(("number", "slots"), [(2, [0, 3]), (3, [2, 1]), (4, [0, 3])])
def test_checkpoint_is_read_by_a_whole_group_and_by_another_one_next(number: int, slots: list[int]) -> None:
    members = tuple(Member(s, f"w-{s}-0", f"u{s}", 1, "h", 2) for s in (0, 3, 2, 1))
    document = dataclasses.replace(DOCUMENT, number=number, members=members)
    assert [m.slot for m in document.readers(2)] == slots
    assert document.readers(1) == (document.reader(),)


def test_ranks_follow_the_list() -> None:
    assert (DOCUMENT.world_size, DOCUMENT.rank_offset("a"), DOCUMENT.rank_offset("c")) == (4, 0, 2)
    assert [DOCUMENT.member_of_rank(r).pod_uid for r in range(4)] == ["a", "a", "c", "c"]
    with pytest.raises(IndexError):
        DOCUMENT.member_of_rank(4)
    with pytest.raises(KeyError):
        DOCUMENT.rank_offset("b")
    assert DOCUMENT.store_prefix() == "job/4/u4"

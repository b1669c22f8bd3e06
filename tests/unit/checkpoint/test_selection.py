"""Which checkpoint may be read, and which deleted."""

import itertools

import pytest

from regroup.checkpoint.errors import CheckpointError
from regroup.checkpoint.selection import (
    Commit,
    FileMark,
    Name,
    name_of,
    parse_commit,
    parse_name,
    prunable,
    refusal,
    unwelcome,
)
from regroup.protocol.document import CheckpointRef, LineageEntry

LINEAGE = (LineageEntry(1, 0), LineageEntry(2, 50), LineageEntry(4, 40))


def at(generation: int, step: int) -> Name:
    return Name(generation, step, "abcd1234")


def ref(name: Name) -> CheckpointRef:
    return CheckpointRef(name.generation, name.step, name.directory)


@pytest.mark.parametrize(
    ("directory", "want"),
    [
        ("step-10.g2-abcd1234", Name(2, 10, "abcd1234")),
        (".writing-step-10.g2-abcd1234", Name(2, 10, "abcd1234")),
        ("step-0.g1-a", Name(1, 0, "a")),
        ("step-10.g2-", None),
        ("step-10.g2-abcd12345", None),
        ("step--1.g2-abcd1234", None),
        ("step-10.g2-../../x", None),
        ("lost+found", None),
    ],
)
def test_name_is_read_from_a_directory(directory: str, want: Name | None) -> None:
    assert parse_name(directory) == want


def test_name_comes_back_from_its_directory() -> None:
    name = name_of(3, 700, "0f8e4c1a-77d2-4a0e-9b7e-3f2f5a0c1d2e")
    assert name.directory == "step-700.g3-0f8e4c1a"
    assert parse_name(name.directory) == name


@pytest.mark.parametrize(
    ("name", "named", "sentence"),
    [
        pytest.param(at(4, 90), None, None, id="the newest generation has no limit"),
        pytest.param(at(2, 40), None, None, id="a step that the successor began with"),
        pytest.param(at(2, 41), None, "generation 4 went on from step 40", id="a step beyond the successor's first"),
        pytest.param(at(1, 51), None, "generation 2 went on from step 50", id="fenced by the next generation"),
        pytest.param(at(1, 45), None, "generation 4 went on from step 40", id="fenced by a later roll-back"),
        pytest.param(at(1, 40), None, None, id="an ancestor of every later generation"),
        pytest.param(at(3, 40), None, "generation 3 is not in the job's lineage", id="a generation never adopted"),
        pytest.param(at(3, 40), at(3, 40), None, id="one that the status names"),
        pytest.param(at(3, 41), at(3, 40), "generation 3 is not in", id="another step than the status names"),
        pytest.param(at(5, 99), None, "generation 5 is not in", id="a generation of which no adoption was reported"),
        pytest.param(at(2, 41), at(2, 41), "is fenced", id="a name in the status does not undo a fence"),
    ],
)
def test_refusal(name: Name, named: Name | None, sentence: str | None) -> None:
    got = refusal(name, LINEAGE, ref(named) if named else None)
    assert got is None if sentence is None else sentence in str(got) and name.directory in str(got)


def test_newest_is_by_generation_then_step() -> None:
    """Trace H15: g1 pauses inside its checkpoint; g2 restores and commits an earlier step; g1 then writes COMMIT."""
    late, good = at(1, 100), at(2, 60)
    lineage = (LineageEntry(1, 0), LineageEntry(2, 50))
    assert max(late, good) == good
    assert refusal(good, lineage, None) is None
    # Without anything of g2 the fenced branch is not taken either.
    assert "is fenced" in str(refusal(late, lineage, None))
    assert refusal(at(1, 50), lineage, None) is None


def test_what_may_be_read_is_an_ancestor_of_every_later_generation() -> None:
    for starts in itertools.product(range(4), repeat=3):
        lineage = [LineageEntry(g + 1, start) for g, start in enumerate(starts)]
        for generation, step in itertools.product(range(1, 4), range(4)):
            want = all(step <= start for start in starts[generation:])
            assert (refusal(at(generation, step), lineage, None) is None) == want


def test_writer_below_a_later_generation_is_unwelcome() -> None:
    names = [at(1, 10), at(3, 5)]
    assert "Generation 3 has written" in str(unwelcome(names, 2))
    assert unwelcome(names, 3) is None
    assert unwelcome([], 1) is None


NAMES = [at(g, s) for g in (1, 2, 3) for s in (10, 20)]


@pytest.mark.parametrize(
    ("keep", "generation", "want"),
    [
        pytest.param([at(3, 10), at(2, 20)], 3, [at(1, 10), at(1, 20), at(2, 10)], id="what is old and not kept"),
        pytest.param([at(3, 20)], 2, [at(1, 10), at(1, 20), at(2, 10), at(2, 20)], id="nothing above its generation"),
        pytest.param([at(1, 20)], 3, [at(1, 10)], id="nothing newer than what is kept"),
        pytest.param([], 3, [], id="nothing without a name to keep"),
    ],
)
def test_prunable(keep: list[Name], generation: int, want: list[Name]) -> None:
    assert prunable(NAMES, [], [name.directory for name in keep], generation) == (want, [])


def test_prunable_sweep() -> None:
    for size in range(3):
        for keep in itertools.combinations(NAMES, size):
            for generation in (1, 2, 3):
                committed, unfinished = prunable(NAMES, NAMES, [name.directory for name in keep], generation)
                assert all(name.generation <= generation and name < max(keep) for name in committed)
                assert all(name.generation < generation for name in unfinished)
                assert not set(keep) & {*committed, *unfinished}


COMMIT = Commit("job-1", 2, 60, 2, 1, 50, "00ff", {".metadata": FileMark(3, "aa")})


def test_commit_comes_back_from_its_json() -> None:
    assert parse_commit(COMMIT.to_json(), at(2, 60), "job-1") == COMMIT


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        pytest.param("", "is damaged", id="empty"),
        pytest.param(COMMIT.to_json()[:40], "is damaged", id="cut off"),
        pytest.param("[]", "is damaged (it is not an object)", id="not an object"),
        pytest.param("[" * 100_000, "is damaged (maximum recursion depth exceeded", id="much of it"),
        pytest.param(COMMIT.to_json().replace('"startStep": 50,', ""), "no startStep", id="a field is missing"),
        pytest.param(COMMIT.to_json().replace('"step": 60', '"step": "60"'), "step is '60'", id="a wrong type"),
        pytest.param(COMMIT.to_json().replace('"step": 60', '"step": 61'), "is that of step 61", id="another step"),
        pytest.param(
            COMMIT.to_json().replace("job-1", "job-2"), "belongs to job job-2, this is job-1", id="another job"
        ),
    ],
)
def test_commit_that_is_not_this_checkpoints_is_refused_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_commit(text, at(2, 60), "job-1")
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("Skipped step-60.g2-abcd1234: ")

"""`regroup checkpoint list|verify`: what a person sees of a directory of checkpoints."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from pathlib import Path

import pytest
import torch

from regroup.checkpoint import Checkpointer
from regroup.checkpoint.checkpointer import Origin
from regroup.checkpoint.errors import skipped
from regroup.checkpoint.store import COMMIT
from regroup.protocol.state import StatePair
from regroup_cli.__main__ import main


def write(directory: Path, step: int, generation: int = 1) -> None:
    """Write one checkpoint of a small state, as a session does."""
    checkpointer = Checkpointer(str(directory), 0.0, "job")
    tree = {"model": {"weight": torch.arange(1000.0)}, "optimizer": {}, "state": {"n": {"step": step}}}
    pair = StatePair(generation, step)
    assert checkpointer.save(tree, pair=pair, origin=Origin(generation, "abcdefgh", 0, 0))
    assert checkpointer.wait(30)
    assert checkpointer.problem is None


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    write(directory, 10)
    write(directory, 20)
    write(directory, 15, generation=2)
    (directory / "step-20.g1-abcdefgh" / COMMIT).unlink()
    return directory


def test_list_is_in_the_order_in_which_they_would_be_read(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list", str(written)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "STEP", "GENERATION", "WRITTEN", "SIZE"]
    assert [row.split()[:3] for row in rows] == [
        ["step-15.g2-abcdefgh", "15", "2"],
        ["step-20.g1-abcdefgh", "20", "1"],
        ["step-10.g1-abcdefgh", "10", "1"],
    ]
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  +\d+\.\d KiB  +complete$", rows[0])
    assert rows[1].endswith("it has no COMMIT.json, its writer stopped before it was complete.")


def test_verify_reads_the_newest(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(written)]) == 0
    said = capsys.readouterr().out
    assert re.fullmatch(r"step-15\.g2-abcdefgh: ok: \d files, \d+\.\d KiB, as committed; 1 tensor read\n", said), said


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        pytest.param(b"x", r"has 1 bytes, \d+ were committed", id="truncated"),
        pytest.param(None, "is not what was committed", id="one bit"),
    ],
)
def test_verify_names_what_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: bytes | None, sentence: str
) -> None:
    write(tmp_path, 10)
    write(tmp_path, 20)
    (file,) = (tmp_path / "step-10.g1-abcdefgh").glob("*.distcp")
    whole = bytearray(file.read_bytes())
    whole[100] ^= 1
    file.write_bytes(bytes(whole) if damage is None else damage)
    assert main(["checkpoint", "verify", "--all", str(tmp_path)]) == 1
    newer, older = capsys.readouterr().out.splitlines()
    assert newer.startswith("step-20.g1-abcdefgh: ok: ")
    assert older.startswith("step-10.g1-abcdefgh: FAILED: ")
    assert re.search(sentence, older)
    assert main(["checkpoint", "verify", str(tmp_path), "step-10.g1-abcdefgh"]) == 1


def test_data_that_cannot_be_read_are_a_whole_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 10)
    path = tmp_path / "step-10.g1-abcdefgh"
    (path / ".metadata").write_bytes(b"")
    record = json.loads((path / COMMIT).read_text())
    record["files"][".metadata"] = {"size": 0, "sha256": hashlib.sha256().hexdigest()}
    (path / COMMIT).write_text(json.dumps(record))
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{path.name}: FAILED: cannot be read (EOFError: Ran out of input).\n"


def test_file_that_cannot_have_been_committed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 10)
    file = tmp_path / "step-10.g1-abcdefgh" / COMMIT
    record = json.loads(file.read_text())
    record["files"]["a\0b"] = {"size": 1, "sha256": ""}
    file.write_text(json.dumps(record))
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert said == ("step-10.g1-abcdefgh: FAILED: its COMMIT.json names 'a\\x00b', and no file can have that name.\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["list", "{}/nowhere"], "is not a directory. Give the directory of spec.checkpoint"),
        (["verify", "{}"], "holds no complete checkpoint"),
        (["verify", "{}", "step-1.g1-x"], "is no checkpoint in"),
        (["verify", "{}", "../etc"], "is no checkpoint in"),
    ],
    ids=["no directory", "an empty one", "a name that is not there", "a path"],
)
def test_bad_arguments_get_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert main(["checkpoint", *(argument.format(tmp_path) for argument in arguments)]) == 2
    assert sentence in capsys.readouterr().err


def test_an_empty_directory_is_listed_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path} holds no checkpoint.\n"


def test_reason_does_not_depend_on_the_words_of_the_sentence() -> None:
    """It was cut out of the sentence, whose beginning was searched for."""
    error = skipped("step-10.g1-a", "it has no COMMIT.json.")
    assert (str(error), error.why) == ("Skipped step-10.g1-a: it has no COMMIT.json.", "it has no COMMIT.json.")
    there = pickle.loads(pickle.dumps(error))
    assert (str(there), there.why) == (str(error), error.why), "as it comes from another process"

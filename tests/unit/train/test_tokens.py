"""Token files: what is written is read, damage is found, and samples are what follows each other in the text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regroup.data import DataError
from regroup.train import tokens

TEXT = bytes(range(256)) * 5 + "ärger".encode()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "text").write_bytes(TEXT)
    tokens.corpus(str(tmp_path / "text"), str(tmp_path / "tokens"))
    return tmp_path / "tokens"


def test_text_becomes_its_bytes_on_disk_or_in_memory(file: Path) -> None:
    text = str(file.parent / "text")
    for found in (tokens.corpus(text, str(file)), tokens.corpus(None, str(file)), tokens.corpus(text, None)):
        assert found.tokens.tolist() == list(TEXT)
        assert found.vocabulary == 256
    assert isinstance(tokens.corpus(None, str(file)).tokens, np.memmap)
    assert sorted(path.name for path in file.parent.iterdir()) == ["text", "tokens"]
    assert tokens.read(file)[1] == hashlib.sha256(TEXT).digest()


def test_standard_librarys_text_is_there_without_any_file() -> None:
    found = tokens.corpus(None, None)
    assert len(found.tokens) > 1_000_000
    assert b"import" in found.tokens[:100_000].astype(np.uint8).tobytes()


def test_tokens_of_another_tokenizer_keep_their_vocabulary(tmp_path: Path) -> None:
    tokens.write(tmp_path / "t", iter([np.array([50256, 1], np.uint16), np.array([2], np.uint16)]), 50257)
    found, text_hash = tokens.read(tmp_path / "t")
    assert (found.tokens.tolist(), found.vocabulary, text_hash) == ([50256, 1, 2], 50257, tokens.UNKNOWN)


def _cut(data: bytearray) -> bytearray:
    return data[:-1]


def _grown(data: bytearray) -> bytearray:
    return data + b"x"


def _flip(at: int) -> Callable[[bytearray], bytearray]:
    def flipped(data: bytearray) -> bytearray:
        data[at] ^= 1
        return data

    return flipped


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        pytest.param(_cut, "has 2635 bytes, and its header announces 2636", id="one byte is missing"),
        pytest.param(_grown, "has 2637 bytes, and its header announces 2636", id="one byte too many"),
        pytest.param(lambda data: data[:40], "The header of the token file", id="half a header"),
        pytest.param(lambda data: data[:0], "is no token file: it does not begin with RGTOKENS", id="empty"),
        pytest.param(_flip(0), "is no token file", id="another format"),
        pytest.param(_flip(17), "The header of the token file", id="another count"),
        pytest.param(_flip(62), "The header of the token file", id="another checksum"),
    ],
)
def test_damaged_file_is_one_sentence(file: Path, damage: Callable[[bytearray], bytearray], sentence: str) -> None:
    file.write_bytes(damage(bytearray(file.read_bytes())))
    with pytest.raises(DataError) as caught:
        tokens.corpus(None, str(file))
    assert sentence in str(caught.value)
    assert str(file) in str(caught.value)


def test_token_outside_the_vocabulary_is_refused_when_it_is_read(file: Path) -> None:
    damaged = bytearray(file.read_bytes())
    damaged[-1 - 2 * 3] = 1  # the high byte of the last token but three: each sample has four
    file.write_bytes(damaged)
    train, held_out = tokens.split(tokens.corpus(None, str(file)), 4, 0.1, 10)
    train.fetch(torch.arange(len(train)))
    with pytest.raises(DataError, match="A token is 370, and the vocabulary has 256"):
        held_out.fetch(torch.arange(len(held_out)))


@pytest.mark.parametrize(
    ("text", "named", "sentence"),
    [
        pytest.param("other", "tokens", "was made from another text than text", id="another text"),
        pytest.param("nowhere", "new", "cannot be read (No such file or directory)", id="no text"),
        pytest.param(None, "nowhere", "cannot be read (No such file or directory)", id="no token file"),
        pytest.param("text", "no/directory/x", "cannot be written (No such file or directory)", id="no directory"),
        pytest.param("text", "x" * 300, "cannot be written (File name too long)", id="too long a name"),
        pytest.param("empty", "new", "is empty. Give a text file with content.", id="an empty text"),
        pytest.param("empty", None, "is empty. Give a text file with content.", id="an empty text, in memory"),
    ],
)
def test_text_that_cannot_be_used_is_one_sentence(
    file: Path, text: str | None, named: str | None, sentence: str
) -> None:
    (file.parent / "other").write_bytes(TEXT + b"x")
    (file.parent / "empty").touch()
    before = {path.name for path in file.parent.iterdir()}
    with pytest.raises(DataError) as caught:
        tokens.corpus(str(file.parent / text) if text else None, str(file.parent / named) if named else None)
    assert sentence in str(caught.value)
    assert {path.name for path in file.parent.iterdir()} == before


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def chunks() -> tokens.Tokens:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        tokens.write(tmp_path / "t", (chunks() for _ in range(2)), 256)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", [1, 7, 64])
def test_samples_cover_the_text_once_and_predict_what_follows(file: Path, length: int) -> None:
    found = tokens.corpus(None, str(file))
    train, held_out = tokens.split(found, length, 0.1, 10)
    pairs = [part.fetch(torch.arange(len(part))) for part in (train, held_out)]
    x, y = torch.cat([pair.x for pair in pairs]), torch.cat([pair.y for pair in pairs])
    whole = torch.tensor(list(TEXT))[: len(x) * length + 1]
    assert torch.equal(x.flatten(), whole[:-1])
    assert torch.equal(y.flatten(), whole[1:])
    assert len(TEXT) - len(whole) < length
    assert 1 <= len(held_out) <= 10
    assert x.dtype == y.dtype == torch.int64


def test_text_that_is_too_short_is_one_sentence(file: Path) -> None:
    with pytest.raises(DataError, match="has 1286 tokens, and length is 1024: at least 2049 are needed"):
        tokens.split(tokens.corpus(None, str(file)), 1024, 0.1, 10)


def test_text_that_grows_while_its_file_is_made_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash in the file is that of the tokens in it, not that of an earlier look at the text."""
    text, path = tmp_path / "text", tmp_path / "tokens"
    text.write_bytes(b"a" * 10)
    make = tokens.write

    def write(*arguments: Any) -> None:
        with text.open("ab") as file:
            file.write(b"b")
        make(*arguments)

    monkeypatch.setattr(tokens, "write", write)
    assert len(tokens.corpus(str(text), str(path)).tokens) == 11
    assert tokens.read(path)[1] == hashlib.sha256(text.read_bytes()).digest()

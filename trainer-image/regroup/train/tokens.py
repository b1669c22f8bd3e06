"""Token files: a header and uint16 tokens, memory-mapped, so that a file may be larger than memory.

Owns the format, the byte tokenizer that makes a file from text, and the samples cut from it. A file is little-endian:

| bytes | content |
| --- | --- |
| 8 | RGTOKENS |
| 4, 4, 8 | version, vocabulary, count |
| 32 | SHA-256 of the text; zeros: unknown |
| 4 | zeros |
| 4 | CRC-32 of these 60 bytes |
| 2 * count | tokens |

A file appears whole or not at all (written aside, then renamed), so several processes may make the same file at the same time.
"""

import hashlib
import os
import struct
import sysconfig
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from regroup.data import Batch, DataError

MAGIC, VERSION = b"RGTOKENS", 1
BYTES = 256
"""Vocabulary of the byte tokenizer, for which each byte is a token."""
_HEADER = struct.Struct("<8sIIQ32s4x")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size
_CHUNK = 1 << 22
UNKNOWN = bytes(32)

Tokens = npt.NDArray[np.uint16]


class Corpus(NamedTuple):
    """Tokens and the size of their vocabulary."""

    tokens: Tokens
    """[count], on disk or in memory."""
    vocabulary: int
    """Upper bound of the tokens, which are all below it."""


def write(
    path: Path, chunks: Iterable[Tokens], vocabulary: int, text_hash: Callable[[], bytes] = lambda: UNKNOWN
) -> None:
    """Write a token file, whole or not at all. Raises DataError.

    `text_hash()` returns the SHA-256 of the text. It is called after the last chunk.
    """
    if not 1 <= vocabulary <= 1 << 16:
        raise DataError(f"vocabulary ({vocabulary}) must be between 1 and 65536, because tokens are uint16.")
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        aside = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(bytes(HEADER_BYTES))
                count = 0
                for chunk in chunks:
                    file.write(chunk.astype("<u2").tobytes())
                    count += len(chunk)
                file.seek(0)
                head = _HEADER.pack(MAGIC, VERSION, vocabulary, count, text_hash())
                file.write(head + _CRC.pack(zlib.crc32(head)))
                file.flush()
                os.fsync(file.fileno())
            aside.chmod(0o644)
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise DataError(
            f"The token file {path} cannot be written ({error.strerror}). Name a file in a directory that you can write to."
        ) from None


def read(path: Path) -> tuple[Corpus, bytes]:
    """Return the tokens of a file, memory-mapped, and its text's hash. Raises DataError for a damaged or another file."""
    try:
        with path.open("rb") as file:
            head, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(
            f"The token file {path} cannot be read ({error.strerror}). Name a token file, or give text."
        ) from None
    if head[: len(MAGIC)] != MAGIC:
        raise DataError(
            f"{path} is no token file: it does not begin with {MAGIC.decode()}. Give a text file as text instead."
        )
    if len(head) < HEADER_BYTES or _CRC.unpack(head[_HEADER.size :])[0] != zlib.crc32(head[: _HEADER.size]):
        raise DataError(
            f"The header of the token file {path} is damaged: its checksum differs. Delete the file and make it again."
        )
    _, version, vocabulary, count, text_hash = _HEADER.unpack(head[: _HEADER.size])
    if version != VERSION:
        raise DataError(f"The token file {path} has format {version}; this version reads {VERSION}. Make it again.")
    if size != HEADER_BYTES + 2 * count:
        raise DataError(
            f"The token file {path} has {size} bytes, and its header announces {HEADER_BYTES + 2 * count}: it is damaged or "
            "incomplete. Delete the file and make it again."
        )
    if not count:
        raise DataError(f"The token file {path} has no tokens. Make it from a text that is not empty.")
    return Corpus(np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(count,)), vocabulary), text_hash


def corpus(text: str | None, tokens: str | None) -> Corpus:
    """Return the tokens of a configuration's fields `text` and `tokens` (`LanguageModel`). Raises DataError.

    A token file that does not exist is made from the text.
    """
    if tokens is None:
        return Corpus(np.concatenate([_tokens_of(chunk) for chunk in _chunks(text)]), BYTES)
    path = Path(tokens)
    if text is None:
        return read(path)[0]
    digest = hashlib.sha256()

    def hashed() -> Iterator[Tokens]:
        for chunk in _chunks(text):
            digest.update(chunk)
            yield _tokens_of(chunk)

    try:
        is_there = path.exists()
    except OSError:  # `write` reports it
        is_there = False
    if is_there:
        deque(hashed(), maxlen=0)
    else:  # in one pass, so that the hash fits the tokens even if the text changes meanwhile
        write(path, hashed(), BYTES, digest.digest)
    found, made_from = read(path)
    if made_from != digest.digest():
        raise DataError(
            f"tokens ({tokens}) was made from another text than text ({text}). Delete the file, name another one, or leave "
            "text out."
        )
    return found


@dataclass(frozen=True)
class Windows:
    """Samples of a corpus, as a `regroup.data.Source`: `length` tokens, and for each the next one as its target.

    Sample i begins at token (first + i) * length. Neighbouring samples share one token, which is the last target of the former.
    """

    corpus: Corpus
    length: int
    first: int
    count: int

    def __len__(self) -> int:
        return self.count

    def fetch(self, ids: torch.Tensor) -> Any:
        """Return x and y, each [len(ids), length], int64. Raises DataError for a token outside the vocabulary."""
        starts = (ids.numpy() + self.first) * self.length
        rows = self.corpus.tokens[starts[:, None] + np.arange(self.length + 1)]
        if rows.max() >= self.corpus.vocabulary:
            raise DataError(
                f"A token is {int(rows.max())}, and the vocabulary has {self.corpus.vocabulary}: the token file is damaged. "
                "Delete it and make it again."
            )
        both = torch.from_numpy(rows.astype(np.int64))
        return Batch(both[:, :-1].contiguous(), both[:, 1:].contiguous())


def split(found: Corpus, length: int, held_out: float, most: int) -> tuple[Windows, Windows]:
    """Return the samples for training and those for evaluation. Raises DataError for too few tokens.

    The latter are the last share `held_out` of all samples, at most `most`.
    """
    total = (len(found.tokens) - 1) // length
    last = min(most, max(1, int(total * held_out)))
    if total < 2:
        raise DataError(
            f"The text has {len(found.tokens)} tokens, and length is {length}: at least {2 * length + 1} are needed, for a "
            "sample to train on and one to evaluate on. Give a longer text, or lower task.length."
        )
    return Windows(found, length, 0, total - last), Windows(found, length, total - last, last)


def _tokens_of(chunk: bytes) -> Tokens:
    """Return the tokens of a part of a text, which are its bytes."""
    return np.frombuffer(chunk, np.uint8).astype(np.uint16)


def _chunks(text: str | None) -> Iterator[bytes]:
    """Yield the text in chunks. Raises DataError if it is empty or cannot be read."""
    files = [Path(text)] if text is not None else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    is_empty = True
    for path in files:
        try:
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    is_empty = False
                    yield chunk
        except OSError as error:
            raise DataError(f"text ({path}) cannot be read ({error.strerror}). Give the path of a text file.") from None
    if is_empty:
        raise DataError(f"text ({text or 'the standard library'}) is empty. Give a text file with content.")

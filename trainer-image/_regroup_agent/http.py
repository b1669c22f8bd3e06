"""The little HTTP/1.1 that the agent needs, over asyncio streams: requests with a bearer token, answers, a stream of lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

MAX_HEAD_BYTES = 32 * 1024
MAX_ANSWER_BYTES = 64 * 1024


class HttpError(Exception):
    """The peer does not speak HTTP/1.1 as we know it."""


class Answer:
    """Status and headers (names in lower case) of an answer."""

    def __init__(self, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers

    @property
    def chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "").lower()


def request(method: str, host: str, target: str, token: str) -> bytes:
    """Return the part of a request before its body, whose pieces follow as `chunk`s."""
    lines = [
        f"{method} {target} HTTP/1.1",
        f"Host: {host}",
        f"Authorization: Bearer {token}",
        "User-Agent: regroup-agent",
        "Content-Type: application/x-ndjson",
        "Transfer-Encoding: chunked",
    ]
    return "\r\n".join([*lines, "", ""]).encode("ascii", "replace")


def chunk(data: bytes) -> bytes:
    """Return a piece of a streamed body; an empty one ends it."""
    return b"%x\r\n%b\r\n" % (len(data), data)


async def read_head(reader: asyncio.StreamReader) -> Answer:
    """Read an answer up to its body. Raises HttpError, EOFError."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise HttpError("the answer's header is too long") from None
    first, *lines = head.decode("latin-1").split("\r\n")
    parts = first.split(" ", 2)
    if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdigit():
        raise HttpError(f"not an HTTP answer: {first[:80]!r}")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    return Answer(int(parts[1]), headers)


async def read_body(reader: asyncio.StreamReader, answer: Answer) -> bytes:
    """Read the whole body of an answer; what is beyond MAX_ANSWER_BYTES is an HttpError."""
    if answer.status in (204, 304):
        return b""
    if answer.chunked:
        body = b""
        async for piece in _chunks(reader):
            body += piece
            if len(body) > MAX_ANSWER_BYTES:
                raise HttpError("the answer is too long")
        return body
    length = answer.headers.get("content-length", "0")
    if not length.isdigit() or int(length) > MAX_ANSWER_BYTES:
        raise HttpError(f"the answer's content-length is {length[:40]}")
    return await reader.readexactly(int(length))


async def read_lines(reader: asyncio.StreamReader, answer: Answer, max_bytes: int) -> AsyncIterator[bytes]:
    """Yield the lines of a streamed body, without their newline, as they come. Ends with the stream."""
    rest = b""
    async for piece in _chunks(reader) if answer.chunked else _pieces(reader):
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > max_bytes:
            raise HttpError(f"a line is longer than {max_bytes} bytes")
        for line in lines:
            yield line


def sentence(body: bytes) -> str:
    """Return the `error` of an answer's JSON body, or what there is of it."""
    try:
        data = json.loads(body)
        if isinstance(data, dict) and isinstance(data.get("error"), str):
            return str(data["error"])
    except ValueError:
        pass
    return body[:200].decode("utf-8", "replace").strip()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        size_line = await reader.readline()
        if not size_line:
            return
        try:
            size = int(size_line.split(b";")[0], 16)
        except ValueError:
            raise HttpError("a chunk has no size") from None
        if size == 0:
            while (await reader.readline()).strip():
                pass
            return
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _pieces(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        piece = await reader.read(1 << 16)
        if not piece:
            return
        yield piece

"""Takes the status that a training program posts by Kubeflow's progress protocol (KEP-2779), on 127.0.0.1.

A program that finds KUBEFLOW_TRAINER_SERVER_URL in its environment posts there, as Hugging Face's Trainer does by itself. The
agent gives each process of a script this address, and the path of a file with a token of its own. Anybody in the pod's network can
connect. So a body is read only after such a token, and all requests together have bounded time and memory. The program waits for
the answer, so it comes at once.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from regroup.protocol import codec

from .script_progress import Words

URL, TOKEN, CA_CERT = "KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_TOKEN", "KUBEFLOW_TRAINER_SERVER_CA_CERT"
HOST = "127.0.0.1"
MAX_HEAD_BYTES = 8 << 10
MAX_BODY_BYTES = 64 << 10
MAX_METRICS = 1000
MAX_OPEN = 16
"""Connections at one time. A program has one of them for a moment every few seconds. As many more are told to try again later."""
REQUEST_S = 3.0
"""Time for a whole request. Hugging Face's Trainer waits 5 s for its answer, and trains no step meanwhile."""
STEP, TOTAL, LOSSES = "current_step", "total_steps", ("loss", "train_loss")
"""Names of metrics, as transformers 5 writes them. `train_loss` is the mean of a run, which it adds at the end."""
_PHRASES = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 405: "Method Not Allowed", 411: "Length Required",
            413: "Content Too Large", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}  # fmt: skip


class Refused(Exception):
    """A request that is not taken. Its text is one sentence for the program."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def reporting_env(environ: Mapping[str, str], url: str, token_file: str) -> dict[str, str]:
    """Return a process's environment with the address and the token file of this agent.

    A user's own address wins: then nothing changes. A proxy must not get what is for 127.0.0.1.
    """
    if environ.get(URL):
        return dict(environ)
    out = {name: value for name, value in environ.items() if name != CA_CERT} | {URL: url, TOKEN: token_file}
    names = [name for name in ("no_proxy", "NO_PROXY") if name in environ]
    if not names and any(name.lower().endswith("_proxy") for name in environ):
        names = ["no_proxy", "NO_PROXY"]
    for name in names:
        hosts = [host.strip() for host in environ.get(name, "").split(",") if host.strip()]
        out[name] = ",".join(hosts if HOST in hosts or "*" in hosts else [*hosts, HOST])
    return out


def trainer_status(body: bytes) -> Words:
    """Return what a posted status says. Raises Refused.

    The estimate of the remaining time is not used: after a resume it counts the steps before it as well, and is far too short.
    """
    try:
        status = codec.parse(body)
    except codec.ProtocolError as error:
        raise Refused(400, str(error)) from None
    status = status.get("trainerStatus") if isinstance(status, dict) else None
    if not isinstance(status, dict):
        raise Refused(400, "The body has no object trainerStatus.")
    for name in ("progressPercentage", "estimatedRemainingSeconds"):
        value = status.get(name)
        if value is not None and _number(value) is None:
            raise Refused(400, f"trainerStatus.{name} is no finite number.")
    percent = _number(status.get("progressPercentage"))
    if percent is not None and not 0 <= percent <= 100:
        raise Refused(400, "trainerStatus.progressPercentage is not from 0 to 100.")
    metrics = _metrics(status.get("metrics"))
    losses = [value for name in LOSSES if (value := metrics.get(name)) is not None]
    return Words(
        step=_whole(metrics.get(STEP)),
        total=_whole(metrics.get(TOTAL)),
        percent=percent,
        loss=losses[0] if losses else None,
    )


def _metrics(listed: Any) -> dict[str, float]:
    """Return the metrics that are numbers. A number may be written as a text, and `nan` is a loss."""
    if listed is None:
        return {}
    if not isinstance(listed, list) or len(listed) > MAX_METRICS:
        raise Refused(400, f"trainerStatus.metrics is no list of at most {MAX_METRICS}.")
    out: dict[str, float] = {}
    for one in listed:
        name, value = (one.get("name"), one.get("value")) if isinstance(one, dict) else (None, None)
        if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise Refused(400, "An entry of trainerStatus.metrics has no name, or no value.")
        try:
            out[name] = float(value)
        except (ValueError, OverflowError):
            continue  # a metric of the user's own, which need not be a number
    return out


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None and math.isfinite(value) and value == int(value) else None


class ProgressServer:
    """The endpoint of one agent. `on_words(local_rank, incarnation, words)` gets what a process has posted."""

    def __init__(self, directory: str, on_words: Callable[[int, int, Words], None]) -> None:
        """Keep the token files in `directory`, which belongs to the pod."""
        self._directory, self._on_words = Path(directory), on_words
        self._tokens: dict[int, tuple[str, int]] = {}
        """Token and incarnation of each local rank's present process."""
        self._num_open = 0
        self._server: asyncio.AbstractServer | None = None
        self.url = ""
        """The address; empty: the endpoint does not listen."""

    async def start(self) -> None:
        """Listen on a free port. Raises OSError."""
        self._server = await asyncio.start_server(self._serve, HOST, 0, limit=MAX_HEAD_BYTES, backlog=MAX_OPEN)
        self.url = f"http://{HOST}:{self._server.sockets[0].getsockname()[1]}/"

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    def issue(self, local_rank: int, incarnation: int) -> str:
        """Write a new process's token to its file, and return the path. The token of the process before it ends. Raises OSError."""
        path, token = self._directory / f"progress-token-{local_rank}", secrets.token_urlsafe(32)
        path.unlink(missing_ok=True)  # its mode would stay as it was
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(token)
        self._tokens[local_rank] = (token, incarnation)
        return str(path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._num_open >= 2 * MAX_OPEN:
            writer.transport.abort()
            return
        is_full = self._num_open >= MAX_OPEN
        self._num_open += 1
        try:
            await asyncio.wait_for(self._answer(reader, writer, is_full), REQUEST_S)
        except (asyncio.TimeoutError, EOFError, OSError):
            writer.transport.abort()
        finally:
            self._num_open -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_full: bool) -> None:
        status, why = 200, ""
        try:
            self._on_words(*await self._request(reader, is_full))
        except Refused as error:
            status, why = error.status, str(error)
        text = why.encode("ascii", "replace")
        head = f"HTTP/1.1 {status} {_PHRASES[status]}\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode("ascii") + text)
        await writer.drain()

    async def _request(self, reader: asyncio.StreamReader, is_full: bool) -> tuple[int, int, Words]:
        """Read one request, and return who posted what. Raises Refused, EOFError, OSError."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise Refused(431, f"The head has more than {MAX_HEAD_BYTES} bytes.") from None
        if is_full:
            raise Refused(503, f"The agent has {MAX_OPEN} other connections. Try again later.")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {
            name.strip().lower(): value.strip()
            for name, colon, value in (line.partition(":") for line in lines)
            if colon
        }
        method = first.split(" ")[0]
        if method not in ("POST", "PUT", "PATCH"):
            raise Refused(405, "Send a POST.")
        process = self._process_of(headers.get("authorization", ""))
        length = headers.get("content-length", "")
        if not (length.isascii() and length.isdigit()) or len(length) > 18:
            raise Refused(411, "Send the length of the body (Content-Length).")
        if int(length) > MAX_BODY_BYTES:
            raise Refused(413, f"The body has more than {MAX_BODY_BYTES} bytes.")
        return (*process, trainer_status(await reader.readexactly(int(length))))

    def _process_of(self, authorization: str) -> tuple[int, int]:
        """Return local rank and incarnation of the process whose token a request carries. Raises Refused."""
        scheme, _, token = authorization.partition(" ")
        given = token.strip().encode("latin-1", "replace")
        for local_rank, (known, incarnation) in self._tokens.items():
            if scheme.lower() == "bearer" and hmac.compare_digest(given, known.encode("ascii")):
                return local_rank, incarnation
        raise Refused(401, f"Send the token in the file that {TOKEN} names, as a bearer token.")

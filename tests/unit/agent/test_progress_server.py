"""The endpoint for Kubeflow's progress protocol: what it takes, and that nobody without a token gets anything of it."""

from __future__ import annotations

import asyncio
import json
import math
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from _regroup_agent import progress_server
from _regroup_agent.progress_server import (
    MAX_BODY_BYTES,
    MAX_HEAD_BYTES,
    MAX_OPEN,
    ProgressServer,
    Refused,
    reporting_env,
    trainer_status,
)
from _regroup_agent.script_progress import Words

URL, TOKEN, CA = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "TOKEN", "CA_CERT"))


def status(metrics: Any = None, **fields: Any) -> bytes:
    return json.dumps({"trainerStatus": fields if metrics is None else {**fields, "metrics": metrics}}).encode()


def metrics(**values: Any) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in values.items()]


@pytest.mark.parametrize(
    ("body", "want"),
    [
        pytest.param(
            status(
                metrics(loss="0.5", current_step="40", total_steps="60", current_epoch="1.5"),
                progressPercentage=66,
                estimatedRemainingSeconds=3,
                lastUpdatedTime="2026-01-01T00:00:00+00:00",
            ),
            Words(40, 60, 66.0, 0.5),
            id="as Hugging Face's Trainer writes it",
        ),
        pytest.param(status(metrics(total_steps="60"), progressPercentage=0), Words(None, 60, 0.0), id="its first one"),
        pytest.param(status(metrics(train_loss="0.7"), progressPercentage=100), Words(percent=100.0, loss=0.7), id="its last one"),
        pytest.param(status(metrics(current_step=40.0, loss=1)), Words(40, loss=1.0), id="numbers that are not texts"),
        pytest.param(status(metrics(loss="nan", current_step="4")), Words(4, loss=math.nan), id="a loss that is no number"),
        pytest.param(status(metrics(current_step="inf", total_steps="4.5")), Words(), id="steps that are none"),
        pytest.param(status(metrics(phase="warmup", current_step="4")), Words(4), id="a metric that is a text"),
        pytest.param(status(), Words(), id="nothing"),
    ],
)  # fmt: skip
def test_status(body: bytes, want: Words) -> None:
    assert repr(trainer_status(body)) == repr(want)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        pytest.param(b"", "The message is not JSON", id="empty"),
        pytest.param(b"\xff\xfe", "The message is not JSON", id="no text"),
        pytest.param(b"[" * 60_000, "The message is not JSON", id="deep"),
        pytest.param(b"[]", "The body has no object trainerStatus.", id="a list"),
        pytest.param(b'{"trainerStatus": 3}', "The body has no object trainerStatus.", id="a number"),
        pytest.param(b'{"trainerStatus": {"progressPercentage": NaN}}', "The message is not JSON", id="NaN"),
        pytest.param(b'{"trainerStatus": {"progressPercentage": 1e999}}', "trainerStatus.progressP", id="infinite"),
        pytest.param(b'{"trainerStatus": {"estimatedRemainingSeconds": 1' + b"0" * 400 + b"}}", "trainerStatus.e", id="huge"),
        pytest.param(status(progressPercentage=True), "trainerStatus.progressPercentage is no finite number.", id="a truth"),
        pytest.param(status(progressPercentage=101), "trainerStatus.progressPercentage is not from 0 to 100.", id="a share"),
        pytest.param(status({"loss": 1}), "trainerStatus.metrics is no list of at most 1000.", id="metrics as an object"),
        pytest.param(status([{}] * 1001), "trainerStatus.metrics is no list of at most 1000.", id="many metrics"),
        pytest.param(status([{"name": "loss"}]), "An entry of trainerStatus.metrics has no name, or no value.", id="no value"),
        pytest.param(status([3]), "An entry of trainerStatus.metrics has no name, or no value.", id="no metric"),
    ],
)  # fmt: skip
def test_odd_bodies_are_refused(body: bytes, why: str) -> None:
    with pytest.raises(Refused) as error:
        trainer_status(body)
    assert str(error.value).startswith(why)
    assert error.value.status == 400


@pytest.mark.parametrize(
    ("environ", "changed"),
    [
        pytest.param({}, {URL: "http://here/", TOKEN: "/t"}, id="no proxy"),
        pytest.param({URL: "https://mine/", TOKEN: "/mine"}, {}, id="the user's own address wins"),
        pytest.param({URL: ""}, {URL: "http://here/", TOKEN: "/t"}, id="an empty one does not"),
        pytest.param({CA: "/ca"}, {URL: "http://here/", TOKEN: "/t", CA: None}, id="no CA"),
        pytest.param(
            {"https_proxy": "http://p", "NO_PROXY": ".svc, 10.0.0.0/8"},
            {URL: "http://here/", TOKEN: "/t", "NO_PROXY": ".svc,10.0.0.0/8,127.0.0.1"},
            id="the hosts without a proxy stay",
        ),
        pytest.param(
            {"HTTP_PROXY": "http://p"},
            {URL: "http://here/", TOKEN: "/t", "no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"},
            id="a proxy for everything",
        ),
        pytest.param({"no_proxy": "*"}, {URL: "http://here/", TOKEN: "/t"}, id="no proxy for anything"),
        pytest.param({"no_proxy": "127.0.0.1,x"}, {URL: "http://here/", TOKEN: "/t"}, id="already there"),
    ],
)
def test_environment(environ: dict[str, str], changed: dict[str, str | None]) -> None:
    got = reporting_env(environ, "http://here/", "/t")
    assert got == {name: value for name, value in {**environ, **changed}.items() if value is not None}


# --- over the socket -----------------------------------------------------------------------------------------------

Told = list[tuple[int, int, Words]]


def served(directory: Path, act: Callable[[ProgressServer, Told], Awaitable[None]]) -> None:
    async def run() -> None:
        told: Told = []
        server = ProgressServer(str(directory), lambda *said: told.append(said))
        await server.start()
        try:
            await act(server, told)
        finally:
            server.close()

    asyncio.run(run())


def request(body: bytes, token: str = "", *lines: str, method: str = "POST", length: int | None = None) -> bytes:
    head = [f"{method} / HTTP/1.1", "Host: x", f"Authorization: Bearer {token}", *lines]
    if length != -1:
        head.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*head, "", ""]).encode() + body


async def call(server: ProgressServer, data: bytes) -> bytes:
    """Return the whole answer; empty if the connection was cut."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.split(":")[2].rstrip("/")))
    try:
        writer.write(data)
        return await reader.read()
    except OSError:
        return b""
    finally:
        writer.close()


BODY = status(metrics(current_step="4"))


def test_each_process_has_a_token_of_its_own_that_ends_with_it(tmp_path: Path) -> None:
    async def act(server: ProgressServer, told: Told) -> None:
        paths = [server.issue(rank, 1 + rank) for rank in (0, 1)]
        tokens = [Path(path).read_text() for path in paths]
        assert [stat.S_IMODE(Path(path).stat().st_mode) for path in paths] == [0o600, 0o600]
        assert len(set(tokens)) == 2
        for token in tokens:
            assert (await call(server, request(BODY, token))).startswith(b"HTTP/1.1 200 OK\r\n")
        assert told == [(0, 1, Words(4)), (1, 2, Words(4))]
        assert server.issue(0, 3) == paths[0]
        assert (await call(server, request(BODY, tokens[0]))).startswith(b"HTTP/1.1 401 ")
        assert (await call(server, request(BODY, Path(paths[0]).read_text()))).startswith(b"HTTP/1.1 200 ")
        assert told[2:] == [(0, 3, Words(4))]

    served(tmp_path, act)


def test_token_file_that_somebody_has_put_there_is_replaced(tmp_path: Path) -> None:
    async def act(server: ProgressServer, told: Told) -> None:  # noqa: ARG001
        elsewhere = tmp_path / "elsewhere"
        (tmp_path / "progress-token-0").symlink_to(elsewhere)
        path = Path(server.issue(0, 1))
        assert not path.is_symlink()
        assert not elsewhere.exists()

    served(tmp_path, act)


@pytest.mark.parametrize(
    ("data", "status_line"),
    [
        pytest.param(request(BODY, "TOKENx"), b"HTTP/1.1 401 ", id="a wrong token"),
        pytest.param(request(BODY), b"HTTP/1.1 401 ", id="an empty token"),
        pytest.param(request(BODY, "\u00e9"), b"HTTP/1.1 401 ", id="a token of other characters"),
        pytest.param(request(BODY, "TOKEN").replace(b"Bearer", b"Basic"), b"HTTP/1.1 401 ", id="another scheme"),
        pytest.param(b"POST / HTTP/1.1\r\n\r\n", b"HTTP/1.1 401 ", id="no headers"),
        pytest.param(request(BODY, "TOKEN", method="GET"), b"HTTP/1.1 405 ", id="a GET"),
        pytest.param(request(BODY, "TOKEN", length=-1), b"HTTP/1.1 411 ", id="no length"),
        pytest.param(request(BODY, "TOKEN", length=-5), b"HTTP/1.1 411 ", id="a negative length"),
        pytest.param(request(b"", "TOKEN", length=MAX_BODY_BYTES + 1), b"HTTP/1.1 413 ", id="a huge body"),
        pytest.param(request(b"", "TOKEN", length=10**40), b"HTTP/1.1 411 ", id="a length that is no length"),
        pytest.param(request(b"x" * MAX_BODY_BYTES, "TOKEN"), b"HTTP/1.1 400 ", id="the largest body, odd"),
        pytest.param(request(BODY, "TOKEN", "X: " + "x" * MAX_HEAD_BYTES * 4), b"", id="a huge head"),
        pytest.param(b"\x16\x03\x01" + b"\0" * 60 + b"\r\n\r\n", b"HTTP/1.1 405 ", id="TLS"),
    ],
)
def test_what_is_refused(tmp_path: Path, data: bytes, status_line: bytes) -> None:
    async def act(server: ProgressServer, told: Told) -> None:
        token = Path(server.issue(0, 1)).read_text()
        answer = await call(server, data.replace(b"TOKEN", token.encode()))
        assert answer.startswith(status_line), answer
        assert b" 200 " not in answer
        assert told == []
        assert b" 200 " in await call(server, request(BODY, token)), "the next one is served"

    served(tmp_path, act)


def test_slow_requests_are_cut_and_leave_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_server, "REQUEST_S", 0.2)

    async def act(server: ProgressServer, told: Told) -> None:
        token = Path(server.issue(0, 1)).read_text()
        slow = [asyncio.ensure_future(call(server, request(b"", token, length=100))) for _ in range(MAX_OPEN)]
        answers = await asyncio.wait_for(asyncio.gather(*slow), 10.0)
        assert answers == [b""] * MAX_OPEN
        assert b" 200 " in await call(server, request(BODY, token))
        assert told == [(0, 1, Words(4))]

    served(tmp_path, act)


@pytest.mark.parametrize(
    ("num_held", "answer"),
    [
        pytest.param(MAX_OPEN - 1, b"HTTP/1.1 200 OK", id="one is free"),
        pytest.param(MAX_OPEN, b"HTTP/1.1 503 Service Unavailable", id="a sentence that says to try again"),
        pytest.param(2 * MAX_OPEN, b"", id="cut at once"),
    ],
)
def test_connections_beyond_the_bound_are_refused(tmp_path: Path, num_held: int, answer: bytes) -> None:
    async def act(server: ProgressServer, told: Told) -> None:
        port = int(server.url.split(":")[2].rstrip("/"))
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(num_held)]
        for _, writer in held:
            writer.write(b"POST")
            await writer.drain()
        token = Path(server.issue(0, 1)).read_text()
        said = await asyncio.wait_for(call(server, request(BODY, token)), 2.0)
        assert said.split(b"\r\n")[0] == answer
        assert told == ([(0, 1, Words(4))] if b" 200 " in answer else [])
        for _, writer in held:
            writer.close()

    served(tmp_path, act)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_another_user_of_the_pod_cannot_read_the_token(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    path = ProgressServer(str(tmp_path), print).issue(0, 1)
    child = os.fork()
    if child == 0:
        os.setgid(65534)
        os.setuid(65534)
        try:
            Path(path).read_text()
        except PermissionError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

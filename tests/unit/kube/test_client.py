"""What answers of the API server become."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from regroup_operator.api import UnavailableError
from regroup_operator.kube.client import MAX_RETRY_AFTER_S, PODS, ApiError, Client, error_of

FULL = json.dumps({"kind": "Status", "reason": "TooManyRequests", "message": "Too many requests."}).encode()


@pytest.mark.parametrize(
    ("status", "retry_after", "want_s"),
    [
        pytest.param(429, "1", 1.0, id="the API server's own"),
        pytest.param(503, "7", 7.0, id="it starts"),
        pytest.param(429, "86400", MAX_RETRY_AFTER_S, id="bounded"),
        pytest.param(429, "", 0.0, id="none"),
        pytest.param(429, "Wed, 25 Nov 2026 10:00:00 GMT", 0.0, id="a date"),
        pytest.param(429, "-3", 0.0, id="nonsense"),
        pytest.param(409, "1", None, id="an answer that is a verdict"),
    ],
)
def test_time_to_wait_is_part_of_the_error(status: int, retry_after: str, want_s: float | None) -> None:
    error = error_of(status, FULL, retry_after=retry_after)
    assert (error.retry_after_s if isinstance(error, UnavailableError) else None) == want_s


def test_header_of_requests_and_watches_is_read() -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=429, body=FULL, headers={"Retry-After": "3"})

    async def scenario() -> list[float]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", refuse)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        configuration = Configuration()
        configuration.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
        client = Client(configuration)
        waits_s = []
        try:
            for ask in (client.list(PODS), anext(client.watch(PODS, resource_version="1"))):
                with pytest.raises(ApiError) as caught:
                    await ask
                assert isinstance(caught.value, UnavailableError)
                waits_s.append(caught.value.retry_after_s)
        finally:
            await client.close()
            await runner.cleanup()
        return waits_s

    assert asyncio.run(scenario()) == [3.0, 3.0]


@pytest.mark.parametrize("timeout_s", [0.0, -1.5])
def test_request_without_time_is_not_sent(timeout_s: float) -> None:
    """The HTTP client takes both for no deadline."""

    async def scenario() -> None:
        client = Client(Configuration(host="http://127.0.0.1:1"))
        codes: list[int] = []
        client.observe = lambda _verb, _resource, code, _seconds: codes.append(code)
        try:
            with pytest.raises(UnavailableError, match="No time is left for GET /api/v1/namespaces/team/pods/a"):
                await client.get(PODS, "team", "a", timeout_s=timeout_s)
        finally:
            await client.close()
        assert codes == []

    asyncio.run(scenario())

"""The informer's copy, and what it does when the API server forgets where it was (the network's edge is played here)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from harness.polling import until_async
from regroup_operator.kube.client import Client, Resource
from regroup_operator.kube.informer import Copy, Informer

THINGS = Resource("test.dev", "v1", "things")
Change = tuple[str | None, str | None]


def thing(name: str, version: int, text: str = "") -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "n", "resourceVersion": str(version)}, "text": text}


def slim(item: Mapping[str, Any], previous: str | None) -> str | None:  # noqa: ARG001
    return None if item["text"] == "boring" else f"{item['metadata']['name']}:{item['text']}"


def make_copy() -> tuple[Copy[str], list[Change]]:
    changes: list[Change] = []
    return Copy(slim, lambda old, new: changes.append((old, new))), changes


def test_replace_reports_what_vanished_and_what_changed_only() -> None:
    copy, changes = make_copy()
    copy.replace([thing("a", 1, "x"), thing("b", 2, "x"), thing("c", 3, "x")], "3")
    changes.clear()
    copy.replace([thing("a", 1, "x"), thing("b", 5, "y")], "6")
    assert changes == [("b:x", "b:y"), ("c:x", None)]
    assert copy.resource_version == "6"


def test_events_move_the_version_and_equal_records_are_silent() -> None:
    copy, changes = make_copy()
    copy.replace([], "1")
    copy.apply({"type": "ADDED", "object": thing("a", 2, "x")})
    copy.apply({"type": "MODIFIED", "object": thing("a", 3, "x")})
    copy.apply({"type": "MODIFIED", "object": thing("a", 4, "y")})
    copy.apply({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}})
    assert changes == [(None, "a:x"), ("a:x", "a:y")]
    assert copy.resource_version == "9"
    copy.apply({"type": "DELETED", "object": thing("a", 10, "y")})
    copy.apply({"type": "DELETED", "object": thing("a", 11, "y")})
    assert changes[2:] == [("a:y", None)]


def test_record_that_becomes_uninteresting_vanishes() -> None:
    copy, changes = make_copy()
    copy.apply({"type": "ADDED", "object": thing("a", 1, "boring")})
    copy.apply({"type": "MODIFIED", "object": thing("a", 2, "x")})
    copy.apply({"type": "MODIFIED", "object": thing("a", 3, "boring")})
    assert changes == [(None, "a:x"), ("a:x", None)]


class Server:
    """An API server of one collection that can be told to fail."""

    def __init__(self) -> None:
        self.things = [thing(f"t{n}", n + 1, "x") for n in range(5)]
        self.watches: list[str] = []
        self.answers: list[str] = []
        """For each watch in turn: gone (HTTP 410), expired (410 inside the stream), cut (connection lost), end, late (end after a
        second), event (one, then end), {...} (this, then end), hang."""
        self.num_pages = 0
        self.now_s = 100.0
        self.waits_s: list[float] = []

    async def sleep(self, wait_s: float) -> None:
        """Stand in for asyncio.sleep of the informer."""
        self.waits_s.append(round(wait_s, 3))

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            return await self._watch(request)
        self.num_pages += 1
        begin, limit = int(request.query.get("continue") or 0), int(request.query["limit"])
        rest = str(begin + limit) if begin + limit < len(self.things) else ""
        version = max(int(item["metadata"]["resourceVersion"]) for item in self.things)
        metadata = {"resourceVersion": str(version), "continue": rest}
        return web.json_response({"metadata": metadata, "items": self.things[begin : begin + limit]})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.watches.append(request.query["resourceVersion"])
        answer = self.answers.pop(0) if self.answers else "hang"
        status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
        if answer == "gone":
            return web.json_response(status, status=410)
        response = web.StreamResponse()
        await response.prepare(request)
        if answer == "expired":
            await response.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
        elif answer == "cut":
            await response.write(json.dumps({"type": "ADDED", "object": thing("new", 50, "x")}).encode() + b"\n")
            assert request.transport is not None
            request.transport.abort()
        elif answer == "event":
            await response.write(json.dumps({"type": "ADDED", "object": thing("new", 50, "x")}).encode() + b"\n")
        elif answer.startswith("{"):
            await response.write(answer.encode() + b"\n")
        elif answer == "late":
            self.now_s += 1.0
        elif answer == "hang":
            await asyncio.sleep(60)
        return response


async def informed(server: Server, num_watches: int, **kwargs: Any) -> tuple[Informer[str], list[Change]]:
    """Run an informer of pages of two until `num_watches` watches were opened."""
    app = web.Application()
    app.router.add_get("/apis/test.dev/v1/things", server.serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = Client(Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}"))
    changes: list[Change] = []
    informer = Informer[str](client, THINGS, slim, lambda old, new: changes.append((old, new)), page_size=2, **kwargs)
    task = asyncio.create_task(informer.run())
    try:
        await until_async(lambda: len(server.watches) >= num_watches, f"{num_watches} watches")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()
        await runner.cleanup()
    return informer, changes


def test_list_comes_in_pages_and_the_watch_begins_where_it_ended() -> None:
    server = Server()
    informer, changes = asyncio.run(informed(server, 1))
    assert (server.num_pages, informer.num_lists, server.watches) == (3, 1, ["5"])
    assert [new for _, new in changes] == [f"t{n}:x" for n in range(5)]


def test_410_lists_again_and_reports_what_vanished_meanwhile() -> None:
    for answer in ("gone", "expired"):
        server = Server()
        server.answers = [answer]

        async def scenario(server: Server = server) -> tuple[Informer[str], list[Change]]:
            async def forget() -> None:
                await until_async(lambda: server.watches, "a watch", every_s=0.001)
                server.things = server.things[1:]

            task = asyncio.create_task(forget())
            result = await informed(server, 2)
            await task
            return result

        informer, changes = asyncio.run(scenario())
        assert informer.num_lists == 2, answer
        assert changes[-1] == ("t0:x", None), answer


def test_watch_that_ends_in_order_goes_on_where_it_was_without_listing_again() -> None:
    server = Server()
    server.answers = ["end", "end"]
    informer, _ = asyncio.run(informed(server, 3))
    assert (informer.num_lists, server.watches) == (1, ["5", "5", "5"])


@pytest.mark.parametrize(
    ("answers", "waits_s"),
    [
        pytest.param(["end"] * 8, [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0], id="at once, again and again"),
        pytest.param(["end", "late", "end"], [0.2, 0.2], id="one that lasted is none of these"),
        pytest.param(["end", "event", "end"], [0.2, 0.2], id="nor one that had an event"),
        pytest.param(["gone", "end", "gone"], [0.2, 0.4, 0.8], id="a failure like others"),
    ],
)
def test_watch_that_ends_at_once_without_an_event_is_begun_again_with_back_off(
    answers: list[str], waits_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regroup_operator.kube.informer.random.uniform", lambda *_: 1.0)
    server = Server()
    server.answers = list(answers)
    asyncio.run(informed(server, len(answers) + 1, clock=lambda: server.now_s, sleep=server.sleep))
    assert server.waits_s == waits_s


def test_lost_connection_lists_again_because_the_server_may_have_another_history() -> None:
    server = Server()
    server.answers = ["cut"]
    informer, changes = asyncio.run(informed(server, 2))
    assert (informer.num_lists, server.watches) == (2, ["5", "5"])
    assert changes[-2:] == [(None, "new:x"), ("new:x", None)]


def test_answer_to_a_create_is_known_before_its_event_and_the_event_is_no_news() -> None:
    copy, changes = make_copy()
    copy.replace([], "7")
    copy.made(thing("a", 9, "x"))
    assert changes == [(None, "a:x")]
    assert copy.resource_version == "7", "the watch has not come so far"
    copy.apply({"type": "ADDED", "object": thing("b", 8, "x")})
    copy.apply({"type": "ADDED", "object": thing("a", 9, "x")})
    assert changes == [(None, "a:x"), (None, "b:x")]


def test_answer_to_a_create_that_the_watch_has_passed_changes_nothing() -> None:
    """Else a pod that is gone already would stay in the copy until the next list."""
    copy, changes = make_copy()
    copy.replace([], "7")
    copy.apply({"type": "ADDED", "object": thing("a", 9, "x")})
    copy.apply({"type": "DELETED", "object": thing("a", 10, "x")})
    copy.made(thing("a", 9, "x"))
    assert changes == [(None, "a:x"), ("a:x", None)]
    copy.apply({"type": "ADDED", "object": thing("b", 11, "x")})
    copy.apply({"type": "MODIFIED", "object": thing("b", 12, "y")})
    copy.made(thing("b", 11, "x"))
    assert copy.items["n", "b"] == "b:y"


@pytest.mark.parametrize(
    "event",
    [
        pytest.param({"type": "MODIFIED"}, id="without an object"),
        pytest.param({"object": thing("t0", 60, "y")}, id="without a type"),
        pytest.param({"type": "MODIFIED", "object": {"metadata": {"resourceVersion": "60"}}}, id="without a name"),
        pytest.param({"type": "BOOKMARK", "object": {}}, id="without metadata"),
    ],
)
def test_malformed_event_has_everything_listed_again(event: dict[str, Any]) -> None:
    """It ended the informer's task, and with it the operator."""
    server = Server()
    server.answers = [json.dumps(event)]
    informer, _ = asyncio.run(informed(server, 2, sleep=server.sleep))
    assert informer.num_lists == 2
    assert len(server.waits_s) == 1, "after a pause"


def test_object_that_cannot_be_read_stays_as_it_was_and_others_are_followed() -> None:
    copy, changes = make_copy()
    copy.replace([thing("a", 1, "x"), thing("b", 2, "x")], "2")
    copy.apply({"type": "MODIFIED", "object": {"metadata": thing("a", 3)["metadata"]}})
    copy.apply({"type": "MODIFIED", "object": thing("b", 4, "y")})
    assert copy.items == {("n", "a"): "a:x", ("n", "b"): "b:y"}
    copy.replace([{"metadata": thing("a", 3)["metadata"]}, {}, thing("b", 5, "z")], "5")
    assert copy.items == {("n", "a"): "a:x", ("n", "b"): "b:z"}
    assert (None, "b:x") in changes

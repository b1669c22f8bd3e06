"""Reports and requests that no agent of ours would send: each is refused with one sentence or taken, none is a bug, and from
whatever was taken a plan can be made, whose status its schema takes."""

from __future__ import annotations

import copy
import json
import random
import re
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import pytest
import yarl

from harness.polling import until_async
from regroup.protocol import codec
from regroup.protocol.codec import ProtocolError
from regroup.protocol.wire import Adopted, Changed, Draining, Fault, Finished, Hello, Progress, Report
from regroup_operator.api import parse_job, parse_status
from regroup_operator.api.crd import custom_resource_definition
from regroup_operator.endpoint.sessions import apply_report
from regroup_operator.model.plan import Clock, JobMemory
from regroup_operator.model.records import Observation, Settings
from regroup_operator.plan.facts.facts import Inputs
from regroup_operator.plan.failures.restarts import KUBECTL_LOGS
from regroup_operator.plan.job import plan_job
from tests.builders.plan import make_job
from tests.simulator.cluster import KEY
from tests.simulator.operators import WALL
from tests.simulator.world import World
from tests.unit.endpoint.reports import hello, make_report
from tests.unit.endpoint.serving import OTHER, PATH, POD, Server, sentence, with_server

BODIES: list[Any] = [
    Hello(1, 1), Changed(), Adopted(1, "self"), Progress(3, loss=0.5, checkpoint={"generation": 1, "step": 2, "directory": "d"}),
    Fault("exit", "gone", exit_code=1, local_rank=0, ended=1), Draining(20.0), Finished(60),
]  # fmt: skip
ODD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**53 - 1, 2**63 - 1, -2**63, 2**63, 10**400, -10**400, 1e308, -1e308, 9e99, 0.1, 3.0,
    "", "x", "\ud800", "\x00", "a" * 3000, [], {}, [[]], {"a": None},
    ["x"] * 50, {"type": "hello"}, "NaN", float("nan"), float("inf"),
    "<1e400>", "<-1e400>",
]  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in a JSON document."""
    found = [at]
    if isinstance(value, dict):
        found += [p for key, inner in value.items() for p in places(inner, (*at, key))]
    elif isinstance(value, list):
        found += [p for index, inner in enumerate(value) for p in places(inner, (*at, index))]
    return found


def mutated(rng: random.Random, document: Any) -> Any:
    """Return the document with some of its values replaced, removed, or others added."""
    document = json.loads(json.dumps(document))
    for _ in range(rng.randint(1, 3)):
        path = rng.choice([p for p in places(document) if p])
        parent = document
        for key in path[:-1]:
            parent = parent[key]
        what = rng.random()
        if what < 0.7:
            parent[path[-1]] = copy.deepcopy(rng.choice(ODD))
        elif what < 0.9 or not isinstance(parent, dict):
            del parent[path[-1]]
        else:
            parent[rng.choice(["x", "type", "body", "é"])] = copy.deepcopy(rng.choice(ODD))
        if not isinstance(document, dict) or not places(document)[1:]:
            break
    return document


def written(document: Any) -> str:
    """Return the document as JSON, with the numbers that Python writes no more: `1e400` is read as infinity."""
    return re.sub(r'"<(-?1e400)>"', r"\1", json.dumps(document))


def check_schema(value: Any, schema: dict[str, Any], at: str = "status") -> None:
    """Check what an API server checks of a status, and that nothing is in it for which JSON or 64 bits have no room."""
    kind = schema.get("type")
    if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
        assert abs(value) < (2**63 if kind == "integer" else 1e300), at
        assert kind != "integer" or isinstance(value, int), at
        assert schema.get("minimum", value) <= value <= schema.get("maximum", value), at
    assert kind is None or isinstance(value, _TYPES[kind]), (at, kind, value)
    assert not isinstance(value, bool) or kind in (None, "boolean"), at
    assert "enum" not in schema or value in schema["enum"], at
    if isinstance(value, dict):
        for key, inner in value.items():
            known = schema.get("properties", {}).get(key, schema.get("additionalProperties"))
            if isinstance(known, dict):
                check_schema(inner, known, f"{at}.{key}")
            else:
                assert schema.get("x-kubernetes-preserve-unknown-fields") or known, f"{at}.{key} would be dropped"
    if isinstance(value, list):
        for inner in value:
            check_schema(inner, schema.get("items", {}), f"{at}[]")


_TYPES: dict[str, Any] = {
    "integer": int, "number": (int, float), "string": str, "boolean": bool, "object": dict, "array": list
}  # fmt: skip
STATUS = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]


def decoded(text: str) -> Report | str:
    """Return the report, or the sentence that refuses it."""
    try:
        return Report.decode(text.encode())
    except ProtocolError as error:
        return str(error)


@pytest.mark.parametrize("seed", range(6))
def test_odd_reports_are_refused_or_taken_and_a_plan_can_be_made_from_what_was_taken(seed: int) -> None:
    rng, num_taken = random.Random(seed), 0
    world = World(None, make_job().with_replicas(2).elastic(1, 2), checkpoint_every=5)
    world.advance(3, step_every_s=0.1)
    assert world.operator is not None
    job, clock = parse_job(world.store.read()), Clock(world.now_s, WALL + world.now_s)
    pods = world.pods.list(KEY, job.uid)
    sessions = world.operator.registry.sessions(pods)
    session = sessions[pods[0].uid]
    valid = [
        codec.to_json(
            Report(job.uid, pods[0].uid, session.boot, session.condition, session.seal, session.store_port, body)
        )
        for body in BODIES
    ]
    for _ in range(1500):
        report = decoded(written(mutated(rng, rng.choice(valid))))
        if isinstance(report, str):
            assert report
            assert "\n" not in report
            continue
        if (report.pod_uid, report.job_uid) != (pods[0].uid, job.uid):
            continue  # the endpoint refuses it
        after = apply_report(session, report, world.now_s)
        if after is None:
            continue
        num_taken += 1
        observation = Observation(pods, {**sessions, pods[0].uid: after})
        plan = plan_job(Inputs(job, observation, JobMemory(), clock, Settings(), "u", "e", "i", KUBECTL_LOGS))
        stored = json.loads(json.dumps(plan.written, allow_nan=False))
        parse_status({"status": stored})
        check_schema(stored, STATUS)
    assert num_taken > 100, "most of them are so odd that they prove little"


@pytest.mark.parametrize(
    ("field", "number"),
    [
        ("loss", "1e400"), ("loss", "-1e400"), ("loss", "1e300"), ("samplesPerSecond", "1e308"), ("step", "-1"),
        ("step", "3.0"), ("step", "true"), ("step", "9007199254740992"), ("samples", "9223372036854775807"),
        ("totalSteps", "9223372036854775808"), ("ageMs", "1e999"), ("snapshotStep", "-1"),
    ],
)  # fmt: skip
def test_number_for_which_a_status_has_no_room_is_refused_with_its_field(field: str, number: str) -> None:
    text = json.dumps({**codec.to_json(make_report(Progress(3))), "body": {"type": "progress", "step": 3, field: "?"}})
    assert f"progress.{field} " in str(decoded(text.replace('"?"', number)))


@pytest.mark.parametrize("field", ["heard", "entered", "adopted", "generation", "incarnation", "step"])
@pytest.mark.parametrize("number", [2**63 - 1, 2**53, -1])
def test_generation_after_the_newest_that_is_named_has_room_in_a_status(field: str, number: int) -> None:
    report = codec.to_json(make_report(Changed()))
    report["condition"][field] = number
    assert decoded(json.dumps(report)) == f"report.condition.{field} ({number}) must be from 0 to 2^53 - 1."


TEXTS = [
    "",
    "0",
    "1",
    "2",
    "-1",
    "9" * 400,
    "\u0661",
    "x" * 3000,
    "%00",
    "a/../b",
    "\u00e9",
    "'\"<>",
    "boot",
    "null",
    "{}",
]
SEGMENTS = [
    "v1",
    "namespaces",
    "team",
    "pods",
    "stream",
    POD.name,
    OTHER.name,
    "..",
    "",
    "%2e%2e",
    "*",
    "\u00e9",
]
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "REPORT"]
SCHEMES = [
    "Bearer token-0",
    "Bearer token-1",
    "bearer token-0",
    "Bearer",
    "Bearer ",
    "Basic token-0",
    "",
    "Bearer " + "t" * 5000,
]


def odd_request(rng: random.Random, valid: list[Any]) -> tuple[str, str, dict[str, str], bytes]:
    """Return method, path with query, headers and body: mostly those of an agent, with something odd among them."""
    method, path, query = "POST", PATH, dict[str, str]()
    headers = {"Authorization": "Bearer token-0"}
    body = written(mutated(rng, rng.choice(valid))).encode()
    for odd in rng.sample(["method", "path", "query", "token", "headers", "body", "nothing"], 2):
        if odd == "method":
            method = rng.choice(METHODS)
        elif odd == "path":
            path = "/" + "/".join(quote(rng.choice(SEGMENTS), safe="%*.") for _ in range(rng.randint(0, 7)))
        elif odd == "query":
            query = {rng.choice(["boot", "protocol", "x"]): rng.choice(TEXTS) for _ in range(2)}
        elif odd == "token":
            headers["Authorization"] = rng.choice(SCHEMES)
        elif odd == "headers":
            headers[rng.choice(["Content-Type", "Accept", "X-Forwarded-For", "Range", "If-Match"])] = quote(
                rng.choice(TEXTS)
            )
        elif odd == "body":
            body = rng.choice([b"", b"\xff\xfe", rng.randbytes(200), b"[" * 50_000, b'{"a":' * 9000, b"0" * 70_000])
    text = "&".join(f"{key}={quote(value)}" for key, value in query.items())
    return method, f"{path}?{text}" if text else path, headers, body


@pytest.mark.parametrize("seed", range(3))
def test_odd_requests_get_a_sentence_and_disturb_nobody(seed: int) -> None:
    rng, statuses = random.Random(seed), set[int]()
    valid = [codec.to_json(make_report(body)) for body in (*BODIES, *[Hello(1, 1)] * len(BODIES))]

    async def test(server: Server) -> None:
        other = replace(hello(), pod_uid=OTHER.uid)
        path = PATH.replace(POD.name, OTHER.name)
        assert await server.post(codec.line(other), token="token-1", path=path) == (200, "")
        await until_async(lambda: not server.registry.num_connected(), "its stream has ended", every_s=0.001)
        before = server.registry.sessions([OTHER])[OTHER.uid]
        assert await server.post(codec.line(hello())) == (200, "")  # or all would wait for one that is said by chance
        # Few mutated reports are valid and no hello.
        statuses.add((await server.post(codec.line(make_report(Changed()))))[0])
        for _ in range(200):
            method, target, headers, body = odd_request(rng, valid)
            url = yarl.URL(server.url + target, encoded=True)
            async with server.http.request(method, url, headers=headers, data=body) as answer:
                statuses.add(answer.status)
                assert answer.status < 500, (method, target, headers, body[:200], await answer.text())
                if answer.status >= 300 and method != "HEAD":
                    _, says = await sentence(answer)
                    assert says
                    assert "\n" not in says
        assert server.registry.sessions([OTHER])[OTHER.uid] == before, "another pod's session was changed"
        assert await server.post(codec.line(hello())) == (200, "")

    with_server(test, hello_timeout_s=0.2)
    assert statuses >= {200, 400, 401, 403, 404, 405, 409, 413}, "requests of one kind only prove little"

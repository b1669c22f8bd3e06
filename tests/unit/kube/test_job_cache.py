"""What is known of a job without asking, and when the API server is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from regroup_operator.api import ConflictError, Job, NotFoundError, RegroupError, SpecError, UnavailableError, parse_job
from regroup_operator.kube.job_cache import JobCache
from regroup_operator.kube.jobs import CachedJobStore, slim
from tests.builders.jobs import stored_job

KEY = ("team", "digits")


def make_raw(version: int, *, uid: str = "a", **fields: Any) -> dict[str, Any]:
    raw = stored_job(**fields)
    raw["metadata"] |= {"namespace": "team", "name": "digits", "uid": uid, "resourceVersion": str(version)}
    return raw


def known(cache: JobCache) -> tuple[int, str, bool] | None:
    """Version, UID, and whether it may be planned from."""
    entry = cache.get(KEY)
    return None if entry is None else (entry.version, entry.raw["metadata"]["uid"], entry.confirmed_s is not None)


Step = Callable[[JobCache], object]


def sees(version: int, uid: str = "a") -> Step:
    return lambda cache: cache.see(make_raw(version, uid=uid))


def answers(version: int, uid: str = "a", *, meanwhile: Step | None = None) -> Step:
    """A live answer; `meanwhile`: what happens between its request and itself."""

    def step(cache: JobCache) -> None:
        before = cache.get(KEY)
        if meanwhile is not None:
            meanwhile(cache)
        cache.answered(make_raw(version, uid=uid), before, 7.0)

    return step


def doubts(cache: JobCache) -> None:
    cache.doubt(KEY)


def drops(cache: JobCache) -> None:
    cache.drop(KEY)


def is_replaced(cache: JobCache) -> None:
    cache.drop(KEY, "a")
    cache.see(make_raw(9, uid="b"))


def sweeps(listed: dict[tuple[str, str], tuple[str, int]], *, meanwhile: Step | None = None) -> Step:
    def step(cache: JobCache) -> None:
        before = cache.snapshot()
        if meanwhile is not None:
            meanwhile(cache)
        cache.sweep(before, listed)

    return step


@pytest.mark.parametrize(
    ("steps", "want"),
    [
        pytest.param([sees(5)], (5, "a", False), id="what only the watch has shown is read live first"),
        pytest.param([answers(5)], (5, "a", True), id="a live answer may be planned from"),
        pytest.param([answers(5), sees(6)], (6, "a", True), id="the watch moves it forward"),
        pytest.param([answers(5), sees(10)], (10, "a", True), id="versions are numbers, no text"),
        pytest.param([answers(5), sees(4)], (5, "a", True), id="never back"),
        pytest.param([answers(5), sees(6, "b")], (6, "b", False), id="another job of the name"),
        pytest.param([answers(5, "b"), sees(4, "a")], (5, "b", True), id="a late event of its predecessor"),
        pytest.param([answers(5), doubts], (5, "a", False), id="a refused write"),
        pytest.param([answers(5), doubts, sees(6)], (6, "a", False), id="the watch does not end a doubt"),
        pytest.param([answers(5), answers(3)], (3, "a", True), id="a store that was restored counts from an earlier version"),
        pytest.param([answers(5, meanwhile=sees(8))], (8, "a", True), id="an answer that the watch has overtaken"),
        pytest.param([answers(5), answers(6, meanwhile=drops)], None, id="an answer from before its end"),
        pytest.param([answers(5), answers(9, "b", meanwhile=drops)], None, id="of its successor, before the watch shows that"),
        pytest.param([answers(5), answers(6, meanwhile=is_replaced)], (9, "b", False), id="its successor was seen"),
        pytest.param([drops, answers(5)], (5, "a", True), id="nothing was known: the job is new"),
        pytest.param([answers(5), sweeps({})], None, id="what is not listed is gone"),
        pytest.param([answers(5), sweeps({KEY: ("a", 5)})], (5, "a", True), id="listed as known"),
        pytest.param([answers(5), sweeps({KEY: ("a", 9)})], (5, "a", False), id="the watch has missed something"),
        pytest.param([answers(5), sweeps({KEY: ("a", 3)})], (5, "a", False), id="listed with an earlier version: restored"),
        pytest.param([answers(5), sweeps({}, meanwhile=sees(6))], (6, "a", True), id="changed since the LIST was asked for"),
        pytest.param([sweeps({}, meanwhile=sees(6))], (6, "a", False), id="created since then"),
        pytest.param([answers(5), lambda cache: cache.drop(KEY, "b")], (5, "a", True), id="another one is gone"),
        pytest.param([answers(5), lambda cache: cache.drop(KEY, "a")], None, id="it is gone"),
    ],
)  # fmt: skip
def test_entry(steps: list[Step], want: tuple[int, str, bool] | None) -> None:
    cache = JobCache()
    for step in steps:
        step(cache)
    assert known(cache) == want


def test_sweep_names_the_jobs_to_look_at() -> None:
    cache = JobCache()
    for name in ("same", "gone", "changed"):
        raw = make_raw(5)
        raw["metadata"]["name"] = name
        cache.answered(raw, None, 0.0)
    before = cache.snapshot()
    listed = {("team", "same"): ("a", 5), ("team", "changed"): ("a", 6), ("team", "unknown"): ("c", 7)}
    assert sorted(cache.sweep(before, listed)) == [("team", "changed"), ("team", "gone"), ("team", "unknown")]
    assert len(cache) == 2


class FakeApi:
    """A server with one object, and what happens to the next request."""

    def __init__(self) -> None:
        self.raw: dict[str, Any] | None = make_raw(5)
        self.calls: list[str] = []
        self.fails: RegroupError | None = None

    async def get(self, key: tuple[str, str]) -> Mapping[str, Any] | None:  # noqa: ARG002
        self.calls.append("get")
        return self.raw

    async def put_status(self, raw: Mapping[str, Any], status: Mapping[str, Any]) -> Mapping[str, Any]:
        self.calls.append("put")
        if self.fails is not None:
            raise self.fails
        assert self.raw is not None
        if raw["metadata"]["resourceVersion"] != self.raw["metadata"]["resourceVersion"]:
            raise ConflictError("changed")
        self.raw = make_raw(int(self.raw["metadata"]["resourceVersion"]) + 1, status=dict(status))
        return self.raw

    async def delete(self, job: Job) -> None:  # noqa: ARG002
        self.calls.append("delete")
        self.raw = None


class Setting:
    def __init__(self) -> None:
        self.api, self.cache, self.now_s, self.looked = FakeApi(), JobCache(), 0.0, 0
        self.store = CachedJobStore(self.api, self.cache, look=self._look, clock=lambda: self.now_s)

    def _look(self, _: object) -> None:
        self.looked += 1

    async def job(self) -> Job:
        job = await self.store.get(KEY)
        assert job is not None
        return job


def run(scenario: Callable[[Setting], Awaitable[None]]) -> None:
    async def go() -> None:
        await scenario(Setting())

    asyncio.run(go())


def test_job_is_read_once_and_its_own_writes_are_known() -> None:
    async def scenario(setting: Setting) -> None:
        first = await setting.job()
        assert (await setting.job()) is first
        written = await setting.store.write_status(first, {"phase": "Starting"})
        assert (await setting.job()).status.phase == written.status.phase == "Starting"
        assert (setting.api.calls, setting.looked) == (["get", "put"], 1)

    run(scenario)


@pytest.mark.parametrize(
    ("shown", "progress_only", "looked"),
    [
        pytest.param(6, False, 1, id="a plan follows from the write, once"),
        pytest.param(6, True, 0, id="the write is of progress only"),
        pytest.param(7, True, 1, id="somebody has changed the job since the write"),
    ],
)
def test_what_the_watch_shows_of_a_write_before_its_answer_is_no_news(
    shown: int, progress_only: bool, looked: int
) -> None:
    async def scenario(setting: Setting) -> None:
        job = await setting.job()
        found = []

        async def watch_first(raw: Mapping[str, Any], status: Mapping[str, Any]) -> Mapping[str, Any]:
            stored = await FakeApi.put_status(setting.api, raw, status)
            found.append(setting.cache.see(make_raw(shown, status=dict(status))))
            return stored

        setting.api.put_status = watch_first  # type: ignore[method-assign]
        await setting.store.write_status(job, {"phase": "Starting"}, progress_only=progress_only)
        assert (found, setting.looked) == ([False], looked)
        entry = setting.cache.get(KEY)
        assert entry is not None
        assert entry.version == shown
        assert setting.cache.see(make_raw(8)), "what comes later is news again"

    run(scenario)


@pytest.mark.parametrize("error", [ConflictError("409"), NotFoundError("404")])
def test_correction_that_comes_while_its_refusal_is_written_is_left_to_the_back_off(error: RegroupError) -> None:
    """The watch shows it once. What the store raises has the job read again; to look at once would repeat a write that stays
    refused as fast as the API server answers."""

    async def scenario(setting: Setting) -> None:
        assert setting.api.raw is not None
        setting.api.raw["spec"]["replicas"] = -1

        async def corrected(*_: Any) -> Mapping[str, Any]:
            assert not setting.cache.see(make_raw(9))
            raise error

        setting.api.put_status = corrected  # type: ignore[method-assign, assignment]
        with pytest.raises(type(error)):
            await setting.store.get(KEY)
        assert setting.looked == 0

    run(scenario)


@pytest.mark.parametrize("error", [ConflictError("409"), UnavailableError("no answer")])
def test_after_a_write_that_was_refused_or_not_answered_the_job_is_read_live(error: RegroupError) -> None:
    async def scenario(setting: Setting) -> None:
        job = await setting.job()
        setting.api.fails = error
        with pytest.raises(type(error)):
            await setting.store.write_status(job, {"phase": "Starting"})
        setting.api.raw = make_raw(9, status={"phase": "Running"})
        assert (await setting.job()).status.phase == "Running"
        assert (setting.api.calls, setting.looked) == (["get", "put", "get"], 0)

    run(scenario)


def test_write_to_a_job_that_is_gone_forgets_it() -> None:
    async def scenario(setting: Setting) -> None:
        job = await setting.job()
        setting.api.fails, setting.api.raw = NotFoundError("404"), None
        with pytest.raises(NotFoundError):
            await setting.store.write_status(job, {"phase": "Starting"})
        assert len(setting.cache) == 0
        assert await setting.store.get(KEY) is None

    run(scenario)


@pytest.mark.parametrize("progress_only", [False, True])
def test_answer_to_a_write_does_not_bring_back_a_job_whose_end_was_seen_meanwhile(progress_only: bool) -> None:
    async def scenario(setting: Setting) -> None:
        job = await setting.job()

        async def end_first(raw: Mapping[str, Any], status: Mapping[str, Any]) -> Mapping[str, Any]:
            stored = await FakeApi.put_status(setting.api, raw, status)
            setting.cache.see(stored)
            setting.api.raw = None
            setting.cache.drop(KEY, job.uid)
            return stored

        setting.api.put_status = end_first  # type: ignore[method-assign]
        written = await setting.store.write_status(job, {"phase": "Starting"}, progress_only=progress_only)
        assert written.status.phase == "Starting"
        assert (len(setting.cache), setting.looked) == (0, 1), "the next plan is made, and finds out"
        with pytest.raises(ConflictError):
            await setting.store.confirm(written, 60.0)
        assert await setting.store.get(KEY) is None

    run(scenario)


def test_live_read_does_not_bring_back_a_job_whose_end_was_seen_meanwhile() -> None:
    async def scenario(setting: Setting) -> None:
        job = await setting.job()
        setting.cache.doubt(KEY)

        async def end_first(_: object) -> Mapping[str, Any] | None:
            setting.cache.drop(KEY, job.uid)
            return setting.api.raw

        setting.api.get = end_first  # type: ignore[method-assign, assignment]
        assert await setting.store.get(KEY) is None
        assert len(setting.cache) == 0

    run(scenario)


def test_write_from_an_older_status_is_refused_and_the_next_plan_is_made_from_the_newest() -> None:
    """Rule PERSIST with a cache: another leader has written, and the watch has not shown it."""

    async def scenario(setting: Setting) -> None:
        job = await setting.job()
        setting.api.raw = make_raw(6, status={"phase": "Running"})
        assert (await setting.job()) is job
        with pytest.raises(ConflictError):
            await setting.store.write_status(job, {"phase": "Failed"})
        assert (await setting.job()).status.phase == "Running"

    run(scenario)


@pytest.mark.parametrize(
    ("now_s", "raw", "requests", "holds"),
    [
        pytest.param(60.0, make_raw(9), 0, True, id="read a minute ago"),
        pytest.param(60.1, make_raw(5), 1, True, id="longer ago, and still there"),
        pytest.param(60.1, make_raw(6), 1, False, id="changed"),
        pytest.param(60.1, make_raw(5, uid="b"), 1, False, id="another one"),
        pytest.param(60.1, None, 1, False, id="gone"),
    ],
)
def test_confirm(now_s: float, raw: dict[str, Any] | None, requests: int, holds: bool) -> None:
    async def scenario(setting: Setting) -> None:
        job = await setting.job()
        setting.now_s, setting.api.raw = now_s, raw
        try:
            await setting.store.confirm(job, 60.0)
        except ConflictError:
            assert not holds
        else:
            assert holds
        assert setting.api.calls == ["get"] * (1 + requests)

    run(scenario)


def test_job_that_breaks_a_rule_is_parsed_once_and_refused_each_time() -> None:
    cache = JobCache()
    raw = make_raw(5)
    raw["spec"]["replicas"] = -1
    cache.answered(raw, None, 0.0)
    entry = cache.get(KEY)
    assert entry is not None
    errors = []
    for _ in range(3):
        with pytest.raises(SpecError) as caught:
            cache.parse(KEY, entry)
        errors.append((id(caught.value), len(caught.traceback)))
    assert len(set(errors)) == 1, "the same error, whose traceback does not grow"


def test_managed_fields_are_not_kept() -> None:
    raw = make_raw(5)
    raw["metadata"]["managedFields"] = [{"manager": "kubectl"}]
    assert "managedFields" not in slim(raw)["metadata"]
    assert parse_job(slim(raw)).name == "digits"

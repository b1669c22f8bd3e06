"""The job as a file: a compare-and-swap like the API server's, and the rules that it would hold a user to."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from regroup_cli.local import FileStore
from regroup_operator.api import ConflictError, SpecError
from tests.builders.plan import JobBuilder, make_job


def stored(tmp_path: Path, job: JobBuilder) -> FileStore:
    store = FileStore(tmp_path / "job.json")
    store.create(job.manifest())
    return store


def write(store: FileStore, phase: str) -> None:
    async def run() -> None:
        job = await store.get(("default", "digits"))
        assert job is not None
        await store.write_status(job, {"phase": phase})

    asyncio.run(run())


def test_second_writer_from_one_reading_loses(tmp_path: Path) -> None:
    store = stored(tmp_path, make_job())

    async def run() -> None:
        first, second = await store.get(("d", "digits")), await store.get(("d", "digits"))
        assert first is not None
        assert second is not None
        written = await store.write_status(first, {"phase": "Starting"})
        with pytest.raises(ConflictError):
            await store.write_status(second, {"phase": "Failed"})
        await store.write_status(written, {"phase": "Running"})

    asyncio.run(run())
    assert store.read()["status"] == {"phase": "Running"}


def test_change_of_the_spec_makes_a_planned_write_lose(tmp_path: Path) -> None:
    store = stored(tmp_path, make_job().with_replicas(3))

    async def run() -> None:
        job = await store.get(("d", "digits"))
        assert job is not None
        changed = store.change_spec(lambda spec: spec.update(replicas=4))
        assert (changed.spec.replicas, changed.spec_generation) == (4, job.spec_generation + 1)
        with pytest.raises(ConflictError):
            await store.write_status(job, {"phase": "Running"})

    asyncio.run(run())


def test_readers_never_see_half_a_file(tmp_path: Path) -> None:
    store = stored(tmp_path, make_job())

    def write_often() -> None:
        for _ in range(50):
            write(store, "Running")

    writer = threading.Thread(target=write_often)
    writer.start()
    while writer.is_alive():
        assert store.read()["metadata"]["name"] == "digits"
    writer.join()


@pytest.mark.parametrize(
    ("job", "replicas", "started", "sentence"),
    [
        pytest.param(make_job().with_replicas(3).elastic(2, 4), 5, True, "spec.replicas (5) is outside", id="outside the policy"),
        pytest.param(
            make_job().with_replicas(3).fixed(), 5, True, "spec.replicas (5) of a started job of fixed size cannot change from 3.",
            id="fixed size, started",
        ),
        pytest.param(make_job().with_replicas(3).fixed(), 5, False, "", id="fixed size, not started"),
        pytest.param(make_job().with_replicas(3).elastic(2, 4), 2, True, "", id="inside the policy"),
    ],
)  # fmt: skip
def test_scale(tmp_path: Path, job: JobBuilder, replicas: int, started: bool, sentence: str) -> None:
    store = stored(tmp_path, job.with_status({"startTime": "2027-01-15T08:00:00Z"} if started else {}))
    before = store.read()
    if not sentence:
        assert store.change_spec(lambda spec: spec.update(replicas=replicas)).spec.replicas == replicas
        return
    with pytest.raises(SpecError) as error:
        store.change_spec(lambda spec: spec.update(replicas=replicas))
    assert sentence in str(error.value)
    assert store.read() == before

"""Jobs, workers and secrets through the ports, against a real API server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from harness.polling import until_async
from regroup_operator.api import ConflictError, Job, SpecError, parse_job
from regroup_operator.handlers import JobWatch
from regroup_operator.kube.client import CONFIG_MAPS, EVENTS, PODS, SERVICES, Client
from regroup_operator.kube.cluster_workers import ClusterWorkers
from regroup_operator.kube.events import EventRecorder
from regroup_operator.kube.job_cache import JobCache, key_of
from regroup_operator.kube.jobs import JOBS, CachedJobStore, ClusterJobApi
from regroup_operator.kube.pods import PodStore, slim_pod
from regroup_operator.kube.secret import load_or_create
from regroup_operator.model.ports import AlreadyExists, EventNote
from regroup_operator.render import Renderer, RenderSettings
from tests.api.conftest import Api
from tests.builders.jobs import make_job, role

SETTINGS = RenderSettings("https://regroup.ops.svc:8443", "localhost/regroup-operator:dev")


class World:
    """A client, the ports on it, and a job in a namespace of its own."""

    def __init__(self, client: Client, job: Job) -> None:
        self.client, self.job = client, job
        self.bundle = "old"
        self.cache = JobCache()
        self.store = CachedJobStore(ClusterJobApi(client), self.cache)
        self.pods = PodStore(client)
        self.workers = ClusterWorkers(client, self.pods, Renderer(SETTINGS, lambda: self.bundle), clock=lambda: 0.0)


def in_world(api: Api, namespace: str, scenario: Callable[[World], Awaitable[None]], **spec: Any) -> None:
    """Run `scenario` with a job that exists in the API."""

    async def run() -> None:
        client = await Client.connect(str(api.kubeconfig))
        try:
            manifest = make_job(**spec)
            manifest["metadata"]["namespace"] = namespace
            raw = await client.create(JOBS, namespace, manifest)
            await scenario(World(client, parse_job(raw)))
        finally:
            await client.close()

    asyncio.run(run())


def test_status_write_replaces_the_whole_status_and_nothing_else(api: Api, namespace: str) -> None:
    async def scenario(world: World) -> None:
        first = await world.store.write_status(
            world.job, {"phase": "Starting", "summary": {"state": "Starting", "ready": "0/3"}, "released": ["a"]}
        )
        second = await world.store.write_status(first, {"phase": "Running", "summary": {"state": "Running"}})
        live = await world.store.get(world.job.key)
        assert live is not None
        assert live.resource_version == second.resource_version
        assert live.raw["status"] == {"phase": "Running", "summary": {"state": "Running"}}
        assert live.raw["spec"] == world.job.raw["spec"]
        assert live.spec_generation == world.job.spec_generation

    in_world(api, namespace, scenario)


def test_status_write_from_an_old_reading_loses(api: Api, namespace: str) -> None:
    async def scenario(world: World) -> None:
        await world.store.write_status(world.job, {"phase": "Starting"})
        with pytest.raises(ConflictError):
            await world.store.write_status(world.job, {"phase": "Failed"})
        api.done(
            "patch",
            "dtj",
            world.job.name,
            f"--namespace={namespace}",
            "--type=merge",
            '--patch={"spec":{"replicas":4}}',
        )
        seen = await world.store.get(world.job.key)
        assert seen is not None
        assert (seen.status.phase, seen.spec.replicas) == ("Starting", 4)

    in_world(api, namespace, scenario)


def test_status_of_a_job_that_was_made_anew_under_its_name_is_not_written(api: Api, namespace: str) -> None:
    async def scenario(world: World) -> None:
        await world.client.delete(JOBS, *world.job.key)
        manifest = make_job()
        manifest["metadata"]["namespace"] = namespace
        other = parse_job(await world.client.create(JOBS, namespace, manifest))
        with pytest.raises(ConflictError):
            await world.store.write_status(
                replace(world.job, resource_version=other.resource_version), {"phase": "Failed"}
            )
        await world.client.delete(JOBS, *world.job.key)
        assert await world.store.get(world.job.key) is None

    in_world(api, namespace, scenario)


def test_job_that_has_changed_since_it_was_read_is_not_removed(api: Api, namespace: str) -> None:
    async def scenario(world: World) -> None:
        read = await world.store.get(world.job.key)
        assert read is not None
        await world.client.patch(JOBS, *world.job.key, {"spec": {"runPolicy": {"ttlSecondsAfterFinished": 3600}}})
        with pytest.raises(ConflictError):
            await world.store.remove(read)
        kept = await world.store.get(world.job.key)
        assert kept is not None, "it was deleted, or forgotten"
        assert (kept.uid, kept.spec_generation) == (read.uid, read.spec_generation + 1), (
            "the next plan has read it anew"
        )
        await world.store.remove(kept)
        assert await world.store.get(world.job.key) is None

    in_world(api, namespace, scenario)


def test_job_that_was_made_anew_under_its_name_is_not_removed(api: Api, namespace: str) -> None:
    async def scenario(world: World) -> None:
        await world.client.delete(JOBS, *world.job.key)
        await world.store.remove(world.job)
        manifest = make_job()
        manifest["metadata"]["namespace"] = namespace
        other = parse_job(await world.client.create(JOBS, namespace, manifest))
        for old in (world.job, replace(world.job, resource_version=other.resource_version)):
            with pytest.raises(ConflictError):
                await world.store.remove(old)
            stays = await world.store.get(world.job.key)
            assert stays is not None
            assert stays.uid == other.uid

    in_world(api, namespace, scenario)


def with_trainer(**fields: Any) -> dict[str, Any]:
    trainer = {"name": "trainer", "image": "example/trainer:1", "command": ["python", "train.py"], **fields}
    return {"template": {"spec": {"containers": [trainer]}}}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        pytest.param(
            {"imagePulPolicy": "Always"},
            'spec.template is not a pod: unknown field "spec.template.spec.containers[0].imagePulPolicy". Correct it.',
            id="a typo",
        ),
        pytest.param(
            {"resources": {"limits": {"cpu": "much"}}},
            "quantities must match the regular expression",
            id="a wrong quantity",
        ),
        pytest.param(
            {"imagePullPolicy": "Sometimes"},
            'spec.template is refused: spec.template.spec.containers[0].imagePullPolicy: Unsupported value: "Sometimes"',
            id="a value that the field does not have",
        ),
        pytest.param(
            {"volumeMounts": [{"name": "data", "mountPath": "/d"}]}, "Not found", id="a volume that is not there"
        ),
    ],
)
def test_template_that_is_no_pod_is_refused_in_one_sentence(
    api: Api, namespace: str, fields: dict[str, Any], sentence: str
) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(SpecError) as caught:
            await world.workers.validate(world.job)
        assert sentence in str(caught.value)
        assert "\n" not in str(caught.value)
        assert str(caught.value).endswith(".")
        assert caught.value.reason == "InvalidTemplate"
        assert (await world.client.list(PODS, namespace))["items"] == []

    in_world(api, namespace, scenario, **with_trainer(**fields))


def test_template_of_a_role_is_tried_too_and_named(api: Api, namespace: str) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(SpecError) as caught:
            await world.workers.validate(world.job)
        assert str(caught.value) == (
            'spec.roles[board].template is not a pod: unknown field "spec.roles[board].template.spec.hostNetwrok". Correct it.'
        )
        assert (await world.client.list(PODS, namespace))["items"] == []

    in_world(api, namespace, scenario, roles=[role("ok"), role("board", hostNetwrok=True)])


def test_good_template_passes_and_leaves_nothing(api: Api, namespace: str) -> None:
    async def scenario(world: World) -> None:
        await world.workers.validate(world.job)
        assert (await world.client.list(PODS, namespace))["items"] == []

    in_world(api, namespace, scenario)


def test_pod_security_is_a_verdict_and_a_quota_is_not(api: Api, namespace: str) -> None:
    async def scenario(world: World) -> None:
        quota = {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "q"},
            "spec": {"hard": {"pods": "0"}},
        }
        api.done("create", "--filename=-", f"--namespace={namespace}", document=quota)
        await world.workers.validate(world.job)
        api.done("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
        with pytest.raises(SpecError, match=f"Pod Security restricted:latest of namespace {namespace}") as caught:
            await world.workers.validate(world.job)
        assert caught.value.reason == "PodSecurity"

    in_world(api, namespace, scenario)


def test_creating_a_worker_twice_is_creating_it_once(api: Api, namespace: str) -> None:
    async def scenario(world: World) -> None:
        await world.workers.create(world.job, 0, 0, ())
        await world.workers.create(world.job, 0, 0, ())
        (pod,) = (await world.client.list(PODS, namespace))["items"]
        assert pod["metadata"]["name"] == "digits-worker-0-0"

        with pytest.raises(AlreadyExists, match="does not belong to this job"):
            await world.workers.create(replace(world.job, uid="another"), 0, 0, ())

        slim = slim_pod(pod, None, 0.0)
        assert slim is not None
        await world.workers.delete(replace(slim, uid="an earlier pod's"))
        assert len((await world.client.list(PODS, namespace))["items"]) == 1

    in_world(api, namespace, scenario)


def test_terminating_pod_keeps_its_name(api: Api, namespace: str) -> None:
    async def scenario(world: World) -> None:
        await world.workers.create(world.job, 0, 0, ())
        finalizers = {"metadata": {"finalizers": ["test.dev/stay"]}}
        raw = await world.client.patch(PODS, namespace, "digits-worker-0-0", finalizers)
        slim = slim_pod(raw, None, 0.0)
        assert slim is not None
        await world.workers.delete(slim)
        with pytest.raises(AlreadyExists, match="terminating"):
            await world.workers.create(world.job, 0, 0, ())
        await world.client.patch(PODS, namespace, slim.name, {"metadata": {"finalizers": None}})
        await world.workers.delete(slim)

    in_world(api, namespace, scenario)


def test_prepare_makes_service_and_config_map_and_follows_the_bundle(api: Api, namespace: str) -> None:
    async def scenario(world: World) -> None:
        await world.workers.prepare(world.job)
        service = await world.client.get(SERVICES, namespace, "digits")
        assert service["spec"]["clusterIP"] == "None"
        first = await world.client.get(CONFIG_MAPS, namespace, "digits-regroup")
        await world.workers.prepare(world.job)
        again = ClusterWorkers(world.client, world.pods, Renderer(SETTINGS, lambda: world.bundle))
        await again.prepare(world.job)
        same = await world.client.get(CONFIG_MAPS, namespace, "digits-regroup")
        assert same["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
        assert (await world.client.get(SERVICES, namespace, "digits"))["metadata"]["resourceVersion"] == service[
            "metadata"
        ]["resourceVersion"]
        world.bundle = "old and new"
        await world.workers.prepare(world.job)
        assert (await world.client.get(CONFIG_MAPS, namespace, "digits-regroup"))["data"]["ca.crt"] == "old and new"

    in_world(api, namespace, scenario)


def test_service_follows_the_roles_of_a_job_that_has_not_started(api: Api, namespace: str) -> None:
    async def scenario(world: World) -> None:
        def selector() -> dict[str, str]:
            found: dict[str, str] = api.get("service", "digits", f"--namespace={namespace}")["spec"]["selector"]
            return found

        alone, wide = world.job, parse_job({**world.job.raw, "spec": {**world.job.raw["spec"], "roles": [role()]}})
        workers = {"regroup.dev/job-name": "digits", "regroup.dev/role": "worker"}
        for job, want in ((alone, workers), (wide, {"regroup.dev/job-name": "digits"}), (alone, workers)):
            await world.workers.prepare(job)
            assert selector() == want

    in_world(api, namespace, scenario)


def test_service_of_somebody_else_is_not_touched(api: Api, namespace: str) -> None:
    async def scenario(world: World) -> None:
        api.done("create", "service", "clusterip", "digits", "--tcp=80", f"--namespace={namespace}")
        with pytest.raises(
            SpecError, match=f"Service digits exists in namespace {namespace} and does not belong to this job"
        ):
            await world.workers.prepare(world.job)

    in_world(api, namespace, scenario)


def test_secret_is_made_once_whoever_comes_first(api: Api, namespace: str) -> None:
    async def scenario(world: World) -> None:
        made: list[int] = []

        def make() -> dict[str, bytes]:
            made.append(1)
            return {"key": f"made {len(made)}".encode()}

        found = await asyncio.gather(*(load_or_create(world.client, namespace, "ca", make) for _ in range(5)))
        assert len({data["key"] for data in found}) == 1
        assert await load_or_create(world.client, namespace, "ca", make) == found[0]

    in_world(api, namespace, scenario)


def test_events_repeat_as_a_series_of_one_object(api: Api, namespace: str) -> None:
    async def scenario(world: World) -> None:
        recorder = EventRecorder(world.client, "regroup-operator-0")
        note = EventNote("Warning", "WorkerLost", "Worker 2 is gone.")
        recorder.record(world.job, note)
        await recorder.drain(10)
        recorder.record(world.job, note)
        recorder.record(world.job, note)
        await recorder.drain(10)
        (event,) = (await world.client.list(EVENTS, namespace))["items"]
        assert event["regarding"]["uid"] == world.job.uid
        assert event["series"]["count"] == 3
        described = api.done("describe", "dtj", world.job.name, f"--namespace={namespace}")
        assert "WorkerLost" in described
        assert "Worker 2 is gone." in described

    in_world(api, namespace, scenario)


def test_every_change_of_a_job_reaches_the_queue(api: Api, namespace: str) -> None:
    async def scenario(world: World) -> None:
        heard: list[tuple[tuple[str, str], bool]] = []
        ended: list[bool] = []
        watch = JobWatch(
            world.client, [namespace], lambda raw, gone: heard.append((key_of(raw), gone)), lambda: ended.append(True)
        )
        watch.start()
        try:
            await until_async(lambda: (world.job.key, False) in heard, "the job that was there already")
            heard.clear()
            await world.client.patch(JOBS, *world.job.key, {"spec": {"replicas": 4}})
            await until_async(lambda: (world.job.key, False) in heard, "the change")
            await world.client.delete(JOBS, *world.job.key)
            await until_async(lambda: (world.job.key, True) in heard, "the deletion")
        finally:
            await watch.stop(10)
        assert not ended, "an ordered stop is no failure"

    in_world(api, namespace, scenario)


def test_watch_that_ends_by_itself_begins_anew_and_says_so(
    api: Api, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch_really, num_watches = JobWatch._watch, 0

    def fail_once(self: JobWatch, loop: asyncio.AbstractEventLoop) -> None:
        nonlocal num_watches
        num_watches += 1
        if num_watches == 1:
            raise RuntimeError("kopf gives up")
        watch_really(self, loop)

    monkeypatch.setattr(JobWatch, "_watch", fail_once)

    async def scenario(world: World) -> None:
        heard: list[tuple[str, str]] = []
        again: list[None] = []
        watch = JobWatch(
            world.client, [namespace], lambda raw, _: heard.append(key_of(raw)), lambda: again.append(None)
        )
        watch.start()
        try:
            await until_async(lambda: world.job.key in heard, "the job")
        finally:
            await watch.stop(10)
        assert (num_watches, again) == (2, [None])

    in_world(api, namespace, scenario)


def test_list_of_the_metadata_has_each_jobs_uid_and_version(api: Api, namespace: str) -> None:
    async def scenario(world: World) -> None:
        jobs = ClusterJobApi(world.client)
        assert await jobs.list_metadata(namespace) == {world.job.key: (world.job.uid, int(world.job.resource_version))}
        assert world.job.key in await jobs.list_metadata(None)
        await world.client.delete(JOBS, *world.job.key)
        assert await jobs.list_metadata(namespace) == {}

    in_world(api, namespace, scenario)


def test_kopf_leaves_no_trace_in_a_job(api: Api, namespace: str) -> None:
    async def scenario(world: World) -> None:
        heard: list[tuple[str, str]] = []
        watch = JobWatch(world.client, [], lambda raw, _: heard.append(key_of(raw)), lambda: None)
        watch.start()
        try:
            await until_async(lambda: world.job.key in heard, "the job")
            await world.client.patch(JOBS, *world.job.key, {"spec": {"replicas": 4}})
            await until_async(lambda: heard.count(world.job.key) > 1, "the change")
        finally:
            await watch.stop(10)
        metadata = (await world.client.get(JOBS, *world.job.key))["metadata"]
        assert "annotations" not in metadata
        assert "finalizers" not in metadata
        assert metadata["generation"] == 2

    in_world(api, namespace, scenario)

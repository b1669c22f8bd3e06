"""`python -m regroup_operator`: start the parts of the operator in the safe order, and end them in reverse.

Every replica watches pods and listens. Only the one that holds the lease watches jobs, reconciles and answers agents.
Start: own pages, CA, pods, endpoint (503), lease, then label, jobs, work queue. SIGTERM ends them in reverse order, the
lease last, so that the next leader begins when this one has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import signal
import socket
import sys
import uuid
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from regroup_operator import metrics as ops
from regroup_operator.api import RegroupError
from regroup_operator.background import LoopBackground
from regroup_operator.clock import LoopClock
from regroup_operator.controller import Controller, Options, Ports, Term, Turns
from regroup_operator.decision_log import DecisionLog
from regroup_operator.endpoint.registry import Registry
from regroup_operator.endpoint.server import serve
from regroup_operator.handlers import JobWatch
from regroup_operator.kube import leader
from regroup_operator.kube.authenticator import ClusterAuthenticator, ClusterReviewer
from regroup_operator.kube.client import ApiError, Client
from regroup_operator.kube.cluster_workers import ClusterWorkers
from regroup_operator.kube.events import EventRecorder
from regroup_operator.kube.issuer_keys import KeyCache, fetch_keys
from regroup_operator.kube.job_cache import JobCache, key_of
from regroup_operator.kube.jobs import JOBS, CachedJobStore, ClusterJobApi
from regroup_operator.kube.lease import LeaseTimes
from regroup_operator.kube.lease_thread import LeaseThread
from regroup_operator.kube.pods import Agents, PodStore
from regroup_operator.kube.prepared import PreparedObjects
from regroup_operator.model.records import Key
from regroup_operator.queue import WorkQueue
from regroup_operator.render import Renderer, RenderSettings
from regroup_operator.settings import OperatorSettings, load
from regroup_operator.trust import Trust

log = logging.getLogger("regroup_operator")

RETRY_S = 2.0
GC_THRESHOLDS = (20_000, 20, 20)
"""Thresholds of the garbage collector. Jobs, pods and connections are many objects that stay, and Python's own
thresholds make the collector scan them too often."""


class Operator:
    """One replica, from start to end."""

    def __init__(self, client: Client, settings: OperatorSettings) -> None:
        self._client = client
        self._settings = settings
        self._name = settings.pod_name or socket.gethostname()
        self._metrics = ops.Metrics()
        self._clock = clock = LoopClock()
        self._pods = PodStore(client, settings.watch_namespaces, drain_taints=settings.drain_taints, clock=clock)
        self._prepared = PreparedObjects(client, settings.watch_namespaces, self._prepared_lost)
        self._workers: ClusterWorkers | None = None
        self._issuer_keys = KeyCache(lambda: fetch_keys(client))
        self._authenticator = ClusterAuthenticator(Agents(self._pods), self._issuer_keys, ClusterReviewer(client))
        self._trust = Trust(client, settings)
        self._recorder = EventRecorder(client, self._name)
        self._queue = WorkQueue(
            self._reconcile,
            num_workers=settings.num_workers,
            put_off=self._progress_overdue_s,
            observe=self._metrics.observe_reconcile,
            observe_wait=self._metrics.queue_wait_seconds.observe,
            clock=clock,
        )
        self._registry = Registry(clock, self._queue.add, self._queue.add_after, should_call=self._pods.should_call)
        self._job_api, self._jobs = ClusterJobApi(client), JobCache()
        self._background = LoopBackground()
        self._elector = LeaseThread(
            self._lease_client,
            settings.namespace,
            settings.lease_name,
            f"{self._name}_{uuid.uuid4().hex[:8]}",
            LeaseTimes(settings.lease_duration_s, settings.lease_renew_deadline_s, settings.lease_retry_s),
        )
        self._decisions = None
        if settings.decision_log:
            self._decisions = DecisionLog(Path(settings.decision_log), settings.decision_log_mib * 2**20)
        self._sweep_soon = asyncio.Event()
        self._watch = JobWatch(client, settings.watch_namespaces, self._job_changed, self._sweep_soon.set)
        self._controller: Controller | None = None
        self._unready: str | None = "The CA has not been read yet."
        self._runners: list[web.AppRunner] = []
        self._pods.on_change(self._pod_changed)
        client.observe = self._metrics.api_request
        self._metrics.follow_jobs(self._jobs.objects, per_job=settings.per_job_metrics)
        self._metrics.follow(
            queue_depth=lambda: len(self._queue),
            connected_agents=self._registry.num_connected,
            out_of_reach=self._registry.out_of_reach,
            dropped_reports=lambda: self._registry.dropped_reports,
            leading=lambda: self._elector.leading,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set, then end in order. Raises the error of the part that ended by itself."""
        tasks: list[asyncio.Task[None]] = []

        def start(work: Coroutine[Any, Any, None], name: str) -> None:
            tasks.append(asyncio.create_task(work, name=name))

        settings = self._settings
        try:
            self._runners.append(
                await ops.serve(self._metrics, settings.ops_host, settings.ops_port, lambda: self._unready)
            )
            start(self._clock.run(), "clock")
            start(self._pods.run(), "pods")
            start(self._prepared.run(), "services and config maps")
            start(self._issuer_keys.run(), "issuer keys")
            start(self._recorder.run(), "events")
            start(self._work(), "work")
            start(_wait(stop), "stop")
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await self._end(tasks)

    async def _work(self) -> None:
        """Run the parts that need the CA, then those that need the pods, then those that need the lease."""
        settings = self._settings
        await self._trust.load()
        try:
            async with asyncio.TaskGroup() as life:
                life.create_task(self._trust.run(), name="trust")
                await self._stand_by()
                await self._elector.acquire()
                life.create_task(self._elector.hold(), name="lease")
                # Weeks may have passed since the start. The CA must be current before an agent is answered or a bundle written.
                await self._trust.load()
                self._begin_term()
                if settings.pod_name:
                    life.create_task(leader.claim(self._client, settings.namespace, settings.pod_name), name="label")
                life.create_task(self._queue.run(), name="queue")
                life.create_task(self._resync(), name="resync")
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _stand_by(self) -> None:
        """Listen (503) and read the pods, so that a term can begin at once."""
        settings = self._settings
        runner, port = await serve(
            self._registry,
            self._authenticator,
            self._trust.context,
            host=settings.membership_host,
            port=settings.membership_port,
            leader=self._leader,
        )
        self._runners.append(runner)
        log.info("Agents call %s; listening on port %d.", settings.url, port)
        self._unready = "The pods of the cluster have not been listed yet."
        await self._pods.synced()
        self._unready = "The jobs of the cluster have not been listed yet."
        await self._resource_exists()
        self._unready = None

    def _begin_term(self) -> None:
        settings = self._settings
        render = RenderSettings(
            operator_url=settings.url,
            agent_image=settings.agent_image,
            agent_image_pull_policy=settings.agent_image_pull_policy,
            agent_image_pull_secrets=tuple(settings.agent_image_pull_secrets),
            checkpoint_wait_s=settings.checkpoint_s,
        )
        store = CachedJobStore(self._job_api, self._jobs, look=self._queue.add, recorder=self._recorder)
        self._workers = ClusterWorkers(self._client, self._pods, Renderer(render, self._trust.ca_bundle))
        self._controller = Controller(
            Ports(
                store=store,
                workers=self._workers,
                recorder=self._recorder,
                registry=self._registry,
                background=self._background,
                observer=self._metrics,
                decisions=self._decisions,
            ),
            Options(
                settings=settings.policy(),
                endpoint=settings.url.removeprefix("https://"),
                agent_image=settings.agent_image,
                progress_writes_per_s=settings.progress_writes_per_second,
            ),
            Turns(self._queue.add_after, self._queue.expect, self._queue.rest),
            term=Term(
                leads=lambda: self._elector.leading,
                admission_s=self._authenticator.admission_s(len(self._pods.uids())),
                waiting=self._authenticator.waiting,
            ),
            monotonic=self._clock,
        )
        self._watch.start()

    def _leader(self) -> str | None:
        """Return None while this replica leads and its term has begun, else the leader's name."""
        if self._controller is not None and self._elector.leading:
            return None
        return self._elector.holder

    async def _reconcile(self, key: Key) -> float | None:
        assert self._controller is not None
        return await self._controller.reconcile(key)

    def _progress_overdue_s(self, key: Key) -> float | None:
        return None if self._controller is None else self._controller.progress_overdue_s(key)

    def _pod_changed(self, key: Key) -> None:
        """Have the pod's job reconciled. A standby does nothing: it has no jobs yet, and its queue would only grow."""
        if self._controller is not None:
            self._queue.add(key)

    def _prepared_lost(self, key: Key, job_uid: str) -> None:
        """Have the Service and the ConfigMap of a job made again."""
        if self._workers is not None:
            self._workers.lost(job_uid)
            self._pod_changed(key)

    def _job_changed(self, raw: Mapping[str, Any], gone: bool) -> None:
        key = key_of(raw)
        if gone:
            self._jobs.drop(key, raw["metadata"]["uid"])
        elif not self._jobs.see(raw):
            return  # our own write, or older than that
        self._queue.add(key)

    async def _resync(self) -> None:
        """Reconcile every job now and then, spread over the time, and forget jobs that are gone.

        kopf does not report a job that vanished while its watch was broken.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._sweep_soon.wait(), self._settings.resync_s)
            self._sweep_soon.clear()
            self._registry.forget(self._pods.uids().__contains__)
            try:
                await self._sweep()
            except ApiError as error:
                log.warning("Jobs cannot be compared with the API server: %s Again in %.0f s.", error, RETRY_S)
                await asyncio.sleep(RETRY_S)
                self._sweep_soon.set()
                continue
            for key in self._jobs.snapshot():
                self._queue.add_after(key, random.uniform(0, self._settings.resync_s))

    async def _sweep(self) -> None:
        before = self._jobs.snapshot()
        listed: dict[Key, tuple[str, int]] = {}
        for namespace in self._settings.watch_namespaces or (None,):
            listed |= await self._job_api.list_metadata(namespace)
        for key in self._jobs.sweep(before, listed):
            self._queue.add(key)

    async def _lease_client(self) -> Client:
        client = await Client.connect()
        client.observe = self._metrics.api_request
        return client

    async def _resource_exists(self) -> None:
        while True:
            try:
                await self._client.list(JOBS, next(iter(self._settings.watch_namespaces), None), limit=1)
                return
            except ApiError as error:
                hint = (
                    " Install the CustomResourceDefinition: helm upgrade the chart, or apply crds/."
                    if error.status == 404
                    else ""
                )
                self._unready = f"Jobs cannot be listed: {error}{hint}"
                log.warning(self._unready)
            await asyncio.sleep(RETRY_S)

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        """End every task that writes, then the streams, then the term."""
        leading = self._elector.leading
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._background.stop()
        await self._watch.stop()
        self._registry.close_all()
        for runner in reversed(self._runners):
            await runner.cleanup()
        await self._recorder.drain()
        if leading and self._settings.pod_name:
            await leader.give_up(self._client, self._settings.namespace, self._settings.pod_name)
        await self._elector.release()


async def _wait(stop: asyncio.Event) -> None:
    await stop.wait()


async def operate(settings: OperatorSettings) -> None:
    """Run one operator until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    client = await Client.connect()
    try:
        await Operator(client, settings).run(stop)
    finally:
        await client.close()


def main() -> int:
    """Run the operator and return the exit status: 0 after a signal, 2 for unusable settings, 1 for any other error."""
    try:
        settings = load(os.environ)
    except RegroupError as error:
        print(f"regroup-operator: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLogger().level))
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(operate(settings))
    except RegroupError as error:
        print(f"regroup-operator: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

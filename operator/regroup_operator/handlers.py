"""The edge to kopf: passes the object of each job event to the job cache, and does nothing else.

kopf owns the watch of the resource, its login and its retries. It has a thread and an event loop of its own, because an
embedded kopf takes over its loop. It installs signal handlers and, when it ends, cancels every task that is not its
own. The only contact is `call_soon_threadsafe`. If kopf ends by itself, only kopf is started again. An operator that
ended with it would give up the lease, although jobs that train need no watch of jobs.

No other feature of kopf is used. Its per-handler state, indexes, timers and daemons cost writes to the object, or time
that grows with the square of the number of objects.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import kopf

from regroup_operator.api import GROUP, PLURAL, VERSION
from regroup_operator.kube.client import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S, WATCH_SILENCE_S, Client
from regroup_operator.kube.jobs import slim

log = logging.getLogger(__name__)

OnEvent = Callable[[Mapping[str, Any], bool], None]
"""Called as on_event(raw, gone) when a job appeared, changed or is gone. `raw` is its object without managedFields."""

RESTART_MIN_S, RESTART_MAX_S = 1.0, 30.0
"""Wait before kopf is started again: the first time, and the longest."""
STEADY_S = 60.0
"""Run time after which an end of kopf counts as a first failure again."""


class NoDiffBase(kopf.DiffBaseStorage):
    """Remembers nothing, so that kopf never writes an annotation to a job."""

    def build(
        self,
        *,
        body: kopf.Body,  # noqa: ARG002
        extra_fields: Any = None,  # noqa: ARG002
    ) -> kopf.BodyEssence:
        """Return nothing. kopf calls this at every event, and its own class would copy the whole object."""
        return kopf.BodyEssence({})

    def fetch(self, *, body: kopf.Body) -> None:  # noqa: ARG002
        """Return nothing."""
        return

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Store nothing."""


def kopf_settings() -> kopf.OperatorSettings:
    """Return kopf's settings: quiet, bounded in time, without traces in the cluster."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.posting.loggers = False
    settings.scanning.disabled = True
    settings.peering.standalone = True
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.queueing.worker_limit = None
    settings.networking.request_timeout = REQUEST_TIMEOUT_S
    settings.networking.connect_timeout = CONNECT_TIMEOUT_S
    settings.watching.connect_timeout = CONNECT_TIMEOUT_S
    settings.watching.server_timeout = 290
    settings.watching.inactivity_timeout = WATCH_SILENCE_S
    settings.process.ultimate_exiting_timeout = None
    return settings


def kopf_registry(on_event: OnEvent, login: Callable[[], kopf.ConnectionInfo]) -> kopf.OperatorRegistry:
    """Return a registry with the one handler and the login. kopf calls both callables in its thread."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def authenticate(**_: Any) -> kopf.ConnectionInfo:
        return login()

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def hand_over(event: kopf.RawEvent, **_: Any) -> None:
        on_event(slim(event["object"]), event["type"] == "DELETED")

    return registry


def connection_info(client: Client, token: str | None) -> kopf.ConnectionInfo:
    """Return the client's connection in kopf's form."""
    configuration = client.configuration
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        scheme="Bearer" if token else None,
        token=token,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )


class JobWatch:
    """Runs kopf in its thread, from `start()` to `stop()`. If kopf ends by itself it is started again."""

    def __init__(
        self, client: Client, namespaces: Collection[str], on_event: OnEvent, again: Callable[[], None]
    ) -> None:
        """Prepare the watch of some namespaces; none means all. Both callables run in the event loop that calls `start`.

        `again()` is called when kopf lists all jobs anew. Jobs that vanished before that are not reported.
        """
        self._client = client
        self._namespaces = namespaces
        self._on_event = on_event
        self._again = again
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start watching. Every job that exists is reported first."""
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="kopf", daemon=True)
        self._thread.start()

    async def stop(self, timeout_s: float = 3.0) -> None:
        """Stop watching, and wait at most `timeout_s` for the thread. It is a daemon thread, so it cannot keep the process."""
        self._stop.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, timeout_s)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        wait_s = RESTART_MIN_S
        while True:
            started_s = time.monotonic()
            try:
                self._watch(loop)
            except Exception:
                log.exception("The watch of jobs ended by an error.")
            if time.monotonic() >= started_s + STEADY_S:
                wait_s = RESTART_MIN_S
            if not self._stop.is_set():
                log.warning("The watch of jobs has ended by itself; it begins anew in %.0f s.", wait_s)
            if self._stop.wait(wait_s):
                return
            wait_s = min(2 * wait_s, RESTART_MAX_S)
            loop.call_soon_threadsafe(self._again)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        def login() -> kopf.ConnectionInfo:
            future = asyncio.run_coroutine_threadsafe(self._client.bearer_token(), loop)
            return connection_info(self._client, future.result(REQUEST_TIMEOUT_S))

        def on_event(raw: Mapping[str, Any], gone: bool) -> None:
            loop.call_soon_threadsafe(self._on_event, raw, gone)

        asyncio.run(
            kopf.operator(
                registry=kopf_registry(on_event, login),
                settings=kopf_settings(),
                standalone=True,
                clusterwide=not self._namespaces,
                namespaces=list(self._namespaces),
                stop_flag=self._stop,
            )
        )

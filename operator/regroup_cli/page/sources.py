"""Find the jobs that the page shows: those of a cluster or of this machine."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from regroup_client.api import Api
from regroup_client.cluster_jobs import ClusterJobs
from regroup_client.errors import JobError
from regroup_client.jobs import Jobs, Wanted
from regroup_client.local_jobs import LocalJobs
from regroup_client.log_lines import Line
from regroup_client.log_streams import Choice, Log, Opened, Reader, read
from regroup_client.views import JobView, counted

HERE = "here"
"""Stands in an address where jobs of a cluster have their namespace."""
LOGS_S = 20.0
"""Longest time to read logs. A node that stops answering within a log would keep a thread for ever."""
MAX_LINES = 1000
"""Lines of all workers together, about."""


@dataclass(frozen=True)
class Key:
    """A job in an address of the page."""

    place: str
    name: str


class Source(Protocol):
    """A place with jobs: a cluster or this machine. The methods block, and raise ClientError."""

    title: str
    """Name of the place, for people."""
    is_local: bool
    has_namespaces: bool
    """The jobs are of several namespaces."""

    def all(self) -> list[JobView]:
        """Return the jobs, without what their pods and events say."""

    def key(self, view: JobView) -> Key:
        """Return the job's place in an address."""

    def find(self, key: Key) -> tuple[Jobs, str]:
        """Return the jobs among which one is, and its name there. Raises JobError."""


class Cluster:
    """Implements Source for one namespace of a cluster, or for all of them."""

    is_local = False

    def __init__(self, api: Api, *, everywhere: bool) -> None:
        self._api, self.has_namespaces = api, everywhere
        self.title = "all namespaces" if everywhere else f"namespace {api.namespace}"

    def all(self) -> list[JobView]:
        return ClusterJobs(self._api, everywhere=self.has_namespaces).all()

    def key(self, view: JobView) -> Key:
        return Key(view.namespace, view.name)

    def find(self, key: Key) -> tuple[Jobs, str]:
        if key.place != self._api.namespace and not self.has_namespaces:
            raise JobError(f"This page shows {self.title} only. Start another one with --namespace {key.place}.")
        return ClusterJobs(self._api.in_namespace(key.place)), key.name


class Local:
    """Implements Source for this machine. An address never names a file: it names a job that the list has."""

    title = "this machine"
    is_local = True
    has_namespaces = False

    def __init__(self, jobs: LocalJobs) -> None:
        self._jobs = jobs

    def all(self) -> list[JobView]:
        return self._jobs.all()

    def key(self, view: JobView) -> Key:
        return Key(HERE, f"{view.name}-{hashlib.sha256(view.directory.encode()).hexdigest()[:8]}")

    def find(self, key: Key) -> tuple[Jobs, str]:
        found = next((view for view in self.all() if self.key(view) == key), None)
        if found is None:
            raise JobError(
                "There is no such job on this machine any more. A run without --state-dir removes its files at its end."
            )
        return self._jobs, found.directory


def look(source: Source, key: Key) -> JobView:
    """Return all that is known of a job."""
    jobs, name = source.find(key)
    return jobs.look(name)


@dataclass(frozen=True)
class Tail:
    """The newest lines of a job's logs, by time."""

    lines: list[Line]
    late: str = ""
    """Sentence on the logs that did not come to their end, or an empty text."""


def tail(source: Source, key: Key, slot: int | None) -> Tail:
    """Return the newest lines of one worker of a job, or of all its workers."""
    jobs, name = source.find(key)
    with _bounded(jobs.logs(name, Wanted(slot=slot))) as reader:
        logs, _ = reader.logs()
        each = max(10, MAX_LINES // max(1, len(logs)))
        lines = list(read(_Known(reader, logs), Choice(), each))
        late = len(logs) - reader.whole if reader.is_over else 0
        return Tail(
            lines,
            f"The logs of {counted(late, 'worker')} were not read to their end within {LOGS_S:g} s."
            if late > 0
            else "",
        )


@contextmanager
def _bounded(reader: Reader) -> Iterator[_Bounded]:
    """Yield a reader whose logs are closed LOGS_S seconds from now."""
    bounded = _Bounded(reader)
    timer = threading.Timer(LOGS_S, bounded.close)
    timer.daemon = True
    timer.start()
    try:
        yield bounded
    finally:
        timer.cancel()


class _Bounded:
    """Implements Reader, and can close all that it has opened."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._opened: list[Opened] = []
        self.is_over = False
        """`close` was called."""
        self.whole = 0
        """Logs that were read to their end before that."""

    def logs(self) -> tuple[list[Log], bool]:
        return self._reader.logs()

    def open(self, log: Log, *, follow: bool, tail: int | None, after_ns: int = 0) -> Opened:
        opened = self._reader.open(log, follow=follow, tail=tail, after_ns=after_ns)
        self._opened.append(opened)
        if self.is_over:
            opened.close()
        return _Counted(self, opened)

    def close(self) -> None:
        self.is_over = True
        for one in list(self._opened):
            one.close()


class _Counted:
    """Implements Opened, and counts its log if it is read to its end."""

    def __init__(self, bounded: _Bounded, opened: Opened) -> None:
        self._bounded, self._opened = bounded, opened

    def start(self) -> None:
        self._opened.start()

    def chunks(self) -> Iterator[bytes]:
        yield from self._opened.chunks()
        self._bounded.whole += not self._bounded.is_over

    def close(self) -> None:
        self._opened.close()


class _Known:
    """Implements Reader with logs that were listed already, so that pods are listed once."""

    def __init__(self, reader: Reader, logs: list[Log]) -> None:
        self._reader, self._logs = reader, logs

    def logs(self) -> tuple[list[Log], bool]:
        return self._logs, False

    def open(self, log: Log, *, follow: bool, tail: int | None, after_ns: int = 0) -> Opened:
        return self._reader.open(log, follow=follow, tail=tail, after_ns=after_ns)

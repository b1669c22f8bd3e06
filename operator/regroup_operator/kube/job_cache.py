"""The newest object seen of each job, and its certainty. Pure: no I/O, and the clock is passed in.

Three sources fill it: the watch, the answers to writes, and live reads. The watch only moves an entry forward, since
the events of a watch that lags come after the answer to a write. Versions are compared as integers, which Kubernetes
promises since 1.35 (KEP-5504) and etcd has always done. A live answer counts whatever its version, because a store that
was restored from a backup counts from an earlier version on. It does not count if the watch has shown a newer object
since it was asked for.

DELETED, a 404 and `sweep` shrink the cache. `sweep` is needed since kopf reports no DELETED for jobs that vanished
while its watch was broken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from regroup_operator.api import Job, SpecError, parse_stored
from regroup_operator.model.records import Key


@dataclass(frozen=True)
class Entry:
    """One job. An entry is replaced, never changed."""

    raw: Mapping[str, Any]
    version: int
    confirmed_s: float | None = None
    """Time of the API server's last answer with this object or an older one, monotonic. None: the next reader must ask it."""


Listed = Mapping[Key, tuple[str, int]]
"""(namespace, name) -> UID and version, from a LIST of the jobs' metadata."""


class JobCache:
    """Maps (namespace, name) to the newest entry. It grows with the number of jobs."""

    def __init__(self) -> None:
        self._entries: dict[Key, Entry] = {}
        self._parsed: dict[Key, tuple[Entry, Job | SpecError]] = {}
        self._writing: set[Key] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Entry | None:
        """Return the entry of a job, or None."""
        return self._entries.get(key)

    def parse(self, key: Key, entry: Entry) -> Job:
        """Return the entry as a job. Raises SpecError as `parse_stored` does. Each entry is parsed once."""
        known = self._parsed.get(key)
        if known is None or known[0].raw is not entry.raw:
            job: Job | SpecError
            try:
                job = parse_stored(entry.raw)
            except SpecError as error:
                job = error
            known = self._parsed[key] = (entry, job)
        if isinstance(known[1], SpecError):
            raise known[1].with_traceback(None)  # else it would grow with each raise
        return known[1]

    def see(self, raw: Mapping[str, Any]) -> bool:
        """Add an object from the watch. Return whether it is news.

        While a write is under way, the object is most often that write, and is no news. The writer has the job
        reconciled afterwards if the watch has shown more, or the write has failed.
        """
        key, version = key_of(raw), version_of(raw)
        entry = self._entries.get(key)
        if entry is not None and version <= entry.version:
            return False
        same = entry is not None and _uid(entry.raw) == _uid(raw)
        self._entries[key] = Entry(raw, version, entry.confirmed_s if entry is not None and same else None)
        return key not in self._writing

    @contextmanager
    def writing(self, key: Key) -> Iterator[None]:
        """Mark the job as being written until the API server has answered or will not. A job has one write at a time."""
        self._writing.add(key)
        try:
            yield
        finally:
            self._writing.discard(key)

    def answered(self, raw: Mapping[str, Any], before: Entry | None, now_s: float) -> None:
        """Add a live answer to a request that was sent while `before` was the entry.

        The answer about a job that was dropped meanwhile is not kept. Its reader would get a job that is gone, and nothing would
        drop it again. If it is about a later job of that name, the watch is about to show that job.
        """
        key, version = key_of(raw), version_of(raw)
        entry = self._entries.get(key)
        if entry is None and before is not None:
            return
        if entry is not None and entry is not before and entry.version > version:
            if _uid(entry.raw) == _uid(raw):
                self._entries[key] = replace(entry, confirmed_s=now_s)
            return
        self._entries[key] = Entry(raw, version, now_s)

    def doubt(self, key: Key) -> None:
        """Have the next reader ask the API server, because a write was refused or its outcome is not known."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries[key] = replace(entry, confirmed_s=None)

    def drop(self, key: Key, uid: str | None = None) -> None:
        """Forget a job that is gone. With `uid` a later job of its name is kept."""
        entry = self._entries.get(key)
        if entry is not None and uid in (None, _uid(entry.raw)):
            del self._entries[key]
            self._parsed.pop(key, None)

    def objects(self) -> list[Mapping[str, Any]]:
        """Return the objects of all jobs. The caller must not change them."""
        return [entry.raw for entry in self._entries.values()]

    def snapshot(self) -> dict[Key, Entry]:
        """Return the present entries, for a later `sweep`."""
        return dict(self._entries)

    def sweep(self, before: Mapping[Key, Entry], listed: Listed) -> list[Key]:
        """Compare the entries with a LIST that was requested when they were `before`. Return the jobs to reconcile.

        Entries that have changed since then are left alone, since the LIST may be older. Other entries are dropped if
        they are not listed, and read live if another object is listed. Unknown jobs in the LIST are reconciled.
        """
        found = []
        for key, entry in before.items():
            if self._entries.get(key) is entry and listed.get(key) != (_uid(entry.raw), entry.version):
                if key in listed:
                    self.doubt(key)
                else:
                    self.drop(key)
                found.append(key)
        return found + [key for key in listed if key not in before and key not in self._entries]


def key_of(raw: Mapping[str, Any]) -> Key:
    """Return (namespace, name)."""
    return raw["metadata"]["namespace"], raw["metadata"]["name"]


def version_of(raw: Mapping[str, Any]) -> int:
    """Return the resourceVersion as an integer; 0 if it is not a number."""
    text = str(raw["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdecimal() else 0


def _uid(raw: Mapping[str, Any]) -> str:
    return str(raw["metadata"].get("uid", ""))

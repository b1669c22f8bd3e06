"""Exact counts of API requests, from the API server's audit log: who asked, with which verb, for which resource.

The policy is the same for every system. It leaves out the benchmark's client, leases and health checks. A watch counts once,
when it begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson

UNCOUNTED = ("admin", "system:apiserver", "kube-apiserver-kubelet-client")
"""Users that are no part of any system. `admin` is the benchmark itself."""


class Key(NamedTuple):
    """What requests are counted by."""

    user: str
    verb: str
    """As in RBAC: get, list, watch, create, update, patch, delete, deletecollection."""
    resource: str
    """With its subresource, such as pods/status."""


def policy() -> dict[str, Any]:
    """Return the audit policy, one line in the log for each counted request. A watch is written when it begins."""
    return {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived", "Panic"],
        "rules": [
            {"level": "None", "users": list(UNCOUNTED)},
            {"level": "None", "nonResourceURLs": ["*"]},
            {"level": "None", "resources": [{"group": "coordination.k8s.io", "resources": ["leases"]}]},
            {"level": "Metadata", "verbs": ["watch"], "omitStages": ["ResponseComplete"]},
            {"level": "Metadata", "omitStages": ["ResponseStarted"]},
        ],
    }


class AuditLog:
    """The log file of one API server, read as it grows. Keeps counts only: no more than users x verbs x resources."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = 0
        self._counts: Counter[Key] = Counter()
        self._refused: Counter[tuple[Key, int]] = Counter()

    def requests(self) -> dict[Key, int]:
        """Return the number of requests that have been answered until now."""
        self._read()
        return dict(self._counts)

    def refused(self) -> dict[tuple[Key, int], int]:
        """Return the number of requests that were answered with a status of 400 or more, by that status."""
        self._read()
        return dict(self._refused)

    def _read(self) -> None:
        if not self._file.exists():
            return
        with self._file.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # the server is writing it
                self._offset += len(line)
                key, code = parse(line)
                self._counts[key] += 1
                if code >= 400:
                    self._refused[key, code] += 1


def parse(line: bytes) -> tuple[Key, int]:
    """Return what a line of the log counts as, and the status of the answer."""
    event = orjson.loads(line)
    of = event.get("objectRef") or {}
    resource = "/".join(filter(None, [of.get("resource", ""), of.get("subresource", "")]))
    return Key(event["user"]["username"], event["verb"], resource), event.get("responseStatus", {}).get("code", 0)


def since(now: Mapping[Key, int], before: Mapping[Key, int]) -> dict[Key, int]:
    """Return what has come to `before`, without what has not changed."""
    return {key: count - before.get(key, 0) for key, count in now.items() if count > before.get(key, 0)}


def of_users(counts: Mapping[Key, int], users: Collection[str]) -> dict[Key, int]:
    """Return the counts of these users."""
    return {key: count for key, count in counts.items() if key.user in users}


def by_verb(counts: Mapping[Key, int]) -> dict[str, int]:
    """Return the sums by `verb resource`, most frequent first."""
    return _sums((f"{key.verb} {key.resource}", count) for key, count in counts.items())


def by_user(counts: Mapping[Key, int]) -> dict[str, int]:
    """Return the sums by user, most frequent first."""
    return _sums((key.user, count) for key, count in counts.items())


def _sums(items: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for name, count in items:
        sums[name] += count
    return dict(sums.most_common())

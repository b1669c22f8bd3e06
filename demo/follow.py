"""Follow the logs of a job's trainers while pods come and go: `kubectl logs --follow`, one for each pod."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from cluster.errors import ClusterError
from harness.job import JobView
from harness.steps import Steps, parse

LOOK_S = 2.0
"""Time between two looks for new pods. A log is read from its beginning, so nothing is missed in between."""


def to_read(pods: list[dict[str, Any]], read: Mapping[str, int | None]) -> list[str]:
    """Return the pods whose log has to be read now, from its beginning.

    `read` has the exit code of the last `kubectl logs` of each pod, None while it runs. The log of a pod that has ended
    is read once to its end. The pod may have ended between two looks, or while its log could not be read.
    """
    names = []
    for pod in pods:
        name, phase = pod["metadata"]["name"], pod["status"].get("phase")
        is_complete = phase != "Running" and read.get(name) == 0
        if phase in ("Running", "Succeeded", "Failed") and not is_complete and read.get(name, 0) is not None:
            names.append(name)
    return names


class Followed:
    """Reads the steps of a job until the `with` block ends."""

    def __init__(self, job: JobView) -> None:
        self.steps = Steps()
        self._job = job
        self._done = threading.Event()
        self._streams: dict[str, subprocess.Popen[str]] = {}
        self._looker = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Steps:
        self._looker.start()
        return self.steps

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._looker.join()
        for stream in self._streams.values():
            stream.kill()
            stream.wait()

    def _look(self) -> None:
        while not self._done.wait(LOOK_S):
            with suppress(ClusterError):  # no answer this time
                for name in to_read(self._job.pods(), {name: one.poll() for name, one in self._streams.items()}):
                    self._streams[name] = self._job.stream_logs(name)
                    threading.Thread(target=self._read, args=(self._streams[name], name), daemon=True).start()

    def _read(self, stream: subprocess.Popen[str], pod: str) -> None:
        assert stream.stdout is not None
        for line in stream.stdout:
            step = parse(line, pod)
            if step is not None:
                self.steps.add(step)

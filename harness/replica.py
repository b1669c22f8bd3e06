"""One operator as a process of its own, as its image runs it: `python -m regroup_operator`, here on loopback."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from cluster.apiserver import free_port

END_TIMEOUT_S = 40.0
WITH_CLOCK_OFF = """
import runpy, sys, time
right, off_s = time.time, float(sys.argv[1])
time.time = lambda: right() + off_s
runpy.run_module("regroup_operator", run_name="__main__")
"""


class Replica:
    """One operator process. `settings` adds REGROUP_SETTINGS_ variables, by their names without the prefix."""

    def __init__(
        self,
        name: str,
        kubeconfig: Path,
        log: Path,
        *,
        namespace: str,
        settings: Mapping[str, str] | None = None,
        clock_off_s: float = 0.0,
    ) -> None:
        """Start the operator. `namespace` is its own, where a pod called `name` stands for its pod. Its wall clock is
        `clock_off_s` ahead."""
        self.name, self.log = name, log
        self.agents, self.ops = free_port(), free_port()
        chosen = {
            "NAMESPACE": namespace,
            "MEMBERSHIP_HOST": "127.0.0.1",
            "MEMBERSHIP_PORT": str(self.agents),
            "OPS_HOST": "127.0.0.1",
            "OPS_PORT": str(self.ops),
            "POD_NAME": name,
            **(settings or {}),
        }
        environ = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        environ |= {f"REGROUP_SETTINGS_{key}": value for key, value in chosen.items()}
        how = ["-c", WITH_CLOCK_OFF, str(clock_off_s)] if clock_off_s else ["-m", "regroup_operator"]
        with log.open("w") as file:
            self.process = subprocess.Popen([sys.executable, *how], env=environ, stderr=file)

    def page(self, path: str) -> tuple[int, str]:
        """Return status and text of a page of the ops port; (0, reason) while nobody listens."""
        return ask(f"http://127.0.0.1:{self.ops}{path}")

    def agent_call(self, ca: str | None = None) -> tuple[int, str]:
        """Return the answer to an agent without a token; (0, reason) if TLS or TCP fail."""
        context = ssl.create_default_context(cadata=ca)
        context.check_hostname = False  # the certificate is for the Service's name, which only a cluster resolves
        return ask(f"https://127.0.0.1:{self.agents}/v1/namespaces/n/pods/p/stream", context, body=b"")

    def ready(self) -> bool:
        """Return whether the operator reports ready. Fail if it has ended."""
        assert self.process.poll() is None, self.log.read_text()
        return self.page("/readyz")[0] == 200

    def leads(self) -> bool:
        """Return whether the operator reports that it leads. Fail if it has ended."""
        assert self.process.poll() is None, self.log.read_text()
        return "regroup_leader 1.0" in self.page("/metrics")[1]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end of the process, and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(END_TIMEOUT_S)


def ask(url: str, context: ssl.SSLContext | None = None, body: bytes | None = None) -> tuple[int, str]:
    """Return status and text of the answer to GET, or to POST of a body; (0, reason) if nobody answers."""
    try:
        with urllib.request.urlopen(url, body, timeout=5, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)

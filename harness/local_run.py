"""`regroup run` as a process of its own: its status, its agents and its trainers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.polling import until
from harness.processes import children, environment_of, name_of
from regroup_cli.local import FileStore


class LocalRun:
    """A running `regroup run`, its job's file and its processes."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.state = directory / "state"
        self.log = directory / "log"
        command = [sys.executable, "-m", "regroup_cli", "run", "--state-dir", str(self.state), *arguments]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def status(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.state / "job.json").read_text()).get("status") or {}
        except FileNotFoundError:
            return {}
        return found

    def wait(self, condition: Callable[[dict[str, Any]], bool], what: str, timeout_s: float = 120) -> dict[str, Any]:
        """Wait until the status fulfils a condition, and return it. Fail at once if the run ends first."""

        def there() -> dict[str, Any] | None:
            ended, status = self.process.poll() is not None, self.status()
            if condition(status):
                return status
            assert not ended, f"ended before {what}:\n{self.log.read_text()}"
            return None

        found = until(there, what, timeout_s=timeout_s, every_s=0.05, details=self.log.read_text)
        assert found is not None
        return found

    def trains(self, ranks: int, after: int = 0) -> dict[str, Any]:
        """Wait until an adopted generation above `after` trains with this number of ranks."""

        def there(status: dict[str, Any]) -> bool:
            membership = status.get("membership") or {}
            settled = membership.get("adopted") and membership.get("worldSize") == ranks
            return bool(settled) and membership["generation"] > after and status.get("phase") == "Running"

        return self.wait(there, f"{ranks} ranks train in a generation above {after}")

    def scale(self, workers: int) -> None:
        subprocess.run([sys.executable, "-m", "regroup_cli", "scale", str(self.state), str(workers)], check=True)

    def change_spec(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change the job's spec as `kubectl edit` does."""
        FileStore(self.state / "job.json").change_spec(change)

    def close(self) -> None:
        """Kill the run. The kernel kills its agents and their trainers with their parent."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)

    def agents(self) -> dict[int, str]:
        """Return {pid: worker} of the agents."""
        named = {pid: environment_of(pid).get("REGROUP_POD_NAME") for pid in children(self.process.pid)}
        return {pid: worker for pid, worker in named.items() if worker}

    def trainers(self) -> dict[str, int]:
        """Return {worker: pid} of the trainers (one process per worker)."""
        return {
            worker: child
            for agent, worker in self.agents().items()
            for child in children(agent)
            if name_of(child).startswith("trainer-")
        }

"""One DistributedTrainingJob as its user sees it: apply, patch, status, pods."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import Any

from cluster.errors import ClusterError
from cluster.kubectl import Kubectl, wait_until

RESOURCE = "distributedtrainingjobs.regroup.dev"
_PATH = "/apis/regroup.dev/v1alpha1/namespaces/{}/distributedtrainingjobs/{}"


@dataclass(frozen=True)
class JobView:
    """A job in the cluster, by name."""

    kubectl: Kubectl
    namespace: str
    name: str

    def _run(self, *arguments: str, **options: Any) -> str:
        return self.kubectl.run("--namespace", self.namespace, *arguments, **options)

    def _pods(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    def get(self) -> dict[str, Any]:
        """Return the object."""
        found: dict[str, Any] = json.loads(self.kubectl.read(_PATH.format(self.namespace, self.name)))
        return found

    def status(self) -> dict[str, Any]:
        """Return the job's status. It is empty before the operator has seen the job."""
        return self.get().get("status") or {}

    def pods(self) -> list[dict[str, Any]]:
        """Return the job's worker pods, by slot."""
        found: dict[str, list[dict[str, Any]]] = json.loads(
            self.kubectl.read(self._pods(), labelSelector=f"regroup.dev/job-name={self.name},regroup.dev/role=worker")
        )
        return sorted(
            found["items"], key=lambda p: (int(p["metadata"]["labels"]["regroup.dev/slot"]), p["metadata"]["name"])
        )

    def pod(self, slot: int) -> dict[str, Any]:
        """Return the running pod of a slot."""
        of_slot = [p for p in self.pods() if p["metadata"]["labels"]["regroup.dev/slot"] == str(slot)]
        alive = [p for p in of_slot if "deletionTimestamp" not in p["metadata"]]
        if alive:
            return alive[-1]
        raise ClusterError(f"The job {self.name} has no pod in slot {slot}.")

    def patch_replicas(self, replicas: int) -> None:
        """Resize with kubectl patch."""
        self.patch(replicas=replicas)

    def patch(self, **spec: Any) -> None:
        """Change fields of the spec with a merge patch: None removes a field."""
        self._run("patch", RESOURCE, self.name, "--type=merge", f"--patch={json.dumps({'spec': spec})}")

    def scale(self, replicas: int) -> None:
        """Resize with kubectl scale."""
        self._run("scale", RESOURCE, self.name, f"--replicas={replicas}")

    def delete_pod(self, name: str, *, grace_s: int | None = None) -> None:
        """Delete a pod. `grace_s` 0 gives it no grace, None the pod's own."""
        options = [] if grace_s is None else [f"--grace-period={grace_s}", *(["--force"] if grace_s == 0 else [])]
        self._run("delete", "pod", name, "--wait=false", *options)

    def logs(self, pod: str) -> str:
        """Return the log of a pod's trainer container."""
        return self.kubectl.read(f"{self._pods()}/{pod}/log", container="trainer")

    def stream_logs(self, pod: str) -> subprocess.Popen[str]:
        """Follow the trainer container's log, each line with the time at which it was written. The caller ends the process."""
        options = ("--container=trainer", "--follow", "--timestamps")
        return self.kubectl.stream("--namespace", self.namespace, "logs", pod, *options)

    def wait(self, timeout_s: float, what: str, **wanted: Any) -> dict[str, Any]:
        """Wait until the status has these values, and return it: state=, generation=, world_size=, step= (at least), ready=."""
        seen: dict[str, Any] = {}

        def there() -> bool:
            seen.clear()
            seen.update(self.status())
            return matches(seen, wanted)

        try:
            wait_until(there, what, timeout_s=timeout_s, every_s=0.2)
        except ClusterError as error:
            raise ClusterError(f"{error} (status: {describe(seen)})") from None
        return seen


def matches(status: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Return whether a status has the values. `generation` and `step` are lower bounds."""
    membership, summary = status.get("membership") or {}, status.get("summary") or {}
    values = {
        "state": summary.get("state"),
        "ready": summary.get("ready"),
        "world_size": membership.get("worldSize"),
        "adopted": membership.get("adopted", False),
    }
    least = {"generation": membership.get("generation", 0), "step": (status.get("progress") or {}).get("step", -1)}
    return all(values[k] == v if k in values else least[k] >= v for k, v in wanted.items())


def describe(status: dict[str, Any]) -> str:
    """Return a status in one line, for an error sentence."""
    conditions = "; ".join(
        f"{c['type']}={c['status']} {c['reason']}: {c['message']}"
        for c in status.get("conditions", ())
        if c["status"] != "True"
    )
    return f"{status.get('summary')} {status.get('membership')} {status.get('progress')} {conditions}"

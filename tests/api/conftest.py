"""A bare API server with our CRD: nothing acts on what is stored, so each answer is the API server's own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster import apiserver, binaries

ROOT = Path(__file__).resolve().parents[2]
CRD = ROOT / "crds" / "regroup.dev_distributedtrainingjobs.yaml"


@dataclass(frozen=True)
class Answer:
    """What kubectl said."""

    code: int
    out: str
    error: str


@dataclass(frozen=True)
class Api:
    """kubectl against the bare API server."""

    kubeconfig: Path

    def kubectl(self, *arguments: str, document: dict[str, Any] | None = None) -> Answer:
        """Run kubectl, with `document` on standard input when given."""
        done = subprocess.run(
            [str(binaries.ensure() / "kubectl"), "--kubeconfig", str(self.kubeconfig), *arguments],
            input=None if document is None else json.dumps(document),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    def done(self, *arguments: str, document: dict[str, Any] | None = None) -> str:
        """Run kubectl, which must succeed, and return what it printed."""
        answer = self.kubectl(*arguments, document=document)
        assert answer.code == 0, answer.error
        return answer.out

    def refused(self, *arguments: str, document: dict[str, Any] | None = None) -> str:
        """Run kubectl, which must fail, and return what it said."""
        answer = self.kubectl(*arguments, document=document)
        assert answer.code != 0, answer.out
        return answer.error

    def get(self, *arguments: str) -> dict[str, Any]:
        """Return the parsed JSON of kubectl get."""
        found: dict[str, Any] = json.loads(self.done("get", *arguments, "--output=json"))
        return found


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with apiserver.running(tmp_path_factory.mktemp("api")) as server:
        api = Api(server.kubeconfig)
        api.done("apply", "--server-side", f"--filename={CRD}")
        # So that operators read the issuer's keys by the chart's own rights. Clusters may have removed it, too.
        api.done("delete", "clusterrolebinding", "system:service-account-issuer-discovery")
        api.done("wait", "--for=condition=Established", f"--filename={CRD}", "--timeout=30s")
        # A kubectl that has listed what the server knows before the CRD was there asks again for `get`, but not for `explain`.
        api.done("get", "trainingjobs", "--all-namespaces")
        yield api


@pytest.fixture
def namespace(api: Api, request: pytest.FixtureRequest) -> str:
    """A namespace of the test's own; the server goes with all of them."""
    name = f"t{abs(hash(request.node.nodeid)):x}"
    api.done("create", "namespace", name)
    return name

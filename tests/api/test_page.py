"""The page of `kubectl regroup ui` against a real API server: it shows what its user may see, and nothing more."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, CookieJar

from cluster import binaries
from harness.sample_jobs import event, pods_of, resnet
from regroup_cli.streams import TERMINATED
from tests.api.conftest import ROOT, Api

ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+)(/[\w-]+)(/\?code=\S+)")
SECOND = "second-user"


@pytest.fixture
def filled(api: Api, namespace: str) -> str:
    """A namespace with a job, its pods and an event; the second user may list jobs there, and nothing else."""
    one = resnet()
    template = {"spec": {"containers": [{"name": "trainer", "image": "x", "command": ["python"]}]}}
    made = {"apiVersion": "regroup.dev/v1alpha1", "kind": "DistributedTrainingJob", "metadata": {"name": "resnet50"},
            "spec": {"replicas": 12, "template": template}}  # fmt: skip
    here = f"--namespace={namespace}"
    api.done("create", here, "--filename=-", document=made)
    api.done("patch", "dtj/resnet50", here, "--subresource=status", "--type=merge",
             f"--patch={json.dumps({'status': one['status']})}")  # fmt: skip
    for pod in pods_of(one):
        metadata = {"name": pod["metadata"]["name"], "labels": {"regroup.dev/job-name": "resnet50"}}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**pod["spec"], **template["spec"]}}
        api.done("create", here, "--filename=-", document=body)
    about = {"kind": "DistributedTrainingJob", "name": "resnet50", "namespace": namespace}
    said = event(0, "Warning", "NodeLost", "Node gpu-b does not answer.")
    body = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "said"}, "involvedObject": about,
            "type": said["type"], "reason": said["reason"], "message": said["note"]}  # fmt: skip
    api.done("create", here, "--filename=-", document=body)
    return namespace


@contextmanager
def page(api: Api, namespace: str, tmp_path: Path, *, user: str = "") -> Iterator[str]:
    """Run the command, and yield the address that it prints."""
    config = tmp_path / "kubeconfig"
    config.write_text(api.kubeconfig.read_text())
    if user:
        whoami = json.loads(api.done("config", "view", "--raw", "--output=json"))
        whoami["users"][0]["user"]["as"] = user
        config.write_text(json.dumps(whoami))
    environment = {
        **os.environ,
        "PATH": f"{binaries.ensure()}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("operator", "trainer-image")),
    }
    command = [sys.executable, "-m", "regroup_cli.plugin", "ui", f"--kubeconfig={config}", f"--namespace={namespace}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert f"jobs of namespace {namespace}: http://127.0.0.1:" in line
            yield line
        finally:
            process.terminate()
            try:
                assert process.wait(30) == TERMINATED
            finally:
                process.kill()


def read(line: str, *paths: str) -> list[str]:
    """Open the address that a line has, and return the texts of paths."""
    found = ADDRESS.search(line)
    assert found is not None

    async def run() -> list[str]:
        out = []
        async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as session:
            for path in (found[3], *paths):
                async with session.get(found[1] + found[2] + path) as response:
                    out.append(await response.text())
        return out[1:]

    return asyncio.run(run())


def test_the_page_shows_jobs_pods_and_events(api: Api, filled: str, tmp_path: Path) -> None:
    job = f"/jobs/{filled}/resnet50"
    with page(api, filled, tmp_path) as line:
        listed, shown, elsewhere = read(line, "/", job, "/jobs/kube-system/resnet50")
    assert f'{job}">resnet50' in listed
    for expected in (
        "resnet50 is Running.",
        "gpu-b",
        "resnet50-worker-5-2",
        "Node gpu-b does not answer.",
        "8 → 12 workers",
    ):
        assert expected in shown, expected
    assert f"This page shows namespace {filled} only." in elsewhere


def allow(api: Api, namespace: str, resource: str) -> None:
    """Let the second user read one kind of object."""
    name, here = f"see-{resource.partition('.')[0]}", f"--namespace={namespace}"
    api.done("create", "role", name, here, "--verb=get,list", f"--resource={resource}")
    api.done("create", "rolebinding", name, here, f"--role={name}", f"--user={SECOND}")


def test_a_second_user_sees_what_they_may(api: Api, filled: str, tmp_path: Path) -> None:
    job = f"/jobs/{filled}/resnet50"
    with page(api, filled, tmp_path, user=SECOND) as line:
        texts: list[Any] = read(line, "/", job, f"{job}/logs")
    for text in texts:
        assert "forbidden" in text
        assert not any(hidden in text for hidden in ("Running", "gpu-b", "worker-5-2", "Node gpu", "step"))
    allow(api, filled, "distributedtrainingjobs.regroup.dev")
    with page(api, filled, tmp_path, user=SECOND) as line:
        listed, shown, logs = read(line, "/", job, f"{job}/logs")
    assert "Running" in listed
    assert "Steps per second" in shown
    assert "You may not read the pods of the job, so they are not shown." in shown
    assert "You may not read the events of the job, so they are not shown." in shown
    assert "Node gpu-b does not answer." not in shown
    assert "forbidden" in logs

"""The way to the API server through a kubectl, and what is left of it when the command ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.polling import until
from regroup_client import access, api
from regroup_client.access import Target, connect
from regroup_client.api import JOBS, PODS
from regroup_client.errors import AccessError, ApiError

FAKE = Path(__file__).with_name("fake_kubectl.py")
JOB = "/apis/regroup.dev/v1alpha1/namespaces/team-a/distributedtrainingjobs/digits"


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A function that puts a kubectl with these answers first on the PATH, and returns its directory."""

    def put(**answers: Any) -> Path:
        shutil.copy(FAKE, tmp_path / "kubectl")  # with its mode: it is executable
        (tmp_path / "answers.json").write_text(json.dumps({"namespace": "team-a", **answers}))
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return tmp_path

    return put


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_requests_reach_the_api_server_through_a_socket_that_nobody_else_can_open(kubectl: Callable[..., Path]) -> None:
    found = {"metadata": {"name": "digits"}}
    directory = kubectl(**{f"GET {JOB}": [200, json.dumps(found)], f"PATCH {JOB}": [200, "{}"]})
    with connect(Target()) as api:
        assert api.get(JOBS, "digits") == found
        assert api.find(PODS, "none") is None
        api.apply(JOBS, {"metadata": {"name": "digits"}, "spec": {}}, dry_run=True)
        pid = int((directory / "pid").read_text())
    assert (directory / "mode").read_text() == "0o700"
    until(lambda: not is_there(pid), "kubectl proxy has ended", timeout_s=10)
    asked = [json.loads(line) for line in (directory / "asked").read_text().splitlines()]
    assert [one[0] for one in asked] == ["GET", "GET", "PATCH"]
    assert "dryRun=All" in asked[2][1]
    assert asked[2][2] == "application/apply-patch+yaml"


@pytest.mark.parametrize(
    ("status", "text", "want"),
    [
        pytest.param(
            403, '{"reason": "Forbidden", "message": "jobs is forbidden"}', "jobs is forbidden", id="a Status"
        ),
        pytest.param(
            500, "getting credentials: exec: no such file\n", "getting credentials: exec: no such file", id="text"
        ),
        pytest.param(502, "", "The API server answered 502 .", id="nothing"),
    ],
)
def test_refusals_are_the_servers_own_sentence(kubectl: Callable[..., Path], status: int, text: str, want: str) -> None:
    kubectl(**{f"GET {JOB}": [status, text]})
    with connect(Target()) as api, pytest.raises(ApiError) as refused:
        api.get(JOBS, "digits")
    assert (refused.value.status, str(refused.value)) == (status, want)


def test_kubectl_that_cannot_start_its_proxy_says_why(kubectl: Callable[..., Path]) -> None:
    kubectl(refuses='error: context "x" does not exist')
    with pytest.raises(AccessError, match='did not start: context "x" does not exist'), connect(Target(context="x")):
        pass


def test_without_kubectl_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(AccessError, match="kubectl is not on the PATH"), connect(Target()):
        pass


def test_kubeconfig_that_never_answers_is_one_sentence(
    kubectl: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = kubectl()
    (directory / "kubectl").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(access, "START_S", 0.1)
    with pytest.raises(AccessError, match=r"`kubectl config view` has not ended within 0 s\."), connect(Target()):
        pass


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_proxy_ends_with_the_command(kubectl: Callable[..., Path], number: signal.Signals) -> None:
    directory = kubectl()
    script = "import sys; from regroup_client.access import *\nwith connect(Target()): print('up', flush=True); sys.stdin.read()"
    environment = {**os.environ, "PYTHONPATH": str(Path(access.__file__).parents[1])}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=pipe, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(number)
        process.wait(20)
        pid = int((directory / "pid").read_text())
        until(lambda: not is_there(pid), "kubectl proxy has ended", timeout_s=10)
        home = Path((directory / "home").read_text())
        until(lambda: not home.exists(), "its socket is removed", timeout_s=10)


def test_long_temporary_directory_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / ("x" * 90)))
    assert access._short_directory() == "/tmp"


def test_watch_whose_other_end_says_nothing_more_has_an_end(
    kubectl: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "TIMEOUT_S", 0.5)
    one = json.dumps({"type": "ADDED", "object": {"a": 1}}) + "\n"
    kubectl(**{f"WATCH {JOB.rpartition('/')[0]}": [None, one]})
    with connect(Target()) as cluster:
        events = cluster.watch(JOBS, timeoutSeconds="0")
        assert next(events)["object"] == {"a": 1}
        with pytest.raises(ApiError, match=r"The connection to the API server ended \(nothing came in time\)"):
            next(events)


def test_silent_log_over_tls_is_kept_alive_by_the_kernel() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as stream:
        api._keep_alive(stream)
        assert stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30

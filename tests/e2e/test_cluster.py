"""The cluster itself: nodes, their power switch, and what a pod finds in it."""

import contextlib
import json
import signal
import subprocess
import tarfile
import time
import uuid
from pathlib import Path

import pytest

from cluster import __main__ as command_line
from cluster import addresses, host, images, lifecycle, nodes, oci, paths, template
from cluster.errors import ClusterError
from cluster.kubectl import wait_until
from cluster.settings import Settings
from harness import faults
from tests.e2e.kit import Cluster, restricted_pod
from tests.long import only_long

_TORCH = """
import importlib.util, os, torch, torch.distributed, sklearn, numpy
assert os.getuid() != 0, os.getuid()
assert importlib.util.find_spec("regroup") is None, "the library comes with the agent"
print(float((torch.ones(3) @ torch.ones(3))), torch.distributed.is_gloo_available(), os.environ["OMP_NUM_THREADS"])
"""
_BUILD = """
mount -t tmpfs none /etc/cni && container=$("$@" from scratch) && "$@" rm "$container" >/dev/null && find /etc/cni -type f
"""
_SERVER = "import http.server; http.server.test(http.server.SimpleHTTPRequestHandler, port=8000)"
_CLIENT = """
import os, ssl, socket, urllib.request
page = urllib.request.urlopen("http://server:8000/", timeout=20)
api = socket.create_connection((os.environ["KUBERNETES_SERVICE_HOST"], 443), timeout=5)
ca = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
tls = ssl.create_default_context(cafile=ca).wrap_socket(api, server_hostname="kubernetes.default.svc")
print(page.status, tls.version())
"""


@pytest.mark.usefixtures("beside_samples")
def test_three_nodes_are_ready(cluster: Cluster) -> None:
    assert list(cluster.nodes().values()).count(True) >= 3


@pytest.mark.usefixtures("cluster", "beside_samples")
def test_bridge_has_an_address_of_its_own() -> None:
    """Else it changes with the nodes, and those that know the old one lose the API server for a minute."""
    shown = subprocess.run(
        ["ip", "-json", "link", "show", addresses.BRIDGE], capture_output=True, check=True, text=True
    )
    assert json.loads(shown.stdout)[0]["address"] == addresses.BRIDGE_MAC


@pytest.mark.usefixtures("own_cluster", "beside_samples")
def test_up_again_keeps_what_runs() -> None:
    before = {node.name: nodes.init_pid(node) for node in nodes.known()}
    lifecycle.up(Settings())
    assert {node.name: nodes.init_pid(node) for node in nodes.known()} == before


@pytest.mark.usefixtures("own_cluster", "beside_samples")
def test_image_builder_writes_nothing_where_the_nodes_mount_their_network() -> None:
    """It locks its network's directory, also to build without one; `down` could not remove /etc/cni/net.d then."""
    host.ensure_packages(host.BUILDER_PACKAGES)
    command = ["unshare", "--mount", "sh", "-c", _BUILD, "sh", *images.buildah()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.usefixtures("beside_samples")
def test_image_of_ones_own_is_loaded_from_its_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into a real containerd, in a directory of the test's own: no node has to be there, those that come start with it."""
    monkeypatch.setenv("REGROUP_CLUSTER_DIR", str(tmp_path / "cluster"))
    monkeypatch.delenv("REGROUP_CONTEXT", raising=False)
    file, image = _archive(tmp_path, b"program")
    assert command_line.main(["load", str(file)]) == 0
    assert "image: localhost/mine:1 " in capsys.readouterr().out
    with template._running() as client:
        assert client.images().get(image.name) == image.id


@pytest.mark.usefixtures("beside_samples")
def test_image_of_ones_own_is_loaded_into_nodes_that_run_and_a_pod_starts_from_it(
    own_cluster: Cluster, restricted_namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the nodes are the cluster's: the next cluster does not hold the image."""
    monkeypatch.setattr(paths, "images", lambda: tmp_path / "images")
    called = f"localhost/own-{uuid.uuid4().hex[:8]}:2"
    # The program ignores what stands behind it; this cluster cannot hold the image from another run.
    file, image = _archive(tmp_path, (paths.bin_dir() / "pause").read_bytes() + called.encode())
    on = [node for node in nodes.known() if nodes.is_on(node)]
    try:
        lifecycle.load([str(file)], called=called)
        assert [images.node_client(node).images().get(called) for node in on] == [image.id] * len(own_cluster.nodes())
        pod = restricted_pod(restricted_namespace, "own", called, ["/program"])
        own_cluster.kubectl.apply(pod)
        wait_until(lambda: _ends_by_signal(own_cluster, restricted_namespace, "own"), "the pod ends", timeout_s=30)
    finally:
        for client in map(images.node_client, on):
            if called in client.images():
                client.run("images", "rm", called)


@pytest.mark.usefixtures("beside_samples")
def test_pod_of_the_trainer_image_computes_as_non_root(
    cluster: Cluster, trainer_image: str, restricted_namespace: str
) -> None:
    cluster.kubectl.apply(restricted_pod(restricted_namespace, "torch", trainer_image, ["python", "-c", _TORCH]))
    assert _log_of_finished(cluster, restricted_namespace, "torch") == "3.0 True 1"


@pytest.mark.usefixtures("beside_samples")
def test_pod_that_wants_root_is_refused(cluster: Cluster, trainer_image: str, restricted_namespace: str) -> None:
    pod = restricted_pod(restricted_namespace, "root", trainer_image, ["id"])
    pod["spec"]["securityContext"] = {"runAsUser": 0}
    with pytest.raises(ClusterError, match="violates PodSecurity"):
        cluster.kubectl.apply(pod)


@pytest.mark.usefixtures("beside_samples")
def test_pods_reach_each_other_by_name_across_nodes_and_the_api_server_by_cluster_ip(
    cluster: Cluster, trainer_image: str, restricted_namespace: str
) -> None:
    here, there, *_ = sorted(cluster.nodes())
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "server", "namespace": restricted_namespace},
        "spec": {"clusterIP": "None", "selector": {"app": "server"}},
    }
    server = restricted_pod(restricted_namespace, "server", trainer_image, ["python", "-c", _SERVER], nodeName=here)
    client = restricted_pod(restricted_namespace, "client", trainer_image, ["python", "-c", _CLIENT], nodeName=there)
    cluster.kubectl.apply(service, server)
    cluster.kubectl.run("wait", "--for=condition=Ready", "pod/server", f"-n{restricted_namespace}", "--timeout=60s")
    wait_until(lambda: _listens(cluster, restricted_namespace), timeout_s=30, what="the server listens")
    cluster.kubectl.apply(client)
    assert _log_of_finished(cluster, restricted_namespace, "client") == "200 TLSv1.3"


def test_power_off_is_noticed_within_15_seconds_and_power_on_heals(own_cluster: Cluster) -> None:
    node = sorted(own_cluster.nodes())[-1]
    own_cluster.power_off(node)
    try:
        started_s = time.monotonic()
        wait_until(lambda: not own_cluster.nodes()[node], timeout_s=15, what=f"{node} is NotReady")
        assert time.monotonic() - started_s > 1, "the node was not Ready to begin with"
    finally:
        own_cluster.power_on(node)
    assert own_cluster.nodes()[node]


def _archive(directory: Path, program: bytes) -> tuple[Path, oci.Image]:
    """Return the archive of an image with one static program, and the image; localhost/mine:1 is its name there."""
    (directory / "program").write_bytes(program)
    image = oci.add_single_file(directory / "saved", "localhost/mine:1", directory / "program", "/program")
    file = directory / "mine.tar"
    with tarfile.open(file, "w") as archive:
        for part in (directory / "saved").iterdir():
            archive.add(part, part.name)
    return file, image


def _ends_by_signal(cluster: Cluster, namespace: str, name: str) -> bool:
    """Have the program of a pod end as it does on SIGTERM, with 0, once it runs; return whether the pod has succeeded."""
    pod = cluster.kubectl.get("pod", name, f"-n{namespace}")
    with contextlib.suppress(ClusterError, ProcessLookupError):  # it does not run yet, or no longer
        faults.signal_main(pod["metadata"]["uid"], "/program", signal.SIGTERM)
    assert pod["status"]["phase"] != "Failed", pod["status"]
    return str(pod["status"]["phase"]) == "Succeeded"


def _listens(cluster: Cluster, namespace: str) -> bool:
    probe = "import socket; socket.create_connection(('127.0.0.1', 8000), 1)"
    cluster.kubectl.run("exec", "server", f"-n{namespace}", "--", "python", "-c", probe)
    return True


def _log_of_finished(cluster: Cluster, namespace: str, name: str) -> str:
    def phase() -> str:
        return str(cluster.kubectl.get("pod", name, f"-n{namespace}")["status"]["phase"])

    wait_until(lambda: phase() in ("Succeeded", "Failed"), timeout_s=90, what=f"pod {name} ends")
    log = cluster.kubectl.run("logs", name, f"-n{namespace}").strip()
    assert phase() == "Succeeded", log
    return log


@only_long("no other test here asks for GPUs")
def test_fake_gpus_appear_survive_a_power_cut_and_go(own_cluster: Cluster) -> None:
    def gpus() -> list[str]:
        items = own_cluster.kubectl.get("nodes")["items"]
        return [item["status"]["allocatable"].get("nvidia.com/gpu", "0") for item in items]

    lifecycle.up(Settings(num_gpus=8))
    try:
        assert gpus() == ["8", "8", "8"]
        own_cluster.power_off("n3")
        own_cluster.power_on("n3")
        assert gpus() == ["8", "8", "8"]
    finally:
        lifecycle.up(Settings())
    assert gpus() == ["0", "0", "0"]

"""Nodes: each has its own network, pid, mount and cgroup namespaces, its own containerd, kubelet and kube-proxy.

`power_off` is a power cut: SIGKILL for the node's process 1, without any clean-up in the API. `addresses.Node` has the
names of everything that a node leaves on the machine (namespace, link, route, cgroups), and `remove` removes it.
"""

import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from cluster import addresses, binaries, host, node_init, paths, processes, template
from cluster.addresses import Node
from cluster.errors import ClusterError
from cluster.kubectl import Kubectl
from cluster.pki import Authority
from cluster.settings import Settings
from harness.polling import until, within


def directory(node: Node) -> Path:
    """Return the directory of a node's disk."""
    return paths.state() / "nodes" / node.name


def is_on(node: Node) -> bool:
    """Return whether the node's process 1 runs."""
    return processes.recorded(directory(node), "init") is not None


def init_pid(node: Node) -> int:
    """Return the machine's pid of the node's process 1. Raise ClusterError if the node is off."""
    process = processes.recorded(directory(node), "init")
    if process is None:
        raise ClusterError(f"Node {node.name} is off: `python -m cluster power-on {node.name}` first.")
    return process.pid


def power_on(node: Node, settings: Settings) -> None:
    """Start a node unless it is on; returns before the node is Ready (about 6 s from nothing, 1 s after a power cut)."""
    if is_on(node):
        return
    home = directory(node)
    processes.stop(home, "unshare")
    _remove_cgroups(node)
    for part in ("log", *node_init.MOUNTS):
        if part != "containerd":
            (home / part).mkdir(parents=True, exist_ok=True)
    _make_mount_points()
    template.copy_to(home / "containerd")
    _connect(node, settings)
    config = _write_config(node)
    environment = {**os.environ, "PYTHONPATH": str(paths.REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PATH"] = f"{environment.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
    unshare = processes.spawn(
        home,
        "unshare",
        [
            *("nsenter", f"--net=/run/netns/{node.network_namespace}"),
            *("unshare", "--mount", "--propagation=private", "--pid", "--uts", "--ipc", "--fork", "--kill-child"),
            *("--mount-proc", sys.executable, "-m", "cluster.node_init", config),
        ],
        environment=environment,
    )
    processes.record(home, "init", processes.identify(_only_child(unshare, node)))


def power_off(node: Node) -> None:
    """Cut the node's power. All its processes are dead when this returns, and nobody was told.

    The link goes first. Else the kernel would close the dying sockets, while a machine without power sends nothing.
    """
    init = processes.recorded(directory(node), "init")
    if init is None:
        raise ClusterError(f"Node {node.name} is off already.")
    _run(["ip", "link", "set", node.link, "down"])
    init.kill(signal.SIGKILL)
    if not init.gone_within(10):
        raise ClusterError(f"Node {node.name}'s process 1 (pid {init.pid}) did not die of SIGKILL within 10 s.")
    processes.stop(directory(node), "unshare")
    # Left-over cgroups cost the next kubelet 3 s each.
    _remove_cgroups(node)


def pause_network(node: Node, seconds: float) -> float:
    """Disconnect the node for some seconds and return how long that was. Its processes run on and every connection stays."""
    began = time.monotonic()
    _run(["ip", "link", "set", node.link, "down"])
    try:
        time.sleep(max(0.0, seconds - (time.monotonic() - began)))
    finally:
        _run(["ip", "link", "set", node.link, "up"])
    return time.monotonic() - began


def kill_kubelet(node: Node) -> None:
    """Kill the node's kubelet. The node's process 1 starts another one, and the containers run on."""
    init = init_pid(node)
    for pid in map(int, Path(f"/proc/{init}/task/{init}/children").read_text().split()):
        if Path(f"/proc/{pid}/comm").read_text().strip() == "kubelet":
            os.kill(pid, signal.SIGKILL)
            return
    raise ClusterError(f"Node {node.name} has no kubelet: {directory(node)}/log/kubelet.log says why.")


def forget_images(node: Node) -> None:
    """Remove the containerd of a node that is off. It starts with the template's images, and without containers."""
    shutil.rmtree(directory(node) / "containerd")


def remove(node: Node) -> None:
    """Cut the node's power and remove everything that it left on the machine."""
    if is_on(node):
        power_off(node)
    processes.stop(directory(node), "unshare")
    _remove_cgroups(node)
    subprocess.run(["ip", "netns", "del", node.network_namespace], capture_output=True)
    subprocess.run(["ip", "link", "del", node.link], capture_output=True)
    subprocess.run(["ip", "route", "del", node.pod_range], capture_output=True)
    shutil.rmtree(directory(node), ignore_errors=True)


def remove_mount_points() -> None:
    """Remove the mount points that `power_on` has made on the machine, if they are empty."""
    namespaces = Path("/run/netns")
    if namespaces.exists() and not any(namespaces.iterdir()):
        subprocess.run(["umount", str(namespaces)], capture_output=True)
    for name in reversed(_made_directories().read_text().splitlines() if _made_directories().exists() else []):
        try:
            Path(name).rmdir()
        except OSError:  # somebody else uses it by now
            pass


def known() -> list[Node]:
    """Return the nodes that have a disk, on or off."""
    parent = paths.state() / "nodes"
    if not parent.exists():
        return []
    return sorted((addresses.parse_node(d.name) for d in parent.iterdir()), key=lambda n: n.number)


def ready(kubectl: Kubectl) -> dict[str, bool]:
    """Map the name of each node to whether the API server has it as Ready."""
    result = {}
    for item in json.loads(kubectl.read("/api/v1/nodes"))["items"]:
        conditions = {c["type"]: c["status"] for c in item["status"].get("conditions", [])}
        result[item["metadata"]["name"]] = conditions.get("Ready") == "True"
    return result


def ready_since(kubectl: Kubectl, node: Node, since_s: float) -> bool:
    """Return whether the node's kubelet has reported Ready since a time, in seconds since the epoch."""
    found = json.loads(kubectl.read(f"/api/v1/nodes/{node.name}"))
    conditions = {c["type"]: c for c in found["status"].get("conditions", [])}
    if conditions.get("Ready", {}).get("status") != "True":
        return False
    heartbeat = datetime.datetime.fromisoformat(conditions["Ready"]["lastHeartbeatTime"])
    return heartbeat.timestamp() >= int(since_s)


def ready_again(kubectl: Kubectl, node: Node) -> bool:
    """Return whether the node's present kubelet has reported Ready. For a while the API server still has the last one's report."""
    if not is_on(node):
        raise ClusterError(f"Node {node.name} ended at once: {processes.log_tail(directory(node), 'unshare')}")
    return ready_since(kubectl, node, (directory(node) / "run" / "init.json").stat().st_mtime)


def set_fake_gpus(kubectl: Kubectl, node: Node, count: int) -> None:
    """Set a node's `nvidia.com/gpu` capacity without any device, or remove it with 0. A kubelet forgets it when it starts."""
    quantity = {"nvidia.com/gpu": str(count) if count else None}
    patch = {"status": {"capacity": quantity, "allocatable": quantity}}
    kubectl.run("patch", "node", node.name, "--subresource=status", "--type=merge", f"--patch={json.dumps(patch)}")


def _made_directories() -> Path:
    return paths.state() / "made-directories"


def _make_mount_points() -> None:
    for target in map(Path, node_init.MOUNTS.values()):
        missing = [d for d in (target, *target.parents) if not d.exists()]
        for made in reversed(missing):
            with _made_directories().open("a") as record:
                record.write(f"{made}\n")
            made.mkdir()


def _connect(node: Node, settings: Settings) -> None:
    namespace = node.network_namespace
    if Path("/run/netns", namespace).exists():
        _run(["ip", "link", "set", node.link, "up"])
        return
    for command in (
        ["ip", "netns", "add", namespace],
        ["ip", "link", "add", node.link, "type", "veth", "peer", "name", "eth0", "netns", namespace],
        ["ip", "link", "set", node.link, "master", addresses.BRIDGE, "up"],
        ["ip", "-n", namespace, "link", "set", "lo", "up"],
        ["ip", "-n", namespace, "addr", "add", f"{node.address}/24", "dev", "eth0"],
        ["ip", "-n", namespace, "link", "set", "eth0", "up"],
        ["ip", "-n", namespace, "route", "add", "default", "via", addresses.HOST_ADDRESS],
        ["ip", "route", "replace", node.pod_range, "via", node.address],
        ["nsenter", f"--net=/run/netns/{namespace}", "sysctl", "-qw", "net.ipv4.ip_forward=1"],
    ):
        _run(command)
    for peer in addresses.nodes(max(settings.num_nodes, node.number)):
        if peer != node:
            _run(["ip", "-n", namespace, "route", "replace", peer.pod_range, "via", peer.address])


def _write_config(node: Node) -> Path:
    home, programs, pki = directory(node), binaries.ensure(), paths.state() / "pki"
    server = f"https://{addresses.HOST_ADDRESS}:{addresses.API_PORT}"
    authority = Authority(pki)
    authority.issue(
        node.name, user=f"system:node:{node.name}", groups=["system:nodes"], hosts=[node.name, node.address]
    )
    kubeconfig = authority.kubeconfig(node.name, server)
    _write_json(home / "kubelet.json", _kubelet(node, pki))
    _write_json(home / "kube-proxy.json", _kube_proxy(node, pki))
    _write_json(home / "cni.d" / "10-bridge.conflist", _pod_network(node))
    commands = {
        "containerd": ["containerd", "--config", str(paths.SOURCES / "conf" / "containerd.toml")],
        "kubelet": [
            str(programs / "kubelet"),
            f"--config={home / 'kubelet.json'}",
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={node.name}",
            f"--node-ip={node.address}",
            "--root-dir=/var/lib/kubelet",
            # With the default of 1 `kubectl logs --previous` often has nothing left to show.
            "--maximum-dead-containers-per-container=2",
        ],
        "kube-proxy": [str(programs / "kube-proxy"), f"--config={home / 'kube-proxy.json'}"],
    }
    config = node_init.NodeConfig(node.name, node.cgroup, str(home), host.cgroup_mode(), commands)
    _write_json(home / "node.json", asdict(config))
    return home / "node.json"


def _kubelet(node: Node, pki: Path) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        "clusterDNS": [addresses.HOST_ADDRESS],
        "clusterDomain": "cluster.local",
        "resolvConf": "/etc/resolv.conf",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{pki}/{node.name}.crt",
        "tlsPrivateKeyFile": f"{pki}/{node.name}.key",
        "nodeStatusUpdateFrequency": "2s",
        "nodeLeaseDurationSeconds": 8,
        "evictionHard": {
            "memory.available": "50Mi",
            "nodefs.available": "1%",
            "nodefs.inodesFree": "1%",
            "imagefs.available": "1%",
        },
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "syncFrequency": "10s",
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
        "maxPods": 110,
    }


def _kube_proxy(node: Node, pki: Path) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": f"{pki}/kube-proxy.kubeconfig"},
        "clusterCIDR": addresses.POD_NETWORK,
        "hostnameOverride": node.name,
        "nodePortAddresses": ["primary"],
        "conntrack": {"maxPerCore": 0},
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
    }


def _pod_network(node: Node) -> dict[str, Any]:
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,
        "ipMasq": False,
        "ipam": {"type": "host-local", "ranges": [[{"subnet": node.pod_range}]], "routes": [{"dst": "0.0.0.0/0"}]},
    }
    return {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}],
    }


def _only_child(parent: processes.Process, node: Node) -> int:
    """Return the pid of the node's process 1, the only child of `unshare --fork`."""
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")

    def first() -> str:
        if not parent.alive():
            raise ClusterError(f"Node {node.name} did not start: {processes.log_tail(directory(node), 'unshare')}")
        return next(iter(children.read_text().split()), "")

    return int(until(first, f"node {node.name} has a process 1", timeout_s=10, every_s=0.01, error=ClusterError))


def _remove_cgroups(node: Node) -> None:
    for top in node_init.cgroup_directories(node.cgroup):
        for folder, _, _ in os.walk(top, topdown=False):
            within(partial(_is_removed, Path(folder)), 2)


def _is_removed(cgroup: Path) -> bool:
    """Remove a cgroup and return True, or return False while it is busy because a killed process is still ending."""
    try:
        cgroup.rmdir()
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return True


def _write_json(file: Path, document: dict[str, Any]) -> None:
    file.write_text(json.dumps(document, indent=1))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise ClusterError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")

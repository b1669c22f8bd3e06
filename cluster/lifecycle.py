"""The commands: up, down, status, power, load. Each is safe to repeat; up and down exclude each other."""

import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cluster import addresses, binaries, controlplane, host, images, nodes, oci, paths, progress, settings
from cluster.errors import ClusterError
from cluster.kubectl import Kubectl, wait_until
from cluster.settings import Settings

_READY_TIMEOUT_S = 60.0
_COPY_ABOVE_BYTES = 500_000_000


def context() -> str | None:
    """Return the context of an existing cluster (REGROUP_CONTEXT), or None to use the one-machine cluster."""
    return os.environ.get("REGROUP_CONTEXT") or None


def up(wanted: Settings) -> None:
    """Bring the cluster up and return when every node is Ready. Parts that already run are kept."""
    if context():
        print(refusal("up", str(context())))
        return
    host.check()
    running = settings.load()
    sentence = change_sentence(running, wanted) if running and is_up() else None
    if sentence:
        raise ClusterError(sentence)
    binaries.ensure()
    with _exclusively():
        wanted.save()
        images.ensure_pause()
        with progress.step("Control plane", "start", expected_s=5):
            kubectl = controlplane.start(wanted)
        members = addresses.nodes(wanted.num_nodes)
        with progress.step(f"{len(members)} nodes", "start", expected_s=8):
            for node in members:
                nodes.power_on(node, wanted)
            for node in members:
                _wait_ready(kubectl, node)
                if wanted.num_gpus or (running and running.num_gpus):
                    nodes.set_fake_gpus(kubectl, node, wanted.num_gpus)


def down() -> None:
    """Stop the cluster and remove its traces from the machine. Built programs and images stay."""
    if context():
        print(refusal("down", str(context())))
        return
    if not paths.state().exists():
        return
    if os.geteuid() != 0:
        raise ClusterError("Taking the cluster down needs root: run this with `sudo -E`.")
    with _exclusively():
        for node in nodes.known():
            nodes.remove(node)
        controlplane.end()
        nodes.remove_mount_points()
        shutil.rmtree(paths.state())


def status() -> int:
    """Print nodes, processes and the kubeconfig's path. Return 0 if all of them run and are Ready, else 1."""
    if context():
        print(f"REGROUP_CONTEXT={context()} is used; `kubectl --context {context()} get nodes` shows its nodes.")
        return 0
    if not is_up():
        print("The cluster is down: `python -m cluster up` brings it up.")
        return 1
    for name, runs in controlplane.running().items():
        print(f"{name:<26}{'running' if runs else 'STOPPED'}")
    ready = nodes.ready(Kubectl(paths.kubeconfig()))
    for node in nodes.known():
        power = "on" if nodes.is_on(node) else "off"
        print(f"node {node.name:<21}{power}, {'Ready' if ready.get(node.name) else 'NotReady'}")
    print(f"kubeconfig                {paths.kubeconfig()}")
    print(f"programs                  {paths.bin_dir()}")
    return 0 if all(ready.values()) and all(controlplane.running().values()) else 1


def power_off(name: str) -> None:
    """Cut a node's power at once. Kubernetes notices after the grace period."""
    nodes.power_off(_member(name, "power-off"))


def power_on(name: str) -> None:
    """Give a node its power back and return when it is Ready."""
    node = _member(name, "power-on")
    chosen = settings.load()
    assert chosen is not None
    nodes.power_on(node, chosen)
    kubectl = Kubectl(paths.kubeconfig())
    _wait_ready(kubectl, node)
    if chosen.num_gpus:
        nodes.set_fake_gpus(kubectl, node, chosen.num_gpus)
    for image in images.everything_built():
        # Loaded while the node was off.
        images.load_into_node(node, image)


def pause_network(name: str, seconds: float) -> float:
    """Cut a node off from everything for some seconds. Return how long that was."""
    return nodes.pause_network(_member(name, "pause-network"), seconds)


def restart_kubelet(name: str) -> None:
    """Kill a node's kubelet, and return when the next one has reported the node as Ready."""
    node = _member(name, "restart-kubelet")
    killed_s = time.time() + 1  # heartbeats are in whole seconds: this one is the next kubelet's
    nodes.kill_kubelet(node)
    kubectl = Kubectl(paths.kubeconfig())
    wait_until(
        lambda: nodes.ready_since(kubectl, node, killed_s),
        f"the next kubelet of node {node.name} reports; its log is {nodes.directory(node)}/log/kubelet.log.",
        timeout_s=_READY_TIMEOUT_S,
    )


def load(names: Sequence[str], called: str | None = None) -> None:
    """Bring images to every node that is on: built ones by name, and others from an archive by its file.

    `called` replaces the archive's own image name. It needs exactly one archive.
    """
    if context():
        print(refusal("load", str(context())))
        return
    if called is not None and (len(names) != 1 or not _is_archive(names[0])):
        raise ClusterError("--name is for one image archive: give one file with it.")
    found = [
        images.add_archive(Path(name), called) if _is_archive(name) else images.built(images.recipe(name).name)
        for name in names
    ]
    host.check()
    for name, image in zip(names, found, strict=True):
        _load(image)
        if _is_archive(name):
            print(f"image: {image.name}    # with imagePullPolicy: IfNotPresent")


def _is_archive(name: str) -> bool:
    return Path(name).is_file() or name.endswith((".tar", ".tar.gz", ".tgz"))


def build_images(names: Sequence[str]) -> None:
    """Build images and bring each to the nodes."""
    if os.geteuid() != 0:
        raise ClusterError("Building images for the nodes needs root: run this with `sudo -E`.")
    if not context():
        host.check()
    for name in names:
        image = images.build(images.recipe(name))
        if not context():
            _load(image)


def is_up() -> bool:
    """Return whether the API server of our cluster runs."""
    return controlplane.running()["kube-apiserver"]


def refusal(command: str, existing: str) -> str:
    """Return a sentence that says why a command does nothing to an existing cluster."""
    reasons = {
        "up": "it is used as it is: nothing is started",
        "down": "it is not ours: nothing is stopped",
        "load": "push the images to a registry that it pulls from and name them in the chart's values: nothing is loaded",
        "power-off": "its machines are not ours to switch off",
        "power-on": "its machines are not ours to switch on",
        "pause-network": "its machines are not ours to cut off",
        "restart-kubelet": "its kubelets are not ours to kill",
    }
    return f"REGROUP_CONTEXT={existing} names an existing cluster; {reasons[command]}."


def change_sentence(running: Settings, wanted: Settings) -> str | None:
    """Return why a running cluster cannot take new settings, or None if it can. Only nodes may be added."""
    for flag, before, after in (
        ("--node-grace-s", running.node_grace_s, wanted.node_grace_s),
        ("--toleration-s", running.toleration_s, wanted.toleration_s),
    ):
        if before != after:
            return f"The cluster runs with {flag} {before}, not {after}: `python -m cluster down` first."
    if wanted.num_nodes < running.num_nodes:
        return (
            f"The cluster runs with {running.num_nodes} nodes and --nodes is {wanted.num_nodes}: "
            "`python -m cluster down` first."
        )
    return None


def _member(name: str, command: str) -> addresses.Node:
    if context():
        raise ClusterError(refusal(command, str(context())))
    node = addresses.parse_node(name)
    if node not in nodes.known():
        choices = ", ".join(n.name for n in nodes.known())
        raise ClusterError(
            f"There is no node {name}: the cluster has {choices}."
            if choices
            else "The cluster is down: `python -m cluster up` brings it up."
        )
    return node


def _load(image: oci.Image) -> None:
    """Bring an image to the template and to every node that is on.

    Importing a large part takes a minute for each node. So a node without containers starts anew from the template
    instead, which takes seconds.
    """
    with progress.step(f"Image {image.name}: load", "start") as bar:
        images.load_into_template(image)
        for node in filter(nodes.is_on, nodes.known()):
            bar.note = f"to {node.name}"
            if images.missing_bytes(node, image) > _COPY_ABOVE_BYTES and images.is_idle(node):
                nodes.power_off(node)
                nodes.forget_images(node)
                power_on(node.name)
            else:
                images.load_into_node(node, image)


def _wait_ready(kubectl: Kubectl, node: addresses.Node) -> None:
    wait_until(
        lambda: nodes.ready_again(kubectl, node),
        f"node {node.name} is Ready; its logs are in {nodes.directory(node)}/log.",
        timeout_s=_READY_TIMEOUT_S,
    )


@contextmanager
def _exclusively() -> Iterator[None]:
    file = paths.cache() / "cluster.lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another `python -m cluster` is at work; waiting for it.", file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield

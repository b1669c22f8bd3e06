"""The control plane of `up`: bridge, API server, controller manager, scheduler and DNS as plain processes.

Idempotent: what runs is kept, what died is started again. Leaves nodes to `nodes.py`.
"""

import subprocess
from pathlib import Path

from cluster import addresses, apiserver, binaries, paths, processes
from cluster.kubectl import Kubectl, wait_until
from cluster.pki import Authority
from cluster.settings import Settings

_OTHERS = ("coredns", "kube-scheduler", "kube-controller-manager")
_USERS = {
    "kube-controller-manager": "system:kube-controller-manager",
    "kube-scheduler": "system:kube-scheduler",
    "kube-proxy": "system:kube-proxy",
    "coredns": "system:coredns",
}
# With the default of 20 requests a second pods start five times slower.
_CLIENT_RATE = ("--kube-api-qps=500", "--kube-api-burst=1000")


def start(settings: Settings) -> Kubectl:
    """Start what does not run and return a kubectl once the default service account exists (3-4 s from nothing)."""
    state = paths.state()
    _ensure_bridge()
    server = apiserver.start(
        state,
        address=addresses.HOST_ADDRESS,
        port=addresses.API_PORT,
        arguments=[
            "--enable-aggregator-routing=true",
            f"--default-not-ready-toleration-seconds={settings.toleration_s}",
            f"--default-unreachable-toleration-seconds={settings.toleration_s}",
        ],
    )
    authority = Authority(state / "pki")
    for name, user in _USERS.items():
        authority.issue(name, user=user)
        authority.kubeconfig(name, server.url)
    _ensure_controllers(state, settings)
    kubectl = Kubectl(server.kubeconfig)
    wait_until(
        lambda: bool(kubectl.get("serviceaccount", "default", "--namespace=default")),
        f"the controller manager has made the default service account; its log is in {state / 'log'}.",
        timeout_s=30,
    )
    kubectl.apply(*_roles())
    _ensure_dns(state)
    return kubectl


def end() -> None:
    """End every process of the control plane and remove the bridge. The state cannot be used afterwards."""
    state = paths.state()
    for name in _OTHERS:
        processes.stop(state, name, grace_s=0)
    apiserver.kill(state)
    _forward_rule("-D")
    subprocess.run(["ip", "link", "del", addresses.BRIDGE], capture_output=True)


def running() -> dict[str, bool]:
    """Return which processes of the control plane run."""
    names = ("etcd", "kube-apiserver", *reversed(_OTHERS))
    return {name: processes.recorded(paths.state(), name) is not None for name in names}


def _ensure_bridge() -> None:
    bridge = addresses.BRIDGE
    # Inside a network namespace /sys/class/net may show the links of another one.
    if subprocess.run(["ip", "link", "show", bridge], capture_output=True).returncode != 0:
        # An address of its own. Else a bridge takes the lowest address of its ports, and changes it when a node comes or goes.
        # Hosts with the old address in their ARP cache then do not reach the API server for a minute.
        subprocess.run(["ip", "link", "add", bridge, "address", addresses.BRIDGE_MAC, "type", "bridge"], check=True)
        subprocess.run(["ip", "addr", "add", f"{addresses.HOST_ADDRESS}/24", "dev", bridge], check=True)
    subprocess.run(["ip", "link", "set", bridge, "up"], check=True)
    _forward_rule("-D")
    _forward_rule("-I")


def _forward_rule(action: str) -> None:
    # A container engine may filter bridged frames and drop forwarding by default. Nodes then could not reach each other.
    filtered = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
    if filtered.exists() and filtered.read_text().strip() == "1":
        rule = ["FORWARD", "-i", addresses.BRIDGE, "-o", addresses.BRIDGE, "-j", "ACCEPT"]
        subprocess.run(["iptables", action, *rule], capture_output=True)


def _ensure_controllers(state: Path, settings: Settings) -> None:
    programs, pki = binaries.ensure(), state / "pki"

    def identity(name: str) -> list[str]:
        kubeconfig = pki / f"{name}.kubeconfig"
        flags = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
        return [f"--{flag}={kubeconfig}" for flag in flags]

    commands = {
        "kube-controller-manager": [
            "--bind-address=127.0.0.1",
            "--use-service-account-credentials",
            f"--service-account-private-key-file={pki}/sa.key",
            f"--root-ca-file={pki}/ca.crt",
            f"--cluster-signing-cert-file={pki}/ca.crt",
            f"--cluster-signing-key-file={pki}/ca.key",
            f"--requestheader-client-ca-file={pki}/ca.crt",
            "--leader-elect=false",
            "--allocate-node-cidrs=false",
            f"--service-cluster-ip-range={apiserver.SERVICE_RANGE}",
            "--node-monitor-period=1s",
            f"--node-monitor-grace-period={settings.node_grace_s}s",
            "--profiling=false",
        ],
        "kube-scheduler": ["--bind-address=127.0.0.1", "--leader-elect=false"],
    }
    for name, arguments in commands.items():
        if not processes.recorded(state, name):
            processes.spawn(state, name, [programs / name, *identity(name), *_CLIENT_RATE, *arguments])


def _ensure_dns(state: Path) -> None:
    if processes.recorded(state, "coredns"):
        return
    corefile = state / "Corefile"
    corefile.write_text(
        f""".:53 {{
  bind {addresses.HOST_ADDRESS}
  errors
  ready {addresses.HOST_ADDRESS}:8181
  kubernetes cluster.local in-addr.arpa ip6.arpa {{
    kubeconfig {state / "pki" / "coredns.kubeconfig"}
    pods insecure
    ttl 1
  }}
}}
"""
    )
    processes.spawn(state, "coredns", [binaries.ensure() / "coredns", "-conf", corefile])


def _roles() -> list[dict[str, object]]:
    api = "rbac.authorization.k8s.io"

    def binding(name: str, role: str, user: str) -> dict[str, object]:
        return {
            "apiVersion": f"{api}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "roleRef": {"apiGroup": api, "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "User", "apiGroup": api, "name": user}],
        }

    dns_role: dict[str, object] = {
        "apiVersion": f"{api}/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "cluster:coredns"},
        "rules": [
            {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
        ],
    }
    return [
        dns_role,
        binding("cluster:coredns", "cluster:coredns", _USERS["coredns"]),
        binding("cluster:node-proxier", "system:node-proxier", _USERS["kube-proxy"]),
    ]

"""Builds programs from a Go module, once per content of that module. The first one is the cluster's own module in `go/`.

Callers (`up`, `tests/api`) use `ensure()` and get a directory with kube-apiserver, etcd, kubectl, helm and the rest.
All Kubernetes components and etcd are one program that looks at argv[0]; the directory holds symbolic links to it.
Benchmarks build the systems that they compare with `Build` and `build_once`.
"""

import fcntl
import hashlib
import os
import subprocess
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster import paths, progress, toolchain
from cluster.errors import ClusterError

KUBERNETES_VERSION = "v1.36.3"
PACKAGES = ("./kube", "./coredns", "./pause", "helm.sh/helm/v3/cmd/helm")
LINKS = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "kubectl",
    "etcd",
)


@dataclass(frozen=True)
class Build:
    """Some packages of one Go module, and the directory that takes their programs."""

    title: str
    module: Path
    packages: Sequence[str]
    out: Path
    expected_s: float
    """Usual length of the build in seconds, for the progress bar."""
    ldflags: str = "-s -w"
    links: Sequence[str] = ()
    """Symbolic links to the program `kube` in the same directory."""


def ensure() -> Path:
    """Return the directory with all programs, building them first when the module changed. Needs no root.

    Blocks for minutes on the first call of a machine; a second process waits for the first one's build.
    Raises ClusterError when Go is missing or the build fails.
    """
    return build_once(_cluster())


def build_once(build: Build) -> Path:
    """Return `build.out` with its programs, as `ensure` does for the cluster's own."""
    out = build.out
    out.mkdir(parents=True, exist_ok=True)
    stamp_file, wanted = out / ".stamp", stamp(build)
    with _locked(out.parent / "build.lock"):
        if stamp_file.exists() and stamp_file.read_text() == wanted:
            return out
        stamp_file.unlink(missing_ok=True)
        go = toolchain.find_go()
        _download(go, build.module)
        _build(go, build)
        for link in build.links:
            (out / link).unlink(missing_ok=True)
            (out / link).symlink_to("kube")
        stamp_file.write_text(wanted)
    return out


def module_directory(build: Build, path: str) -> Path:
    """Return the directory with the sources of a module that `build` depends on; read only. Raises ClusterError."""
    go = toolchain.find_go()
    _download(go, build.module)
    listed = subprocess.run(
        [go, "list", "-m", "-f", "{{.Dir}}", path], cwd=build.module, env=_environment(), capture_output=True, text=True
    )
    if listed.returncode != 0:
        raise ClusterError(f"{path} is no module of {build.module}: {_tail(listed.stderr)}")
    return Path(listed.stdout.strip())


def stamp(build: Build) -> str:
    """Return a digest of all inputs of the build."""
    digest = hashlib.sha256("\n".join((*build.packages, *build.links, build.ldflags)).encode())
    for file in sorted(p for p in build.module.rglob("*") if p.is_file()):
        digest.update(f"{file.relative_to(build.module)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _cluster() -> Build:
    return Build("Kubernetes binaries", paths.GO_MODULE, PACKAGES, paths.bin_dir(), 280.0, _ldflags(), LINKS)


def _ldflags() -> str:
    # Without these the version is v0.0.0, and clients refuse or complain.
    fields = {
        "gitVersion": KUBERNETES_VERSION,
        "gitMajor": "1",
        "gitMinor": "36",
        "gitTreeState": "clean",
        "gitCommit": "unknown",
        "buildDate": "1970-01-01T00:00:00Z",
    }
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return "-s -w " + " ".join(f"-X {p}.{k}={v}" for p in packages for k, v in fields.items())


def _environment() -> dict[str, str]:
    return {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "", "GOTOOLCHAIN": "local"}


def _download(go: Path, module: Path) -> None:
    with progress.step("Go modules", "download", expected_s=15):
        done = subprocess.run([go, "mod", "download"], cwd=module, env=_environment(), capture_output=True, text=True)
    if done.returncode != 0:
        raise ClusterError(
            f"The Go modules could not be downloaded, check the network or GOPROXY: {_tail(done.stderr)}"
        )


def _build(go: Path, build: Build) -> None:
    packages, module = build.packages, build.module
    listed = subprocess.run(
        [go, "list", "-deps", *packages], cwd=module, env=_environment(), capture_output=True, text=True
    )
    num_packages = max(1, listed.stdout.count("\n"))
    flags = ["-v", "-trimpath", "-buildvcs=false", "-ldflags", build.ldflags, "-o", f"{build.out}/"]
    with progress.step(build.title, "build", expected_s=build.expected_s) as bar:
        process = subprocess.Popen(
            list(map(str, [go, "build", *flags, *packages])),
            cwd=module,
            env=_environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        last: deque[str] = deque(maxlen=20)
        for num_done, line in enumerate(process.stderr, start=1):
            last.append(line)
            bar.fraction = min(0.97, num_done / num_packages)
            bar.note = f"package {num_done} of {num_packages}"
        if process.wait() != 0:
            raise ClusterError(f"The Go build in {module} failed: {_tail(''.join(last))}")


def _tail(text: str) -> str:
    return " ".join(text.strip().splitlines()[-3:])[-600:]


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield

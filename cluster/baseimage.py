"""Make a small base image with this distribution's Python from Debian packages, for where no image registry is.

Packages are unpacked, not installed: apt resolves python3 and what it needs as if nothing were there (about 24 MB).
"""

import subprocess
import tempfile
from pathlib import Path

from cluster.errors import ClusterError
from cluster.host import ensure_packages

NAME = "localhost/regroup-python:debian"
_PACKAGES = ("python3-venv", "ca-certificates", "libstdc++6", "busybox-static", "tzdata", "netbase")
_MERGED = ("bin", "sbin", "lib", "lib64")
_UNNEEDED = ("doc", "man", "locale", "lintian", "bug")
_ACCOUNTS = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nnonroot:x:65532:65532::/tmp:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n",
    "group": "root:x:0:\nnonroot:x:65532:\nnogroup:x:65534:\n",
}


def make(buildah: list[str]) -> None:
    """Commit the base image under NAME; `buildah` is the command with its storage options. Needs the network once."""
    with tempfile.TemporaryDirectory(prefix="regroup-base-") as scratch:
        root = Path(scratch) / "root"
        _unpack(Path(scratch), root)
        _arrange(root)
        container = _run([*buildah, "from", "scratch"]).strip()
        _run([*buildah, "add", "--quiet", container, str(root), "/"])
        _run([*buildah, "config", "--env", "PATH=/usr/local/bin:/usr/bin:/bin", "--cmd", "python3", container])
        _run([*buildah, "commit", "--quiet", "--rm", container, NAME])


def _unpack(scratch: Path, root: Path) -> None:
    archives, status = scratch / "archives", scratch / "status"
    (archives / "partial").mkdir(parents=True)
    status.touch()
    root.mkdir()
    options = [f"-oDir::State::status={status}", f"-oDir::Cache::archives={archives}", "-oAPT::Sandbox::User=root"]
    install = ["apt-get", "install", "-qq", "--yes", "--download-only", "--no-install-recommends", *options]
    try:
        _run([*install, *_PACKAGES])
    except ClusterError:
        # The package lists may be absent or older than the mirror.
        _run(["apt-get", "update", "-qq"])
        _run([*install, *_PACKAGES])
    for package in sorted(archives.glob("*.deb")):
        _run(["dpkg-deb", "--extract", str(package), str(root)])


def _arrange(root: Path) -> None:
    """Do what the packages' scripts would have done, as far as Python and a shell need it."""
    for name in _MERGED:
        merged = root / "usr" / name
        merged.mkdir(parents=True, exist_ok=True)
        if (root / name).is_dir():
            _run(["cp", "-a", f"{root / name}/.", str(merged)])
            _run(["rm", "-rf", str(root / name)])
        (root / name).symlink_to(f"usr/{name}")
    for applet in _run([str(root / "bin" / "busybox"), "--list"]).split():
        if not (root / "bin" / applet).exists():
            (root / "bin" / applet).symlink_to("busybox")
    for name in ("root", "proc", "sys", "dev", "etc/ssl/certs"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("tmp", "var/tmp"):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name).chmod(0o1777)
    for name, content in _ACCOUNTS.items():
        (root / "etc" / name).write_text(content)
    certificates = sorted((root / "usr/share/ca-certificates").rglob("*.crt"))
    bundle = b"".join(file.read_bytes() for file in certificates)
    (root / "etc/ssl/certs/ca-certificates.crt").write_bytes(bundle)
    for name in _UNNEEDED:
        _run(["rm", "-rf", str(root / "usr/share" / name)])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise ClusterError(
            f"The base image is made from Debian packages and {command[0]} is not there: name another base image "
            "with REGROUP_BASE_IMAGE."
        ) from None
    if done.returncode != 0:
        raise ClusterError(f"Making the base image failed at `{' '.join(command[:3])}`: {done.stderr.strip()[-300:]}")
    return done.stdout


def ensure(buildah: list[str]) -> None:
    """Make the base image unless the storage holds it."""
    if subprocess.run([*buildah, "inspect", "--type=image", NAME], capture_output=True).returncode != 0:
        ensure_packages({"dpkg-deb": "dpkg"})
        make(buildah)

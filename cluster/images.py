"""Builds the project's images from their Dockerfiles with docker or buildah, and brings them to the nodes.

A built image lies in one layout on disk (`images/layout`). Loading sends only the layers that a node does not hold.
IMAGES maps images to their Dockerfiles; nothing else names them.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster import baseimage, binaries, containerd, host, nodes, oci, paths, progress, storage, template
from cluster.addresses import Node
from cluster.errors import ClusterError
from harness.archives import extract

PAUSE = "localhost/pause:1"
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_UV_CACHE_INSIDE = "/var/cache/host-uv"
_SOURCES = ("operator", "trainer-image", "manifests/samples")
_PASSED_ON = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX")


@dataclass(frozen=True)
class Recipe:
    """The recipe of an image: name, Dockerfile, build arguments, and the usual seconds of a first build.

    `target` is the stage of the Dockerfile that becomes the image; empty: the last one.
    """

    name: str
    dockerfile: str
    arguments: Mapping[str, str]
    expected_s: float
    target: str = ""


IMAGES: Mapping[str, Recipe] = {
    "operator": Recipe("localhost/regroup-operator:dev", "Dockerfile", {}, 30),
    # Nodes here have no GPU, so that torch's layer does without what only GPUs load.
    "trainer": Recipe("localhost/regroup-trainer:dev", "trainer-image/Dockerfile", {"CPU_ONLY": "1"}, 150),
    # The layers of `trainer` below ours: an image with Python and torch, as a user has one.
    "torch": Recipe("localhost/regroup-torch:dev", "trainer-image/Dockerfile", {"CPU_ONLY": "1"}, 150, target="torch"),
}


def recipe(name: str) -> Recipe:
    """Return the recipe of a short or full image name. Raise ClusterError with the choices if there is none."""
    for short, found in IMAGES.items():
        if name in (short, found.name):
            return found
    raise ClusterError(
        f"{name!r} is not one of our images: choose from {', '.join(IMAGES)}, or give the tar file of an image of yours."
    )


def build(wanted: Recipe) -> oci.Image:
    """Build one image, put it into the layout and return it. Unchanged layers are taken from the last build.

    If no input of the image has changed since the last build, no builder runs at all.
    """
    layout = _layout()
    layout.parent.mkdir(parents=True, exist_ok=True)
    with (layout.parent / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        inputs = stamp(wanted, paths.REPOSITORY, os.environ)
        stamp_file = layout.parent / f"{Path(wanted.name).name}.stamp"
        image = oci.find(layout, wanted.name)
        if image and stamp_file.exists() and stamp_file.read_text() == f"{inputs} {image.id}":
            return image
        builder = choose_builder()
        if builder == "buildah":
            _build_with_buildah(wanted, layout)
        else:
            _build_with_docker(wanted, layout)
        oci.prune(layout)
        image = oci.find(layout, wanted.name)
    if image is None:
        raise ClusterError(f"{builder} built {wanted.name} but did not hand it over: see {layout}/index.json.")
    stamp_file.write_text(f"{inputs} {image.id}")
    return image


def stamp(wanted: Recipe, repository: Path, environment: Mapping[str, str]) -> str:
    """Return a digest of the inputs of an image: Dockerfile, arguments, locked packages, our sources."""
    arguments = _arguments(wanted, environment.get("REGROUP_BASE_IMAGE"), environment)
    digest = hashlib.sha256(repr(sorted(arguments.items())).encode())
    files = [repository / name for name in (wanted.dockerfile, ".dockerignore", "pyproject.toml", "uv.lock")]
    for folder in _SOURCES:
        files += sorted(f for f in (repository / folder).rglob("*") if f.is_file() and "__pycache__" not in f.parts)
    for file in files:
        digest.update(f"{file.relative_to(repository)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def buildah() -> list[str]:
    """Return buildah's command with storage and settings of its own.

    With its default settings buildah leaves a lock in /etc/cni/net.d. Nodes are mounted on that directory, so `down`
    could not remove it.
    """
    settings = _storage().with_name("buildah.conf")
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(f'[network]\nnetwork_config_dir = "{_storage()}-cni"\n')
    storage = ["--storage-driver=overlay", f"--root={_storage()}", f"--runroot={_storage()}-run"]
    return ["env", f"CONTAINERS_CONF={settings}", "buildah", *storage]


def _build_with_docker(wanted: Recipe, layout: Path) -> None:
    base = os.environ.get("REGROUP_BASE_IMAGE")
    _run_build(wanted, docker_command(wanted, base=base, environment=os.environ))
    with progress.step(f"Image {wanted.name}: layers", "build", expected_s=40):
        _export_from_docker(wanted.name, layout)


def _build_with_buildah(wanted: Recipe, layout: Path) -> None:
    host.ensure_packages(host.BUILDER_PACKAGES)
    try:
        base = os.environ.get("REGROUP_BASE_IMAGE")
        if base is None and shutil.which("apt-get"):
            base = baseimage.NAME
            with progress.step("Base image", "download", expected_s=10):
                baseimage.ensure(buildah())
        _run_build(wanted, buildah_command(wanted, buildah(), base=base, environment=os.environ, uv_cache=_uv_cache()))
        with progress.step(f"Image {wanted.name}: layers", "build", expected_s=20):
            try:
                storage.export(buildah(), _storage(), wanted.name, layout)
            except storage.UnexpectedStorageError:
                compression = ["--compression-format=zstd", "--compression-level=1"]
                push = [*buildah(), "push", "--quiet", "--format=oci", *compression]
                _run([*push, wanted.name, f"oci:{layout}:{wanted.name}"])
    finally:
        # A build that was interrupted leaves its containers, and the storage stays mounted upon itself.
        subprocess.run([*buildah(), "rm", "--all"], capture_output=True)
        subprocess.run(["umount", str(_storage() / "overlay")], capture_output=True)


def built(name: str) -> oci.Image:
    """Return an image of the layout. Raise ClusterError if it has not been built."""
    image = oci.find(_layout(), name)
    if image is None:
        raise ClusterError(f"The image {name} has not been built: `python -m cluster build-images` does that.")
    return image


def everything_built() -> list[oci.Image]:
    """Return every image that nodes hold: built ones of the project, and loaded ones of the user."""
    return oci.images(_layout())


def add_archive(file: Path, name: str | None = None) -> oci.Image:
    """Put the image of an archive into the layout and return it: a tar of `docker save` or of an OCI layout, compressed or not.

    `name` is the name in pods; None takes the archive's. Raise ClusterError if there is no name, or the file is no such
    archive.
    """
    layout = _layout()
    layout.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=layout.parent) as scratch, (layout.parent / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            with tarfile.open(file) as archive:
                extract(archive, scratch)
        except (OSError, tarfile.TarError, EOFError) as error:
            raise ClusterError(f"{file} cannot be read as an image archive: {error}.") from None
        if not Path(scratch, "index.json").exists():
            raise ClusterError(
                f"{file} is no image archive with an OCI layout. Write it with docker 25 or newer (`docker save`), or with "
                f"`buildah push IMAGE oci-archive:{file}:NAME`."
            )
        name = name or oci.saved_name(Path(scratch))
        if name is None:
            raise ClusterError(f"{file} gives its image no name: choose one with --name.")
        name = oci.full_name(name)
        if any(name == recipe.name for recipe in IMAGES.values()):
            raise ClusterError(f"{name} is the name of an image that `build-images` makes: choose another with --name.")
        oci.adopt(layout, Path(scratch), name)
    image = oci.find(layout, name)
    assert image is not None
    return image


def load_into_template(image: oci.Image) -> None:
    """Add the image to the template, so that nodes that start from now on hold it."""
    template.load(_layout(), image)


def load_into_node(node: Node, image: oci.Image) -> None:
    """Import the missing blobs of the image into a node that is on. It takes seconds for our code, and a minute for torch."""
    containerd.load(node_client(node), _layout(), image)


def missing_bytes(node: Node, image: oci.Image) -> int:
    """Return the size of the image's blobs that a node that is on does not hold."""
    client = node_client(node)
    if client.images().get(image.name) == image.id:
        return 0
    present = client.contents()
    return sum(oci.blob(_layout(), d).stat().st_size for d in image.digests if d not in present)


def is_idle(node: Node) -> bool:
    """Return whether a node that is on holds no container, running or not."""
    return not node_client(node).run("containers", "ls", "--quiet").strip()


def ensure_pause() -> None:
    """Put the image of pod sandboxes into the template. It is one static program of our Go module."""
    layout = _layout()
    image = oci.find(layout, PAUSE)
    if image is None:
        image = oci.add_single_file(layout, PAUSE, binaries.ensure() / "pause", "/pause")
    template.load(layout, image)


def node_client(node: Node) -> containerd.Client:
    """Return the containerd of a node that is on."""
    return containerd.Client(["nsenter", f"--target={nodes.init_pid(node)}", "--mount", "ctr"])


def choose_builder() -> str:
    """Return docker if its engine answers, else buildah (installed if it is missing)."""
    if shutil.which("docker") and subprocess.run(["docker", "info"], capture_output=True).returncode == 0:
        return "docker"
    return "buildah"


def buildah_command(
    wanted: Recipe, buildah: Sequence[str], *, base: str | None, environment: Mapping[str, str], uv_cache: Path | None
) -> list[str]:
    """Return the buildah command for an image. The build can use the host's certificates and uv's cache."""
    arguments = _arguments(wanted, base, environment)
    command = [*buildah, "bud", "--layers", "--force-rm", "--isolation=chroot", "--network=host", "--format=oci"]
    if _CERTIFICATES.exists():
        command += [f"--volume={_CERTIFICATES.parent}:{_CERTIFICATES.parent}:ro"]
        arguments |= {"SSL_CERT_FILE": str(_CERTIFICATES), "PIP_CERT": str(_CERTIFICATES)}
    if uv_cache is not None:
        command += [f"--volume={uv_cache}:{_UV_CACHE_INSIDE}"]
        arguments["UV_CACHE_DIR"] = _UV_CACHE_INSIDE
    command += [f"--build-arg={k}={v}" for k, v in sorted(arguments.items())]
    return [*command, *_last(wanted)]


def docker_command(wanted: Recipe, *, base: str | None, environment: Mapping[str, str]) -> list[str]:
    """Return the docker command for an image."""
    arguments = [f"--build-arg={k}={v}" for k, v in sorted(_arguments(wanted, base, environment).items())]
    # Attestations would make the image an index of two.
    options = ["--provenance=false", "--progress=plain"]
    return ["docker", "build", *options, *arguments, *_last(wanted)]


def _last(wanted: Recipe) -> list[str]:
    target = [f"--target={wanted.target}"] if wanted.target else []
    return [*target, f"--file={wanted.dockerfile}", f"--tag={wanted.name}", "."]


def _arguments(wanted: Recipe, base: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    arguments = {**wanted.arguments, **{k: environment[k] for k in _PASSED_ON if environment.get(k)}}
    if base:
        arguments["BASE_IMAGE"] = base
    if environment.get("REGROUP_TORCH_INDEX") and "CPU_ONLY" in wanted.arguments:
        arguments["TORCH_INDEX"] = environment["REGROUP_TORCH_INDEX"]
    return arguments


def _run_build(wanted: Recipe, command: list[str]) -> None:
    last: deque[str] = deque(maxlen=12)
    with progress.step(f"Image {wanted.name}: build", "build", expected_s=wanted.expected_s) as bar:
        process = subprocess.Popen(
            command,
            cwd=paths.REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "DOCKER_BUILDKIT": "1"},
        )
        assert process.stdout is not None
        for line in process.stdout:
            last.append(line.strip())
            if re.match(r"(\[\d+/\d+\] )?STEP |#\d+ \[", line):
                bar.note = line.strip()[:48]
        if process.wait() != 0:
            said = " / ".join(text for text in last if text)
            raise ClusterError(f"Building {wanted.name} from {wanted.dockerfile} failed: {said[-900:]}")


def _export_from_docker(name: str, layout: Path) -> None:
    layout.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=layout.parent) as scratch:
        with subprocess.Popen(["docker", "save", name], stdout=subprocess.PIPE) as saved:
            assert saved.stdout is not None
            with tarfile.open(fileobj=saved.stdout, mode="r|") as archive:
                extract(archive, scratch)
        if not Path(scratch, "index.json").exists():
            raise ClusterError("This docker saves images in its old format: update docker to 25 or newer.")
        oci.adopt(layout, Path(scratch), name)


def _layout() -> Path:
    return paths.images() / "layout"


def _storage() -> Path:
    return paths.images() / "buildah"


def _uv_cache() -> Path | None:
    """Return uv's cache directory of this user, so that torch is downloaded once for .venv and image."""
    directory = Path(os.environ.get("UV_CACHE_DIR") or Path.home() / ".cache" / "uv")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _run(command: list[str]) -> None:
    started_s = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        elapsed_s = time.monotonic() - started_s
        raise ClusterError(f"`{command[0]}` failed after {elapsed_s:.0f} s: {done.stderr.strip()[-400:]}")

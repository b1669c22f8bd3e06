"""Loading an image into a real containerd whose collector takes a blob that was seen, while the import runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster import containerd, host, oci, template
from cluster.errors import ClusterError

pytestmark = pytest.mark.root


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[containerd.Client]:
    """A containerd without images, in a directory of the test's own."""
    host.ensure_packages({"containerd": "containerd", "ctr": "containerd"})
    monkeypatch.setenv("REGROUP_CLUSTER_DIR", str(tmp_path / "cluster"))
    monkeypatch.delenv("REGROUP_CONTEXT", raising=False)
    with template._running() as one:
        yield one


@pytest.fixture
def build(tmp_path: Path) -> Callable[[bytes], oci.Image]:
    """A function that makes an image of one program, always with the same name."""

    def made(program: bytes) -> oci.Image:
        (tmp_path / "program").write_bytes(program)
        return oci.add_single_file(tmp_path / "layout", "localhost/mine:1", tmp_path / "program", "/program")

    return made


def seen(monkeypatch: pytest.MonkeyPatch, *digests: str) -> None:
    """Have containerd say that it holds these blobs, too: it did a moment ago."""
    contents = containerd.Client.contents
    monkeypatch.setattr(containerd.Client, "contents", lambda client: contents(client) | set(digests))


@pytest.mark.parametrize("gone", ["config", "layer"])
@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replaces another"])
def test_image_is_sent_whole_where_a_blob_has_gone_since_it_was_seen(
    client: containerd.Client,
    build: Callable[[bytes], oci.Image],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gone: str,
    replaces: bool,
) -> None:
    layout = tmp_path / "layout"
    if replaces:
        containerd.load(client, layout, build(b"old"))
    image = build(b"new")
    seen(monkeypatch, dict(zip(("config", "layer"), image.digests, strict=True))[gone])
    assert containerd.load(client, layout, image) > 0
    assert client.images() == {image.name: image.id}
    assert client.run("images", "check", f"name=={image.name}").count("complete (2/2)") == 1


def test_image_that_could_not_be_loaded_is_not_taken_for_loaded(
    client: containerd.Client, build: Callable[[bytes], oci.Image], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, send = tmp_path / "layout", containerd._send
    containerd.load(client, layout, old := build(b"old"))
    new = build(b"new")
    with monkeypatch.context() as patched:
        patched.setattr(
            containerd, "_send", lambda client, layout, image, _: send(client, layout, image, {*image.digests})
        )
        with pytest.raises(ClusterError, match=r"did not take the image localhost/mine:1: .*not found"):
            containerd.load(client, layout, new)
    assert client.images()[old.name] == old.id
    assert containerd.load(client, layout, new) > 0
    assert client.images() == {new.name: new.id}

"""An image of the user's own comes as a tar: what is taken, under which name, and what is refused in a sentence."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from cluster import __main__ as command_line
from cluster import images, lifecycle, oci
from cluster.errors import ClusterError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster directory of the test's own."""
    monkeypatch.setenv("REGROUP_CLUSTER_DIR", str(tmp_path / "cluster"))
    monkeypatch.delenv("REGROUP_CONTEXT", raising=False)
    return tmp_path / "cluster"


def saved(directory: Path, reference: str = "latest", *, listed: list[str] | None = None, **annotations: str) -> Path:
    """Return the tar of a small image, whose index has this reference and these annotations."""
    program, layout = directory / "program", directory / "saved"
    program.write_bytes(b"program")
    oci.add_single_file(layout, reference, program, "/program")
    index: dict[str, Any] = json.loads((layout / "index.json").read_text())
    index["manifests"][0]["annotations"] |= {key.replace("_", "."): value for key, value in annotations.items()}
    (layout / "index.json").write_text(json.dumps(index))
    if listed is not None:
        (layout / "manifest.json").write_text(json.dumps([{"RepoTags": listed}]))
    return packed(layout, directory / "image.tar.gz")


def packed(layout: Path, file: Path) -> Path:
    with tarfile.open(file, "w:gz") as archive:
        for part in layout.iterdir():
            archive.add(part, part.name)
    return file


@pytest.mark.parametrize(
    ("given", "name"),
    [
        pytest.param(
            {"io_containerd_image_name": "docker.io/library/mine:1"}, "docker.io/library/mine:1", id="docker save"
        ),
        pytest.param({"listed": ["mine:1"]}, "docker.io/library/mine:1", id="docker save, by its own list"),
        pytest.param(
            {"reference": "registry.example/team/mine:2"}, "registry.example/team/mine:2", id="buildah, skopeo"
        ),
        pytest.param({"reference": "localhost/mine:dev"}, "localhost/mine:dev", id="a name without a registry"),
    ],
)
def test_image_of_an_archive_is_taken_under_its_own_name(tmp_path: Path, given: dict[str, Any], name: str) -> None:
    image = images.add_archive(saved(tmp_path, **given))
    assert image.name == name
    assert [i.name for i in images.everything_built()] == [name]
    assert images.built(name) == image, "nodes that are switched on later get it, too"


def test_name_that_is_given_wins_and_is_needed_where_there_is_none(tmp_path: Path) -> None:
    file = saved(tmp_path)
    with pytest.raises(ClusterError, match="gives its image no name: choose one with --name"):
        images.add_archive(file)
    assert images.add_archive(file, "mine").name == "docker.io/library/mine:latest"
    with pytest.raises(ClusterError, match="is the name of an image that `build-images` makes"):
        images.add_archive(file, images.IMAGES["trainer"].name)


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("mine", "docker.io/library/mine:latest"),
        ("team/mine:1", "docker.io/team/mine:1"),
        ("localhost/mine", "localhost/mine:latest"),
        ("registry.example:5000/mine:1", "registry.example:5000/mine:1"),
        ("registry.example:5000/mine", "registry.example:5000/mine:latest"),
    ],
)
def test_name_is_completed_as_the_kubelet_does(name: str, full: str) -> None:
    assert oci.full_name(name) == full


def test_platform_of_this_machine_is_chosen(tmp_path: Path) -> None:
    file = saved(tmp_path, "localhost/mine:1")
    layout = tmp_path / "saved"
    index = json.loads((layout / "index.json").read_text())
    mine = index["manifests"][0] | {"platform": {"os": "linux", "architecture": oci._architecture()}}
    other = {**mine, "digest": "sha256:" + "0" * 64, "platform": {"os": "linux", "architecture": "s390x"}}
    (layout / "index.json").write_text(json.dumps({"manifests": [other, mine]}))
    assert images.add_archive(packed(layout, file)).id == mine["digest"]
    (layout / "index.json").write_text(json.dumps({"manifests": [other]}))
    with pytest.raises(ClusterError, match="has no image for"):
        images.add_archive(packed(layout, file))


def test_file_that_is_no_archive_is_refused_in_a_sentence(tmp_path: Path) -> None:
    text = tmp_path / "image.tar"
    text.write_text("hello")
    with pytest.raises(ClusterError, match="cannot be read as an image archive"):
        images.add_archive(text)
    with pytest.raises(ClusterError, match=r"cannot be read as an image archive: .*No such file"):
        lifecycle.load([str(tmp_path / "absent.tar")])
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "manifest.json").write_text("[]")
    with pytest.raises(ClusterError, match="Write it with docker 25 or newer"):
        images.add_archive(packed(tmp_path / "old", tmp_path / "old.tar.gz"))
    with pytest.raises(ClusterError, match="--name is for one image archive"):
        lifecycle.load(["trainer"], "mine")


def test_what_the_machine_lacks_is_said_before_the_image_goes_to_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where `up` has never run: then there is no containerd yet."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert command_line.main(["load", str(saved(tmp_path, "localhost/mine:1"))]) == 1
    said = capsys.readouterr().err
    assert "need root" in said
    assert said.count("\n") == 1

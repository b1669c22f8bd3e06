"""Build commands, and the archive that carries only what a node lacks."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from cluster import images, oci, paths
from cluster.errors import ClusterError

TRAINER = images.IMAGES["trainer"]
OPERATOR = images.IMAGES["operator"]


def build_arguments(command: list[str]) -> dict[str, str]:
    pairs = [word.partition("=")[2] for word in command if word.startswith("--build-arg=")]
    return dict(pair.split("=", 1) for pair in pairs)


def test_docker_builds_from_the_dockerfiles_own_base_unless_another_is_named() -> None:
    assert "BASE_IMAGE" not in build_arguments(images.docker_command(OPERATOR, base=None, environment={}))
    command = images.docker_command(OPERATOR, base="corp/python:3.12", environment={})
    assert build_arguments(command)["BASE_IMAGE"] == "corp/python:3.12"


def test_torch_index_goes_to_the_trainers_image_alone() -> None:
    environment = {"REGROUP_TORCH_INDEX": "https://example.org/cpu", "PIP_INDEX_URL": "https://mirror.example.org"}
    trainer = build_arguments(images.docker_command(TRAINER, base=None, environment=environment))
    operator = build_arguments(images.docker_command(OPERATOR, base=None, environment=environment))
    assert trainer["TORCH_INDEX"] == "https://example.org/cpu"
    assert "TORCH_INDEX" not in operator
    assert trainer["PIP_INDEX_URL"] == operator["PIP_INDEX_URL"] == "https://mirror.example.org"


def test_buildah_lends_uvs_downloads_to_the_build(tmp_path: Path) -> None:
    command = images.buildah_command(TRAINER, ["buildah"], base="b", environment={}, uv_cache=tmp_path)
    inside = build_arguments(command)["UV_CACHE_DIR"]
    assert f"--volume={tmp_path}:{inside}" in command
    assert command[-3:] == [f"--file={TRAINER.dockerfile}", f"--tag={TRAINER.name}", "."]


def test_image_of_a_stage_is_built_up_to_that_stage() -> None:
    recipe = images.IMAGES["torch"]
    words = [
        images.docker_command(recipe, base=None, environment={}),
        images.buildah_command(recipe, ["buildah"], base=None, environment={}, uv_cache=None),
    ]
    for command in words:
        assert command[-4:] == ["--target=torch", f"--file={recipe.dockerfile}", f"--tag={recipe.name}", "."]
    text = (paths.REPOSITORY / recipe.dockerfile).read_text()
    before_ours = text.partition("FROM torch\n")[0].partition("FROM python AS torch\n")[2]
    assert before_ours, "the Dockerfile has no such stage"
    assert "regroup" not in before_ours.lower()


@pytest.mark.parametrize("recipe", images.IMAGES.values(), ids=images.IMAGES)
def test_every_build_argument_is_declared_in_the_dockerfile(recipe: images.Recipe) -> None:
    environment = {"REGROUP_TORCH_INDEX": "x", "PIP_INDEX_URL": "x", "UV_DEFAULT_INDEX": "x"}
    command = images.buildah_command(recipe, ["buildah"], base="x", environment=environment, uv_cache=Path("/x"))
    text = (paths.REPOSITORY / recipe.dockerfile).read_text()
    for name in build_arguments(command):
        assert f"\nARG {name}" in text, name


def test_unknown_image_is_refused_with_the_choices() -> None:
    with pytest.raises(ClusterError, match="'traner' is not one of our images: choose from operator, trainer"):
        images.recipe("traner")
    assert images.recipe("trainer") is images.recipe(TRAINER.name) is TRAINER


def test_archive_carries_only_what_is_missing(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"x" * 100_000)
    image = oci.add_single_file(tmp_path / "layout", "localhost/one:1", program, "/one")
    config, layer = image.digests
    whole, rest = io.BytesIO(), io.BytesIO()
    oci.write_archive(tmp_path / "layout", image, set(), whole)
    oci.write_archive(tmp_path / "layout", image, {layer}, rest)
    names = [blob_name(d) for d in (layer, config, image.id)]
    assert members(whole) == ["oci-layout", "index.json", *names]
    assert members(rest) == ["oci-layout", "index.json", *names[1:]]
    whole.seek(0)
    with tarfile.open(fileobj=whole) as archive:
        index = json.load(archive.extractfile("index.json") or io.BytesIO())
    assert index["manifests"][0]["annotations"]["io.containerd.image.name"] == "localhost/one:1"


def test_prune_deletes_only_blobs_of_replaced_images(tmp_path: Path) -> None:
    program, layout = tmp_path / "program", tmp_path / "layout"
    program.write_bytes(b"first")
    first = oci.add_single_file(layout, "localhost/one:1", program, "/one")
    program.write_bytes(b"kept")
    kept = oci.add_single_file(layout, "localhost/two:1", program, "/two")
    program.write_bytes(b"second")
    second = oci.add_single_file(layout, "localhost/one:1", program, "/one")
    assert oci.prune(layout) == 3
    assert not any(oci.blob(layout, d).exists() for d in (first.id, *first.digests))
    assert all(oci.blob(layout, d).exists() for i in (kept, second) for d in (i.id, *i.digests))
    assert oci.find(layout, "localhost/one:1") == second


def blob_name(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def members(archive: io.BytesIO) -> list[str]:
    archive.seek(0)
    with tarfile.open(fileobj=archive) as opened:
        return opened.getnames()


def test_image_saved_by_docker_is_adopted_through_its_nested_index(tmp_path: Path) -> None:
    program, saved, layout = tmp_path / "program", tmp_path / "saved", tmp_path / "layout"
    program.write_bytes(b"program")
    image = oci.add_single_file(saved, "registry.example/one:1", program, "/one")
    nested = json.dumps({"manifests": [{k: v for k, v in image.manifest.items() if k != "annotations"}]}).encode()
    digest = "sha256:" + hashlib.sha256(nested).hexdigest()
    oci.blob(saved, digest).write_bytes(nested)
    index = {"manifests": [{"mediaType": "application/vnd.oci.image.index.v1+json", "digest": digest}]}
    (saved / "index.json").write_text(json.dumps(index))
    layout.mkdir()
    oci.adopt(layout, saved, "localhost/one:1")
    adopted = oci.find(layout, "localhost/one:1")
    assert adopted is not None
    assert (adopted.id, adopted.digests) == (image.id, image.digests)
    assert all(oci.blob(layout, d).exists() for d in (adopted.id, *adopted.digests))


def tree(root: Path) -> Path:
    for name in ("Dockerfile", ".dockerignore", "pyproject.toml", "uv.lock", "operator/a.py", "trainer-image/b.py"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(name)
    return root


@pytest.mark.parametrize("name", ["Dockerfile", "uv.lock", "operator/a.py", "trainer-image/b.py", "operator/new.py"])
def test_image_is_built_anew_when_an_input_changes(tmp_path: Path, name: str) -> None:
    before = images.stamp(OPERATOR, tree(tmp_path), {})
    (tmp_path / name).write_text("changed")
    assert images.stamp(OPERATOR, tmp_path, {}) != before


def test_image_is_kept_when_only_compiled_files_and_strangers_change(tmp_path: Path) -> None:
    before = images.stamp(OPERATOR, tree(tmp_path), {})
    (tmp_path / "operator" / "__pycache__").mkdir()
    (tmp_path / "operator" / "__pycache__" / "a.pyc").write_text("compiled")
    (tmp_path / "README.md").write_text("hello")
    assert images.stamp(OPERATOR, tmp_path, {"HOME": "/root"}) == before
    assert images.stamp(OPERATOR, tmp_path, {"REGROUP_BASE_IMAGE": "corp/python:3.12"}) != before

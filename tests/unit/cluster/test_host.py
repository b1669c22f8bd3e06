"""What the machine lacks becomes a sentence that says what to do."""

from pathlib import Path

import pytest

from cluster import host, toolchain
from cluster.errors import ClusterError


@pytest.mark.parametrize(
    ("free_gib", "has_images", "enough"),
    [(100, False, True), (14, False, False), (14, True, True), (2, True, False)],
)
def test_disk_is_enough_or_the_sentence_names_numbers_and_remedy(free_gib: int, has_images: bool, enough: bool) -> None:
    sentence = host.disk_sentence(free_gib * 1024**3, Path("/somewhere"), has_images=has_images)
    if enough:
        assert sentence is None
    else:
        assert sentence is not None
        assert f"/somewhere has {free_gib} GiB free" in sentence
        assert "REGROUP_CLUSTER_DIR" in sentence


def test_packages_of_missing_programs_are_named_once() -> None:
    wanted = {"no-such-program": "one", "no-such-either": "one", "sh": "dash", "/no/such/file": "another"}
    assert host.missing_packages(wanted) == ["another", "one"]


def test_packages_without_root_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda name, **_: "/bin/x" if name == "apt-get" else None)
    with pytest.raises(ClusterError, match="sudo apt-get install containerd"):
        host.ensure_packages({"ctr": "containerd"})


def test_cluster_without_root_is_refused_with_both_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match=r"need root .*sudo -E.*REGROUP_CONTEXT"):
        host.check()


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("go version go1.26.8 linux/amd64", (1, 26)),
        ("go version go1.27rc1 linux/arm64", (1, 27)),
        ("go version go1.9 linux/amd64", (1, 9)),
        ("command not found", None),
    ],
)
def test_version_of_go(said: str, version: tuple[int, int] | None) -> None:
    assert toolchain.parse_version(said) == version
    assert version is None or (version >= toolchain.MINIMUM) == (version[1] >= 26)

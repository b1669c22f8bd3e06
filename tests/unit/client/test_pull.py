"""Files of a pod as a tar: what is taken, refused and compared, and what is left after a failure. The pod is this machine."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from regroup_client import pull, received
from regroup_client.errors import ArgumentError, PullError
from regroup_client.pull import Pod, choose
from regroup_client.reader_pod import Volume
from regroup_client.received import Mark

JOB = {"metadata": {"name": "train", "uid": "u1"}}
NAME = "step-8.g2-abc"


def record(job: str = "u1", **files: bytes) -> str:
    marks = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    return json.dumps({"jobUID": job, "files": marks or {"a": {"size": 1, "sha256": "0"}}})


def checkpoint(volume: Path, name: str = NAME, job: str = "u1", **files: bytes) -> Path:
    place = volume / name
    place.mkdir(parents=True)
    for file, data in files.items():
        (place / file).write_bytes(data)
    (place / ".job").write_text(job)
    (place / "COMMIT.json").write_text(record(job, **files))
    return place


def fetched(volume: Path, into: Path, *, path: str = "", step: int | None = None) -> pull.Pulled:
    """Pull as the command does, from a directory of this machine."""
    pod = Pod([sys.executable, "-I", "-c"], str(volume))
    listed = pod.listed(path)
    chosen = None if path else choose(JOB, Volume("mine"), listed["commits"], step)
    if chosen is not None:
        return pull._pull_checkpoint(pod, chosen, into, lambda _: None)
    return pull._pull_files(pod, path, listed, into, lambda _: None)


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_newest_checkpoint_comes_whole(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    checkpoint(volume, "step-9.g1-abc", a=b"old")
    whole = checkpoint(volume, a=b"new", b=os.urandom(3_000_000))
    (volume / "other").write_text("of the script")
    got = fetched(volume, tmp_path / "into")
    assert got.path == tmp_path / "into" / NAME
    assert files(got.path) == files(whole)
    assert names(tmp_path / "into") == [NAME]
    assert fetched(volume, tmp_path / "into", step=9).path.name == "step-9.g1-abc"
    with pytest.raises(PullError, match=f"has {NAME} already"):
        fetched(volume, tmp_path / "into")


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        pytest.param(
            lambda p: (p / "a").write_bytes(b"nEw"), "a is not what was committed (SHA-256 differs)", id="a bit"
        ),
        pytest.param(lambda p: (p / "a").write_bytes(b"newer"), "a has 5 bytes, 3 were committed", id="the size"),
        pytest.param(lambda p: (p / "a").unlink(), "a is missing in the checkpoint", id="a file"),
        pytest.param(lambda p: (p / "c").write_bytes(b"c"), "'c', which is no file of the checkpoint", id="one more"),
    ],
)
def test_damaged_checkpoint_is_refused_and_nothing_is_left(
    tmp_path: Path, spoil: Callable[[Path], Any], sentence: str
) -> None:
    spoil(checkpoint(tmp_path / "volume", a=b"new", b=b"x"))
    with pytest.raises(PullError) as refused:
        fetched(tmp_path / "volume", tmp_path / "into")
    assert sentence in str(refused.value)
    assert not (tmp_path / "into").exists()


def test_files_of_a_script_come_without_links_and_begun_checkpoints(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    (volume / "run" / "deep").mkdir(parents=True)
    (volume / "run" / "deep" / "w.bin").write_bytes(b"w")
    (volume / "best.pt").write_bytes(b"best")
    (volume / "latest").symlink_to("/etc/passwd")
    got = fetched(volume, tmp_path / "all")
    assert files(tmp_path / "all") == {"best.pt": b"best", "run/deep/w.bin": b"w"}
    assert got.sentence.endswith("all: 2 files, 5 bytes; 1 link left out")
    fetched(volume, tmp_path / "some", path="run/deep")
    assert files(tmp_path / "some") == {"w.bin": b"w"}
    fetched(volume, tmp_path / "one", path="best.pt")
    assert files(tmp_path / "one") == {"best.pt": b"best"}
    with pytest.raises(PullError, match="is not empty"):
        fetched(volume, tmp_path / "all")
    assert names(tmp_path) == ["all", "one", "some", "volume"]


@pytest.mark.parametrize(
    ("commits", "step", "want"),
    [
        pytest.param({NAME: record(), "step-9.g1-a": record()}, None, NAME, id="a later generation comes first"),
        pytest.param({NAME: record(), "step-9.g2-a": None}, None, NAME, id="one that is not complete does not count"),
        pytest.param({}, None, None, id="none: the script's own files"),
        pytest.param(
            {NAME: record()},
            7,
            "--step (7) is the step of no complete checkpoint of the job train. Give one of 8.",
            id="no step",
        ),
        pytest.param({}, 7, "--step (7) goes with checkpoints of the library", id="no step of a script"),
        pytest.param({NAME: None}, None, "has not completed a checkpoint yet", id="begun"),
        pytest.param({NAME: "{"}, None, f"{NAME}: it is no record", id="damaged"),
        pytest.param(
            {NAME: '{"jobUID": "u1", "files": {"../a": {"size": 1, "sha256": ""}}}'},
            None,
            "outside of the checkpoint",
            id="leads out",
        ),
        pytest.param(
            {NAME: record("u2")},
            None,
            f"1 checkpoint of other jobs, and none of train. To fetch one all the same give --path {NAME}.",
            id="another job's",
        ),
    ],
)
def test_choice_of_a_checkpoint(commits: dict[str, str | None], step: int | None, want: str | None) -> None:
    if want in (None, NAME):
        found = choose(JOB, Volume("mine"), commits, step)
        assert (found and found.name) == want
        return
    with pytest.raises(PullError) as refused:
        choose(JOB, Volume("mine"), commits, step)
    assert want in str(refused.value)


def tar(*members: tuple[str, bytes] | tarfile.TarInfo) -> io.BytesIO:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for one in members:
            if isinstance(one, tarfile.TarInfo):
                archive.addfile(one)
                continue
            member = tarfile.TarInfo(one[0])
            member.size = len(one[1])
            archive.addfile(member, io.BytesIO(one[1]))
    return io.BytesIO(out.getvalue())


def special(kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo("latest")
    member.type, member.linkname = kind, "/etc/passwd"
    return member


@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        (tar(("../x", b"")), "leads out of the directory"),
        (tar(("/etc/x", b"")), "leads out of the directory"),
        (tar(("a/../../x", b"")), "leads out of the directory"),
        (tar(special(tarfile.SYMTYPE)), "is no plain file"),
        (tar(special(tarfile.LNKTYPE)), "is no plain file"),
        (tar(special(tarfile.FIFOTYPE)), "is no plain file"),
        (tar(("a", b"1"), ("a", b"2")), "came twice"),
        (io.BytesIO(tar(("a", b"x" * 5000)).getvalue()[:3000]), "ended too early or is no tar"),
        (io.BytesIO(b""), "ended too early or is no tar"),
    ],
    ids=["up", "root", "up later", "link", "hard link", "pipe", "twice", "half", "nothing"],
)
def test_tar_that_is_not_plain_files_is_refused(tmp_path: Path, sent: io.BytesIO, sentence: str) -> None:
    into = tmp_path / "a" / "b"
    into.mkdir(parents=True)
    with pytest.raises(PullError) as refused:
        received.receive(sent, into, None)
    assert sentence in str(refused.value)
    assert names(tmp_path / "a") == ["b"]


def test_mark_is_compared_with_the_bytes(tmp_path: Path) -> None:
    with pytest.raises(PullError, match="SHA-256 differs"):
        received.receive(tar(("a", b"x")), tmp_path, {"a": Mark(1, hashlib.sha256(b"y").hexdigest())})


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (
            "raise PermissionError(13, 'Permission denied', '/checkpoint/a')",
            "Give the user id that wrote it with --user.",
        ),
        (
            "import sys; sys.exit('error: pods \"x\" is forbidden')",
            'The pod could not be read: pods "x" is forbidden. Try again.',
        ),
        ("print('ready')", "The pod did not list its files."),
    ],
    ids=["another user's files", "exec is refused", "another python3"],
)
def test_failure_in_the_pod_is_one_sentence(tmp_path: Path, code: str, sentence: str) -> None:
    pod = Pod([sys.executable, "-I", "-c", code], str(tmp_path))
    with pytest.raises(PullError) as refused:
        pod.listed("")
    assert sentence in str(refused.value)
    assert "Traceback" not in str(refused.value)
    if "list" not in sentence:
        with pytest.raises(PullError) as refused:
            pod.receive("", tmp_path, None)
        assert sentence in str(refused.value), "the cause, and not that the tar ended too early"


def test_pod_that_sends_nothing_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "STALL_S", 0.1)
    pod = Pod([sys.executable, "-I", "-c", "import time; time.sleep(60)"], str(tmp_path))
    with pytest.raises(PullError, match="sent nothing for"):
        pod.listed("")


@pytest.mark.parametrize("path", ["/etc", "../x", "a/../../x", "."])
def test_path_stays_below_the_checkpoints(path: str) -> None:
    with pytest.raises(ArgumentError, match="is not below the job's checkpoint directory"):
        pull.check(Path("into"), pull.Wanted(path=path))

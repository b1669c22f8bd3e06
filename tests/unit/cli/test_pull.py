"""`regroup checkpoint pull` and `export` of a job: what is refused before a cluster is asked."""

from __future__ import annotations

from importlib import util
from pathlib import Path

import pytest

from regroup_cli.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["pull", "train", "file"], "DIR (file) is no directory. Name another one."),
        (["pull", "train", "a/b/c"], "DIR (a/b/c) is in no directory"),
        (["pull", "train", "into", "--path=../x"], "--path (../x) is not below the job's checkpoint directory."),
        (["pull", "train", "into", "--user=0"], "--user (0) is not above 0"),
        (["export", "train", "--to=file"], "--to (file) exists. Name another file"),
        (["export", "train", "--to=none/model"], "--to (none/model) is in no directory"),
        (
            ["export", "train", "--to=m"],
            "train is no directory here, and no cluster can be asked for a job. kubectl is not on",
        ),
        (["export", "./train", "--to=m"], "DIR (train) is not a directory"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_wrong_use_is_one_sentence(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    Path("file").touch()
    assert main(["checkpoint", *arguments]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert sentence in said.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_export_of_a_job_without_torch_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(util, "find_spec", lambda _: None)
    assert main(["checkpoint", "export", "train", "--to=model.safetensors"]) == 2
    assert "Install regroup-training with the extra trainer" in capsys.readouterr().err

"""`regroup submit`: what is refused before a cluster is asked, and what clusters answer that cannot take a job."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from regroup_cli.__main__ import main

FAKE = Path(__file__).parents[1] / "client" / "fake_kubectl.py"
JOBS = "/apis/regroup.dev/v1alpha1/namespaces/team-a/distributedtrainingjobs/train"
HERE: tuple[str, ...] = ("submit", "train.py", "--image", "torch")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hi')\n")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["submit", "train.py"], "--image is missing. Give an image with python3"),
        (["submit", "gone.py", "--image=x"], "gone.py cannot be read (No such file or directory)"),
        (["submit", "train.sh", "--image=x"], "SCRIPT (train.sh) ends neither in .py nor in .yaml"),
        ([*HERE, "--env", "A"], "--env (A) has no value. Write NAME=VALUE."),
        ([*HERE, "--env", "RANK=1"], "RANK is reserved"),
        ([*HERE, "--data", "d:/regroup"], "/var/run/secrets/regroup are reserved"),
        ([*HERE, "--max", "0"], "--max (0) is less than 1"),
        ([*HERE, "--directory", "none"], "The directory none is not there"),
        ([*HERE, "--save", "none/job.yaml"], "--save (none/job.yaml) cannot be written"),
        (["submit", "gone.yaml"], "FILE (gone.yaml) cannot be read"),
        (["submit", "bad.yaml"], "FILE (bad.yaml, line 2) is no YAML"),
        (["submit", "list.yaml"], "has a document that is no object"),
        (["submit", "pod.yaml"], "document 1 (Pod) is no DistributedTrainingJob"),
        (["submit", "empty.yaml"], "empty.yaml has 0 DistributedTrainingJobs"),
        (["submit", "nameless.yaml"], "document 1 (DistributedTrainingJob) is no"),
        (["submit", "job.yaml", "--image", "x"], "--image does not go with a manifest (job.yaml)"),
        (["submit", "job.yaml", "--", "1"], "ARGS does not go with a manifest"),
        (["submit", "job.yaml", "-n", "other"], "--namespace (other) is not the one in job.yaml (team-a)"),
        (["submit", "job.yaml"], "spec is missing. Give at least spec.template."),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_wrong_use_is_one_sentence(
    directory: Path, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = "kind: DistributedTrainingJob\nmetadata: {name: train, namespace: team-a}\n"
    written = {"bad": "a: 1\n}", "list": "[1]", "pod": "kind: Pod", "empty": "", "job": job, "nameless": job[:28]}
    for name, text in written.items():
        (directory / f"{name}.yaml").write_text(text)
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert sentence in said.err


def test_environment_file_does_not_travel(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / ".env").write_text("KEY=secret\n")
    assert main([*HERE, "--directory", "."]) == 2
    said = capsys.readouterr()
    assert ".env may hold secrets" in said.err
    assert "secret\n" not in said.out


def test_missing_package_is_one_sentence(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / ".gitignore").write_text("data\n")
    monkeypatch.setitem(sys.modules, "pathspec", None)
    assert main([*HERE, "--directory", "."]) == 2
    assert capsys.readouterr().err.startswith("regroup: The package pathspec is missing. Install regroup-training")


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.py", "--image=x", "--workers", "2", "--", "--lr", "1"],
        ["--image=x", "--workers=2", "train.py", "--", "--lr", "1"],
        ["--workers", "2", "--image", "x", "--", "train.py"],
    ],
    ids=" ".join,
)
def test_arguments_after_two_hyphens_are_the_scripts(directory: Path, arguments: list[str]) -> None:
    if arguments[-1] == "train.py":
        with pytest.raises(SystemExit):  # the script stands before --
            main(["submit", *arguments])
        return
    assert main(["submit", "--save=job.yaml", *arguments]) == 0
    job = list(yaml.safe_load_all((directory / "job.yaml").read_text()))[-1]
    assert job["spec"]["replicas"] == 2
    assert job["spec"]["template"]["spec"]["containers"][0]["args"] == ["--lr", "1"]


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        pytest.param(
            {f"GET {JOBS}": [404, "404 page not found\n"]},
            "The cluster does not know DistributedTrainingJobs. Install Regroup's operator there first.",
            id="no operator",
        ),
        pytest.param(
            {f"GET {JOBS}": [403, json.dumps({"reason": "Forbidden", "message": "jobs is forbidden"})]},
            "jobs is forbidden",
            id="no rights",
        ),
        pytest.param({"refuses": "error: no configuration has been provided"}, "no configuration", id="no cluster"),
    ],
)
def test_cluster_that_cannot_take_a_job_is_one_sentence(
    directory: Path,
    answers: dict[str, object],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copy(FAKE, directory / "kubectl")
    (directory / "answers.json").write_text(json.dumps({"namespace": "team-a", **answers}))
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    assert main([*HERE, "--detach"]) == 1
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.err.count("\n") == 1
    assert not any(line.startswith('["PATCH') for line in _asked(directory))


def _asked(directory: Path) -> list[str]:
    asked = directory / "asked"
    return asked.read_text().splitlines() if asked.exists() else []

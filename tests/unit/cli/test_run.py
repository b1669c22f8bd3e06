"""What `regroup run` makes of its arguments: a job as one would write it, or one sentence."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from regroup_cli.__main__ import main, parser
from regroup_cli.local import FileStore, say
from regroup_cli.run import job_object
from regroup_operator.api import SpecError, parse_job


@pytest.mark.parametrize(
    ("arguments", "policy"),
    [
        pytest.param(["--workers", "3"], None, id="without bounds the size is fixed"),
        pytest.param(["--workers", "3", "--min", "2"], (2, 3), id="the most are those wanted"),
        pytest.param(["--workers", "3", "--max", "5"], (1, 5), id="the fewest are one"),
        pytest.param(["--workers", "3", "--min", "2", "--max", "5"], (2, 5), id="both bounds"),
    ],
)
def test_bounds_make_a_job_elastic(arguments: list[str], policy: tuple[int, int] | None) -> None:
    job = parse_job(job_object(parser().parse_args(["run", *arguments, "true"])))
    assert job.elastic == (policy is not None)
    assert (job.min_replicas, job.max_replicas) == (policy or (3, 3))


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        pytest.param(["--workers", "4"], (1, 4, 4), id="no groups"),
        pytest.param(["--workers", "4", "--workers-per-group", "2"], (2, 4, 4), id="fixed"),
        pytest.param(
            ["--workers", "4", "--workers-per-group", "2", "--max", "6"], (2, 2, 6), id="the fewest are one group"
        ),
    ],
)
def test_workers_form_groups(arguments: list[str], want: tuple[int, int, int]) -> None:
    job = parse_job(job_object(parser().parse_args(["run", *arguments, "true"])))
    assert (job.spec.workers_per_group, job.min_replicas, job.max_replicas) == want


@pytest.mark.parametrize(("arguments", "seconds"), [([], None), (["--hang-seconds", "60"], 60)])
def test_bound_of_a_hang_is_passed_on(arguments: list[str], seconds: int | None) -> None:
    job = parse_job(job_object(parser().parse_args(["run", *arguments, "true"])))
    assert job.spec.recovery.hang_seconds == seconds


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(["--max", "0"], "spec.elasticPolicy.maxReplicas (0)", id="no workers at most"),
        pytest.param(["--min", "0"], "spec.elasticPolicy.minReplicas (0)", id="no workers at least"),
        pytest.param(["--workers", "0"], "spec.replicas (0)", id="no workers"),
        pytest.param(["--min", "3", "--max", "2"], "minReplicas (3) is greater than", id="bounds the wrong way round"),
        pytest.param(["--workers", "1", "--min", "2"], "spec.replicas (1) is outside", id="fewer than the fewest"),
    ],
)
def test_numbers_that_cannot_be_are_refused_by_name(arguments: list[str], sentence: str) -> None:
    raw = job_object(parser().parse_args(["run", *arguments, "true"]))
    with pytest.raises(SpecError) as caught:
        parse_job(raw)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("option", ["--first-wait", "--join-quiet", "--first-step-seconds"])
@pytest.mark.parametrize("text", ["-5", "nan", "inf", "soon"])
def test_time_that_is_none_is_refused_by_name(option: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["run", f"{option}={text}", "true"])
    assert ended.value.code == 2
    assert f"argument {option}: " in capsys.readouterr().err


@pytest.mark.parametrize("script", ["no-such-command", "."], ids=["no command", "a directory"])
def test_script_that_cannot_be_started_is_refused_before_anything_runs(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", script]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"regroup: SCRIPT ({script}) is neither a file that ends in .py or .yaml nor a command")
    assert said.count("\n") == 1


def test_state_directory_that_cannot_be_written_to_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["run", "--state-dir", str(file), "true"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"regroup: --state-dir ({file}) cannot be written to (")
    assert said.count("\n") == 1


def ended(directory: Path, phase: str) -> None:
    raw = job_object(parser().parse_args(["run", "--workers", "2", "--max", "3", "true"]))
    FileStore(directory / "job.json").create(raw | {"status": {"phase": phase}})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        pytest.param(None, "holds no job. Give the directory that `regroup run` printed", id="no file"),
        pytest.param('{"spec": ', "cannot be read as a job", id="a file that is cut off"),
    ],
)
@pytest.mark.parametrize("command", [["status"], ["scale", "2"]], ids=["status", "scale"])
def test_directory_without_a_job_is_one_sentence(
    tmp_path: Path, text: str | None, sentence: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "job.json").write_text(text)
    assert main([command[0], str(tmp_path), *command[1:]]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


def test_job_that_has_ended_is_not_resized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(tmp_path, "Succeeded")
    assert main(["scale", str(tmp_path), "3"]) == 2
    assert "has ended (Succeeded): it cannot be resized" in capsys.readouterr().err
    assert json.loads((tmp_path / "job.json").read_text())["spec"]["replicas"] == 2
    ended(tmp_path, "Running")
    assert main(["scale", str(tmp_path), "3"]) == 0
    assert json.loads((tmp_path / "job.json").read_text())["spec"]["replicas"] == 3


def test_line_is_written_in_one_piece() -> None:
    """Workers write to the same terminal."""
    written: list[str] = []

    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    say("Running  2/2 ready", Pipe())
    assert written == ["regroup: Running  2/2 ready\n"]
